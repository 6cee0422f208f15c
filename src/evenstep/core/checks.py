"""The promises of a plan, one function each, over the `Plan` alone.

Every check returns what is wrong as sentences; an empty list is a proof. `CHECKS` names them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.assignment import dealt, out_of_order
from evenstep.core.plan import Plan
from evenstep.core.ragged import FloatArray, IntArray, offsets_of, sum_by
from evenstep.core.validate import MOST
from evenstep.errors import PlanError

BoolArray: TypeAlias = NDArray[np.bool_]

_SHOWN = 3  # violations named per check; the rest is counted
_COUNTABLE = 2.0**62


def offsets_nest(plan: Plan) -> list[str]:
    """Rows, micro-batches and cells tile the segments without gap or overlap."""
    wrong = []
    levels = (
        ("row_offsets", plan.row_offsets, len(plan.segments)),
        ("micro_offsets", plan.micro_offsets, len(plan.row_offsets) - 1),
        ("cell_offsets", plan.cell_offsets, len(plan.micro_offsets) - 1),
    )
    for name, offsets, end in levels:
        if (
            len(offsets) < 1
            or offsets[0] != 0
            or offsets[-1] != end
            or (offsets[1:] < offsets[:-1]).any()
        ):
            wrong.append(f"{name} does not run from 0 to {end} without going back")
    if len(plan.widths) != len(plan.micro_offsets) - 1:
        wrong.append(f"{len(plan.widths)} widths for {len(plan.micro_offsets) - 1} micro-batches")
    if (len(plan.cell_offsets) - 1) % plan.num_ranks:
        wrong.append(
            f"{len(plan.cell_offsets) - 1} cells do not divide into {plan.num_ranks} ranks"
        )
    if (np.diff(plan.micro_offsets) < 1).any() or (plan.widths < 1).any():
        wrong.append("a micro-batch has no row or no width")
    count = len(plan.lengths)
    columns = {"step_of": plan.step_of, **plan.columns}
    if plan.groups is not None:
        columns["groups"] = plan.groups
    wrong += [
        f"{name} has {len(column)} entries for {count} samples"
        for name, column in columns.items()
        if len(column) != count
    ]
    if ((plan.segments.sample < 0) | (plan.segments.sample >= count)).any():
        wrong.append("a segment names a sample that does not exist")
    return wrong


def numbers_in_range(plan: Plan) -> list[str]:
    """Lengths, columns and slots are numbers that can be planned and added up."""
    # 4 rows of 2**62 slots would count as 0 in 64 bits; a column of -150 would make room for more.
    wrong = []
    for name, column, least in (
        ("length", plan.lengths, 1),
        *((name, column, 0) for name, column in plan.columns.items()),
    ):
        wrong += [
            f"sample {s} has {name} {column[s]}, not between {least} and {MOST}"
            for s in _some((column < least) | (column > MOST))
        ]
    slots = plan.rows.astype(np.float64) * plan.widths
    if slots.sum() >= _COUNTABLE:
        widest = int(slots.argmax())
        wrong.append(
            f"micro-batch {widest} is {plan.widths[widest]} wide, more than can be counted"
        )
    return wrong


def segments_once(plan: Plan) -> list[str]:
    """Every token of every sample runs exactly once, unless it was dropped or cut off."""
    recipe, segments = plan.recipe, plan.segments
    by = np.lexsort((segments.start, segments.sample))
    sample, start, length = segments.sample[by], segments.start[by], segments.length[by]
    first = np.ones(len(by), bool)
    first[1:] = sample[1:] != sample[:-1]
    expected = np.zeros(len(by), np.int64)
    expected[1:] = np.where(first[1:], 0, start[:-1] + length[:-1])
    ends = np.zeros(len(plan.lengths), np.int64)
    np.maximum.at(ends, sample, start + length)
    pieces = np.bincount(sample, minlength=len(plan.lengths))
    kept = plan.step_of >= 0
    wrong = _named(sample[(start != expected) | (length < 1)], "repeats or skips tokens")
    wrong += _named(np.flatnonzero(~kept & (pieces > 0)), "was dropped but runs")
    wrong += _named(np.flatnonzero(kept & (pieces == 0)), "never runs")
    if recipe.overflow == "truncate":
        wrong += _named(np.flatnonzero(ends > plan.lengths), "runs past its end")
    else:
        whole = np.where(kept, plan.lengths, 0)
        wrong += _named(np.flatnonzero((ends != whole) & (pieces > 0)), "does not run to its end")
    return wrong


def overflow_as_asked(plan: Plan) -> list[str]:
    """Only samples that are too long are dropped, cut, split or given more than the budget."""
    recipe, limit = plan.recipe, plan.recipe.longest_segment
    count = len(plan.lengths)
    sample, length = plan.segments.sample, plan.segments.length
    kept = sum_by(sample, length, count).astype(np.int64)
    pieces = np.bincount(sample, minlength=count)
    over = np.zeros(count, bool) if limit is None else plan.lengths > limit
    beyond = length > (limit or int(length.max(initial=0)))
    faults = {
        "drop": (plan.step_of < 0, "was dropped"),
        "truncate": ((kept > 0) & (kept < plan.lengths), "was cut"),
        "split": (pieces > 1, "was split"),
    }
    wrong = []
    for policy, (happened, fault) in faults.items():
        if recipe.overflow != policy:
            wrong += _named(np.flatnonzero(happened), f"{fault} without leave")
        else:
            wrong += _named(np.flatnonzero(happened & ~over), f"{fault} though it fits")
    if recipe.overflow == "truncate":
        wrong += _named(np.flatnonzero(over & (kept != limit)), "was not cut to what fits")
    if recipe.overflow != "alone":
        wrong += _named(sample[beyond], "is longer than any micro-batch can hold")
    return wrong


def slots_within_budget(plan: Plan) -> list[str]:
    """No micro-batch has more slots than the budget, save an over-long sample by itself."""
    budget = plan.recipe.layout.budget
    if budget is None:  # then no wider than its step needs
        most = _needed_by_step(plan)
        return [
            f"micro-batch {m} is {plan.widths[m]} wide where its step needs {most[m]}"
            for m in _some(plan.widths > most)
        ]
    over = plan.slots > budget
    if plan.recipe.overflow == "alone":
        over &= ~_runs_alone(plan)
    return [f"micro-batch {m} has {plan.slots[m]} slots of {budget}" for m in _some(over)]


def _needed_by_step(plan: Plan) -> IntArray:
    """For each micro-batch, the width that the fullest row of its step needs."""
    step = plan.cell_of_micro_batch // plan.num_ranks
    most = np.zeros(plan.num_steps, np.int64)
    np.maximum.at(most, np.repeat(step, plan.rows), _used_by_row(plan))
    return plan.recipe.layout.widths(most, plan.recipe.width_unit)[step]


def _used_by_row(plan: Plan) -> IntArray:
    """The slots that each row's aligned segments take."""
    return np.diff(offsets_of(plan.aligned_lengths)[plan.row_offsets])


