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


def out_of_turn(plan: Plan) -> IntArray:
    """Micro-batches with a sample that comes before those of the micro-batch that ran before.

    Micro-batches run wave by wave and, in a wave, rank by rank.
    """
    kept = np.flatnonzero(plan.step_of >= 0)
    place = np.full(len(plan.lengths), -1, np.int64)
    place[kept] = np.arange(len(kept))
    if plan.recipe.groups == "micro_batch":
        place[kept] = _owners(plan, kept)
    key = place[plan.segments.sample]
    held = np.flatnonzero(np.diff(plan.segment_offsets))
    if len(held) == 0:
        return held
    cell = plan.cell_of_micro_batch[held]
    step, rank = cell // plan.num_ranks, cell % plan.num_ranks
    order = np.lexsort((rank, held - plan.cell_offsets[cell], step))
    starts = plan.segment_offsets[held]
    first, last = np.minimum.reduceat(key, starts)[order], np.maximum.reduceat(key, starts)[order]
    late = (first[1:] < last[:-1]) & (step[order][1:] == step[order][:-1])
    return np.asarray(held[order][1:][late], np.int64)


def _owners(plan: Plan, samples: IntArray) -> IntArray:
    """The unit of each sample, by first appearance: groups [7, 8, 7] -> [0, 1, 0]."""
    if plan.groups is None:
        return np.arange(len(samples))
    return by_first_appearance(plan.groups[samples])[0]
