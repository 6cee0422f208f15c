"""lengths + Recipe -> Plan, in the order in which a sample passes through.

inputs        check lengths, groups and columns
units         samples -> segments -> units: what moves as a whole
steps         assign samples to optimizer steps, in order
step          per step: units -> packs or cuts -> waves and ranks
assemble      the arrays of a Plan
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.plan import Plan
from evenstep.core.prefixes import Prefixes
from evenstep.core.ragged import IntArray, Segments, offsets_of, rounded_up, sum_by
from evenstep.core.recipe import Recipe, check_recipe
from evenstep.errors import ConfigError, PlanError
from evenstep.planning.inputs import (
    check_names,
    checked_column,
    checked_groups,
    checked_lengths,
)
from evenstep.planning.spans import share_sequences
from evenstep.planning.step import (
    DecidedStep,
    count_needed,
    decide_step,
    packs_are_counted,
)
from evenstep.planning.steps import (
    assign_steps,
    check_groups,
    first_step,
    fractions,
    most_that_fit,
    too_large,
)
from evenstep.planning.trees import check_trees, share_prefixes, with_shared_sizes
from evenstep.planning.units import Units, check_units, refusal, refused, segments_of, units_of


def make_plan(
    lengths: ArrayLike,
    recipe: Recipe,
    *,
    groups: ArrayLike | None = None,
    columns: Mapping[str, ArrayLike] | None = None,
    prefixes: Prefixes | None = None,
    names: IntArray | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan samples of these lengths. Pure: the same arguments give the same plan everywhere.

    `groups` gives each sample a group id, an integer or a text. `columns` gives each sample the
    numbers that `recipe.limits.columns` and `recipe.second_work` name. `prefixes` are the tokens
    that samples share at their beginning (`find_prefixes`): micro-batches compute these once, where
    that saves modelled time. `names` is what error messages call the samples, for example their ids
    in a source. `progress(done, total)` is called after each step.

    >>> from evenstep.core.layout import Packed
    >>> plan = make_plan([5, 3, 4, 2], Recipe(layout=Packed(max_tokens=7)))
    >>> [micro.segments.sample.tolist() for micro in plan[0, 0]]
    [[0, 3], [1, 2]]
    """
    work = _Work.of(lengths, recipe, groups, columns, names, prefixes)
    return work.decide(work.assign(), None, progress)


def plan_step(
    lengths: ArrayLike,
    recipe: Recipe,
    *,
    groups: ArrayLike | None = None,
    columns: Mapping[str, ArrayLike] | None = None,
    prefixes: Prefixes | None = None,
    names: IntArray | None = None,
    last: bool = False,
) -> Plan:
    """Plan samples that are already assigned to one step. Pure, like `make_plan`.

    With `steps.micro_batches`, the step has exactly that many per rank, unless it is the `last` of
    an epoch.
    """
    work = _Work.of(lengths, recipe, groups, columns, names, prefixes)
    step_of = np.full(len(work.lengths), -1, np.int64)
    step_of[work.kept] = 0
    return work.decide(step_of, None if last else recipe.steps.micro_batches, None)


def step_size(
    lengths: ArrayLike,
    recipe: Recipe,
    *,
    groups: ArrayLike | None = None,
    columns: Mapping[str, ArrayLike] | None = None,
    prefixes: Prefixes | None = None,
    names: IntArray | None = None,
    complete: bool = True,
) -> int | None:
    """How many of these samples, from the first on, the next step takes.

    None if that depends on samples that follow, unless these are `complete`. Samples after the
    step make no difference. Members of a group must be adjacent. Dropped samples belong to the
    step that follows them.

    >>> from evenstep.core.layout import Packed
    >>> from evenstep.core.recipe import Steps
    >>> step_size([5, 3, 4, 2], Recipe(layout=Packed(max_tokens=8), steps=Steps(tokens=8)))
    2
    """
    try:
        return _size_of(_Work.of(lengths, recipe, groups, columns, names, prefixes), complete)
    except PlanError:
        # The sample at fault may lie after the step: look at those before it.
        before = _before_the_fault(lengths, recipe, groups, columns, names, prefixes)
        size = _size_of(before, False)
        if not size:
            raise
        return size


def _before_the_fault(
    lengths: ArrayLike,
    recipe: Recipe,
    groups: ArrayLike | None,
    columns: Mapping[str, ArrayLike] | None,
    names: IntArray | None,
    prefixes: Prefixes | None,
) -> _Work:
    """The samples before the first one that cannot be planned, found by bisection."""
    counts, ids = np.asarray(lengths), None if groups is None else np.asarray(groups)
    held = {name: np.asarray(column) for name, column in (columns or {}).items()}
    ends = np.arange(len(counts)) if ids is None else _group_starts(ids)

    def first(count: int) -> _Work:
        return _Work.of(
            counts[:count],
            recipe,
            None if ids is None else ids[:count],
            {name: column[:count] for name, column in held.items()},
            None if names is None else names[:count],
            None if prefixes is None else prefixes.take(np.arange(count)),
        )

    low, high = 0, len(ends)  # the first ends[low] samples can be planned
    while high - low > 1:
        middle = (low + high) // 2
        try:
            first(int(ends[middle]))
            low = middle
        except PlanError:
            high = middle
    return first(int(ends[low]))


