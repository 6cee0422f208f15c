"""Floor: a lower bound for all plans of a step, from the lengths and the recipe alone.

The floor does not depend on how a plan packs, cuts or deals its segments, so a plan that reaches it
is optimal for its layout, budget, limits, topology and steps. It includes what the recipe forces:
alignment and rounding of each segment, a fixed width, fixed rows, one shape for a pipeline, equally
many micro-batches on every rank. It excludes padding that another cut might avoid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.bounds import bins_bound, pack_bounds
from evenstep.core.loads import Loads
from evenstep.core.modelled_time import second_costs
from evenstep.core.ragged import FloatArray, IntArray, sum_by
from evenstep.core.rounding import divided_up, rounded_up

if TYPE_CHECKING:
    from evenstep.core.plan import Plan
    from evenstep.core.recipe import Recipe

BoolArray: TypeAlias = NDArray[np.bool_]

_TOGETHER = 1 << 15  # segments of steps that are measured together
_EQUAL = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bounds of one step: non-empty micro-batches, micro-batches per rank, modelled time.

    `binds` names the bound on time that is the largest: see `core.packed_floor`; `second` if the
    second work exceeds its own mean by more than the first does.
    """

    packs: int
    per_rank: int
    time: float
    binds: str


class StepFloor:
    """The floor of one step's time, without a plan.

    `aligned` are the lengths of the segments, aligned; `unit_of` is the unit of each, by default a
    unit each; `second` is the second work of each unit in the unit of the cost.

    >>> from evenstep import Packed, Recipe, Topology
    >>> recipe = Recipe(layout=Packed(max_tokens=10), topology=Topology(dp=2))
    >>> StepFloor(recipe, np.array([9, 6, 6])).time(per_rank=2)
    15.0
    """

    def __init__(
        self,
        recipe: Recipe,
        aligned: IntArray,
        unit_of: IntArray | None = None,
        second: FloatArray | None = None,
    ) -> None:
        self._recipe = recipe
        self._loads = Loads.of_step(recipe, aligned, unit_of, second)

    def time(self, per_rank: int = 1) -> float:
        """The least time if each rank runs at least `per_rank` micro-batches."""
        return float(_times(self._recipe, self._loads, np.array([per_rank]))[0][0])


def _times(recipe: Recipe, loads: Loads, per_rank: IntArray) -> tuple[FloatArray, list[str]]:
    """(the floor of each step's time, what binds)."""
    found = recipe.layout.least_times(recipe, loads, per_rank)
    names, bounds = list(found), np.stack(list(found.values()))
    time = bounds.max(axis=0)
    first = (bounds >= time * _EQUAL).argmax(axis=0)
    binds = [names[at] for at in first.tolist()]
    if loads.second is not None:
        second = recipe.layout.least_second_times(recipe, loads)
        beyond = second - loads.second.sum(axis=1) / recipe.topology.dp
        more = beyond > time - bounds[0]
        binds = ["second" if above else name for above, name in zip(more, binds, strict=True)]
        time = time + second
    return time, binds


