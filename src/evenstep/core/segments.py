"""Segments: contiguous parts of samples that are never divided again."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.core.ragged import IntArray, frozen


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Columns of equal length: segment i is `length[i]` tokens of `sample[i]` from `start[i]`.

    >>> s = Segments(sample=[0, 1, 1], start=[0, 0, 8], length=[5, 8, 3])
    >>> len(s), s.length.tolist()
    (3, [5, 8, 3])
    """

    sample: IntArray
    start: IntArray
    length: IntArray

    def __post_init__(self) -> None:
        for name in ("sample", "start", "length"):
            object.__setattr__(self, name, frozen(getattr(self, name)))
        assert len(self.sample) == len(self.start) == len(self.length), (
            "columns must have equal length"
        )

    def __len__(self) -> int:
        return len(self.sample)

    def take(self, index: IntArray | slice) -> Segments:
        """The segments at `index`, in that order."""
        return Segments(self.sample[index], self.start[index], self.length[index])
