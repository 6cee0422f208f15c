"""LengthDeal: a deal by known lengths, so that readers get equal numbers of tokens.

As in a `Deal`, the readers take a block of consecutive elements in each turn, one each. Who takes
which is decided for `WINDOW` turns at a time: the longest of a block goes to the reader with the
fewest tokens so far, then readers with the most and the fewest tokens exchange elements. Nothing
before a window matters, so any turn is found without going through those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.core.rounding import divided_up
from evenstep.data.streams.deal import Deal
from evenstep.planning.kernel import kernel

WINDOW = 64  # turns
_EXCHANGES = 4  # per reader, at most

LengthsOfElements: TypeAlias = Callable[[IntArray], IntArray]
"""The lengths of these elements of a list."""


@dataclass(frozen=True)
class LengthDeal:
    """How readers share a list of `size` elements of known lengths.

    >>> sizes = np.array([1, 2, 2, 1, 1, 2, 2, 1])
    >>> deal = LengthDeal(Deal(2, key=0), 8, lambda elements: sizes[elements])
    >>> [int(sizes[deal.elements(reader, np.arange(4))].sum()) for reader in range(2)]
    [6, 6]
    """

    rotation: Deal
    size: int
    lengths: LengthsOfElements
    _windows: dict[int, IntArray] = field(default_factory=dict, compare=False, repr=False)

    @property
    def readers(self) -> int:
        """Number of readers."""
        return self.rotation.readers

    def elements(self, reader: int, turns: IntArray) -> IntArray:
        """The indices of the elements that a reader takes in these turns."""
        found: IntArray = turns * self.readers + self._places(turns)[:, reader]
        return found

    def nth(self, readers: IntArray, turns: IntArray, which: IntArray) -> IntArray:
        """In each of these turns, element number `which` of those that some readers take."""
        places = np.sort(self._places(turns)[:, readers], axis=1)
        found: IntArray = turns * self.readers + places[np.arange(len(turns)), which]
        return found

    def num_turns(self, size: int) -> IntArray:
        """The number of elements that each reader takes of the list."""
        assert size == self.size
        whole, rest = divmod(size, self.readers)
        places = self._places(np.array([whole]))[0]
        turns: IntArray = whole + (places < rest).astype(np.int64)
        return turns

    def _places(self, turns: IntArray) -> IntArray:
        """The place of every reader in each of these turns."""
        found = np.empty((len(turns), self.readers), np.int64)
        windows = np.minimum(turns // WINDOW, self._last)
        for window in np.unique(windows).tolist():
            here = windows == window
            inside = np.minimum(turns[here] - window * WINDOW, self._turns_of(window) - 1)
            found[here] = self._window(window)[inside]
        return found

    @property
    def _last(self) -> int:
        """The last window, which holds the last turns too, so that it is not a short one."""
        return max(0, divided_up(self.size, self.readers) // WINDOW - 1)

    def _turns_of(self, window: int) -> int:
        last = divided_up(self.size, self.readers) - window * WINDOW
        return WINDOW if window < self._last else max(1, last)

    def _window(self, window: int) -> IntArray:
        if window not in self._windows:
            turns = window * WINDOW + np.arange(self._turns_of(window))
            elements = np.arange(turns[0] * self.readers, (turns[-1] + 1) * self.readers)
            lengths = np.full(len(elements), -1, np.int64)  # -1: past the end
            inside = elements[elements < self.size]
            if len(inside):
                lengths[: len(inside)] = self.lengths(inside)
            self._windows.clear()  # windows are visited in order
            self._windows[window] = even_places(
                lengths.reshape(len(turns), self.readers), self.rotation.shifts(turns)
            )
        return self._windows[window]


@kernel
def even_places(lengths: IntArray, shifts: IntArray) -> IntArray:
    """The place of every reader in each turn, so that the sums of their lengths are even.

    lengths  turns x readers; below 0 for places past the end
    shifts   per turn, the place of reader 0 among readers with equal sums
    """
    turns, readers = lengths.shape
    places = np.zeros((turns, readers), np.int64)
    loads = np.zeros(readers, np.int64)
    for t in range(turns):
        rotated = np.empty(readers, np.int64)
        for r in range(readers):
            rotated[(r + shifts[t]) % readers] = r
        by_load = rotated[np.argsort(loads[rotated], kind="mergesort")]
        by_length = np.argsort(-lengths[t], kind="mergesort")
        for k in range(readers):
            places[t, by_load[k]] = by_length[k]
            loads[by_load[k]] += max(0, lengths[t, by_length[k]])
    for _ in range(_EXCHANGES * readers):
        most, fewest = np.argmax(loads), np.argmin(loads)
        apart = loads[most] - loads[fewest]
        best, moved = -1, np.int64(0)
        for t in range(turns):
            one = max(0, lengths[t, places[t, most]])
            by = one - max(0, lengths[t, places[t, fewest]])
            if 0 < by < apart and (best < 0 or abs(apart - 2 * by) < abs(apart - 2 * moved)):
                best, moved = t, by
        if best < 0:
            break
        places[best, most], places[best, fewest] = places[best, fewest], places[best, most]
        loads[most] -= moved
        loads[fewest] += moved
    return places