def _runs_alone(plan: Plan) -> BoolArray:
    """Which micro-batches hold one over-long segment, and are no wider than it needs."""
    limit, offsets = plan.recipe.longest_segment, plan.segment_offsets
    if limit is None or len(plan.segments) == 0:
        return np.zeros(plan.num_micro_batches, bool)
    length = plan.segments.length[np.minimum(offsets[:-1], len(plan.segments) - 1)]
    needed = plan.recipe.layout.widths(length, plan.recipe.width_unit)
    alone = (np.diff(offsets) == 1) & (length > limit) & (plan.rows == 1)
    return np.asarray(alone & (plan.widths == needed), np.bool_)


def rows_hold_segments(plan: Plan) -> list[str]:
    """Each row is wide enough for its aligned segments."""
    used = _used_by_row(plan)
    width = np.repeat(plan.widths, plan.rows)
    return [f"row {r} needs {used[r]} slots of {width[r]}" for r in _some(used > width)]


def widths_aligned(plan: Plan) -> list[str]:
    """Widths are multiples of the rounding and the alignment, and fixed where they were fixed."""
    fixed, unit = plan.recipe.layout.pad_to, plan.recipe.width_unit
    wrong = [
        f"micro-batch {m} is {plan.widths[m]} wide, not a multiple of {unit}"
        for m in _some(plan.widths % unit != 0)
    ]
    if fixed is not None:
        off = _some(plan.widths != fixed)
        wrong += [f"micro-batch {m} is {plan.widths[m]} wide, not {fixed}" for m in off]
    return wrong


