"""From decided steps to the arrays of a Plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evenstep.core.layout import PackedStatic, Padded
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, offsets_of
from evenstep.core.recipe import Recipe
from evenstep.core.segments import Segments


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """One step, decided: micro-batch `rank * per_rank + position` and row of each segment.

    `widths` fixes the width of each position where all ranks must share it; 0 fixes nothing.
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
    steps: list[StepLayout],
    groups: IntArray | None,
    columns: Mapping[str, IntArray],
) -> Plan:
    """Lay the steps end to end: sort segments into rows, size the rows, count everything."""
    ranks = recipe.topology.dp
    parts = [_lay_out(step, recipe) for step in steps]
    none = np.empty(0, np.int64)
    segments = [part[0] for part in parts]
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
        row_offsets=offsets_of(np.concatenate([none, *(part[1] for part in parts)])),
        micro_offsets=offsets_of(np.concatenate([none, *(part[2] for part in parts)])),
        cell_offsets=offsets_of(cells),
        widths=np.concatenate([none, *(part[3] for part in parts)]),
        groups=groups,
        columns=columns,
    )


def _lay_out(step: StepLayout, recipe: Recipe) -> tuple[Segments, IntArray, IntArray, IntArray]:
    """(segments in order, segments per row, rows per micro-batch, widths) of one step."""
    layout, unit, ranks = recipe.layout, recipe.width_unit, recipe.topology.dp
    count = ranks * step.per_rank
    aligned = -(-step.segments.length // recipe.topology.alignment) * recipe.topology.alignment
    order = np.lexsort((step.row, step.micro))
    if isinstance(layout, Padded):
        held = np.bincount(step.micro, minlength=count)
        rows = np.maximum(held, 1)  # a dummy is one empty row
        if recipe.topology.equal_widths:
            rows = np.full(count, rows.max())
        widest = np.zeros(count, np.int64)
        np.maximum.at(widest, step.micro, aligned)
        per_row = (_ranked(rows) < np.repeat(held, rows)).astype(np.int64)
    else:
        each = layout.rows if isinstance(layout, PackedStatic) else 1
        rows = np.full(count, each)
        cell = step.micro * each + step.row
        per_row = np.bincount(cell, minlength=count * each)
        used = np.bincount(cell, weights=aligned, minlength=count * each).astype(np.int64)
        widest = used.reshape(count, each).max(axis=1)
    widths = np.maximum(-(-widest // unit), 1) * unit
    if isinstance(layout, PackedStatic):
        widths = np.full(count, layout.width)
    elif layout.pad_to is not None:
        widths = np.maximum(widths, layout.pad_to)
    if step.widths is not None:
        real = np.bincount(step.micro, minlength=count) > 0
        shared = np.tile(step.widths, ranks)
        widths = np.where(real & (shared > 0), shared, widths)
    if recipe.topology.equal_widths:
        widths = np.full(count, widths.max())
    return step.segments.take(order), per_row, rows, widths


def _ranked(counts: IntArray) -> IntArray:
    """The place of each element in its own row: counts [2, 3] -> [0, 1, 0, 1, 2]."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(starts, counts)
