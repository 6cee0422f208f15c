"""What keeps a plan from its ideal time, in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from evenstep.core.bounds import bins_bound
from evenstep.core.ragged import FloatArray, IntArray, sum_by
from evenstep.core.rounding import divided_up

if TYPE_CHECKING:
    from evenstep.core.plan import Plan
    from evenstep.core.step_table import StepTable

_MUCH = 1.01  # times the ideal from which a cause is named
_MORE_SAMPLES = "or take more samples per step (fewer updates)"


def bottleneck(table: StepTable, steps: slice) -> str:
    """The sequence or the constraint that keeps these steps over their ideal time; else empty.

    The ideal is the work without padding divided by the ranks, with as few micro-batches as the
    tokens fill. A sequence that costs more than the mean load of a rank is named first.
    """
    if table.plan.num_ranks > 1:
        named = _expensive_sample(table, steps)
        if named:
            return named
    ideal = table.unpadded[steps]
    over = np.divide(table.floor_time[steps], ideal, out=np.ones(len(ideal)), where=ideal > 0)
    worst = int(over.argmax()) if len(over) else 0
    if len(over) and over[worst] > _MUCH:
        cause = _of_floor(table, steps.start + worst)
        return f"{cause} No plan of this step takes less than {over[worst]:.2f} times the ideal."
    if table.time[steps].sum() > _MUCH * ideal.sum():
        return _of_plan(table, steps)
    return ""


def unpadded_times(plan: Plan, costs: FloatArray, starts: IntArray) -> FloatArray:
    """The ideal time of each step: no padding, even ranks, the fewest micro-batches for its slots.

    `costs` are those of the segments, with the second work.
    """
    recipe, held = plan.recipe, np.diff(starts)
    step = np.repeat(np.arange(len(held)), held)
    return sum_by(step, costs, len(held)) / plan.num_ranks + (
        recipe.cost.per_micro_batch * filled_micro_batches(plan, starts)
    )


def filled_micro_batches(plan: Plan, starts: IntArray) -> IntArray:
    """The micro-batches per rank that the slots of each step fill."""
    total = np.zeros(len(plan.segments) + 1, np.int64)
    np.cumsum(plan.aligned_lengths, out=total[1:])
    slots = np.diff(total[starts])
    budget = plan.recipe.layout.budget
    if budget is None:
        return np.ones(len(slots), np.int64)
    return np.maximum(1, divided_up(divided_up(slots, budget), plan.num_ranks))


def _expensive_sample(table: StepTable, steps: slice) -> str:
    """A sample that costs more than the mean load of a rank, and what would help; else empty."""
    costs, ideal = table.most_expensive[steps], table.mean_cost[steps]
    ratio = np.divide(costs, ideal, out=np.zeros(len(ideal)), where=ideal > 0)
    if not (ratio > _MUCH).any():
        return ""
    first = int((ratio > _MUCH).argmax())
    own = table.segments_of(slice(steps.start + first, steps.start + first + 1))
    at = own.start + int(table.floors.costs[own].argmax())
    return (
        f"{_sample(table.plan, at)} costs {ratio[first]:.2f} times the mean load of a rank, so "
        f"ranks cannot be even. Use context parallelism, split the sample, {_MORE_SAMPLES}."
    )


def _of_floor(table: StepTable, step: int) -> str:
    """The constraint behind the floor of a step."""
    plan, binds = table.plan, table.floor_binds[step]
    recipe, layout = plan.recipe, plan.recipe.layout
    own = table.segments_of(slice(step, step + 1))
    extra = int(table.floor_per_rank[step]) - int(table.filled[step])
    beyond = float(table.floor_time[step] - table.unpadded[step])
    if 2 * extra * recipe.cost.per_micro_batch >= beyond or binds == "mean":
        return _of_count(table, step, own)
    at = own.start + int(table.floors.costs[own].argmax())
    if binds == "waves":
        return (
            f"Long sequences cannot share a micro-batch, so all ranks wait for them in their wave "
            f"(the longest: {_sample(plan, at)}). Raise {_budget(plan)}, use context parallelism, "
            f"{_MORE_SAMPLES}."
        )
    if binds == "second":
        assert recipe.second_work is not None
        return (
            f"The work in {recipe.second_work.column} cannot be even between ranks: few samples "
            f"have most of it. Take more samples per step (fewer updates)."
        )
    if binds == "shape" and layout.pad_to is not None and extra <= 0:
        return (
            f"Every micro-batch has {layout.least_slots} slots (layout.pad_to={layout.pad_to}), "
            f"more than these samples fill. Lower layout.pad_to, {_MORE_SAMPLES}."
        )
    if binds == "widths" and recipe.topology.equal_widths and extra <= 0:
        return (
            f"This pipeline needs one width for all micro-batches of a step (the longest: "
            f"{_sample(plan, at)}). Set topology.variable_seq_lengths, {_MORE_SAMPLES}."
        )
    if binds == "widths" and recipe.equal_tokens:
        return (
            f"equal_tokens pads each wave to its widest micro-batch. Leave it out, {_MORE_SAMPLES}."
        )
    if extra > 0:
        return _of_count(table, step, own)
    return (
        f"{own.stop - own.start} sequences on {plan.num_ranks} ranks cannot be even (the most "
        f"expensive: {_sample(plan, at)}). Take more samples per step (fewer updates)."
    )


def _of_count(table: StepTable, step: int, own: slice) -> str:
    """What forces more micro-batches per rank than the slots fill."""
    plan, recipe, floors = table.plan, table.plan.recipe, table.floors
    count, filled = int(table.floor_per_rank[step]), int(table.filled[step])
    forced = f"{count} micro-batches per rank where its slots fill {filled}"
    packs = -(-int(table.floor_packs[step]) // plan.num_ranks)
    if recipe.steps.micro_batches == count and packs < count:
        return f"steps.micro_batches asks for {forced}. Lower it, {_MORE_SAMPLES}."
    if packs < count:
        return (
            f"This pipeline runs a multiple of {recipe.topology.multiple} micro-batches per rank: "
            f"a step has {forced}. Lower layout.max_tokens, {_MORE_SAMPLES}."
        )
    counts = {
        name: bins_bound(column[own].astype(np.float64)[:, None], floors.caps[d : d + 1])
        for d, (name, column) in enumerate(zip(floors.limits, floors.taken, strict=True))
    }
    name = max(counts, key=lambda key: counts[key]) if counts else "slots"
    if name == "slots" or counts[name] <= counts.get("slots", 0):
        return (
            f"Long sequences cannot share a micro-batch: a step needs {forced}. Raise "
            f"{_budget(plan)}, or use context parallelism."
        )
    owner = "layout" if name == "samples" else "limits"
    return f"{owner}.{name} needs {forced}. Raise it, or leave it out."


def _of_plan(table: StepTable, steps: slice) -> str:
    """The choice behind a plan that takes longer than its floor."""
    recipe = table.plan.recipe
    micro = table.micro_batches_of(steps)
    slots, tokens = int(table.slots[micro].sum()), int(table.tokens[micro].sum())
    if recipe.layout.segments_per_row is not None and slots > _MUCH * tokens:
        return (
            f"{100 * (slots - tokens) / slots:.0f} % of the slots are padding, because rows of "
            f"different lengths share a micro-batch. Use a packed layout."
        )
    if recipe.balance != "refined":
        return f"balance={recipe.balance!r} leaves ranks uneven. Use balance='refined'."
    return ""


def _sample(plan: Plan, segment: int) -> str:
    sample, length = plan.segments.sample[segment], plan.segments.length[segment]
    return f"sample {int(sample)} with {int(length)} tokens"


def _budget(plan: Plan) -> str:
    layout = plan.recipe.layout
    if layout.pad_to is not None:
        return "layout.pad_to"
    return "layout.samples" if layout.max_tokens is None else "layout.max_tokens"
