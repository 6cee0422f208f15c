"""Dealing: which rank runs which pack, and in which order."""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.balance.partition import partition
from evenstep.planning.kernel import kernel

_SWAPS = 200


@kernel
def deal_waves(costs: FloatArray) -> IntArray:
    """costs[p, i] of pack i in wave p -> the rank of each, so that the ranks' sums level out.

    In each wave the heaviest pack goes to the lightest rank so far; then packs of one wave are
    swapped between the heaviest rank and another while that helps.
    """
    positions, ranks = costs.shape
    pack = np.empty((positions, ranks), np.int64)  # the pack that each rank runs in each wave
    load = np.zeros(ranks)
    for p in range(positions):
        heaviest = np.argsort(-costs[p], kind="mergesort")
        lightest = np.argsort(load, kind="mergesort")
        for i in range(ranks):
            pack[p, lightest[i]] = heaviest[i]
            load[lightest[i]] += costs[p, heaviest[i]]
    for _ in range(_SWAPS):
        heavy = np.argmax(load)
        best, best_p, best_r = load[heavy] * (1 - 1e-9), -1, -1
        for r in range(ranks):
            if (load[heavy] + load[r]) / 2 >= best:
                continue
            for p in range(positions):
                gain = costs[p, pack[p, heavy]] - costs[p, pack[p, r]]
                reached = max(load[heavy] - gain, load[r] + gain)
                if reached < best:
                    best, best_p, best_r = reached, p, r
        if best_p < 0:
            break
        gain = costs[best_p, pack[best_p, heavy]] - costs[best_p, pack[best_p, best_r]]
        load[heavy] -= gain
        load[best_r] += gain
        kept = pack[best_p, heavy]
        pack[best_p, heavy] = pack[best_p, best_r]
        pack[best_p, best_r] = kept
    rank = np.empty((positions, ranks), np.int64)
    for p in range(positions):
        for r in range(ranks):
            rank[p, pack[p, r]] = r
    return rank


def deal_packs(costs: FloatArray, ranks: int, balance: str, sync_every: str) -> IntArray:
    """The place `position * ranks + rank` of each pack; every rank runs equally many.

    Where ranks synchronise at every micro-batch, packs of similar cost share a position; once per
    step, only the ranks' sums count. Every rank runs its packs heaviest first.

    >>> deal_packs(np.array([9.0, 5, 8, 4]), 2, "refined", "micro_batch").tolist()
    [0, 3, 1, 2]
    """
    positions = len(costs) // ranks
    place = np.empty(len(costs), np.int64)
    heaviest = np.argsort(-costs, kind="stable")
    if balance == "refined" and sync_every == "micro_batch":
        rank = deal_waves(costs[heaviest].reshape(positions, ranks))
        place[heaviest] = (np.arange(positions)[:, None] * ranks + rank).ravel()
        return place
    part = partition(costs, ranks, balance, equal_sizes=True)
    by_rank = heaviest[np.argsort(part[heaviest], kind="stable")].reshape(ranks, positions)
    place[by_rank] = np.arange(positions)[None, :] * ranks + np.arange(ranks)[:, None]
    return place
