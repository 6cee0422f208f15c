"""Write settings as native YAML, with the origin of each value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from evenstep.config.native import native_data
from evenstep.config.settings import Settings

_PLAIN = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = frozenset({"true", "false", "null"})


def native_yaml(
    settings: Settings, origins: Mapping[str, str] | None = None, head: tuple[str, ...] = ()
) -> str:
    """The YAML that loads as these settings; lines of `head` and origins are comments.

    >>> from evenstep import Packed, Recipe
    >>> print(native_yaml(Settings(recipe=Recipe(layout=Packed(max_tokens=8192)))), end="")
    layout:
      kind: packed
      max_tokens: 8192
    """
    lines = [f"# {' '.join(line.split())}" for line in head]
    lines += _lines(native_data(settings), origins or {}, ())
    return "\n".join(lines) + "\n"


def _lines(data: Mapping[str, Any], origins: Mapping[str, str], path: tuple[str, ...]) -> list[str]:
    found = []
    indent = "  " * len(path)
    for key, value in data.items():
        below = (*path, str(key))
        if isinstance(value, Mapping) and value:
            found += [f"{indent}{_scalar(key)}:", *_lines(value, origins, below)]
            continue
        origin = origins.get(".".join(below), "")
        comment = f"  # {' '.join(origin.split())}" if origin and origin != "default" else ""
        found.append(f"{indent}{_scalar(key)}: {_scalar(value)}{comment}")
    return found


def _scalar(value: Any) -> str:
    """A value on one line; JSON is YAML, and plain words need no quotes."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value not in _RESERVED:
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return json.dumps(value)
