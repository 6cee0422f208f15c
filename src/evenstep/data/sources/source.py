"""The protocols of a source, and how streams read one.

A source is indexed by item, or read in order from a start. An item is one sample, or a list of
several. A sample is usually a mapping with `input_ids`; streams need only its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from inspect import getattr_static
from os import PathLike
from typing import Any, Protocol, TypeAlias, TypeGuard, cast, runtime_checkable

import numpy as np

from evenstep.core.identity import sample_name, sample_number
from evenstep.core.ragged import IntArray
from evenstep.errors import ConfigError, FileError, SampleError

Sample: TypeAlias = Any
"""Usually a mapping with `input_ids`; anything that has a length is accepted."""
Source: TypeAlias = "SampleSource | SequentialSource"


@runtime_checkable
class SampleSource(Protocol):
    """Items by index, in any order. An index gives the same item at any time, in any process or
    thread. An item that is a `list` is several samples; anything else is one."""

    @property
    def fingerprint(self) -> str:
        """Changes when the items or their order change. Cheap, so it may cover only some items."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> Sample: ...


@runtime_checkable
class MeasuredSource(SampleSource, Protocol):
    """A source whose items are single samples, with lengths known without reading them."""

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items, as int64."""


@runtime_checkable
class SequentialSource(Protocol):
    """Items in order, possibly without a known end. `open` gives raw items, which is cheap;
    `decode` turns one into samples, so that items of other readers are never decoded."""

    @property
    def fingerprint(self) -> str:
        """Changes when the items or their order change."""

    def open(self, start: int, epoch: int) -> Iterator[Any]:
        """The raw items from index `start` on."""

    def decode(self, item: Any) -> Sample:
        """The sample, or list of samples, of one raw item."""


def has_random_access(source: Source) -> TypeGuard[SampleSource]:
    """Whether items can be read by index."""
    return hasattr(source, "__getitem__")


def check_source(source: object) -> None:
    """Raise unless `source` is a source; the error names the wrapper to use."""
    if not (_has(source, *_BY_INDEX) or _has(source, *_IN_ORDER)):
        raise _not_a_source(source, _WRAPPERS[_kind(source)])


def check_measured(source: object) -> None:
    """Raise unless `source` knows its lengths; the error names the wrapper to use."""
    by_index = _has(source, *_BY_INDEX)
    if by_index and _has(source, "lengths_of"):
        return
    if not (by_index or _has(source, *_IN_ORDER)):
        raise _not_a_source(source, (_WRAPPERS | _MEASURED_WRAPPERS)[_kind(source)])
    measured = f", or pass its lengths with {_MEASURED}" if by_index else ""
    raise ConfigError(
        f"expected a source with known lengths, got {type(source).__name__}. Read it with a "
        f"PooledStream{measured}."
    )


_BY_INDEX = ("fingerprint", "__len__", "__getitem__")
_IN_ORDER = ("fingerprint", "open", "decode")
_MEASURED = "MeasuredMapped(dataset, lengths=...)"
_MAPPED = "Mapped(dataset)"
_IN_MEMORY = "Wrap it with InMemory(samples)"
_WRAPPERS = {
    "samples": _IN_MEMORY,
    "lengths": _IN_MEMORY,
    "dataset": f"Wrap it with {_MAPPED}",
    "datasets": f"Wrap one of its values with {_MAPPED}",
    "items": "Wrap it with Iterated(items)",
    "path": "Open it with Jsonl(path), ParquetText(path) or TokenFile(path)",
    "other": f"Wrap a list of samples with InMemory(samples), a dataset with {_MAPPED}",
}
"""The remedy for each kind of argument that is not a source."""
_MEASURED_WRAPPERS = {
    "lengths": "Wrap it with Lengths(np.asarray(lengths))",
    "dataset": f"Wrap it with {_MEASURED}, or use a PooledStream with {_MAPPED}",
    "datasets": f"Wrap one of its values with {_MEASURED}",
    "items": "Use a PooledStream with Iterated(items)",
    "path": "Open it with TokenFile(path), or use a PooledStream with Jsonl(path) or "
    "ParquetText(path)",
    "other": f"Wrap a list of samples with InMemory(samples), a dataset with {_MEASURED}",
}
"""The remedies that differ if lengths must be known."""


def _kind(value: object) -> str:
    """The kind of an argument that is not a source."""
    if isinstance(value, (str, bytes, PathLike)):
        return "path"
    if isinstance(value, Mapping):
        return "datasets"
    if isinstance(value, (list, tuple, np.ndarray)):
        numbers = np.ndim(value) == 1 if isinstance(value, np.ndarray) else _begins_with_int(value)
        return "lengths" if numbers else "samples"
    # A torch IterableDataset may have __len__, and has a __getitem__ that raises.
    in_order = any(base.__name__ == "IterableDataset" for base in type(value).__mro__)
    if not in_order and _has(value, "__len__", "__getitem__"):
        return "dataset"
    return "items" if isinstance(value, Iterable) or callable(value) else "other"


def _begins_with_int(values: list[Any] | tuple[Any, ...]) -> bool:
    return isinstance(next(iter(values), None), (int, np.integer))


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


def check_items(items: IntArray, count: int) -> None:
    """Raise an IndexError unless all `items` are in [0, count). Negative indices are refused."""
    if len(items) and (np.min(items) < 0 or np.max(items) >= count):
        raise IndexError(f"items {np.min(items)} to {np.max(items)} of {count}")


def read_samples(source: Source, item: int, raw: Any = None) -> list[tuple[int, Sample]]:
    """(sample id, sample) of every sample of an item. Errors name the item.

    `raw` is the raw item of a sequential source. A `FileError` is raised as it is, because it
    does not concern one sample only.
    """
    try:
        if has_random_access(source):
            found = source[item]
        else:
            found = cast("SequentialSource", source).decode(raw)
    except (SampleError, FileError):
        raise
    except Exception as error:
        # This includes StopIteration, which would otherwise end the stream silently.
        raise unreadable(item, error) from error
    if not isinstance(found, list):
        return [(item, found)]
    return [(sample_number(item, part), sample) for part, sample in enumerate(found)]


def unreadable(sample_id: int, error: BaseException) -> SampleError:
    """The error for a sample that raised `error`."""
    return SampleError(
        f"sample {sample_name(sample_id)} cannot be read ({type(error).__name__}: {error}). "
        f"Repair it, or skip such samples with on_error='skip'."
    )


def length_of(sample: Sample) -> int:
    """The number of tokens of a sample: the length of its `input_ids`, or of the sample itself.

    >>> length_of({"input_ids": [5, 6, 7]}), length_of([1, 2])
    (3, 2)
    """
    tokens: Sized = sample["input_ids"] if isinstance(sample, (dict, Mapping)) else sample
    return len(tokens)
