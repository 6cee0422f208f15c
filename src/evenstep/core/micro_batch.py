"""MicroBatch: the rows of one forward and backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from evenstep.core.placement import Placement, place
from evenstep.core.ragged import IntArray, by_first_appearance, sum_by
from evenstep.core.rounding import rounded_up
from evenstep.core.segments import Segments
from evenstep.errors import InputError


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
    groups: IntArray | None = None
    """The group of each segment, if the plan keeps groups in one micro-batch; else None."""
    width_unit: int = 1
    """Widths are multiples of this (`Recipe.width_unit`)."""

    @classmethod
    def one_row(cls, lengths: Sequence[int], width: int | None = None) -> MicroBatch:
        """Whole samples 0, 1, ... in order, end to end in one row of this width (default: as wide
        as they are).

        >>> MicroBatch.one_row([3, 2], width=8).placement.offsets.tolist()
        [0, 3, 5, 8]
        """
        length = np.asarray(lengths, np.int64)
        number, start = np.arange(len(length)), np.zeros_like(length)
        used = int(length.sum())
        found = max(used, 1) if width is None else width
        if found < used:
            raise InputError(
                f"a row of {found} slots cannot hold {used} tokens. Use at least {used}, or fewer "
                f"samples."
            )
        return cls(Segments(number, start, length), np.array([0, len(length)]), found, length)

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
            groups=None if self.groups is None else self.groups[keep],
        )

    def renumbered(self, numbers: IntArray) -> MicroBatch:
        """The same with sample i numbered `numbers[i]`, for example with its id in a source."""
        segments = self.segments
        named = Segments(numbers[segments.sample], segments.start, segments.length)
        return replace(self, segments=named)

    @property
    def parts(self) -> IntArray:
        """The part of each segment that stays together: its group, or the segment alone.

        Parts are numbered by first appearance: groups [7, 3, 7] -> [0, 1, 0].
        """
        if self.groups is None:
            return np.arange(len(self.segments))
        return by_first_appearance(self.groups)[0]

    def halves(self) -> tuple[MicroBatch, MicroBatch]:
        """Two micro-batches of about half the slots each, with groups whole.

        The second is empty if there are fewer than two parts. Padded rows keep their width; packed
        rows are as wide as needed.
        """
        part, count = self.parts, int(self.parts.max(initial=-1)) + 1
        if count < 2:
            return self, self._some(np.empty(0, np.int64))
        size = rounded_up(self.segments.length, self.alignment)
        done = np.cumsum(sum_by(part, np.ones(len(part)) if self._padded else size, count))[:-1]
        total = len(part) if self._padded else int(size.sum())
        first = part <= int(np.argmin(np.maximum(done, total - done)))
        return self._some(np.flatnonzero(first)), self._some(np.flatnonzero(~first))

    @property
    def _padded(self) -> bool:
        """Whether it has several rows of at most one segment each."""
        return self.rows > 1 and int(np.diff(self.row_offsets).max()) <= 1

    def _some(self, chosen: IntArray) -> MicroBatch:
        """The segments at `chosen`, in the same kind of rows."""
        count = len(chosen)
        width, offsets = self.width, np.arange(count + 1)
        if not self._padded or count == 0:
            slots = int(rounded_up(self.segments.length[chosen], self.alignment).sum())
            unit = math.lcm(self.width_unit, self.alignment)
            width, offsets = max(rounded_up(slots, unit), unit), np.array([0, count])
        return replace(
            self,
            segments=self.segments.take(chosen),
            row_offsets=offsets,
            width=width,
            sample_lengths=self.sample_lengths[chosen],
            truncated_to=self.sample_ends[chosen],
            groups=None if self.groups is None else self.groups[chosen],
        )


def samples_of(micro_batches: Iterable[MicroBatch]) -> IntArray:
    """The ids of the samples in these micro-batches, ascending and unique."""
    none = np.empty(0, np.int64)
    return np.unique(np.concatenate([none, *(micro.segments.sample for micro in micro_batches)]))
