"""Tree: configuration files merged into one, with the place that each value comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any, TypeAlias

from evenstep.config.document import Document

Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A document whose keys are merged below `at`."""

    document: Document
    at: Path = ()


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """The merged data and its layers; later layers win. `groups` chose files of Hydra."""

    data: dict[str, Any]
    layers: tuple[Layer, ...]
    groups: frozenset[str] = frozenset()

    def overridden(self, values: Mapping[Path, Any]) -> Tree:
        """The tree with values of the command line, which win; their place is `--set`."""
        data: Any = {}
        for path, value in values.items():
            data = merged(data, nested(path, value))
        layer = Layer(Document(File("--set"), data, lambda _: None))
        return Tree(merged(self.data, data), (*self.layers, layer), self.groups)

    def place(self, path: Sequence[str]) -> str:
        """File and line of the value at `path`."""
        for layer in reversed(self.layers):
            size = len(layer.at)
            if tuple(path[:size]) == layer.at and has(layer.document.data, path[size:]):
                return layer.document.place(path[size:])
        return self.layers[-1].document.path.name if self.layers else ""


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
