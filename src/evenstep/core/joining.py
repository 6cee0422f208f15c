"""Join plans of single steps into one plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, offsets_of
from evenstep.core.segments import Segments
from evenstep.errors import InputError


def join_plans(plans: Sequence[Plan], sample_ids: Sequence[IntArray]) -> Plan:
    """One plan that runs `plans` one after the other and numbers samples by their ids.

    Sample i of plan k has the id `sample_ids[k][i]`; see `step.plan` and `step.sample_ids` of a
    planned stream. All ids together must be 0 ... n-1, each once, as in a whole epoch.
    """
    if not plans:
        raise InputError("expected at least one plan, got none.")
    if any(plan.recipe != plans[0].recipe for plan in plans):
        raise InputError(
            "plans of different recipes cannot be joined. Join the steps of one stream."
        )
    ids = np.concatenate(sample_ids)
    if not np.array_equal(np.sort(ids), np.arange(len(ids))):
        raise InputError(
            f"the ids of the {len(ids)} samples are not 0 to {len(ids) - 1}, each once. Join all "
            f"steps of one epoch."
        )
    position = np.argsort(ids)
    before = np.cumsum([0, *(plan.num_steps for plan in plans)])
    named = zip(plans, before, strict=False)
    step_of = [np.where(plan.step_of < 0, -1, plan.step_of + first) for plan, first in named]
    groups = [plan.groups for plan in plans if plan.groups is not None]
    pairs = list(zip(plans, sample_ids, strict=True))
    return Plan(
        recipe=plans[0].recipe,
        lengths=np.concatenate([plan.lengths for plan in plans])[position],
        step_of=np.concatenate(step_of)[position],
        segments=Segments(
            np.concatenate([names[plan.segments.sample] for plan, names in pairs]),
            np.concatenate([plan.segments.start for plan in plans]),
            np.concatenate([plan.segments.length for plan in plans]),
        ),
        row_offsets=_joined([plan.row_offsets for plan in plans]),
        micro_offsets=_joined([plan.micro_offsets for plan in plans]),
        cell_offsets=_joined([plan.cell_offsets for plan in plans]),
        widths=np.concatenate([plan.widths for plan in plans]),
        groups=np.concatenate(groups)[position] if groups else None,
        columns={
            name: np.concatenate([plan.columns[name] for plan in plans])[position]
            for name in plans[0].columns
        },
    )


def _joined(offsets: Sequence[IntArray]) -> IntArray:
    """Offsets joined end to end: [0, 2, 3] and [0, 4] -> [0, 2, 3, 7]."""
    return offsets_of(np.concatenate([np.diff(each) for each in offsets]))
