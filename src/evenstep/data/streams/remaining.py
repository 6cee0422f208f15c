"""RemainingEpoch: what readers have not read yet of an epoch, as arithmetic, not as a list.

Readers share an epoch by a `Deal`. When their number changes, what they have left (`Unread`) is
dealt to the new readers, in the order of the epoch. This can happen again before it is read:

    positions 0 1 2 ...   ──dealt to 4──▶   what 4 have left   ──dealt to 3──▶   what 3 have left

A fresh epoch and what remains after any number of changes have the same form: for each change, how
much every reader had read. Positions only grow, so a source that can only be read in order is read
forwards, and the first position past an unknown end is the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from evenstep.core.ragged import IntArray, divided_up
from evenstep.data.streams.deal import Deal
from evenstep.data.streams.unread import Unread
from evenstep.errors import CursorError

Read: TypeAlias = tuple[int | None, ...]
"""The number of elements that each reader has read; None if it has read all."""


@dataclass(frozen=True, slots=True)
class RemainingEpoch:
    """The positions of an epoch of `count` items (None: unknown) that remain after `changes`.

    >>> whole = RemainingEpoch(0, 9)
    >>> rest = whole.rest([2, 2])
    >>> rest.positions(0, 1).tolist()
    [4, 5, 6, 7, 8]
    """

    epoch: int
    count: int | None
    changes: tuple[Read, ...] = ()
    _lists: tuple[Unread, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lists", ())
        for read in self.changes:
            unread = Unread(Deal(len(read), self.epoch), read, self.size)
            object.__setattr__(self, "_lists", (*self._lists, unread))

    @classmethod
    def nothing(cls, epoch: int, count: int | None) -> RemainingEpoch:
        """An epoch of which everything has been read."""
        return cls(epoch, count, ((None,),))

    @property
    def size(self) -> int | None:
        """The number of positions; None if it is unknown."""
        return self._lists[-1].size if self._lists else self.count

    def positions(self, reader: int, readers: int, first: int = 0, most: int = 1 << 20) -> IntArray:
        """The positions that a reader takes from turn `first` on, at most so many."""
        if self.size is not None:
            most = max(0, min(most, divided_up(self.size, readers) - first))
        elements = Deal(readers, self.epoch).elements(reader, np.arange(first, first + most))
        if self.size is not None:
            elements = elements[: np.searchsorted(elements, self.size)]
        for unread in reversed(self._lists):
            elements = unread.elements(elements)
        return elements

    def rest(self, read: Sequence[int | None]) -> RemainingEpoch:
        """What remains after reader r has read `read[r]` of its elements."""
        unread = Unread(Deal(len(read), self.epoch), tuple(read), self.size)
        if unread.size == 0:
            return RemainingEpoch.nothing(self.epoch, self.count)
        kept, first = list[Read](), 0
        for each in (unread, *reversed(self._lists)):
            begin, element = each.tail or (first + 1, 0)
            # In the tail nothing was read, so all that matters is where it begins.
            kept.append(tuple(each.read) if first < begin else (element - begin,))
            first = int(each.elements(np.array([first]))[0])
        return replace(self, changes=_joined(kept[::-1]))

    def to_list(self) -> list[Any]:
        """Plain data."""
        return [self.epoch, self.count, [list(read) for read in self.changes]]

    @classmethod
    def from_list(cls, data: Any) -> RemainingEpoch:
        """The inverse of `to_list`."""
        epoch, count, changes, *by_length = data
        if by_length:
            raise CursorError(
                "the cursor was written by an earlier version, whose readers shared samples by "
                "length. Finish the epoch with that version, or start without the cursor, for "
                "example at the next epoch."
            )
        counts = tuple(tuple(None if n is None else int(n) for n in read) for read in changes)
        return cls(int(epoch), None if count is None else int(count), counts)


def _joined(changes: list[Read]) -> tuple[Read, ...]:
    """The same changes, with those of single readers after each other as one."""
    joined: list[Read] = []
    for read in changes:
        before = joined[-1] if joined else (0,) if len(read) == 1 else ()
        if len(read) == len(before) == 1 and read[0] is not None and before[0] is not None:
            joined[-1:] = [(before[0] + read[0],)]
        else:
            joined.append(read)
    return tuple(read for read in joined if read != (0,))
