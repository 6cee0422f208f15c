"""One step: assign its units to micro-batches, rows and ranks.

The packs of a step are numbered by *address*: `(wave * ranks + rank) * rows + row`. With one pack
per micro-batch, that is `wave * ranks + rank`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenstep.core.layout import Padded
from evenstep.core.ragged import IntArray, Segments, rounded_up
from evenstep.core.recipe import Recipe
from evenstep.errors import PlanError
from evenstep.planning.construct import BEST_FIT, fill_bins
from evenstep.planning.padded import count_cuts, cut_rows, problem_of
from evenstep.planning.policies import (
    check_equal,
    cut_greedy,
    deal_equal,
    in_order,
    packs_in_order,
    shared_cuts,
)
from evenstep.planning.search import first_worth, more_counts, search_packs
from evenstep.planning.units import Problem, Units


@dataclass(frozen=True, slots=True, eq=False)
class DecidedStep:
    """One step as decided: micro-batch `rank * per_rank + wave` and row of each segment.

    `widths` fixes the width of each wave where all ranks share it; 0 leaves it open.
    """

    segments: Segments
    micro: IntArray
    row: IntArray
    per_rank: int
    widths: IntArray | None


def decide_step(
    segments: Segments, units: Units, recipe: Recipe, wanted: int | None
) -> DecidedStep:
    """Decide one step. `wanted` fixes the micro-batches per rank; None leaves them open."""
    cut, widths, row = _cut_layout(recipe), None, None
    aligned = rounded_up(segments.length, recipe.topology.alignment)
    if recipe.balance == "none":
        address, waves = in_order(units, recipe, wanted)
    elif cut is None:
        problem = _packing_problem(units, recipe, aligned)
        address, waves = search_packs(problem, wanted)
    elif cut.cut == "greedy":
        address, waves, widths = cut_greedy(units, cut, recipe, wanted)
        row = np.argsort(np.argsort(units.widest, kind="stable"))[units.of_segment]
    elif recipe.equal_sizes:
        address, waves = _cut_by_rank(units, recipe, cut, aligned, wanted)
    else:
        problem = problem_of(units, recipe, cut, aligned)
        units = problem.units
        address, waves = cut_rows(problem, cut, wanted)
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    if recipe.equal_sizes:
        check_equal(address // rows % ranks, units, ranks)
    pack = address[units.of_segment]
    micro = pack // rows
    row = pack % rows if row is None else row
    return DecidedStep(segments, micro % ranks * waves + micro // ranks, row, waves, widths)


def _cut_layout(recipe: Recipe) -> Padded | None:
    """The layout if sorted rows are cut; None if units are packed.

    Padded rows that share one width in a whole step are packed by their number.
    """
    layout = recipe.layout
    return layout if isinstance(layout, Padded) and not recipe.topology.equal_widths else None


def _packing_problem(units: Units, recipe: Recipe, aligned: IntArray) -> Problem:
    """The problem of packing units by their slots, or by their number."""
    units, capacity = _sized(units, recipe)
    if int(units.count.max(initial=1)) > capacity and units.size is units.count:
        raise PlanError(
            f"a group has {units.count.max()} segments, but a micro-batch of this step, "
            f"{units.widest.max()} slots wide, holds {capacity}. Raise layout.max_tokens or "
            f"layout.samples, or set groups='step' or topology.variable_seq_lengths."
        )
    if recipe.second_work is not None:
        first = float(recipe.cost.of_lengths(aligned).sum())
        scale = recipe.second_work.scale(first, float(units.second.sum()))
        units = replace(units, second=units.second * scale)
    return Problem(recipe, units, aligned, capacity, np.full(len(units), capacity))


def _sized(units: Units, recipe: Recipe) -> tuple[Units, int]:
    """(units with sizes in slots, or in segments where a pack holds a number; what a pack holds)."""
    widest = np.array([units.widest.max(initial=1)])
    capacity, most = recipe.layout.pack_bounds(recipe, widest)
    return (replace(units, size=units.count), int(most[0])) if capacity is None else (units, capacity)


def _cut_by_rank(
    units: Units, recipe: Recipe, layout: Padded, aligned: IntArray, wanted: int | None
) -> tuple[IntArray, int]:
    """Equally many segments on each rank, cut rank by rank; the fastest number of waves."""
    ranks, problem = recipe.topology.dp, Problem(recipe, units, aligned, 0, units.count)
    refined = recipe.balance == "refined"
    # The fastest cuts of each rank, and those with the fewest slots, which are more alike.
    settings = [recipe, *([replace(recipe, balance="lpt", min_saving=None)] if refined else [])]

    def cut(waves: int) -> tuple[float, IntArray, int]:
        tried = []
        for setting in settings:
            address, count = _cut_ranks(units, setting, layout, waves, recipe.balance)
            most = recipe.steps.micro_batches
            if most is not None and count > most:  # "lpt" needs no more: steps are sized with it
                address, count = _cut_ranks(units, setting, layout, waves, "lpt")
            tried.append((problem.time(address, count), address, count))
        return min(tried, key=lambda each: (each[2], each[0]))

    counts = [wanted] if wanted is not None else []
    if wanted is None:
        fewest = max(count_cuts(part, layout, recipe) for part in _parts(units, ranks, "lpt"))
        counts = [rounded_up(max(fewest, 1), recipe.topology.multiple)]
    tried = [cut(counts[0])]
    if wanted is None and refined and not layout.static:
        tried += [cut(waves) for waves in more_counts(tried[0][2], recipe)]
    _, address, waves = tried[first_worth([each[0] for each in tried], recipe.saving)]
    return address, waves


def _parts(units: Units, ranks: int, balance: str) -> list[Units]:
    """The units of each rank, with equally many segments."""
    rank_of = deal_equal(units, ranks, balance)
    return [units.take(np.flatnonzero(rank_of == rank)) for rank in range(ranks)]


def _cut_ranks(
    units: Units, recipe: Recipe, layout: Padded, waves: int, balance: str
) -> tuple[IntArray, int]:
    """(address of each unit, waves) when the rows of each rank are cut into `waves` or more."""
    ranks, alone = recipe.topology.dp, replace(recipe.topology, dp=1)
    rank_of = deal_equal(units, ranks, balance)
    recipe = replace(recipe, topology=alone)
    while True:
        address, most = np.empty(len(units), np.int64), waves
        for rank in range(ranks):
            members = np.flatnonzero(rank_of == rank)
            part = replace(units.take(members), of_segment=np.arange(len(members)))
            problem = problem_of(part, recipe, layout, part.widest)
            wave, count = cut_rows(problem, layout, waves)
            address[members] = wave[problem.units.of_segment] * ranks + rank
            most = max(most, count)
        if most == waves:
            return address, waves
        waves = most


def count_needed(units: Units, recipe: Recipe, packs: int) -> int:
    """How many packs (or cuts of sorted rows) hold these units.

    At most `packs` if planning can fit the units into that many. A multiple of the ranks where all
    ranks need equally many. The balance makes no difference, except that "none" keeps the order.
    """
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    cut, packer = _cut_layout(recipe), recipe.layout.packer or BEST_FIT
    if len(units) == 0:
        return 0
    sized, capacity = _sized(units, recipe)
    if cut is None and sized.size is sized.count and int(units.count.max()) > capacity:
        return packs + len(units)  # a group does not fit at this width
    if recipe.balance == "none":
        return int(packs_in_order(units, recipe)[-1]) + 1
    if cut is not None and cut.cut == "greedy":
        return ranks * len(shared_cuts(units, cut, recipe).ends)

    def count(part: Units, most: int) -> int:
        if cut is not None:
            return count_cuts(part, cut, recipe)
        return len(fill_bins(part, capacity, packer, recipe.seed, most)) if len(part) else 0

    if recipe.equal_sizes:
        parts = _parts(sized if cut is None else units, ranks, "lpt")
        return ranks * rounded_up(max(count(part, packs // ranks) for part in parts), rows)
    return count(sized if cut is None else units, packs)


def packs_are_counted(recipe: Recipe) -> bool:
    """Whether `count_needed` runs a packer, which is slow."""
    return recipe.balance != "none" and _cut_layout(recipe) is None
