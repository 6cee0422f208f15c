"""Solver: the least modelled time of a small step, proven by OR-tools CP-SAT.

Once per step the solver chooses the contents of every rank, every micro-batch those of every wave,
such that each unit is held once. What the best micro-batches with given contents cost is known for
all contents. Costs are integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.contents import Small, divided
from evenstep.core.ragged import FloatArray

COUNTS = 3  # the fewest micro-batches per rank and two more
_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Optimum:
    """The least time over the searched counts, and the least by the rule of `Recipe.saving`.

    By the rule, more micro-batches than the fewest are taken only if they save that share.
    """

    least: float
    by_rule: float


def solve(small: Small, known: Mapping[int, float], seconds: float) -> Optimum | None:
    """The optimum; None if the solver does not prove it in time.

    `known` has times of plans by count; `seconds` is the limit for one count.
    """
    packs, saving = small.pack_costs(), small.recipe.saving
    fewest = fewest_micro_batches(small, packs)
    times: dict[int, float] = {}
    for count in range(fewest, fewest + COUNTS):
        # The time of the fewest itself is needed where others must save a share of it.
        most = known.get(count, np.inf)
        if count > fewest or saving == 0:
            most = min(most, *known.values(), *times.values(), np.inf)
        proven, time = _solve_count(small, packs, count, most, seconds)
        if not proven:
            return None
        if time is not None:
            times[count] = time
    least = min(times.values())
    if saving == 0 or least <= times[fewest] * (1 - saving):
        return Optimum(least, least)
    return Optimum(least, times[fewest])


def fewest_micro_batches(small: Small, packs: FloatArray) -> int:
    """The fewest micro-batches per rank that hold all units."""
    alone = divided(packs, _units(packs), True)
    needed = int(np.flatnonzero(np.isfinite(alone[:, -1]))[0])
    return max(1, -(-needed // small.ranks))


def _solve_count(
    small: Small, packs: FloatArray, count: int, most: float, seconds: float
) -> tuple[bool, float | None]:
    """(whether proven, the least time with this count; None if there is none up to `most`)."""
    from ortools.sat.python import cp_model

    fixed = count * small.recipe.cost.per_micro_batch
    model = cp_model.CpModel()
    if small.recipe.sync_every == "step":
        time = _ranks(model, small, packs, count, most - fixed)
    else:
        time = _waves(model, small, packs, count, most - fixed)
    if most < np.inf:
        model.add(time <= int(most - fixed + _SLACK))
    model.minimize(time)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1  # with it, results do not depend on timing
    solver.parameters.linearization_level = 2
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return True, None
    if status != cp_model.OPTIMAL:
        return False, None
    return True, float(solver.objective_value) + fixed


def _ranks(model: Any, small: Small, packs: FloatArray, count: int, most: float) -> Any:
    """The dearest of the ranks' contents."""
    least = divided(packs, min(count, _units(packs)), True)
    spare = count - np.arange(len(least))  # empty micro-batches
    costs = (least + (spare * small.empty)[:, None]).min(axis=0)
    # The other ranks take at most `most` each, so this one takes the rest or more.
    rest = float(small.work()[-1]) - (small.ranks - 1) * most if most < np.inf else 0.0
    possible = (costs <= most + _SLACK) & (costs >= rest - _SLACK)
    held = _contents(model, possible & np.isfinite(costs), small.ranks)
    time = model.new_int_var(_whole(costs[0]), _whole(costs[np.isfinite(costs)].max()), "")
    for unit in range(_units(packs)):
        model.add(time >= sum(_whole(costs[s]) * held[s] for s in held if s >> unit & 1))
    return time


def _waves(model: Any, small: Small, packs: FloatArray, count: int, most: float) -> Any:
    """The sum of the waves' contents, each as long as its dearest micro-batch."""
    costs = divided(packs, min(small.ranks, _units(packs)), False).min(axis=0)
    costs = np.maximum(costs, small.empty)
    # Ranks wait in a wave for what its work leaves idle; together not longer than time is left.
    work = small.work() / small.ranks
    possible = (costs - work <= most - work[-1] + _SLACK) & np.isfinite(costs)
    held = _contents(model, possible & _largest(costs), count)
    empty = _whole(small.empty)
    return count * empty + sum((_whole(costs[s]) - empty) * held[s] for s in held)


def _contents(model: Any, possible: Any, places: int) -> dict[int, Any]:
    """A boolean for each subset that may be chosen: at most `places`, which hold every unit.

    A unit that is held twice can be taken out of one place without making it dearer.
    """
    chosen = [int(subset) for subset in np.flatnonzero(possible) if subset]
    held = {subset: model.new_bool_var("") for subset in chosen}
    least = 0 if possible[0] else places  # whether a place may hold nothing
    model.add_linear_constraint(sum(held.values()), least, places)
    for unit in range(_units(possible)):
        model.add(sum(held[s] for s in chosen if s >> unit & 1) >= 1)
    return held


def _largest(costs: FloatArray) -> Any:
    """Which subsets cannot take another unit at the same cost."""
    alone, subsets = np.ones(len(costs), bool), np.arange(len(costs))
    for unit in range(_units(costs)):
        with_unit = subsets | 1 << unit
        alone &= (with_unit == subsets) | (costs[with_unit] > costs)
    return alone


def _units(by_subset: Any) -> int:
    """The number of units of an array over all subsets."""
    return len(by_subset).bit_length() - 1


def _whole(cost: float) -> int:
    assert abs(cost - round(cost)) < _SLACK, "integer costs"
    return round(cost)
