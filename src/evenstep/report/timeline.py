"""Start and end of each micro-batch of a step, in modelled cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenstep.core.measures import time_of_works, waves_that_share, works_of
from evenstep.core.plan import Plan
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.recipe import SecondWork


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One step over time: arrays of ranks × waves, in units of cost.

    Micro-batches of cost [[3, 1], [2, 2]] start at [[0, 3], [0, 3]] if ranks synchronise at every
    micro-batch, and at [[0, 3], [0, 2]] if they synchronise once per step. Second work comes first,
    and ranks wait for each other after it: in every wave, or once before all micro-batches.
    """

    step: int
    micro: IntArray  # ranks × waves: index of each micro-batch in the plan
    costs: FloatArray
    starts: FloatArray
    lock_step: bool
    end: float  # when the last rank ends
    second: FloatArray | None = None  # ranks × waves, or ranks × 1 if ranks synchronise per step
    second_name: str = ""  # the column that measures it

    @property
    def mean(self) -> float:
        """The mean work of a rank."""
        return float(self._by_rank.sum() / len(self.costs))

    @property
    def busy(self) -> FloatArray:
        """The fraction of the step that each rank works."""
        return np.asarray(self._by_rank / (self.end or 1.0))

    @property
    def _by_rank(self) -> FloatArray:
        first = np.asarray(self.costs.sum(axis=1))
        return first if self.second is None else first + self.second.sum(axis=1)

    @property
    def second_ends(self) -> FloatArray:
        """When ranks that wait for the second work of others go on: for each column of it."""
        return self.starts[0, : 0 if self.second is None else self.second.shape[1]]

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
            return np.asarray((self.starts + self.costs).max(axis=0))
        return np.array([self.end])


def timelines(
    plan: Plan, steps: Iterable[int] | None = None, second_work: SecondWork | None = None
) -> list[Timeline]:
    """The timelines of these steps; of all by default.

    `second_work` is drawn instead of the recipe's, for a plan that was made without it.
    """
    lock_step = plan.recipe.sync_every == "micro_batch"
    every, ranks, met = works_of(plan, second_work), plan.num_ranks, waves_that_share(plan)
    measured = second_work or plan.recipe.second_work
    name = "" if measured is None else measured.column
    result = []
    for step in range(plan.num_steps) if steps is None else steps:
        cells = plan.cell_offsets[step * ranks : (step + 1) * ranks + 1]
        # (ranks, waves): a valid plan has the same number of micro-batches on every rank
        micro = np.arange(cells[0], cells[-1]).reshape(ranks, -1)
        cost, *rest = works = [work[micro] for work in every]
        second = rest[0] if rest else None
        if second is not None and not lock_step:
            second = second.sum(axis=1, keepdims=True)
        before = 0.0 if second is None else second.max(axis=0)
        if lock_step:
            after = np.cumsum(before + cost.max(axis=0))
            starts = np.broadcast_to(after - cost.max(axis=0), cost.shape)
        else:
            starts = before + np.cumsum(cost, axis=1) - cost
        end = time_of_works(works, plan.recipe.sync_every)
        if not lock_step and met[micro].any():
            # Ranks meet in waves in which they share sequences.
            starts, clock = np.empty_like(cost), np.zeros(ranks)
            for wave, meets in enumerate(met[micro[0]].tolist()):
                starts[:, wave] = clock = np.full(ranks, clock.max()) if meets else clock
                clock = clock + cost[:, wave]
                clock = np.full(ranks, clock.max()) if meets else clock
            end = float(clock.max())
        result.append(Timeline(step, micro, cost, starts, lock_step, end, second, name))
    return result
