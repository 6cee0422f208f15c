"""InMemory: samples held in a sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.data.sources.content import samples_digest, spread
from evenstep.data.sources.measure import item_length
from evenstep.data.sources.source import Sample, check_items

_ITEMS = 64  # in the fingerprint


class InMemory:
    """Samples held in a sequence. An item that is a `list` is several samples.

    If every item is one sample, the source knows its lengths. They are counted on first use.

    >>> source = InMemory([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    >>> len(source), source[1], source.lengths_of(np.array([1, 0])).tolist()
    (2, {'input_ids': [8]}, [1, 3])
    """

    def __init__(self, samples: Sequence[Sample | list[Sample]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, item: int, /) -> Sample | list[Sample]:
        if not 0 <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        return self._samples[item]

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items. Raises if an item of the source is several samples."""
        check_items(items, len(self))
        return self._lengths[items]

    @cached_property
    def fingerprint(self) -> str:
        """Covers the number of items and all values of up to 64 of them, evenly spread."""
        digest = hashlib.blake2b(f"memory {len(self)}".encode(), digest_size=16)
        digest.update(samples_digest(self._samples.__getitem__, spread(len(self), _ITEMS)))
        return digest.hexdigest()

    @cached_property
    def _lengths(self) -> IntArray:
        return np.array(
            [item_length(item, sample) for item, sample in enumerate(self._samples)], int
        )
