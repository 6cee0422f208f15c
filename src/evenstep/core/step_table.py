"""StepTable: the numbers of each step of a plan that its measures use, one array per number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from evenstep.core.bottleneck import filled_micro_batches, unpadded_times
from evenstep.core.floor import Floors
from evenstep.core.modelled_time import slowest_of_steps, step_means, step_times
from evenstep.core.ragged import FloatArray, IntArray, offsets_of, sum_by
from evenstep.core.rounding import divided_up, rounded_up

if TYPE_CHECKING:
    from evenstep.core.plan import Plan


class StepTable:
    """Per step: its segments and micro-batches, tokens and cost by rank and by wave, its floor.

    `tokens_by_rank` is the most tokens of a rank, `tokens_by_wave` the sum over waves of the most
    tokens of a micro-batch; `rank_sum` and `lock_step` are the same for both works. `time` is the
    one that `sync_every` names. `mean_cost` leaves second work out. `batched_slots` are the slots
    of the same segments in padded batches of 8, in the order of the samples.
    """

    def __init__(self, plan: Plan, progress: Callable[[int, int], None] | None = None) -> None:
        self.plan = plan
        self.tokens, self.slots = plan.tokens, plan.slots
        offsets = plan.segment_offsets
        self._micro = plan.cell_offsets[:: plan.num_ranks]
        self._segments = offsets[self._micro]
        held = np.diff(offsets)
        counts = np.diff(plan.cell_offsets).reshape(plan.num_steps, plan.num_ranks)
        self.per_rank: IntArray = counts[:, 0] if plan.num_steps else counts.sum(axis=1)
        self._measure_work(held)
        self._measure_samples(held)
        self._measure_floors(progress)

    def _measure_work(self, held: IntArray) -> None:
        plan, steps = self.plan, self.plan.num_steps
        self.tokens_by_rank = slowest_of_steps(plan, self.tokens, "step")
        self.tokens_by_wave = slowest_of_steps(plan, self.tokens, "micro_batch")
        self.rank_sum, self.lock_step = step_times(plan, "step"), step_times(plan, "micro_batch")
        step = np.repeat(np.arange(steps), np.diff(self._micro))
        self.tokens_of_step = sum_by(step, self.tokens, steps).astype(np.int64)
        self.ideal = step_means(plan)
        self.mean_cost = sum_by(step, plan.costs, steps) / plan.num_ranks
        self.real = np.bincount(step[held > 0], minlength=steps)
        self.time = self.rank_sum if plan.recipe.sync_every == "step" else self.lock_step
        self.floors = Floors(plan)
        second = self.floors.second
        own = self.floors.costs if second is None else self.floors.costs + second
        self.filled = filled_micro_batches(plan, self._segments)
        self.unpadded = unpadded_times(plan, own, self._segments)
        self.most_expensive = _largest(self.floors.costs, self._segments)

    def _measure_samples(self, held: IntArray) -> None:
        plan, count = self.plan, len(self.plan.lengths)
        sample = plan.segments.sample
        self.kept = sum_by(sample, plan.segments.length, count).astype(np.int64)
        self.num_segments = np.bincount(sample, minlength=count)
        self.alone = self.floors.over & (np.repeat(held, held) == 1)
        self.batched_slots = _batched_slots(plan, self._segments)

    def _measure_floors(self, progress: Callable[[int, int], None] | None) -> None:
        floors = self.floors.of_steps(progress)
        self.floor_packs = np.array([floor.packs for floor in floors], np.int64)
        self.floor_per_rank = np.array([floor.per_rank for floor in floors], np.int64)
        self.floor_time = np.array([floor.time for floor in floors], np.float64)
        self.floor_binds = [floor.binds for floor in floors]

    def micro_batches_of(self, steps: slice) -> slice:
        """The micro-batches of these steps."""
        return slice(int(self._micro[steps.start]), int(self._micro[steps.stop]))

    def segments_of(self, steps: slice) -> slice:
        """The segments of these steps."""
        return slice(int(self._segments[steps.start]), int(self._segments[steps.stop]))

    def samples_of(self, steps: slice) -> IntArray:
        """The samples of these steps, ascending."""
        if steps == slice(0, self.plan.num_steps):
            return np.flatnonzero(self.num_segments)
        return np.unique(self.plan.segments.sample[self.segments_of(steps)])


def _largest(values: FloatArray, starts: IntArray) -> FloatArray:
    """The largest value of each step; 0 where it has none."""
    held = np.diff(starts)
    found = np.zeros(len(held))
    if len(values):
        found[held > 0] = np.maximum.reduceat(values, starts[:-1][held > 0])
    return found


def _batched_slots(plan: Plan, starts: IntArray, size: int = 8) -> IntArray:
    """The slots of each step in padded batches of `size` segments, in the order of the samples.

    starts [0, 3]: one step; its lengths [5, 2, 4] in batches of 2 -> 2 · 5 + 1 · 4 slots
    """
    segments, held = plan.segments, np.diff(starts)
    step = np.repeat(np.arange(len(held)), held)
    order = np.lexsort((segments.start, segments.sample, step))
    batches = divided_up(held, size)
    first = np.arange(int(batches.sum())) - np.repeat(offsets_of(batches)[:-1], batches)
    first = np.repeat(starts[:-1], batches) + size * first
    if not len(first):
        return np.zeros(len(held), np.int64)
    longest = np.maximum.reduceat(segments.length[order], first)
    rows = np.diff(first, append=len(order))
    slots = rows * rounded_up(longest, plan.recipe.width_unit)
    return sum_by(np.repeat(np.arange(len(held)), batches), slots, len(held)).astype(np.int64)
