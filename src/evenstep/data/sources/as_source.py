"""as_source: what users pass where a source is expected -> a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import getattr_static
from os import PathLike
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from evenstep.data.sources.files import refuse_empty
from evenstep.data.sources.iterated import Iterated
from evenstep.data.sources.jsonl import Jsonl
from evenstep.data.sources.mapped import Mapped, MeasuredMapped
from evenstep.data.sources.memory import InMemory
from evenstep.data.sources.source import MeasuredSource, Source
from evenstep.errors import ConfigError


def as_source(value: object) -> Source:
    """A source as it is; a list of samples, a map-style or an iterable dataset in its wrapper.

    Datasets are those of torch and of Hugging Face, or anything with `__len__` and `__getitem__`.
    The error for anything else names the wrapper to use.

    >>> as_source([{"input_ids": [5, 6]}])[0]
    {'input_ids': [5, 6]}
    """
    if is_source(value):
        return cast("Source", value)
    kind = _kind(value)
    if kind not in _WRAPPED:
        raise _not_a_source(value, _REMEDIES[kind])
    return _WRAPPED[kind](value)


def as_measured(value: object, lengths: ArrayLike | None = None) -> MeasuredSource:
    """The same for a source that knows its lengths.

    The `lengths` of a dataset, or of a `Jsonl` whose rows have `input_ids`, are measured on first
    use, if they are not given: from the column `input_ids` of a Hugging Face dataset, else by
    reading every item once.

    >>> as_measured([{"input_ids": [5, 6]}]).lengths_of(np.arange(1)).tolist()
    [2]
    """
    if is_source(value):
        if _has(value, *_BY_INDEX, "lengths_of"):
            return cast("MeasuredSource", value)
        refuse_empty(value)
        if isinstance(value, Jsonl) and value.has_tokens:
            return MeasuredMapped(cast("Any", value))
        by_index = ", or measure it with MeasuredMapped(source)" if _has(value, *_BY_INDEX) else ""
        raise ConfigError(
            f"expected a source with known lengths, got {type(value).__name__}. Read it with a "
            f"PooledStream{by_index}."
        )
    kind = _kind(value)
    if kind == "samples":
        return InMemory(cast("Any", value))
    if kind == "dataset":
        return MeasuredMapped(cast("Any", value), lengths=lengths)
    raise _not_a_source(value, _MEASURED_REMEDIES.get(kind, _REMEDIES.get(kind, "")))


def is_source(value: object) -> bool:
    """Whether `value` is a source itself. Nothing is read."""
    return _has(value, *_BY_INDEX) or _has(value, *_IN_ORDER)


_BY_INDEX = ("fingerprint", "__len__", "__getitem__")
_IN_ORDER = ("fingerprint", "open", "decode")
_WRAPPED: dict[str, Callable[[Any], Source]] = {
    "samples": InMemory,
    "dataset": Mapped,
    "iterable dataset": Iterated,
}
"""What is wrapped, and in what."""
_REMEDIES = {
    "lengths": "Wrap a list of samples, mappings with input_ids, with InMemory(samples)",
    "texts": "Turn text into tokens with Mapped(texts, transform=...), or open files with "
    "Jsonl(paths), ParquetText(paths) or TokenFile(paths)",
    "datasets": "Pass one of its values",
    "items": "Wrap it with Iterated(items)",
    "path": "Open it with Jsonl(path), ParquetText(path) or TokenFile(path)",
    "other": "Pass a list of samples, a dataset or a source",
}
"""The remedy for each kind of argument that is neither a source nor wrapped."""
_MEASURED_REMEDIES = {
    "lengths": "Wrap it with Lengths(np.asarray(lengths))",
    "texts": "Turn text into tokens with MeasuredMapped(texts, transform=...), or open files with "
    "TokenFile(paths)",
    "items": "Use a PooledStream with Iterated(items)",
    "iterable dataset": "It has no known lengths: use a PooledStream",
    "path": "Open it with TokenFile(path), or Jsonl(path) if its rows have input_ids; or use a "
    "PooledStream with Jsonl(path) or ParquetText(path)",
}
"""The remedies that differ if lengths must be known."""


def _kind(value: object) -> str:
    """The kind of an argument that is not a source."""
    if isinstance(value, (str, bytes, PathLike)):
        return "path"
    if isinstance(value, Mapping):
        return "datasets"
    if isinstance(value, np.ndarray):
        return "lengths" if value.ndim == 1 and value.dtype.kind in "biuf" else "samples"
    if isinstance(value, (list, tuple)):
        first = next(iter(value), None)
        if isinstance(first, (str, bytes, PathLike)):
            return "texts"
        return "lengths" if isinstance(first, (int, np.integer)) else "samples"
    # A torch IterableDataset may have __len__, and has a __getitem__ that raises.
    if any(base.__name__ == "IterableDataset" for base in type(value).__mro__):
        return "iterable dataset"
    if _has(value, "__len__", "__getitem__"):
        return "dataset"
    return "items" if isinstance(value, Iterable) or callable(value) else "other"


def _has(value: object, *names: str) -> bool:
    """Whether `value` has all of these attributes. Properties are not read: they may be slow."""
    missing = object()
    return all(
        getattr_static(value, name, missing) is not missing or hasattr(value, name)
        for name in names
    )


def _not_a_source(value: object, remedy: str) -> ConfigError:
    return ConfigError(
        f"expected a source, got {type(value).__name__}. {remedy} (from evenstep.data)."
    )
