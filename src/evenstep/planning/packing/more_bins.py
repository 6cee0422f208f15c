"""Spread items evenly over more bins than they need."""

import heapq

import numpy as np

from evenstep.core.ragged import IntArray, Ragged
from evenstep.planning.balance.partition import partition
from evenstep.planning.packing.spread import spread_kernel

_REFINED = 1024  # bins up to which `partition` is used
_NONE: IntArray = np.empty(0, np.int64)


def even_bins(sizes: IntArray, bins: Ragged, capacity: int, target: int) -> Ragged:
    """The items of `bins` in `target` bins of similar size.

    `partition` is tried first. If it exceeds the capacity, or for very many bins, each item goes,
    longest first, to the emptiest bin with room. If an item fits nowhere, `bins` are divided.

    >>> even_bins(np.full(12, 10), Ragged.of([[*range(12)]]), 120, 3).sums(np.full(12, 10)).tolist()
    [40, 40, 40]
    """
    bin_of = partition(sizes, target) if target <= _REFINED else _NONE
    if len(bin_of) == 0 or np.bincount(bin_of, sizes, target).max() > capacity:
        order = np.argsort(-sizes, kind="stable")
        bin_of = spread_kernel(
            sizes.astype(np.float64)[:, None], order, np.array([float(capacity)]), target
        )
    if len(bin_of) < len(sizes) or np.bincount(bin_of, minlength=target).min() == 0:
        return divide_bins(sizes, bins, target)
    return Ragged.group(bin_of, target)


def divide_bins(sizes: IntArray, bins: Ragged, target: int) -> Ragged:
    """Divide the largest bins into two halves of similar size until there are `target`.

    >>> divide_bins(np.array([4, 3, 2, 1]), Ragged.of([[0, 1, 2, 3]]), 2).tolist()
    [[0, 3], [1, 2]]
    """
    rows = bins.tolist()
    heap = [(-int(sizes[row].sum()), at) for at, row in enumerate(rows) if len(row) > 1]
    heapq.heapify(heap)
    while len(rows) < target and heap:
        _, at = heapq.heappop(heap)
        first, second = halves(sizes, rows[at])
        rows[at] = first
        rows.append(second)
        for index in (at, len(rows) - 1):
            if len(rows[index]) > 1:
                heapq.heappush(heap, (-int(sizes[rows[index]].sum()), index))
    return Ragged.of(rows)


def halves(sizes: IntArray, row: list[int]) -> tuple[list[int], list[int]]:
    """Two halves of similar size, neither empty: longest first, each to the smaller half."""
    sides: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    ordered = np.array(row)[np.argsort(-sizes[row], kind="stable")].tolist()
    for item in ordered:
        side = int(loads[1] < loads[0])
        sides[side].append(item)
        loads[side] += int(sizes[item])
    return sides
