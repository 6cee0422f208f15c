"""One step: units to their micro-batches, rows and ranks, for every layout."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np

from evenstep.core.bounds import rounded_up
from evenstep.core.layout import Fixed, PackedStatic, Padded
from evenstep.core.ragged import IntArray, sum_by
from evenstep.core.recipe import Recipe
from evenstep.core.segments import Segments
from evenstep.errors import PlanError
from evenstep.planning.assemble import StepLayout
from evenstep.planning.balance import partition
from evenstep.planning.batch import (
    feasible_starts,
    fewest_cuts,
    greedy_cuts,
    optimal_cuts,
    split_cuts,
)
from evenstep.planning.deal import deal_packs, deal_waves
from evenstep.planning.joint import place_units
from evenstep.planning.limits import row_widths, rows_that_fit
from evenstep.planning.units import Units


def place_step(segments: Segments, units: Units, recipe: Recipe, wanted: int | None) -> StepLayout:
    """Decide one step. `wanted` fixes the number of micro-batches a rank, None asks for few."""
    layout, ranks = recipe.layout, recipe.topology.dp
    rows_per_micro = 1
    if isinstance(layout, Padded) and layout.cut == "greedy" and not recipe.topology.equal_widths:
        place, count, widths = _greedy(units, recipe, wanted)
        width_order = np.argsort(np.argsort(units.widest, kind="stable"))
    else:
        widths, width_order = None, None
        if isinstance(layout, PackedStatic):
            rows_per_micro = layout.rows
        most_rows = _rows_of_one_width(units, recipe)
        if recipe.equal_sizes:
            place, count = _by_rank(units, recipe, wanted, most_rows)
        else:
            place, count = _place(units, recipe, ranks * rows_per_micro, wanted, most_rows)
            if rows_per_micro > 1:
                place = _share_rows(place, units, count, ranks, rows_per_micro)
    # place = position * lanes + lane; lanes of one rank are its rows.
    lanes = ranks * rows_per_micro
    position, lane = place // lanes, place % lanes
    rank, row = lane // rows_per_micro, lane % rows_per_micro
    if width_order is not None:
        row = width_order  # narrow to wide, as NeMo-RL and ROLL order rows
    if recipe.equal_sizes:
        _check_sizes(rank, units, ranks)
    micro = (rank * count + position)[units.of_segment]
    return StepLayout(segments, micro, row[units.of_segment], count, widths)


def _place(
    units: Units, recipe: Recipe, lanes: int, wanted: int | None, most_rows: int | None
) -> tuple[IntArray, int]:
    """(place of each unit, positions) for units that any lane may run."""
    layout, capacity = recipe.layout, recipe.capacity
    if isinstance(layout, Padded):
        if most_rows is None:
            return _cut(units, recipe, lanes, wanted)
        return place_units(units.by_count(None), most_rows, recipe, lanes, wanted)
    if isinstance(layout, Fixed):
        return place_units(units.by_count(capacity), layout.samples, recipe, lanes, wanted)
    assert capacity is not None
    return place_units(units, capacity, recipe, lanes, wanted)


def _share_rows(place: IntArray, units: Units, count: int, ranks: int, rows: int) -> IntArray:
    """Deal the rows of each position to the ranks anew, so that sums of rows are even."""
    lanes = ranks * rows
    cost = sum_by(place, units.cost, count * lanes).reshape(count, lanes)
    moved = np.empty((count, lanes), np.int64)
    total = np.empty((count, ranks))
    for position in range(count):
        part = partition(cost[position], ranks, equal_sizes=True)
        by_part = np.argsort(part, kind="stable").reshape(ranks, rows)
        moved[position, by_part.ravel()] = np.arange(lanes)
        total[position] = cost[position][by_part].sum(axis=1)
    rank = deal_waves(total)
    lane = np.take_along_axis(rank, moved // rows, axis=1) * rows + moved % rows
    return place // lanes * lanes + lane.ravel()[place]


def _by_rank(
    units: Units, recipe: Recipe, wanted: int | None, most_rows: int | None
) -> tuple[IntArray, int]:
    """Deal equally many segments to each rank first, then form each rank's own packs."""
    ranks = recipe.topology.dp
    rows = recipe.layout.rows if isinstance(recipe.layout, PackedStatic) else 1
    if int(units.count.max(initial=1)) == int(units.count.min(initial=1)):
        rank_of = partition(units.cost, ranks, recipe.balance, equal_sizes=True)
    else:
        rank_of = _deal_groups(units, ranks)
    count = wanted
    while True:
        placed = [
            (own, *_place(units.take(own), recipe, rows, count, most_rows))
            for own in (np.flatnonzero(rank_of == r) for r in range(ranks))
        ]
        most = max(found for _, _, found in placed)
        if count is not None and most <= count:
            break
        count = most
    place = np.empty(len(units), np.int64)
    for rank, (own, inside, _) in enumerate(placed):
        position, row = inside // rows, inside % rows
        place[own] = position * ranks * rows + rank * rows + row
    return place, count


