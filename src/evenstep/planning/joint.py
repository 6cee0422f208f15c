"""From units to packs at places: count first, then balance the packs instead of filling them."""

from __future__ import annotations

import numpy as np

from evenstep.core.bounds import bins_bound, rounded_up
from evenstep.core.ragged import FloatArray, IntArray, Ragged, sum_by
from evenstep.core.recipe import Recipe
from evenstep.planning.deal import deal_packs
from evenstep.planning.kernel import kernel
from evenstep.planning.pack import pack
from evenstep.planning.relieve import refine_waves
from evenstep.planning.split import split_bins
from evenstep.planning.spread import spread_units
from evenstep.planning.units import Units
from evenstep.planning.waves import best_waves

_OPEN = 256  # bins that a fit under several limits looks at
_SEARCHED = 2048  # units up to which other ways are tried when waves are not even
_GOOD = 1.003
_NONE: IntArray = np.empty(0, np.int64)


@kernel
def vector_fit_kernel(
    sizes: IntArray, extra: FloatArray, order: IntArray, capacity: int, caps: FloatArray
) -> IntArray:
    """Best fit where several limits must hold: the bin of each unit, taken in `order`.

    A unit that breaks a limit by itself gets a bin of its own. So many bins stay open at a time;
    when another is needed, the one with the least room is closed.
    """
    n = sizes.shape[0]
    bin_of = np.empty(n, np.int64)
    size = np.zeros(n, np.int64)
    held = np.zeros((n, caps.shape[0]))
    open_bins = np.empty(_OPEN, np.int64)
    count, bins = 0, 0
    for unit in order:
        chosen, tightest = -1, -1
        for k in range(count):
            b = open_bins[k]
            if tightest < 0 or size[b] > size[open_bins[tightest]]:
                tightest = k
            if capacity - size[b] < sizes[unit] or (chosen >= 0 and size[b] <= size[chosen]):
                continue
            fit = True
            for d in range(caps.shape[0]):
                fit = fit and held[b, d] + extra[unit, d] <= caps[d]
            if fit:
                chosen = b
        if chosen < 0:
            chosen = bins
            bins += 1
            if count < _OPEN:
                tightest = count
                count += 1
            open_bins[tightest] = chosen
        bin_of[unit] = chosen
        size[chosen] += sizes[unit]
        for d in range(caps.shape[0]):
            held[chosen, d] += extra[unit, d]
    return bin_of


def pack_units(units: Units, capacity: int, packer: str, seed: int) -> Ragged:
    """Units in as few bins as the packer finds; with further limits, by the best fit."""
    if len(units.caps) and len(units):
        order = np.argsort(-units.size, kind="stable")
        bin_of = vector_fit_kernel(units.size, units.extra, order, capacity, units.caps)
        return Ragged.group(bin_of, int(bin_of.max()) + 1)
    alone = np.flatnonzero(units.size > capacity)
    rest = np.flatnonzero(units.size <= capacity)
    packed = pack(units.size[rest], capacity, packer, seed=seed)
    values = np.concatenate((rest[packed.values], alone))
    ends = packed.offsets[-1] + 1 + np.arange(len(alone))
    return Ragged(values, np.concatenate((packed.offsets, ends)))


def bins_needed(units: Units, capacity: int) -> int:
    """At least so many packs, by size and by every further limit."""
    taken = np.column_stack((units.size.astype(np.float64), units.extra))
    return max(bins_bound(taken, np.append(float(capacity), units.caps)), 1)


