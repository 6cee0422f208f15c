"""Start and end of each micro-batch of a step, in modelled cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenstep.core.plan import Plan
from evenstep.core.ragged import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One step over time: arrays of ranks × waves, in units of cost.

    Micro-batches of cost [[3, 1], [2, 2]] start at [[0, 3], [0, 3]] if ranks synchronise at every
    micro-batch, and at [[0, 3], [0, 2]] if they synchronise once per step.
    """

    step: int
    micro: IntArray  # ranks × waves: index of each micro-batch in the plan
    costs: FloatArray
    starts: FloatArray
    lock_step: bool

    @property
    def mean(self) -> float:
        """The mean load of a rank."""
        return float(self.costs.sum() / len(self.costs))

    @property
    def end(self) -> float:
        """When the last rank ends."""
        return float((self.starts + self.costs).max())

    @property
    def busy(self) -> FloatArray:
        """The fraction of the step that each rank works."""
        return np.asarray(self.costs.sum(axis=1) / (self.end or 1.0))

    @property
    def slowest(self) -> NDArray[np.bool_]:
        """Which ranks work the longest; none if all work equally long."""
        busy = self.busy
        most = busy >= busy.max() * (1 - 1e-9)
        return np.asarray(most & ~most.all())

    @property
    def barriers(self) -> FloatArray:
        """When ranks synchronise: after every wave, or once at the end."""
        if self.lock_step:
            return np.cumsum(self.costs.max(axis=0))
        return np.array([self.end])


def timelines(plan: Plan, steps: Iterable[int] | None = None) -> list[Timeline]:
    """The timelines of these steps; of all by default."""
    lock_step = plan.recipe.sync_every == "micro_batch"
    costs, ranks = plan.costs, plan.num_ranks
    result = []
    for step in range(plan.num_steps) if steps is None else steps:
        cells = plan.cell_offsets[step * ranks : (step + 1) * ranks + 1]
        # (ranks, waves): a valid plan has the same number of micro-batches on every rank
        micro = np.arange(cells[0], cells[-1]).reshape(ranks, -1)
        cost = costs[micro]
        if lock_step:
            after = np.cumsum(cost.max(axis=0))
            starts = np.broadcast_to(after - cost.max(axis=0), cost.shape)
        else:
            starts = np.cumsum(cost, axis=1) - cost
        result.append(Timeline(step, micro, cost, starts, lock_step))
    return result
