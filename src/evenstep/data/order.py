"""The global order of an epoch: position -> sample, in constant memory.

A permutation of a billion samples does not fit into memory, so it is never made. A few Feistel
rounds are a bijection on the next power of four; positions that fall outside are sent through
again until they come back inside, which keeps it a bijection on [0, n). The key is a hash of
seed and epoch, so no two epochs or seeds share an order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray
from evenstep.errors import InputError

_ROUNDS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """A seeded order of `count` samples; without `shuffle`, the samples' own.

    >>> order = EpochOrder(count=5, seed=0, epoch=0)
    >>> sorted(order.samples(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    count: int
    seed: int
    epoch: int
    shuffle: bool = True

    def samples(self, positions: IntArray) -> IntArray:
        """The sample at each of these positions."""
        if len(positions) and not (positions.min() >= 0 and positions.max() < self.count):
            raise InputError(
                f"positions {positions.min()} to {positions.max()} lie outside an epoch of "
                f"{self.count} samples, so they name no sample. Stay below {self.count}."
            )
        if not self.shuffle or self.count < 2:
            return positions.astype(np.int64)
        half = max(1, -(-(self.count - 1).bit_length() // 2))  # 4**half >= count
        keys = self._keys()
        walking = _rounds(positions.astype(np.uint64), half, keys)
        outside = np.flatnonzero(walking >= np.uint64(self.count))
        while len(outside):
            walking[outside] = _rounds(walking[outside], half, keys)
            outside = outside[walking[outside] >= np.uint64(self.count)]
        return walking.astype(np.int64)

    def _keys(self) -> NDArray[np.uint64]:
        """Round keys that seed and epoch share with no other seed or epoch."""
        text = f"evenstep order {self.seed} {self.epoch}".encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest(), np.uint64)


def _rounds(values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A keyed bijection on the numbers of 2 * half bits."""
    bits = np.uint64(half)
    mask = np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the input moves every bit of the output (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
