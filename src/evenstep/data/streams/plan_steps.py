"""PlanSteps: the steps of a saved plan, in its own order."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from evenstep.core.plan import (
    MicroBatch,
    Plan,
    on_fewer_ranks,
    recipe_on_fewer_ranks,
    samples_by_step,
    step_plan,
)
from evenstep.core.ragged import IntArray, Ragged, divided_up, rounded_up
from evenstep.core.recipe import Recipe
from evenstep.data.sources.source import MeasuredSource
from evenstep.data.streams.estimate import Estimate
from evenstep.data.streams.position import StreamPosition
from evenstep.data.streams.step_work import Progress, StepBounds, StepWork
from evenstep.errors import ConfigError, InputError


def lengths_by_id(plan: Plan) -> IntArray:
    """The planned length of every sample of the source."""
    ids, count = plan.sample_ids, len(plan.lengths)
    if ids is None or count == 0 or not 0 <= ids.min() <= ids.max() < count:
        return plan.lengths
    found = np.zeros(count, np.int64)
    found[ids] = plan.lengths
    return found


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
        """What each rank still has to do of a step, after the work in `inside`."""
        first = on_fewer_ranks(plan, inside[0][0])
        rest = [[micro.renumbered(ids) for micro in each] for each in first[0]]
        followed = [*(ranks for ranks, _ in inside[1:]), self.ranks]
        for (ranks, done), following in zip(inside, followed, strict=True):
            empty = rest[0][-1].without(rest[0][-1].segments.sample.tolist())
            rest = [micros[done:] for micros in rest]
            if following != ranks:
                rest = self._dealt(rest, following, empty)
        return rest

    def _dealt(
        self, rest: list[list[MicroBatch]], ranks: int, empty: MicroBatch
    ) -> list[list[MicroBatch]]:
        """The same micro-batches on other ranks, wave by wave. Empty ones fill the last wave.

        1, 2 and 3 are left on one rank -> [[1, 3], [2, empty]] on two
        """
        left = [micro for wave in zip(*rest, strict=True) for micro in wave if not micro.is_empty]
        count = rounded_up(max(divided_up(len(left), ranks), 1), self.recipe.topology.multiple)
        left += [empty] * (ranks * count - len(left))
        return [left[rank::ranks] for rank in range(ranks)]

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
