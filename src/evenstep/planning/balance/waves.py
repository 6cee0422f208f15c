"""The joint problem: packs under a hard capacity, equal counts and even ranks, all at once.

The packs of one step form positions x ranks. Where ranks meet at every micro-batch, a position
costs what its heaviest pack costs, so each position (a *wave* of one pack per rank) should hold
packs of one cost. Waves are filled one after the other from the largest units: one seed per
pack, then partners chosen so that every pack of the wave reaches the same cost just as its room
runs out. Swaps inside each wave then lower its heaviest pack.
"""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.balance.exchange import refine_waves
from evenstep.planning.kernel import kernel
from evenstep.planning.packing.first_fit import nearest_free

_LOOK = 256  # units looked at in a row that a further limit keeps out
_GOOD = 1.003  # waves this even are not worth another attempt


@kernel
def first_fitting(sizes: IntArray, room: int) -> int:
    """Sizes run from large to small: the first index that is at most `room`."""
    low, high = 0, sizes.shape[0]
    while low < high:
        middle = (low + high) // 2
        if sizes[middle] <= room:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def first_light(sizes: IntArray, costs: FloatArray, low: int, rate: float, most: float) -> int:
    """From `low` on, the first index whose cost per slot exceeds `rate` by at most `most`."""
    high = sizes.shape[0]
    while low < high:
        middle = (low + high) // 2
        if costs[middle] - rate * sizes[middle] <= most * sizes[middle]:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def fits(extra: FloatArray, held: FloatArray, unit: int, pack: int, caps: FloatArray) -> bool:
    """Whether the pack stays within every further limit when the unit joins it."""
    for d in range(caps.shape[0]):
        if held[pack, d] + extra[unit, d] > caps[d]:
            return False
    return True


@kernel
def place(
    unit: int,
    pack: int,
    sizes: IntArray,
    costs: FloatArray,
    extra: FloatArray,
    size: IntArray,
    cost: FloatArray,
    held: FloatArray,
    pack_of: IntArray,
    after: IntArray,
    before: IntArray,
) -> None:
    """Put the unit into the pack and take it out of the lists of free units."""
    pack_of[unit] = pack
    size[pack] += sizes[unit]
    cost[pack] += costs[unit]
    for d in range(held.shape[1]):
        held[pack, d] += extra[unit, d]
    after[unit] = unit + 1
    before[unit + 1] = unit


@kernel
def fill_waves(
    sizes: IntArray,
    costs: FloatArray,
    extra: FloatArray,
    caps: FloatArray,
    capacity: int,
    ranks: int,
    positions: int,
    levelled: int,
    brim: float,
) -> tuple[IntArray, IntArray, FloatArray, FloatArray, int]:
    """(pack of each unit, then size, cost and extras of each pack, units that found no place).

    Units come largest first. Pack p * ranks + r is rank r's in wave p. The first `levelled` waves
    get partners that level their packs; in the others, units simply go, largest first, to the
    cheapest pack of the wave with room. `brim` says how much of the spare room a levelled wave
    may use up: 0 spreads it evenly over all waves, 1 fills each wave to the capacity.
    """
    n = sizes.shape[0]
    packs = ranks * positions
    pack_of = np.full(n, -1, np.int64)
    size = np.zeros(packs, np.int64)
    cost = np.zeros(packs)
    held = np.zeros((packs, caps.shape[0]))
    after = np.arange(n + 1)  # the next free unit
    before = np.arange(n + 1)  # shifted by one: entry u + 1 is unit u
    rate = np.inf  # the cheapest cost per slot; the rest is what must be levelled
    cost_left = 0.0
    size_left = 0
    for u in range(n):
        rate = min(rate, costs[u] / sizes[u])
        cost_left += costs[u]
        size_left += sizes[u]
    rate = rate if n else 0.0
    for p in range(positions):
        first = p * ranks
        mean = size_left / ((positions - p) * ranks)
        target = int(min(float(capacity), np.ceil(mean + brim * (capacity - mean))))
        level = (cost_left - rate * size_left) / max(size_left, 1) * target
        unit = nearest_free(after, 0)
        for pack in range(first, first + ranks):
            if unit == n:
                break
            place(unit, pack, sizes, costs, extra, size, cost, held, pack_of, after, before)
            level = max(level, costs[unit] - rate * sizes[unit], costs[unit] - rate * target)
            unit = nearest_free(after, unit + 1)
        if p >= levelled:
            fill_cheapest(
                first, ranks, unit, sizes, costs, extra, caps, capacity,
                size, cost, held, pack_of, after, before,
            )  # fmt: skip
        else:
            for pack in range(first, first + ranks):
                while True:
                    room = target - size[pack]
                    start = nearest_free(after, first_fitting(sizes, room))
                    if start == n:
                        break
                    due = (level - (cost[pack] - rate * size[pack])) / room
                    unit = nearest_free(after, first_light(sizes, costs, start, rate, due))
                    if unit == n:
                        unit = nearest_free(before, n) - 1
                    looked = 0
                    while unit < n and not fits(extra, held, unit, pack, caps):
                        looked += 1
                        unit = nearest_free(after, unit + 1) if looked < _LOOK else n
                    if unit == n:
                        break
                    place(unit, pack, sizes, costs, extra, size, cost, held, pack_of, after, before)
        for pack in range(first, first + ranks):
            cost_left -= cost[pack]
            size_left -= size[pack]
    missing = 0
    for u in range(n):
        missing += pack_of[u] < 0
    return pack_of, size, cost, held, missing


