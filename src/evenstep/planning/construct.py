"""Constructions: the packs of a step, given the number of waves.

Each is a function (problem, waves) -> address of each unit, which is empty if units do not fit that
way.

waves_first   packs of similar cost share a wave: for ranks that wait for each other in every wave
ranks_first   even ranks, then packs inside each rank: for ranks that wait once per step
filled        as few packs as a packer finds, the largest divided; units that fit no other way
narrow        packs of similar size, where all micro-batches have one width
kinds_apart   units with second work spread first, then the others around them
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from evenstep.core.layout import Packer
from evenstep.core.measures import slowest
from evenstep.core.ragged import FloatArray, IntArray, Ragged, divided_up, rounded_up, sum_by
from evenstep.errors import PlanError
from evenstep.planning.exchange import Shape
from evenstep.planning.kernels import kernel, nearest_free, rise, sink
from evenstep.planning.packers import divide_bins, pack
from evenstep.planning.partition import deal_packs, deal_rows, partition
from evenstep.planning.units import Problem, Units

NONE: IntArray = np.empty(0, np.int64)
BEST_FIT = "best_fit_decreasing"
_GOOD = 1.003  # waves this even need no further attempt
_SCANNED = 128  # packs of a rank up to which all are scanned for each unit
_LOOK = 32  # units or packs tried in a row that a further limit rejects
_NARROWER = 5_000  # exchanges that are tried to lower the widest pack


def waves_first(problem: Problem, waves: int) -> IntArray:
    """Packs formed as waves of similar cost, then dealt to the ranks.

    The most even of three attempts: how many waves are levelled, and how full these are.
    """
    units, packs = problem.units, problem.per_wave
    if int((units.size > problem.capacity).sum()) > packs * waves:
        return NONE
    best_of, best = NONE, np.inf
    quarter, half = max(waves // 4, 1), max(waves // 2, 1)
    order, none = np.lexsort((-units.cost, -units.size)), np.full(len(units), -1, np.int64)
    for levelled, fullness in ((waves - quarter, 0.3), (waves - half, 1.0), (0, 1.0)):
        pack_of = filled_waves(problem, units.cost, order, none, waves, levelled, fullness)
        if not len(pack_of):
            continue
        loads = sum_by(pack_of, units.cost, packs * waves).reshape(waves, packs)
        time = float(slowest(loads.T, "micro_batch"))
        if time < best:
            best, best_of = time, pack_of
        if best <= units.cost.sum() / packs * _GOOD or fullness == 1.0:
            break
    return dealt(problem, best_of, waves) if len(best_of) else NONE


def filled_waves(
    problem: Problem,
    work: FloatArray,
    order: IntArray,
    pack_of: IntArray,
    waves: int,
    levelled: int = 0,
    fullness: float = 1.0,
    packs: int | None = None,
) -> IntArray:
    """The pack of each unit when those in no pack (-1) are filled in; empty if one fits nowhere.

    `order` is largest first. A wave has `packs`, by default as many as in the problem. With one
    wave of all packs, each unit goes to the pack with the least work that has room.
    """
    units = problem.units
    packed = fill_waves(
        units.size[order],
        work[order],
        units.extra[order],
        min(problem.capacity, int(units.size.sum())),
        units.caps,
        packs or problem.per_wave,
        pack_of[order],
        waves,
        levelled,
        fullness,
    )
    by_unit = np.empty_like(packed)
    by_unit[order[: len(packed)]] = packed
    return by_unit


@kernel
def fill_waves(
    size: IntArray,
    cost: FloatArray,
    extra: FloatArray,
    capacity: int,
    caps: FloatArray,
    ranks: int,
    pack_of: IntArray,
    waves: int,
    levelled: int,
    fullness: float,
) -> IntArray:
    """The pack of each unit; empty if a unit fits nowhere. Units come largest first.

    `pack_of` is -1 for units in no pack yet. A wave has `ranks` packs. Where ranks synchronise at
    every micro-batch, a wave takes as long as its most expensive pack, so its packs should cost the
    same. Waves are filled one after the other: each empty pack gets the largest unit left; then, in
    the first `levelled` waves, each pack gets partners such that all packs of the wave cost the
    same when they are full; in the others, each unit goes to the cheapest pack with room.
    `fullness` says how much of the spare room a levelled wave may use: 0 spreads it evenly over all
    waves, 1 fills each wave to capacity.
    """
    n, count = size.shape[0], ranks * waves
    chosen_pack = pack_of.copy()
    used, load, number = np.zeros(count, np.int64), np.zeros(count), np.zeros(count, np.int64)
    held = np.zeros((count, caps.shape[0]))
    # Links to units that are in no pack yet; `before` is shifted: entry u + 1 is unit u.
    after, before = np.arange(n + 1), np.arange(n + 1)
    less = -size  # ascends

    def put(unit: int, pack: int) -> None:
        """Put the unit into the pack and remove it from the free units."""
        chosen_pack[unit] = pack
        used[pack] += size[unit]
        load[pack] += cost[unit]
        number[pack] += 1
        for d in range(caps.shape[0]):
            held[pack, d] += extra[unit, d]
        after[unit], before[unit + 1] = unit + 1, unit

    def fits(unit: int, pack: int) -> bool:
        """Whether the pack keeps every further limit when the unit joins it."""
        for d in range(caps.shape[0]):
            if held[pack, d] + extra[unit, d] > caps[d]:
                return False
        return True

    def first_fitting(room: int) -> int:
        """The first unit whose size is at most `room`. Sizes descend."""
        return int(np.searchsorted(less, -room))

    def first_light(low: int, rate: float, most: float) -> int:
        """From `low` on, the first unit whose cost per slot exceeds `rate` by at most `most`."""
        high = n
        while low < high:
            middle = (low + high) // 2
            if cost[middle] - rate * size[middle] <= most * size[middle]:
                high = middle
            else:
                low = middle + 1
        return low

    def fill_level(pack: int, target: int, level: float, rate: float) -> None:
        """Fill the pack to `target` slots such that its cost above `rate` comes to `level`."""
        while True:
            room = target - used[pack]
            start = nearest_free(after, first_fitting(room))
            if start == n:
                break
            due = (level - (load[pack] - rate * used[pack])) / room
            unit = nearest_free(after, first_light(start, rate, due))
            if unit == n:
                unit = nearest_free(before, n) - 1
            looked = 0
            while unit < n and not fits(unit, pack):
                looked += 1
                unit = nearest_free(after, unit + 1) if looked < _LOOK else n
            if unit == n:
                break
            put(unit, pack)

    def fill_cheapest(unit: int, first: int) -> None:
        """Fill one wave from `unit` on, each unit into the cheapest pack with room.

        One heap holds the packs with room for the unit, cheapest first; the other those without, by
        room. Sizes descend, so packs only return from the second to the first when they are not
        full.
        """
        room = (used[first : first + ranks] - capacity).astype(np.float64)  # negative: most first
        price = load[first : first + ranks].copy()
        ready, waiting = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
        cheap, late = 0, 0
        for i in range(ranks):
            waiting[late] = i
            late += 1
            rise(waiting, late, room, True)
        tried = np.empty(_LOOK, np.int64)
        rejected = 0
        while unit < n and rejected < _LOOK:
            while late > 0 and -room[waiting[0]] >= size[unit]:
                ready[cheap] = waiting[0]
                cheap += 1
                rise(ready, cheap, price, True)
                late -= 1
                waiting[0] = waiting[late]
                sink(waiting, late, room, 0, True)
            if cheap == 0:
                most = -room[waiting[0]] if late > 0 else 0.0
                if most <= 0:
                    break
                unit = nearest_free(after, max(unit + 1, first_fitting(int(most))))
                continue
            chosen, looked = -1, 0
            while cheap > 0 and looked < _LOOK and chosen < 0:
                pack = ready[0]
                cheap -= 1
                ready[0] = ready[cheap]
                sink(ready, cheap, price, 0, True)
                if -room[pack] < size[unit]:  # filled since it became ready
                    waiting[late] = pack
                    late += 1
                    rise(waiting, late, room, True)
                    continue
                tried[looked] = pack
                looked += 1
                if fits(unit, first + pack):
                    chosen = pack
            if chosen >= 0:
                rejected = 0
                put(unit, first + chosen)
                room[chosen] += size[unit]
                price[chosen] = load[first + chosen]
            elif looked > 0:
                rejected += 1  # there is room, but a further limit rejects the unit
            for k in range(looked):
                ready[cheap] = tried[k]
                cheap += 1
                rise(ready, cheap, price, True)
            if chosen >= 0 or looked > 0:
                unit = nearest_free(after, unit + 1)

    rate = np.inf  # the least cost per slot; only cost above it has to be levelled
    cost_left, size_left = 0.0, 0
    for u in range(n):
        if pack_of[u] >= 0:
            put(u, pack_of[u])
            continue
        rate = min(rate, cost[u] / size[u])
        cost_left += cost[u]
        size_left += size[u]
    rate = rate if size_left else 0.0
    for wave in range(waves):
        first = wave * ranks
        mean = size_left / ((waves - wave) * ranks)
        target = int(min(float(capacity), np.ceil(mean + fullness * (capacity - mean))))
        level = (cost_left - rate * size_left) / max(size_left, 1) * target
        unit = nearest_free(after, 0)
        for p in range(first, first + ranks):
            if unit == n or number[p] > 0:
                continue
            put(unit, p)
            level = max(level, cost[unit] - rate * size[unit], cost[unit] - rate * target)
            unit = nearest_free(after, unit + 1)
        if wave >= levelled:
            fill_cheapest(unit, first)
        else:
            for p in range(first, first + ranks):
                fill_level(p, target, level, rate)
        for p in range(first, first + ranks):
            cost_left -= load[p]
            size_left -= used[p]
    return chosen_pack if nearest_free(after, 0) == n else np.empty(0, np.int64)


def ranks_first(problem: Problem, waves: int) -> IntArray:
    """Units divided between ranks, then packed inside each rank by best fit."""
    units = problem.units
    return pack_ranks(problem, partition(units.cost + units.second, problem.ranks), waves)


def pack_ranks(
    problem: Problem, rank_of: IntArray, waves: int, *, strict: bool = False
) -> IntArray:
    """The addresses when each rank's units are packed by best fit, heaviest packs first.

    Units without room in their rank's packs go to another rank, unless `strict`.
    """
    units, ranks, packs = problem.units, problem.ranks, waves * problem.rows
    if packs > _SCANNED and not len(units.caps):
        pack_of = np.empty(len(units), np.int64)
        for rank, members in enumerate(Ragged.group(rank_of, ranks)):
            own = Problem(problem.recipe, units.take(members), NONE, problem.capacity)
            bins = fill_bins(own, BEST_FIT)
            if len(bins) > packs:
                return NONE
            pack_of[members[bins.values]] = rank * packs + bins.owner
    else:
        pack_of = fit_ranks(
            np.lexsort((-units.cost, -units.size)),
            rank_of,
            units.size,
            units.cost,
            units.extra,
            problem.capacity,
            units.caps,
            ranks,
            packs,
            strict,
        )
        if len(pack_of) < len(units):
            return NONE
    load = sum_by(pack_of, units.cost, ranks * packs).reshape(ranks, packs)
    place = np.argsort(np.argsort(-load, axis=1, kind="stable"), axis=1)
    at: IntArray = place.ravel()[pack_of]
    return (at // problem.rows * ranks + pack_of // packs) * problem.rows + at % problem.rows


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
    pack_of, left = np.full(n, -1, np.int64), np.empty(n, np.int64)
    used, number = np.zeros(ranks * packs, np.int64), np.zeros(ranks * packs, np.int64)
    held, load = np.zeros((ranks * packs, caps.shape[0])), np.zeros(ranks)
    count = 0

    def has_room(u: int, p: int) -> bool:
        """Whether pack p keeps every limit when unit u joins it, or is empty."""
        if number[p] == 0:
            return True
        if used[p] + size[u] > capacity:
            return False
        for d in range(caps.shape[0]):
            if held[p, d] + extra[u, d] > caps[d]:
                return False
        return True

    def put(u: int, p: int) -> None:
        """Put a unit into a pack."""
        pack_of[u] = p
        used[p] += size[u]
        number[p] += 1
        load[p // packs] += cost[u]
        for d in range(caps.shape[0]):
            held[p, d] += extra[u, d]

    for u in order:
        chosen, fullest = -1, -1
        for p in range(rank_of[u] * packs, (rank_of[u] + 1) * packs):
            if used[p] > fullest and has_room(u, p):
                chosen, fullest = p, used[p]
        if chosen >= 0:
            put(u, chosen)
        elif strict:
            return np.empty(0, np.int64)
        else:
            left[count] = u
            count += 1
    for u in left[:count]:
        chosen = -1
        for p in range(ranks * packs):
            lighter = chosen < 0 or load[p // packs] < load[chosen // packs]
            fuller = chosen >= 0 and p // packs == chosen // packs and used[p] > used[chosen]
            if (lighter or fuller) and has_room(u, p):
                chosen = p
        if chosen < 0:
            return np.empty(0, np.int64)
        put(u, chosen)
    return pack_of


def filled(problem: Problem, waves: int) -> IntArray:
    """As few packs as a packer finds: best fit, or another one where these are too many.

    Under further limits, units are spread over all packs first, which is faster than to fill them.
    """
    limited, packs = len(problem.units.caps) > 0, waves * problem.per_wave
    bins = problem.limited.spread(packs) if limited else None
    if bins is None:
        bins = fill_bins(problem, BEST_FIT, packs)
    if len(bins) > packs and not limited:
        fewer = fill_bins(problem, "optimal")
        bins = fewer if len(fewer) < len(bins) else bins
    return of_bins(problem, bins, waves)


def fill_bins(problem: Problem, packer: str | Packer, enough: int = 0) -> Ragged:
    """Units in as few bins as the packer finds.

    Where there are further limits, several packers are tried until `enough` bins suffice.
    """
    units, capacity = problem.units, problem.capacity
    if len(units.caps) and len(units):
        return problem.limited.bins(enough)
    alone = np.flatnonzero(units.size > capacity)
    rest = np.flatnonzero(units.size <= capacity)
    packed = pack(units.size[rest], capacity, packer, seed=problem.recipe.seed)
    values = np.concatenate((rest[packed.values], alone))
    ends = packed.offsets[-1] + 1 + np.arange(len(alone))
    return Ragged(values, np.concatenate((packed.offsets, ends)))


def of_bins(problem: Problem, bins: Ragged, waves: int) -> IntArray:
    """Bins dealt to the ranks; where there are fewer than packs, the largest are divided."""
    units, packs = problem.units, problem.per_wave * waves
    if len(bins) > packs:
        return NONE
    bins = divide_bins(units.size, bins, packs)
    bin_of = np.empty(len(units), np.int64)
    bin_of[bins.values] = bins.owner
    pack_of_bin = np.empty(packs, np.int64)
    pack_of_bin[np.argsort(-sum_by(bin_of, units.cost, packs), kind="stable")] = np.arange(packs)
    pack_of = pack_of_bin[bin_of]
    return dealt(problem, pack_of, waves)


def dealt(problem: Problem, pack_of: IntArray, waves: int) -> IntArray:
    """The addresses when packs are dealt to ranks by the recipe's balance."""
    costs = sum_by(pack_of, problem.units.cost, waves * problem.per_wave)
    recipe = problem.recipe
    address = deal_packs(costs, problem.per_wave, recipe.balance, recipe.sync_every)
    if problem.rows > 1:
        by_address = np.empty_like(costs)
        by_address[address] = costs
        address = deal_rows(by_address, waves, problem.ranks, problem.rows)[address]
    return np.asarray(address[pack_of], np.int64)


