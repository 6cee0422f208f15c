"""The modelled time of each step of a plan, and what it is spent on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evenstep.core.ragged import FloatArray, offsets_of, sum_by

if TYPE_CHECKING:
    from evenstep.core.plan import Plan


class TimeParts(NamedTuple):
    """What a rank spends its time on, in the unit of the cost; a mean over ranks.

    work     real tokens, and the fixed cost of micro-batches
    padding  slots without a token
    waiting  for slower ranks
    """

    work: float
    padding: float
    waiting: float

    @property
    def total(self) -> float:
        """The modelled time."""
        return self.work + self.padding + self.waiting


def step_times(plan: Plan) -> FloatArray:
    """The time of each step: its slowest rank, or the sum over waves of the slowest micro-batch, as
    `sync_every` says. Without second work.

    >>> from evenstep import Packed, Recipe, Topology, make_plan
    >>> recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2))
    >>> step_times(make_plan([5, 3, 4], recipe)).tolist()
    [7.0]
    """
    costs, ranks = plan.costs, plan.num_ranks
    counts = np.diff(plan.cell_offsets)
    if plan.recipe.sync_every == "step":
        by_cell = sum_by(plan.cell_of_micro_batch, costs, len(counts))
        return np.asarray(by_cell.reshape(-1, ranks).max(axis=1))
    # Waves are numbered over all steps: two ranks that run 3 and 2 micro-batches -> 0 1 2 | 0 1
    per_step = counts.reshape(-1, ranks).max(axis=1)
    waves = offsets_of(per_step)
    first = np.repeat(waves[:-1], ranks) - plan.cell_offsets[:-1]
    slowest = np.zeros(waves[-1])
    np.maximum.at(slowest, np.arange(len(costs)) + np.repeat(first, counts), costs)
    return sum_by(np.repeat(np.arange(len(per_step)), per_step), slowest, len(per_step))


def step_imbalances(plan: Plan) -> FloatArray:
    """The time of each step over the mean cost of a rank; 1 if it is even or empty.

    >>> from evenstep import Padded, Recipe, Topology, make_plan
    >>> recipe = Recipe(layout=Padded(samples=2), topology=Topology(dp=2), balance="none")
    >>> step_imbalances(make_plan([5, 3, 4], recipe)).round(2).tolist()
    [1.43]
    """
    step = plan.cell_of_micro_batch // plan.num_ranks
    mean = sum_by(step, plan.costs, plan.num_steps) / plan.num_ranks
    return np.divide(step_times(plan), mean, out=np.ones(len(mean)), where=mean > 0)


def time_parts(plan: Plan) -> TimeParts:
    """Where the modelled time of all steps goes.

    >>> from evenstep import Padded, Recipe, Topology, make_plan
    >>> recipe = Recipe(layout=Padded(samples=2), topology=Topology(dp=2), balance="none")
    >>> time_parts(make_plan([5, 3, 4], recipe))
    TimeParts(work=6.0, padding=1.0, waiting=3.0)
    """
    cost, ranks = plan.recipe.cost, plan.num_ranks
    every = float(plan.costs.sum()) / ranks
    tokens = float(cost.of_lengths(plan.segments.length).sum())
    work = min(every, (tokens + cost.per_micro_batch * plan.num_micro_batches) / ranks)
    return TimeParts(work, every - work, max(0.0, float(step_times(plan).sum()) - every))
