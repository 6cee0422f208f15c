"""Cut: how over-long samples become segments. A cursor holds it, so that the budget may change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from evenstep.core.recipe import Overflow
from evenstep.planning.overflow import refused, segments_of


class Piece(NamedTuple):
    """Tokens of a sample that are one segment, or will be cut into several."""

    start: int
    length: int
    end: int
    """Where the sample ends after truncation; its length if it was not truncated."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Segments of at most `longest` tokens (None: of any length), by the policy `overflow`.

    >>> Cut(8, "split").segments(20)
    [(0, 8), (8, 8), (16, 4)]
    """

    longest: int | None
    overflow: Overflow

    def segments(self, length: int) -> list[tuple[int, int]] | None:
        """(start, length) of each segment of a sample; [] if it is dropped, None if refused."""
        if self.longest is None or length <= self.longest:
            return [(0, length)]
        lengths = np.array([length], np.int64)
        if len(refused(lengths, self.longest, self.overflow)):
            return None
        found, _ = segments_of(lengths, self.longest, self.overflow)
        return list(zip(found.start.tolist(), found.length.tolist(), strict=True))

    def again(self, piece: Piece) -> list[Piece] | None:
        """A piece of a sample that was cut in another way; [] if it is dropped, None if refused.

        >>> Cut(6, "split").again(Piece(8, 8, 20))
        [Piece(start=8, length=6, end=20), Piece(start=14, length=2, end=20)]
        """
        segments = self.segments(piece.length)
        if segments is None:
            return None
        kept = sum(length for _, length in segments)
        end = piece.end if kept == piece.length else piece.start + kept
        return [Piece(piece.start + start, length, end) for start, length in segments]

    def to_list(self) -> list[Any]:
        """Plain data."""
        return [self.longest, self.overflow]

    @classmethod
    def from_list(cls, data: Any) -> Cut:
        """The inverse of `to_list`."""
        longest, overflow = data
        return cls(None if longest is None else int(longest), cast("Overflow", str(overflow)))


def pieces_of(cut: Cut, length: int) -> dict[int, Piece]:
    """The pieces of a sample of this length by start; none if it is dropped or refused.

    >>> pieces_of(Cut(8, "truncate"), 20)
    {0: Piece(start=0, length=8, end=8)}
    """
    segments = cut.segments(length) or []
    end = sum(size for _, size in segments)
    return {start: Piece(start, size, end) for start, size in segments}
