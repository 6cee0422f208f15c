"""YAML as people expect it: 1e6 is a number, a key given twice is a fault, no key is merged."""

from __future__ import annotations

import re
from typing import Any

import yaml

from evenstep.core.glimpse import cut
from evenstep.errors import ConfigError

_MOST_DIGITS = 100


class _MergeKeyError(yaml.MarkedYAMLError):
    """`<<: *base`, which YAML 1.2 no longer has."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the floats of YAML 1.2, without its merge keys and silent duplicates."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise _MergeKeyError(problem_mark=key_node.start_mark)
            key = str(self.construct_object(key_node, deep=True))
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{cut(key)} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > _MOST_DIGITS:
            raise yaml.MarkedYAMLError(
                problem=f"a number of {len(node.value)} digits", problem_mark=node.start_mark
            )
        return super().construct_scalar(node)


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
    except _MergeKeyError as error:
        raise ConfigError(
            f"{source} merges keys with <<{_place(error)}, which is not read here, so nothing in "
            f"it was used. Write the merged keys out."
        ) from None
    # A tag that does not fit its value fails as it happens to: `!!bool maybe` is a KeyError.
    except Exception as error:
        said = "a value does not fit its tag"
        if isinstance(error, yaml.YAMLError | RecursionError):
            said = getattr(error, "problem", None) or str(error)
        problem, where = cut(said.splitlines()[0], 120), _place(error)
        raise ConfigError(
            f"{source} is not YAML{where} ({problem}), so nothing in it was used. "
            f"Correct it; keys are written as `key: value`."
        ) from None


def _place(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
