"""Dividing bins until there are as many as are needed, with the work kept even."""

import heapq

import numpy as np

from evenstep.core.ragged import IntArray, Ragged


def split_bins(sizes: IntArray, bins: Ragged, target: int) -> Ragged:
    """Divide the largest divisible bins, each time into two even halves, until there are `target`.

    >>> split_bins(np.array([4, 3, 2, 1]), Ragged.of([[0, 1, 2, 3]]), 2).tolist()
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
    """Two halves of nearly equal size, neither empty: longest first to the lighter side."""
    sides: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    ordered = np.array(row)[np.argsort(-sizes[row], kind="stable")].tolist()
    for item in ordered:
        side = int(loads[1] < loads[0])
        sides[side].append(item)
        loads[side] += int(sizes[item])
    return sides
