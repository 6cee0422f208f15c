"""Form packs and assign them to waves and ranks together.

The number of packs is chosen first; then packs are balanced instead of filled one by one.
"""

from __future__ import annotations

import numpy as np

from evenstep.core.bounds import bins_bound
from evenstep.core.layout import Packer
from evenstep.core.ragged import IntArray, Ragged, sum_by
from evenstep.core.recipe import Recipe
from evenstep.core.rounding import divided_up, rounded_up
from evenstep.planning.balance.deal import deal_packs
from evenstep.planning.balance.exchange import PackLimits, UnitArrays, WavePacks, refine_waves
from evenstep.planning.balance.waves import best_waves
from evenstep.planning.packing.more_bins import divide_bins
from evenstep.planning.packing.packers import pack
from evenstep.planning.packing.spread import spread_units
from evenstep.planning.packing.vector_fit import vector_fit_kernel
from evenstep.planning.units import Units

_SEARCHED = 2048  # units up to which other packings are tried when waves are not even
_GOOD = 1.003
_BEST_FIT = "best_fit_decreasing"
_NONE: IntArray = np.empty(0, np.int64)


def assign_units(
    units: Units, capacity: int, recipe: Recipe, ranks: int, waves: int | None
) -> tuple[IntArray, int]:
    """(address `wave * ranks + rank` of each unit, waves). No pack exceeds a limit.

    `waves` must be enough if given. Otherwise there are as few as possible, in the multiple that
    the topology needs. Without a packer and with balance = "refined", packs are formed as waves.
    A packer's own packs are kept, and the largest divided where more are needed; the other
    balances keep those of best fit.
    """
    multiple, packer = recipe.topology.multiple, recipe.layout.packer
    count = waves or rounded_up(divided_up(bins_needed(units, capacity), ranks), multiple)
    joint = recipe.balance == "refined" and packer is None
    found = form_waves(units, capacity, ranks, count) if joint else _NONE
    filled: Ragged | None = None
    if len(found) == 0 or _could_be_better(found, units, recipe, ranks, count):
        filled = _filled_bins(units, capacity, recipe, count * ranks, ranks * multiple)
    if len(found) == 0:
        assert filled is not None
        enough = rounded_up(divided_up(len(filled), ranks), multiple)
        if enough > count:
            count = enough
            found = form_waves(units, capacity, ranks, count) if joint else _NONE
    candidates = [found] if len(found) else []
    if filled is not None and len(filled) <= count * ranks:
        packs = packs_of_bins(units, filled, ranks * count)
        if joint:
            refine_packs(units, packs, capacity, ranks, count)
        candidates.append(packs)
    dealt = [_dealt(pack_of, units, recipe, ranks, count) for pack_of in candidates]
    address, _ = min(dealt, key=lambda pair: pair[1])
    return address, count


def count_packs(units: Units, capacity: int, recipe: Recipe, packs: int) -> int:
    """How many packs the units need; at most `packs` if `assign_units` can use that many."""
    if len(units) == 0:
        return 0
    count = len(pack_units(units, capacity, recipe.layout.packer or _BEST_FIT, recipe.seed))
    if count > packs and len(units.caps) and spread_units(units, capacity, packs) is not None:
        return packs
    return count


def bins_needed(units: Units, capacity: int) -> int:
    """A lower bound on the number of packs, by size and by every further limit."""
    taken = np.column_stack((units.size.astype(np.float64), units.extra))
    return max(bins_bound(taken, np.append(float(capacity), units.caps)), 1)


def form_waves(units: Units, capacity: int, ranks: int, waves: int) -> IntArray:
    """The pack of each unit, formed as waves; empty if the units do not fit that way."""
    order = np.lexsort((-units.cost, -units.size))
    sizes = units.size[order]
    if int((sizes > capacity).sum()) > ranks * waves:
        return _NONE
    found = best_waves(
        UnitArrays(sizes, units.cost[order], units.extra[order]),
        PackLimits(min(capacity, int(sizes.sum())), units.caps),
        ranks,
        waves,
    )
    if len(found) == 0 and len(units):
        return found
    pack_of = np.empty(len(units), np.int64)
    pack_of[order] = found
    return pack_of