class Floors:
    """The floors of the steps of a plan.

    segments of 5 and 3 on one rank, budget 8, cost 1 per token and 10 per micro-batch:
    Floor(packs=1, per_rank=1, time=18.0, binds='mean')
    """

    def __init__(self, plan: Plan) -> None:
        recipe, sample = plan.recipe, plan.segments.sample
        self.recipe, self.steps = recipe, plan.num_steps
        self.aligned = plan.aligned_lengths
        self.costs = recipe.cost.of_lengths(self.aligned)
        self.groups: IntArray | None = None
        if plan.groups is not None and recipe.groups == "micro_batch":
            self.groups = plan.groups[sample]
        self.second = second_costs(plan)
        shares = recipe.layout.shares(recipe)
        columns = {name: column[sample] for name, column in plan.columns.items()}
        values = recipe.layout.taken(recipe, self.aligned, columns)
        self.limits = [name for name in shares if name in values]
        self.caps = np.array([shares[name] for name in self.limits], np.float64)
        self.taken = [values[name] for name in self.limits]
        starts = plan.segment_offsets[plan.cell_offsets[:: plan.num_ranks]]
        self.starts: IntArray = starts

    @property
    def over(self) -> BoolArray:
        """Which segments exceed the budget or a limit by themselves, so that they run alone."""
        over = np.zeros(len(self.aligned), np.bool_)
        for column, cap in zip(self.taken, self.caps, strict=True):
            over |= column > cap
        if self.recipe.capacity is not None:
            over |= self.aligned > self.recipe.capacity
        return over

    def of_step(self, step: int, segments: slice) -> Floor:
        """The floor of a step with these segments."""
        if self._plain:
            starts = np.array([segments.start, segments.stop])
            return self._plain_floors(np.array([step]), starts)[0]
        units = self._units(segments)
        packs = self._packs(segments, units)
        return self._floors(np.array([step]), packs, self._loads(segments, units))[0]

    def of_steps(self, progress: Callable[[int, int], None] | None = None) -> list[Floor]:
        """The floors of all steps. `progress(done, total)` is called now and then."""
        found: list[Floor] = []
        for part in self._parts():
            found += part
            if progress is not None:
                progress(len(found), self.steps)
        return found

    def _parts(self) -> Iterator[list[Floor]]:
        """The floors of the steps, some at a time."""
        starts, first = self.starts.tolist(), 0
        while first < self.steps:
            last = first + 1
            longest = starts[last] - starts[first]
            while self._plain and last < self.steps:
                longest = max(longest, starts[last + 1] - starts[last])
                if (last + 1 - first) * longest > _TOGETHER:
                    break
                last += 1
            if self._plain:
                yield self._plain_floors(np.arange(first, last), self.starts[first : last + 1])
            else:
                yield [self.of_step(first, slice(starts[first], starts[last]))]
            first = last

    @property
    def _plain(self) -> bool:
        """Whether units are segments of packed rows and the only limit is on slots."""
        return (
            self.groups is None
            and self.second is None
            and self.limits == ["slots"]
            and self.recipe.layout.segments_per_row is None
        )

    def _plain_floors(self, steps: IntArray, starts: IntArray) -> list[Floor]:
        """The floors of several steps at once."""
        recipe, capacity = self.recipe, int(self.caps[0])
        loads = Loads.of_segments(recipe, self._rows(starts))
        bins = pack_bounds(loads.size, capacity, loads.packs_of_first(capacity))
        packs = divided_up(bins, recipe.layout.packs_per_micro_batch)
        return self._floors(steps, packs, loads)

    def _rows(self, starts: IntArray) -> IntArray:
        """Steps x aligned lengths, descending; missing ones are 0."""
        held = np.diff(starts)
        own = self.aligned[starts[0] : starts[-1]]
        if (held == held[0]).all():
            rows = own.reshape(len(held), -1)
        else:
            rows = np.zeros((len(held), int(held.max(initial=0))), np.int64)
            rows[np.arange(rows.shape[1]) < held[:, None]] = own
        return -np.sort(-rows, axis=1)

    def _floors(self, steps: IntArray, packs: IntArray, loads: Loads) -> list[Floor]:
        recipe = self.recipe
        ranks, multiple = recipe.topology.dp, recipe.topology.multiple
        per_rank = rounded_up(np.maximum(1, divided_up(packs, ranks)), multiple)
        if recipe.steps.micro_batches is not None:
            # All steps but the last have exactly that many.
            asked = np.where(steps < self.steps - 1, recipe.steps.micro_batches, 0)
            per_rank = np.maximum(per_rank, asked)
        time, binds = _times(recipe, loads, per_rank)
        columns = packs.tolist(), per_rank.tolist(), time.tolist(), binds
        return [Floor(*values) for values in zip(*columns, strict=True)]

    def _packs(self, segments: slice, units: IntArray | None) -> IntArray:
        """A lower bound on the micro-batches that are not empty."""
        taken = np.column_stack(
            [self._by_unit(column[segments], units) for column in self.taken]
            or [np.zeros((segments.stop - segments.start, 0))]
        )
        bins = bins_bound(taken, self.caps)
        layout = self.recipe.layout
        return np.array([layout.fewest_micro_batches(self.recipe, self.aligned[segments], bins)])

    def _units(self, segments: slice) -> IntArray | None:
        """The unit of each segment; None if each is one."""
        if self.groups is None:
            return None
        return np.unique(self.groups[segments], return_inverse=True)[1]

    def _loads(self, segments: slice, units: IntArray | None) -> Loads:
        second = None if self.second is None else self._by_unit(self.second[segments], units)
        return Loads.of_step(self.recipe, self.aligned[segments], units, second)

    @staticmethod
    def _by_unit(column: NDArray[Any], units: IntArray | None) -> NDArray[Any]:
        """A column of segments -> a column of units."""
        return column if units is None else sum_by(units, column, int(units.max(initial=-1)) + 1)
