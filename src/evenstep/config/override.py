"""Apply `key=value` overrides to plain data."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from evenstep.config.decode import DEFAULT_KIND
from evenstep.config.yaml import parse_yaml
from evenstep.core.layout import LAYOUTS
from evenstep.core.text import short_repr, shorten
from evenstep.errors import ConfigError

_KIND, _MODEL = ("layout", "kind"), ("cost", "model")


def overridden(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `data` with each `dotted.path=value` set, the value read as YAML.

    Changing `layout.kind` keeps the layout keys that both kinds have and drops the others. Setting
    `cost.model` drops the other keys of the cost, whose unit it changes.

    >>> overridden({"topology": {"dp": 2}}, ["topology.dp=8", "overflow=split"])
    {'topology': {'dp': 8}, 'overflow': 'split'}
    """
    result: dict[str, Any] = copy.deepcopy(dict(data))
    pairs = [parsed(override) for override in overrides]
    # These two come first, so that they do not drop keys set by the same call.
    for path, value in sorted(pairs, key=lambda pair: pair[0] not in (_KIND, _MODEL)):
        if path == _KIND:
            _change_kind(result, value)
        if path == _MODEL and isinstance(result.get("cost"), dict):
            result["cost"] = {}
        *parents, key = path
        inner = result
        for depth, parent in enumerate(parents, 1):
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                above = ".".join(path[:depth])
                raise ConfigError(
                    f"{shorten('.'.join(path))} cannot be set: {shorten(above)} is "
                    f"{short_repr(inner)} and has no keys. Set {shorten(above)} itself, or check "
                    f"the spelling."
                )
        inner[key] = value
    return result


def parsed(override: str) -> tuple[tuple[str, ...], Any]:
    """The path and the value of one override."""
    key, equals, text = override.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(
            f"an override must be of the form key=value, got {short_repr(override)}. "
            f"Write for example layout.max_tokens=8192."
        )
    return path, parse_yaml(text, f"the value of {shorten(key.strip())}")


def _change_kind(data: dict[str, Any], kind: object) -> None:
    layout = data.get("layout")
    if not isinstance(layout, dict) or kind not in LAYOUTS:
        return  # decoding reports the fault
    if layout.get("kind", DEFAULT_KIND) != kind:
        known = {field.name for field in dataclasses.fields(LAYOUTS[str(kind)])}
        data["layout"] = {name: value for name, value in layout.items() if name in known}
