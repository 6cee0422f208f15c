"""Assemble decided steps into the arrays of a `Plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evenstep.core.measures import time_of_works
from evenstep.core.plan import Plan
from evenstep.core.ragged import FloatArray, IntArray, Segments, offsets_of, rounded_up, sum_by
from evenstep.core.recipe import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class DecidedStep:
    """One step as decided: micro-batch `rank * per_rank + wave` and row of each segment.

    `widths` fixes the width of each wave where all ranks share it; 0 leaves it open.
    """

    segments: Segments
    micro: IntArray
    row: IntArray
    per_rank: int
    widths: IntArray | None


def assemble(
    recipe: Recipe,
    lengths: IntArray,
    step_of: IntArray,
    steps: list[DecidedStep],
    groups: IntArray | None,
    columns: Mapping[str, IntArray],
) -> Plan:
    """Sort the segments of each step into rows, compute widths, and join the steps."""
    ranks = recipe.topology.dp
    laid = [_lay_out(step, recipe) for step in steps]
    none = np.empty(0, np.int64)
    segments = [each[0] for each in laid]
    cells = np.repeat([step.per_rank for step in steps], ranks).astype(np.int64)
    return Plan(
        recipe=recipe,
        lengths=lengths,
        step_of=step_of,
        segments=Segments(
            np.concatenate([none, *(s.sample for s in segments)]),
            np.concatenate([none, *(s.start for s in segments)]),
            np.concatenate([none, *(s.length for s in segments)]),
        ),
        row_offsets=offsets_of(np.concatenate([none, *(each[1] for each in laid)])),
        micro_offsets=offsets_of(np.concatenate([none, *(each[2] for each in laid)])),
        cell_offsets=offsets_of(cells),
        widths=np.concatenate([none, *(each[3] for each in laid)]),
        groups=groups,
        columns=columns,
    )


def modelled_time(step: DecidedStep, recipe: Recipe, second: FloatArray | None = None) -> float:
    """The modelled time of a decided step; `second` is the second work by rank and wave."""
    ranks, count = recipe.topology.dp, step.per_rank * recipe.topology.dp
    segments, per_row, rows, widths = _lay_out(step, recipe)
    owner = np.repeat(np.repeat(np.arange(count), rows), per_row)
    aligned = rounded_up(segments.length, recipe.topology.alignment)
    cost = recipe.layout.micro_batch_costs(recipe.cost, rows, widths, owner, aligned)
    works = [cost.reshape(ranks, -1), *([] if second is None else [second])]
    return time_of_works(works, recipe.sync_every)


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
