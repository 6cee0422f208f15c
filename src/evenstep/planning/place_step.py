"""One step: units to their micro-batches, rows and ranks."""

from __future__ import annotations

import numpy as np

from evenstep.core.layout import Padded
from evenstep.core.ragged import IntArray, sum_by
from evenstep.core.recipe import Recipe
from evenstep.core.rounding import divided_up, rounded_up
from evenstep.core.segments import Segments
from evenstep.errors import PlanError
from evenstep.planning.assemble import StepLayout
from evenstep.planning.balance.deal import deal_waves
from evenstep.planning.balance.equal_sizes import (
    check_equal,
    count_by_rank,
    place_by_rank,
)
from evenstep.planning.balance.joint import count_packs, place_units
from evenstep.planning.balance.partition import partition
from evenstep.planning.batching.dynamic import count_cuts, count_greedy, place_greedy, place_optimal
from evenstep.planning.batching.in_order import packs_in_order
from evenstep.planning.units import Units


def place_step(segments: Segments, units: Units, recipe: Recipe, wanted: int | None) -> StepLayout:
    """Decide one step. `wanted` fixes the number of micro-batches a rank, None asks for few."""
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    padded = _sorted_rows(recipe)
    key, widths = None, None
    size = _pack_size(units, recipe)
    if padded is None:
        _check_groups(units, *size)
    if recipe.balance == "none":
        place, count = _in_order(units, recipe, wanted)
    elif padded is not None and padded.cut == "greedy":
        place, count, widths = place_greedy(units, padded, recipe, wanted)
        key = np.argsort(np.argsort(units.widest, kind="stable"))  # narrow to wide
    elif recipe.equal_sizes:
        place, count = place_by_rank(
            units, recipe, wanted, lambda own, positions: _place(own, recipe, rows, positions, size)
        )
    else:
        place, count = _place(units, recipe, ranks * rows, wanted, size)
        if rows > 1:
            place = _share_rows(place, units, count, ranks, rows)
    # place = position * lanes + lane; the lanes of one rank are its rows.
    position, lane = place // (ranks * rows), place % (ranks * rows)
    rank, row = lane // rows, lane % rows
    if recipe.equal_sizes:
        check_equal(rank, units, ranks)
    micro = (rank * count + position)[units.of_segment]
    row = (row if key is None else key)[units.of_segment]
    return StepLayout(segments, micro, row, count, widths)


def count_lanes(units: Units, recipe: Recipe, lanes: int) -> int:
    """How many packs (cuts, where rows are sorted) hold these units; a multiple of the ranks where
    all have as many. No more than `lanes` if planning can place the units in so many.

    Which balance deals them to ranks makes no difference, save that "none" keeps their order.
    """
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    padded = _sorted_rows(recipe)
    if len(units) == 0:
        return 0
    measure, capacity = _pack_size(units, recipe)
    if padded is None and measure == "samples" and int(units.count.max()) > capacity:
        return lanes + len(units)  # a group that does not fit at this width
    if recipe.balance == "none":
        return int(packs_in_order(units, recipe)[-1]) + 1
    if padded is not None and padded.cut == "greedy":
        return ranks * count_greedy(units, padded, recipe)

    def count(some: Units, most: int) -> int:
        if padded is not None:
            return count_cuts(some, padded, recipe)
        counted = some.by_count() if measure == "samples" else some
        return count_packs(counted, capacity, recipe, most)

    if recipe.equal_sizes:
        each = count_by_rank(units, ranks, lambda own: count(own, lanes // ranks))
        return ranks * rounded_up(each, rows)
    return count(units, lanes)


def packs_freely(recipe: Recipe) -> bool:
    """Whether counting the packs of a step runs a packer."""
    return recipe.balance != "none" and _sorted_rows(recipe) is None


def _sorted_rows(recipe: Recipe) -> Padded | None:
    """The layout, where sorted rows are cut; None where units are packed. Rows that share one
    width in a whole step are packed by their number."""
    layout = recipe.layout
    return layout if isinstance(layout, Padded) and not recipe.topology.equal_widths else None


def _pack_size(units: Units, recipe: Recipe) -> tuple[str, int]:
    """What packs measure, `slots` or `samples`, and how much of it they hold."""
    widest = np.array([units.widest.max(initial=1)])
    capacity, most = recipe.layout.pack_bounds(recipe, widest)
    return ("samples", int(most[0])) if capacity is None else ("slots", capacity)


def _check_groups(units: Units, measure: str, most: int) -> None:
    """Raise where a group has more rows than fit at the width that all of a step share."""
    if measure == "samples" and int(units.count.max(initial=1)) > most:
        raise PlanError(
            f"a group has {units.count.max()} segments but a micro-batch of this step, "
            f"{units.widest.max()} wide, holds {most}. Raise the budget, or set groups='step' or "
            f"topology.variable_seq_lengths."
        )


def _place(
    units: Units, recipe: Recipe, lanes: int, wanted: int | None, size: tuple[str, int]
) -> tuple[IntArray, int]:
    """(place of each unit, positions) for units that any lane may run."""
    padded = _sorted_rows(recipe)
    if padded is not None:
        return place_optimal(units, padded, recipe, lanes, wanted)
    measure, capacity = size
    counted = units.by_count() if measure == "samples" else units
    return place_units(counted, capacity, recipe, lanes, wanted)


def _in_order(units: Units, recipe: Recipe, wanted: int | None) -> tuple[IntArray, int]:
    """(place of each unit, positions): micro-batch k is rank k mod ranks' next."""
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    pack_of = packs_in_order(units, recipe)
    micro, row = pack_of // rows, pack_of % rows
    needed = max(divided_up(int(micro.max(initial=-1)) + 1, ranks), 1)
    count = wanted or rounded_up(needed, recipe.topology.multiple)
    return (micro // ranks) * ranks * rows + micro % ranks * rows + row, count


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
