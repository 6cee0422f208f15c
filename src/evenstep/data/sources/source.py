"""Sources: where samples come from.

A source with random access is indexed by item; one without is read from a start. What an item
holds is decoded into one sample, or a list of several. A sample is usually a mapping with
`input_ids`; streams ask nothing of it but its length.
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
"""Usually a mapping with `input_ids`; anything with a length will do."""
Source: TypeAlias = "SampleSource | SequentialSource"


@runtime_checkable
class SampleSource(Protocol):
    """Items by number, in any order. The same number gives the same item at any time, in any
    process or thread. A `list` is several samples; anything else is one."""

    @property
    def fingerprint(self) -> str:
        """Changes when the items or their order do; cheap, so perhaps judged by a part of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> Sample: ...


@runtime_checkable
class MeasuredSource(SampleSource, Protocol):
    """A source whose every item is one sample of a length that is known without reading it."""

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items, as int64."""


@runtime_checkable
class SequentialSource(Protocol):
    """Items one after the other, perhaps without a known end. Opening gives raw items, cheaply;
    `decode` turns one into samples, so that what another shard takes is never decoded."""

    @property
    def fingerprint(self) -> str:
        """Changes when the items or their order do."""

    def open(self, start: int, epoch: int) -> Iterator[Any]:
        """The raw items from number `start` on."""

    def decode(self, item: Any) -> Sample:
        """The sample, or a list of samples, of one raw item."""


def has_random_access(source: Source) -> TypeGuard[SampleSource]:
    """Whether items can be read by number."""
    return hasattr(source, "__getitem__")


def check_source(source: object) -> None:
    """Refuse what no stream can read, and say what makes a source of it."""
    if not (_has(source, *_BY_NUMBER) or _has(source, *_IN_ORDER)):
        raise _no_source(source, _WRAPPERS[_kind(source)])


def check_measured(source: object) -> None:
    """Refuse what steps cannot be planned over, and say what makes a source of known lengths."""
    by_number = _has(source, *_BY_NUMBER)
    if by_number and _has(source, "lengths_of"):
        return
    if not (by_number or _has(source, *_IN_ORDER)):
        raise _no_source(source, (_WRAPPERS | _MEASURED_WRAPPERS)[_kind(source)])
    measured = f", or give its lengths: {_MEASURED}" if by_number else ""
    raise ConfigError(
        f"a {type(source).__name__} does not know the lengths of its samples, so no step could be "
        f"planned before they are read. Read it with a PooledStream{measured}."
    )


_BY_NUMBER = ("fingerprint", "__len__", "__getitem__")
_IN_ORDER = ("fingerprint", "open", "decode")
_MEASURED = "MeasuredMapped(dataset, lengths=...) of evenstep.data"
_MAPPED = "Mapped(dataset) of evenstep.data"
_IN_MEMORY = "Wrap it: InMemory(samples) of evenstep.data."
_WRAPPERS = {
    "samples": _IN_MEMORY,
    "lengths": _IN_MEMORY,
    "dataset": f"Wrap it: {_MAPPED}.",
    "datasets": f"Choose one of its values, and wrap that: {_MAPPED}.",
    "items": "Wrap it: Iterated(items) of evenstep.data.",
    "path": "Open it: Jsonl of evenstep.data, ParquetText of evenstep.data or "
    "TokenFile of evenstep.data.",
    "other": "Pass a list of samples as InMemory(samples) of evenstep.data, a dataset as "
    f"{_MAPPED}.",
}
"""What makes a source of each kind of thing."""
_MEASURED_WRAPPERS = {
    "lengths": "Wrap it: Lengths(np.asarray(lengths)) of evenstep.data.",
    "dataset": f"Wrap it: {_MEASURED}; where lengths are not known, {_MAPPED}, and read that with "
    "a PooledStream.",
    "datasets": f"Choose one of its values, and wrap that: {_MEASURED}.",
    "items": "Wrap it: Iterated(items) of evenstep.data, and read that with a "
    "PooledStream, as lengths are not known ahead.",
    "path": "Open it: TokenFile of evenstep.data; or Jsonl of evenstep.data or "
    "ParquetText of evenstep.data, and read that with a PooledStream.",
    "other": "Pass a list of samples as InMemory(samples) of evenstep.data, a dataset as "
    f"{_MEASURED}.",
}
"""Where lengths have to be known, what differs."""


def _kind(value: object) -> str:
    """What kind of thing was passed instead of a source."""
    if isinstance(value, (str, bytes, PathLike)):
        return "path"
    if isinstance(value, Mapping):
        return "datasets"
    if isinstance(value, (list, tuple, np.ndarray)):
        numbers = np.ndim(value) == 1 if isinstance(value, np.ndarray) else _begins_with_int(value)
        return "lengths" if numbers else "samples"
    # Those of torch may have a length, and all have items by number, which raise.
    in_order = any(base.__name__ == "IterableDataset" for base in type(value).__mro__)
    if not in_order and _has(value, "__len__", "__getitem__"):
        return "dataset"
    return "items" if isinstance(value, Iterable) or callable(value) else "other"


def _begins_with_int(values: list[Any] | tuple[Any, ...]) -> bool:
    return isinstance(next(iter(values), None), (int, np.integer))


def _has(value: object, *names: str) -> bool:
    """Whether it has all of these. Properties are not read: a fingerprint may take its time."""
    missing = object()
    return all(
        getattr_static(value, name, missing) is not missing or hasattr(value, name)
        for name in names
    )


def _no_source(value: object, remedy: str) -> ConfigError:
    return ConfigError(
        f"a {type(value).__name__} is no source, so a stream could neither read samples from it "
        f"nor know it again on resume. {remedy}"
    )


def check_items(items: IntArray, count: int) -> None:
    """Refuse numbers of items that a source of `count` does not have; -1 is not its last."""
    if len(items) and (np.min(items) < 0 or np.max(items) >= count):
        raise IndexError(f"items {np.min(items)} to {np.max(items)} of {count}")


def read_samples(source: Source, number: int, raw: Any = None) -> list[tuple[int, Sample]]:
    """(sample number, sample) for each sample of one item; whatever goes wrong names the item.

    `raw` is the item itself where the source is sequential. A lost file is no sample's fault.
    """
    try:
        if has_random_access(source):
            found = source[number]
        else:
            found = cast("SequentialSource", source).decode(raw)
    except (SampleError, FileError):
        raise
    except Exception as error:
        # StopIteration among them: a fault inside a sample is not the end of the data.
        raise unreadable(number, error) from error
    if not isinstance(found, list):
        return [(number, found)]
    return [(sample_number(number, part), sample) for part, sample in enumerate(found)]


def unreadable(sample: int, error: BaseException) -> SampleError:
    """The error for a sample that raised `error`."""
    return SampleError(
        f"sample {sample_name(sample)} cannot be read ({type(error).__name__}: {error}), so the "
        f"stream stops here. Repair it, or leave such samples out with on_error='skip'."
    )


def length_of(sample: Sample) -> int:
    """The number of tokens of a sample: of its `input_ids`, or of itself.

    >>> length_of({"input_ids": [5, 6, 7]}), length_of([1, 2])
    (3, 2)
    """
    tokens: Sized = sample["input_ids"] if isinstance(sample, (dict, Mapping)) else sample
    return len(tokens)
