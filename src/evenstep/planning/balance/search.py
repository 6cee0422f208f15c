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
from evenstep.core.ragged import IntArray
from evenstep.core.rounding import divided_up, rounded_up
from evenstep.errors import PlanError
from evenstep.planning.balance.improve import improve
from evenstep.planning.balance.problem import Problem
from evenstep.planning.balance.ways import Way, bins_for, further_ways, main_ways
from evenstep.planning.counts import first_worth, more_counts
from evenstep.planning.units import Units

_LOOK = 4  # counts tried from the lower bound on before bins are counted
_SEARCHED = 4096  # units up to which further ways and exchanges are tried
_FEW = 256  # units up to which exchanges are always tried thoroughly
_EVEN = 1 + 1e-4  # a time this close to its floor is final
_NEAR = 1.002  # nothing further is tried for a time this close to its floor
_FAR = 1.01  # a time this far from its floor is improved thoroughly

# Of each phase of exchanges: the norm as a power of two, looseness, tries.
_QUICK = ((5, 0.0, 3_000),)
_THOROUGH = ((5, 0.02, 8_000), (7, 0.005, 6_000), (9, 0.001, 6_000))

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


def search_packs(
    problem: Problem, wanted: int | None, time_of: TimeOf, floor_of: FloorOf
) -> tuple[IntArray, int]:
    """(address of each unit, waves) with the least modelled time found.

    `wanted` waves are used if given. Otherwise the fewest are tried and up to two multiples more;
    more than the fewest are taken only if they save `recipe.saving`.
    """
    found: list[Found] = []
    saving = problem.recipe.saving
    for waves in _counts(problem, wanted, found):
        floor = floor_of(waves)
        if found and floor >= min(each.time for each in found) * (1 - saving):
            break
        here = _fastest(problem, waves, time_of, floor)
        if here is not None:
            found.append(here)
    if not found:
        raise PlanError(
            f"the samples of this step do not fit into {wanted} micro-batches per rank. Raise "
            f"steps.micro_batches or layout.max_tokens."
        )
    chosen = found[first_worth([each.time for each in found], saving)]
    return chosen.address, chosen.waves


def bins_needed(units: Units, capacity: int) -> int:
    """A lower bound on the number of packs, by size and by every further limit."""
    taken = np.column_stack((units.size.astype(np.float64), units.extra))
    return max(bins_bound(taken, np.append(float(capacity), units.caps)), 1)


def _counts(problem: Problem, wanted: int | None, found: list[Found]) -> Iterator[int]:
    """The waves to try: from a lower bound on until units fit, then some more."""
    if wanted is not None:
        yield wanted
        return
    multiple, per_wave = problem.recipe.topology.multiple, problem.per_wave
    least = bins_needed(problem.units, problem.capacity)
    waves = rounded_up(divided_up(least, per_wave), multiple)
    for _ in range(0 if len(problem.units.caps) else _LOOK):
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
    if problem.recipe.balance == "refined" and problem.recipe.layout.packer is None:
        yield from more_counts(waves, problem.recipe)


def _fastest(problem: Problem, waves: int, time_of: TimeOf, floor: float) -> Found | None:
    """The fastest packs found with this number of waves; None if units do not fit."""
    units = len(problem.units)
    plain = problem.recipe.balance != "refined" or problem.recipe.layout.packer is not None
    even = floor * (_EVEN if problem.by_rank else _NEAR)
    best: Found | None = None
    for way in main_ways(problem):
        best = _better(best, problem, waves, time_of, way)
        if best is not None and (best.time <= even or (units > _SEARCHED and not problem.by_rank)):
            return best
    far = floor * (_NEAR if units <= _FEW else _FAR)
    if best is not None and not plain and units <= _SEARCHED and best.time > floor * _NEAR:
        best = _improved(problem, best, _QUICK, time_of, floor)
        if best.time <= far and not problem.by_rank:
            return best
    for way in further_ways(problem):
        if best is None or units <= _SEARCHED:
            best = _better(best, problem, waves, time_of, way)
    if best is not None and not plain and units <= _SEARCHED and best.time > far:
        best = _improved(problem, best, _THOROUGH, time_of, floor)
    return best


def _better(
    best: Found | None, problem: Problem, waves: int, time_of: TimeOf, way: Way
) -> Found | None:
    """The better of `best` and what a way finds; None if units do not fit either way."""
    address = way(problem, waves)
    if len(address) < len(problem.units):
        return best
    found = Found(address, waves, time_of(address, waves))
    return found if best is None or found.time < best.time else best


def _improved(
    problem: Problem,
    best: Found,
    phases: tuple[tuple[int, float, int], ...],
    time_of: TimeOf,
    floor: float,
) -> Found:
    """The packs after exchanges, if these make them faster."""
    units, waves = problem.units, best.waves
    if problem.recipe.topology.equal_widths:
        used = np.bincount(best.address, units.size, waves * problem.per_wave).max()
        problem = replace(problem, capacity=min(problem.capacity, problem.rounded(int(used))))
    address = best.address
    # What does not depend on the exchanges is the same in the time and in its floor.
    goal = problem.time(address, waves) - (best.time - floor * _EVEN)
    shape = problem.shape(waves, problem.special_waves(address))
    for squarings, loose, tries in phases:
        address, _ = improve(
            problem.movable, problem.room, shape, address, tries, squarings, loose, goal, 0
        )
    improved = Found(address, waves, time_of(address, waves))
    return improved if improved.time < best.time else best
