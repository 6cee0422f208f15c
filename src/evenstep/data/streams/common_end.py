"""The common end of ranks: how many steps each reader of a finite pooled stream makes.

Counted by every rank on its own, from the lengths of all samples: it forms the micro-batches of all
readers, without their samples. There is no communication.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from evenstep.core.ragged import IntArray, item_and_part
from evenstep.core.recipe import Recipe
from evenstep.data.sources.source import Sample
from evenstep.data.streams.batcher import PoolBatcher
from evenstep.data.streams.epoch_source import EpochSource
from evenstep.data.streams.pool import Measure
from evenstep.data.streams.reader import PoolReader
from evenstep.data.streams.reader_state import ReaderState
from evenstep.errors import ConfigError, SampleError


class ItemLengths:
    """The items of an `EpochSource`, with lengths in place of samples. Reads each item once.

    Lengths that the source knows are not read. Sequential sources are read anew in every epoch.
    """

    def __init__(self, items: EpochSource, length_of: Measure) -> None:
        self._items, self._length_of = items, length_of
        self._known: dict[tuple[int, int], list[tuple[int, int]] | SampleError | None] = {}
        self._next = (-1, 0)  # of a sequential source: epoch, first item that was not read
        self.count, self.seeded = items.count, items.seeded
        self.failed = False

    def items(self, epoch: int, positions: IntArray) -> list[int]:
        """The items at these positions."""
        return self._items.items(epoch, positions)

    def read(self, epoch: int, item: int) -> list[tuple[int, Sample]] | None:
        """(sample id, length) of every sample of an item; None past the end."""
        if self._items.measured:
            return [(item, self._items.length_of_item(item))]
        if self.count is None:
            if self._next[0] != epoch:
                self._known, self._next = {}, (epoch, 0)
            for before in range(self._next[1], item + 1):
                self._known[epoch, before] = self._measured(epoch, before)
                self._next = (epoch, before + 1)
        varies = self.count is None or self._items.seeded
        key = (epoch if varies else 0, item)
        if key not in self._known:
            self._known[key] = self._measured(epoch, item)
        found = self._known[key]
        if isinstance(found, SampleError):
            raise found
        return found

    def again(self, epoch: int, sample_id: int) -> Sample:
        """The length of a sample that was read before."""
        item, part = item_and_part(sample_id)
        found = self.read(epoch, item)
        return 0 if found is None or part >= len(found) else found[part][1]

    def _measured(self, epoch: int, item: int) -> list[tuple[int, int]] | SampleError | None:
        try:
            found = self._items.read(epoch, item)
        except SampleError as error:
            self.failed = self._items.failed
            return error
        return None if found is None else [(name, self._length(one)) for name, one in found]

    def _length(self, sample: Sample) -> int:
        """The length, or 0 for a sample that a reader will refuse or skip for its own reason."""
        try:
            return int(self._length_of(sample))
        except Exception:
            return 0


def own_steps(
    states: Sequence[ReaderState],
    firsts: Sequence[int],
    workers: int,
    items: ItemLengths,
    batcher: PoolBatcher,
    skip: bool,
) -> IntArray:
    """How many steps each reader makes by itself. The first of them has the number `firsts[i]`."""
    counts = []
    for state, first in zip(states, firsts, strict=True):
        counted: Any = items
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of skipped samples: warned of when they are run
            reader = PoolReader(state, counted, batcher, int, endless=False, skip=skip)
            count = 0
            while reader.step(first + count * workers) is not None:
                count += 1
        counts.append(count)
    return np.array(counts, np.int64)


def common_steps(own: IntArray, workers: int) -> list[int]:
    """The steps of each reader such that all ranks make as many as the longest one.

    Further steps of a rank go to its reader with the fewest.

    >>> common_steps(np.array([5, 3, 4, 4, 2, 3]), workers=2)
    [5, 3, 4, 4, 4, 4]
    """
    steps = own.reshape(-1, workers).copy()
    most = int(steps.sum(axis=1).max(initial=0))
    for rank in steps:
        while rank.sum() < most:
            rank[np.argmin(rank)] += 1
    return [int(count) for count in steps.reshape(-1)]


def check_count_ahead(recipe: Recipe, infinite_loop: bool) -> None:
    """Raise if steps cannot be counted by lengths alone, until the end."""
    for what, given in (
        ("infinite_loop", infinite_loop),
        ("limits.columns", bool(recipe.limits.columns)),
    ):
        if given:
            raise ConfigError(
                f"count_ahead counts steps by lengths until the end, so it cannot be combined "
                f"with {what}. Leave one of them out."
            )
