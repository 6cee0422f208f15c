"""EpochUnits: the units that an epoch's order permutes, samples or groups of samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray, Ragged, by_first_appearance, offsets_of


@dataclass(frozen=True, slots=True, eq=False)
class EpochUnits:
    """Samples, or with `groups` their groups, numbered in order of their first members.

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
        """The units of this number of samples."""
        if groups is None:
            return cls(samples)
        owner, first = by_first_appearance(groups)
        return cls(len(first), groups, Ragged.group(owner, len(first)))

    def __len__(self) -> int:
        return self.count

    def members(self, units: IntArray) -> tuple[IntArray, IntArray]:
        """(sample ids of these units, number of samples up to the end of each unit)."""
        if self.grouped is None:
            return units, np.arange(1, len(units) + 1)
        begin = self.grouped.offsets[units]
        size = self.grouped.offsets[units + 1] - begin
        offsets = offsets_of(size)
        inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], size)
        return self.grouped.values[np.repeat(begin, size) + inside], offsets[1:]

    def groups_of(self, sample_ids: IntArray) -> IntArray | None:
        """The group ids of these samples; None without groups."""
        return None if self.groups is None else self.groups[sample_ids].astype(np.int64)
