"""TokenBuffer: samples in order of arrival, taken out in micro-batches of a token budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from evenstep.data.sources.source import Sample
from evenstep.planning.pool import Room, select


class Buffered(NamedTuple):
    """A sample, the tokens of it that the budget counts, and all its tokens."""

    sample: Sample
    length: int
    physical: int


@dataclass(slots=True)
class TokenBuffer:
    """Samples that wait for a micro-batch, oldest first.

    A micro-batch is the oldest sample and, in order, each that still fits: counted tokens within
    the budget and all tokens within the cap. The oldest is taken however long it is.

    >>> buffer = TokenBuffer([Buffered(name, n, n) for name, n in zip("abcd", (3, 6, 2, 4))])
    >>> [one.sample for one in buffer.take(6)], buffer.tokens
    (['a', 'c'], 10)
    """

    waiting: list[Buffered] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Counted tokens of the waiting samples."""
        return sum(one.length for one in self.waiting)

    @property
    def physical(self) -> int:
        """All tokens of the waiting samples."""
        return sum(one.physical for one in self.waiting)

    def ready(self, samples: int, budget: int, cap: int | None = None) -> bool:
        """Whether there are enough samples, and enough tokens for the budget or for the cap."""
        if len(self.waiting) < samples:
            return False
        return self.tokens >= budget or (cap is not None and self.physical >= cap)

    def take(self, budget: int, cap: int | None = None) -> list[Buffered]:
        """Remove the next micro-batch."""
        lengths = np.array([one.length for one in self.waiting], np.int64)
        physical = np.array([one.physical for one in self.waiting], np.int64)
        chosen = select("greedy", lengths, Room(capacity=budget, counted=cap), physical).tolist()
        taken = [self.waiting[at] for at in chosen]
        gone = set(chosen)
        self.waiting = [one for at, one in enumerate(self.waiting) if at not in gone]
        return taken
