"""The step that each sample of a plan belongs to, derived from the order of samples alone."""

from __future__ import annotations

import numpy as np

from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, by_first_appearance, offsets_of, sum_by


def assigned_steps(plan: Plan) -> IntArray:
    """The step of each sample by order alone; a group counts where its first member is."""
    asked, kept = plan.recipe.steps, np.flatnonzero(plan.step_of >= 0)
    expected = np.full(len(plan.lengths), -1, np.int64)
    expected[kept] = 0
    limit = asked.samples or asked.tokens
    if limit is None or len(kept) == 0:
        return expected
    weight = np.ones(len(kept), np.int64) if asked.samples else plan.lengths[kept]
    owner = _owners(plan, kept)
    loads = sum_by(owner, weight, int(owner.max()) + 1).astype(np.int64)
    total = offsets_of(loads)
    starts = [0]  # of each step; a step takes units while their sum is within the limit
    while True:
        end = int(np.searchsorted(total, total[starts[-1]] + limit, "right")) - 1
        end = max(end, starts[-1] + 1)
        if end >= len(loads):
            break
        starts.append(end)
    expected[kept] = np.searchsorted(starts, owner, "right") - 1
    return expected


def out_of_order(plan: Plan) -> IntArray:
    """Samples in an earlier step than a sample before them.

    A group counts where its first member is: steps [0, 1, 0] of samples in groups [7, 8, 7] are in
    order, because both members of group 7 come first.
    """
    kept = np.flatnonzero(plan.step_of >= 0)
    by = np.argsort(_owners(plan, kept), kind="stable")
    step = plan.step_of[kept][by]
    behind = kept[by][1:][step[1:] < step[:-1]]
    return np.concatenate((behind, np.flatnonzero(plan.step_of < -1)))


def _owners(plan: Plan, samples: IntArray) -> IntArray:
    """The unit of each sample, by first appearance: groups [7, 8, 7] -> [0, 1, 0]."""
    if plan.groups is None:
        return np.arange(len(samples))
    return by_first_appearance(plan.groups[samples])[0]
