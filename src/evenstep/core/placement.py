"""Placement: where segments and padding are in the flattened rows of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.core.ragged import IntArray, offsets_of
from evenstep.core.rounding import rounded_up


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Tiles that cover all rows * width slots: one per segment with its alignment, and one for the
    padding at the end of each row.

    Tile i starts at `offsets[i]`, its first `real[i]` slots hold tokens (0 for padding), and it
    is segment `segment[i]` (-1 for padding).
    """

    offsets: IntArray
    real: IntArray
    segment: IntArray

    @property
    def slots(self) -> IntArray:
        """The slots of each tile, padding included."""
        return np.diff(self.offsets)


def place(lengths: IntArray, row_offsets: IntArray, width: int, alignment: int) -> Placement:
    """Put segments end to end into their rows, each rounded up to the alignment.

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
