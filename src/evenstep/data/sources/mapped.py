"""Mapped and MeasuredMapped: any map-style dataset as a source."""

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
    """Items by index: a torch `Dataset`, a Hugging Face `Dataset`, a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: Any, /) -> Any: ...


class Mapped:
    """A dataset of unknown lengths; `transform` turns its items into samples.

    The fingerprint is that of a Hugging Face dataset, else it covers type and size. It does not
    cover `transform`.

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
        """Covers the fingerprint or type of the dataset, and its size. Nothing is read."""
        own = getattr(self.dataset, "_fingerprint", None)  # of a datasets.Dataset
        text = f"mapped {own or type(self.dataset).__qualname__} {len(self)}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class MeasuredMapped:
    """A dataset whose items are single samples of known length.

    `lengths` are those of the samples that `transform` returns, one per item, or the name of a
    column of a Hugging Face dataset.

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
                f"item {item} is a list, that is several samples, but has one length. Return one "
                f"mapping or array from transform, or use a PooledStream with Mapped(dataset)."
            )
        return sample

    def lengths_of(self, items: IntArray) -> IntArray:
        """The given lengths of these items."""
        check_items(items, len(self))
        return self._lengths[items]

    @cached_property
    def fingerprint(self) -> str:
        """Covers the fingerprint of the dataset and all lengths."""
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
                f"expected one length per item, got lengths of shape {lengths.shape} for "
                f"{len(self)} items."
            )
        if len(lengths) and lengths.dtype.kind not in "iu":
            raise InputError(
                f"lengths must be integers, got {lengths.dtype}. Pass the number of tokens of "
                f"every item."
            )
        return frozen(lengths.astype(np.int64))

    def _column(self, name: str) -> Any:
        dataset: Any = self._source.dataset
        columns = getattr(dataset, "column_names", None)
        if not (isinstance(columns, list) and name in columns):
            raise InputError(
                f"unknown column {name!r} for lengths; the {type(dataset).__name__} has "
                f"{columns if columns else 'no named columns'}. Name another column, or pass the "
                f"lengths."
            )
        return dataset.with_format("numpy")[name][:]
