"""Measures of a plan as plain numbers.

Fill: slots, padding and bin utilisation. Balance: imbalance per micro-batch and per step, relative
to the mean of this plan. Distance from the optimum: packs and time relative to a lower bound for
any plan of the same lengths and recipe (`core.floor`), and the sample that limits them.
`packs_optimal` and `balance_optimal` are proofs. If they are false, the plan may still be optimal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from evenstep.core.floor import Floors
from evenstep.core.ragged import FloatArray, IntArray, sum_by
from evenstep.core.rounding import divided_up

if TYPE_CHECKING:
    from evenstep.core.plan import Plan

Value: TypeAlias = Any  # a number, a bool or a string


def of_plan(plan: Plan, width: int | None = None) -> dict[str, Value]:
    """The measures over all steps. `width` is the padded input's; default: the longest sample."""
    columns = _Columns(plan)
    steps = [_Step(columns, step) for step in range(plan.num_steps)]
    dropped = plan.step_of < 0
    return {
        "num_steps": plan.num_steps,
        "num_ranks": plan.num_ranks,
        **_measure(columns, steps, width),
        "num_dropped": int(dropped.sum()),
        "tokens_dropped": int(plan.lengths[dropped].sum()),
    }


def of_steps(plan: Plan) -> list[dict[str, Value]]:
    """The measures of each step. A dropped sample belongs to no step."""
    columns = _Columns(plan)
    return [
        {"step": step, **_measure(columns, [_Step(columns, step)], None)}
        for step in range(plan.num_steps)
    ]


class _Columns:
    """The plan's derived columns, computed once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.costs, self.tokens, self.slots = plan.costs, plan.tokens, plan.slots
        self.segment_offsets = plan.segment_offsets
        self.floors = Floors(plan)
        held = np.diff(self.segment_offsets)
        self.alone = self.floors.over & (np.repeat(held, held) == 1)
        sample, count = plan.segments.sample, len(plan.lengths)
        self.kept = sum_by(sample, plan.segments.length, count).astype(np.int64)
        self.num_segments = np.bincount(sample, minlength=count)


class _Step:
    """The numbers of one step that the measures use."""

    def __init__(self, columns: _Columns, step: int) -> None:
        plan = columns.plan
        ranks = plan.num_ranks
        cells = plan.cell_offsets[step * ranks : (step + 1) * ranks + 1]
        micro = slice(int(cells[0]), int(cells[-1]))
        offsets = columns.segment_offsets[micro.start : micro.stop + 1]
        self.micro = micro
        self.segments = slice(int(offsets[0]), int(offsets[-1]))
        self.per_rank = int(cells[1] - cells[0])
        shape = (ranks, self.per_rank)
        self.costs: FloatArray = columns.costs[micro].reshape(shape)
        self.tokens: IntArray = columns.tokens[micro].reshape(shape)
        self.real = int((np.diff(offsets) > 0).sum())
        self.floor = columns.floors.of_step(step, self.segments)
        self.segment_costs = columns.floors.costs[self.segments]
        self.rank_sum = float(self.costs.sum(axis=1).max())
        self.lock_step = float(self.costs.max(axis=0).sum())
        self.ideal = float(self.costs.sum() / ranks)
        lock_step = plan.recipe.sync_every == "micro_batch"
        self.time = self.lock_step if lock_step else self.rank_sum


def _measure(columns: _Columns, steps: list[_Step], width: int | None) -> dict[str, Value]:
    plan, recipe = columns.plan, columns.plan.recipe
    micro = _indices([s.micro for s in steps])
    picked = _indices([s.segments for s in steps])
    samples = np.unique(plan.segments.sample[picked])
    tokens = int(plan.segments.length[picked].sum())
    slots = int(columns.slots[micro].sum())
    before = len(samples) * (width or int(plan.lengths[samples].max(initial=0)))
    real = sum(s.real for s in steps)
    needed = sum(s.floor.packs for s in steps)
    at_bound = all(s.per_rank == s.floor.per_rank for s in steps)
    ideal = sum(s.ideal for s in steps)
    rank_sum = sum(s.rank_sum for s in steps)
    lock_step = sum(s.lock_step for s in steps)
    time, floor = sum(s.time for s in steps), sum(s.floor.time for s in steps)
    return {
        "num_samples": len(samples),
        "num_segments": len(picked),
        "num_micro_batches": len(micro),
        "num_empty_micro_batches": len(micro) - real,
        "tokens": tokens,
        "slots": slots,
        "padding": slots - tokens,
        "padding_ratio": _ratio(slots - tokens, slots),
        "slots_before": before,
        "removed_padding": before - slots,
        "removed_padding_ratio": _ratio(before - slots, before),
        **_bins(columns, micro, steps),
        "imbalance_tokens_step": _over([s.tokens.sum(axis=1).max() for s in steps], tokens, plan),
        "imbalance_tokens_micro_batch": _over(
            [s.tokens.max(axis=0).sum() for s in steps], tokens, plan
        ),
        "imbalance_cost_step": rank_sum / ideal if ideal else 1.0,
        "imbalance_cost_micro_batch": lock_step / ideal if ideal else 1.0,
        "num_packs": real,
        "num_packs_bound": needed,
        "packs_optimal": at_bound,
        "balance": recipe.balance,
        "sync_every": recipe.sync_every,
        "time_over_floor": time / floor if floor else 1.0,
        "balance_optimal": all(s.time <= s.floor.time * (1 + 1e-9) for s in steps),
        "bottleneck": _bottleneck(plan, steps),
        **_overflow(columns, samples, picked),
    }


def _bins(columns: _Columns, micro: IntArray, steps: list[_Step]) -> dict[str, Value]:
    """NeMo-RL's packing metrics over the micro-batches that are not empty."""
    tokens = columns.tokens[micro]
    tokens = tokens[tokens > 0]
    capacity = columns.plan.recipe.layout.budget or int(columns.slots[micro].max(initial=1))
    use = np.minimum(tokens / capacity, 1.0) if len(tokens) else np.ones(1)
    spread = float(use.std(ddof=1)) if len(use) > 1 else 0.0
    least = sum(divided_up(int(s.tokens.sum()), capacity) for s in steps)
    return {
        "bin_utilization": float(use.mean()),
        "waste_ratio": float(1 - use.mean()),
        "bin_balance": 1 - spread / float(use.mean()),
        "packing_efficiency": _ratio(least, len(tokens)) if len(tokens) else 1.0,
    }


