"""Floor: what every plan of a recipe takes at least, derived from the lengths and the recipe alone.

Nothing here looks at how a plan packed, cut or dealt its segments, so a plan that reaches the floor
cannot be beaten by any other of the same layout, budget, limits, topology and steps. What the
recipe forces counts: alignment and rounding of each segment, a fixed width, fixed rows, one shape
for a pipeline, as many micro-batches on every rank. Padding that another cut might avoid does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.bounds import bins_bound, lock_step_bound, makespan_bound, rounded_up, row_bound
from evenstep.core.layout import Fixed, Packed, PackedStatic, Padded
from evenstep.core.ragged import FloatArray, IntArray, sum_by

if TYPE_CHECKING:
    from evenstep.core.plan import Plan

BoolArray: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one step: `packs` micro-batches hold its segments, a rank runs `per_rank` of them or of
    dummies, and the recipe's clock shows `time`; no plan has less of any of the three."""

    packs: int
    per_rank: int
    time: float


class Floors:
    """The floor of each step of a plan, with the columns that they share.

    segments of 5 and 3 on one rank, budget 8, cost 1 a token and 10 a micro-batch:
    Floor(packs=1, per_rank=1, time=18.0)
    """

    def __init__(self, plan: Plan) -> None:
        recipe, layout = plan.recipe, plan.recipe.layout
        self.recipe, self.ranks, self.steps = recipe, plan.ranks, plan.steps
        self.aligned = plan.aligned_lengths
        self.costs = recipe.cost.of_lengths(self.aligned)
        unit = recipe.width_unit
        self.widths = np.maximum(-(-self.aligned // unit) * unit, _least_width(plan))
        sample = plan.segments.sample
        self.groups: IntArray | None = None
        if plan.groups is not None and recipe.groups == "micro_batch":
            self.groups = plan.groups[sample]
        rows = layout.rows if isinstance(layout, PackedStatic) else 1
        taken: list[FloatArray] = []
        caps: list[float] = []
        if recipe.limits.segments is not None:
            taken.append(np.ones(len(sample)))
            caps.append(recipe.limits.segments // rows)
        if recipe.limits.cost is not None:
            full = recipe.cost.of_lengths(self.widths)
            taken.append(full if isinstance(layout, Padded) else self.costs)
            caps.append(recipe.cost_limit)
        for name, most in recipe.limits.columns.items():
            if name in plan.columns:
                taken.append(plan.columns[name][sample].astype(np.float64))
                caps.append(most // rows)
        if recipe.capacity is not None and not isinstance(layout, Padded):
            taken.append(self.aligned.astype(np.float64))
            caps.append(recipe.capacity)
        if isinstance(layout, Fixed):
            taken.append(np.ones(len(sample)))
            caps.append(layout.samples)
        self.taken = np.column_stack(taken) if taken else np.zeros((len(sample), 0))
        self.caps = np.array(caps, np.float64)

    @property
    def over(self) -> BoolArray:
        """Which segments break the budget or a limit by themselves: they can only run alone."""
        over = (self.taken > self.caps).any(axis=1)
        if self.recipe.capacity is not None:
            over |= self.aligned > self.recipe.capacity
        return np.asarray(over, np.bool_)

    def of_step(self, step: int, segments: slice) -> Floor:
        """The floor of a step that runs these segments."""
        steps, topology = self.recipe.steps, self.recipe.topology
        packs = self._packs(segments)
        per_rank = rounded_up(max(1, -(-packs // self.ranks)), topology.multiple)
        if steps.micro_batches is not None and step < self.steps - 1:
            per_rank = max(per_rank, steps.micro_batches)  # every step but the last has as many
        padded = isinstance(self.recipe.layout, Padded)
        time = self._padded_time if padded else self._packed_time
        return Floor(packs, per_rank, time(segments, per_rank))

    def _packs(self, segments: slice) -> int:
        """The fewest micro-batches that hold these segments: by slots and by every limit."""
        layout = self.recipe.layout
        taken = self._by_unit(segments, self.taken[segments])
        if isinstance(layout, Padded):
            return max(row_bound(self._rows_that_fit(segments)), bins_bound(taken, self.caps))
        bound = bins_bound(taken, self.caps)
        return -(-bound // layout.rows) if isinstance(layout, PackedStatic) else bound

    def _by_unit(self, segments: slice, values: FloatArray) -> FloatArray:
        """Columns of segments -> of what must share a micro-batch: each segment, or each group."""
        if self.groups is None:
            return values
        names, owner = np.unique(self.groups[segments], return_inverse=True)
        columns = [sum_by(owner, column, len(names)) for column in values.T]
        return np.column_stack(columns) if columns else np.zeros((len(names), 0))

    def _rows_that_fit(self, segments: slice) -> IntArray:
        """How many padded rows a micro-batch can hold where each of these is the widest."""
        recipe, layout = self.recipe, self.recipe.layout
        assert isinstance(layout, Padded)
        assert recipe.capacity is not None
        widths = self._step_widths(segments)
        most = np.where(widths > recipe.capacity, 1.0, layout.max_tokens // widths)
        if recipe.limits.cost is not None:
            each = recipe.cost.of_lengths(widths)
            most = np.minimum(most, np.floor(recipe.cost_limit / each + 1e-9))
        return np.maximum(most, 1).astype(np.int64)

    def _step_widths(self, segments: slice) -> IntArray:
        """The least width of each segment's row; the widest for all where a step has one shape."""
        widths = self.widths[segments]
        if self.recipe.topology.equal_widths:
            return np.full_like(widths, widths.max(initial=0))
        return widths

    def _padded_time(self, segments: slice, per_rank: int) -> float:
        """Each segment is a row at its own width or wider; every micro-batch has a row."""
        cost, ranks = self.recipe.cost, self.ranks
        widths = self._step_widths(segments)
        rows = cost.of_lengths(widths)
        empty = float(cost.of_lengths(np.array([self._least(segments)]))[0])
        count = max(len(rows), ranks * per_rank)
        if self.recipe.topology.equal_widths:
            count = rounded_up(count, ranks)  # all ranks run as many rows
        mean = (float(rows.sum()) + (count - len(rows)) * empty) / ranks
        with_dummies = float(rows.max(initial=empty)) + (per_rank - 1) * empty
        slowest = max(mean, with_dummies, makespan_bound(rows, ranks))
        return slowest + per_rank * cost.per_micro_batch

    def _packed_time(self, segments: slice, per_rank: int) -> float:
        """Each segment takes its aligned slots; every micro-batch has its least slots."""
        cost, ranks, aligned = self.recipe.cost, self.ranks, self.aligned[segments]
        costs, least = self.costs[segments], self._least(segments)
        length = aligned.astype(np.float64)
        attended = cost.per_pair * length * length + cost.per_segment  # whatever the padding
        slots = self._slots(segments, ranks * per_rank, least)
        mean = (cost.per_token * slots + float(attended.sum())) / ranks
        widths = np.maximum(self.widths[segments], least)
        alone = cost.per_token * widths + attended
        empty = cost.per_token * least
        with_dummies = float(alone.max(initial=empty)) + (per_rank - 1) * empty
        slowest = max(mean, with_dummies)
        held = [(costs, 0.0)]
        if least > self.recipe.width_unit:
            # Every micro-batch runs its least slots, so that attention alone is dealt beside them.
            held.append((attended, per_rank * empty))
        capacity, layout = self.recipe.capacity, self.recipe.layout
        lock_step = self.recipe.clock == "micro_batch" and isinstance(layout, Packed)
        for dealt, fixed in held:
            slowest = max(slowest, fixed + makespan_bound(dealt, ranks))
            if lock_step and capacity is not None and int(aligned.max(initial=0)) <= capacity:
                bound = lock_step_bound(aligned, dealt, capacity, ranks)  # none runs alone
                slowest = max(slowest, fixed + bound)
        return slowest + per_rank * cost.per_micro_batch

    def _least(self, segments: slice) -> int:
        """The least slots of a micro-batch: an empty one's, or those of a step's one shape.

        In padded rows, of one row.
        """
        layout = self.recipe.layout
        if isinstance(layout, PackedStatic):
            return layout.max_tokens
        least = max(self.recipe.width_unit, layout.pad_to or 0)
        if not self.recipe.topology.equal_widths:
            return least
        if isinstance(layout, Padded):
            return max(least, int(self.widths[segments].max(initial=0)))
        held = self._by_unit(segments, self.aligned[segments].astype(np.float64)[:, None])
        return max(least, rounded_up(int(held.max(initial=0)), self.recipe.width_unit))

    def _slots(self, segments: slice, micro_batches: int, least: int) -> int:
        """The fewest slots of so many micro-batches, or more, that hold these segments."""
        recipe, aligned = self.recipe, self.aligned[segments]
        if isinstance(recipe.layout, PackedStatic):
            return micro_batches * least
        unit = recipe.width_unit
        capacity = recipe.capacity
        long = np.zeros(len(aligned), bool) if capacity is None else aligned > capacity
        alone = int(self.widths[segments][long].sum())
        tokens = rounded_up(int(aligned[~long].sum()), unit)
        spare = max(0, micro_batches - len(aligned))  # these are empty
        slots = alone + max(tokens + spare * least, (micro_batches - int(long.sum())) * least)
        if recipe.topology.equal_widths:
            share = -(-int(aligned.sum()) // self.ranks)  # all ranks run as many slots
            slots = max(slots, self.ranks * rounded_up(share, unit), micro_batches * least)
        return slots


def _least_width(plan: Plan) -> int:
    """The least width of any row: one unit, or what the layout fixes."""
    layout = plan.recipe.layout
    if isinstance(layout, PackedStatic):
        return layout.width
    return max(plan.recipe.width_unit, layout.pad_to or 0)