def _deal_groups(units: Units, ranks: int) -> IntArray:
    """The rank of each unit: most segments first, to the rank with the fewest of them; where that
    leaves ranks uneven, by number of segments alone.

    Groups of 3, 3, 2, 2 and 2 on two ranks -> 3 + 3 and 2 + 2 + 2
    """
    rank_of = np.empty(len(units), np.int64)
    held = [(0, 0.0, rank) for rank in range(ranks)]
    for unit in np.lexsort((-units.cost, -units.count)).tolist():
        count, cost, rank = heapq.heappop(held)
        rank_of[unit] = rank
        heapq.heappush(held, (count + int(units.count[unit]), cost + units.cost[unit], rank))
    by_count = partition(units.count, ranks) if _unevenness(rank_of, units, ranks) > 1 else rank_of
    return by_count if _unevenness(by_count, units, ranks) <= 1 else rank_of


def _unevenness(rank_of: IntArray, units: Units, ranks: int) -> int:
    """By how many segments the ranks differ at most."""
    return int(np.ptp(np.bincount(rank_of, weights=units.count, minlength=ranks)))


def _rows_of_one_width(units: Units, recipe: Recipe) -> int | None:
    """How many padded rows a micro-batch holds where all of a step share one width, else None."""
    layout = recipe.layout
    if not isinstance(layout, Padded) or not recipe.topology.equal_widths:
        return None
    width = layout.pad_to or rounded_up(int(units.widest.max(initial=1)), recipe.width_unit)
    most = int(rows_that_fit(recipe, np.array([width]))[0])
    if int(units.count.max(initial=1)) > most:
        raise PlanError(
            f"a group has {units.count.max()} rows but a pipeline micro-batch of the step's width "
            f"{width} holds {most}; it could never stay together. Raise the budget, or set "
            f"groups='step' or topology.variable_seq_lengths."
        )
    return most


def _check_sizes(rank: IntArray, units: Units, ranks: int) -> None:
    """Raise where groups kept the ranks from holding equally many segments."""
    if _unevenness(rank, units, ranks) > 1:
        held = np.bincount(rank, weights=units.count, minlength=ranks)
        raise PlanError(
            f"equal_sizes asks for as many segments on each rank, but the {len(units)} groups of "
            f"this step could not be dealt so: ranks would hold from {held.min():.0f} to "
            f"{held.max():.0f}. Use groups of one size, a multiple of {ranks} in each step, or "
            f"equal_sizes=False."
        )


def _cut(units: Units, recipe: Recipe, ranks: int, wanted: int | None) -> tuple[IntArray, int]:
    """Optimal cuts of the sorted units, then each micro-batch dealt to a rank."""
    if len(units) == 0:
        return np.empty(0, np.int64), wanted or recipe.topology.multiple
    width = row_widths(units, recipe)
    order = np.lexsort((units.count, width))
    most = rows_that_fit(recipe, width[order])
    starts = feasible_starts(units.count[order], most, units.extra[order], units.caps)
    per_rank = -(-fewest_cuts(starts) // ranks)
    count = wanted or rounded_up(per_rank, recipe.topology.multiple)
    cuts = min(count * ranks, len(units))
    ends = optimal_cuts(width[order], units.count[order], starts, cuts)
    block = np.empty(len(units), np.int64)
    block[order] = np.searchsorted(ends, np.arange(len(units)), "right")
    rows = np.bincount(block, weights=units.count, minlength=count * ranks)
    widest = np.zeros(count * ranks)
    widest[:cuts] = width[order][ends - 1]
    cost = recipe.cost
    each = cost.per_token * widest + cost.per_pair * widest**2 + cost.per_segment
    return deal_packs(rows * each, ranks, recipe.balance, recipe.clock)[block], count


def _greedy(units: Units, recipe: Recipe, wanted: int | None) -> tuple[IntArray, int, IntArray]:
    """Dynamic batching of NeMo-RL and ROLL: (place of each unit, positions, width of each)."""
    ranks, multiple = recipe.topology.dp, recipe.topology.multiple
    width = row_widths(units, recipe)
    order = np.lexsort((np.arange(len(units)), units.widest))
    places = -(-len(units) // ranks)
    padded = np.full(places * ranks, -1, np.int64)
    padded[: len(units)] = order
    here = padded.reshape(places, ranks)
    real = here >= 0
    rows = np.where(real, units.count[here], 0)
    extra = np.where(real[:, :, None], units.extra[here], 0.0)
    widest = np.where(real, width[here], 0).max(axis=1, initial=0)
    most = rows_that_fit(recipe, widest)
    ends = greedy_cuts(rows, most, extra, units.caps)
    count = max(wanted or 0, rounded_up(max(len(ends), 1), multiple))
    ends = split_cuts(ends, widest, count)
    place = np.empty(len(units), np.int64)
    position = np.searchsorted(ends, np.arange(len(units)) // ranks, "right")
    place[order] = position * ranks + np.arange(len(units)) % ranks
    widths = np.full(count, recipe.width_unit, np.int64)
    widths[: len(ends)] = widest[ends - 1]
    assert recipe.capacity is not None
    # An over-long sample runs alone: it must not widen what runs beside it on other ranks. Nor may
    # any sample widen a group beyond the budget: two rows of 1 fit 20 slots, but not two of 17.
    widths[widths > recipe.capacity] = 0
    for at, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        if rows[start:end].sum(axis=0).max() > most[end - 1]:
            widths[at] = 0
    return place, count, widths
