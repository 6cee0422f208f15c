"""Report: everything that the page about a plan or a run shows, and the same as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from evenstep.core.measures import step_imbalances
from evenstep.core.plan import Plan
from evenstep.core.ragged import FloatArray, sum_by
from evenstep.report.charts import Bins, Thinned
from evenstep.report.comparison import Entry, padding_removed, time_saved
from evenstep.report.run_log import RunLog, typical_error
from evenstep.report.suggestions import Advice


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Report:
    """A plan, strategies to compare it with, and what training runs measured.

    entries  strategies on the same samples or on a part of them; the first is compared with
    own      the name of the strategy that `plan` is made with, in entries and runs
    runs     logs of runs, by the name of their strategy
    notes    sentences about what is not shown

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> Report(title="Two samples", plan=plan).numbers()["plan"]["tokens"]
    8
    """

    title: str
    plan: Plan
    own: str = "your settings"
    entries: Sequence[Entry] = ()
    runs: Mapping[str, RunLog] = field(default_factory=dict)
    advice: Sequence[Advice] = ()
    notes: Sequence[str] = ()
    stats: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", self.plan.stats())

    @property
    def log(self) -> RunLog | None:
        """The log of the run with the plan."""
        return self.runs.get(self.own)

    @property
    def saving(self) -> Saving | None:
        """What the plan saves compared with the first strategy."""
        return Saving.of(list(self.entries), self.own, self.log, self.plan)

    def fill(self) -> Thinned:
        """The share of slots that are tokens, per step."""
        plan = self.plan
        step = plan.cell_of_micro_batch // plan.num_ranks
        slots = sum_by(step, plan.slots, plan.num_steps)
        return self._over_steps(sum_by(step, plan.tokens, plan.num_steps) / np.maximum(slots, 1))

    def imbalance(self) -> Thinned:
        """Time of the slowest rank over the mean, per step."""
        return self._over_steps(step_imbalances(self.plan))

    def _over_steps(self, values: FloatArray) -> Thinned:
        return Thinned.of(np.arange(len(values), dtype=np.float64), values)

    def numbers(self) -> dict[str, Any]:
        """Everything that the page shows, as plain data of bounded size."""
        bins, saving = Bins.of(self.plan.lengths), self.saving
        return {
            "title": self.title,
            "plan": self.stats,
            "recipe": self.plan.recipe.to_dict(),
            "lengths": {name: getattr(bins, name).tolist() for name in Bins.__slots__},
            "steps": {
                "fill": _plain(self.fill()),
                "imbalance": _plain(self.imbalance()),
            },
            "strategies": [_strategy(entry, self.entries[0]) for entry in self.entries],
            "saving": None if saving is None else asdict(saving),
            "runs": {name: self._run(log) for name, log in self.runs.items()},
            "advice": [asdict(each) for each in self.advice],
            "notes": list(self.notes),
        }

    def _run(self, log: RunLog) -> dict[str, Any]:
        planned, measured = log.step_times(self.plan.recipe.sync_every)
        every = {
            "loss": log.loss,
            "tokens_per_second": log.tokens_per_second,
            "imbalance_planned": log.planned,
            "imbalance_measured": log.measured,
            "seconds_planned": planned,
            "seconds_measured": measured,
        }
        return {
            "steps": len(log),
            "seconds": float(np.nansum(log.seconds)),
            "tokens_per_second": _finite(log.per_second()),
            "last_loss": _finite(float(log.loss[-1])) if len(log) else None,
            "waiting_for_data": _finite(log.waiting_share()),
            "time_error": _finite(typical_error(*log.micro_batches())),
            "over_steps": {name: _plain(Thinned.of(log.step, v)) for name, v in every.items()},
        }


def _strategy(entry: Entry, first: Entry) -> dict[str, Any]:
    if entry.plan is None:
        return {"name": entry.name, "fault": entry.fault}
    return {
        "name": entry.name,
        "modelled_time": entry.modelled_time,
        **entry.parts._asdict(),
        "times_less_time": time_saved(entry, first),
        "padding_ratio": entry.stats["padding_ratio"],
        "padding_removed": padding_removed(entry, first),
        "num_samples": entry.stats["num_samples"],
    }


def _plain(line: Thinned) -> dict[str, list[float]]:
    return {name: [float(f"{v:.6g}") for v in getattr(line, name)] for name in Thinned.__slots__}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
