"""Parse YAML 1.2. Duplicate keys are errors, and so are merge keys (`<<`) unless allowed.

true, True, TRUE            booleans; yes, no, on and off are text
10000, 10_000, 1e4          numbers; 0x10 and 0o17 too
010000, 0b1, 2:30:00        text, because YAML 1.1 reads 4096, 1 and 9000
2026-01-01                  text
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import yaml

from evenstep.core.text import shorten
from evenstep.errors import ConfigError

LineOf: TypeAlias = Callable[[Sequence[str]], int | None]
"""The path of a key -> its line, None if there is no such key."""

_MOST_DIGITS = 100

_DIGITS = "[0-9]+(?:_[0-9]+)*"
_INT = re.compile(r"^(?:[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    rf"^(?:[-+]?(?:(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][-+]?[0-9]+)?"
    rf"|{_DIGITS}[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$"
)
_BOOL = re.compile("^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile("^(?:~|null|Null|NULL|)$")
_MERGE = re.compile("^<<$")


def is_number(text: str) -> bool:
    """Whether YAML reads this text as a number when it is not quoted."""
    return bool(_INT.match(text) or _FLOAT.match(text))


class _MergeKeyError(yaml.MarkedYAMLError):
    """`<<: *base`, which YAML 1.2 does not have."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 that refuses merge keys and duplicate keys."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (without the resolvers of YAML 1.1)
    merges = False

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                if self.merges:
                    continue
                raise _MergeKeyError(problem_mark=key_node.start_mark)
            key = str(self.construct_object(key_node, deep=True))
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{shorten(key)} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > _MOST_DIGITS:
            raise yaml.MarkedYAMLError(
                problem=f"a number of {len(node.value)} digits", problem_mark=node.start_mark
            )
        return super().construct_scalar(node)

    # With a tag such as !!int the value can be any text; a ValueError means that it does not fit.

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self._matched(node, _INT)
        return int(text.replace("_", ""), 0)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        text = self._matched(node, _FLOAT, _INT).replace("_", "").lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    def construct_yaml_bool(self, node: yaml.ScalarNode) -> bool:
        return self._matched(node, _BOOL).lower() == "true"

    def _matched(self, node: yaml.ScalarNode, *patterns: re.Pattern[str]) -> str:
        text = str(self.construct_scalar(node))
        if not any(pattern.match(text) for pattern in patterns):
            raise ValueError(text)
        return text


for _tag, _pattern, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", _MERGE, ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)
for _tag, _construct in (
    ("int", _Loader.construct_yaml_int),
    ("float", _Loader.construct_yaml_float),
    ("bool", _Loader.construct_yaml_bool),
):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct)


class _MergingLoader(_Loader):
    """The same with merge keys, which files of other systems may have."""

    merges = True


def parse_yaml(text: str, source: str) -> Any:
    """Parse one YAML value; error messages name `source`.

    >>> parse_yaml("{samples: 128, tokens: 4e6}", "steps")
    {'samples': 128, 'tokens': 4000000.0}
    """
    return parse_with_lines(text, source)[0]


def parse_with_lines(text: str, source: str, merges: bool = False) -> tuple[Any, LineOf]:
    """Parse one YAML value, and a function from the path of a key to its line, counted from 1.

    >>> data, line_of = parse_with_lines("{seed: 1, steps: {samples: 2}}", "a file")
    >>> line_of(("steps", "samples")), line_of(("steps", "tokens"))
    (1, None)
    """
    try:
        loader = (_MergingLoader if merges else _Loader)(text)
        try:
            node = loader.get_single_node()
            data = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
        return data, partial(_line, node)
    except _MergeKeyError as error:
        raise ConfigError(
            f"{source} merges keys with <<{_where(error)}, which is not supported. "
            f"Write the merged keys out."
        ) from None
    # A tag that does not fit its value can raise any exception: `!!bool maybe` is a KeyError.
    except Exception as error:
        problem = "a value does not fit its tag"
        if isinstance(error, yaml.YAMLError | RecursionError):
            problem = getattr(error, "problem", None) or str(error)
        problem = shorten(problem.splitlines()[0], 120)
        raise ConfigError(
            f"{source} is not valid YAML{_where(error)} ({problem}). Write keys as `key: value`."
        ) from None


def _line(node: yaml.Node | None, path: Sequence[str]) -> int | None:
    """The line of the key at `path`. Merged keys stand before the mapping's own."""
    line = None
    for key in path:
        if not isinstance(node, yaml.MappingNode):
            return None
        found = [pair for pair in node.value if pair[0].value == key]
        if not found:
            return None
        line, node = found[-1][0].start_mark.line + 1, found[-1][1]
    return line


def _where(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
