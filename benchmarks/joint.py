"""The joint problem: budget, equal counts and balance in one large step on 64 ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.approaches import differencing_twice, packs_then_ranks, ranks_then_packs
from benchmarks.bench import Bench
from benchmarks.lengths import log_normal
from benchmarks.peers import installed
from benchmarks.problem import Outcome, Problem, RanksAndWaves, deal_of_groups, deal_of_plan
from benchmarks.tables import Section, Table, Target, verdict
from benchmarks.timing import interleave
from evenstep import Cost, Packed, Recipe, Topology, make_plan

SAMPLES, RANKS, BUDGET = 8192, 64, 32768
COST = Cost(per_token=24576, per_pair=1)
RECIPE = Recipe(layout=Packed(max_tokens=BUDGET), topology=Topology(dp=RANKS), cost=COST)
LOCK_STEP, RANK_SUM, LIMIT_MS = 1.01, 1.002, 10.0
OURS = "evenstep make_plan"
BY_STEP = "evenstep make_plan, sync_every='step'"


def joint(bench: Bench) -> Section:
    """Compare `make_plan` with solutions of parts of the problem."""
    section = Section(
        "The joint problem",
        notes=[
            f"{SAMPLES:,} log-normal lengths (median 3000, none over {BUDGET:,}) in one step on "
            f"{RANKS} ranks, budget {BUDGET:,}, cost 24576·L + L². Lock-step: sum over waves of "
            "the slowest rank's cost, over the ideal. Rank sum: the largest rank's total cost over "
            "the ideal. The ideal is the total cost divided by the ranks. The same code measures "
            "all rows, from the rank and wave of each sample.",
            "The floor is a lower bound on lock-step: two sequences over half the budget cannot "
            "share a micro-batch, and the other micro-batches of their wave are limited by the "
            "budget. Where the floor exceeds 1, the lock-step target is relative to it, and "
            "lock-step and rank sum cannot both be optimal. The rank sum target over all instances "
            "therefore applies to the plan with sync_every='step'.",
            "The last three rows of each instance are short reimplementations of common approaches "
            "on our kernels. Their times are not those of any other system.",
        ],
    )
    table = Table(
        "One step",
        {
            "σ": ".1f",
            "seed": "d",
            "algorithm": "",
            "over budget": "d",
            "micro-batches per rank": "d",
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
            problem = Problem(log_normal(SAMPLES, sigma, seed), BUDGET, RANKS, COST)
            bound, floor = problem.fewest, problem.lock_step_floor
            for name, (outcome, ms) in _race(problem, bench).items():
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
    """Whether the count and lock-step meet their targets."""
    return (
        outcome.over_budget == 0 and outcome.micro_batches == bound,
        outcome.lock_step <= LOCK_STEP * floor,
    )


def _everywhere(found: list[tuple[Outcome, int, float, float]], sums: list[float]) -> list[Target]:
    packed, locked = zip(*(_met(*instance[:3]) for instance in found), strict=True)
    even = [rank_sum <= RANK_SUM for rank_sum in sums]
    over_floor = max(outcome.lock_step / floor for outcome, _, floor, _ in found)
    promises = {
        "within budget, at the lower bound": (packed, ""),
        f"lock-step ≤ {LOCK_STEP}× its floor": (locked, f", worst {over_floor:.4f}"),
        f"rank sum ≤ {RANK_SUM} with sync_every='step'": (even, f", worst {max(sums):.5f}"),
    }
    return [
        Target(
            f"joint, all σ and seeds: {promise}",
            f"{sum(kept)} of {len(kept)}{figure}",
            all(kept),
        )
        for promise, (kept, figure) in promises.items()
    ]


def _headline(outcome: Outcome, bound: int, ms: float) -> list[Target]:
    return [
        Target("joint: nothing over budget", str(outcome.over_budget), outcome.over_budget == 0),
        Target(
            "joint: micro-batches per rank at the lower bound",
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
        Target(f"joint: under {LIMIT_MS:g} ms", f"{ms:.2f} ms", ms < LIMIT_MS),
    ]


def _race(problem: Problem, bench: Bench) -> dict[str, tuple[Outcome, float]]:
    lengths = problem.lengths
    plans = {
        OURS: lambda: make_plan(lengths, RECIPE),
        BY_STEP: lambda: make_plan(lengths, replace(RECIPE, sync_every="step")),
    }
    groups: dict[str, Callable[[], list[list[list[int]]]]] = {}
    if installed("lightbinpack"):
        import lightbinpack

        as_list = lengths.tolist()
        groups["lightbinpack.ogbfd"] = lambda: lightbinpack.ogbfd(as_list, BUDGET, RANKS, -1)
    approaches: dict[str, Callable[[], RanksAndWaves]] = {
        "LPT to ranks, best-fit inside": lambda: ranks_then_packs(problem, "lpt"),
        "Karmarkar–Karp to ranks and inside": lambda: differencing_twice(problem),
        "best-fit packs, LPT to ranks": lambda: packs_then_ranks(problem),
    }
    timed = interleave({**plans, **groups, **approaches}, repeats=bench.pick(6, 2), patience=1.0)
    outcomes: dict[str, tuple[Outcome, float]] = {}
    for name, run in timed.items():
        if name in plans:
            dealt = deal_of_plan(run.result)
        elif name in groups:
            dealt = deal_of_groups(run.result, len(lengths))
        else:
            dealt = run.result
        outcomes[name] = (problem.measure(*dealt), run.ms)
    return outcomes
