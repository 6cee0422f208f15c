"""Assign units to ranks first, then form the packs of each rank.

Where ranks synchronise once per step only their sums count, so `partition` makes these even, and
best fit forms each rank's packs. Units that do not fit into their rank's packs go to another rank.
"""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernels import kernel


@kernel
def fit_ranks(
    order: IntArray,
    rank_of: IntArray,
    size: IntArray,
    cost: FloatArray,
    extra: FloatArray,
    capacity: int,
    caps: FloatArray,
    ranks: int,
    packs: int,
    strict: bool,
) -> IntArray:
    """The pack `rank * packs + i` of each unit; empty if a unit fits nowhere.

    Each unit goes, in `order`, to the fullest pack of its rank with room. A unit without room goes
    at the end to the pack with room whose rank has the least cost, unless `strict`. A unit over a
    limit needs an empty pack.
    """
    n = size.shape[0]
    pack_of = np.full(n, -1, np.int64)
    held = np.zeros(ranks * packs, np.int64)
    used = np.zeros((ranks * packs, caps.shape[0]))
    number = np.zeros(ranks * packs, np.int64)
    load = np.zeros(ranks)
    left = np.empty(n, np.int64)
    count = 0
    for u in order:
        r = rank_of[u]
        chosen, fullest, most = -1, -1, capacity - size[u]
        for p in range(r * packs, (r + 1) * packs):
            if (
                fullest < held[p]
                and (held[p] <= most or number[p] == 0)  # seen first, as it is cheap
                and has_room(u, p, size, extra, capacity, caps, held, used, number)
            ):
                chosen, fullest = p, held[p]
        if chosen < 0:
            if strict:
                return np.empty(0, np.int64)
            left[count] = u
            count += 1
            continue
        pack_of[u] = chosen
        held[chosen] += size[u]
        number[chosen] += 1
        load[r] += cost[u]
        for d in range(caps.shape[0]):
            used[chosen, d] += extra[u, d]
    for k in range(count):
        u = left[k]
        chosen = -1
        for p in range(ranks * packs):
            if chosen >= 0 and (
                load[p // packs] > load[chosen // packs]
                or (p // packs == chosen // packs and held[p] <= held[chosen])
            ):
                continue
            if has_room(u, p, size, extra, capacity, caps, held, used, number):
                chosen = p
        if chosen < 0:
            return np.empty(0, np.int64)
        pack_of[u] = chosen
        held[chosen] += size[u]
        number[chosen] += 1
        load[chosen // packs] += cost[u]
        for d in range(caps.shape[0]):
            used[chosen, d] += extra[u, d]
    return pack_of


@kernel
def has_room(
    u: int,
    p: int,
    size: IntArray,
    extra: FloatArray,
    capacity: int,
    caps: FloatArray,
    held: IntArray,
    used: FloatArray,
    number: IntArray,
) -> bool:
    """Whether pack p keeps every limit when unit u joins it, or is empty."""
    if number[p] == 0:
        return True
    if held[p] + size[u] > capacity:
        return False
    for d in range(caps.shape[0]):
        if used[p, d] + extra[u, d] > caps[d]:
            return False
    return True
