"""MicroBatch: what one forward and backward sees."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.core.placement import Placement, place
from evenstep.core.ragged import IntArray
from evenstep.core.segments import Segments


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows times width. Row i holds `segments[row_offsets[i]:row_offsets[i + 1]]`, end to end.

    A dummy holds no segment at all: it keeps ranks in step and weighs nothing.
    """

    segments: Segments
    row_offsets: IntArray
    width: int
    sample_lengths: IntArray
    """The whole length of each segment's sample, to notice samples that are not the plan's."""
    alignment: int = 1

    @property
    def rows(self) -> int:
        """How many rows there are, empty ones included."""
        return len(self.row_offsets) - 1

    @property
    def slots(self) -> int:
        """Real tokens plus padding."""
        return self.rows * self.width

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return int(self.segments.length.sum())

    @property
    def placement(self) -> Placement:
        """Where each segment lies in the flattened rows."""
        return place(self.segments.length, self.row_offsets, self.width, self.alignment)

    @property
    def is_dummy(self) -> bool:
        """Whether no segment is in it."""
        return len(self.segments) == 0