def _group_starts(groups: IntArray) -> IntArray:
    """Where each run of equal group ids starts: [7, 7, 5] -> [0, 2]."""
    return np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))


def _size_of(work: _Work, complete: bool) -> int | None:
    """`step_size` of samples that can all be planned."""
    steps, kept, n = work.recipe.steps, work.kept, len(work.lengths)
    starts = np.arange(n) if work.groups is None else _group_starts(work.groups)
    # Units that are not all dropped, as offsets of the samples that are kept.
    offsets = np.unique(np.searchsorted(kept, np.append(starts, n)))
    limit = steps.samples or steps.tokens
    if steps.micro_batches is not None:
        units = work.leading(kept, offsets, complete=complete)
    elif limit is None:
        units = len(offsets) - 1 if complete else None
    else:
        amount = np.ones(len(kept), np.int64) if steps.samples else work.lengths[kept]
        amounts = np.diff(offsets_of(amount)[offsets])
        units = first_step(amounts, limit, complete=complete)
        if units and steps.samples is not None and work.groups is not None:
            check_groups(work.groups[kept[offsets[:units]]], amounts[:units], steps.samples)
    # The step ends with its last sample that is kept, also inside of a group.
    return int(kept[offsets[units] - 1]) + 1 if units else units


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """The samples of one call with their segments and units. `kept` are those not dropped."""

    recipe: Recipe
    lengths: IntArray
    names: IntArray
    groups: IntArray | None
    columns: Mapping[str, IntArray]
    segments: Segments
    units: Units
    kept: IntArray
    prefixes: Prefixes | None = None

    @classmethod
    def of(
        cls,
        lengths: ArrayLike,
        recipe: Recipe,
        groups: ArrayLike | None,
        columns: Mapping[str, ArrayLike] | None,
        names: IntArray | None,
        prefixes: Prefixes | None = None,
    ) -> _Work:
        """Check the samples, then divide them into segments and units."""
        check_recipe(recipe)
        check_names(columns, recipe)
        counts = checked_lengths(lengths, names)
        n = len(counts)
        called = np.arange(n) if names is None else names
        ids = None if groups is None else checked_groups(groups, n)
        if recipe.sharing is not None and groups is not None and recipe.groups == "micro_batch":
            raise ConfigError(
                "sharing and groups that stay in one micro-batch cannot be combined. Set "
                "groups='step', or leave out sharing."
            )
        limited = {name: checked_column(name, columns, n) for name in recipe.columns}
        limit = recipe.longest_segment
        if limit is not None and counts.max(initial=0) > limit:
            over = refused(counts, limit, recipe.overflow)
        else:
            over = counts[:0]
        if len(over):
            first = int(over[0])
            raise PlanError(refusal(called[first], int(counts[first]), recipe, len(over) - 1))
        if prefixes is not None:
            check_trees(recipe, counts, called, prefixes)
        segments, dropped = segments_of(counts, limit, recipe.overflow)
        kept = np.delete(np.arange(n), dropped)
        units = units_of(segments, recipe, limited, ids)
        alone = units
        if prefixes is not None:
            alone = with_shared_sizes(units, segments, recipe, prefixes)
        check_units(alone, recipe, segments, ids, called)
        return cls(recipe, counts, called, ids, limited, segments, units, kept, prefixes)

    def assign(self) -> IntArray:
        """The step of each sample; -1 if it is dropped."""
        recipe, kept = self.recipe, self.kept
        tokens = self.lengths if recipe.steps.micro_batches is None else self.tokens
        groups = None if self.groups is None else self.groups[kept]

        def leading(samples: IntArray, offsets: IntArray, *, complete: bool) -> int | None:
            return self.leading(kept[samples], offsets, complete=complete)

        step_of = np.full(len(self.lengths), -1, np.int64)
        step_of[kept] = 0
        if recipe.steps.samples or recipe.steps.tokens or recipe.steps.micro_batches:
            step_of[kept] = assign_steps(recipe.steps, tokens[kept], groups, leading)
        return step_of

    def decide(
        self,
        step_of: IntArray,
        last: int | None,
        progress: Callable[[int, int], None] | None,
    ) -> Plan:
        """The plan of samples assigned to steps.

        `last` fixes the micro-batches per rank of the last step.
        """
        recipe, segments = self.recipe, self.segments
        total = int(step_of.max(initial=-1)) + 1
        order = np.argsort(step_of[segments.sample], kind="stable")
        bounds = np.searchsorted(step_of[segments.sample][order], np.arange(total + 1))
        decided = []
        for step in range(total):
            chosen = order[bounds[step] : bounds[step + 1]]
            wanted = recipe.steps.micro_batches if step < total - 1 else last
            units = self.units
            if total > 1:
                segments, units = self.segments.take(chosen), units.of_segments(chosen)
            if recipe.sharing is not None:
                decided.append(share_sequences(segments, units, recipe, self.prefixes))
            elif self.prefixes is not None:
                decided.append(share_prefixes(segments, units, recipe, wanted, self.prefixes))
            else:
                decided.append(decide_step(segments, units, recipe, wanted))
            if progress is not None:
                progress(step + 1, total)
        return assemble(
            recipe, self.lengths, step_of, decided, self.groups, self.columns, self.prefixes
        )

    def leading(self, samples: IntArray, offsets: IntArray, *, complete: bool) -> int | None:
        """How many leading units of these samples fill a step of `steps.micro_batches`.

        Samples after the step make no difference. None if more samples are needed to tell.
        """
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
            chosen = np.sort(segments[: ends[units]])
            return count_needed(self.units.of_segments(chosen), recipe, packs)

        found = most_that_fit(
            filled, packs, needed, limited=packs_are_counted(recipe), complete=complete
        )
        if found == 0 and len(offsets) > 1:
            first = samples[: offsets[1]]
            name = f"sample {self.names[first[0]]}"
            if self.groups is not None:
                name = f"group {self.groups[first[0]]}"
            raise too_large(name, int(self.tokens[first].sum()), steps)
        return found

    @property
    def tokens(self) -> IntArray:
        """The tokens of each sample that remain after truncating and dropping."""
        found = np.bincount(self.segments.sample, self.segments.length, len(self.lengths))
        return found.astype(np.int64)

    def _segments_of(self, samples: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """(the segments of these samples, how many there are up to each unit).

        Unit u holds `samples[offsets[u]]` onwards.
        """
        first = np.searchsorted(self.segments.sample, samples, "left")
        count = np.searchsorted(self.segments.sample, samples, "right") - first
        before = offsets_of(count)
        return np.repeat(first - before[:-1], count) + np.arange(before[-1]), before[offsets]


def assemble(
    recipe: Recipe,
    lengths: IntArray,
    step_of: IntArray,
    steps: list[DecidedStep],
    groups: IntArray | None,
    columns: Mapping[str, IntArray],
    prefixes: Prefixes | None = None,
) -> Plan:
    """Sort the segments of each step into rows, compute widths, and join the steps."""
    ranks = recipe.topology.dp
    laid = [_lay_out(step, recipe) for step in steps]
    none = np.empty(0, np.int64)
    segments = [each[0] for each in laid]
    cells = np.repeat([step.per_rank for step in steps], ranks).astype(np.int64)
    parent = None
    if any(each.parent is not None for each in segments):
        parent = np.concatenate(
            [np.full(len(s), -1) if s.parent is None else s.parent for s in segments]
        )
    return Plan(
        recipe=recipe,
        lengths=lengths,
        step_of=step_of,
        segments=Segments(
            np.concatenate([none, *(s.sample for s in segments)]),
            np.concatenate([none, *(s.start for s in segments)]),
            np.concatenate([none, *(s.length for s in segments)]),
            parent,
        ),
        row_offsets=offsets_of(np.concatenate([none, *(each[1] for each in laid)])),
        micro_offsets=offsets_of(np.concatenate([none, *(each[2] for each in laid)])),
        cell_offsets=offsets_of(cells),
        widths=np.concatenate([none, *(each[3] for each in laid)]),
        groups=groups,
        columns=columns,
        prefix_order=None if prefixes is None else prefixes.order,
        prefix_shared=None if prefixes is None else prefixes.shared,
    )


def _lay_out(step: DecidedStep, recipe: Recipe) -> tuple[Segments, IntArray, IntArray, IntArray]:
    """(segments in order, segments per row, rows per micro-batch, widths) of one step."""
    layout, ranks = recipe.layout, recipe.topology.dp
    count = ranks * step.per_rank
    order = np.lexsort((step.row, step.micro))
    segments, micro = step.segments.take(order), step.micro[order]
    held = np.bincount(micro, minlength=count)
    rows = layout.row_counts(held)
    if recipe.topology.equal_widths:
        rows = np.full(count, rows.max())
    first = offsets_of(rows)
    row = first[micro] + layout.row_numbers(step.row[order], held)
    aligned = rounded_up(segments.length, recipe.topology.alignment)
    used = sum_by(row, aligned, int(first[-1])).astype(np.int64)
    widths = layout.widths(np.maximum.reduceat(used, first[:-1]), recipe.width_unit)
    if step.widths is not None:
        shared = np.tile(step.widths, ranks)
        widths = np.where((held > 0) & (shared > 0), shared, widths)
    if recipe.equal_tokens:
        widths = np.tile(widths.reshape(ranks, -1).max(axis=0), ranks)
    if recipe.topology.equal_widths:
        widths = np.full(count, widths.max())
    return segments, np.bincount(row, minlength=int(first[-1])), rows, widths
