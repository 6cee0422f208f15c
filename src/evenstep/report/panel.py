"""Choose the ranks and micro-batches of a step to draw, and the height of a rank's line."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from evenstep.core.plan import Plan
from evenstep.core.ragged import FloatArray
from evenstep.report.numbers import count
from evenstep.report.timeline import Timeline

_MOST_RANKS = 64
_MOST_BLOCKS = 1024
_MOST_WAVES = 40  # more would be too narrow to see


@dataclass(slots=True, eq=False)
class Panel:
    """A step of a plan with its heading, and the ranks and waves to draw.

    At most 64 ranks and the first 40 waves are drawn; `notes` names what is left out.
    """

    plan: Plan
    line: Timeline
    heading: str
    detail: str
    ranks: list[int] = field(init=False)
    waves: int = field(init=False)  # the first ones
    span: float = field(init=False)  # cost from the left end to the right end
    height: float = field(init=False)
    waits: FloatArray = field(init=False)  # ranks × waves: the wait after each micro-batch

    def __post_init__(self) -> None:
        self.ranks = _choose_ranks(self.line)
        every = self.line.micro.shape[1]
        self.waves = min(every, _MOST_WAVES, max(4, _MOST_BLOCKS // len(self.ranks)))
        if self.whole:
            self.span = self.line.end
        elif self.line.lock_step:
            self.span = float(self.line.barriers[self.waves - 1])
        else:
            last = self.waves - 1
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
        """Whether every micro-batch of the chosen ranks is drawn."""
        return self.waves == int(self.line.micro.shape[1])

    @property
    def pitch(self) -> float:
        """The distance between the tops of two neighbouring lines."""
        return self.height + (4 if self.height > 16 else 2)

    @property
    def blocks(self) -> int:
        """The number of micro-batches drawn."""
        return len(self.ranks) * self.waves

    @property
    def segments(self) -> slice:
        """The plan's segments that belong to this step."""
        offsets, micro = self.plan.segment_offsets, self.line.micro
        return slice(int(offsets[micro.min()]), int(offsets[micro.max() + 1]))

    def notes(self) -> list[str]:
        """One sentence for each thing that is left out."""
        ranks, waves = self.line.micro.shape
        notes = []
        if len(self.ranks) < ranks:
            notes.append(
                f"Shows {len(self.ranks)} of {count(ranks)} ranks, evenly spaced, including the "
                f"busiest."
            )
        if not self.whole:
            notes.append(
                f"{self.heading}: shows the first {self.waves} of {count(waves)} micro-batches per "
                f"rank."
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
