"""EpochOrder: the global order of an epoch, position -> sample id, in constant memory.

The permutation is computed, not stored. A few Feistel rounds are a bijection on [0, 4**k) for the
smallest 4**k >= n. A result outside [0, n) goes through the rounds again until it is inside, which
makes it a bijection on [0, n). The keys are a hash of seed and epoch.

Feistel rounds on few bits reach some orders more often than others. Up to 64 items are therefore
shuffled as a list (Fisher-Yates), which makes all orders equally likely.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray
from evenstep.core.rounding import divided_up
from evenstep.errors import InputError
from evenstep.planning.kernels import kernel

_ROUNDS = 6
_FEW = 64  # items that are shuffled as a list
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """A seeded order of `count` samples; without `shuffle`, the order in which they are stored.

    >>> order = EpochOrder(count=5, seed=0, epoch=0)
    >>> sorted(order.samples(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    count: int
    seed: int
    epoch: int
    shuffle: bool = True

    def samples(self, positions: IntArray) -> IntArray:
        """The sample id at each of these positions."""
        if len(positions) and not (positions.min() >= 0 and positions.max() < self.count):
            raise InputError(
                f"positions must be in [0, {self.count}), got {positions.min()} to "
                f"{positions.max()}."
            )
        if not self.shuffle or self.count < 2:
            return positions.astype(np.int64)
        with np.errstate(over="ignore"):  # products wrap around, also without the compiler
            if self.count <= _FEW:
                order = np.arange(self.count)
                shuffle(order, self._keys()[0])
                return order[positions]
            half = divided_up((self.count - 1).bit_length(), 2)  # 4**half >= count
            found = np.empty(len(positions), np.int64)
            permute(positions.astype(np.uint64), np.uint64(self.count), half, self._keys(), found)
            return found

    @property
    def description(self) -> str:
        """What a cursor says about the order. It differs if the order was computed differently.

        >>> EpochOrder(count=100, seed=3, epoch=0).description
        'shuffled by seed 3'
        """
        if not self.shuffle:
            return "as stored"
        # Version 0.1.0 shuffled a few items in another way.
        return f"shuffled by seed {self.seed}{' as a list' if 1 < self.count <= _FEW else ''}"

    def _keys(self) -> NDArray[np.uint64]:
        """Round keys of this seed and epoch."""
        text = f"evenstep order {self.seed} {self.epoch}".encode()
        digest = hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest()
        return np.frombuffer(digest, "<u8").astype(np.uint64)  # the same for any byte order


@kernel
def mixed(value: np.uint64) -> np.uint64:
    """The finaliser of splitmix64: every input bit affects every output bit."""
    value = (value ^ (value >> _30)) * _FIRST
    value = (value ^ (value >> _27)) * _SECOND
    return value ^ (value >> _31)


@kernel
def shuffle(order: IntArray, key: np.uint64) -> None:
    """Exchange each item with one of those up to itself, by the random numbers of `key`."""
    state = key
    for last in range(order.shape[0] - 1, 0, -1):
        state = state + _GOLDEN
        other = np.int64(mixed(state) % np.uint64(last + 1))
        order[last], order[other] = order[other], order[last]


@kernel
def permute(
    positions: NDArray[np.uint64],
    count: np.uint64,
    half: int,
    keys: NDArray[np.uint64],
    found: IntArray,
) -> None:
    """Apply a keyed bijection on numbers of 2 * half bits to each position, repeatedly until the
    result is below `count`."""
    bits = np.uint64(half)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    for i in range(positions.shape[0]):
        value = positions[i]
        inside = False
        while not inside:
            left, right = value >> bits, value & mask
            for k in range(keys.shape[0]):
                left, right = right, left ^ (mixed(right ^ keys[k]) & mask)
            value = (left << bits) | right
            inside = value < count
        found[i] = np.int64(value)
