"""YAML as people expect it: 1e6 is a number, and a key given twice is a fault."""

from __future__ import annotations

import re
from typing import Any

import yaml

from evenstep.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with the floats of YAML 1.2 and without silent duplicates."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(self.construct_object(key_node, deep=True))
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1, and so SafeLoader, reads 1e6 as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str, source: str) -> Any:
    """The value that `text` describes; `source` is what an error calls it.

    >>> parse_yaml("{samples: 128, tokens: 4e6}", "steps")
    {'samples': 128, 'tokens': 4000000.0}
    """
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"{source} is not YAML{where} ({problem}), so nothing in it was used. "
            f"Correct it; keys are written as `key: value`."
        ) from None
