"""The packs of one rank: so many, none empty, none over the budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evenstep.core.cost import Cost
from evenstep.core.layout import Packed
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe, Steps
from evenstep.core.topology import Topology
from evenstep.core.validate import MOST
from evenstep.planning.filled import filled_packs
from evenstep.planning.planner import make_plan, plan_step

WORK = Cost(per_token=24576, per_pair=1)
"""The work of a sequence as verl, ROLL and slime estimate it: 24576 · L + L²."""


def pack_recipe(max_tokens: int, cost: Cost = WORK) -> Recipe:
    """The recipe of packs with at most so many tokens."""
    return Recipe(layout=Packed(max_tokens=min(int(max_tokens), MOST)), cost=cost)


def packs_needed(lengths: IntArray, recipe: Recipe, groups: IntArray | None = None) -> int:
    """How many packs these samples need."""
    return max(make_plan(_run(lengths), recipe, groups=groups).num_micro_batches, 1)


def packs_of(
    lengths: IntArray, recipe: Recipe, count: int, groups: IntArray | None = None
) -> list[list[int]]:
    """The samples of each of `count` packs of about equal cost, the costliest first.

    >>> packs_of(np.array([5, 3, 4, 2]), pack_recipe(8), 2)
    [[0, 3], [1, 2]]
    """
    plan = plan_step(
        _run(lengths), replace(recipe, steps=Steps(micro_batches=count)), groups=groups
    )
    (packs,) = filled_packs(plan)
    costs = recipe.cost.of_lengths(lengths)
    by_cost = sorted(packs, key=lambda pack: (-float(costs[pack].sum()), int(pack.min())))
    return [sorted(pack.tolist()) for pack in by_cost]


def pipeline(dp: int, group: int | None) -> Topology:
    """Ranks whose micro-batches come in multiples of `group`, for interleaved stages."""
    group = group or 1
    return Topology(dp=dp, pp=group, vpp=2 if group > 1 else 1, variable_seq_lengths=True)


def _run(lengths: IntArray) -> IntArray:
    return np.maximum(lengths, 1)  # an empty row takes one slot
