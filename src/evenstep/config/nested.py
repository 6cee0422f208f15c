"""Nested data: mappings of mappings, and values by their dotted paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def has(data: Any, path: Sequence[str]) -> bool:
    """Whether there is a value at `path`."""
    for key in path:
        if not isinstance(data, Mapping) or key not in data:
            return False
        data = data[key]
    return True


def merged(base: Any, over: Any) -> Any:
    """`over` merged into `base`, mapping by mapping. Parts that only one of them has are shared.

    >>> merged({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": 4})
    {'a': {'x': 1, 'y': 3}, 'b': 4}
    """
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    if over.get("_override_") is True:  # NeMo-RL's mark: replace instead of merging
        return {key: value for key, value in over.items() if key != "_override_"}
    result = dict(base)
    for key, value in over.items():
        result[key] = merged(base[key], value) if key in base else value
    return result


def nested(path: Sequence[str], value: Any) -> Any:
    """The value below a path.

    >>> nested(("a", "b"), 3)
    {'a': {'b': 3}}
    """
    for key in reversed(path):
        value = {key: value}
    return value


def difference(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """What must be merged into `base` to get `over`. Keys that `over` lacks are left out.

    >>> difference({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"x": 1, "y": 5}, "b": 3})
    {'a': {'y': 5}}
    """
    result: dict[str, Any] = {}
    for key, value in over.items():
        there = base.get(key)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            inner = difference(there, value)
            if inner:
                result[key] = inner
        elif key not in base or there != value:
            result[key] = value
    return result


def leaves(data: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values of nested data by their dotted paths; an empty mapping is a value.

    >>> leaves({"layout": {"max_tokens": 8}, "seed": 0})
    {'layout.max_tokens': 8, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for key, value in data.items():
        path = (*prefix, str(key))
        if isinstance(value, Mapping) and value:
            found |= leaves(value, path)
        else:
            found[".".join(path)] = value
    return found


def unflattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `leaves`."""
    result: dict[str, Any] = {}
    for path, value in values.items():
        result = merged(result, nested(path.split("."), value))
    return result