def rows_fit_layout(plan: Plan) -> list[str]:
    """Rows hold what the layout says: one segment each, or all in one row, or in R rows."""
    layout, rows = plan.recipe.layout, plan.rows
    wrong = []
    if layout.segments_per_row is not None:
        crowded = np.diff(plan.row_offsets) > layout.segments_per_row
        wrong += [f"row {r} of a padded micro-batch holds several segments" for r in _some(crowded)]
    held = np.diff(plan.segment_offsets)
    wanted = layout.row_counts(held)
    if not layout.static and plan.recipe.topology.equal_widths:
        wanted = np.maximum(wanted, rows)  # rows that other micro-batches of the step need
    wrong += [f"micro-batch {m} has {rows[m]} rows, not {wanted[m]}" for m in _some(rows != wanted)]
    if layout.samples is not None:
        wrong += [
            f"micro-batch {m} holds {held[m]} samples of {layout.samples}"
            for m in _some(held > layout.samples)
        ]
    return wrong


def counts_agree(plan: Plan) -> list[str]:
    """All ranks of a step run the same number of micro-batches, in the pipeline's multiple."""
    multiple = plan.recipe.topology.multiple
    counts = np.diff(plan.cell_offsets).reshape(plan.num_steps, plan.num_ranks)
    wrong = [
        f"ranks of step {s} run {sorted(set(counts[s].tolist()))} micro-batches"
        for s in _some((counts != counts[:, :1]).any(axis=1))
    ]
    return wrong + [
        f"step {s} runs {counts[s, 0]} micro-batches a rank, not a multiple of {multiple}"
        for s in _some((counts[:, 0] % multiple != 0) | (counts[:, 0] == 0))
    ]


