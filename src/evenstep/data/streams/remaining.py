"""RemainingEpoch: what readers have not read yet of an epoch, as arithmetic, not as a list.

Readers share an epoch by a `Deal`. When their number changes, what they have left (`Unread`) is
dealt to the new readers, in the order of the epoch. This can happen again before it is read:

    positions 0 1 2 ...   ──dealt to 4──▶   what 4 have left   ──dealt to 3──▶   what 3 have left

A fresh epoch and what remains after any number of changes have the same form: for each change, how
much every reader had read. Positions only grow, so a source that can only be read in order is read
forwards, and the first position past an unknown end is the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.core.rounding import divided_up
from evenstep.data.streams.deal import Deal
from evenstep.data.streams.length_deal import LengthDeal
from evenstep.data.streams.unread import Unread
from evenstep.errors import CursorError

LengthsAt: TypeAlias = Callable[[int, IntArray], IntArray]
"""The lengths of the items at these positions of an epoch."""
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
    by_length: bool = False
    """Whether readers share it by lengths, so that they get equal numbers of tokens."""
    lengths: LengthsAt | None = field(default=None, compare=False, repr=False)
    _lists: tuple[Unread, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lists", ())
        for read in self.changes:
            unread = Unread(self._deal(len(read)), read, self.size)
            object.__setattr__(self, "_lists", (*self._lists, unread))

    @classmethod
    def nothing(cls, epoch: int, count: int | None) -> RemainingEpoch:
        """An epoch of which everything has been read."""
        return cls(epoch, count, ((None,),))

    def measured(self, lengths: LengthsAt | None, new: bool = False) -> RemainingEpoch:
        """The same, with the lengths of the items, if they are known. If it is about to be shared
        by `new` readers, it is shared by length, unless several others have begun otherwise."""
        if new and all(len(read) == 1 for read in self.changes):
            return replace(self, by_length=lengths is not None, lengths=lengths)
        if self.by_length and lengths is None:
            raise CursorError(
                "the readers of this cursor shared the data by length, but the source does not "
                "know its lengths now. Restore the source, or start without the cursor."
            )
        return replace(self, lengths=lengths) if self.by_length else self

    @property
    def size(self) -> int | None:
        """The number of positions; None if it is unknown."""
        return self._lists[-1].size if self._lists else self.count

    def positions(self, reader: int, readers: int, first: int = 0, most: int = 1 << 20) -> IntArray:
        """The positions that a reader takes from turn `first` on, at most so many."""
        if self.size is not None:
            most = max(0, min(most, divided_up(self.size, readers) - first))
        elements = self._deal(readers).elements(reader, np.arange(first, first + most))
        if self.size is not None:
            elements = elements[: np.searchsorted(elements, self.size)]
        return self._positions(self._lists, elements)

    def _positions(self, lists: tuple[Unread, ...], elements: IntArray) -> IntArray:
        """The positions of elements of the last of some lists."""
        for unread in reversed(lists):
            elements = unread.elements(elements)
        return elements

    def rest(self, read: Sequence[int | None]) -> RemainingEpoch:
        """What remains after reader r has read `read[r]` of its elements."""
        unread = Unread(self._deal(len(read)), tuple(read), self.size)
        if unread.size == 0:
            return RemainingEpoch.nothing(self.epoch, self.count)
        kept, first = list[Read](), 0
        for each in (unread, *reversed(self._lists)):
            begin, element = each.tail or (first + 1, 0)
            # In the tail nothing was read, so all that matters is where it begins.
            kept.append(tuple(each.read) if first < begin else (element - begin,))
            first = int(each.elements(np.array([first]))[0])
        return replace(self, changes=_joined(kept[::-1]))

    def _deal(self, readers: int) -> Deal | LengthDeal:
        """How so many readers share what remains."""
        deal, lengths, lists, size = Deal(readers, self.epoch), self.lengths, self._lists, self.size
        if readers == 1 or lengths is None or size is None:
            return deal
        return LengthDeal(
            deal, size, lambda elements: lengths(self.epoch, self._positions(lists, elements))
        )

    def to_list(self) -> list[Any]:
        """Plain data."""
        changes = [list(read) for read in self.changes]
        return [self.epoch, self.count, changes, *([1] if self.by_length else [])]

    @classmethod
    def from_list(cls, data: Any) -> RemainingEpoch:
        """The inverse of `to_list`."""
        epoch, count, changes, *by_length = data
        counts = tuple(tuple(None if n is None else int(n) for n in read) for read in changes)
        return cls(int(epoch), None if count is None else int(count), counts, bool(by_length))


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
