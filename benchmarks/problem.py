"""Problem: one step to deal to ranks and waves. One measure for plans, approaches and peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from evenstep import Cost, Plan
from evenstep.core.bounds import lock_steps, makespans, pack_bound
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.recipe import SyncEvery

RanksAndWaves: TypeAlias = tuple[IntArray, IntArray]
"""The rank and the wave of each sample."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The quality of a deal. Lock-step and rank sum are costs of samples over the ideal.

    The times are those of a plan: they include `per_micro_batch` and the slot of each empty
    micro-batch.
    """

    over_budget: int
    largest: float
    """Tokens of the largest micro-batch over the budget."""
    micro_batches: int
    lock_step: float
    rank_sum: float
    time_by_wave: float
    time_by_step: float

    def time(self, sync_every: SyncEvery) -> float:
        """The modelled time of the step."""
        return self.time_by_wave if sync_every == "micro_batch" else self.time_by_step


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Lengths of one step, the tokens that a micro-batch may hold, ranks and cost."""

    lengths: IntArray
    budget: int
    ranks: int
    cost: Cost

    @classmethod
    def of_plan(cls, plan: Plan) -> Problem:
        """The segments of a packed plan of one step as samples, in the order of the samples."""
        assert plan.num_steps == 1, "one step"
        budget = plan.recipe.layout.budget
        assert budget is not None, "a budget"
        order = np.lexsort((plan.segments.start, plan.segments.sample))
        lengths = plan.segments.length[order]
        return cls(lengths, budget, plan.num_ranks, plan.recipe.cost)

    @property
    def costs(self) -> FloatArray:
        """The cost of each sample."""
        return self.cost.of_lengths(self.lengths)

    @property
    def fewest(self) -> int:
        """A lower bound on the micro-batches per rank."""
        return max(1, -(-pack_bound(self.lengths, self.budget) // self.ranks))

    @property
    def slowest_rank(self) -> float:
        """A lower bound on the time of ranks that synchronise once per step."""
        fixed = self.fewest * self.cost.per_micro_batch
        return float(makespans(self.costs[None], self.ranks)[0]) + fixed

    @property
    def lock_step_floor(self) -> float:
        """A lower bound on lock-step, over the ideal."""
        lengths, costs = self.lengths[None], self.costs[None]
        bound = float(lock_steps(lengths, costs, self.budget, self.ranks)[0])
        return bound * self.ranks / float(self.costs.sum())

    def measure(self, rank: IntArray, wave: IntArray) -> Outcome:
        """Measure a deal by the rank and wave of each sample."""
        assert len(rank) == len(wave) == len(self.lengths), "every sample dealt"
        assert min(rank.min(), wave.min()) >= 0, "no sample left out"
        waves = int(wave.max()) + 1
        cell = wave * self.ranks + rank
        cells = waves * self.ranks
        tokens = np.bincount(cell, weights=self.lengths, minlength=cells)
        costs = np.bincount(cell, weights=self.costs, minlength=cells)
        ideal = costs.sum() / self.ranks
        full = costs + self.cost.per_token * (tokens == 0) + self.cost.per_micro_batch
        costs, full = costs.reshape(waves, self.ranks), full.reshape(waves, self.ranks)
        return Outcome(
            over_budget=int((tokens > self.budget).sum()),
            largest=float(tokens.max() / self.budget),
            micro_batches=waves,
            lock_step=float(costs.max(axis=1).sum() / ideal),
            rank_sum=float(costs.sum(axis=0).max() / ideal),
            time_by_wave=float(full.max(axis=1).sum()),
            time_by_step=float(full.sum(axis=0).max()),
        )


def deal_of_plan(plan: Plan) -> RanksAndWaves:
    """The rank and wave of each sample; no sample is split, truncated or dropped."""
    micro = plan.micro_batch_of_segment
    cell = plan.cell_of_micro_batch[micro]
    dealt = np.full((2, len(plan.lengths)), -1, np.int64)
    dealt[0, plan.segments.sample] = cell % plan.num_ranks
    dealt[1, plan.segments.sample] = micro - plan.cell_offsets[cell]
    assert (plan.segments.length == plan.lengths[plan.segments.sample]).all(), "whole samples"
    return dealt[0], dealt[1]


def deal_of_groups(groups: list[list[list[int]]], count: int) -> RanksAndWaves:
    """Each group is a wave; the bins of a group go to the ranks."""
    dealt = np.full((2, count), -1, np.int64)
    for wave, group in enumerate(groups):
        for rank, items in enumerate(group):
            dealt[:, items] = np.array([[rank], [wave]])
    return dealt[0], dealt[1]


def time_of(plan: Plan) -> float:
    """The modelled time of all steps, by the plan's own `sync_every`."""
    total, costs, ranks = 0.0, plan.costs, plan.num_ranks
    for step in range(plan.num_steps):
        cells = plan.cell_offsets[step * ranks : (step + 1) * ranks + 1]
        by_rank = costs[cells[0] : cells[-1]].reshape(ranks, -1)
        if plan.recipe.sync_every == "micro_batch":
            total += float(by_rank.max(axis=0).sum())
        else:
            total += float(by_rank.sum(axis=1).max())
    return total
