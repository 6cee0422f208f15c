"""StreamPosition: where a planned stream is. An epoch and a position, and no rank or worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenstep.errors import CursorError


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Before unit `position` of `epoch`, with `step` steps done.

    `inside` is for whoever takes micro-batches one by one and stops within a step: pairs of
    (ranks, micro-batches that each of them has done), one pair for every number of ranks that
    worked on the coming step so far.
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    inside: tuple[tuple[int, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without `step`, which the cursor has."""
        place: dict[str, Any] = {"epoch": self.epoch, "position": self.position}
        return {**place, "inside": [list(pair) for pair in self.inside]} if self.inside else place

    @classmethod
    def from_dict(cls, place: Mapping[str, Any], step: int) -> StreamPosition:
        """The inverse of `to_dict`."""
        try:
            inside = tuple((int(ranks), int(done)) for ranks, done in place.get("inside", ()))
            return cls(int(place["epoch"]), int(place["position"]), step, inside)
        except (KeyError, TypeError, ValueError) as error:
            raise CursorError(
                f"the cursor's place {dict(place)!r} cannot be read ({error!r}), so it marks none. "
                f"Use an earlier checkpoint."
            ) from None

    def within(self, ranks: int, done: int) -> StreamPosition:
        """The same step with `done` micro-batches done on each of `ranks` ranks by now."""
        before = self.inside[:-1] if self.inside and self.inside[-1][0] == ranks else self.inside
        return StreamPosition(self.epoch, self.position, self.step, (*before, (ranks, done)))
