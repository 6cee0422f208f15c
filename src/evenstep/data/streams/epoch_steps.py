"""EpochSteps: the steps that a recipe makes of a seeded order of all samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, divided_up, rounded_up
from evenstep.core.recipe import Recipe
from evenstep.data.sources.lengths import column_digest
from evenstep.data.sources.source import MeasuredSource
from evenstep.data.streams.digests import values_digest
from evenstep.data.streams.epoch_units import EpochUnits
from evenstep.data.streams.estimate import Estimate
from evenstep.data.streams.order import EpochOrder
from evenstep.data.streams.position import StreamPosition
from evenstep.data.streams.step_remainder import StepRemainder
from evenstep.data.streams.step_work import Progress, StepBounds, StepWork
from evenstep.data.streams.stream import digest_of
from evenstep.planning.planner import make_plan, plan_step, step_size

_SAMPLED_LENGTHS = 4096  # for estimates


@dataclass(eq=False)
class EpochSteps:
    """The steps of every epoch. A step takes the next units of the epoch's order.

    It looks at no more lengths than it needs to find where a step ends.
    """

    source: MeasuredSource
    recipe: Recipe
    units: EpochUnits
    seed: int
    shuffle: bool
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    _window: int = 64  # units to look at first; does not affect steps

    def __len__(self) -> int:
        return len(self.units)

    # Where steps end -----------------------------------------------------------------------------

    def next_step(self, at: StreamPosition) -> tuple[int, bool] | None:
        """(units of the next step, whether they are the last of the epoch); None at its end."""
        rest = len(self.units) - at.position
        fixed = self.recipe.steps.samples
        if fixed is not None and self.units.groups is None and self.recipe.overflow != "drop":
            return (min(fixed, rest), fixed >= rest) if rest else None
        window = min(rest, fixed or self._window)
        while True:
            sample_ids, ends = self._sample_ids(at, window)
            lengths, complete = self.source.lengths_of(sample_ids), window == rest
            size = step_size(
                lengths, self._recipe_at(at), complete=complete, **self._about(sample_ids)
            )
            if size == 0:
                return None
            if size is not None:
                units = int(np.searchsorted(ends, size)) + 1
                self._window = units + units // 4 + 64
                if self.recipe.overflow == "drop" and self._all_dropped(at, units):
                    units = rest  # the last step reports all that were dropped
                return units, units == rest
            window = min(rest, 2 * window)

    def _recipe_at(self, at: StreamPosition) -> Recipe:
        """The recipe for the number of ranks that began the step at this position."""
        if not at.inside:
            return self.recipe
        return replace(self.recipe, topology=replace(self.recipe.topology, dp=at.inside[0][0]))

    def _all_dropped(self, at: StreamPosition, units: int) -> bool:
        """Whether everything after the next `units` units of the epoch is dropped."""
        first, window, longest = at.position + units, 64, self.recipe.longest_segment
        while first < len(self):
            count = min(window, len(self) - first)
            sample_ids, _ = self._sample_ids(replace(at, position=first), count)
            if longest is None or (self.source.lengths_of(sample_ids) <= longest).any():
                return False
            first, window = first + count, 2 * window
        return True

    def _sample_ids(self, at: StreamPosition, units: int) -> tuple[IntArray, IntArray]:
        """(sample ids of the next units, number of samples up to the end of each unit)."""
        positions = at.position + np.arange(units)
        return self.units.members(self._order(at.epoch).samples(positions))

    def _order(self, epoch: int) -> EpochOrder:
        return EpochOrder(count=len(self), seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def _about(self, sample_ids: IntArray) -> dict[str, Any]:
        return {
            "groups": self.units.groups_of(sample_ids),
            "columns": {name: column[sample_ids] for name, column in self.columns.items()},
            "names": sample_ids,
        }

    # Plans ---------------------------------------------------------------------------------------

    def work(self, bounds: StepBounds) -> StepWork:
        """The step, planned for the ranks that began it; what is left of it, for these ranks."""
        at = bounds.before
        sample_ids, _ = self._sample_ids(at, bounds.after.position - at.position)
        lengths, about = self.source.lengths_of(sample_ids), self._about(sample_ids)
        plan = plan_step(lengths, self._recipe_at(at), last=bounds.last, **about)
        if not at.inside:
            return StepWork(plan, sample_ids)
        remainder = StepRemainder.of(plan, sample_ids, about)
        rest = remainder.after(at.inside, self.recipe.topology.dp)
        return StepWork(plan, sample_ids, rest.by_rank)

    def plan_epoch(self, epoch: int, progress: Progress | None = None) -> Plan:
        """One plan of a whole epoch, whose samples are numbered in the epoch's order."""
        sample_ids, _ = self._sample_ids(StreamPosition(epoch), len(self))
        lengths = self.source.lengths_of(sample_ids)
        plan = make_plan(lengths, self.recipe, progress=progress, **self._about(sample_ids))
        stored = np.array_equal(sample_ids, np.arange(len(sample_ids)))
        return plan if stored else replace(plan, sample_ids=sample_ids)

    def known_count(self, bounds: StepBounds) -> int | None:
        """`steps.micro_batches`, except for the last step of an epoch and one begun before."""
        if bounds.last or bounds.before.inside:
            return None
        return self.recipe.steps.micro_batches

    # Identity ------------------------------------------------------------------------------------

    def same_epoch(self, epoch: int) -> int:
        """Without shuffling, all epochs are the same."""
        return epoch if self.shuffle else 0

    def details(self) -> dict[str, Any]:
        """The columns that the recipe names."""
        named = [name for name in self.recipe.columns if name in self.columns]
        return {"columns": {name: values_digest(self.columns[name]) for name in named}}

    def belongs(self, *, inside: bool) -> dict[str, str]:
        """Order and groups. Ranks, layout and balance may change, because they do not affect which
        samples a step holds; within a step only the ranks may."""
        return {**self._owner, "recipe": self._same_recipe} if inside else dict(self._owner)

    @cached_property
    def _owner(self) -> dict[str, str]:
        belongs = {"order": self._order(0).description}
        if self.units.groups is not None:
            belongs["groups"] = column_digest(self.units.groups)
        return belongs

    @cached_property
    def _same_recipe(self) -> str:
        """A digest of the recipe without the number of ranks."""
        recipe = self.recipe.to_dict()
        recipe["topology"] = {**recipe["topology"], "dp": None}
        return digest_of(recipe)

    # Length --------------------------------------------------------------------------------------

    @property
    def steps_per_epoch(self) -> Estimate:
        """Number of steps in an epoch; exact if steps are counted in samples."""
        steps, n = self.recipe.steps, len(self.source)
        if steps.samples is not None:
            exact = self.units.groups is None and self.recipe.overflow != "drop"
            return Estimate(divided_up(n, steps.samples), exact)
        spread = np.linspace(0, max(n - 1, 0), min(n, _SAMPLED_LENGTHS)).astype(np.int64)
        tokens = float(self.source.lengths_of(np.unique(spread)).mean()) * n if n else 0.0
        if steps.tokens is not None:
            return Estimate(divided_up(int(tokens), steps.tokens), False)
        if steps.micro_batches is None:
            return Estimate(int(n > 0), True)
        per_step = steps.micro_batches * self.recipe.topology.dp
        return Estimate(
            math.ceil(n / (self._per_micro_batch(tokens / max(n, 1)) * per_step)), False
        )

    def _per_micro_batch(self, length: float) -> float:
        """About how many samples of this length a micro-batch holds."""
        layout, unit = self.recipe.layout, self.recipe.topology.alignment
        aligned = rounded_up(math.ceil(length), unit)
        slots, most = layout.pack_bounds(self.recipe, np.array([aligned]))
        each = min(float(most[0]), math.inf if slots is None else slots / max(aligned, 1))
        return max(1.0, each * layout.packs_per_micro_batch)
