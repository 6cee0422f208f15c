"""Where the steps of a planned stream begin and end, over one epoch or several."""

from __future__ import annotations

from collections.abc import Iterator

from evenstep.data.streams.position import StreamPosition
from evenstep.data.streams.step_work import StepBounds, StepSource
from evenstep.errors import InputError


def bounds_of_epoch(
    steps: StepSource, at: StreamPosition, most: int | None = None
) -> Iterator[StepBounds]:
    """Every step of the rest of an epoch, up to `most` steps in all."""
    while most is None or at.step < most:
        found = steps.next_step(at)
        if found is None:
            return
        after = StreamPosition(at.epoch, at.position + found[0], at.step + 1)
        yield StepBounds(at, after, found[1])
        at = after


def bounds_of_all(
    steps: StepSource, at: StreamPosition, most: int | None, *, endless: bool
) -> Iterator[StepBounds]:
    """Every step of the rest of an epoch and, if `endless`, of those that follow."""
    while True:
        found_any = at.position > 0  # in the current epoch
        for bounds in bounds_of_epoch(steps, at, most):
            yield bounds
            at, found_any = bounds.after, True
        if not endless or at.step == most:
            return
        if not found_any:
            raise InputError(
                f"epoch {at.epoch} has no sample to run, so an endless stream cannot continue. "
                f"Add samples, or use another overflow than 'drop'."
            )
        at = StreamPosition(at.epoch + 1, 0, at.step)
