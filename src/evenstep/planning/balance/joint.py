"""From units to packs at places: count first, then balance the packs instead of filling them."""

from __future__ import annotations

import numpy as np

from evenstep.core.bounds import bins_bound
from evenstep.core.layout import Packer
from evenstep.core.ragged import FloatArray, IntArray, Ragged, sum_by
from evenstep.core.recipe import Recipe
from evenstep.core.rounding import divided_up, rounded_up
from evenstep.planning.balance.deal import deal_packs
from evenstep.planning.balance.exchange import refine_waves
from evenstep.planning.balance.waves import best_waves
from evenstep.planning.kernel import kernel
from evenstep.planning.packing.more_bins import split_bins
from evenstep.planning.packing.packers import pack
from evenstep.planning.packing.spread import spread_units
from evenstep.planning.units import Units

_OPEN = 256  # bins that a fit under several limits looks at
_SEARCHED = 2048  # units up to which other ways are tried when waves are not even
_GOOD = 1.003
_BEST_FIT = "best_fit_decreasing"
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


def pack_units(units: Units, capacity: int, packer: str | Packer, seed: int) -> Ragged:
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
    the multiple that the topology needs. Without a packer and with balance = "refined", packs are
    formed as waves, for fill and balance together. A packer's own packs are kept, and the largest
    divided where more are needed; the other balances keep those of best fit.
    """
    multiple, packer = recipe.topology.multiple, recipe.layout.packer
    count = positions or rounded_up(divided_up(bins_needed(units, capacity), ranks), multiple)
    joint = recipe.balance == "refined" and packer is None
    found = form_waves(units, capacity, ranks, count) if joint else _NONE
    filled: Ragged | None = None
    if len(found) == 0 or _could_be_better(found, units, recipe, ranks, count):
        filled = pack_units(units, capacity, packer or _BEST_FIT, recipe.seed)
        if len(units.caps) and len(filled) > count * ranks:
            filled = _spread(units, capacity, count * ranks, ranks * multiple, filled)
        if joint and len(filled) > count * ranks and len(units) <= _SEARCHED:
            better = pack_units(units, capacity, "optimal", recipe.seed)
            filled = better if len(better) < len(filled) else filled
    if len(found) == 0:
        assert filled is not None
        enough = rounded_up(divided_up(len(filled), ranks), multiple)
        if enough > count:
            count = enough
            found = form_waves(units, capacity, ranks, count) if joint else _NONE
    candidates = [found] if len(found) else []
    if filled is not None and len(filled) <= count * ranks:
        packs = spread_bins(units, filled, ranks * count)
        if joint:
            refine_packs(units, packs, capacity, ranks, count)
        candidates.append(packs)
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


def count_packs(units: Units, capacity: int, recipe: Recipe, packs: int) -> int:
    """How many packs the units need; no more than `packs` if `place_units` finds room in these."""
    if len(units) == 0:
        return 0
    count = len(pack_units(units, capacity, recipe.layout.packer or _BEST_FIT, recipe.seed))
    if count > packs and len(units.caps) and spread_units(units, capacity, packs) is not None:
        return packs
    return count


def _could_be_better(found: IntArray, units: Units, recipe: Recipe, ranks: int, count: int) -> bool:
    """Whether bins that are filled first are worth a look: few units, or only the sums count."""
    if len(units) > _SEARCHED:
        return False
    return _dealt(found, units, recipe, ranks, count)[1] > float(units.cost.sum()) / ranks * _GOOD


def _dealt(
    pack_of: IntArray, units: Units, recipe: Recipe, ranks: int, count: int
) -> tuple[IntArray, float]:
    """(place of each unit, the time that the packs take)."""
    costs = sum_by(pack_of, units.cost, count * ranks)
    place = deal_packs(costs, ranks, recipe.balance, recipe.sync_every)
    placed = np.empty_like(costs)
    placed[place] = costs
    by_position = placed.reshape(count, ranks)
    if recipe.sync_every == "micro_batch":
        time = by_position.max(axis=1).sum()
    else:
        time = by_position.sum(axis=0).max()
    return place[pack_of], float(time)


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


def spread_bins(units: Units, filled: Ragged, packs: int) -> IntArray:
    """The pack of each unit when bins that were filled become `packs`, the dearest first. Where
    there are fewer, the largest are divided."""
    if len(filled) < packs:
        filled = split_bins(units.size, filled, packs)
    bin_of = np.empty(len(units), np.int64)
    bin_of[filled.values] = filled.owner
    cost = sum_by(bin_of, units.cost, packs)
    rank_of = np.empty(packs, np.int64)
    rank_of[np.argsort(-cost, kind="stable")] = np.arange(packs)
    return rank_of[bin_of]


def refine_packs(
    units: Units, pack_of: IntArray, capacity: int, ranks: int, positions: int
) -> None:
    """Exchange units within each wave, in place, while that lowers its heaviest pack."""
    packs = ranks * positions
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
        sum_by(pack_of, units.size, packs).astype(np.int64),
        sum_by(pack_of, units.cost, packs),
        held,
    )
