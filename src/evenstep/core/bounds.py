"""Lower bounds on the number of packs and on the load of the slowest rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenstep.core.lock_step import lock_steps
from evenstep.core.makespan import makespans
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.rounding import divided_up

_PARTS = 2**30  # integer resolution of a limit that is not an integer
_SLACK = 2e-9  # rounding errors of a sum of floats, with a margin


def pack_bound(sizes: NDArray[np.integer], capacity: int) -> int:
    """A lower bound on the packs of `capacity` that hold items of these sizes.

    An item that can share a pack with at most one other is paired with the largest that fits, which
    is optimal, and set aside. For the rest, the L2 bound of Martello and Toth is used.

    >>> pack_bound(np.array([6, 6, 6]), 10), pack_bound(np.array([5, 5, 4]), 10)
    (3, 2)
    """
    ordered = np.sort(sizes).astype(np.int64)
    fixed, best = 0, _l2(ordered, capacity)
    while len(ordered):
        packs, rest = _set_aside(ordered, capacity)
        if packs == 0:
            break
        fixed, ordered = fixed + packs, rest
        best = max(best, fixed + _l2(ordered, capacity))
    return best


def pack_bounds(sizes: IntArray, capacity: int, packs: IntArray) -> IntArray:
    """`pack_bound` of each row, and 1 for each size over the capacity. A size of 0 is no item.

    `packs` is `packs_of_first` of the sizes, up to the capacity.
    """
    bound = packs.max(axis=1, initial=0)
    held = np.minimum(sizes, capacity)
    # Setting pairs aside can help where an item has room for exactly one of the smallest.
    least = np.where(held > 0, held, capacity).min(axis=1, initial=capacity)[:, None]
    pairs = (2 * held > capacity) & (held > capacity - 2 * least) & (held <= capacity - least)
    for row in np.flatnonzero(pairs.any(axis=1)).tolist():
        bound[row] = max(int(bound[row]), pack_bound(held[row][held[row] > 0], capacity))
    return np.asarray(bound, np.int64)


def _set_aside(ordered: IntArray, capacity: int) -> tuple[int, IntArray]:
    """(packs of large items with their best single partner, the other sizes).

    capacity 10, sizes [3, 4, 6, 9] -> 9 alone, 6 with 4: 2 packs, and [3] remains
    """
    smallest = int(ordered[0])
    # Over half, and with no room for two of the smallest.
    large = int(np.searchsorted(ordered, max(capacity // 2, capacity - 2 * smallest), "right"))
    waiting: list[int] = []
    small = ordered[:large].tolist()
    at = 0
    for size in ordered[large:][::-1].tolist():
        while at < large and small[at] <= capacity - size:
            waiting.append(small[at])
            at += 1
        if waiting:
            waiting.pop()
    return len(ordered) - large, np.array(waiting + small[at:], np.int64)


def _l2(ordered: IntArray, capacity: int) -> int:
    """The L2 bound, over all thresholds t.

    Items over capacity - t share no pack with items of t or more, and two items over half share no
    pack. Items between t and half that do not fit with these need further packs.
    """
    if len(ordered) == 0:
        return 0
    total = np.zeros(len(ordered) + 1, np.int64)
    np.cumsum(ordered, out=total[1:])
    half = int(np.searchsorted(ordered, capacity // 2, "right"))
    # Thresholds: 0, and each size that occurs up to half the capacity.
    first = np.concatenate(([0], np.flatnonzero(np.diff(ordered[:half])) + 1))
    threshold = ordered[first]
    threshold[0] = 0
    wide = np.searchsorted(ordered, capacity - threshold, "right")  # where items over C - t begin
    large = wide - half  # over half, up to capacity - t
    room = large * capacity - (total[wide] - total[half])
    middle = total[half] - total[np.minimum(first, half)]
    extra = np.maximum(0, divided_up(middle - room, capacity))
    bound = (len(ordered) - wide) + large + extra
    return int(max(bound.max(), divided_up(int(total[-1]), capacity)))


def bins_bound(taken: FloatArray, caps: FloatArray) -> int:
    """A lower bound on bins under several limits: item i takes `taken[i, d]` of `caps[d]`.

    An item that exceeds a limit by itself has its own bin. For the others, the largest bound of any
    limit holds.

    >>> two = np.array([[5.0, 50.0]] * 16)  # tokens, patches
    >>> bins_bound(two, np.array([100.0, 1000.0])), bins_bound(two, np.array([100.0, 100.0]))
    (1, 8)
    """
    alone = (taken > caps).any(axis=1)
    rest = taken[~alone]
    least = (_column_bound(rest[:, d], float(cap)) for d, cap in enumerate(caps))
    return int(alone.sum()) + max(least, default=0)


def _column_bound(column: FloatArray, cap: float) -> int:
    """A lower bound on bins that hold `cap` of this column each; no entry exceeds the cap.

    Numbers that are not integers are rounded down to shares of the cap, so that what fits still
    fits.
    """
    column = column[column > 0]
    if len(column) == 0:
        return 0
    whole = cap == np.floor(cap) and (column == np.floor(column)).all()
    if whole and max(cap, column.sum()) < 2**53:
        return pack_bound(column.astype(np.int64), int(cap))
    share = column / (cap * (1 + _SLACK))
    parts = np.floor(share * _PARTS).astype(np.int64)
    return max(pack_bound(parts[parts > 0], _PARTS), int(np.ceil(share.sum() * (1 - _SLACK))))


def row_bound(most: NDArray[np.integer]) -> int:
    """A lower bound on the padded micro-batches that hold these rows.

    `most[i]` rows fit where row i is the widest. Narrower rows allow at least as many. From the
    widest down, each micro-batch takes rows while they fit, which is optimal.

    >>> row_bound(16 // np.array([8, 8, 3, 3]))
    2
    """
    ordered = np.sort(most)
    bound, at = 0, 0
    while at < len(ordered):
        at += max(int(ordered[at]), 1)
        bound += 1
    return bound


def makespan_bound(costs: NDArray[np.floating], ranks: int) -> float:
    """A lower bound on the load of the slowest rank: `core.makespan` for one step.

    >>> makespan_bound(np.array([3.0, 3.0, 2.0]), 2), makespan_bound(np.array([9.0, 1.0]), 2)
    (5.0, 9.0)
    """
    return float(makespans(np.asarray(costs, np.float64)[None, :], ranks)[0])


def lock_step_bound(
    sizes: NDArray[np.integer], costs: NDArray[np.floating], capacity: int, ranks: int
) -> float:
    """A lower bound on the sum over waves of the heaviest pack: `core.lock_step` for one step.

    >>> lock_step_bound(np.array([10, 1, 1, 1]), np.array([100.0, 1, 1, 1]), 10, 2)
    100.0
    """
    row = np.asarray(sizes, np.int64)[None, :], np.asarray(costs, np.float64)[None, :]
    return float(lock_steps(*row, capacity, ranks)[0])
