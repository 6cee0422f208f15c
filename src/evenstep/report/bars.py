"""The segments of one micro-batch as bars.

A block is a unit square: x runs along the row, y over the rows. The area without bars is padding.
Bars that are too narrow to see are merged and counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.core.plan import Plan
from evenstep.core.ragged import BoolArray, FloatArray, IntArray, divided_up, offsets_of, rounded_up


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """Bars within the unit square; `merged` counts the segments that share a bar."""

    left: FloatArray
    right: FloatArray
    top: FloatArray
    bottom: FloatArray
    length: FloatArray  # mean length of the segments in the bar, for its shade
    shared: BoolArray  # whether the bar is one segment that others see in front
    segments: int
    tokens: int
    merged: int

    def __len__(self) -> int:
        return len(self.left)


def bars_of(plan: Plan, micro: int, narrowest: float, thinnest: float) -> Bars:
    """The bars of a micro-batch; minimum width and height are fractions of the block."""
    first_row, last_row = plan.micro_offsets[micro : micro + 2]
    rows = plan.row_offsets[first_row : last_row + 1]
    segments = slice(int(rows[0]), int(rows[-1]))
    row_of = np.repeat(np.arange(len(rows) - 1), np.diff(rows))
    lengths = plan.segments.length[segments]
    offsets = offsets_of(rounded_up(lengths, plan.recipe.topology.alignment))
    starts = offsets[:-1] - offsets[(rows - rows[0])[row_of]]
    width, count = float(plan.widths[micro]), len(rows) - 1
    together = max(1, int(np.ceil(count * thinnest - 1e-9)))  # rows that share one line
    if together > 1:
        return _thin_rows(row_of, lengths, width, count, together)
    left, right = starts / width, (starts + lengths) / width
    shared = np.zeros(len(lengths), bool)
    if plan.segments.parent is not None:
        parent = plan.segments.parent[segments]
        shared[parent[parent >= 0]] = True
    group = _groups(left, right, row_of, narrowest)
    firsts = np.flatnonzero(np.diff(group, prepend=-1))
    lasts = np.append(firsts[1:], len(group)) - 1 if len(firsts) else firsts
    size = lasts - firsts + 1
    total = offsets_of(lengths)
    return Bars(
        left[firsts],
        right[lasts],
        row_of[firsts] / count,
        (row_of[firsts] + 1) / count,
        (total[lasts + 1] - total[firsts]) / np.maximum(size, 1),
        shared[firsts] & (size == 1),
        len(lengths),
        int(total[-1]),
        int(size[size > 1].sum()),
    )


def _groups(left: FloatArray, right: FloatArray, row_of: IntArray, narrowest: float) -> IntArray:
    """Number the bars; narrow neighbours in a row share one until it is wide enough."""
    group = np.zeros(len(left), np.int64)
    number, start = 0, 0
    for index in range(1, len(left)):
        same_row = row_of[index] == row_of[index - 1]
        tiny = right[index] - left[index] < narrowest
        unseen = right[index - 1] - left[start] < narrowest
        if not (same_row and tiny and unseen):
            number, start = number + 1, index
        group[index] = number
    return group


def _thin_rows(
    row_of: IntArray, lengths: IntArray, width: float, count: int, together: int
) -> Bars:
    """Draw several rows as one line, as wide as their mean."""
    line = row_of // together
    lines = divided_up(count, together)
    held = np.bincount(line, minlength=lines)
    tokens = np.bincount(line, weights=lengths, minlength=lines)
    rows = np.minimum(together, count - together * np.arange(lines))
    shown = held > 0
    top = np.arange(lines)[shown] * together / count
    share = (tokens / (rows * width))[shown]
    return Bars(
        np.zeros(len(share)),
        share,
        top,
        top + rows[shown] / count,
        tokens[shown] / held[shown],
        np.zeros(len(share), bool),
        len(lengths),
        int(lengths.sum()),
        len(lengths),
    )
