"""One step: assign its units to micro-batches, rows and ranks.

The packs of a step are numbered by *address*: `(wave * ranks + rank) * rows + row`. With one pack
per micro-batch, that is `wave * ranks + rank`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np

from evenstep.core.bounds import StepFloor
from evenstep.core.layout import Padded
from evenstep.core.ragged import IntArray, Segments, divided_up, rounded_up, sum_by
from evenstep.core.recipe import Recipe
from evenstep.errors import PlanError
from evenstep.planning.assemble import DecidedStep, modelled_time
from evenstep.planning.balance.equal_sizes import assign_by_rank, check_equal, count_by_rank
from evenstep.planning.balance.problem import Problem
from evenstep.planning.balance.search import search_packs
from evenstep.planning.balance.ways import count_packs
from evenstep.planning.batching.dynamic import count_cuts, count_greedy, cut_greedy, cut_optimal
from evenstep.planning.batching.in_order import packs_in_order
from evenstep.planning.counts import first_worth, more_counts
from evenstep.planning.simpler import fastest
from evenstep.planning.units import Units


def decide_step(
    segments: Segments, units: Units, recipe: Recipe, wanted: int | None
) -> DecidedStep:
    """Decide one step. `wanted` fixes the micro-batches per rank; None leaves them open."""
    padded = _sorted_rows(recipe)
    if recipe.balance == "none":
        return _placed(segments, units, recipe, *_in_order(units, recipe, wanted))
    if padded is None:
        return _decide_packs(segments, units, recipe, wanted)

    def cut(settings: Recipe) -> tuple[DecidedStep, float]:
        step = _cut_rows(segments, units, settings, padded, wanted)
        return step, modelled_time(step, recipe)

    return fastest(cut, recipe, units, lambda waves: 0.0)


def _cut_rows(
    segments: Segments, units: Units, recipe: Recipe, padded: Padded, wanted: int | None
) -> DecidedStep:
    """Decide a step whose rows are sorted and cut."""
    widths = None
    if padded.cut == "greedy":
        address, waves, widths = cut_greedy(units, padded, recipe, wanted)
    elif recipe.equal_sizes:
        return _cut_by_rank(segments, units, recipe, padded, wanted)
    else:
        address, waves = cut_optimal(units, padded, recipe, recipe.topology.dp, wanted)
    step = _placed(segments, units, recipe, address, waves)
    if padded.cut == "greedy":
        narrow_to_wide = np.argsort(np.argsort(units.widest, kind="stable"))
        step = replace(step, row=narrow_to_wide[units.of_segment], widths=widths)
    return step


def _cut_by_rank(
    segments: Segments, units: Units, recipe: Recipe, padded: Padded, wanted: int | None
) -> DecidedStep:
    """Equally many segments on each rank, cut rank by rank; the fastest number of waves."""
    ranks, multiple = recipe.topology.dp, recipe.topology.multiple
    joint = recipe.balance == "refined"
    # The fastest cuts of each rank, and those with the fewest slots, which are more alike.
    cuts = [recipe, *([replace(recipe, balance="lpt", min_saving=None)] if joint else [])]

    def cut(waves: int) -> DecidedStep:
        found = []
        for each in cuts:
            own_cut = partial(_cut_rank, padded, each)
            address, count = assign_by_rank(units, recipe, waves, own_cut)
            found.append(_placed(segments, units, recipe, address, count))
        return min(found, key=lambda step: (step.per_rank, modelled_time(step, recipe)))

    if wanted is not None:
        return cut(wanted)
    fewest = count_by_rank(units, ranks, lambda own: count_cuts(own, padded, recipe))
    steps = [cut(rounded_up(max(fewest, 1), multiple))]
    if joint and not padded.static:
        steps += [cut(waves) for waves in more_counts(steps[0].per_rank, recipe)]
    times = [modelled_time(step, recipe) for step in steps]
    return steps[first_worth(times, recipe.saving)]


def _cut_rank(
    padded: Padded, recipe: Recipe, own: Units, waves: int | None
) -> tuple[IntArray, int]:
    """(wave of each unit of one rank, waves)."""
    return cut_optimal(own, padded, recipe, 1, waves)


def _decide_packs(
    segments: Segments, units: Units, recipe: Recipe, wanted: int | None
) -> DecidedStep:
    """Decide a step whose units are packed by their slots, or by their number."""
    measure, capacity = _pack_size(units, recipe)
    _check_groups(units, measure, capacity)
    aligned = rounded_up(segments.length, recipe.topology.alignment)
    if recipe.second_work is not None:
        first = float(recipe.cost.of_lengths(aligned).sum())
        scale = recipe.second_work.scale(first, float(units.second.sum()))
        units = replace(units, second=units.second * scale)
    by_count = measure == "samples"
    problem = Problem(units, capacity, recipe, recipe.width_unit)
    if by_count:
        problem = Problem(units.by_count(), capacity, recipe)

    def time_of(address: IntArray, waves: int) -> float:
        step = _placed(segments, units, recipe, address, waves)
        if second is None:
            return modelled_time(step, recipe)
        load = sum_by(address // problem.rows, second, waves * problem.ranks)
        return modelled_time(step, recipe, load.reshape(waves, problem.ranks).T)

    second = None if recipe.second_work is None else units.second

    @cache
    def floor() -> StepFloor:
        return StepFloor(recipe, aligned, units.of_segment, second)

    @cache
    def floor_of(waves: int) -> float:
        return floor().time(waves)

    def search(settings: Recipe) -> tuple[DecidedStep, float]:
        found = search_packs(replace(problem, recipe=settings), wanted, time_of, floor_of)
        return _placed(segments, units, settings, found.address, found.waves), found.time

    return fastest(search, recipe, units, floor_of)


def _placed(
    segments: Segments, units: Units, recipe: Recipe, address: IntArray, waves: int
) -> DecidedStep:
    """The step with its units at these addresses."""
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    at = address[units.of_segment]
    micro, row = at // rows, at % rows
    wave, rank = micro // ranks, micro % ranks
    if recipe.equal_sizes:
        check_equal(address // rows % ranks, units, ranks)
    return DecidedStep(segments, rank * waves + wave, row, waves, None)


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


def _in_order(units: Units, recipe: Recipe, wanted: int | None) -> tuple[IntArray, int]:
    """(address of each unit, waves): micro-batch k runs on rank k mod ranks."""
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    pack_of = packs_in_order(units, recipe)
    micro, row = pack_of // rows, pack_of % rows
    needed = max(divided_up(int(micro.max(initial=-1)) + 1, ranks), 1)
    count = wanted or rounded_up(needed, recipe.topology.multiple)
    return (micro // ranks) * ranks * rows + micro % ranks * rows + row, count
