"""From units to packs at places: count first, then balance the packs instead of filling them."""

from __future__ import annotations

import numpy as np

from evenstep.core.bounds import pack_bound, rounded_up
from evenstep.core.ragged import FloatArray, IntArray, Ragged, sum_by
from evenstep.core.recipe import Recipe
from evenstep.planning.deal import deal_packs
from evenstep.planning.kernel import kernel
from evenstep.planning.pack import pack
from evenstep.planning.relieve import refine_waves
from evenstep.planning.split import split_bins
from evenstep.planning.units import Units
from evenstep.planning.waves import best_waves


@kernel
def vector_fit_kernel(
    sizes: IntArray, extra: FloatArray, order: IntArray, capacity: int, caps: FloatArray
) -> IntArray:
    """Best fit where several limits must hold: the bin of each unit, taken in `order`.

    A unit that breaks a limit by itself gets a bin of its own.
    """
    n = sizes.shape[0]
    bin_of = np.empty(n, np.int64)
    size = np.zeros(n, np.int64)
    held = np.zeros((n, caps.shape[0]))
    bins = 0
    for unit in order:
        chosen = -1
        for b in range(bins):
            room = capacity - size[b]
            if room < sizes[unit] or (chosen >= 0 and room >= capacity - size[chosen]):
                continue
            fit = True
            for d in range(caps.shape[0]):
                fit = fit and held[b, d] + extra[unit, d] <= caps[d]
            if fit:
                chosen = b
        if chosen < 0:
            chosen = bins
            bins += 1
        bin_of[unit] = chosen
        size[chosen] += sizes[unit]
        for d in range(caps.shape[0]):
            held[chosen, d] += extra[unit, d]
    return bin_of


def fill_bins(units: Units, capacity: int, packer: str, seed: int) -> Ragged:
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
    alone = units.size > capacity
    bound = int(alone.sum()) + pack_bound(units.size[~alone], capacity)
    for d, cap in enumerate(units.caps):
        column = units.extra[:, d]
        lonely = column > cap
        least = int(np.ceil(column[~lonely].sum() / cap - 1e-9)) + int(lonely.sum())
        bound = max(bound, least)
    return max(bound, 1)


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
    least = rounded_up(-(-bins_needed(units, capacity) // ranks), multiple)
    filled: Ragged | None = None
    count = positions or least
    while True:
        packs = count * ranks
        if recipe.balance == "refined":
            found = form_waves(units, capacity, ranks, count)
            if len(found):
                break
        if filled is None:
            filled = fill_bins(units, capacity, packer, recipe.seed)
            asked = recipe.steps.micro_batches
            if asked and len(filled) > asked * ranks:  # the step was dealt by best fit
                filled = fill_bins(units, capacity, "best_fit_decreasing", recipe.seed)
        if len(filled) <= packs:
            found = spread_bins(units, filled, capacity, recipe, ranks, count)
            break
        count += multiple
    costs = sum_by(found, units.cost, count * ranks)
    return deal_packs(costs, ranks, recipe.balance, recipe.clock)[found], count


def form_waves(units: Units, capacity: int, ranks: int, positions: int) -> IntArray:
    """The pack of each unit, formed as waves; empty if the units do not fit that way."""
    order = np.lexsort((-units.cost, -units.size))
    sizes = units.size[order]
    if int((sizes > capacity).sum()) > ranks * positions:
        return np.empty(0, np.int64)
    found, _ = best_waves(
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