@kernel
def fill_cheapest(
    first: int,
    ranks: int,
    unit: int,
    sizes: IntArray,
    costs: FloatArray,
    extra: FloatArray,
    caps: FloatArray,
    capacity: int,
    size: IntArray,
    cost: FloatArray,
    held: FloatArray,
    pack_of: IntArray,
    after: IntArray,
    before: IntArray,
) -> None:
    """Fill one wave from `unit` on, largest first, each unit into the cheapest pack with room."""
    n = sizes.shape[0]
    refused = 0
    while unit < n and refused < _LOOK:
        chosen, most = -1, 0
        for pack in range(first, first + ranks):
            room = capacity - size[pack]
            most = max(most, room)
            if (
                room >= sizes[unit]
                and (chosen < 0 or cost[pack] < cost[chosen])
                and fits(extra, held, unit, pack, caps)
            ):
                chosen = pack
        if chosen >= 0:
            refused = 0
            place(unit, chosen, sizes, costs, extra, size, cost, held, pack_of, after, before)
        elif most == 0:
            break
        elif most >= sizes[unit]:
            refused += 1  # there is room, but a further limit is in the way
        unit = nearest_free(after, max(unit + 1, first_fitting(sizes, most)))


@kernel
def lock_step(cost: FloatArray, ranks: int, positions: int) -> float:
    """The sum over positions of the heaviest pack."""
    total = 0.0
    for p in range(positions):
        heaviest = 0.0
        for r in range(ranks):
            heaviest = max(heaviest, cost[p * ranks + r])
        total += heaviest
    return total


@kernel
def best_waves(
    sizes: IntArray,
    costs: FloatArray,
    extra: FloatArray,
    caps: FloatArray,
    capacity: int,
    ranks: int,
    positions: int,
) -> IntArray:
    """The pack of each unit in the most even attempt; empty if the units fit in none."""
    best_pack = np.empty(0, np.int64)
    best = np.inf
    quarter, half = max(positions // 4, 1), max(positions // 2, 1)
    for levelled, brim in ((positions - quarter, 0.3), (positions - half, 1.0), (0, 1.0)):
        pack_of, size, cost, held, missing = fill_waves(
            sizes, costs, extra, caps, capacity, ranks, positions, levelled, brim
        )
        if missing > 0:
            continue
        refine_waves(
            sizes, costs, extra, caps, capacity, ranks, positions, pack_of, size, cost, held
        )
        reached = lock_step(cost, ranks, positions)
        if reached < best:
            best, best_pack = reached, pack_of
        if best <= costs.sum() / ranks * _GOOD or brim == 1.0:
            break
    return best_pack
