"""Deal packs to ranks: which rank runs which pack, and in which wave.

An *address* is `wave * ranks + rank`: it numbers the packs of a step wave by wave.
"""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.balance.partition import partition
from evenstep.planning.kernels import kernel, rise, sink

_SWAPS = 200


def deal_waves(costs: FloatArray) -> IntArray:
    """costs[w, i] of pack i in wave w -> the rank of each, such that the ranks' sums are even."""
    return deal_kernel(costs, np.argsort(-costs, axis=1, kind="stable"))


@kernel
def deal_kernel(costs: FloatArray, heaviest: IntArray) -> IntArray:
    """`deal_waves`; `heaviest[w]` are the packs of wave w, heaviest first.

    In each wave the heaviest pack goes to the rank with the least load so far. Then packs of one
    wave are swapped between the heaviest rank and another while that lowers the heaviest.
    """
    waves, ranks = costs.shape
    pack = np.empty((waves, ranks), np.int64)  # the pack that each rank runs in each wave
    load = np.zeros(ranks)
    lightest = np.empty(ranks, np.int64)  # a heap of the ranks, the least load first
    for w in range(waves):
        for r in range(ranks):
            lightest[r] = r
            rise(lightest, r + 1, load, True)
        for i in range(ranks):
            left = ranks - 1 - i
            r = lightest[0]
            lightest[0] = lightest[left]
            sink(lightest, left, load, 0, True)
            pack[w, r] = heaviest[w, i]
            load[r] += costs[w, heaviest[w, i]]
    for _ in range(_SWAPS):
        heavy = np.argmax(load)
        best, best_w, best_r = load[heavy] * (1 - 1e-9), -1, -1
        for r in range(ranks):
            if (load[heavy] + load[r]) / 2 >= best:
                continue
            for w in range(waves):
                gain = costs[w, pack[w, heavy]] - costs[w, pack[w, r]]
                reached = max(load[heavy] - gain, load[r] + gain)
                if reached < best:
                    best, best_w, best_r = reached, w, r
        if best_w < 0:
            break
        gain = costs[best_w, pack[best_w, heavy]] - costs[best_w, pack[best_w, best_r]]
        load[heavy] -= gain
        load[best_r] += gain
        kept = pack[best_w, heavy]
        pack[best_w, heavy] = pack[best_w, best_r]
        pack[best_w, best_r] = kept
    rank = np.empty((waves, ranks), np.int64)
    for w in range(waves):
        for r in range(ranks):
            rank[w, pack[w, r]] = r
    return rank


def deal_packs(costs: FloatArray, ranks: int, balance: str, sync_every: str) -> IntArray:
    """The address `wave * ranks + rank` of each pack; every rank runs equally many.

    Where ranks synchronise at every micro-batch, packs of similar cost share a wave. Where they
    synchronise once per step, only the ranks' sums count. Every rank runs its packs heaviest first.

    >>> deal_packs(np.array([9.0, 5, 8, 4]), 2, "refined", "micro_batch").tolist()
    [0, 3, 1, 2]
    """
    waves = len(costs) // ranks
    address = np.empty(len(costs), np.int64)
    heaviest = np.argsort(-costs, kind="stable")
    if balance == "refined" and sync_every == "micro_batch":
        rank = deal_waves(costs[heaviest].reshape(waves, ranks))
        address[heaviest] = (np.arange(waves)[:, None] * ranks + rank).ravel()
        return address
    part = partition(costs, ranks, balance, equal_sizes=True)
    by_rank = heaviest[np.argsort(part[heaviest], kind="stable")].reshape(ranks, waves)
    address[by_rank] = np.arange(waves)[None, :] * ranks + np.arange(ranks)[:, None]
    return address


def deal_rows(costs: FloatArray, waves: int, ranks: int, rows: int) -> IntArray:
    """The new address of each pack, such that the sums over each rank's rows are even.

    `costs` are by address, `ranks * rows` of each wave. Packs stay in their wave.
    """
    by_wave = costs.reshape(waves, ranks * rows)
    moved = np.empty((waves, ranks * rows), np.int64)
    total = np.empty((waves, ranks))
    for wave in range(waves):
        part = partition(by_wave[wave], ranks, equal_sizes=True)
        by_part = np.argsort(part, kind="stable").reshape(ranks, rows)
        moved[wave, by_part.ravel()] = np.arange(ranks * rows)
        total[wave] = by_wave[wave][by_part].sum(axis=1)
    rank = deal_waves(total)
    pack = np.take_along_axis(rank, moved // rows, axis=1) * rows + moved % rows
    return (np.arange(waves)[:, None] * ranks * rows + pack).ravel()
