"""What no plan can beat: bounds on the number of packs and on the slowest rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.rounding import divided_up

_PARTS = 2**30  # of a limit that is not a whole number
_SLACK = 2e-9  # what a sum of floats may exceed such a limit by, and some more


def pack_bound(sizes: NDArray[np.integer], capacity: int) -> int:
    """At least so many packs of `capacity` are needed.

    Items that can share with one other item at best are paired with the largest that fits, which
    no packing improves on, and set aside; for the rest the L2 bound of Martello and Toth holds.

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


def _set_aside(ordered: IntArray, capacity: int) -> tuple[int, IntArray]:
    """(packs that are settled, the other sizes): each large item with its best single partner.

    capacity 10, sizes [3, 4, 6, 9] -> 9 stays alone, 6 takes 4; 2 packs, and [3] is left.
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
    """The L2 bound: for a threshold t, items over capacity - t share with nothing of t or more,
    and items over half share with no other large one; whatever of the middle does not fit beside
    them needs packs of its own. The best threshold counts.
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
    """At least so many bins are needed, by every limit: `taken[i, d]` of `caps[d]` for item i.

    An item over a limit by itself has a bin to itself; the others need as many as the limit that
    asks for the most.

    >>> two = np.array([[5.0, 50.0]] * 16)  # tokens, patches
    >>> bins_bound(two, np.array([100.0, 1000.0])), bins_bound(two, np.array([100.0, 100.0]))
    (1, 8)
    """
    alone = (taken > caps).any(axis=1)
    rest = taken[~alone]
    least = (_column_bound(rest[:, d], float(cap)) for d, cap in enumerate(caps))
    return int(alone.sum()) + max(least, default=0)


def _column_bound(column: FloatArray, cap: float) -> int:
    """At least so many bins that hold `cap` of this column each; none of it is over the cap.

    What is not whole is rounded down to a share of the cap, so that whatever fits still does.
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
    """At least so many padded micro-batches are needed for these rows.

    `most[i]` rows fit where row i is the widest, and no fewer where a narrower one is. From the
    widest down, a micro-batch takes rows while they fit; no grouping does better.

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
    """The slowest rank carries at least the mean load, and what must share a rank.

    Of the ranks * j + 1 largest items, some rank has j + 1: the smallest of them at least. With
    j = 0, that is the largest item. Of [3, 3, 2], two share one of two ranks: 5 at least.

    >>> makespan_bound(np.array([3.0, 3.0, 2.0]), 2), makespan_bound(np.array([9.0, 1.0]), 2)
    (5.0, 9.0)
    """
    if len(costs) == 0:
        return 0.0
    total = np.concatenate(([0.0], np.cumsum(np.sort(costs)[::-1])))
    shared = np.arange((len(costs) - 1) // ranks + 1)
    crowded = total[ranks * shared + 1] - total[ranks * shared - shared]
    return float(max(costs.sum() / ranks, costs.max(), crowded.max()))


def lock_step_bound(
    sizes: NDArray[np.integer], costs: NDArray[np.floating], capacity: int, ranks: int
) -> float:
    """Where ranks meet at every pack, the sum over positions of the heaviest pack is at least this.

    Items over half the capacity lie in different packs, so the j-th heaviest position costs at
    least as much as the ((j - 1) * ranks + 1)-th heaviest of them. The j heaviest positions hold
    no more than their capacity of the items that cost most per slot; the others cost their mean.

    >>> lock_step_bound(np.array([10, 1, 1, 1]), np.array([100.0, 1, 1, 1]), 10, 2)
    100.0
    """
    if len(sizes) == 0:
        return 0.0
    large = np.sort(costs[2 * sizes > capacity])[::-1]
    dense = np.argsort(-costs / sizes, kind="stable")
    slots = np.concatenate(([0.0], np.cumsum(sizes[dense])))
    total = np.concatenate(([0.0], np.cumsum(costs[dense])))
    bound, heaviest = float(total[-1]) / ranks, 0.0
    for waves, first in enumerate(range(0, len(large), ranks), 1):
        heaviest += float(large[first])
        held = np.interp(min(waves * ranks * capacity, slots[-1]), slots, total)
        bound = max(bound, heaviest + float(total[-1] - held) / ranks)
    return bound
