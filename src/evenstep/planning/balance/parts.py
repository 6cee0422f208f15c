"""Parts with their items and loads, and two heaps of the parts by load."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernels import kernel


class Parts(NamedTuple):
    """Items divided between parts. Items i with `start[p] <= i < start[p + 1]` are those of part p.

    `member[i]` is the number of such an item and `held[i]` its cost, heaviest first in each part.
    `load` is the cost of each part. `lightest` and `heaviest` are heaps of the parts, with the
    lightest and the heaviest part at the root; `in_lightest` and `in_heaviest` are the places of
    each part in them.
    """

    start: IntArray
    member: IntArray
    held: FloatArray
    load: FloatArray
    lightest: IntArray
    in_lightest: IntArray
    heaviest: IntArray
    in_heaviest: IntArray


@kernel
def gather_parts(costs: FloatArray, part_of: IntArray, count: int) -> Parts:
    """The parts of items with these costs, heaviest first."""
    n = costs.shape[0]
    start = np.zeros(count + 1, np.int64)
    for i in range(n):
        start[part_of[i] + 1] += 1
    start = np.cumsum(start)
    cursor = start.copy()
    member = np.empty(n, np.int64)
    held = np.empty(n)
    load = np.zeros(count)
    for i in range(n):
        at = cursor[part_of[i]]
        member[at], held[at] = i, costs[i]
        cursor[part_of[i]] += 1
        load[part_of[i]] += costs[i]
    lightest = np.argsort(load, kind="mergesort")
    heaviest = lightest[::-1].copy()
    in_lightest, in_heaviest = np.empty(count, np.int64), np.empty(count, np.int64)
    for k in range(count):
        in_lightest[lightest[k]] = k
        in_heaviest[heaviest[k]] = k
    return Parts(start, member, held, load, lightest, in_lightest, heaviest, in_heaviest)


@kernel
def settle(heap: IntArray, where: IntArray, load: FloatArray, sign: float, part: int) -> None:
    """Restore a heap after the load of `part` changed. The least `sign * load` is at the root."""
    node, count = where[part], heap.shape[0]
    key = sign * load[part]
    while node > 0 and key < sign * load[heap[(node - 1) // 2]]:
        above = (node - 1) // 2
        heap[node] = heap[above]
        where[heap[node]] = node
        node = above
    while True:
        child = 2 * node + 1
        if child + 1 < count and sign * load[heap[child + 1]] < sign * load[heap[child]]:
            child += 1
        if child >= count or sign * load[heap[child]] >= key:
            break
        heap[node] = heap[child]
        where[heap[node]] = node
        node = child
    heap[node] = part
    where[part] = node


@kernel
def sort_row(row: IntArray, held: FloatArray) -> None:
    """Sort the items of a part, heaviest first. Nearly all are in order already."""
    for first in range(1, row.shape[0]):
        item, cost, at = row[first], held[first], first
        while at > 0 and held[at - 1] < cost:
            row[at], held[at] = row[at - 1], held[at - 1]
            at -= 1
        row[at], held[at] = item, cost


@kernel
def exchange_items(parts: Parts, one: int, other: int, at: IntArray, to: IntArray) -> None:
    """Swap the items at the places `at` of part `one` with those at the places `to` of `other`."""
    for k in range(at.shape[0]):
        i, j = at[k], to[k]
        difference = parts.held[i] - parts.held[j]
        parts.load[one] -= difference
        parts.load[other] += difference
        parts.member[i], parts.member[j] = parts.member[j], parts.member[i]
        parts.held[i], parts.held[j] = parts.held[j], parts.held[i]
    for part in (one, other):
        first, last = parts.start[part], parts.start[part + 1]
        sort_row(parts.member[first:last], parts.held[first:last])
        settle(parts.lightest, parts.in_lightest, parts.load, 1.0, part)
        settle(parts.heaviest, parts.in_heaviest, parts.load, -1.0, part)
