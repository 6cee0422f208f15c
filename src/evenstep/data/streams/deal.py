"""Deal: which elements of a list each of several readers takes.

In each turn the readers take a block of consecutive elements, one each. Their places in the block
rotate, so data whose kind depends on the position, such as alternating short and long samples, is
not divided by kind.

    3 readers           turn 0   turn 1   turn 2  |  turn 3 ...
    element             0 1 2    3 4 5    6 7 8   |  9 ...
    taken by reader     1 2 0    2 0 1    0 1 2   |  from another start

The places of a reader advance by a fixed step, coprime to the number of readers, so it visits every
place once in as many turns as there are readers. It then begins at another place, by a hash.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np

from evenstep.core.ragged import IntArray

_GOLDEN, _FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_HALF = np.uint64(32)
_RATIO = 0.618033988749895  # steps of about this part of a block spread places evenly


@dataclass(frozen=True)
class Deal:
    """How `readers` readers share a list. `key` selects one of many such ways.

    >>> deal = Deal(3, key=7)
    >>> sorted(int(deal.elements(reader, np.array([4]))[0]) for reader in range(3))
    [12, 13, 14]
    """

    readers: int
    key: int

    def elements(self, reader: int, turns: IntArray) -> IntArray:
        """The indices of the elements that a reader takes in these turns."""
        if self.readers == 1:
            return turns
        return turns * self.readers + (reader + self.shifts(turns)) % self.readers

    def shifts(self, turns: IntArray) -> IntArray:
        """The place of reader 0 in each of these turns."""
        block, turn = np.divmod(turns, self.readers)
        mixed = (block.astype(np.uint64) + self._start) * _GOLDEN
        mixed = (mixed ^ (mixed >> _HALF)) * _FACTOR
        begin = ((mixed ^ (mixed >> _HALF)) % np.uint64(self.readers)).astype(np.int64)
        shifts: IntArray = (begin + self._step * turn) % self.readers
        return shifts

    def nth(self, readers: IntArray, turns: IntArray, which: IntArray) -> IntArray:
        """In each of these turns, element number `which` of those that some readers take.

        `readers` ascend.
        """
        shifts = self.shifts(turns)
        first = np.searchsorted(readers, self.readers - shifts)  # the first that wraps around
        reader = readers[(first + which) % len(readers)]
        found: IntArray = turns * self.readers + (reader + shifts) % self.readers
        return found

    def num_turns(self, size: int) -> IntArray:
        """The number of elements that each reader takes of a list of this size."""
        whole, rest = divmod(size, self.readers)
        shift = self.shifts(np.array([whole]))
        return whole + ((np.arange(self.readers) + shift) % self.readers < rest).astype(np.int64)

    @property
    def _start(self) -> np.uint64:
        return _start_of(self.readers, self.key)

    @property
    def _step(self) -> int:
        return _step_of(self.readers)


@lru_cache(maxsize=1024)
def _start_of(readers: int, key: int) -> np.uint64:
    text = f"evenstep deal {readers} {key}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


@lru_cache(maxsize=1024)
def _step_of(readers: int) -> int:
    near = round(readers * _RATIO)
    steps = sorted(range(1, readers + 1), key=lambda step: abs(step - near))
    return next(step for step in steps if gcd(step, readers) == 1)
