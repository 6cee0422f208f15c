"""Document: a configuration file as data, with the line of each key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evenstep.config.yaml import LineOf, parse_with_lines
from evenstep.core.plan_file import reading
from evenstep.core.text import shorten
from evenstep.errors import ConfigError

_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_TABLE = re.compile(rf"\s*\[\[?\s*({_DOTTED})\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=")
_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")


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


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """The mapping in a YAML or TOML file; `package` is what Hydra's `# @package` says."""

    path: Path
    data: dict[str, Any]
    line_of: LineOf
    package: str = ""

    def place(self, keys: Sequence[str]) -> str:
        """File and line of a key, or of the nearest key that encloses it: "a.yaml:3"."""
        for size in range(len(keys), 0, -1):
            line = self.line_of(keys[:size])
            if line is not None:
                return f"{self.path.name}:{line}"
        return self.path.name


def read_document(path: Path, merges: bool = False) -> Document:
    """Read a file: TOML if its suffix is .toml, else YAML. An empty file is an empty mapping."""
    try:
        with reading(path, "Check the path of the configuration."):
            text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text. Give a YAML or TOML file.") from None
    if path.suffix.lower() == ".toml":
        return Document(path, *parse_toml(text, str(path)))
    data, line_of = parse_with_lines(text, str(path), merges)
    data = {} if data is None else data
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(
            f"{path} holds {type(data).__name__} data, expected keys that are words. "
            f"Write for example `layout: {{max_tokens: 8192}}`."
        )
    header = _PACKAGE.match(text)
    return Document(path, data, line_of, header[1] if header else "")
