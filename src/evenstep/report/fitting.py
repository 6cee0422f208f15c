"""fit_cost: the cost of a micro-batch, fitted to the times of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenstep.core.cost import Cost
from evenstep.core.ragged import FloatArray
from evenstep.errors import InputError
from evenstep.report.run_log import RunLog, typical_error

_FEWEST = 16  # micro-batches


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A cost in seconds, and how well one fitted to every other micro-batch predicts the rest.

    >>> FittedCost(Cost(per_token=2e-6), error=0.02, num_micro_batches=64).cost.per_token
    2e-06
    """

    cost: Cost
    error: float
    """Held out: the median relative error of the micro-batches that were not fitted."""
    num_micro_batches: int


def fit_cost(results: RunLog | Sequence[Any]) -> FittedCost:
    """The cost in seconds that fits the busy times of a run's micro-batches best.

    `results` are the `StepResult`s of steps, the records of a log (`log.jsonl` of the trainer), or
    a `RunLog`. The first step is left out: it loads and compiles. Steps should hold micro-batches
    of different lengths and sizes.

        cost = fit_cost(results).cost
        recipe = Recipe(layout=Packed(max_tokens=16384), cost=cost)

    >>> lengths = [[3, 1], [4], [2, 2, 2], [9], [1, 5]]
    >>> work = [(sum(n), sum(x * x for x in n), len(n)) for n in lengths]
    >>> busy = [2.0 * tokens + 0.5 * pairs for tokens, pairs, _ in work]
    >>> record = {"micro_batches/work": [work], "micro_batches/busy": [busy]}
    >>> fitted = fit_cost([record] * 9)
    >>> round(fitted.cost.per_token, 6), round(fitted.cost.per_pair, 6), round(fitted.error, 6)
    (2.0, 0.5, 0.0)
    """
    work, busy = _measured(results)
    if len(work) < _FEWEST:
        raise InputError(
            f"expected at least {_FEWEST} timed micro-batches after the first step, got "
            f"{len(work)}. Run more steps."
        )
    part = Cost.fit_work(work[::2], busy[::2])
    terms = (part.per_token, part.per_pair, part.per_segment)
    predicted = work[1::2] @ np.array(terms) + part.per_micro_batch
    error = typical_error(predicted, busy[1::2])
    return FittedCost(Cost.fit_work(work, busy), error, len(work))


def _measured(results: RunLog | Sequence[Any]) -> tuple[FloatArray, FloatArray]:
    """(tokens, pairs, segments) and busy seconds of each micro-batch that has both."""
    if not isinstance(results, RunLog):
        records = [each if isinstance(each, Mapping) else _record(each) for each in results]
        results = RunLog.of(records)
    pairs = list(zip(results.work, results.busy, strict=True))[results.steady]
    pairs = [(work, busy) for work, busy in pairs if work.shape[:2] == busy.shape and busy.size]
    work = np.concatenate([each.reshape(-1, 3) for each, _ in pairs] or [np.zeros((0, 3))])
    busy = np.concatenate([each.ravel() for _, each in pairs] or [np.zeros(0)])
    some = (work[:, 2] > 0) & (busy > 0)
    return work[some], busy[some]


def _record(result: Any) -> dict[str, Any]:
    """What a log keeps of a `StepResult` of one rank."""
    return {"micro_batches/work": [result.work], "micro_batches/busy": [result.busy]}
