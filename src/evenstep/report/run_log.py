"""RunLog: what the steps of a training run measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenstep.core.measures import slowest
from evenstep.core.ragged import FloatArray
from evenstep.core.recipe import SyncEvery

_COLUMNS = {
    "step": "step",
    "loss": "loss",
    "tokens_per_second": "tokens_per_second",
    "padding": "padding",
    "planned": "imbalance/planned",
    "measured": "imbalance/measured",
    "seconds": "seconds/total",
    "waiting": "seconds/wait",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunLog:
    """One value per step, NaN where a step has none; costs and busy seconds by rank.

    The first step of a run loads and compiles; `steady` leaves it out.

    >>> log = RunLog.of([{"step": 0, "loss": 2.5, "seconds/total": 0.5}])
    >>> log.loss.tolist(), log.seconds.tolist()
    ([2.5], [0.5])
    """

    step: FloatArray
    loss: FloatArray
    tokens_per_second: FloatArray
    padding: FloatArray
    planned: FloatArray
    """Planned imbalance."""
    measured: FloatArray
    """Measured imbalance."""
    seconds: FloatArray
    waiting: FloatArray
    """Seconds of these that rank 0 waited for data."""
    costs: Sequence[FloatArray]
    """Planned cost of every micro-batch: ranks × micro-batches, per step."""
    busy: Sequence[FloatArray]
    """Busy seconds of the same micro-batches."""
    work: Sequence[FloatArray]
    """Tokens, squared lengths and segments of the same: ranks × micro-batches × 3."""

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> RunLog:
        """The log with these records, as `log.jsonl` of the trainer has them."""
        columns = {
            name: np.array([_number(record.get(key)) for record in records], np.float64)
            for name, key in _COLUMNS.items()
        }
        tables = [_tables(record) for record in records]
        costs, busy, work = ([each[at] for each in tables] for at in range(3))
        return cls(**columns, costs=costs, busy=busy, work=work)

    def __len__(self) -> int:
        return len(self.step)

    @property
    def steady(self) -> slice:
        """All steps but the first, unless there is only one."""
        return slice(1 if len(self) > 1 else 0, len(self))

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of the last step; 1 if it is not known."""
        return max(1, len(self.busy[-1])) if len(self.busy) else 1

    def per_second(self) -> float:
        """Tokens per second over the steady steps; NaN if they were not timed."""
        seconds, speed = self.seconds[self.steady], self.tokens_per_second[self.steady]
        return float((seconds * speed).sum() / seconds.sum()) if seconds.sum() > 0 else np.nan

    def waiting_share(self) -> float:
        """The share of the steady steps that rank 0 waited for data."""
        seconds = self.seconds[self.steady].sum()
        return float(np.nansum(self.waiting[self.steady]) / seconds) if seconds > 0 else np.nan

    def seconds_per_cost(self) -> float:
        """Busy seconds divided by planned cost, over the steady steps; NaN without both."""
        pairs = list(zip(self.costs, self.busy, strict=True))[self.steady]
        cost = sum(float(costs.sum()) for costs, _ in pairs)
        return sum(float(busy.sum()) for _, busy in pairs) / cost if cost > 0 else np.nan

    def step_times(self, sync_every: SyncEvery) -> tuple[FloatArray, FloatArray]:
        """(planned, measured) seconds of the slowest rank of each step. Planned seconds are costs
        times `seconds_per_cost`."""
        planned = np.array([_slowest(costs, sync_every) for costs in self.costs])
        measured = np.array([_slowest(busy, sync_every) for busy in self.busy])
        return planned * self.seconds_per_cost(), measured

    def micro_batches(self) -> tuple[FloatArray, FloatArray]:
        """(planned, measured) seconds of every micro-batch of the steady steps that has work."""
        pairs = list(zip(self.costs, self.busy, strict=True))[self.steady]
        costs = np.concatenate([costs.ravel() for costs, _ in pairs] or [np.zeros(0)])
        busy = np.concatenate([busy.ravel() for _, busy in pairs] or [np.zeros(0)])
        some = (costs > 0) & (busy > 0)
        return costs[some] * self.seconds_per_cost(), busy[some]

    def rank_speeds(self) -> FloatArray:
        """Busy seconds of each rank over those planned, in the steady steps; empty if unknown."""
        pairs = list(zip(self.costs, self.busy, strict=True))[self.steady]
        same = [pair for pair in pairs if len(pair[0]) == self.ranks]
        cost = sum((costs.sum(axis=1) for costs, _ in same), np.zeros(self.ranks))
        busy = sum((busy.sum(axis=1) for _, busy in same), np.zeros(self.ranks))
        if not (cost > 0).all():
            return np.zeros(0)
        return np.asarray(busy / cost / self.seconds_per_cost())


def typical_error(planned: FloatArray, measured: FloatArray) -> float:
    """The median relative error of planned seconds; NaN without any."""
    return float(np.median(np.abs(planned / measured - 1))) if len(planned) else np.nan


def _slowest(work: FloatArray, sync_every: SyncEvery) -> float:
    return float(slowest(work, sync_every)) if work.size else np.nan


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def _tables(record: Mapping[str, Any]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Costs, busy seconds and work as arrays of as many ranks and micro-batches; empty if busy
    seconds are missing. Costs that are missing are 0."""
    cost, busy, work = (
        np.array(record.get(f"micro_batches/{name}", ()), np.float64)
        for name in ("cost", "busy", "work")
    )
    if busy.ndim != 2:
        return np.zeros((0, 0)), np.zeros((0, 0)), np.zeros((0, 0, 3))
    cost = cost if cost.shape == busy.shape else np.zeros_like(busy)
    return cost, busy, work if work.shape[:2] == busy.shape else np.zeros((0, 0, 3))
