"""Floor: a lower bound for all plans of a step, from the lengths and the recipe alone.

The floor does not depend on how a plan packs, cuts or deals its segments, so a plan that reaches it
is optimal for its layout, budget, limits, topology and steps. It includes what the recipe forces:
alignment and rounding of each segment, a fixed width, fixed rows, one shape for a pipeline, equally
many micro-batches on every rank. It excludes padding that another cut might avoid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.bounds import bins_bound
from evenstep.core.ragged import FloatArray, IntArray, sum_by
from evenstep.core.rounding import divided_up, rounded_up

if TYPE_CHECKING:
    from evenstep.core.plan import Plan

BoolArray: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bounds of one step: non-empty micro-batches, micro-batches per rank, modelled time."""

    packs: int
    per_rank: int
    time: float


class Floors:
    """The floors of the steps of a plan.

    segments of 5 and 3 on one rank, budget 8, cost 1 per token and 10 per micro-batch:
    Floor(packs=1, per_rank=1, time=18.0)
    """

    def __init__(self, plan: Plan) -> None:
        recipe, sample = plan.recipe, plan.segments.sample
        self.recipe, self.steps = recipe, plan.num_steps
        self.aligned = plan.aligned_lengths
        self.costs = recipe.cost.of_lengths(self.aligned)
        self.groups: IntArray | None = None
        if plan.groups is not None and recipe.groups == "micro_batch":
            self.groups = plan.groups[sample]
        shares = recipe.layout.shares(recipe)
        columns = {name: column[sample] for name, column in plan.columns.items()}
        values = recipe.layout.taken(recipe, self.aligned, columns)
        names = [name for name in shares if name in values]
        self.caps = np.array([shares[name] for name in names], np.float64)
        self.taken = np.zeros((len(sample), len(names)))
        for at, name in enumerate(names):
            self.taken[:, at] = values[name]

    @property
    def over(self) -> BoolArray:
        """Which segments exceed the budget or a limit by themselves, so that they run alone."""
        over = (self.taken > self.caps).any(axis=1)
        if self.recipe.capacity is not None:
            over |= self.aligned > self.recipe.capacity
        return np.asarray(over, np.bool_)

    def of_step(self, step: int, segments: slice) -> Floor:
        """The floor of a step with these segments."""
        recipe, layout, aligned = self.recipe, self.recipe.layout, self.aligned[segments]
        bins = bins_bound(self._by_unit(segments, self.taken[segments]), self.caps)
        packs = layout.fewest_micro_batches(recipe, aligned, bins)
        ranks, multiple = recipe.topology.dp, recipe.topology.multiple
        per_rank = rounded_up(max(1, divided_up(packs, ranks)), multiple)
        if recipe.steps.micro_batches is not None and step < self.steps - 1:
            # All steps but the last have exactly that many.
            per_rank = max(per_rank, recipe.steps.micro_batches)
        units = self._by_unit(segments, aligned.astype(np.float64)[:, None])[:, 0]
        time = layout.least_time(recipe, aligned, units.astype(np.int64), per_rank)
        return Floor(packs, per_rank, time)

    def _by_unit(self, segments: slice, values: FloatArray) -> FloatArray:
        """Columns of segments -> columns of units: segments, or groups that share a micro-batch."""
        if self.groups is None:
            return values
        names, owner = np.unique(self.groups[segments], return_inverse=True)
        columns = [sum_by(owner, column, len(names)) for column in values.T]
        return np.column_stack(columns) if columns else np.zeros((len(names), 0))
