"""The least time of any plan of a few items, by trying all of them."""

from functools import cache

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray


@cache
def partitions(count: int) -> IntArray:
    """All ways to put items into packs: the pack of each item, one way per row.

    >>> partitions(2).tolist()
    [[0, 0], [0, 1]]
    """
    found = np.zeros((1, 0), np.int64)
    for _ in range(count):
        packs = found.max(axis=1, initial=-1) + 2  # one of those in use, or a new one
        first = np.repeat(found, packs, axis=0)
        last = np.concatenate([np.arange(n) for n in packs])
        found = np.column_stack((first, last))
    return found


def pack_sums(values: FloatArray, count: int) -> FloatArray:
    """For each way, the sum of `values` in each pack: ways x packs."""
    ways = partitions(count)
    return np.stack([(ways == pack) @ values for pack in range(count)], axis=1)


def least_lock_step(sizes: IntArray, costs: FloatArray, capacity: int, ranks: int) -> float:
    """The least sum over waves of the most expensive pack. Larger items run alone."""
    n = len(sizes)
    alone = (pack_sums((sizes > capacity) * 1.0, n) > 0) & (pack_sums(np.ones(n), n) > 1)
    held = pack_sums(np.minimum(sizes, capacity) * 1.0, n)
    possible = (held <= capacity).all(axis=1) & ~alone.any(axis=1)
    packs = -np.sort(-pack_sums(costs, n)[possible], axis=1)
    return float(packs[:, ::ranks].sum(axis=1).min())


@cache
def _assignments(count: int, ranks: int) -> IntArray:
    """All ways to give items to ranks."""
    return np.stack(np.meshgrid(*[np.arange(ranks)] * count, indexing="ij"), -1).reshape(-1, count)


def least_makespan(costs: FloatArray, ranks: int) -> float:
    """The least load of the slowest rank."""
    ways = _assignments(len(costs), ranks)
    loads = np.stack([(ways == rank) @ costs for rank in range(ranks)], axis=1)
    return float(loads.max(axis=1).min())