def narrow(problem: Problem, waves: int, *, wider: float) -> IntArray:
    """Packs of similar size, for micro-batches that all have one width.

    `wider` is how much wider than the narrowest packs may be, so that their work is more even.
    """
    units, packs = problem.units, waves * problem.per_wave
    pack_of = partition(units.size, packs)
    if len(units.caps):
        held = np.zeros((packs, len(units.caps)))
        np.add.at(held, pack_of, units.extra)
        if not (held <= units.caps).all():
            spread = problem.limited.spread(packs)
            if spread is None:
                return NONE
            pack_of[spread.values] = spread.owner
            pack_of = _narrower(problem, pack_of, packs)
    bins = Ragged.group(pack_of, packs)
    widest = int(bins.sums(units.size).max())
    if widest > problem.capacity:
        return NONE
    if wider == 1.0:
        return of_bins(problem, bins, waves)
    return waves_first(problem.holding(width_for(problem, int(widest * wider))), waves)


def _narrower(problem: Problem, pack_of: IntArray, packs: int) -> IntArray:
    """The packs after exchanges that lower the widest one."""
    sizes = problem.units.size.astype(np.float64)
    shape = Shape(packs, 1, 1, True, False, -1, False, 0.0)  # each pack a rank, in one wave
    works, goal = (sizes, np.zeros_like(sizes)), sizes.sum() / packs
    return problem.exchange(pack_of, 1, ((6, 0.02, _NARROWER),), goal, works, shape=shape)


