"""Relief: exchanges of units that lower the heaviest pack of each wave."""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernel import kernel

_CLOSE = 1e-3  # a heaviest pack this near its wave's mean is left alone
_ROUNDS = 100  # exchanges per wave
_SEEN = 64  # units of a pack that are considered for an exchange


@kernel
def refine_waves(
    sizes: IntArray,
    costs: FloatArray,
    extra: FloatArray,
    caps: FloatArray,
    capacity: int,
    ranks: int,
    positions: int,
    pack_of: IntArray,
    size: IntArray,
    cost: FloatArray,
    held: FloatArray,
) -> None:
    """Move or swap units between the heaviest pack of each wave and the others, in place.

    Pack p * ranks + r is rank r's in wave p; `size`, `cost` and `held` are the packs' sums.
    """
    n = sizes.shape[0]
    start = np.zeros(ranks * positions + 1, np.int64)
    for u in range(n):
        start[pack_of[u] + 1] += 1
    for pack in range(ranks * positions):
        start[pack + 1] += start[pack]
    cursor = start[:-1].copy()
    units = np.empty(n, np.int64)  # by pack
    for u in range(n):
        units[cursor[pack_of[u]]] = u
        cursor[pack_of[u]] += 1
    for p in range(positions):
        first = p * ranks
        mean, most = 0.0, 0
        for pack in range(first, first + ranks):
            mean += cost[pack] / ranks
            most = max(most, start[pack + 1] - start[pack])
        member = np.empty((ranks, most + _ROUNDS), np.int64)
        filled = np.zeros(ranks, np.int64)
        for lane in range(ranks):
            for at in range(start[first + lane], start[first + lane + 1]):
                member[lane, filled[lane]] = units[at]
                filled[lane] += 1
        for _ in range(_ROUNDS):
            a = int(np.argmax(cost[first : first + ranks]))
            if cost[first + a] <= mean * (1 + _CLOSE):
                break
            b, x, y = best_exchange(
                a, first, ranks, sizes, costs, extra, caps, capacity,
                member, filled, size, cost, held,
            )  # fmt: skip
            if b < 0:
                break
            i = member[a, x]
            j = member[b, y] if y >= 0 else -1
            exchange(i, j, first + a, first + b, sizes, costs, extra, size, cost, held, pack_of)
            if j >= 0:
                member[a, x] = j
                member[b, y] = i
            else:
                filled[a] -= 1
                member[a, x] = member[a, filled[a]]
                member[b, filled[b]] = i
                filled[b] += 1


@kernel
def best_exchange(
    a: int,
    first: int,
    ranks: int,
    sizes: IntArray,
    costs: FloatArray,
    extra: FloatArray,
    caps: FloatArray,
    capacity: int,
    member: IntArray,
    filled: IntArray,
    size: IntArray,
    cost: FloatArray,
    held: FloatArray,
) -> tuple[int, int, int]:
    """What lane a had better give away: (lane b, place of the unit in a, place of the unit that
    comes back from b or -1). Lane -1 if nothing helps. Of a crowded pack, some units are seen.
    """
    top = cost[first + a]
    best = top * (1 - 1e-7)
    found = (-1, -1, -1)
    step = (filled[a] + _SEEN - 1) // _SEEN
    for b in range(ranks):
        gap = top - cost[first + b]
        # The best that an exchange can do is to meet in the middle.
        if b == a or top - gap / 2 >= best:
            continue
        stride = max((filled[b] + _SEEN - 1) // _SEEN, 1)
        for x in range(0, filled[a], step):
            i = member[a, x]
            for y in range(-1, filled[b], stride):
                j = member[b, y] if y >= 0 else -1
                difference = costs[i] - (costs[j] if j >= 0 else 0.0)
                reached = max(top - difference, top - gap + difference)
                if reached >= best:
                    continue
                larger = sizes[i] - (sizes[j] if j >= 0 else 0)
                if size[first + b] + larger > capacity or size[first + a] - larger > capacity:
                    continue
                if not exchange_fits(extra, held, i, j, first + a, first + b, caps):
                    continue
                best = reached
                found = (b, x, y)
    return found


@kernel
def exchange_fits(
    extra: FloatArray, held: FloatArray, i: int, j: int, a: int, b: int, caps: FloatArray
) -> bool:
    """Whether both packs keep their further limits if i leaves a for b, and j (or none) returns."""
    for d in range(caps.shape[0]):
        more = extra[i, d] - (extra[j, d] if j >= 0 else 0.0)
        if held[b, d] + more > caps[d] or held[a, d] - more > caps[d]:
            return False
    return True


@kernel
def exchange(
    i: int,
    j: int,
    a: int,
    b: int,
    sizes: IntArray,
    costs: FloatArray,
    extra: FloatArray,
    size: IntArray,
    cost: FloatArray,
    held: FloatArray,
    pack_of: IntArray,
) -> None:
    """Unit i goes from pack a to pack b; unit j, unless -1, comes back."""
    for unit, source, target in ((i, a, b), (j, b, a)):
        if unit < 0:
            continue
        pack_of[unit] = target
        size[source] -= sizes[unit]
        size[target] += sizes[unit]
        cost[source] -= costs[unit]
        cost[target] += costs[unit]
        for d in range(held.shape[1]):
            held[source, d] -= extra[unit, d]
            held[target, d] += extra[unit, d]
