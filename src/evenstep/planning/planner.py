"""lengths + Recipe -> Plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, offsets_of
from evenstep.core.recipe import Recipe
from evenstep.core.segments import Segments
from evenstep.core.validate import MOST
from evenstep.errors import InputError, PlanError
from evenstep.planning.assemble import StepLayout, assemble
from evenstep.planning.limits import check_units
from evenstep.planning.overflow import refusal, refused, segments_of
from evenstep.planning.place_step import count_lanes, packs_freely, place_step
from evenstep.planning.sizing import fractions, most_that_fit
from evenstep.planning.steps import assign_steps, check_groups, first_step, too_large
from evenstep.planning.units import Units, units_of


def make_plan(
    lengths: ArrayLike,
    recipe: Recipe,
    *,
    groups: ArrayLike | None = None,
    columns: Mapping[str, ArrayLike] | None = None,
    names: IntArray | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan samples of these lengths. Pure: the same arguments give the same plan everywhere.

    `groups` gives each sample a group id; `columns` gives it the further numbers that
    `recipe.limits.columns` limits. `names` is what error messages call the samples, where these
    are a window of many. `progress(done, total)` is called after each step.

    >>> from evenstep.core.layout import Packed
    >>> plan = make_plan([5, 3, 4, 2], Recipe(layout=Packed(max_tokens=7)))
    >>> [micro.segments.sample.tolist() for micro in plan[0, 0]]
    [[0, 3], [1, 2]]
    """
    work = _Work.of(lengths, recipe, groups, columns, names)
    kept, tokens = work.kept, work.counts
    if recipe.steps.micro_batches is not None:
        tokens = work.tokens

    def leading(samples: IntArray, offsets: IntArray, *, complete: bool) -> int | None:
        return work.leading(kept[samples], offsets, complete=complete)

    step_of = np.full(len(work.counts), -1, np.int64)
    of_kept = None if work.groups is None else work.groups[kept]
    step_of[kept] = assign_steps(recipe.steps, tokens[kept], of_kept, leading)
    return work.lay_out(step_of, None, progress)


def plan_step(
    lengths: ArrayLike,
    recipe: Recipe,
    *,
    groups: ArrayLike | None = None,
    columns: Mapping[str, ArrayLike] | None = None,
    names: IntArray | None = None,
    last: bool = False,
) -> Plan:
    """Plan samples that were dealt to one step already. Pure, like `make_plan`.

    Where steps are counted in micro-batches, any but the `last` of an epoch has just as many.
    """
    work = _Work.of(lengths, recipe, groups, columns, names)
    step_of = np.full(len(work.counts), -1, np.int64)
    step_of[work.kept] = 0
    return work.lay_out(step_of, None if last else recipe.steps.micro_batches, None)


