"""MicroBatch: what one forward and backward sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from evenstep.core.placement import Placement, place
from evenstep.core.ragged import IntArray
from evenstep.core.rounding import rounded_up
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
    truncated_to: IntArray | None = None
    """What truncation leaves of each segment's sample; None where all run to their end."""

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
    def sample_ends(self) -> IntArray:
        """Where each segment's sample ends in this plan: its length, or what truncation leaves of
        it. A segment that ends earlier was split off, and its sample goes on elsewhere in the
        step."""
        return self.sample_lengths if self.truncated_to is None else self.truncated_to

    @property
    def placement(self) -> Placement:
        """Where each segment lies in the flattened rows."""
        return place(self.segments.length, self.row_offsets, self.width, self.alignment)

    @property
    def is_empty(self) -> bool:
        """Whether no segment is in it."""
        return len(self.segments) == 0

    def without(self, samples: Sequence[int]) -> MicroBatch:
        """The same rows and width without these samples: what they took is padding."""
        keep = np.isin(self.segments.sample, np.asarray(samples, np.int64), invert=True)
        kept_before = np.concatenate(([0], np.cumsum(keep)))
        return replace(
            self,
            segments=self.segments.take(np.flatnonzero(keep)),
            row_offsets=kept_before[self.row_offsets],
            sample_lengths=self.sample_lengths[keep],
            truncated_to=self.sample_ends[keep],
        )

    def renumbered(self, numbers: IntArray) -> MicroBatch:
        """The same with sample i called `numbers[i]`: from a window's count to the source's."""
        segments = self.segments
        named = Segments(numbers[segments.sample], segments.start, segments.length)
        return replace(self, segments=named)

    def halves(self) -> tuple[MicroBatch, MicroBatch]:
        """Two micro-batches of about half the tokens each; the second is a dummy where there is
        one segment or none. Padded rows keep their width, packed rows are as wide as they need."""
        count = len(self.segments)
        if count < 2:
            return self, self._part(slice(count, count))
        done = np.cumsum(self.segments.length)
        half = int(np.searchsorted(done, done[-1] / 2)) + 1
        half = min(max(half, 1), count - 1)
        return self._part(slice(0, half)), self._part(slice(half, count))

    def _part(self, chosen: slice) -> MicroBatch:
        """Some of the segments, in the same kind of rows."""
        per_row = np.diff(self.row_offsets)
        count = chosen.stop - chosen.start
        padded = len(per_row) > 1 and int(per_row.max(initial=0)) <= 1
        width, offsets = self.width, np.arange(count + 1)
        if not padded or count == 0:
            aligned = rounded_up(self.segments.length[chosen], self.alignment)
            width, offsets = max(int(aligned.sum()), self.alignment), np.array([0, count])
        return replace(
            self,
            segments=self.segments.take(chosen),
            row_offsets=offsets,
            width=width,
            sample_lengths=self.sample_lengths[chosen],
            truncated_to=self.sample_ends[chosen],
        )


def samples_of(micro_batches: Iterable[MicroBatch]) -> IntArray:
    """The ids of the samples in these micro-batches, ascending, each once."""
    none = np.empty(0, np.int64)
    return np.unique(np.concatenate([none, *(micro.segments.sample for micro in micro_batches)]))
