"""Search the packs of a step: how many micro-batches per rank, and which units go into each.

Several ways to form packs are tried; the fastest packs are improved by exchanges. Work stops where
the modelled time is close to its floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from evenstep.core.bounds import bins_bound
from evenstep.core.ragged import IntArray, divided_up, rounded_up
from evenstep.errors import PlanError
from evenstep.planning.balance import effort
from evenstep.planning.balance.exact import search_all
from evenstep.planning.balance.exact_ranks import search_ranks, without_empty
from evenstep.planning.balance.improve import improve
from evenstep.planning.balance.problem import Problem
from evenstep.planning.balance.ways import Way, bins_for, further_ways, main_ways
from evenstep.planning.counts import first_worth, more_counts
from evenstep.planning.units import Units

TimeOf: TypeAlias = Callable[[IntArray, int], float]
"""(address of each unit, waves) -> modelled time of the step."""
FloorOf: TypeAlias = Callable[[int], float]
"""Waves -> a lower bound on the modelled time of a step with as many or more."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The address of each unit, and the modelled time."""

    address: IntArray
    waves: int
    time: float


def search_packs(problem: Problem, wanted: int | None, time_of: TimeOf, floor_of: FloorOf) -> Found:
    """The packs with the least modelled time found.

    `wanted` waves are used if given. Otherwise the fewest are tried and up to two multiples more;
    more than the fewest are taken only if they save `recipe.saving`.
    """
    search = _Search(problem, time_of, floor_of)
    found: list[Found] = []
    saving = problem.recipe.saving
    for waves in _counts(problem, wanted, found):
        least = min((each.time for each in found), default=np.inf) * (1 - saving)
        if found and (floor_of(found[-1].waves) >= least or floor_of(waves) >= least):
            break  # floors rise with the waves, and the first of the two is known
        first = main_ways(problem)[0](problem, waves)
        if not found and len(first) == len(problem.units) and _even_at_once(problem, first, waves):
            return Found(first, waves, problem.full_time(first, waves))
        here = search.quickly(waves, first)
        if here is None:
            continue
        found.append(here)
        if search.many and len(found) > 1 and here.time > found[0].time * (1 - saving):
            break  # even more waves are not likely to save either
    if not found:
        raise PlanError(
            f"the samples of this step do not fit into {wanted} micro-batches per rank. Raise "
            f"steps.micro_batches or layout.max_tokens."
        )
    likely = {0, int(np.argmin([each.time for each in found]))}
    others = set(range(len(found))) - likely if search.patient else set()
    for at in (*likely, *others):
        least = min((each.time for each in found[:at]), default=np.inf) * (1 - saving)
        if floor_of(found[at].waves) < least:
            found[at] = search.thoroughly(found[at])
    return search.evenly(found[first_worth([each.time for each in found], saving)])


def _even_at_once(problem: Problem, address: IntArray, waves: int) -> bool:
    """Whether ranks are so even that there is nothing to search.

    The mean over ranks is a floor that costs nothing. Another number of waves cannot save more than
    the distance from it.
    """
    if not problem.simple:
        return False
    beyond = problem.time(address, waves) - problem.mean
    near = (effort.EVEN if problem.by_rank else effort.NEAR if _eager(problem) else effort.FAIR) - 1
    if len(problem.units) > effort.SEARCHED:  # if not by rank, nothing else would be tried
        near = _close_by_rank(problem) - 1 if problem.by_rank else 1.0
    recipe, mean = problem.recipe, problem.mean
    return beyond <= min(near * mean, max(recipe.cost.per_micro_batch, recipe.saving * mean))


def _eager(problem: Problem) -> bool:
    """Whether every part of a percent is searched for, as exchanges of few units gain more.

    Not where more micro-batches have to save a share of the time: there, a plan within that share
    of its floor is good enough. Shapes, rows and second work are farther from their floors.
    """
    units, plain = len(problem.units), problem.additive and not problem.by_rank
    tolerant = plain and problem.recipe.saving > 0 and units > effort.TINY
    return units <= effort.FEW and not tolerant


