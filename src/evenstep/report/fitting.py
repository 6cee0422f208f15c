"""How well a cost fitted to the times of a run would have predicted them."""

from __future__ import annotations

import numpy as np

from evenstep.core.cost import Cost
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray
from evenstep.errors import InputError
from evenstep.report.run_log import RunLog, typical_error

_MOST = 400  # micro-batches that are fitted; as many others are predicted


def fitted_error(plan: Plan, log: RunLog, first: int = 0) -> float | None:
    """The typical error of `Cost.fit` on one half of a run's micro-batches, for the other half.

    Step s of the log is step `s - first` of the plan. None if there are too few to tell.
    """
    pairs = []
    for step, busy in list(zip(log.step.astype(int), log.busy, strict=True))[log.steady]:
        at = step - first
        if 0 <= at < plan.num_steps and len(busy) == plan.num_ranks:
            start, end = plan.cell_offsets[[at * plan.num_ranks, (at + 1) * plan.num_ranks]]
            pairs += list(zip(range(start, end), busy.ravel().tolist(), strict=False))
    pairs = [(micro, seconds) for micro, seconds in pairs if seconds > 0]
    seen = [(_lengths(plan, micro), seconds) for micro, seconds in pairs[: 2 * _MOST]]
    seen = [(lengths, seconds) for lengths, seconds in seen if len(lengths)]
    if len(seen) < 16:
        return None
    try:
        cost = Cost.fit([(lengths.tolist(), seconds) for lengths, seconds in seen[::2]])
    except InputError:
        return None
    predicted = [cost.of_lengths(each).sum() + cost.per_micro_batch for each, _ in seen[1::2]]
    return typical_error(np.array(predicted), np.array([seconds for _, seconds in seen[1::2]]))


def _lengths(plan: Plan, micro: int) -> IntArray:
    """The lengths that a micro-batch computes: its segments, or its rows at their full width."""
    rows = plan.micro_offsets[micro : micro + 2]
    first, last = plan.row_offsets[rows].tolist()
    if plan.recipe.layout.segments_per_row is not None:
        return np.full(int(rows[1] - rows[0]) if last > first else 0, plan.widths[micro], np.int64)
    return plan.segments.length[first:last]
