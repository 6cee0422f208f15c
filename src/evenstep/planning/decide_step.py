"""One step: assign its units to micro-batches, rows and ranks.

The packs of a step are numbered by *address*: `wave * packs_per_wave + pack`, where a wave has
`rows` packs for each rank, rank by rank. With one pack per micro-batch, that is
`wave * ranks + rank`.
"""

from __future__ import annotations

import numpy as np

from evenstep.core.layout import Padded
from evenstep.core.ragged import IntArray, sum_by
from evenstep.core.recipe import Recipe
from evenstep.core.rounding import divided_up, rounded_up
from evenstep.core.segments import Segments
from evenstep.errors import PlanError
from evenstep.planning.assemble import DecidedStep
from evenstep.planning.balance.deal import deal_waves
from evenstep.planning.balance.equal_sizes import assign_by_rank, check_equal, count_by_rank
from evenstep.planning.balance.joint import assign_units, count_packs
from evenstep.planning.balance.partition import partition
from evenstep.planning.batching.dynamic import count_cuts, count_greedy, cut_greedy, cut_optimal
from evenstep.planning.batching.in_order import packs_in_order
from evenstep.planning.units import Units


def decide_step(
    segments: Segments, units: Units, recipe: Recipe, wanted: int | None
) -> DecidedStep:
    """Decide one step. `wanted` fixes the micro-batches per rank; None means as few as possible."""
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    padded = _sorted_rows(recipe)
    key, widths = None, None
    size = _pack_size(units, recipe)
    if padded is None:
        _check_groups(units, *size)
    if recipe.balance == "none":
        address, waves = _in_order(units, recipe, wanted)
    elif padded is not None and padded.cut == "greedy":
        address, waves, widths = cut_greedy(units, padded, recipe, wanted)
        key = np.argsort(np.argsort(units.widest, kind="stable"))  # narrow to wide
    elif recipe.equal_sizes:
        address, waves = assign_by_rank(
            units, recipe, wanted, lambda own, count: _assign(own, recipe, rows, count, size)
        )
    else:
        address, waves = _assign(units, recipe, ranks * rows, wanted, size)
        if rows > 1:
            address = _deal_rows(address, units, waves, ranks, rows)
    wave, pack = address // (ranks * rows), address % (ranks * rows)
    rank, row = pack // rows, pack % rows
    if recipe.equal_sizes:
        check_equal(rank, units, ranks)
    micro = (rank * waves + wave)[units.of_segment]
    row = (row if key is None else key)[units.of_segment]
    return DecidedStep(segments, micro, row, waves, widths)


def count_needed(units: Units, recipe: Recipe, packs: int) -> int:
    """How many packs (or cuts of sorted rows) hold these units.

    At most `packs` if planning can fit the units into that many. A multiple of the ranks where all
    ranks need equally many. The balance makes no difference, except that "none" keeps the order.
    """
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    padded = _sorted_rows(recipe)
    if len(units) == 0:
        return 0
    measure, capacity = _pack_size(units, recipe)
    if padded is None and measure == "samples" and int(units.count.max()) > capacity:
        return packs + len(units)  # a group does not fit at this width
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
        each = count_by_rank(units, ranks, lambda own: count(own, packs // ranks))
        return ranks * rounded_up(each, rows)
    return count(units, packs)


def counting_packs(recipe: Recipe) -> bool:
    """Whether `count_needed` runs a packer, which is slow."""
    return recipe.balance != "none" and _sorted_rows(recipe) is None


def _sorted_rows(recipe: Recipe) -> Padded | None:
    """The layout if sorted rows are cut; None if units are packed.

    Padded rows that share one width in a whole step are packed by their number.
    """
    layout = recipe.layout
    return layout if isinstance(layout, Padded) and not recipe.topology.equal_widths else None


def _pack_size(units: Units, recipe: Recipe) -> tuple[str, int]:
    """(what limits a pack: `slots` or `samples`, how much of it a pack holds)."""
    widest = np.array([units.widest.max(initial=1)])
    capacity, most = recipe.layout.pack_bounds(recipe, widest)
    return ("samples", int(most[0])) if capacity is None else ("slots", capacity)


def _check_groups(units: Units, measure: str, most: int) -> None:
    """Raise if a group has more rows than fit at the width that the whole step shares."""
    if measure == "samples" and int(units.count.max(initial=1)) > most:
        raise PlanError(
            f"a group has {units.count.max()} segments, but a micro-batch of this step, "
            f"{units.widest.max()} slots wide, holds {most}. Raise layout.max_tokens or "
            f"layout.samples, or set groups='step' or topology.variable_seq_lengths."
        )


def _assign(
    units: Units, recipe: Recipe, per_wave: int, wanted: int | None, size: tuple[str, int]
) -> tuple[IntArray, int]:
    """(address of each unit, waves), with `per_wave` packs in each wave."""
    padded = _sorted_rows(recipe)
    if padded is not None:
        return cut_optimal(units, padded, recipe, per_wave, wanted)
    measure, capacity = size
    counted = units.by_count() if measure == "samples" else units
    return assign_units(counted, capacity, recipe, per_wave, wanted)


def _in_order(units: Units, recipe: Recipe, wanted: int | None) -> tuple[IntArray, int]:
    """(address of each unit, waves): micro-batch k runs on rank k mod ranks."""
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    pack_of = packs_in_order(units, recipe)
    micro, row = pack_of // rows, pack_of % rows
    needed = max(divided_up(int(micro.max(initial=-1)) + 1, ranks), 1)
    count = wanted or rounded_up(needed, recipe.topology.multiple)
    return (micro // ranks) * ranks * rows + micro % ranks * rows + row, count


def _deal_rows(address: IntArray, units: Units, waves: int, ranks: int, rows: int) -> IntArray:
    """The addresses after the packs of each wave are dealt to the ranks' rows, such that the sums
    over each rank's rows are even."""
    per_wave = ranks * rows
    cost = sum_by(address, units.cost, waves * per_wave).reshape(waves, per_wave)
    moved = np.empty((waves, per_wave), np.int64)
    total = np.empty((waves, ranks))
    for wave in range(waves):
        part = partition(cost[wave], ranks, equal_sizes=True)
        by_part = np.argsort(part, kind="stable").reshape(ranks, rows)
        moved[wave, by_part.ravel()] = np.arange(per_wave)
        total[wave] = cost[wave][by_part].sum(axis=1)
    rank = deal_waves(total)
    pack = np.take_along_axis(rank, moved // rows, axis=1) * rows + moved % rows
    return address // per_wave * per_wave + pack.ravel()[address]
