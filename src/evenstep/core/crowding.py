"""How many packs the most expensive items need, for several steps at once.

A step is a row of an array. Rows have equal length: steps with fewer items end with zeros.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import FloatArray, IntArray

_PARTS = (1, 2, 3, 4)
_TINY = 1 / 32  # an item of this share of a pack hardly keeps another out
_SLACK = 1e-9  # rounding errors of a sum of floats, with a margin


def packs_of_first(sizes: FloatArray, capacity: FloatArray) -> IntArray:
    """A lower bound on the packs that hold the first i + 1 items of a row, for each i.

    `capacity` is a column, one per row; no size exceeds it. The largest of these counts, and of
    those of fewer items, for a capacity of 1:

    volume   the sizes divided by the capacity, rounded up
    parts    for k = 1, 2, 3, 4 let w = ceil((k + 1) * size) - 1. In a pack, the sum of w is less
             than the sum of (k + 1) * size, which is at most k + 1. The sum is an integer, so it is
             at most k. The packs are at least the sum of w over all items, divided by k. For k = 1
             these are the items over half.
    conflict let t be the smallest size so far. Items over 1 - t share a pack with none of the
             items; the others need at least their volume, and one pack for each item over half.

    >>> packs_of_first(np.array([[6.0, 6, 5, 3]]), np.array([[10.0]])).tolist()
    [[1, 2, 3, 3]]
    """
    share = sizes / capacity
    volume = np.cumsum(share, axis=1)
    packs = np.ceil(volume - _SLACK)
    wide = _columns(share > 1 / (_PARTS[-1] + 1))  # smaller items weigh nothing
    large = np.zeros_like(share)
    for parts in _PARTS:
        weight = np.maximum(np.ceil((parts + 1) * share[:, :wide] - _SLACK) - 1, 0)
        held = np.cumsum(weight, axis=1)
        np.maximum(packs[:, :wide], np.ceil(held / parts - _SLACK), out=packs[:, :wide])
        if parts == 1 and wide:
            large[:, :wide], large[:, wide:] = held, held[:, -1:]
    least = np.minimum.accumulate(share, axis=1)  # descends; no item is smaller than its entry
    some = _columns(least > _TINY)
    conflict = _conflicts(least[:, :some], volume[:, :some], large[:, :some])
    np.maximum(packs[:, :some], conflict, out=packs[:, :some])
    return np.maximum.accumulate(packs, axis=1).astype(np.int64)


def _columns(rows: NDArray[np.bool_]) -> int:
    """How many columns there are up to the last one with an entry that is true."""
    found = np.flatnonzero(rows.any(axis=0))
    return int(found[-1]) + 1 if len(found) else 0


def _conflicts(least: FloatArray, volume: FloatArray, large: FloatArray) -> FloatArray:
    """The packs of items that share a pack with no item so far, and those that the rest need.

    Columns of the first i + 1 items: the least size, the sum of sizes, how many exceed half.
    """
    index = np.arange(1, least.shape[1] + 1)
    wide = np.minimum(rank_among(-least, least - 1 - _SLACK), index)
    before = np.take_along_axis(zero_first(volume), wide, axis=1)
    kept = np.take_along_axis(zero_first(large), wide, axis=1)
    return np.asarray(wide + np.maximum(large - kept, np.ceil(volume - before - _SLACK)))


def zero_first(rows: FloatArray) -> FloatArray:
    """The rows with a 0 before the first entry."""
    found = np.zeros((rows.shape[0], rows.shape[1] + 1))
    found[:, 1:] = rows
    return found


def rank_among(ordered: FloatArray, values: FloatArray) -> IntArray:
    """How many entries of the same row of `ordered` are less than each value. Rows ascend.

    >>> rank_among(np.array([[1.0, 2, 3], [4, 5, 6]]), np.array([[2.5], [4]])).tolist()
    [[2], [0]]
    """
    if len(ordered) == 1:
        return np.asarray(np.searchsorted(ordered[0], values[0])[None, :], np.int64)
    found = [row.searchsorted(some) for row, some in zip(ordered, values, strict=True)]
    return np.array(found, np.int64).reshape(values.shape)


def descends(rows: FloatArray) -> bool:
    """Whether every row descends."""
    return bool((rows[:, 1:] <= rows[:, :-1]).all())
