"""Form the packs of a step as waves: hard capacity, equal counts and even ranks together.

A wave has one pack per rank. Where ranks synchronise at every micro-batch, a wave takes as long as
its most expensive pack, so all packs of a wave should cost the same. Waves are filled one after
the other, largest units first: each pack starts with one unit, then gets partners such that all
packs of the wave reach the same cost when they are full. Exchanges within each wave then lower its
most expensive pack.
"""

from typing import NamedTuple

import numpy as np

from evenstep.core.measures import slowest
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.balance.exchange import PackLimits, UnitArrays, WavePacks, refine_waves
from evenstep.planning.kernels import kernel, nearest_free, rise, sink

_LOOK = 256  # units tried in a row that a further limit rejects
_GOOD = 1.003  # waves this even need no further attempt


class FreeUnits(NamedTuple):
    """Links that `nearest_free` follows to units that are in no pack yet.

    `after` leads to the next free unit, `before` to the previous one. `before` is shifted by one:
    entry u + 1 is unit u.
    """

    after: IntArray
    before: IntArray


@kernel
def first_fitting(sizes: IntArray, room: int) -> int:
    """The first index whose size is at most `room`. Sizes descend."""
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
def fits(unit: int, pack: int, units: UnitArrays, limits: PackLimits, packs: WavePacks) -> bool:
    """Whether the pack keeps every further limit when the unit joins it."""
    for d in range(limits.caps.shape[0]):
        if packs.held[pack, d] + units.extra[unit, d] > limits.caps[d]:
            return False
    return True


@kernel
def put(unit: int, pack: int, units: UnitArrays, packs: WavePacks, free: FreeUnits) -> None:
    """Put the unit into the pack and remove it from the free units."""
    packs.pack_of[unit] = pack
    packs.size[pack] += units.size[unit]
    packs.cost[pack] += units.cost[unit]
    for d in range(packs.held.shape[1]):
        packs.held[pack, d] += units.extra[unit, d]
    free.after[unit] = unit + 1
    free.before[unit + 1] = unit


@kernel
def fill_waves(
    units: UnitArrays, limits: PackLimits, ranks: int, waves: int, levelled: int, fullness: float
) -> tuple[WavePacks, int]:
    """(the packs, how many units fit nowhere). Units come largest first.

    The packs of the first `levelled` waves get partners that level their costs. In the other waves
    each unit goes to the cheapest pack of the wave with room. `fullness` says how much of the spare
    room a levelled wave may use: 0 spreads it evenly over all waves, 1 fills each wave to capacity.
    """
    n = units.size.shape[0]
    count = ranks * waves
    packs = WavePacks(
        np.full(n, -1, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count),
        np.zeros((count, limits.caps.shape[0])),
    )
    free = FreeUnits(np.arange(n + 1), np.arange(n + 1))
    rate = np.inf  # the least cost per slot; only cost above it has to be levelled
    cost_left = 0.0
    size_left = 0
    for u in range(n):
        rate = min(rate, units.cost[u] / units.size[u])
        cost_left += units.cost[u]
        size_left += units.size[u]
    rate = rate if n else 0.0
    for wave in range(waves):
        first = wave * ranks
        mean = size_left / ((waves - wave) * ranks)
        room = float(limits.capacity)
        target = int(min(room, np.ceil(mean + fullness * (limits.capacity - mean))))
        level = (cost_left - rate * size_left) / max(size_left, 1) * target
        unit = nearest_free(free.after, 0)
        for pack in range(first, first + ranks):
            if unit == n:
                break
            put(unit, pack, units, packs, free)
            cost, size = units.cost[unit], units.size[unit]
            level = max(level, cost - rate * size, cost - rate * target)
            unit = nearest_free(free.after, unit + 1)
        if wave >= levelled:
            fill_cheapest(unit, first, ranks, units, limits, packs, free)
        else:
            for pack in range(first, first + ranks):
                fill_level(pack, target, level, rate, units, limits, packs, free)
        for pack in range(first, first + ranks):
            cost_left -= packs.cost[pack]
            size_left -= packs.size[pack]
    missing = 0
    for u in range(n):
        missing += packs.pack_of[u] < 0
    return packs, missing


@kernel
def fill_level(
    pack: int,
    target: int,
    level: float,
    rate: float,
    units: UnitArrays,
    limits: PackLimits,
    packs: WavePacks,
    free: FreeUnits,
) -> None:
    """Fill the pack to `target` slots with units that bring its cost above `rate` to `level`."""
    n = units.size.shape[0]
    while True:
        room = target - packs.size[pack]
        start = nearest_free(free.after, first_fitting(units.size, room))
        if start == n:
            break
        due = (level - (packs.cost[pack] - rate * packs.size[pack])) / room
        unit = nearest_free(free.after, first_light(units.size, units.cost, start, rate, due))
        if unit == n:
            unit = nearest_free(free.before, n) - 1
        looked = 0
        while unit < n and not fits(unit, pack, units, limits, packs):
            looked += 1
            unit = nearest_free(free.after, unit + 1) if looked < _LOOK else n
        if unit == n:
            break
        put(unit, pack, units, packs, free)


