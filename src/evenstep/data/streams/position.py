"""StreamPosition: where a planned stream is, as an epoch and a position in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenstep.errors import CursorError


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Before unit `position` of `epoch`, after `step` steps. Independent of ranks and workers.

    `inside` is for callers that take single micro-batches and may stop within a step. It holds
    (ranks, micro-batches done by each rank) for every number of ranks that has worked on the
    next step.

    >>> StreamPosition(epoch=1, position=24, step=9).to_dict()
    {'epoch': 1, 'position': 24}
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    inside: tuple[tuple[int, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without `step`, which the cursor holds."""
        data: dict[str, Any] = {"epoch": self.epoch, "position": self.position}
        return {**data, "inside": [list(pair) for pair in self.inside]} if self.inside else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], step: int) -> StreamPosition:
        """The inverse of `to_dict`."""
        try:
            inside = tuple((int(ranks), int(done)) for ranks, done in data.get("inside", ()))
            return cls(int(data["epoch"]), int(data["position"]), step, inside)
        except (KeyError, TypeError, ValueError) as error:
            raise CursorError(
                f"the position {dict(data)!r} in the cursor is malformed ({error!r}). Use an "
                f"earlier checkpoint."
            ) from None

    def within(self, ranks: int, done: int) -> StreamPosition:
        """The same step, after each of `ranks` ranks has done `done` micro-batches of it."""
        before = self.inside[:-1] if self.inside and self.inside[-1][0] == ranks else self.inside
        return StreamPosition(self.epoch, self.position, self.step, (*before, (ranks, done)))
