"""MicroBatch: the rows of one forward and backward pass."""

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

    An empty micro-batch has no segments. It has weight zero and is for ranks without work.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> (micro,) = plan[0, 0]
    >>> micro.segments.sample.tolist(), micro.rows, micro.width
    ([0, 1], 1, 8)
    """

    segments: Segments
    row_offsets: IntArray
    width: int
    sample_lengths: IntArray
    """The full length of each segment's sample, to detect samples that do not match the plan."""
    alignment: int = 1
    truncated_to: IntArray | None = None
    """The length of each segment's sample after truncation; None if no sample is truncated."""

    @property
    def rows(self) -> int:
        """The number of rows, including empty ones."""
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
        """Where each segment's sample ends in this plan: its length, also after truncation.

        A segment that ends earlier is one of several; its sample continues elsewhere in the step.
        """
        return self.sample_lengths if self.truncated_to is None else self.truncated_to

    @property
    def placement(self) -> Placement:
        """Where each segment is in the flattened rows."""
        return place(self.segments.length, self.row_offsets, self.width, self.alignment)

    @property
    def is_empty(self) -> bool:
        """Whether it has no segments."""
        return len(self.segments) == 0

    def without(self, samples: Sequence[int]) -> MicroBatch:
        """The same rows and width without these samples; their slots become padding."""
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
        """The same with sample i numbered `numbers[i]`, for example with its id in a source."""
        segments = self.segments
        named = Segments(numbers[segments.sample], segments.start, segments.length)
        return replace(self, segments=named)

    def halves(self) -> tuple[MicroBatch, MicroBatch]:
        """Two micro-batches of about half the tokens each.

        The second is empty if there are fewer than two segments. Padded rows keep their width;
        packed rows are as wide as needed.
        """
        count = len(self.segments)
        if count < 2:
            return self, self._some(slice(count, count))
        done = np.cumsum(self.segments.length)
        half = int(np.searchsorted(done, done[-1] / 2)) + 1
        half = min(max(half, 1), count - 1)
        return self._some(slice(0, half)), self._some(slice(half, count))

    def _some(self, chosen: slice) -> MicroBatch:
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
    """The ids of the samples in these micro-batches, ascending and unique."""
    none = np.empty(0, np.int64)
    return np.unique(np.concatenate([none, *(micro.segments.sample for micro in micro_batches)]))
