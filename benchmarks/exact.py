"""Exact: small steps compared with the optimum that a solver proves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from benchmarks.bench import Bench
from benchmarks.contents import Small
from benchmarks.peers import installed
from benchmarks.problem import time_of
from benchmarks.solver import COUNTS, fewest_micro_batches, solve
from benchmarks.tables import Section, Table, Target
from evenstep import Cost, Limits, Packed, Padded, Recipe, Steps, Topology, make_plan
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import SyncEvery
from evenstep.planning.planner import plan_step

BUDGET = 100
SECONDS, QUICK_SECONDS = 5.0, 0.5
SYNCS: tuple[SyncEvery, ...] = ("step", "micro_batch")
COSTS = (Cost(), Cost(per_token=20, per_pair=1), Cost(per_token=100, per_pair=1))
MEAN, WORST = 1.003, {"step": 1.01, "micro_batch": 1.03}
PLAIN = "no further constraints"
FARTHEST = 6  # instances that are listed
TEN = [100, 51, 51, 51, 33, 34, 1, 34, 50, 34]


@dataclass(frozen=True, slots=True)
class Gap:
    """A plan compared with a proven optimum."""

    over: float
    """Time over the optimum by the rule of `Recipe.saving`; at least 1 unless it took more."""
    floor: float
    """The floor over the least time of any searched count; above 1 the floor is wrong."""
    instance: str


def exact(bench: Bench) -> Section:
    """Compare plans of small steps with proven optima, and floors with them."""
    section = Section(
        "Small steps, compared with the optimum",
        notes=[
            "6 to 14 samples of up to 100 tokens, budget 100 (padded: 300), 2 to 4 ranks, three "
            "costs, without and with a cost per micro-batch. OR-tools CP-SAT proves the least "
            f"time with the fewest micro-batches per rank and {COUNTS - 1} more. Without a cost "
            "per micro-batch, more than the fewest count only if they save 1 %, as in the plan. "
            f"Where the solver needs more than {SECONDS:g} s for one count, the instance is "
            "counted as unproven and not used.",
        ],
    )
    section.targets.append(_by_hand())
    if not installed("ortools"):
        section.notes.append("Not run: ortools is not installed.")
        return section
    table = Table(
        "Time over the optimum",
        {
            "constraints": "",
            "sync_every": "",
            "instances": "d",
            "unproven": "d",
            "optimal": "d",
            "mean": ".3%",
            "worst": ".2%",
            "floor reached": "d",
            "floor too high": "d",
        },
    )
    farthest = Table(
        "Farthest from the optimum",
        {"sync_every": "", "over": ".2%", "lengths, ranks and cost": ""},
    )
    floors: list[float] = []
    for kind, count in (
        (PLAIN, bench.pick(500, 6)),
        *((kind, bench.pick(60, 3)) for kind in ("groups", "limits", "padded")),
    ):
        for sync in SYNCS:
            gaps: list[Gap] = []
            for at, small in enumerate(small_steps(kind, count)):
                bench.say(f"exact, {kind}, {sync}: {at + 1} of {count}")
                synced = replace(small, recipe=replace(small.recipe, sync_every=sync))
                gap = compare(synced, bench.pick(SECONDS, QUICK_SECONDS))
                gaps += [gap] if gap else []
            floors += [gap.floor for gap in gaps]
            _report(section, table, kind, sync, count, gaps)
            if kind == PLAIN:
                for gap in sorted(gaps, key=lambda gap: -gap.over)[:FARTHEST]:
                    farthest.add(sync, gap.over - 1, gap.instance)
    wrong = sum(floor > 1 + 1e-9 for floor in floors)
    promise = "the floor never exceeds the optimum"
    figure = f"{wrong} of {len(floors):,} too high, highest {max(floors):.6f}"
    section.targets.append(Target(promise, figure, wrong == 0))
    section.tables += [table, farthest]
    return section


def _by_hand() -> Target:
    """Ten lengths on three ranks: [100] costs 600, and its empty second micro-batch a slot."""
    recipe = Recipe(
        layout=Packed(max_tokens=BUDGET),
        topology=Topology(dp=3),
        cost=Cost(per_pair=0.05),
        sync_every="step",
    )
    time = time_of(make_plan(TEN, recipe))
    return Target(f"{TEN} on 3 ranks: 601, the optimum", f"{time:g}", time <= 601 + 1e-6)


def small_steps(kind: str, count: int) -> Iterator[Small]:
    """Random small steps with the constraint; the same ones in every run."""
    for seed in range(count):
        rng = np.random.default_rng([seed, 13])
        lengths = _lengths(rng, int(rng.integers(6, 15)), seed)
        cost = COSTS[seed % len(COSTS)]
        if seed % 2:
            cost = replace(cost, per_micro_batch=float(cost.of_lengths(np.array([10]))[0]))
        recipe = Recipe(
            layout=Packed(max_tokens=BUDGET),
            topology=Topology(dp=int(rng.integers(2, 5))),
            cost=cost,
        )
        if kind == "groups":
            lengths = np.maximum(lengths // 2, 1)
            groups = np.arange(len(lengths)) // 2 * (rng.random(len(lengths)) < 0.6)
            yield Small(recipe, lengths, groups=_groups(groups))
        elif kind == "limits":
            patches = rng.integers(0, 60, len(lengths)) * (rng.random(len(lengths)) < 0.5)
            limited = replace(recipe, limits=Limits(columns={"patches": 60}))
            yield Small(limited, lengths, columns={"patches": patches})
        elif kind == "padded":
            yield Small(replace(recipe, layout=Padded(max_tokens=3 * BUDGET)), lengths)
        else:
            yield Small(recipe, lengths)


def _lengths(rng: Generator, count: int, seed: int) -> IntArray:
    """Uniform, heavy-tailed, or around a third of the budget."""
    if seed % 3 == 0:
        return rng.integers(1, BUDGET + 1, count)
    if seed % 3 == 1:
        return np.clip(rng.lognormal(np.log(25), 0.8, count), 1, BUDGET).astype(np.int64)
    return rng.integers(20, 50, count)


def _groups(names: IntArray) -> IntArray:
    """Name 0 means no group: [0, 3, 3, 0] -> all different but for the two in the middle."""
    alone = -1 - np.arange(len(names))
    return np.where(names > 0, names, alone)


def compare(small: Small, seconds: float) -> Gap | None:
    """The gap of the plan of a small step; None if the optimum is not proven."""
    plan = make_plan(small.lengths, small.recipe, groups=small.groups, columns=small.columns)
    own = time_of(plan)
    known = {plan.num_micro_batches // plan.num_ranks: own}
    fewest = fewest_micro_batches(small, small.pack_costs())
    if fewest not in known:
        recipe = replace(small.recipe, steps=Steps(micro_batches=fewest))
        other = plan_step(small.lengths, recipe, groups=small.groups, columns=small.columns)
        known[other.num_micro_batches // other.num_ranks] = time_of(other)
    found = solve(small, known, seconds)
    if found is None:
        return None
    floor = own / float(plan.stats()["time_over_floor"])
    cost = small.recipe.cost
    named = (
        f"{small.lengths.tolist()}, {small.ranks} ranks, {cost.per_token:g}·L + "
        f"{cost.per_pair:g}·L² + {cost.per_micro_batch:g}: {own:g}, optimum {found.by_rule:g}"
    )
    return Gap(own / found.by_rule, floor / found.least, named)


def _report(
    section: Section, table: Table, kind: str, sync: SyncEvery, count: int, gaps: list[Gap]
) -> None:
    over = np.array([max(gap.over, 1.0) for gap in gaps])
    floor = np.array([gap.floor for gap in gaps])
    mean, worst = float(over.mean()), float(over.max())
    table.add(
        kind,
        sync,
        count,
        count - len(gaps),
        int((over <= 1 + 1e-9).sum()),
        mean - 1,
        worst - 1,
        int((floor >= 1 - 1e-9).sum()),
        int((floor > 1 + 1e-9).sum()),
    )
    if kind != PLAIN:
        return
    for word, value, limit in (("mean", mean, MEAN), ("worst", worst, WORST[sync])):
        above = int((over > limit).sum())
        more = f", {above} of {len(over)} above" if word == "worst" else ""
        promise = f"small steps, sync_every={sync!r}: {word} over the optimum ≤ {limit - 1:.1%}"
        section.targets.append(Target(promise, f"{value - 1:.3%}{more}", value <= limit))