@kernel
def fill_cheapest(
    unit: int,
    first: int,
    ranks: int,
    units: UnitArrays,
    limits: PackLimits,
    packs: WavePacks,
    free: FreeUnits,
) -> None:
    """Fill one wave from `unit` on, largest first, each unit into the cheapest pack with room.

    One heap holds the packs with room for the unit, cheapest first; the other those without, by
    room. Sizes descend, so packs only return from the second to the first when they are not full.
    """
    n = units.size.shape[0]
    room = np.empty(ranks)  # negative, so that the most room comes first
    for i in range(ranks):
        room[i] = packs.size[first + i] - limits.capacity
    cost = packs.cost[first : first + ranks].copy()
    ready, waiting = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    cheap, late = 0, 0
    for i in range(ranks):
        waiting[late] = i
        late += 1
        rise(waiting, late, room, True)
    tried = np.empty(_LOOK, np.int64)
    rejected = 0
    while unit < n and rejected < _LOOK:
        size = units.size[unit]
        while late > 0 and -room[waiting[0]] >= size:
            ready[cheap] = waiting[0]
            cheap += 1
            rise(ready, cheap, cost, True)
            late -= 1
            waiting[0] = waiting[late]
            sink(waiting, late, room, 0, True)
        if cheap == 0:
            most = -room[waiting[0]] if late > 0 else 0.0
            if most <= 0:
                break
            unit = nearest_free(free.after, max(unit + 1, first_fitting(units.size, int(most))))
            continue
        chosen, looked = -1, 0
        while cheap > 0 and looked < _LOOK and chosen < 0:
            pack = ready[0]
            cheap -= 1
            ready[0] = ready[cheap]
            sink(ready, cheap, cost, 0, True)
            if -room[pack] < size:  # filled since it became ready
                waiting[late] = pack
                late += 1
                rise(waiting, late, room, True)
                continue
            tried[looked] = pack
            looked += 1
            if fits(unit, first + pack, units, limits, packs):
                chosen = pack
        if chosen >= 0:
            rejected = 0
            put(unit, first + chosen, units, packs, free)
            room[chosen] += size
            cost[chosen] = packs.cost[first + chosen]
        elif looked > 0:
            rejected += 1  # there is room, but a further limit rejects the unit
        for k in range(looked):
            ready[cheap] = tried[k]
            cheap += 1
            rise(ready, cheap, cost, True)
        if chosen >= 0 or looked > 0:
            unit = nearest_free(free.after, unit + 1)


@kernel
def fill_around(
    units: UnitArrays, limits: PackLimits, ranks: int, waves: int, pack_of: IntArray
) -> IntArray:
    """The pack of each unit; empty if one fits nowhere. Units come largest first.

    `pack_of` is -1 for units in no pack yet. Waves are filled one after the other, each unit into
    the cheapest pack of its wave with room.
    """
    n = units.size.shape[0]
    packs = WavePacks(
        pack_of.copy(),
        np.zeros(ranks * waves, np.int64),
        np.zeros(ranks * waves),
        np.zeros((ranks * waves, limits.caps.shape[0])),
    )
    free = FreeUnits(np.arange(n + 1), np.arange(n + 1))
    for u in range(n):
        if pack_of[u] >= 0:
            put(u, pack_of[u], units, packs, free)
    for wave in range(waves):
        unit = nearest_free(free.after, 0)
        fill_cheapest(unit, wave * ranks, ranks, units, limits, packs, free)
    return packs.pack_of if nearest_free(free.after, 0) == n else np.empty(0, np.int64)


def best_waves(units: UnitArrays, limits: PackLimits, ranks: int, waves: int) -> IntArray:
    """The pack of each unit in the most even attempt; empty if every attempt leaves units over."""
    best_pack = np.empty(0, np.int64)
    best = np.inf
    quarter, half = max(waves // 4, 1), max(waves // 2, 1)
    for levelled, fullness in ((waves - quarter, 0.3), (waves - half, 1.0), (0, 1.0)):
        packs, missing = fill_waves(units, limits, ranks, waves, levelled, fullness)
        if missing > 0:
            continue
        refine_waves(units, limits, ranks, waves, packs)
        reached = float(slowest(packs.cost.reshape(waves, ranks).T, "micro_batch"))
        if reached < best:
            best, best_pack = reached, packs.pack_of
        if best <= units.cost.sum() / ranks * _GOOD or fullness == 1.0:
            break
    return best_pack
