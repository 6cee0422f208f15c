"""Plans of single steps -> one plan of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, offsets_of
from evenstep.core.segments import Segments
from evenstep.errors import InputError


def join_plans(plans: Sequence[Plan], sample_ids: Sequence[IntArray]) -> Plan:
    """One plan that runs `plans` one after the other, with samples called by their ids.

    Sample i of plan k is `sample_ids[k][i]`, as `step.plan` and `step.sample_ids` of a planned
    stream say. Together the ids are 0 ... n-1, each once, as those of a whole epoch are.
    """
    if not plans:
        raise InputError("no plans were given, so there is no recipe. Pass at least one.")
    if any(plan.recipe != plans[0].recipe for plan in plans):
        raise InputError("plans of different recipes cannot be joined. Join those of one stream.")
    ids = np.concatenate(sample_ids)
    if not np.array_equal(np.sort(ids), np.arange(len(ids))):
        raise InputError(
            f"the ids of the {len(ids)} samples are not 0 to {len(ids) - 1}, each once. Join all "
            f"steps of one epoch."
        )
    place = np.argsort(ids)
    before = np.cumsum([0, *(plan.num_steps for plan in plans)])
    named = zip(plans, before, strict=False)
    step_of = [np.where(plan.step_of < 0, -1, plan.step_of + first) for plan, first in named]
    groups = [plan.groups for plan in plans if plan.groups is not None]
    pairs = list(zip(plans, sample_ids, strict=True))
    return Plan(
        recipe=plans[0].recipe,
        lengths=np.concatenate([plan.lengths for plan in plans])[place],
        step_of=np.concatenate(step_of)[place],
        segments=Segments(
            np.concatenate([names[plan.segments.sample] for plan, names in pairs]),
            np.concatenate([plan.segments.start for plan in plans]),
            np.concatenate([plan.segments.length for plan in plans]),
        ),
        row_offsets=_laid([plan.row_offsets for plan in plans]),
        micro_offsets=_laid([plan.micro_offsets for plan in plans]),
        cell_offsets=_laid([plan.cell_offsets for plan in plans]),
        widths=np.concatenate([plan.widths for plan in plans]),
        groups=np.concatenate(groups)[place] if groups else None,
        columns={
            name: np.concatenate([plan.columns[name] for plan in plans])[place]
            for name in plans[0].columns
        },
    )


def _laid(offsets: Sequence[IntArray]) -> IntArray:
    """Offsets one after the other: [0, 2, 3] and [0, 4] -> [0, 2, 3, 7]."""
    return offsets_of(np.concatenate([np.diff(each) for each in offsets]))
