"""Measures of a plan as plain numbers.

Fill: slots, padding and bin utilisation. Balance: imbalance per micro-batch and per step, relative
to the mean of this plan. Distance from the optimum: packs and time relative to a lower bound for
any plan of the same lengths and recipe (`core.floor`), and what limits them (`core.bottleneck`).
`packs_optimal` and `balance_optimal` are proofs. If they are false, the plan may still be optimal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from evenstep.core.bottleneck import bottleneck
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.rounding import divided_up
from evenstep.core.step_table import StepTable

if TYPE_CHECKING:
    from evenstep.core.plan import Plan

Value: TypeAlias = Any  # a number, a bool or a string
Progress: TypeAlias = Callable[[int, int], None]


def of_plan(
    plan: Plan, width: int | None = None, progress: Progress | None = None
) -> dict[str, Value]:
    """The measures over all steps.

    `slots_before` counts every sample at `width`, the padded input's; by default it counts padded
    batches of 8 samples in order, which most training scripts form.
    """
    table = StepTable(plan, progress)
    dropped = plan.step_of < 0
    return {
        "num_steps": plan.num_steps,
        "num_ranks": plan.num_ranks,
        **_measure(table, slice(0, plan.num_steps), width),
        "num_dropped": int(dropped.sum()),
        "tokens_dropped": int(plan.lengths[dropped].sum()),
    }


def of_steps(plan: Plan, progress: Progress | None = None) -> list[dict[str, Value]]:
    """The measures of each step. A dropped sample belongs to no step."""
    table = StepTable(plan, progress)
    return [
        {"step": step, **_measure(table, slice(step, step + 1), None)}
        for step in range(plan.num_steps)
    ]


def _measure(table: StepTable, steps: slice, width: int | None) -> dict[str, Value]:
    plan, recipe = table.plan, table.plan.recipe
    micro, picked = table.micro_batches_of(steps), table.segments_of(steps)
    samples = table.samples_of(steps)
    tokens = int(table.tokens[micro].sum())
    slots = int(table.slots[micro].sum())
    before = len(samples) * width if width else int(table.batched_slots[steps].sum())
    count, real = micro.stop - micro.start, int(table.real[steps].sum())
    ideal = float(table.ideal[steps].sum())
    time, floor = table.time[steps], table.floor_time[steps]
    total, least = float(time.sum()), float(floor.sum())
    return {
        "num_samples": len(samples),
        "num_segments": picked.stop - picked.start,
        "num_micro_batches": count,
        "num_empty_micro_batches": count - real,
        "tokens": tokens,
        "slots": slots,
        "padding": slots - tokens,
        "padding_ratio": _ratio(slots - tokens, slots),
        "slots_before": before,
        "removed_padding": before - slots,
        "removed_padding_ratio": _ratio(before - slots, before),
        **_bins(table, micro, steps),
        "imbalance_tokens_step": _over(table.tokens_by_rank[steps], tokens, plan),
        "imbalance_tokens_micro_batch": _over(table.tokens_by_wave[steps], tokens, plan),
        "imbalance_cost_step": _or_one(float(table.rank_sum[steps].sum()), ideal),
        "imbalance_cost_micro_batch": _or_one(float(table.lock_step[steps].sum()), ideal),
        "num_packs": real,
        "num_packs_bound": int(table.floor_packs[steps].sum()),
        "packs_optimal": bool((table.per_rank[steps] == table.floor_per_rank[steps]).all()),
        "balance": recipe.balance,
        "sync_every": recipe.sync_every,
        "time_over_floor": _or_one(total, least),
        "balance_optimal": bool((time <= floor * (1 + 1e-9)).all()),
        "bottleneck": bottleneck(table, steps),
        **_overflow(table, samples, picked),
    }


def _bins(table: StepTable, micro: slice, steps: slice) -> dict[str, Value]:
    """NeMo-RL's packing metrics over the micro-batches that are not empty."""
    tokens = table.tokens[micro]
    tokens = tokens[tokens > 0]
    capacity = table.plan.recipe.layout.budget or int(table.slots[micro].max(initial=1))
    use = np.minimum(tokens / capacity, 1.0) if len(tokens) else np.ones(1)
    spread = float(use.std(ddof=1)) if len(use) > 1 else 0.0
    least = int(divided_up(table.tokens_of_step[steps], capacity).sum())
    return {
        "bin_utilization": float(use.mean()),
        "waste_ratio": float(1 - use.mean()),
        "bin_balance": 1 - spread / float(use.mean()),
        "packing_efficiency": _ratio(least, len(tokens)) if len(tokens) else 1.0,
    }


def _overflow(table: StepTable, samples: IntArray, segments: slice) -> dict[str, Value]:
    """How many samples exceeded the budget or a limit by themselves, by how they were handled."""
    missing = table.plan.lengths[samples] - table.kept[samples]
    return {
        "num_truncated": int((missing > 0).sum()),
        "tokens_truncated": int(missing.sum()),
        "num_split": int((table.num_segments[samples] > 1).sum()),
        "num_alone": int(table.alone[segments].sum()),
    }


def _over(largest: FloatArray, total: int, plan: Plan) -> float:
    return float(largest.sum()) * plan.num_ranks / total if total else 1.0


def _or_one(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
