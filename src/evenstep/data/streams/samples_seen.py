"""SamplesSeen: how many items make a micro-batch, counted while a pooled stream runs."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.core.ragged import MOST_ITEMS
from evenstep.core.step import Step

_ENOUGH = 8  # micro-batches before the count is used


@dataclass(slots=True)
class SamplesSeen:
    """Items and micro-batches so far. Items that were dropped or skipped count, too."""

    items: int = 0
    micro_batches: int = 0

    def add(self, step: Step) -> None:
        """Count a step."""
        for micro in step.micro_batches:
            if not micro.is_empty:
                found = micro.segments
                self.items += int(((found.start == 0) & (found.sample < MOST_ITEMS)).sum())
                self.micro_batches += 1
        self.items += sum(step.lost.get(reason, 0) for reason in ("dropped", "skipped"))

    def micro_batches_of(self, items: int) -> float | None:
        """The number of micro-batches that so many items make; None if too few were seen.

        >>> SamplesSeen(items=100, micro_batches=25).micro_batches_of(1000)
        250.0
        """
        if self.micro_batches < _ENOUGH or not self.items:
            return None
        return items * self.micro_batches / self.items
