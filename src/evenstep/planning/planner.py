"""lengths + Recipe -> Plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.layout import Fixed, PackedStatic, Padded
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe
from evenstep.core.segments import Segments
from evenstep.core.validate import MOST
from evenstep.errors import ConfigError, InputError
from evenstep.planning.assemble import StepLayout, assemble
from evenstep.planning.cells import place_step
from evenstep.planning.joint import fits_packs
from evenstep.planning.limits import check_units, units_of
from evenstep.planning.segment import cut_samples
from evenstep.planning.steps import check_groups, deal_steps, first_step, most_units, too_large


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
    kept = work.kept
    step_of = np.full(len(work.counts), -1, np.int64)
    step_of[kept] = deal_steps(
        recipe.steps,
        work.names[kept],
        (work.counts if recipe.steps.micro_batches is None else work.tokens)[kept],
        None if work.groups is None else work.groups[kept],
        lambda chosen: work.fits_step(kept[chosen]),
    )
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
        kept_before = np.searchsorted(work.kept, ends)
        offsets = np.unique(kept_before)
        units = most_units(
            offsets, lambda samples: work.fits_step(work.kept[:samples]), complete=complete
        )
        if units == 0 and len(offsets) > 1:
            first = work.kept[: offsets[1]]
            whose = f"sample {work.names[first[0]]}"
            if work.groups is not None:
                whose = f"group {work.groups[first[0]]}"
            raise too_large(whose, int(work.tokens[first].sum()), steps)
        if not units:
            return units
        return int(work.kept[offsets[units] - 1]) + 1
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
        multiple, asked = recipe.topology.multiple, recipe.steps.micro_batches
        if asked is not None and asked % multiple:
            raise ConfigError(
                f"steps.micro_batches is {asked} but this pipeline runs them in multiples of "
                f"{multiple}; no step could have that many. Use {-(-asked // multiple) * multiple}."
            )
        segments, dropped = cut_samples(counts, recipe, called)
        kept = np.delete(np.arange(len(counts)), dropped)
        work = cls(recipe, counts, called, ids, limited, segments, kept)
        check_units(units_of(segments, recipe, limited, None), recipe, segments, None, called)
        return work

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
            chosen = segments.take(np.sort(order[bounds[step] : bounds[step + 1]]))
            units = units_of(chosen, recipe, self.limited, self.groups)
            check_units(units, recipe, chosen, self.groups, self.names)
            wanted = recipe.steps.micro_batches if step < total - 1 else last
            laid.append(place_step(chosen, units, recipe, wanted))
            if progress is not None:
                progress(step + 1, total)
        return assemble(recipe, self.counts, step_of, laid, self.groups, self.limited)

    def fits_step(self, samples: IntArray) -> bool:
        """Whether these samples fill no more micro-batches than a step has."""
        recipe = self.recipe
        asked, ranks = recipe.steps.micro_batches, recipe.topology.dp
        assert asked is not None
        chosen = self.segments.take(_segments_of(np.sort(samples), self.segments))
        units = units_of(chosen, recipe, self.limited, self.groups)
        layout, capacity = recipe.layout, recipe.capacity
        if isinstance(layout, Padded) or recipe.equal_sizes:
            return place_step(chosen, units, recipe, None).per_rank <= asked
        if isinstance(layout, Fixed):
            units, capacity = units.by_count(capacity), layout.samples
        assert capacity is not None
        rows = layout.rows if isinstance(layout, PackedStatic) else 1
        return fits_packs(units, capacity, asked * ranks * rows)


def _segments_of(samples: IntArray, segments: Segments) -> IntArray:
    """The places of all segments of these samples; segments are in sample order."""
    first = np.searchsorted(segments.sample, samples, "left")
    count = np.searchsorted(segments.sample, samples, "right") - first
    before = np.cumsum(count) - count
    return np.repeat(first - before, count) + np.arange(int(count.sum()))


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
