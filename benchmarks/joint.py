"""The joint problem: budget, equal counts and even ranks at once, one large step on 64 ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from benchmarks.bench import Bench
from benchmarks.lengths import log_normal
from benchmarks.peers import installed
from benchmarks.tables import Section, Table, Target, verdict
from benchmarks.timing import interleave
from evenstep.core.bounds import lock_step_bound, pack_bound
from evenstep.core.cost import Cost
from evenstep.core.layout import Packed
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe
from evenstep.core.topology import Topology
from evenstep.planning import make_plan, pack, partition

SAMPLES, RANKS, BUDGET = 8192, 64, 32768
COST = Cost(per_token=24576, per_pair=1)
RECIPE = Recipe(layout=Packed(max_tokens=BUDGET), topology=Topology(dp=RANKS), cost=COST)
LOCK_STEP, RANK_SUM, LIMIT_MS = 1.01, 1.002, 10.0
OURS = "evenstep make_plan"
BY_STEP = "evenstep make_plan, sync_every='step'"

Places: TypeAlias = tuple[IntArray, IntArray]
"""The rank and the position of each sample's micro-batch."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How good a placement is, whoever made it."""

    over_budget: int
    micro_batches: int
    lock_step: float
    rank_sum: float


def joint(bench: Bench) -> Section:
    """The whole problem beside those who solve a part of it."""
    section = Section(
        "The joint problem",
        notes=[
            f"{SAMPLES:,} log-normal lengths (median 3000, none over {BUDGET:,}) in one step on "
            f"{RANKS} ranks, budget {BUDGET:,}, cost 24576·L + L². Lock-step: Σ over positions of "
            "the largest rank cost, over the ideal; rank sum: the largest rank's cost over the "
            "ideal; the ideal is the total cost over the ranks. All are measured by the same code "
            "from the rank and position of each sample.",
            "The floor is what no plan can beat in lock-step: a sequence over half the budget "
            "shares its micro-batch with no other such one, and the rest of its wave can only cost "
            "so much within the budget. Where it exceeds 1, the target is taken of the floor. A "
            "rank that runs such a sequence can then make up for it only where the other ranks do "
            "more, and what they do more all wait for: lock-step and rank sums cannot both be at "
            "their best. So the rank sums of all instances are asked of the plan for ranks that "
            "synchronise once per step.",
            "The last three rows of each instance are short re-implementations of common ideas on "
            "our own kernels: their times say nothing about any system.",
        ],
    )
    table = Table(
        "One step",
        {
            "σ": ".1f",
            "seed": "d",
            "by": "",
            "over budget": "d",
            "per rank": "d",
            "bound": "d",
            "lock-step": ".4f",
            "floor": ".4f",
            "rank sum": ".4f",
            "ms": ",.2f",
            "target": "",
        },
    )
    found: list[tuple[Outcome, int, float, float]] = []
    sums: list[float] = []
    for sigma in bench.pick((0.5, 0.6, 0.8, 1.0, 1.2), (0.6,)):
        for seed in range(bench.pick(4, 1)):
            bench.say(f"joint problem: σ {sigma}, seed {seed}")
            lengths = log_normal(SAMPLES, sigma, seed)
            bound, floor = -(-pack_bound(lengths, BUDGET) // RANKS), lock_step_floor(lengths)
            for name, (outcome, ms) in _race(lengths, bench).items():
                word = ""
                if name == OURS:
                    found.append((outcome, bound, floor, ms))
                    word = verdict(all(_met(outcome, bound, floor)))
                    if sigma == 0.6 and seed == 0:
                        section.targets += _headline(outcome, bound, ms)
                if name == BY_STEP:
                    sums.append(outcome.rank_sum)
                    word = verdict(outcome.rank_sum <= RANK_SUM)
                table.add(
                    sigma,
                    seed,
                    name,
                    outcome.over_budget,
                    outcome.micro_batches,
                    bound,
                    outcome.lock_step,
                    floor,
                    outcome.rank_sum,
                    ms,
                    word,
                )
    section.targets += _everywhere(found, sums)
    section.notes.append(f"Slowest plan of all instances: {max(ms for *_, ms in found):.1f} ms.")
    section.tables.append(table)
    return section


def _met(outcome: Outcome, bound: int, floor: float) -> tuple[bool, bool]:
    """Whether the count and lock-step are as promised."""
    return (
        outcome.over_budget == 0 and outcome.micro_batches == bound,
        outcome.lock_step <= LOCK_STEP * floor,
    )


def _everywhere(found: list[tuple[Outcome, int, float, float]], sums: list[float]) -> list[Target]:
    packed, level = zip(*(_met(*instance[:3]) for instance in found), strict=True)
    even = [rank_sum <= RANK_SUM for rank_sum in sums]
    over_floor = max(outcome.lock_step / floor for outcome, _, floor, _ in found)
    promises = {
        "in budget, at the lower bound": (packed, ""),
        f"lock-step ≤ {LOCK_STEP} of its floor": (level, f", worst {over_floor:.4f}"),
        f"rank sum ≤ {RANK_SUM} once per step": (even, f", worst {max(sums):.5f}"),
    }
    return [
        Target(
            f"joint, every σ and seed: {promise}",
            f"{sum(kept)} of {len(kept)}{figure}",
            all(kept),
        )
        for promise, (kept, figure) in promises.items()
    ]


def _headline(outcome: Outcome, bound: int, ms: float) -> list[Target]:
    return [
        Target("joint: nothing over budget", str(outcome.over_budget), outcome.over_budget == 0),
        Target(
            "joint: the lower bound on micro-batches per rank",
            f"{outcome.micro_batches}, bound {bound}",
            outcome.micro_batches == bound,
        ),
        Target(
            f"joint: lock-step ≤ {LOCK_STEP}",
            f"{outcome.lock_step:.4f}",
            outcome.lock_step <= LOCK_STEP,
        ),
        Target(
            f"joint: rank sum ≤ {RANK_SUM}",
            f"{outcome.rank_sum:.5f}",
            outcome.rank_sum <= RANK_SUM,
        ),
        Target(f"joint: in under {LIMIT_MS:g} ms", f"{ms:.2f} ms", ms < LIMIT_MS),
    ]


def _race(lengths: IntArray, bench: Bench) -> dict[str, tuple[Outcome, float]]:
    plans = {
        OURS: lambda: make_plan(lengths, RECIPE),
        BY_STEP: lambda: make_plan(lengths, replace(RECIPE, sync_every="step")),
    }
    groups: dict[str, Callable[[], list[list[list[int]]]]] = {}
    if installed("lightbinpack"):
        import lightbinpack

        as_list = lengths.tolist()
        groups["lightbinpack.ogbfd"] = lambda: lightbinpack.ogbfd(as_list, BUDGET, RANKS, -1)
    ideas: dict[str, Callable[[], Places]] = {
        "LPT to ranks, best-fit inside": lambda: _ranks_then_packs(lengths),
        "Karmarkar–Karp to ranks and inside": lambda: _differencing_twice(lengths),
        "best-fit packs, LPT to ranks": lambda: _packs_then_ranks(lengths),
    }
    timed = interleave({**plans, **groups, **ideas}, repeats=bench.pick(6, 2), patience=1.0)
    outcomes: dict[str, tuple[Outcome, float]] = {}
    for name, run in timed.items():
        if name in plans:
            places = _of_plan(run.result)
        elif name in groups:
            places = _of_groups(run.result, len(lengths))
        else:
            places = run.result
        outcomes[name] = (measure(lengths, *places), run.ms)
    return outcomes


def measure(lengths: IntArray, rank: IntArray, position: IntArray) -> Outcome:
    """Judge a placement by the rank and position of each sample."""
    assert len(rank) == len(position) == len(lengths), "every sample in a place"
    assert min(rank.min(), position.min()) >= 0, "no sample left out"
    positions = int(position.max()) + 1
    cell = position * RANKS + rank
    tokens = np.bincount(cell, weights=lengths, minlength=positions * RANKS)
    costs = np.bincount(cell, weights=COST.of_lengths(lengths), minlength=positions * RANKS)
    costs = costs.reshape(positions, RANKS)
    ideal = costs.sum() / RANKS
    return Outcome(
        over_budget=int((tokens > BUDGET).sum()),
        micro_batches=positions,
        lock_step=float(costs.max(axis=1).sum() / ideal),
        rank_sum=float(costs.sum(axis=0).max() / ideal),
    )


def lock_step_floor(lengths: IntArray) -> float:
    """No lock-step is below this share of the ideal."""
    costs = COST.of_lengths(lengths)
    return lock_step_bound(lengths, costs, BUDGET, RANKS) * RANKS / float(costs.sum())


def _of_plan(plan: Plan) -> Places:
    micro = plan.micro_batch_of_segment
    cell = plan.cell_of_micro_batch[micro]
    places = np.full((2, len(plan.lengths)), -1, np.int64)
    places[0, plan.segments.sample] = cell % plan.num_ranks
    places[1, plan.segments.sample] = micro - plan.cell_offsets[cell]
    assert (plan.segments.length == plan.lengths[plan.segments.sample]).all(), "whole samples"
    return places[0], places[1]


def _of_groups(groups: list[list[list[int]]], count: int) -> Places:
    """Group by group as positions, the bins of a group as ranks."""
    places = np.full((2, count), -1, np.int64)
    for position, group in enumerate(groups):
        for rank, items in enumerate(group):
            places[:, items] = np.array([[rank], [position]])
    return places[0], places[1]


def _ranks_then_packs(lengths: IntArray) -> Places:
    """Even ranks first, then each rank packs its own; the fullest rank sets the count."""
    rank = partition(COST.of_lengths(lengths), RANKS, "lpt")
    position = np.zeros(len(lengths), np.int64)
    for at in range(RANKS):
        own = np.flatnonzero(rank == at)
        packs = pack(lengths[own], BUDGET)
        position[own[packs.values]] = _by_cost(lengths[own], packs.owner, packs.values)
    return rank, position


def _differencing_twice(lengths: IntArray) -> Places:
    """Even ranks, each cut evenly into as many as tokens over budget ask for; no hard limit."""
    costs = COST.of_lengths(lengths)
    rank = partition(costs, RANKS, "karmarkar_karp")
    tokens = np.bincount(rank, weights=lengths, minlength=RANKS)
    count = int(np.ceil(tokens / BUDGET).max())
    position = np.zeros(len(lengths), np.int64)
    for at in range(RANKS):
        own = np.flatnonzero(rank == at)
        part = partition(costs[own], count, "karmarkar_karp")
        position[own] = _by_cost(lengths[own], part, np.arange(len(own)))
    return rank, position


def _packs_then_ranks(lengths: IntArray) -> Places:
    """Full packs first, dealt to even ranks, on each the heaviest first."""
    packs = pack(lengths, BUDGET, bin_count_multiple=RANKS)
    costs = np.bincount(packs.owner, weights=COST.of_lengths(lengths)[packs.values])
    rank_of_pack = partition(costs, RANKS, "lpt")
    order = np.lexsort((-costs, rank_of_pack))
    starts = np.searchsorted(rank_of_pack[order], np.arange(RANKS))
    position_of_pack = np.empty(len(costs), np.int64)
    position_of_pack[order] = np.arange(len(costs)) - starts[rank_of_pack[order]]
    rank, position = np.empty((2, len(lengths)), np.int64)
    rank[packs.values] = rank_of_pack[packs.owner]
    position[packs.values] = position_of_pack[packs.owner]
    return rank, position


def _by_cost(lengths: IntArray, part: IntArray, items: IntArray) -> IntArray:
    """The parts renumbered from the heaviest, so that heavy ones meet on all ranks."""
    costs = np.bincount(part, weights=COST.of_lengths(lengths[items]))
    place = np.empty(len(costs), np.int64)
    place[np.argsort(-costs, kind="stable")] = np.arange(len(costs))
    return place[part]
