"""EpochUnits: what an epoch's order moves as a whole, a sample or a group of samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray, Ragged, by_first_appearance, offsets_of


@dataclass(frozen=True, slots=True, eq=False)
class EpochUnits:
    """Samples, or with `groups` the groups of them, numbered by their first member.

    >>> units = EpochUnits.of(4, np.array([7, 5, 7, 5]))
    >>> samples, ends = units.members(np.array([1, 0]))
    >>> samples.tolist(), ends.tolist()
    ([1, 3, 0, 2], [2, 4])
    """

    count: int
    groups: NDArray[np.integer] | None = None
    grouped: Ragged | None = None

    @classmethod
    def of(cls, samples: int, groups: NDArray[np.integer] | None) -> EpochUnits:
        """The units of so many samples."""
        if groups is None:
            return cls(samples)
        owner, first = by_first_appearance(groups)
        return cls(len(first), groups, Ragged.group(owner, len(first)))

    def __len__(self) -> int:
        return self.count

    def members(self, units: IntArray) -> tuple[IntArray, IntArray]:
        """(the samples of these units, how many there are up to the end of each)."""
        if self.grouped is None:
            return units, np.arange(1, len(units) + 1)
        begin = self.grouped.offsets[units]
        size = self.grouped.offsets[units + 1] - begin
        offsets = offsets_of(size)
        inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], size)
        return self.grouped.values[np.repeat(begin, size) + inside], offsets[1:]

    def groups_of(self, samples: IntArray) -> IntArray | None:
        """The group ids of these samples, if there are groups."""
        return None if self.groups is None else self.groups[samples].astype(np.int64)