def width_for(problem: Problem, size: int) -> int:
    """What packs hold that are as wide as `size` needs, at most the capacity."""
    unit = 1 if problem.recipe.layout.segments_per_row else problem.recipe.width_unit
    return min(problem.capacity, rounded_up(size, unit))


def kinds_apart(problem: Problem, waves: int) -> IntArray:
    """Packs for units with and without second work, such that both works are even.

    The units with second work are spread over the first waves, such that their work is even. With
    `same_waves`, each micro-batch of these waves has at least one. The other units fill waves
    around them, or go to the cheapest pack with room in any wave.
    """
    units, ranks = problem.units, problem.ranks
    special = np.flatnonzero(units.second > 0)
    members = Problem(problem.recipe, units.take(special), NONE, problem.capacity)
    bins = members.limited.bins()
    fewest, most = divided_up(len(bins), problem.per_wave), waves
    second = problem.recipe.second_work
    if problem.kinds_matter and second is not None:
        if len(special) < fewest * ranks:
            raise PlanError(
                f"a step has {len(special)} samples with {second.column} for {fewest} waves of "
                f"{ranks} ranks, so not every rank has one. Take more samples per step, or set "
                f"second_work.same_waves=False."
            )
        most = min(waves, len(special) // ranks)
    best, least = NONE, np.inf
    counts = {fewest, fewest + 1, (fewest + most) // 2, most}
    for count in sorted(count for count in counts if fewest <= count <= most):
        for spread in _spread(members, bins, count):
            pack_of = np.full(len(units), -1, np.int64)
            pack_of[special] = _micro_batch_first(problem, members.units, spread, count)
            for fill in (_fill_waves, _fill_lightest):
                address = fill(problem, waves, count, special, pack_of)
                if not len(address):
                    continue
                time = problem.time(problem.loads(address, waves, units.cost, units.second))
                if time < least:
                    best, least = address, time
    return best


def _spread(members: Problem, bins: Ragged, waves: int) -> Iterator[Ragged]:
    """Ways to put the special units into these waves: by even work, by even limits, as bins."""
    units, packs = members.units, waves * members.per_wave
    none = np.full(len(units), -1, np.int64)
    order = np.lexsort((-units.second, -units.size))
    even = filled_waves(members, units.second, order, none, 1, packs=packs)
    if len(even):
        yield Ragged.group(even, packs)
    spread = members.limited.spread(packs)
    if spread is not None:
        yield spread
    yield bins  # `waves` are at least as many as these need


def _micro_batch_first(problem: Problem, members: Units, bins: Ragged, waves: int) -> IntArray:
    """The pack of each special unit: bins go to the first row of each micro-batch, then the next.

    With `same_waves` the largest bins are divided, so that no micro-batch is without one.
    """
    rows, micros = problem.rows, waves * problem.ranks
    full = Ragged.of([row.tolist() for row in bins if len(row)])
    if problem.kinds_matter:
        full = divide_bins(members.size, full, max(len(full), micros))
    pack_of_bin = np.arange(len(full))
    pack_of_bin = pack_of_bin % micros * rows + pack_of_bin // micros
    pack_of = np.empty(len(members), np.int64)
    pack_of[full.values] = pack_of_bin[full.owner]
    return pack_of


def _fill_waves(
    problem: Problem, waves: int, special_waves: int, special: IntArray, pack_of: IntArray
) -> IntArray:
    """The addresses when packs of similar cost share a wave, and waves are filled one by one."""
    units, rows = problem.units, problem.rows
    micro, row = pack_of[special] // rows, pack_of[special] % rows
    cost = sum_by(micro, units.cost[special], special_waves * problem.ranks)
    pack_of = pack_of.copy()
    moved = deal_packs(cost, problem.ranks, "refined", "micro_batch")
    pack_of[special] = moved[micro] * rows + row
    order = np.lexsort((-units.cost, -units.size))
    return filled_waves(problem, units.cost, order, pack_of, waves)


def _fill_lightest(
    problem: Problem, waves: int, special_waves: int, special: IntArray, pack_of: IntArray
) -> IntArray:
    """The addresses when the other units go to the cheapest pack with room, in any wave.

    Then micro-batches of similar work share a wave, those of each kind apart.
    """
    units, ranks, rows = problem.units, problem.ranks, problem.rows
    packs = waves * problem.per_wave
    order = np.lexsort((-units.cost, -units.size))
    packed = filled_waves(problem, units.cost, order, pack_of, 1, packs=packs)
    if not len(packed):
        return NONE
    work = sum_by(packed // rows, units.cost + units.second, waves * ranks)
    moved = np.arange(waves * ranks)
    for part in (slice(0, special_waves * ranks), slice(special_waves * ranks, waves * ranks)):
        if part.stop > part.start:
            dealt = deal_packs(work[part], ranks, "refined", problem.recipe.sync_every)
            moved[part] = part.start + dealt
    return np.asarray(moved[packed // rows] * rows + packed % rows, np.int64)
