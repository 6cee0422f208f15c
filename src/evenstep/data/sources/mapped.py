"""Mapped and MeasuredMapped: any map-style dataset as a source."""

from __future__ import annotations

import hashlib
from functools import cached_property
from operator import index
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.ragged import IntArray, frozen
from evenstep.data.sources.content import samples_digest, spread
from evenstep.data.sources.measure import measured_lengths
from evenstep.data.sources.source import Draw, Sample, check_items, is_seeded
from evenstep.data.sources.transform import ItemTransform, Transform
from evenstep.errors import InputError


class MapStyle(Protocol):
    """Items by index: a torch `Dataset`, a Hugging Face `Dataset`, a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: Any, /) -> Any: ...


class Mapped:
    """A dataset of unknown lengths; `transform` turns its items into samples.

    A transform may have parameters named `sample_id`, `epoch` and `seed` (see `Draw`), so that what
    it draws is exact on resume. The dataset may be another source.

    >>> source = Mapped(["ab", "c"], transform=lambda text: {"input_ids": list(text.encode())})
    >>> len(source), source[1]
    (2, {'input_ids': [99]})
    """

    def __init__(self, dataset: MapStyle, *, transform: Transform | None = None) -> None:
        self.dataset = dataset
        self.transform = ItemTransform.of(transform)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: int, /) -> Sample | list[Sample]:
        if not 0 <= item < len(self.dataset):
            raise IndexError(f"item {item} of {len(self)}")
        found = self.dataset[index(item)]
        return found if self.transform.function is None else self.transform(found)

    @property
    def seeded(self) -> bool:
        """Whether the transform takes a sample's id, epoch or seed."""
        return self.transform.seeded or is_seeded(self.dataset)

    def drawn(self, item: int, draw: Draw) -> Sample | list[Sample]:
        """An item with a seeded transform."""
        dataset: Any = self.dataset
        if not 0 <= item < len(dataset):
            raise IndexError(f"item {item} of {len(self)}")
        found = dataset.drawn(item, draw) if is_seeded(dataset) else dataset[index(item)]
        return self.transform(found, draw)

    @cached_property
    def fingerprint(self) -> str:
        """Covers the number of items, and 16 samples as they are read, evenly spread; so also the
        transform. Not the samples if two reads of them differ. Not the dataset's name or path."""
        digest = hashlib.blake2b(f"mapped {len(self)} ".encode(), digest_size=16)
        digest.update(
            samples_digest(lambda item: self.drawn(item, Draw(item, 0, 0)), spread(len(self)))
        )
        return digest.hexdigest()


class MeasuredMapped:
    """A dataset whose items are single samples of known length.

    `lengths` are those of the samples that `transform` returns, one per item, or the name of a
    column of a Hugging Face dataset. By default they are counted on first use: from the column
    `input_ids` of a Hugging Face dataset, or those of another source, unless there is a transform;
    else by reading every item once. A seeded transform (see `Mapped`) must not change the length of
    a sample from epoch to epoch.

    >>> data = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    >>> source = MeasuredMapped(data, lengths=[3, 1])
    >>> source.lengths_of(np.array([1, 0])).tolist(), source[1]
    ([1, 3], {'input_ids': [8]})
    """

    def __init__(
        self,
        dataset: MapStyle,
        *,
        lengths: ArrayLike | str | None = None,
        transform: Transform | None = None,
    ) -> None:
        self._source = Mapped(dataset, transform=transform)
        self._given = lengths

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, item: int, /) -> Sample:
        return _single(item, self._source[item])

    @property
    def seeded(self) -> bool:
        """Whether the transform takes a sample's id, epoch or seed."""
        return self._source.seeded

    def drawn(self, item: int, draw: Draw) -> Sample:
        """An item with a seeded transform."""
        return _single(item, self._source.drawn(item, draw))

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items."""
        check_items(items, len(self))
        return self._lengths[items]

    @cached_property
    def fingerprint(self) -> str:
        """Covers what that of `Mapped` does, and all lengths."""
        digest = hashlib.blake2b(f"measured {self._source.fingerprint} ".encode(), digest_size=16)
        digest.update(self._lengths.astype("<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def _lengths(self) -> IntArray:
        given = self._given
        lengths = np.asarray(
            self._counted()
            if given is None
            else self._column(given)
            if isinstance(given, str)
            else given
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

    def _counted(self) -> IntArray:
        source, plain = self._source, self._source.transform.function is None
        read = None if plain else lambda item: source.drawn(item, Draw(item, 0, 0))
        return measured_lengths(source.dataset, read)

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


def _single(item: int, sample: Sample | list[Sample]) -> Sample:
    if isinstance(sample, list):
        raise InputError(
            f"item {item} is a list, that is several samples, but has one length. Return one "
            f"mapping or array from transform, or use a PooledStream with Mapped(dataset)."
        )
    return sample