def samples_stay_in_step(plan: Plan) -> list[str]:
    """Each sample runs in the step it was dealt to; steps are as large as asked, none is empty."""
    cell = plan.cell_of_micro_batch[plan.micro_batch_of_segment]
    sample = plan.segments.sample
    wrong = _named(sample[cell // plan.num_ranks != plan.step_of[sample]], "left its step")
    here = plan.step_of[(plan.step_of >= 0) & (plan.step_of < plan.num_steps)]
    empty = np.bincount(here, minlength=plan.num_steps) == 0
    wrong += [f"step {s} runs no sample" for s in _some(empty)]
    asked = plan.recipe.steps.micro_batches
    if asked is None:
        return wrong + _named(np.flatnonzero(plan.step_of != dealt(plan)), "is in a wrong step")
    # All but the last have just as many as asked, in the order of the samples. Whether a step took
    # as many samples as fit is best fit's to say, which planning knows.
    wrong += _named(out_of_order(plan), "is in a wrong step")
    count = np.diff(plan.cell_offsets)[:: plan.num_ranks]
    off = count != asked
    off[-1:] = count[-1:] > asked
    return wrong + [
        f"step {s} has {count[s]} micro-batches a rank, not {asked}" for s in _some(off)
    ]


def groups_together(plan: Plan) -> list[str]:
    """Samples of one group share a micro-batch, or a step, as asked."""
    if plan.groups is None:
        return []
    group = plan.groups[plan.segments.sample]
    micro = plan.micro_batch_of_segment
    place = micro
    if plan.recipe.groups == "step":
        place = plan.cell_of_micro_batch[micro] // plan.num_ranks
    by = np.lexsort((place, group))
    same = (group[by][1:] == group[by][:-1]) & (place[by][1:] != place[by][:-1])
    parted = np.unique(group[by][1:][same])
    places = {"micro_batch": "micro-batches", "step": "steps"}[plan.recipe.groups]
    return [f"group {g} is spread over several {places}" for g in parted[:_SHOWN]]


def shapes_equal(plan: Plan) -> list[str]:
    """All micro-batches of a step have one shape where pipeline buffers need it."""
    if not plan.recipe.topology.equal_widths:
        return []
    wrong = []
    starts = plan.cell_offsets[:: plan.num_ranks]
    rows = plan.rows
    for step in range(plan.num_steps):
        micro = slice(int(starts[step]), int(starts[step + 1]))
        shapes = set(zip(rows[micro].tolist(), plan.widths[micro].tolist(), strict=True))
        if len(shapes) > 1:
            wrong.append(f"step {step} has the shapes {sorted(shapes)[:_SHOWN]}")
    return wrong[:_SHOWN]


def limits_hold(plan: Plan) -> list[str]:
    """No micro-batch holds more cost or of any column than its limit."""
    limits, wrong = plan.recipe.limits, []
    held: list[tuple[str, IntArray | FloatArray, float]] = []
    count = np.diff(plan.segment_offsets)
    if limits.cost is not None:
        costs = plan.recipe.layout.limited_costs(
            plan.recipe.cost,
            plan.rows,
            plan.widths,
            plan.micro_batch_of_segment,
            plan.aligned_lengths,
        )
        held.append(("cost", costs, limits.cost * (1 + 1e-9)))
    for name, limit in limits.columns.items():
        if name not in plan.columns:
            wrong.append(f"the column {name} is limited but not in the plan")
            continue
        column = plan.columns[name][plan.segments.sample]
        held.append((name, plan.sum_by_micro_batch(column), limit))
    alone = (count == 1) if plan.recipe.overflow == "alone" else np.zeros(len(count), bool)
    for name, value, most in held:
        over = (value > most) & ~alone & (count > 0)
        wrong += [f"micro-batch {m} holds {value[m]} {name} of {most}" for m in _some(over)]
    return wrong


def sizes_equal(plan: Plan) -> list[str]:
    """Where equal sizes were asked for, ranks of a step differ by one segment at most."""
    if not plan.recipe.equal_sizes:
        return []
    cell = plan.cell_of_micro_batch[plan.micro_batch_of_segment]
    count = np.bincount(cell, minlength=plan.num_steps * plan.num_ranks)
    count = count.reshape(plan.num_steps, plan.num_ranks)
    uneven = count.max(axis=1) - count.min(axis=1) > 1
    return [f"ranks of step {s} hold {count[s].tolist()} segments" for s in _some(uneven)]


CHECKS: dict[str, Callable[[Plan], list[str]]] = {
    check.__name__: check
    for check in (
        offsets_nest,
        numbers_in_range,
        segments_once,
        overflow_as_asked,
        slots_within_budget,
        rows_hold_segments,
        widths_aligned,
        rows_fit_layout,
        counts_agree,
        samples_stay_in_step,
        groups_together,
        shapes_equal,
        limits_hold,
        sizes_equal,
    )
}


def violations(plan: Plan) -> list[str]:
    """What is wrong with a plan, one sentence for each fault; empty if it is valid.

    Each names its check: "slots_within_budget: micro-batch 3 has 120 slots of 100".
    """
    found = violations_by_check(plan)
    return [f"{name}: {fault}" for name, faults in found.items() for fault in faults]


def violations_by_check(plan: Plan) -> dict[str, list[str]]:
    """What each check finds wrong. If offsets do not nest, no other check runs."""
    broken = offsets_nest(plan)
    if broken:
        return {"offsets_nest": broken}
    return {name: check(plan) for name, check in CHECKS.items()}


def assert_valid(plan: Plan) -> None:
    """Raise a `PlanError` that names every broken promise."""
    found = violations(plan)
    if found:
        raise PlanError(
            f"the plan breaks its promises and must not run ({'; '.join(found)}). Plan again."
        )


def _some(mask: BoolArray) -> list[int]:
    return [int(index) for index in np.flatnonzero(mask)[:_SHOWN]]


def _named(samples: IntArray, fault: str) -> list[str]:
    found = np.unique(samples)
    more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
    return [f"sample {s} {fault}{more}" for s in found[:_SHOWN]]
