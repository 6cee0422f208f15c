"""One step: assign its units to micro-batches, rows and ranks.

`decide_step` chooses what applies: a policy, sorted rows that are cut (`padded`), or packs that are
searched here. The search chooses how many micro-batches per rank there are, and which units go into
each: constructions form packs, exchanges improve them, and work stops where the modelled time is
close to its floor.

The packs of a step are numbered by *address*: `(wave * ranks + rank) * rows + row`. With one pack
per micro-batch, that is `wave * ranks + rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from evenstep.core.layout import Padded
from evenstep.core.ragged import IntArray, Segments, divided_up, rounded_up
from evenstep.core.recipe import Recipe
from evenstep.errors import PlanError
from evenstep.planning.construct import (
    BEST_FIT,
    dealt,
    fill_bins,
    filled,
    kinds_apart,
    narrow,
    ranks_first,
    waves_first,
    width_for,
)
from evenstep.planning.padded import count_cuts, cut_rows, problem_of
from evenstep.planning.policies import (
    bins_dealt,
    check_equal,
    cut_greedy,
    deal_equal,
    equal_fit,
    equal_ranks,
    in_order,
    packs_in_order,
    shared_cuts,
    spread_out,
)
from evenstep.planning.units import (
    Packing,
    Phases,
    Problem,
    Units,
    faster,
    first_worth,
    more_counts,
    without_empty,
)
from evenstep.planning.vector_packing import spread_units

Construction: TypeAlias = Callable[[Problem, int], IntArray]
"""(problem, waves) -> the address of each unit; empty if units do not fit that way."""

# Larger numbers of units, tries and counts make plans faster and planning slower; so do shares
# closer to 1. Units up to which something is tried:
TINY = 24  # all assignments, ALL of them at most: proves the optimum of most such steps
FEW = 256  # MORE_TRIES exchanges, until a time is NEARLY its floor; ANYWHERE: up to 2 %, 10 ms
SEARCHED = 4096  # exchanges at all: 0.5 % of the time, for 2 to 20 ms
MOST = 2**17  # more waves than the fewest: up to 1 %, for twice the time
# Times over the floor that are good enough:
EVEN = 1 + 1e-9  # final
NEARLY = 1.0005  # once per step: no other construction, no thorough exchanges
CLOSE = 1.001  # no exchanges; in one wave or under further limits, no thorough ones
NEAR = 1.002  # no further starts for thorough exchanges, and none at all in waves
FAR = 1.0125  # unless few units are searched for more: no thorough exchanges, which take 2 ms
# What is tried:
LOOK = 4  # counts from the lower bound on, before bins are counted
SPARED = 16  # a sixteenth of the waves is worth to spread units over fewer packs
MORE_TRIES = 2
WIDER = (1.0, 1.02, 1.05)  # widths where all micro-batches share one, over the least
THOROUGH: Phases = ((5, 0.02, 3_000), (7, 0.005, 2_500), (9, 0.001, 2_500))
ANYWHERE: Phases = ((4, 0.3, 2_000), (6, 0.1, 2_000), (8, 0.02, 1_000), *THOROUGH)


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
    segments: Segments, units: Units, recipe: Recipe, wanted: int | None, *, thorough: bool = True
) -> DecidedStep:
    """Decide one step. `wanted` fixes the micro-batches per rank; None leaves them open.

    Unless `thorough`, packs are not improved by many exchanges.
    """
    cut, widths, row = _cut_layout(recipe), None, None
    aligned = rounded_up(segments.length, recipe.topology.alignment)
    if cut is None:
        problem = _packing_problem(units, recipe, aligned)
    if recipe.balance == "none":
        address, waves = in_order(units, recipe, wanted)
    elif cut is None:
        address, waves = search_packs(problem, wanted, thorough=thorough)
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
    """The problem of packing units by their slots, or by their number if that limits a pack."""
    widest = np.array([units.widest.max(initial=1)])
    capacity, most = recipe.layout.pack_bounds(recipe, widest)
    if capacity is None:
        units, capacity = replace(units, size=units.count), int(most[0])
        if int(units.count.max(initial=1)) > capacity:
            raise PlanError(
                f"a group has {units.count.max()} segments, but a micro-batch of this step, "
                f"{widest[0]} slots wide, holds {capacity}. Raise layout.max_tokens or "
                f"layout.samples, or set groups='step' or topology.variable_seq_lengths."
            )
    if recipe.second_work is not None:
        first = float(recipe.cost.of_lengths(aligned).sum())
        scale = recipe.second_work.scale(first, float(units.second.sum()))
        units = replace(units, second=units.second * scale)
    return Problem(recipe, units, aligned, capacity)


def _cut_by_rank(
    units: Units, recipe: Recipe, layout: Padded, aligned: IntArray, wanted: int | None
) -> tuple[IntArray, int]:
    """Equally many segments on each rank, cut rank by rank; the fastest number of waves."""
    ranks, problem = recipe.topology.dp, Problem(recipe, units, aligned, units.count)
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
            tried.append((problem.time(problem.works(address, count)), address, count))
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
    cut, packer, sized, capacity = _cut_layout(recipe), recipe.layout.packer or BEST_FIT, units, 0
    if len(units) == 0:
        return 0
    if cut is None:
        try:
            problem = _packing_problem(units, recipe, units.widest)
        except PlanError:
            return packs + len(units)  # a group does not fit at this width
        sized, capacity = problem.units, problem.capacity
    if recipe.balance == "none":
        return int(packs_in_order(units, recipe)[-1]) + 1
    if cut is not None and cut.cut == "greedy":
        return ranks * len(shared_cuts(units, cut, recipe).ends)

    def count(part: Units, most: int) -> int:
        if cut is not None:
            return count_cuts(part, cut, recipe)
        return len(fill_bins(part, capacity, packer, recipe.seed, most)) if len(part) else 0

    if recipe.equal_sizes:
        parts = _parts(sized, ranks, "lpt")
        return ranks * rounded_up(max(count(part, packs // ranks) for part in parts), rows)
    return count(sized, packs)


def packs_are_counted(recipe: Recipe) -> bool:
    """Whether `count_needed` runs a packer, which is slow."""
    return recipe.balance != "none" and _cut_layout(recipe) is None


def search_packs(
    problem: Problem, wanted: int | None, *, thorough: bool = True
) -> tuple[IntArray, int]:
    """(address of each unit, waves) with the least modelled time found.

    `wanted` waves are used if given. Otherwise the fewest are tried and up to two multiples more;
    more than the fewest are taken only if they save `recipe.saving`.
    """
    search, saving = _Search(problem), problem.recipe.saving
    tried: list[Packing] = []
    for waves in _counts(problem, wanted, tried):
        least = min((each.time for each in tried), default=np.inf) * (1 - saving)
        # Floors rise with the waves, and that of the waves tried last is known.
        if tried and any(problem.is_within(least, at, 1.0) for at in (tried[-1].waves, waves)):
            break
        packing = search.quick(waves)
        if packing is None:
            continue
        tried.append(packing)
        if search.many and len(tried) > 1 and packing.time > tried[0].time * (1 - saving):
            break  # even more waves are not likely to save either
    if not tried:
        raise PlanError(
            f"the samples of this step do not fit into {wanted} micro-batches per rank. Raise "
            f"steps.micro_batches or layout.max_tokens."
        )
    fastest = int(np.argmin([each.time for each in tried]))
    others = range(len(tried)) if search.patient else ()
    for at in dict.fromkeys((0, fastest, *others)) if thorough else ():
        least = min((each.time for each in tried[:at]), default=np.inf) * (1 - saving)
        if at == 0 or not problem.is_within(least, tried[at].waves, 1.0):
            tried[at] = search.thorough(tried[at])
    best = tried[first_worth([each.time for each in tried], saving)]
    filled_waves = np.bincount(best.address // problem.per_wave, minlength=best.waves) > 0
    waves = rounded_up(max(int(filled_waves.sum()), 1), problem.recipe.topology.multiple)
    if search.joint and wanted is None and waves < best.waves:  # leave out waves without units
        wave = (np.cumsum(filled_waves) - 1)[best.address // problem.per_wave]
        address = wave * problem.per_wave + best.address % problem.per_wave
        best = faster(problem, best, address, waves) or best
    if search.joint:
        best = without_empty(problem, best)
    apart = problem.kinds_matter or problem.recipe.equal_sizes
    if search.joint and not apart and not problem.by_rank(best.waves):
        # Exchanges do not look at the sums of ranks over waves: deal packs to ranks anew. This
        # saves little time where ranks wait in every wave, but evens out their work in the step.
        address = dealt(problem, best.address, best.waves)
        time = problem.time(problem.works(address, best.waves))
        if time <= best.time * (1 + 1e-12):
            best = Packing(address, best.waves, time)
    return best.address, best.waves


def _counts(problem: Problem, wanted: int | None, tried: list[Packing]) -> Iterator[int]:
    """The waves to try: from a lower bound on until units fit, then some more."""
    if wanted is not None:
        yield wanted
        return
    units, recipe, multiple = problem.units, problem.recipe, problem.recipe.topology.multiple
    capacity, per_wave = problem.capacity, problem.per_wave
    per_count = per_wave * multiple  # packs that each count has more than the one before
    packs = max(divided_up(int(np.minimum(units.size, capacity).sum()), capacity), 1)
    for column, cap in zip(units.extra.T, units.caps.tolist(), strict=True):
        share = float(np.minimum(column, cap).sum()) / cap if cap > 0 else 0.0
        packs = max(packs, int(np.ceil(share * (1 - 1e-9))))
    waves = rounded_up(packs, per_count) // per_wave
    if not len(units.caps):
        # The volume nearly always suffices. A better bound takes longer than a try.
        yield waves
        if not tried:
            fewest = rounded_up(problem.fewest_packs, per_count) // per_wave
            waves, most = max(waves + multiple, fewest), fewest + LOOK * multiple
        while not tried and waves < most:
            yield waves
            waves += 0 if tried else multiple
    if not tried:
        # Pack once: any number is enough, but for a last step of at most so many micro-batches.
        packer, sized = recipe.layout.packer or BEST_FIT, recipe.steps.micro_batches
        enough = len(units) if sized is None else sized * per_wave
        too_few = waves - multiple
        # Under further limits, units that are spread may need far fewer packs than filled ones.
        if not len(units.caps) or spread_units(units, capacity, waves * per_wave) is None:
            bins = fill_bins(units, capacity, packer, recipe.seed, enough)
            waves = max(waves, rounded_up(len(bins), per_count) // per_wave)
        while len(units.caps) and waves - too_few > max(multiple, waves // SPARED):
            middle = too_few + rounded_up((waves - too_few) // 2, multiple)
            middle = middle if middle < waves else middle - multiple
            fits = spread_units(units, capacity, middle * per_wave) is not None
            too_few, waves = (too_few, middle) if fits else (middle, waves)
    while not tried:
        yield waves
        waves += 0 if tried else multiple
    if recipe.layout.packer is None and len(units) <= MOST:
        yield from more_counts(waves, recipe)


def constructions(problem: Problem, waves: int) -> list[Construction]:
    """What forms the packs, the most promising first."""
    recipe = problem.recipe
    if problem.kinds_matter:
        return [kinds_apart]
    if recipe.equal_sizes:
        shaped = recipe.topology.equal_widths or recipe.layout.static
        ways: list[Construction] = []
        if shaped or recipe.layout.packer is not None:
            ways = [*([partial(equal_ranks, by_size=True)] if shaped else []), equal_ranks]
        return [*ways, *([equal_fit] if recipe.layout.packer is None else [])]
    if recipe.balance != "refined" or recipe.layout.packer is not None:
        return [bins_dealt, spread_out] if len(problem.units.caps) else [bins_dealt]
    if recipe.topology.equal_widths:
        return [*(partial(narrow, wider=wider) for wider in WIDER), waves_first]
    if recipe.second_work is not None:
        return [kinds_apart, filled]
    spread: list[Construction] = [filled] if len(problem.units.caps) else []
    return [*spread, *([ranks_first] if problem.by_rank(waves) else []), waves_first]


class _Search:
    """What is tried with a given number of waves."""

    def __init__(self, problem: Problem) -> None:
        self.problem, recipe, units = problem, problem.recipe, problem.units
        layout = recipe.layout
        self.many = len(units) > SEARCHED
        # Packs are formed to be even: not a packer's bins or those of another balance.
        self.joint = recipe.balance == "refined" and layout.packer is None
        self.exchanged = self.joint and not self.many
        shaped = layout.static or recipe.topology.equal_widths or recipe.equal_tokens
        several = problem.rows > 1 or recipe.second_work is not None
        # A micro-batch costs what its units cost, and nothing for its width.
        self.additive = not (shaped or several) and layout.round_to == 1
        # Every part of a percent is searched for, as exchanges of few units gain more. Not where
        # more micro-batches have to save a share of the time: there, a plan within that share of
        # its floor is good enough. Shapes, rows and second work are farther from their floors.
        plain = self.additive and recipe.sync_every == "micro_batch"
        self.eager = len(units) <= FEW and not (plain and recipe.saving > 0 and len(units) > TINY)
        self.grouped = int(units.count.max(initial=1)) > 1
        # All counts are searched thoroughly, also those that begin slower.
        self.patient = self.eager or recipe.sync_every == "step" or recipe.saving == 0

    def quick(self, waves: int) -> Packing | None:
        """The fastest packs of the constructions; None if none fits."""
        problem, recipe = self.problem, self.problem.recipe
        by_rank = problem.by_rank(waves if self.joint else 2)
        best: Packing | None = None
        for at, construct in enumerate(constructions(problem, waves)):
            if best is not None and (
                (at == 1 and self.many and not by_rank)
                or problem.is_within(best.time, waves, NEARLY if by_rank else NEAR)
            ):
                break
            best = faster(problem, best, construct(problem, waves), waves)
        if best is None and recipe.layout.packer is None and not problem.kinds_matter:
            if recipe.equal_sizes:
                best = faster(problem, None, equal_ranks(problem, waves), waves)
            elif self.joint and problem.fewest_packs <= waves * problem.per_wave:
                best = faster(problem, None, filled(problem, waves), waves)
        quick_floor = problem.quick_floor(waves)  # the floor itself takes longer than exchanges
        if best is None or not self.joint or best.time <= quick_floor * CLOSE:
            return best
        tries = max(2_000, 6 * waves * problem.per_wave)
        return self.improved(best, ((5, 0.0, tries),), quick_floor)

    def thorough(self, best: Packing) -> Packing:
        """The fastest packs after many exchanges, from several starts."""
        problem, waves = self.problem, best.waves
        by_rank, units = problem.by_rank(waves), len(problem.units)
        enough = NEARLY if by_rank or self.eager else FAR
        one_wave = problem.recipe.sync_every == "micro_batch"
        if by_rank and (one_wave or len(problem.units.caps)) and not self.eager:
            enough = CLOSE
        near = max(enough, NEAR)
        if self.eager or problem.rows > 1:  # several rows share what they wait
            enough, near = min(enough, NEAR), NEAR
        dealt_evenly = by_rank and self.additive and problem.recipe.equal_sizes
        if not self.exchanged or dealt_evenly or problem.is_within(best.time, waves, enough):
            return best
        floor = problem.floor(waves)
        if units <= TINY and self.additive and not self.grouped and not problem.recipe.equal_sizes:
            moving = problem.time(problem.loads(best.address, waves, problem.units.cost))
            goal = moving - (best.time - floor * EVEN)
            order = np.lexsort((-problem.units.size, -problem.units.cost))
            address, proved = problem.search_all(order, best.address, waves, moving, goal)
            best = without_empty(problem, best)
            other = faster(problem, None, address, waves)
            if other is not None:
                other = without_empty(problem, other)
                best = other if other.time < best.time else best
            if proved:
                return best
        best = self.improved(best, THOROUGH, floor)
        if units <= FEW and not problem.is_within(best.time, waves, near):
            best = self.improved(best, ANYWHERE, floor)
        if problem.kinds_matter or problem.is_within(best.time, waves, near):
            return best
        start = equal_ranks if problem.recipe.equal_sizes else filled
        other = faster(problem, None, start(problem, waves), waves)
        if other is not None:
            other = self.improved(other, THOROUGH, floor)
            best = other if other.time < best.time else best
        return best

    def improved(self, best: Packing, phases: Phases, floor: float, seed: int = 0) -> Packing:
        """The packs after exchanges, if these make them faster; exchanges stop at the floor."""
        problem, units, waves, address = self.problem, self.problem.units, best.waves, best.address
        recipe, works = problem.recipe, (units.cost, units.second)
        if recipe.topology.equal_widths:
            used = np.bincount(address, units.size, waves * problem.per_wave).max()
            problem = problem.holding(width_for(problem, int(used)))
        if recipe.equal_tokens and not units.second.any():
            # A wave takes as long as its widest micro-batch, and then its most pairs.
            tokens = recipe.cost.per_token * units.size.astype(np.float64)
            works = tokens, np.maximum(units.cost - tokens, 0.0)
        # What does not depend on the exchanges is the same in the time and in its floor.
        moving = problem.time(problem.loads(address, waves, *works))
        goal = moving - (best.time - floor * EVEN)
        times = MORE_TRIES if self.eager else 1
        if recipe.second_work is not None:  # exchanges even out what packs do not see
            times = max(times, len(units) // 128)
        address = problem.exchange(address, waves, phases, goal, works, times, seed)
        return faster(self.problem, best, address, waves) or best