def place_units(
    units: Units, capacity: int, recipe: Recipe, ranks: int, positions: int | None
) -> tuple[IntArray, int]:
    """(place `position * ranks + rank` of each unit, positions). No pack exceeds a limit.

    `positions` asks for that many and must be enough; otherwise they are as few as possible, in
    the multiple that the topology needs. With balance = "refined" packs are formed as waves and
    the packer only vouches that the count is enough; the other balances keep the packer's packs.
    """
    multiple = recipe.topology.multiple
    packer = getattr(recipe.layout, "packer", "best_fit_decreasing")
    count = positions or rounded_up(-(-bins_needed(units, capacity) // ranks), multiple)
    refined = recipe.balance == "refined"
    found = form_waves(units, capacity, ranks, count) if refined else _NONE
    filled: Ragged | None = None
    if len(found) == 0 or _could_be_better(found, units, recipe, ranks, count):
        filled = pack_units(units, capacity, packer, recipe.seed)
        most = (recipe.steps.micro_batches or 0) * ranks
        if most and len(filled) > most:  # the step was dealt by best fit
            filled = pack_units(units, capacity, "best_fit_decreasing", recipe.seed)
        if len(units.caps) and len(filled) > count * ranks:
            filled = _spread(units, capacity, count * ranks, ranks * multiple, filled)
        if refined and len(filled) > count * ranks and len(units) <= _SEARCHED:
            better = pack_units(units, capacity, "optimal", recipe.seed)
            filled = better if len(better) < len(filled) else filled
    if len(found) == 0:
        assert filled is not None
        enough = rounded_up(-(-len(filled) // ranks), multiple)
        if enough > count:
            count = enough
            found = form_waves(units, capacity, ranks, count) if refined else _NONE
    candidates = [found] if len(found) else []
    if filled is not None and len(filled) <= count * ranks:
        candidates.append(spread_bins(units, filled, capacity, recipe, ranks, count))
    dealt = [_dealt(pack_of, units, recipe, ranks, count) for pack_of in candidates]
    place, _ = min(dealt, key=lambda pair: pair[1])
    return place, count


def _spread(units: Units, capacity: int, packs: int, more: int, filled: Ragged) -> Ragged:
    """Under several limits, units spread over `packs`, or `more` again and again, if that takes
    fewer than were filled one after the other."""
    for count in range(packs, len(filled), more):
        found = spread_units(units, capacity, count)
        if found is not None:
            return found
    return filled


def fits_packs(units: Units, capacity: int, packs: int) -> bool:
    """Whether `place_units` finds room for the units in so many packs."""
    if len(pack_units(units, capacity, "best_fit_decreasing", 0)) <= packs:
        return True
    return len(units.caps) > 0 and spread_units(units, capacity, packs) is not None


def _could_be_better(found: IntArray, units: Units, recipe: Recipe, ranks: int, count: int) -> bool:
    """Whether bins that are filled first are worth a look: few units, or only the sums count."""
    if len(units) > _SEARCHED:
        return False
    return _dealt(found, units, recipe, ranks, count)[1] > float(units.cost.sum()) / ranks * _GOOD


def _dealt(
    pack_of: IntArray, units: Units, recipe: Recipe, ranks: int, count: int
) -> tuple[IntArray, float]:
    """(place of each unit, what the recipe's clock shows)."""
    costs = sum_by(pack_of, units.cost, count * ranks)
    place = deal_packs(costs, ranks, recipe.balance, recipe.clock)
    placed = np.empty_like(costs)
    placed[place] = costs
    by_position = placed.reshape(count, ranks)
    if recipe.clock == "micro_batch":
        clock = by_position.max(axis=1).sum()
    else:
        clock = by_position.sum(axis=0).max()
    return place[pack_of], float(clock)


def form_waves(units: Units, capacity: int, ranks: int, positions: int) -> IntArray:
    """The pack of each unit, formed as waves; empty if the units do not fit that way."""
    order = np.lexsort((-units.cost, -units.size))
    sizes = units.size[order]
    if int((sizes > capacity).sum()) > ranks * positions:
        return _NONE
    found = best_waves(
        sizes,
        units.cost[order],
        units.extra[order],
        units.caps,
        min(capacity, int(sizes.sum())),
        ranks,
        positions,
    )
    if len(found) == 0 and len(units):
        return found
    pack_of = np.empty(len(units), np.int64)
    pack_of[order] = found
    return pack_of


def spread_bins(
    units: Units, filled: Ragged, capacity: int, recipe: Recipe, ranks: int, positions: int
) -> IntArray:
    """The pack of each unit when bins that were filled are divided over `positions` waves."""
    packs = ranks * positions
    if len(filled) < packs:
        filled = split_bins(units.size, filled, packs)
    bin_of = np.empty(len(units), np.int64)
    bin_of[filled.values] = filled.owner
    cost = sum_by(bin_of, units.cost, packs)
    rank_of = np.empty(packs, np.int64)
    rank_of[np.argsort(-cost, kind="stable")] = np.arange(packs)
    pack_of = rank_of[bin_of]
    if recipe.balance == "refined":
        size = sum_by(pack_of, units.size, packs).astype(np.int64)
        held = np.zeros((packs, len(units.caps)))
        np.add.at(held, pack_of, units.extra)
        refine_waves(
            units.size,
            units.cost,
            units.extra,
            units.caps,
            capacity,
            ranks,
            positions,
            pack_of,
            size,
            sum_by(pack_of, units.cost, packs),
            held,
        )
    return pack_of
