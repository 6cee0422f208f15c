"""Search the packs of a step: how many micro-batches per rank, and which units go into each.

Constructions form packs, exchanges improve them. Work stops where the modelled time is close to its
floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from evenstep.core.bounds import bins_bound
from evenstep.core.ragged import IntArray, divided_up, rounded_up
from evenstep.core.recipe import Recipe
from evenstep.errors import PlanError
from evenstep.planning.construct import (
    BEST_FIT,
    at_width,
    fill_bins,
    filled,
    kinds_apart,
    narrow,
    ranks_first,
    waves_first,
)
from evenstep.planning.exchange import exchange, search_all
from evenstep.planning.policies import bins_dealt, equal_fit, equal_ranks, spread_out
from evenstep.planning.units import Problem

Construction: TypeAlias = Callable[[Problem, int], IntArray]
"""(problem, waves) -> the address of each unit; empty if units do not fit that way."""
Phases: TypeAlias = tuple[tuple[int, float, int], ...]
"""Of each phase of exchanges: the norm as a power of two, looseness, tries."""

# Larger numbers of units, tries and counts make plans faster and planning slower; so do shares
# closer to 1. Units up to which something is tried:
TINY = 24  # all assignments, ALL of them at most: proves the optimum of most such steps
SMALL = 64  # exchanges that may go far, as one unit is much of a load: up to 2 % of the time
FEW = 256  # exchanges until a time is NEAR its floor, and MORE_TRIES times as many: 0.2 %, 10 ms
SEARCHED = 4096  # exchanges at all: 0.5 % of the time, for 2 to 20 ms
MOST = 2**17  # more waves than the fewest: up to 1 %, for twice the time
# Times over the floor that are good enough:
EVEN = 1 + 1e-9  # final
NEARLY = 1 + 1e-4  # once per step: no other construction
NEAR = 1.002  # no exchanges
FAIR = 1.01  # unless few units are searched for more: no exchanges, which take 0.5 ms
FAR = 1.0125  # likewise: no thorough exchanges, which take 2 ms
# What is tried:
MORE = 2  # multiples more than the fewest waves
ROOMY = 1.03  # packs over their volume, from which on these are not counted: 0.2 ms
LOOK = 4  # counts from the lower bound on, before bins are counted
ALL = 100_000  # assignments of a unit: up to 10 ms
MORE_TRIES = 3
STARTS = 3  # of random numbers for exchanges of SMALL steps
WIDER = (1.0, 1.02, 1.05)  # widths where all micro-batches share one, over the least
QUICK: Phases = ((5, 0.0, 2_000),)
THOROUGH: Phases = ((5, 0.02, 3_000), (7, 0.005, 2_500), (9, 0.001, 2_500))
ANYWHERE: Phases = ((4, 0.3, 2_000), (6, 0.1, 2_000), (8, 0.02, 1_000))


def more_counts(fewest: int, recipe: Recipe, number: int = MORE) -> list[int]:
    """The numbers of waves above the fewest that are tried; at most `steps.micro_batches`."""
    multiple, most = recipe.topology.multiple, recipe.steps.micro_batches
    counts = [fewest + more * multiple for more in range(1, number + 1)]
    return [count for count in counts if most is None or count <= most]


def first_worth(times: list[float], saving: float) -> int:
    """The first whose time no other undercuts by more than the share `saving`.

    >>> first_worth([100, 99.5, 90], 0.01), first_worth([100, 99.5], 0.01)
    (2, 0)
    """
    least = min(times)
    return next(at for at, time in enumerate(times) if time * (1 - saving) <= least)


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """The address of each unit, and the modelled time."""

    address: IntArray
    waves: int
    time: float


def search_packs(problem: Problem, wanted: int | None) -> tuple[IntArray, int]:
    """(address of each unit, waves) with the least modelled time found.

    `wanted` waves are used if given. Otherwise the fewest are tried and up to two multiples more;
    more than the fewest are taken only if they save `recipe.saving`.
    """
    search, saving = _Search(problem), problem.recipe.saving
    tried: list[Packing] = []
    for waves in _counts(problem, wanted, tried):
        least = min((each.time for each in tried), default=np.inf) * (1 - saving)
        if tried and (problem.floor(tried[-1].waves) >= least or problem.floor(waves) >= least):
            break  # floors rise with the waves, and the first of the two is known
        packing = search.quick(waves)
        if packing is None:
            continue
        tried.append(packing)
        if search.even_at_once(packing) and len(tried) == 1:
            break
        if search.many and len(tried) > 1 and packing.time > tried[0].time * (1 - saving):
            break  # even more waves are not likely to save either
    if not tried:
        raise PlanError(
            f"the samples of this step do not fit into {wanted} micro-batches per rank. Raise "
            f"steps.micro_batches or layout.max_tokens."
        )
    likely = [0, int(np.argmin([each.time for each in tried]))]
    likely += range(len(tried)) if search.patient else []
    for at in dict.fromkeys(likely):
        least = min((each.time for each in tried[:at]), default=np.inf) * (1 - saving)
        if problem.floor(tried[at].waves) < least:
            tried[at] = search.thorough(tried[at])
    best = tried[first_worth([each.time for each in tried], saving)]
    return best.address, best.waves


def _counts(problem: Problem, wanted: int | None, tried: list[Packing]) -> Iterator[int]:
    """The waves to try: from a lower bound on until units fit, then some more."""
    if wanted is not None:
        yield wanted
        return
    units, recipe, multiple = problem.units, problem.recipe, problem.recipe.topology.multiple
    waves = _fewest_waves(problem)
    for _ in range(1 if len(units.caps) else LOOK):
        yield waves
        if tried:
            break
        waves += multiple
    if not tried:
        packer, packs = recipe.layout.packer or BEST_FIT, waves * problem.per_wave
        bins = fill_bins(units, problem.capacity, packer, recipe.seed, packs)
        waves = max(waves, rounded_up(divided_up(len(bins), problem.per_wave), multiple))
    while not tried:
        yield waves
        waves += 0 if tried else multiple
    if recipe.layout.packer is None and len(units) <= MOST:
        yield from more_counts(waves, recipe)


def _fewest_waves(problem: Problem) -> int:
    """A lower bound on the number of waves.

    Where units leave room and the large ones too, their volume decides: a better bound on the packs
    would take longer, and rarely adds a wave.
    """
    units, capacity, per_wave = problem.units, problem.capacity, problem.per_wave
    multiple = problem.recipe.topology.multiple
    packs = divided_up(int(np.minimum(units.size, capacity).sum()), capacity)
    waves = rounded_up(max(divided_up(packs, per_wave), 1), multiple)
    large = int((2 * units.size > capacity).sum())
    if len(units.caps) or max(packs * ROOMY, large) > waves * per_wave:
        taken = np.column_stack((units.size.astype(np.float64), units.extra))
        packs = max(bins_bound(taken, np.append(float(capacity), units.caps)), 1)
        waves = rounded_up(divided_up(packs, per_wave), multiple)
    return waves


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
        return [*(partial(narrow, wider=wider) for wider in WIDER), waves_first, ranks_first]
    if recipe.second_work is not None:
        return [kinds_apart, waves_first, ranks_first, filled]
    return [ranks_first, waves_first] if problem.by_rank(waves) else [waves_first]


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

    def near(self, share: float, waves: int) -> float:
        """A time that needs no further search; closer to the floor where the search is eager.

        So it is with several rows: they share what they wait, so that floors are closer.
        """
        close = self.eager or self.problem.rows > 1
        return self.problem.floor(waves) * (min(share, NEAR) if close else share)

    def even_at_once(self, packing: Packing) -> bool:
        """Whether ranks are so even that there is nothing to search.

        The mean over ranks is a floor that costs nothing. Another number of waves cannot save more
        than the distance from it.
        """
        problem, recipe = self.problem, self.problem.recipe
        if self.grouped or not (self.additive and self.joint) or recipe.equal_sizes:
            return False
        by_rank = problem.by_rank(packing.waves)
        mean = float(problem.units.cost.sum()) / problem.ranks
        beyond = packing.time - packing.waves * recipe.cost.per_micro_batch - mean
        near = (EVEN if by_rank else NEAR if self.eager else FAIR) - 1
        if self.many:  # if not by rank, nothing else would be tried
            near = NEARLY - 1 if by_rank else 1.0
        return beyond <= min(near * mean, max(recipe.cost.per_micro_batch, recipe.saving * mean))

    def quick(self, waves: int) -> Packing | None:
        """The fastest packs of the constructions; None if none fits."""
        problem, recipe = self.problem, self.problem.recipe
        by_rank = problem.by_rank(waves if self.joint else 2)
        best: Packing | None = None
        for at, construct in enumerate(constructions(problem, waves)):
            if at == 1 and best is not None:
                if self.even_at_once(best):
                    return best
                if self.many and not by_rank:
                    break
            if best is not None and best.time <= problem.floor(waves) * (NEARLY if by_rank else NEAR):
                break
            best = self.faster(best, construct, waves)
        if best is None and recipe.layout.packer is None:
            if recipe.equal_sizes:
                best = self.faster(None, equal_ranks, waves)
            elif self.joint:
                best = self.faster(None, filled, waves)
        if best is None or not self.joint or best.time <= problem.floor(waves) * NEAR:
            return best
        tries = max(2_000, 6 * waves * problem.per_wave)
        return self.improved(best, ((5, 0.0, tries),))

    def thorough(self, best: Packing) -> Packing:
        """The fastest packs after many exchanges, from several starts."""
        problem, waves = self.problem, best.waves
        by_rank, units = problem.by_rank(waves), len(problem.units)
        if not self.exchanged or best.time <= self.near(EVEN if by_rank else FAR, waves):
            return best
        if units <= TINY and self.additive and not self.grouped and not problem.recipe.equal_sizes:
            best, proved = self.best_of_all(best)
            if proved:
                return best
        enough = self.near(NEARLY if by_rank else FAR, waves)
        for seed in range(STARTS if units <= SMALL else 1):
            if best.time > enough:
                best = self.improved(best, THOROUGH, seed)
            if best.time > enough and units <= SMALL:
                best = self.improved(best, ANYWHERE, seed)
        if problem.kinds_matter or best.time <= enough:
            return best
        other = self.faster(None, equal_ranks if problem.recipe.equal_sizes else filled, waves)
        if other is not None:
            other = self.improved(other, THOROUGH)
            best = other if other.time < best.time else best
        return best

    def best_of_all(self, best: Packing) -> tuple[Packing, bool]:
        """(the fastest packs, whether that is proved) by a search of all, for a while."""
        problem, units = self.problem, self.problem.units
        moving = problem.moving_time(best.address, best.waves, units.cost)
        address, proved = search_all(
            units.size,
            units.cost,
            units.extra,
            problem.most,
            units.caps,
            problem.shape(best.waves, best.address),
            np.lexsort((-units.size, -units.cost)),
            moving,
            moving - (best.time - problem.floor(best.waves) * EVEN),
            ALL,
        )
        return (self.timed(best, address, best.waves) or best), proved

    def improved(self, best: Packing, phases: Phases, seed: int = 0) -> Packing:
        """The packs after exchanges, if these make them faster."""
        problem, units, waves, address = self.problem, self.problem.units, best.waves, best.address
        if problem.recipe.topology.equal_widths:
            used = np.bincount(address, units.size, waves * problem.per_wave).max()
            problem = at_width(problem, int(used))
        first, second = units.cost, units.second
        if problem.recipe.equal_tokens and not second.any():
            # A wave takes as long as its widest micro-batch, and then its most pairs.
            first = problem.recipe.cost.per_token * units.size.astype(np.float64)
            second = np.maximum(units.cost - first, 0.0)
        # What does not depend on the exchanges is the same in the time and in its floor.
        moving = problem.moving_time(address, waves, first, second)
        goal = moving - (best.time - problem.floor(waves) * EVEN)
        times = MORE_TRIES if self.eager else 1
        if problem.recipe.second_work is not None:  # exchanges even out what packs do not see
            times = max(times, len(units) // 128)
        shape, most = problem.shape(waves, address), np.full(len(units), problem.capacity)
        for squarings, loose, tries in phases:
            address, _ = exchange(
                units.size,
                first,
                second,
                units.count,
                units.extra,
                most,
                units.caps,
                shape,
                address,
                times * tries,
                squarings,
                loose,
                goal,
                seed,
            )
        return self.timed(best, address, waves) or best

    def faster(self, best: Packing | None, construct: Construction, waves: int) -> Packing | None:
        """The faster of `best` and what a construction forms."""
        return self.timed(best, construct(self.problem, waves), waves)

    def timed(self, best: Packing | None, address: IntArray, waves: int) -> Packing | None:
        """The faster of `best` and the units at these addresses, unless those are none."""
        if len(address) < len(self.problem.units):
            return best
        time = self.problem.time(address, waves)
        return Packing(address, waves, time) if best is None or time < best.time else best