def step_size(
    lengths: ArrayLike,
    recipe: Recipe,
    *,
    groups: ArrayLike | None = None,
    columns: Mapping[str, ArrayLike] | None = None,
    names: IntArray | None = None,
    complete: bool = True,
) -> int | None:
    """How many of these samples, from the first, the next step takes; None if more are needed to
    tell, unless they are `complete`. Whatever lies behind the step has no say in it.

    Members of a group stand side by side. Dropped samples go with the step that follows them.

    >>> from evenstep.core.layout import Packed
    >>> from evenstep.core.recipe import Steps
    >>> step_size([5, 3, 4, 2], Recipe(layout=Packed(max_tokens=8), steps=Steps(tokens=8)))
    2
    """
    work = _Work.of(lengths, recipe, groups, columns, names)
    steps, n = recipe.steps, len(work.counts)
    begins = np.arange(n)
    if work.groups is not None:
        begins = np.flatnonzero(np.diff(work.groups, prepend=work.groups[:1] - 1))
    ends = np.concatenate((begins, [n]))
    if steps.micro_batches is not None:
        offsets = np.unique(np.searchsorted(work.kept, ends))  # units of which something is left
        units = work.leading(work.kept, offsets, complete=complete)
        return int(work.kept[offsets[units] - 1]) + 1 if units else units
    amount = np.zeros(n, np.int64)
    amount[work.kept] = 1 if steps.samples is not None else work.counts[work.kept]
    limit = steps.samples or steps.tokens
    if limit is None:
        return (int(work.kept[-1]) + 1 if len(work.kept) else 0) if complete else None
    amounts = np.add.reduceat(amount, begins) if n else amount
    units = first_step(amounts, limit, complete=complete)
    if units and steps.samples is not None and work.groups is not None:
        check_groups(work.groups[begins[:units]], amounts[:units], steps.samples)
    return None if units is None else int(ends[units])


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """The samples of one call, checked and cut into segments."""

    recipe: Recipe
    counts: IntArray
    names: IntArray
    groups: IntArray | None
    limited: Mapping[str, IntArray]
    segments: Segments
    units: Units
    kept: IntArray

    @classmethod
    def of(
        cls,
        lengths: ArrayLike,
        recipe: Recipe,
        groups: ArrayLike | None,
        columns: Mapping[str, ArrayLike] | None,
        names: IntArray | None,
    ) -> _Work:
        counts = _integers("length", lengths, 1, MOST, names)
        called = np.arange(len(counts)) if names is None else names
        ids = None if groups is None else _column("group", groups, -(2**63), 2**63 - 1, called)
        limited = {name: _limited(name, columns, called) for name in recipe.limits.columns}
        limit = recipe.longest_segment
        over = refused(counts, limit, recipe.overflow)
        if len(over):
            first = int(over[0])
            raise PlanError(refusal(called[first], int(counts[first]), recipe, len(over) - 1))
        segments, dropped = segments_of(counts, limit, recipe.overflow)
        kept = np.delete(np.arange(len(counts)), dropped)
        units = units_of(segments, recipe, limited, ids)
        check_units(units, recipe, segments, ids, called)
        return cls(recipe, counts, called, ids, limited, segments, units, kept)

    @property
    def tokens(self) -> IntArray:
        """What is left of each sample after truncating and dropping."""
        found = np.bincount(self.segments.sample, self.segments.length, len(self.counts))
        return found.astype(np.int64)

    def lay_out(
        self,
        step_of: IntArray,
        last: int | None,
        progress: Callable[[int, int], None] | None,
    ) -> Plan:
        """The plan of samples dealt to steps; `last` fixes the last step's micro-batches."""
        recipe, segments = self.recipe, self.segments
        total = int(step_of.max(initial=-1)) + 1
        order = np.argsort(step_of[segments.sample], kind="stable")
        bounds = np.searchsorted(step_of[segments.sample][order], np.arange(total + 1))
        laid: list[StepLayout] = []
        for step in range(total):
            chosen = order[bounds[step] : bounds[step + 1]]
            wanted = recipe.steps.micro_batches if step < total - 1 else last
            units = self.units.of_segments(chosen)
            laid.append(place_step(segments.take(chosen), units, recipe, wanted))
            if progress is not None:
                progress(step + 1, total)
        return assemble(recipe, self.counts, step_of, laid, self.groups, self.limited)

    def leading(self, samples: IntArray, offsets: IntArray, *, complete: bool) -> int | None:
        """How many leading units of these samples fill a step of micro-batches. What lies behind
        the step has no say in it. None where more samples are needed to tell."""
        recipe, steps = self.recipe, self.recipe.steps
        assert steps.micro_batches is not None
        packs = steps.micro_batches * recipe.topology.dp * recipe.layout.packs_per_micro_batch
        segments, ends = self._segments_of(samples, offsets)
        grouped = self.groups is not None and recipe.groups == "micro_batch"
        unit = self.units.of_segment[segments[ends[:-1]]] if grouped else segments
        shares = fractions(self.units.take(unit), recipe).cumsum(axis=0).max(axis=1)
        filled = np.concatenate(([0.0], shares))
        filled = filled if grouped else filled[ends]

        def needed(units: int) -> int:
            return count_lanes(
                self.units.of_segments(np.sort(segments[: ends[units]])), recipe, packs
            )

        found = most_that_fit(
            filled, packs, needed, limited=packs_freely(recipe), complete=complete
        )
        if found == 0 and len(offsets) > 1:
            mine = samples[: offsets[1]]
            whose = f"sample {self.names[mine[0]]}"
            if self.groups is not None:
                whose = f"group {self.groups[mine[0]]}"
            raise too_large(whose, int(self.tokens[mine].sum()), steps)
        return found

    def _segments_of(self, samples: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """(the segments of these samples, how many there are up to each unit); unit u holds
        `samples[offsets[u]]` onwards."""
        first = np.searchsorted(self.segments.sample, samples, "left")
        count = np.searchsorted(self.segments.sample, samples, "right") - first
        before = offsets_of(count)
        return np.repeat(first - before[:-1], count) + np.arange(before[-1]), before[offsets]


def _integers(
    what: str, values: ArrayLike, least: int, most: int, names: IntArray | None
) -> IntArray:
    """A flat int64 copy of `values`, or an error that names the sample at fault."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.empty((0, 0))
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise InputError(
            f"{what} has shape {array.shape} and type {array.dtype}; a plan needs one whole "
            f"number per sample. Pass a flat sequence of integers."
        )
    whole = np.ones(len(array), bool)
    if array.dtype.kind == "f":
        whole = np.isfinite(array) & (array == np.floor(array))
    bad = np.flatnonzero(~whole | (array < least) | (array > most))
    if len(bad):
        at = int(bad[0])
        raise InputError(
            f"sample {at if names is None else names[at]} has {what} {array[at]}, which cannot be "
            f"planned. Give every sample a whole number between {least} and {most}, or leave it "
            f"out."
        )
    return array.astype(np.int64)


def _column(name: str, values: ArrayLike, least: int, most: int, names: IntArray) -> IntArray:
    column = _integers(name, values, least, most, None)
    if len(column) != len(names):
        raise InputError(
            f"{len(column)} entries of {name} for {len(names)} samples cannot be matched. "
            f"Give one per sample."
        )
    return column


def _limited(name: str, columns: Mapping[str, ArrayLike] | None, names: IntArray) -> IntArray:
    if columns is None or name not in columns:
        have = ", ".join(sorted(columns or {})) or "none"
        raise InputError(
            f"limits.columns names {name!r} but no such column was given (there is: {have}), so "
            f"the limit cannot be kept. Pass columns={{{name!r}: ...}}."
        )
    return _column(name, columns[name], 0, MOST, names)
