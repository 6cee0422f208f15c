"""Parse TOML, with the line of each key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import partial
from typing import Any

from evenstep.config.yaml import LineOf
from evenstep.core.text import shorten
from evenstep.errors import ConfigError

_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_TABLE = re.compile(rf"\s*\[\[?\s*({_DOTTED})\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=")


def parse_toml(text: str, source: str) -> tuple[dict[str, Any], LineOf]:
    """Parse a TOML file, and a function from the path of a key to its line, counted from 1.

    >>> data, line_of = parse_toml("[steps]\\nsamples = 2", "a file")
    >>> data, line_of(("steps", "samples"))
    ({'steps': {'samples': 2}}, 2)
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{source} is not valid TOML ({shorten(str(error), 120)}). Write keys as `key = value`."
        ) from None
    return data, partial(_line, text)


def _line(text: str, path: Sequence[str]) -> int | None:
    """The line that sets `path` or opens its table."""
    wanted = tuple(path)
    table: tuple[str, ...] = ()
    inside = ""
    for number, line in enumerate(text.splitlines(), 1):
        if inside:  # a string of several lines
            inside = "" if inside in line else inside
            continue
        found: tuple[str, ...] | None = None
        if opened := _TABLE.match(line):
            found = table = _parts(opened[1])
        elif assigned := _KEY.match(line):
            found = (*table, *_parts(assigned[1]))
            value = line[assigned.end() :]
            quote = next((mark for mark in ('"""', "'''") if value.count(mark) == 1), "")
            inside = quote
        if found is not None and found[: len(wanted)] == wanted:
            return number
    return None


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_PART, dotted))
