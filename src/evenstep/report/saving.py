"""Saving: what a plan saves compared with another strategy, in slots, time and GPU-hours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.core.plan import Plan
from evenstep.report.comparison import Entry
from evenstep.report.run_log import RunLog


@dataclass(frozen=True, slots=True)
class Saving:
    """Compared with `than`: how many times less time, and how many slots are not computed.

    `gpu_hours` is estimated: the time of the run, scaled by the modelled times. None if there is
    no run, or if it was not timed.
    """

    than: str
    times_less_time: float
    slots: int
    gpu_hours: float | None

    @classmethod
    def of(cls, entries: list[Entry], own: str, log: RunLog | None, plan: Plan) -> Saving | None:
        """The saving of the entry `own` over the first; None if one of them has no plan.

        The entries may hold a part of the samples of `plan`; slots are scaled to all of them.
        """
        found = {entry.name: entry for entry in entries if entry.plan is not None}
        if not entries or own not in found or entries[0].name not in found:
            return None
        first, mine = entries[0], found[own]
        if first is mine or not mine.modelled_time:
            return None
        ratio = first.modelled_time / mine.modelled_time
        scale = int(plan.tokens.sum()) / max(1, int(mine.stats["tokens"]))
        slots = scale * (int(first.stats["slots"]) - int(mine.stats["slots"]))
        seconds = 0.0 if log is None else float(np.nansum(log.seconds))
        hours = devices(plan) * seconds / 3600 * (ratio - 1) if seconds else None
        return cls(first.name, ratio, round(slots), hours)


def devices(plan: Plan) -> int:
    """The devices that run a plan."""
    topology = plan.recipe.topology
    return topology.dp * topology.cp * topology.tp * topology.pp
