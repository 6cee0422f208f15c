"""Mapped: any dataset with a length and items by number, as a source."""

from __future__ import annotations

import hashlib
from functools import cached_property
from operator import index
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.ragged import IntArray, frozen
from evenstep.data.sources.source import Sample, check_items
from evenstep.data.sources.text import Transform
from evenstep.errors import InputError


class MapStyle(Protocol):
    """A torch `Dataset`, a Hugging Face `Dataset`, a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: Any, /) -> Any: ...


class Mapped:
    """A dataset whose lengths are not known ahead; `transform` turns its items into samples.

    The fingerprint is Hugging Face's own where there is one, else type and size: it does not
    notice another `transform`.

    >>> source = Mapped(["ab", "c"], transform=lambda text: {"input_ids": list(text.encode())})
    >>> len(source), source[1]
    (2, {'input_ids': [99]})
    """

    def __init__(self, dataset: MapStyle, *, transform: Transform | None = None) -> None:
        self.dataset = dataset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: int, /) -> Sample | list[Sample]:
        if not 0 <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        found = self.dataset[index(item)]
        return found if self.transform is None else self.transform(found)

    @property
    def fingerprint(self) -> str:
        """Cheap: nothing is read."""
        own = getattr(self.dataset, "_fingerprint", None)  # of a datasets.Dataset
        text = f"mapped {own or type(self.dataset).__qualname__} {len(self)}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class MeasuredMapped:
    """A dataset whose every item is one sample of known length.

    `lengths` are those of the samples that `transform` makes, one per item; or the name of the
    column of a Hugging Face dataset that holds them.

    >>> data = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    >>> source = MeasuredMapped(data, lengths=[3, 1])
    >>> source.lengths_of(np.array([1, 0])).tolist(), source[1]
    ([1, 3], {'input_ids': [8]})
    """

    def __init__(
        self, dataset: MapStyle, *, lengths: ArrayLike | str, transform: Transform | None = None
    ) -> None:
        self._source = Mapped(dataset, transform=transform)
        self._given = lengths

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, item: int, /) -> Sample:
        sample = self._source[item]
        if isinstance(sample, list):
            raise InputError(
                f"item {item} is a list, which stands for several samples, but was given one "
                f"length, so it does not fit its plan. Let transform return one mapping or array, "
                f"or leave lengths out and read it with a PooledStream."
            )
        return sample

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items, as they were given."""
        check_items(items, len(self))
        return self._lengths[items]

    @cached_property
    def fingerprint(self) -> str:
        """Judged by the dataset's and by all lengths."""
        digest = hashlib.blake2b(f"measured {self._source.fingerprint} ".encode(), digest_size=16)
        digest.update(self._lengths.astype("<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def _lengths(self) -> IntArray:
        lengths = np.asarray(
            self._column(self._given) if isinstance(self._given, str) else self._given
        )
        if lengths.shape != (len(self),):
            raise InputError(
                f"lengths have the shape {lengths.shape} but the dataset has {len(self)} items, so "
                f"they do not go together. Give one length per item."
            )
        if len(lengths) and lengths.dtype.kind not in "iu":
            raise InputError(
                f"lengths are {lengths.dtype}, not whole numbers, so nothing can be planned with "
                f"them. Give the number of tokens of every item."
            )
        return frozen(lengths.astype(np.int64))

    def _column(self, name: str) -> Any:
        dataset: Any = self._source.dataset
        columns = getattr(dataset, "column_names", None)
        if not (isinstance(columns, list) and name in columns):
            raise InputError(
                f"lengths name the column {name!r}, but the {type(dataset).__name__} has "
                f"{columns if columns else 'no named columns'}, so they are unknown. Name another "
                f"column, or pass the lengths themselves."
            )
        return dataset.with_format("numpy")[name][:]