def _bottleneck(plan: Plan, steps: list[_Step]) -> str:
    """A sample that costs more than the mean load of a rank, and what would help; else empty."""
    for step in steps:
        if len(step.segment_costs) == 0 or plan.num_ranks == 1:
            continue
        worst = int(step.segment_costs.argmax())
        ratio = float(step.segment_costs[worst]) / step.ideal if step.ideal else 0.0
        if ratio > 1:
            at = step.segments.start + worst
            sample, length = int(plan.segments.sample[at]), int(plan.segments.length[at])
            return (
                f"sample {sample} with {length} tokens costs {ratio:.2f} times the mean load of a "
                f"rank, so ranks cannot be even. Use context parallelism, split the sample, or "
                f"take more samples per step."
            )
    return ""


def _overflow(columns: _Columns, samples: IntArray, segments: IntArray) -> dict[str, Value]:
    """How many samples exceeded the budget or a limit by themselves, by how they were handled."""
    missing = columns.plan.lengths[samples] - columns.kept[samples]
    return {
        "num_truncated": int((missing > 0).sum()),
        "tokens_truncated": int(missing.sum()),
        "num_split": int((columns.num_segments[samples] > 1).sum()),
        "num_alone": int(columns.alone[segments].sum()),
    }


def _over(largest: list[IntArray], total: int, plan: Plan) -> float:
    return float(sum(largest)) * plan.num_ranks / total if total else 1.0


def _indices(slices: list[slice]) -> IntArray:
    """All indices of the slices: [0:2, 5:6] -> [0, 1, 5]."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(s.start, s.stop) for s in slices)])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
