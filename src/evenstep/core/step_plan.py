"""Single steps of a plan: as a plan of their own, and on fewer ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, Ragged, offsets_of, ranges_of
from evenstep.core.recipe import Recipe, Steps
from evenstep.core.segments import Segments


def samples_by_step(plan: Plan) -> Ragged:
    """The samples of each step, ascending. A dropped sample belongs to the step that follows it,
    or else to the last.

    steps [0, -1, 1, -1] of four samples -> samples [[0], [1, 2, 3]]
    """
    kept = np.flatnonzero(plan.step_of >= 0)
    if not len(kept):
        return Ragged.group(np.empty(0, np.int64), plan.num_steps)
    following = np.searchsorted(kept, np.arange(len(plan.step_of)))
    owner = plan.step_of[kept[np.minimum(following, len(kept) - 1)]]
    owner[following == len(kept)] = plan.num_steps - 1
    return Ragged.group(owner, plan.num_steps)


def step_plan(plan: Plan, step: int, samples: IntArray) -> Plan:
    """Step `step` as a plan of its own, whose sample i is number `samples[i]` of `plan`.

    `samples` are those of `samples_by_step`.
    """
    cells = plan.cell_offsets[step * plan.num_ranks : (step + 1) * plan.num_ranks + 1]
    micros = plan.micro_offsets[cells[0] : cells[-1] + 1]
    rows = plan.row_offsets[micros[0] : micros[-1] + 1]
    segments = plan.segments.take(slice(int(rows[0]), int(rows[-1])))
    return Plan(
        recipe=plan.recipe,
        lengths=plan.lengths[samples],
        step_of=np.minimum(plan.step_of[samples], 0),
        segments=Segments(
            np.searchsorted(samples, segments.sample), segments.start, segments.length
        ),
        row_offsets=rows - rows[0],
        micro_offsets=micros - micros[0],
        cell_offsets=cells - cells[0],
        widths=plan.widths[cells[0] : cells[-1]],
        groups=None if plan.groups is None else plan.groups[samples],
        columns={name: column[samples] for name, column in plan.columns.items()},
    )


def on_fewer_ranks(plan: Plan, ranks: int) -> Plan:
    """The same micro-batches of a plan of one step on `ranks` ranks, which divide the plan's.

    A wave becomes several: 1 wave of 4 ranks is 2 waves of 2 ranks.
    """
    if ranks == plan.num_ranks:
        return plan
    # 2 micro-batches on 4 ranks: 0 1 | 2 3 | 4 5 | 6 7, as waves 0 2 4 6 | 1 3 5 7; on 2 ranks:
    # 0 4 1 5 | 2 6 3 7
    numbers = np.arange(plan.num_micro_batches).reshape(plan.num_ranks, -1)
    order = numbers.T.reshape(-1, ranks).T.ravel()
    rows = plan.rows[order]
    row = ranges_of(plan.micro_offsets[order], rows)
    held = np.diff(plan.row_offsets)[row]
    return replace(
        plan,
        recipe=recipe_on_fewer_ranks(plan.recipe, ranks),
        segments=plan.segments.take(ranges_of(plan.row_offsets[row], held)),
        row_offsets=offsets_of(held),
        micro_offsets=offsets_of(rows),
        cell_offsets=np.arange(ranks + 1) * (len(order) // ranks),
        widths=plan.widths[order],
    )


def recipe_on_fewer_ranks(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe of `on_fewer_ranks`: a rank has more micro-batches, and sizes may differ."""
    if ranks == recipe.topology.dp:
        return recipe
    steps, times = recipe.steps, recipe.topology.dp // ranks
    if steps.micro_batches is not None:
        steps = Steps(micro_batches=times * steps.micro_batches)
    topology = replace(recipe.topology, dp=ranks)
    return replace(recipe, topology=topology, steps=steps, equal_sizes=False)
