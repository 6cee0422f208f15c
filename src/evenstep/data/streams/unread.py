"""Unread: what several readers of a list have left, as a list in the same order.

2 readers; reader 0 has read 3 elements, reader 1 has 1

element             0 1   2 3   4 5   6 7   8 9 ...
reader              0 1   1 0   0 1   0 1   1 0 ...
unread                    2       5   6 7   8 9 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.data.streams.deal import Deal


@dataclass(frozen=True)
class Unread:
    """The elements that remain after reader r has taken `read[r]` of its elements (None: all).

    `size` is the size of the list that was dealt; None if it is unknown.

    >>> alone = Unread(Deal(1, key=0), (3,), 8)
    >>> alone.elements(np.arange(alone.size)).tolist()
    [3, 4, 5, 6, 7]
    """

    deal: Deal
    read: Sequence[int | None]
    size_before: int | None

    @cached_property
    def _reading(self) -> list[tuple[int, int]]:
        """(elements read, reader) of every reader that has not ended, fewest first."""
        return sorted(
            (read, reader)
            for reader, read in enumerate(self.read)
            if read is not None and (self._turns is None or read < self._turns[reader])
        )

    @cached_property
    def _turns(self) -> list[int] | None:
        """The number of elements that each reader takes in all; None if it is unknown."""
        return None if self.size_before is None else self.deal.num_turns(self.size_before).tolist()

    @cached_property
    def size(self) -> int | None:
        """The number of unread elements; None if it is unknown."""
        if not self._reading:
            return 0
        turns = self._turns
        return None if turns is None else sum(turns[r] - read for read, r in self._reading)

    @cached_property
    def _begins(self) -> IntArray:
        """For k = 1, 2, ...: the index of the first element in a turn that k readers have left."""
        turns = np.array([read for read, _ in self._reading], np.int64)
        sizes = np.diff(turns) * np.arange(1, len(turns))
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))

    @property
    def tail(self) -> tuple[int, int] | None:
        """(index, element) from which on everything is unread; None if a reader has ended."""
        if len(self._reading) < self.deal.readers:
            return None
        return int(self._begins[-1]), self._reading[-1][0] * self.deal.readers

    def elements(self, indices: IntArray) -> IntArray:
        """The elements at these indices, in terms of the list that was dealt. Indices grow."""
        if self.tail is not None and len(indices) and indices[0] >= self.tail[0]:
            return indices + (self.tail[1] - self.tail[0])
        found = np.empty(len(indices), np.int64)
        groups = np.searchsorted(self._begins, indices, side="right")
        for left in np.unique(groups).tolist():
            here = groups == left
            found[here] = self._within(left, indices[here] - self._begins[left - 1])
        return found

    def _within(self, left: int, indices: IntArray) -> IntArray:
        """Elements of the turns that `left` readers have left, in the order of their places."""
        readers = np.sort([reader for _, reader in self._reading[:left]])
        turns, which = np.divmod(indices, left)
        return self.deal.nth(readers, turns + self._reading[left - 1][0], which)
