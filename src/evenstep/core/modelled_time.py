"""The modelled time of steps. Planning, stats, reports and pictures ask these functions alone.

A micro-batch has one or two works: its cost, and the second work of its samples. Ranks wait for
each other in each of them, so the time of a step is the sum of the times of its works.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import FloatArray, sum_by

if TYPE_CHECKING:
    from evenstep.core.plan import Plan
    from evenstep.core.recipe import SyncEvery
    from evenstep.core.second_work import SecondWork


class TimeParts(NamedTuple):
    """What a rank spends its time on, in the unit of the cost; a mean over ranks.

    work     real tokens, second work, and the fixed cost of micro-batches
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


def slowest(work: NDArray[np.generic], sync_every: SyncEvery) -> FloatArray:
    """The time of one work, of each step: work[..., rank, wave] -> time[...].

    The largest sum of a rank, or the sum over waves of the largest micro-batch.

    >>> work = np.array([[3.0, 1.0], [2.0, 3.0]])
    >>> float(slowest(work, "step")), float(slowest(work, "micro_batch"))
    (5.0, 6.0)
    """
    if sync_every == "step":
        return np.asarray(work.sum(axis=-1).max(axis=-1, initial=0), np.float64)
    return np.asarray(work.max(axis=-2, initial=0).sum(axis=-1), np.float64)


def time_of_works(works: Iterable[NDArray[np.generic]], sync_every: SyncEvery) -> float:
    """The time of one step with these works[rank, wave]: the sum of their times."""
    return float(sum(slowest(work, sync_every) for work in works))


def slowest_of_steps(
    plan: Plan, work: NDArray[np.generic], sync_every: SyncEvery | None = None
) -> FloatArray:
    """`slowest` for each step of a plan; `work` is that of each micro-batch."""
    ranks, starts = plan.num_ranks, plan.cell_offsets
    counts = np.diff(starts).reshape(-1, ranks)
    waves = counts.max(axis=1, initial=0)
    times = np.zeros(len(counts))
    for count in np.unique(waves).tolist():  # steps with equally many waves form one array
        steps = np.flatnonzero(waves == count)
        first, present = starts[:-1].reshape(-1, ranks)[steps], counts[steps][..., None]
        wave = np.arange(count)
        at = np.minimum(first[..., None] + wave, len(work) - 1)  # steps x ranks x waves
        load = np.where(wave < present, work[at], 0)
        times[steps] = slowest(load, sync_every or plan.recipe.sync_every)
    return times


def second_costs(plan: Plan, second_work: SecondWork | None = None) -> FloatArray | None:
    """The second work of each segment in the unit of the cost; None without one.

    `second_work` is measured instead of the recipe's, for a plan that was made without it.
    """
    second = second_work or plan.recipe.second_work
    if second is None:
        return None
    work = second.of_column(plan.columns[second.column][plan.segments.sample])
    starts = plan.segment_offsets[plan.cell_offsets[:: plan.num_ranks]]
    step = np.repeat(np.arange(plan.num_steps), np.diff(starts))
    first = plan.recipe.cost.of_lengths(plan.aligned_lengths)
    totals = (sum_by(step, column, plan.num_steps).tolist() for column in (first, work))
    scales = [second.scale(*pair) for pair in zip(*totals, strict=True)]
    return np.asarray(work * np.array(scales)[step], np.float64)


def works_of(plan: Plan, second_work: SecondWork | None = None) -> list[FloatArray]:
    """The works of each micro-batch: its cost, and its second work if there is one."""
    second = second_costs(plan, second_work)
    if second is None:
        return [plan.costs]
    return [plan.costs, sum_by(plan.micro_batch_of_segment, second, plan.num_micro_batches)]


def step_times(
    plan: Plan,
    sync_every: SyncEvery | None = None,
    *,
    second_work: SecondWork | None = None,
) -> FloatArray:
    """The time of each step, second work included, by the recipe's `sync_every` or another.

    >>> from evenstep import Packed, Recipe, Topology, make_plan
    >>> recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2))
    >>> step_times(make_plan([5, 3, 4], recipe)).tolist()
    [7.0]
    """
    works = works_of(plan, second_work)
    times = [slowest_of_steps(plan, work, sync_every) for work in works]
    return np.asarray(np.sum(times, axis=0), np.float64)


def step_means(plan: Plan, second_work: SecondWork | None = None) -> FloatArray:
    """The work of each step divided by its ranks: its time if ranks never waited."""
    step = plan.cell_of_micro_batch // plan.num_ranks
    both = np.sum(works_of(plan, second_work), axis=0)
    return sum_by(step, both, plan.num_steps) / plan.num_ranks


def step_imbalances(plan: Plan) -> FloatArray:
    """The time of each step over the mean work of a rank; 1 if it is even or empty.

    >>> from evenstep import Padded, Recipe, Topology, make_plan
    >>> recipe = Recipe(layout=Padded(samples=2), topology=Topology(dp=2), balance="none")
    >>> step_imbalances(make_plan([5, 3, 4], recipe)).round(2).tolist()
    [1.43]
    """
    mean = step_means(plan)
    return np.divide(step_times(plan), mean, out=np.ones(len(mean)), where=mean > 0)


def time_parts(plan: Plan, second_work: SecondWork | None = None) -> TimeParts:
    """Where the modelled time of all steps goes.

    >>> from evenstep import Padded, Recipe, Topology, make_plan
    >>> recipe = Recipe(layout=Padded(samples=2), topology=Topology(dp=2), balance="none")
    >>> time_parts(make_plan([5, 3, 4], recipe))
    TimeParts(work=6.0, padding=1.0, waiting=3.0)
    """
    cost, ranks = plan.recipe.cost, plan.num_ranks
    first, *second = [float(work.sum()) / ranks for work in works_of(plan, second_work)]
    tokens = float(cost.of_lengths(plan.segments.length).sum())
    work = min(first, (tokens + cost.per_micro_batch * plan.num_micro_batches) / ranks)
    total = float(step_times(plan, second_work=second_work).sum())
    waiting = max(0.0, total - first - sum(second))
    return TimeParts(work + sum(second), first - work, waiting)
