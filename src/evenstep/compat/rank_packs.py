"""The packs of one rank: so many, none empty, none over the budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evenstep.compat.filled import filled_packs
from evenstep.core.cost import Cost
from evenstep.core.layout import Packed
from evenstep.core.ragged import IntArray, Ragged, sum_by
from evenstep.core.recipe import Recipe, Steps, Topology
from evenstep.core.text import MOST
from evenstep.errors import PlanError
from evenstep.planning.packers import pack
from evenstep.planning.partition import partition
from evenstep.planning.planner import plan_step

WORK = Cost(per_token=24576, per_pair=1)
"""The work of a sequence as verl, ROLL and slime estimate it: 24576 · L + L²."""


def pack_recipe(max_tokens: int, cost: Cost = WORK) -> Recipe:
    """The recipe of packs with at most so many tokens."""
    return Recipe(layout=Packed(max_tokens=min(int(max_tokens), MOST)), cost=cost)


def packs_needed(lengths: IntArray, recipe: Recipe, groups: IntArray | None = None) -> int:
    """How many packs these samples need."""
    return max(len(pack(_units(lengths, groups), recipe.capacity or MOST, "optimal")), 1)


def packs_of(
    lengths: IntArray, recipe: Recipe, count: int, groups: IntArray | None = None
) -> list[list[int]]:
    """The samples of each of `count` packs of about equal cost, the costliest first.

    >>> packs_of(np.array([5, 3, 4, 2]), pack_recipe(8), 2)
    [[0, 3], [1, 2]]
    """
    packs = _level(lengths, recipe, count, groups) or _planned(lengths, recipe, count, groups)
    costs = recipe.cost.of_lengths(lengths)
    by_cost = sorted(packs, key=lambda held: (-float(costs[held].sum()), int(held.min())))
    return [sorted(held.tolist()) for held in by_cost]


def pipeline(dp: int, group: int | None) -> Topology:
    """Ranks whose micro-batches come in multiples of `group`, for interleaved stages."""
    group = group or 1
    return Topology(dp=dp, pp=group, vpp=2 if group > 1 else 1, variable_seq_lengths=group > 1)


def _level(
    lengths: IntArray, recipe: Recipe, count: int, groups: IntArray | None
) -> list[IntArray]:
    """Packs of the most even cost, as Karmarkar-Karp finds them; none if one exceeds the budget."""
    unit = np.arange(len(lengths)) if groups is None else groups
    costs = sum_by(unit, recipe.cost.of_lengths(_run(lengths)), int(unit.max(initial=-1)) + 1)
    packs = list(Ragged.group(partition(costs, count, "karmarkar_karp")[unit], count))
    fits = all(0 < _run(lengths[held]).sum() <= (recipe.capacity or MOST) for held in packs)
    return packs if fits else []


def _planned(
    lengths: IntArray, recipe: Recipe, count: int, groups: IntArray | None
) -> list[IntArray]:
    """Packs of a plan, or those that `packs_needed` has found."""
    # One micro-batch on each of `count` ranks: all packs are then balanced against each other.
    ranks = replace(recipe, topology=Topology(dp=count), steps=Steps(micro_batches=1))
    try:
        plan = plan_step(_run(lengths), ranks, groups=groups)
        return [found for rank in filled_packs(plan) for found in rank]
    except PlanError:
        sizes = _units(lengths, groups)
        bins = pack(sizes, recipe.capacity or MOST, "optimal", min_bin_count=count)
    if groups is None:
        return list(bins)
    members = Ragged.group(groups, len(sizes))
    return [np.concatenate([members[unit] for unit in held]) for held in bins.tolist()]


def _units(lengths: IntArray, groups: IntArray | None) -> IntArray:
    """The tokens of each sample or group."""
    if groups is None:
        return _run(lengths)
    return sum_by(groups, _run(lengths), int(groups.max(initial=-1)) + 1).astype(np.int64)


def _run(lengths: IntArray) -> IntArray:
    return np.maximum(lengths, 1)  # an empty row takes one slot
