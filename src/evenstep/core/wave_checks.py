"""Checks of what all micro-batches of a wave have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from evenstep.core.ragged import IntArray

if TYPE_CHECKING:
    from evenstep.core.plan import Plan

_SHOWN = 5


def tokens_equal(plan: Plan) -> list[str]:
    """With `equal_tokens`, all micro-batches of a wave have equally many slots."""
    if not plan.recipe.equal_tokens:
        return []
    wrong = []
    for step, slots in _by_wave(plan, plan.slots):
        uneven = np.flatnonzero(slots.min(axis=0) != slots.max(axis=0))
        wrong += [f"wave {w} of step {step} has {slots[:, w].tolist()} slots" for w in uneven]
    return wrong[:_SHOWN]


def kinds_together(plan: Plan) -> list[str]:
    """With `second_work.same_waves`, every rank of a wave has a sample with that work, or none."""
    second = plan.recipe.second_work
    if second is None or not second.same_waves:
        return []
    if second.column not in plan.columns:
        return [f"column {second.column} is the second work but is not in the plan"]
    column = plan.columns[second.column][plan.segments.sample]
    held = plan.sum_by_micro_batch((column > 0).astype(np.int64))
    wrong = []
    for step, counts in _by_wave(plan, held):
        having = (counts > 0).sum(axis=0)
        mixed = np.flatnonzero((having > 0) & (having < plan.num_ranks))
        wrong += [
            f"wave {w} of step {step} has {second.column} on {having[w]} of {plan.num_ranks} ranks"
            for w in mixed
        ]
    return wrong[:_SHOWN]


def _by_wave(plan: Plan, values: IntArray) -> list[tuple[int, IntArray]]:
    """Values of micro-batches -> (step, array of ranks and waves) of each step.

    A step whose ranks run different numbers of micro-batches has no waves: see `counts_agree`.
    """
    counts = np.diff(plan.cell_offsets).reshape(plan.num_steps, plan.num_ranks)
    starts = plan.cell_offsets[:: plan.num_ranks].tolist()
    return [
        (step, values[starts[step] : starts[step + 1]].reshape(plan.num_ranks, -1))
        for step in np.flatnonzero((counts == counts[:, :1]).all(axis=1)).tolist()
    ]
