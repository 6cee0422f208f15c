"""PlanSteps: the steps of a saved plan, in its own order."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from evenstep.core.micro_batch import MicroBatch
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, Ragged
from evenstep.core.recipe import Recipe
from evenstep.core.rounding import divided_up, rounded_up
from evenstep.core.step_plan import (
    in_waves,
    on_fewer_ranks,
    recipe_on_fewer_ranks,
    samples_by_step,
    step_plan,
)
from evenstep.data.sources.source import MeasuredSource
from evenstep.data.streams.estimate import Estimate
from evenstep.data.streams.position import StreamPosition
from evenstep.data.streams.step_work import Progress, StepBounds, StepWork
from evenstep.errors import ConfigError, InputError


class PlanSteps:
    """The steps of a plan, the same in every epoch. A unit is a step.

    On fewer ranks than planned, a rank runs the micro-batches of several: each wave of 4 ranks is
    2 waves of 2 ranks. Nothing is planned again, also after a stop within a step.
    """

    def __init__(self, source: MeasuredSource, plan: Plan, ranks: int) -> None:
        if plan.num_ranks % ranks:
            fitting = [str(n) for n in range(1, plan.num_ranks + 1) if plan.num_ranks % n == 0]
            raise ConfigError(
                f"the plan is for {plan.num_ranks} ranks, and {ranks} does not divide them. Use "
                f"{' or '.join(fitting)} ranks, or plan again for {ranks}."
            )
        count, ids = len(plan.lengths), plan.sample_ids
        if count != len(source):
            raise InputError(
                f"the plan has {count} samples but the source has {len(source)}. Pass the source "
                f"that the plan was made of."
            )
        if ids is not None and not np.array_equal(np.sort(ids), np.arange(count)):
            raise InputError(
                f"the ids of the {count} samples of the plan are not 0 to {count - 1}, each once. "
                f"Plan a whole epoch."
            )
        self.source, self.plan, self.ranks = source, plan, ranks

    @cached_property
    def recipe(self) -> Recipe:
        """The plan's recipe, for this number of ranks."""
        return recipe_on_fewer_ranks(self.plan.recipe, self.ranks)

    @cached_property
    def _samples(self) -> Ragged:
        return samples_by_step(self.plan)

    def __len__(self) -> int:
        return self.plan.num_steps

    def next_step(self, at: StreamPosition) -> tuple[int, bool] | None:
        """One step; None at the end of the plan."""
        return (1, at.position + 1 == len(self)) if at.position < len(self) else None

    def work(self, bounds: StepBounds) -> StepWork:
        """The step as planned, or what is left of it, on these ranks."""
        at = bounds.before
        samples = self._samples[at.position]
        ids = samples if self.plan.sample_ids is None else self.plan.sample_ids[samples]
        self._check_lengths(ids, self.plan.lengths[samples])
        plan = step_plan(self.plan, at.position, samples)
        if at.inside:
            return StepWork(plan, ids, self._rest(plan, ids, at.inside))
        return StepWork(on_fewer_ranks(plan, self.ranks), ids)

    def _check_lengths(self, ids: IntArray, planned: IntArray) -> None:
        found = self.source.lengths_of(ids)
        wrong = np.flatnonzero(found != planned)
        if len(wrong):
            first = wrong[0]
            raise InputError(
                f"sample {ids[first]} has {found[first]} tokens, but the plan expects "
                f"{planned[first]}. Pass the source that the plan was made of, or plan again."
            )

    def _rest(
        self, plan: Plan, ids: IntArray, inside: tuple[tuple[int, int], ...]
    ) -> list[list[MicroBatch]]:
        """What is left of a step, dealt wave by wave. Its end is filled with empty micro-batches.

        4 micro-batches, of which one rank has done 1, on 2 ranks -> [[1, 3], [2, empty]]
        """
        by_rank = [micro.renumbered(ids) for each in plan[0] for micro in each]
        order = in_waves(int(plan.cell_offsets[1]), plan.num_ranks)
        done = sum(ranks * count for ranks, count in inside)
        left = [by_rank[number] for number in order[done:].tolist()]
        count = rounded_up(divided_up(len(left), self.ranks), self.recipe.topology.multiple)
        last = by_rank[order[-1]]
        empty = last.without(last.segments.sample.tolist())
        left += [empty] * (self.ranks * count - len(left))
        return [left[rank :: self.ranks] for rank in range(self.ranks)]

    def plan_epoch(self, epoch: int, progress: Progress | None = None) -> Plan:
        """The plan itself."""
        return self.plan

    def known_count(self, bounds: StepBounds) -> int | None:
        """As the plan says, except for a step begun before."""
        if bounds.before.inside:
            return None
        cell = bounds.before.position * self.plan.num_ranks
        planned = self.plan.cell_offsets[cell + 1] - self.plan.cell_offsets[cell]
        return int(planned) * self.plan.num_ranks // self.ranks

    def same_epoch(self, epoch: int) -> int:
        """All epochs are the same."""
        return 0

    def details(self) -> dict[str, Any]:
        """Nothing: the plan has all."""
        return {}

    def belongs(self, *, inside: bool) -> dict[str, str]:
        """The plan, which determines everything."""
        return dict(self._identity)

    @cached_property
    def _identity(self) -> dict[str, str]:
        return {"plan": self.plan.fingerprint[:16]}

    @property
    def steps_per_epoch(self) -> Estimate:
        """The steps of the plan."""
        return Estimate(len(self), exact=True)