def _close_by_rank(problem: Problem) -> float:
    """How close to the floor the first way must come, once per step, to be the only one.

    Up to SEARCHED units, simpler ways are tried later, too; from MOST on, they cannot save more
    than this and take three times as long.
    """
    between = effort.SEARCHED < len(problem.units) <= effort.MOST
    return effort.EVEN if between else effort.NEARLY


def bins_needed(units: Units, capacity: int) -> int:
    """A lower bound on the number of packs, by size and by every further limit."""
    taken = np.column_stack((units.size.astype(np.float64), units.extra))
    return max(bins_bound(taken, np.append(float(capacity), units.caps)), 1)


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
    if len(units.caps) or max(packs * effort.ROOMY, large) > waves * per_wave:
        packs = bins_needed(units, capacity)
        waves = rounded_up(divided_up(packs, per_wave), multiple)
    return waves


def _counts(problem: Problem, wanted: int | None, found: list[Found]) -> Iterator[int]:
    """The waves to try: from a lower bound on until units fit, then some more."""
    if wanted is not None:
        yield wanted
        return
    multiple, per_wave = problem.recipe.topology.multiple, problem.per_wave
    waves = _fewest_waves(problem)
    for _ in range(1 if len(problem.units.caps) else effort.LOOK):
        yield waves
        if found:
            break
        waves += multiple
    if not found:
        enough = divided_up(len(bins_for(problem, waves)), per_wave)
        waves = max(waves, rounded_up(enough, multiple))
    while not found:
        yield waves
        waves += 0 if found else multiple
    if problem.recipe.layout.packer is None and len(problem.units) <= effort.MOST:
        yield from more_counts(waves, problem.recipe)


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """What is tried with a given number of waves."""

    problem: Problem
    time_of: TimeOf
    floor_of: FloorOf

    @property
    def many(self) -> bool:
        """Whether there are so many units that one or two ways are enough."""
        return len(self.problem.units) > effort.SEARCHED

    @property
    def exchanged(self) -> bool:
        """Whether units are exchanged between packs."""
        return self.problem.joint and not self.many

    @property
    def patient(self) -> bool:
        """Whether all counts are searched thoroughly, also those that begin slower."""
        return _eager(self.problem) or self.problem.by_rank or self.problem.recipe.saving == 0

    def near(self, share: float, waves: int) -> float:
        """A time that needs no further search; closer to the floor where the search is eager.

        So it is with several rows: they share what they wait, so that floors are closer.
        """
        close = _eager(self.problem) or self.problem.rows > 1
        return self.floor_of(waves) * (min(share, effort.NEAR) if close else share)

    def quickly(self, waves: int, first: IntArray) -> Found | None:
        """The fastest packs of the main ways, of which the first is given; None if none fits."""
        by_rank, many = self.problem.by_rank, self.many
        one_is_enough = not by_rank and self.problem.recipe.second_work is None
        close = _close_by_rank(self.problem) if by_rank else effort.NEAR
        even = self.floor_of(waves) * close
        best = self.better(None, waves, first)
        for way in main_ways(self.problem)[1:]:
            if best is not None and (best.time <= even or (many and one_is_enough)):
                break
            best = self.better(best, waves, way(self.problem, waves))
        if best is None:
            for way in further_ways(self.problem, few=many):
                best = self.better(best, waves, way(self.problem, waves))
        if best is not None and self.exchanged and best.time > self.near(effort.FAIR, waves):
            best = self.improved(best, effort.QUICK)
        return best

    def thoroughly(self, best: Found) -> Found:
        """The fastest packs of all ways, after many exchanges."""
        share = effort.EVEN if self.problem.by_rank else effort.FAR
        if not self.exchanged or best.time <= self.near(share, best.waves):
            return best
        nearly = self.problem.by_rank and best.time <= self.near(effort.NEARLY, best.waves)
        if len(self.problem.units) <= effort.TINY and self.problem.simple:
            best, proved = self.best_of_all(best)
            if proved:
                return best
        ways = further_ways(self.problem)[: 2 if nearly else None]
        if self.problem.by_rank:
            return self.after_exchanges(self.best_way(best, ways))
        best = self.after_exchanges(best)
        return best if best.time <= self.near(effort.FAR, best.waves) else self.best_way(best, ways)

    def best_way(self, best: Found, ways: list[Way]) -> Found:
        """The fastest of these packs and those of other ways."""
        for way in ways:
            best = self.better(best, best.waves, way(self.problem, best.waves)) or best
        return best

    def after_exchanges(self, best: Found) -> Found:
        """The packs after many exchanges, unless they are close to their floor."""
        if best.time <= self.near(effort.FAR, best.waves):
            return best
        best = self.improved(best, effort.THOROUGH)
        few = len(self.problem.units) <= effort.SMALL
        return self.improved(best, effort.ANYWHERE) if few else best

    def evenly(self, best: Found) -> Found:
        """The faster of these packs and those of ranks with equally many segments, exchanged."""
        problem, waves = self.problem, best.waves
        if problem.by_rank or not (problem.free and self.exchanged):
            return best
        if best.time <= self.near(effort.FAR, waves):
            return best
        equal = replace(problem, recipe=replace(problem.recipe, equal_sizes=True))
        found = self.better(None, waves, main_ways(equal)[0](equal, waves))
        if found is None:
            return best
        found = replace(self, problem=equal).improved(found, (*effort.QUICK, *effort.THOROUGH))
        return best if best.time <= found.time else found

    def best_of_all(self, best: Found) -> tuple[Found, bool]:
        """(the fastest packs, whether that is proved) by a search of all, for a while."""
        problem, units = self.problem, self.problem.units
        moving = problem.time(best.address, best.waves)
        goal = moving - (best.time - self.floor_of(best.waves) * effort.EVEN)
        order = np.lexsort((-units.size, -units.cost))
        shape = problem.shape(best.waves)
        search = search_ranks if problem.by_rank else search_all
        address, proved = search(
            problem.movable, problem.room, shape, order, moving, goal, effort.ALL
        )
        if problem.by_rank:
            address = without_empty(address if len(address) else best.address, shape)
        return self.better(best, best.waves, address) or best, proved

    def better(self, best: Found | None, waves: int, address: IntArray) -> Found | None:
        """The faster of `best` and the units at these addresses, unless those are none."""
        if len(address) < len(self.problem.units):
            return best
        time_of = self.problem.full_time if self.problem.additive else self.time_of
        found = Found(address, waves, time_of(address, waves))
        return found if best is None or found.time < best.time else best

    def improved(self, best: Found, phases: effort.Phases) -> Found:
        """The packs after exchanges, if these make them faster."""
        problem, units, waves, address = self.problem, self.problem.units, best.waves, best.address
        if problem.recipe.topology.equal_widths:
            used = np.bincount(address, units.size, waves * problem.per_wave).max()
            problem = replace(problem, capacity=min(problem.capacity, problem.rounded(int(used))))
        # What does not depend on the exchanges is the same in the time and in its floor.
        goal = problem.time(address, waves) - (best.time - self.floor_of(waves) * effort.EVEN)
        shape = problem.shape(waves, problem.special_waves(address))
        times = effort.MORE_TRIES if _eager(problem) else 1
        if problem.recipe.second_work is not None:  # exchanges even out what packs do not see
            times = max(times, len(units) // 128)
        for squarings, loose, tries in phases:
            address, _ = improve(
                problem.movable,
                problem.room,
                shape,
                address,
                times * tries,
                squarings,
                loose,
                goal,
                0,
            )
        return self.better(best, waves, address) or best
