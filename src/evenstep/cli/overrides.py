"""Plain options and `--set` -> overrides of a recipe, with numbers such as 16k."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from evenstep.cli.output import remark
from evenstep.config.override import parsed
from evenstep.core.text import short_repr, shorten
from evenstep.errors import ConfigError

_UNITS = {"k": 1 << 10, "m": 1 << 20}
_KEYS = {
    "--max-tokens": "layout.max_tokens",
    "--ranks": "topology.dp",
    "--samples-per-step": "steps.samples",
}


def number_of(text: str) -> int | None:
    """A whole number, possibly with k (1024) or m (1024²); None for anything else.

    >>> number_of("16k"), number_of("16384"), number_of("16kb")
    (16384, 16384, None)
    """
    found = re.fullmatch(r"([0-9]{1,18})([km]?)", text.strip(), re.ASCII | re.IGNORECASE)
    return None if found is None else int(found[1]) * _UNITS.get(found[2].lower(), 1)


def overrides_of(
    set_: Iterable[str] | None,
    *,
    max_tokens: str | None = None,
    ranks: str | None = None,
    samples_per_step: str | None = None,
) -> list[str]:
    """The overrides of a command line. Units are resolved, and a remark shows the number.

    >>> overrides_of(["overflow=split"], max_tokens="8192", ranks="4")
    ['overflow=split', 'layout.max_tokens=8192', 'topology.dp=4']
    """
    given = dict(zip(_KEYS, (max_tokens, ranks, samples_per_step), strict=True))
    found = [resolved(override) for override in set_ or ()]
    for option, text in given.items():
        if text is None:
            continue
        number = number_of(text)
        if number is None:
            raise ConfigError(
                f"{option} must be a whole number such as 16384 or 16k, got {short_repr(text)}."
            )
        _refuse_both(option, found)
        _show(option, text, number)
        found.append(f"{_KEYS[option]}={number}")
    return found


def resolved(override: str) -> str:
    """An override whose value has no unit.

    >>> resolved("steps.samples=512"), resolved("data.field='16k'")
    ('steps.samples=512', "data.field='16k'")
    """
    key, equals, text = override.partition("=")
    number = number_of(text)
    if number is None or text.strip().isdigit():
        return override
    _show(f"--set {shorten(key.strip())}", text, number)
    return f"{key}{equals}{number}"


def _show(what: str, text: str, number: int) -> None:
    if not text.strip().isdigit():
        remark(f"{what} {text.strip()} is {number:,}")


def _refuse_both(option: str, overrides: Iterable[str]) -> None:
    """Refuse a key that an option and `--set` both set."""
    key = tuple(_KEYS[option].split("."))
    for override in overrides:
        path, value = parsed(override)
        if path == key[: len(path)] and _has(value, key[len(path) :]):
            raise ConfigError(
                f"{option} and --set {shorten('.'.join(path))} both set {_KEYS[option]}. Remove "
                f"one of them."
            )


def _has(value: Any, path: tuple[str, ...]) -> bool:
    """Whether data has a value at a path: ({"max_tokens": 8}, ("max_tokens",)) -> True."""
    if not path:
        return True
    return isinstance(value, Mapping) and path[0] in value and _has(value[path[0]], path[1:])
