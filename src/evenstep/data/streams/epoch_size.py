"""EpochSize: the exact number of steps and micro-batches of an epoch of a planned stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from evenstep.data.streams.step_work import StepBounds, StepSource


@dataclass(frozen=True, slots=True)
class EpochSize:
    """Steps of an epoch and their micro-batches per rank. Both are the same on every rank."""

    steps: int
    micro_batches: int


def measure(
    source: StepSource,
    steps: Iterable[StepBounds],
    *,
    drop_last: bool = False,
    progress: Callable[[int], None] | None = None,
) -> EpochSize:
    """Count steps. Plans a step only if its number of micro-batches is not known otherwise.

    drop_last  does not count whole steps in which a rank has an empty micro-batch
    progress   called after each step with the units of the epoch that are done
    """
    count = micro_batches = 0
    for bounds in steps:
        found = None if drop_last else source.known_count(bounds)
        if found is None:
            work = source.work(bounds)
            short = (np.diff(work.plan.segment_offsets) == 0).any()
            left_out = drop_last and short and work.rest is None
            found = 0 if left_out else work.count
        count, micro_batches = count + (found > 0), micro_batches + found
        if progress is not None:
            progress(bounds.after.position)
    return EpochSize(count, micro_batches)
