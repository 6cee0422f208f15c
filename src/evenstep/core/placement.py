"""Placement: where segments and padding lie in the flattened rows of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.core.ragged import IntArray, offsets_of
from evenstep.core.rounding import rounded_up


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Pieces that tile rows * width slots: each segment with its alignment, and the tail of each
    row as one piece of its own.

    `offsets[i]` is where piece i starts, `real[i]` how many of its slots hold tokens (0 for a
    tail), and `segment[i]` which segment it is (-1 for a tail).
    """

    offsets: IntArray
    real: IntArray
    segment: IntArray

    @property
    def slots(self) -> IntArray:
        """The slots of each piece, padding included."""
        return np.diff(self.offsets)


def place(lengths: IntArray, row_offsets: IntArray, width: int, alignment: int) -> Placement:
    """Lay segments end to end in their rows, each rounded up to the alignment.

    lengths [3, 2] in one row of 8 -> offsets [0, 3, 5, 8], real [3, 2, 0], segment [0, 1, -1]
    """
    slots = lengths if alignment == 1 else rounded_up(lengths, alignment)
    number = np.arange(len(lengths))
    if len(row_offsets) == 2:
        tail = width - int(slots.sum())
        if tail:
            slots = np.concatenate((slots, (tail,)))
            lengths, number = np.concatenate((lengths, (0,))), np.concatenate((number, (-1,)))
    else:
        used = np.diff(offsets_of(slots)[row_offsets])
        short = used < width
        at = row_offsets[1:][short]
        slots = np.insert(slots, at, (width - used)[short])
        lengths, number = np.insert(lengths, at, 0), np.insert(number, at, -1)
    return Placement(offsets_of(slots), lengths, number)
