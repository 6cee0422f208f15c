"""Which part of a step is drawn, and how high its lanes are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from evenstep.core.plan import Plan
from evenstep.core.ragged import FloatArray
from evenstep.report.numbers import count
from evenstep.report.timeline import Timeline

_MOST_RANKS = 64
_MOST_BLOCKS = 1024
_MOST_POSITIONS = 40  # more would be slivers


@dataclass(slots=True, eq=False)
class Panel:
    """A step of a plan, what is written over it, and what of it can be seen.

    With 1,024 ranks 64 are drawn; with 2,000 micro-batches per rank the first ones; `notes`
    says so.
    """

    plan: Plan
    line: Timeline
    heading: str
    detail: str
    ranks: list[int] = field(init=False)
    positions: int = field(init=False)
    span: float = field(init=False)  # the cost from the left end to the right end
    height: float = field(init=False)
    waits: FloatArray = field(init=False)  # ranks × positions: after each micro-batch

    def __post_init__(self) -> None:
        self.ranks = _choose_ranks(self.line)
        every = self.line.micro.shape[1]
        self.positions = min(every, _MOST_POSITIONS, max(4, _MOST_BLOCKS // len(self.ranks)))
        if self.whole:
            self.span = self.line.end
        elif self.line.lock_step:
            self.span = float(self.line.barriers[self.positions - 1])
        else:
            last = self.positions - 1
            self.span = float((self.line.starts[:, last] + self.line.costs[:, last]).max())
        self.height = min(34.0, max(11.0, 420 / len(self.ranks)))
        ends = self.line.starts + self.line.costs
        if self.line.lock_step:
            self.waits = self.line.barriers - ends
        else:
            self.waits = np.zeros_like(ends)
            if self.whole:
                self.waits[:, -1] = self.span - ends[:, -1]

    @property
    def whole(self) -> bool:
        """Whether every micro-batch of the ranks shown is drawn."""
        return self.positions == int(self.line.micro.shape[1])

    @property
    def pitch(self) -> float:
        """From the top of one lane to the top of the next."""
        return self.height + (4 if self.height > 16 else 2)

    @property
    def blocks(self) -> int:
        """Micro-batches drawn."""
        return len(self.ranks) * self.positions

    @property
    def segments(self) -> slice:
        """The segments of the step in the plan."""
        offsets, micro = self.plan.segment_offsets, self.line.micro
        return slice(int(offsets[micro.min()]), int(offsets[micro.max() + 1]))

    def notes(self) -> list[str]:
        """What is not drawn."""
        ranks, positions = self.line.micro.shape
        notes = []
        if len(self.ranks) < ranks:
            notes.append(
                f"{len(self.ranks)} of {count(ranks)} ranks are shown: evenly spaced ones, and "
                f"the busiest."
            )
        if not self.whole:
            notes.append(
                f"{self.heading}: the first {self.positions} of {count(positions)} micro-batches "
                f"per rank are shown."
            )
        return notes


def _choose_ranks(line: Timeline) -> list[int]:
    ranks = len(line.micro)
    if ranks <= _MOST_RANKS:
        return list(range(ranks))
    chosen = {index * ranks // _MOST_RANKS for index in range(_MOST_RANKS)}
    busiest = int(line.busy.argmax())
    if busiest not in chosen:
        nearest = min(chosen, key=lambda rank: (abs(rank - busiest), rank))
        chosen = (chosen - {nearest}) | {busiest}
    return sorted(chosen)