def pack_units(units: Units, capacity: int, packer: str | Packer, seed: int) -> Ragged:
    """Units in as few bins as the packer finds; best fit where there are further limits."""
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


def packs_of_bins(units: Units, filled: Ragged, packs: int) -> IntArray:
    """The pack of each unit when bins become `packs`, numbered from the most expensive.

    Where there are fewer bins than packs, the largest bins are divided.
    """
    if len(filled) < packs:
        filled = divide_bins(units.size, filled, packs)
    bin_of = np.empty(len(units), np.int64)
    bin_of[filled.values] = filled.owner
    cost = sum_by(bin_of, units.cost, packs)
    pack_of_bin = np.empty(packs, np.int64)
    pack_of_bin[np.argsort(-cost, kind="stable")] = np.arange(packs)
    return pack_of_bin[bin_of]


def refine_packs(units: Units, pack_of: IntArray, capacity: int, ranks: int, waves: int) -> None:
    """Exchange units within each wave, in place, while that lowers its heaviest pack."""
    packs = ranks * waves
    held = np.zeros((packs, len(units.caps)))
    np.add.at(held, pack_of, units.extra)
    size = sum_by(pack_of, units.size, packs).astype(np.int64)
    cost = sum_by(pack_of, units.cost, packs)
    refine_waves(
        UnitArrays(units.size, units.cost, units.extra),
        PackLimits(capacity, units.caps),
        ranks,
        waves,
        WavePacks(pack_of, size, cost, held),
    )


def _could_be_better(found: IntArray, units: Units, recipe: Recipe, ranks: int, count: int) -> bool:
    """Whether to try bins that are filled one by one: few units whose waves are not even."""
    if len(units) > _SEARCHED:
        return False
    return _dealt(found, units, recipe, ranks, count)[1] > float(units.cost.sum()) / ranks * _GOOD


def _filled_bins(units: Units, capacity: int, recipe: Recipe, packs: int, multiple: int) -> Ragged:
    """Units in bins that are filled one by one; where these are more than `packs`, other ways to
    need fewer are tried."""
    packer = recipe.layout.packer
    filled = pack_units(units, capacity, packer or _BEST_FIT, recipe.seed)
    if len(units.caps) and len(filled) > packs:
        filled = _spread(units, capacity, packs, multiple, filled)
    joint = recipe.balance == "refined" and packer is None
    if joint and len(filled) > packs and len(units) <= _SEARCHED:
        better = pack_units(units, capacity, "optimal", recipe.seed)
        filled = better if len(better) < len(filled) else filled
    return filled


def _spread(units: Units, capacity: int, packs: int, multiple: int, filled: Ragged) -> Ragged:
    """Units spread over `packs`, or over the next multiple that works, if that is fewer than
    `filled`."""
    for count in range(packs, len(filled), multiple):
        found = spread_units(units, capacity, count)
        if found is not None:
            return found
    return filled


def _dealt(
    pack_of: IntArray, units: Units, recipe: Recipe, ranks: int, count: int
) -> tuple[IntArray, float]:
    """(address of each unit, modelled time of the step) when these packs are dealt to ranks."""
    costs = sum_by(pack_of, units.cost, count * ranks)
    address = deal_packs(costs, ranks, recipe.balance, recipe.sync_every)
    by_address = np.empty_like(costs)
    by_address[address] = costs
    by_wave = by_address.reshape(count, ranks)
    if recipe.sync_every == "micro_batch":
        time = by_wave.max(axis=1).sum()
    else:
        time = by_wave.sum(axis=0).max()
    return address[pack_of], float(time)
