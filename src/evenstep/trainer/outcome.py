"""Outcome: how a training run ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended.

    steps     steps of the whole run that are done
    loss      the loss of the last step that was not skipped; None if no step was run
    stopped   whether a signal ended it before the last step
    skipped   steps of the whole run that were skipped because they were not finite
    seconds   of this call
    saving    seconds of these that checkpoints took
    overhead  share of the time of steps, without checkpoints, that is neither forward, backward
              nor optimizer; None if there was one step only
    """

    steps: int
    loss: float | None
    stopped: bool
    skipped: int
    seconds: float
    saving: float
    overhead: float | None
