"""Sources: where samples come from.

A source with random access is indexed by item; one without is read from a start. What an item
holds is decoded into one sample, or a list of several. A sample is usually a mapping with
`input_ids`; streams ask nothing of it but its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Protocol, TypeAlias, TypeGuard, cast, runtime_checkable

import numpy as np

from evenstep.core.identity import sample_name, sample_number
from evenstep.core.ragged import IntArray
from evenstep.errors import FileError, SampleError

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
