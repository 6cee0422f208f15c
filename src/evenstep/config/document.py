"""Document: a configuration file as data, with the line of each key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.config.toml import parse_toml
from evenstep.config.yaml import LineOf, parse_with_lines
from evenstep.core.plan_file import reading
from evenstep.errors import ConfigError

_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")


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
