"""Quality: modelled time over its bound, and compared with every other way to plan a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.approaches import ranks_then_packs
from benchmarks.bench import Bench
from benchmarks.instances import Instance, instances
from benchmarks.problem import Problem, time_of
from benchmarks.tables import Section, Table, Target
from evenstep import EvenstepError, Packed, Plan, Recipe, Steps, make_plan
from evenstep.core.layout import PACKER_NAMES
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Balance, SyncEvery
from evenstep.planning.planner import plan_step

SYNCS: tuple[SyncEvery, ...] = ("step", "micro_batch")
PER_STEP_MEAN, PER_STEP_WORST, DENSE = 1.001, 1.01, 16
LOCK_STEP_MEAN, LOCK_STEP_LARGE, LOCK_STEP_SMALL, LARGE = 1.005, 1.03, 1.06, 512
SAME = 1e-9  # slower by less than this is not slower
COUNTS = 3  # counts from the fewest on
BALANCES: tuple[Balance, ...] = ("lpt", "karmarkar_karp", "stride")


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """One plan, its distance from the bound, and the fastest other way."""

    instance: Instance
    sync_every: SyncEvery
    per_rank: float
    """Segments per rank."""
    over: float
    """Time over the makespan bound (once per step) or over the floor (every micro-batch)."""
    other: str
    slower: float
    """Time over that of the fastest other way; above 1 is slower."""
    ms: float

    @property
    def allowed(self) -> float:
        """How much slower the plan may be: one more micro-batch has to save something."""
        return 1 / (1 - self.instance.recipe.saving) - 1 + SAME


def quality(bench: Bench) -> Section:
    """Measure plans of single steps against bounds and other ways to plan them."""
    section = Section(
        "Quality",
        notes=[
            "Modelled time of one step, packed, with over-long samples truncated or split. Each "
            "instance is planned without and with a cost per micro-batch, that of 256 tokens. "
            "Once per step: time over the makespan bound (the mean, and samples that must share "
            "a rank) plus the fewest micro-batches. Every micro-batch: time over the floor of "
            "plan.stats().",
            "Other ways: partition of the costs to ranks and best fit inside each; balance="
            f"{', '.join(BALANCES)}; equal_sizes; every packer; and the default with each of the "
            f"{COUNTS} lowest counts that were found. Slower is the time over that of the fastest "
            "of these, at most; without a cost per micro-batch the plan may keep fewer "
            "micro-batches unless one more saves 1 %.",
        ],
    )
    found: list[Found] = []
    _compile(bench)
    chosen = list(instances(bench))
    for at, instance in enumerate(chosen, 1):
        bench.say(f"quality, {at} of {len(chosen)}: {instance.name}")
        found += [_measured(instance, sync) for sync in SYNCS]
    for sync in SYNCS:
        same = [one for one in found if one.sync_every == sync]
        section.tables += [_by_source(same, sync), _worst(same, sync)]
        section.targets += _reached(same, sync)
        section.targets += _never_slower(same, sync)
    return section


def _compile(bench: Bench) -> None:
    """Plan once in every way, so that the first time does not include compiling."""
    instance = next(iter(instances(replace(bench, quick=True))))
    for sync in SYNCS:
        _measured(instance, sync)


def _measured(instance: Instance, sync: SyncEvery) -> Found:
    recipe = instance.synced(sync)
    start = time.perf_counter()
    plan = make_plan(instance.lengths, recipe)
    ms = (time.perf_counter() - start) * 1e3
    problem, own = Problem.of_plan(plan), time_of(plan)
    times = dict(_others(instance.lengths, recipe, problem, plan))
    other = min(times, key=lambda name: times[name])
    if sync == "step":
        over = own / problem.slowest_rank
    else:
        over = float(plan.stats()["time_over_floor"])
    per_rank = len(problem.lengths) / problem.ranks
    return Found(instance, sync, per_rank, over, other, own / times[other], ms)


def _others(
    lengths: IntArray, recipe: Recipe, problem: Problem, plan: Plan
) -> Iterator[tuple[str, float]]:
    """The name and time of every other way to plan the step."""
    outcome = problem.measure(*ranks_then_packs(problem))
    assert outcome.over_budget == 0, "packs within the budget"
    yield "partition, then pack", outcome.time(recipe.sync_every)
    counts = [outcome.micro_batches, _per_rank(plan)]
    budget = recipe.layout.budget
    settings = {f"balance={balance}": replace(recipe, balance=balance) for balance in BALANCES}
    settings["equal_sizes"] = replace(recipe, equal_sizes=True)
    for packer in PACKER_NAMES:
        layout = Packed(max_tokens=budget, packer=packer)
        settings[f"packer={packer}"] = replace(recipe, layout=layout)
    for name, setting in settings.items():
        made = make_plan(lengths, setting)
        counts.append(_per_rank(made))
        yield name, time_of(made)
    for count in range(min(counts), min(counts) + COUNTS):
        try:
            forced = plan_step(lengths, replace(recipe, steps=Steps(micro_batches=count)))
        except EvenstepError:
            continue  # the samples do not fit into so few
        yield f"the fewest micro-batches + {count - min(counts)}", time_of(forced)


def _per_rank(plan: Plan) -> int:
    return plan.num_micro_batches // plan.num_ranks


def _by_source(found: list[Found], sync: SyncEvery) -> Table:
    table = Table(
        f"By lengths, sync_every={sync!r}",
        {
            "lengths": "",
            "cost": "",
            "plans": "d",
            "over the bound, mean": ".3%",
            "worst": ".2%",
            "slower than another way": "d",
            "by more than allowed": "d",
            "worst, times": ".4f",
            "median ms": ".2f",
            "max ms": ".1f",
        },
    )
    keys = dict.fromkeys((one.instance.source, one.instance.model) for one in found)
    for source, model in keys:
        same = [o for o in found if (o.instance.source, o.instance.model) == (source, model)]
        table.add(source, model, *_summary(same))
    table.add("all", "", *_summary(found))
    return table


def _summary(found: list[Found]) -> tuple[int | float, ...]:
    over = np.array([one.over for one in found]) - 1
    ms = np.array([one.ms for one in found])
    return (
        len(found),
        float(over.mean()),
        float(over.max()),
        sum(one.slower > 1 + SAME for one in found),
        sum(one.slower > 1 + one.allowed for one in found),
        max(one.slower for one in found),
        float(np.median(ms)),
        float(ms.max()),
    )


def _worst(found: list[Found], sync: SyncEvery) -> Table:
    """The five farthest from the bound and the five slowest against another way."""
    table = Table(
        f"The worst plans, sync_every={sync!r}",
        {
            "instance": "",
            "segments per rank": ".1f",
            "over the bound": ".2%",
            "fastest other way": "",
            "times": ".4f",
        },
    )
    far = sorted(found, key=lambda one: -one.over)[:5]
    slow = sorted(found, key=lambda one: -one.slower)[:5]
    for one in dict.fromkeys((*far, *slow)):
        table.add(one.instance.name, one.per_rank, one.over - 1, one.other, one.slower)
    return table


def _reached(found: list[Found], sync: SyncEvery) -> list[Target]:
    """How far plans are from the bound."""
    mean = float(np.mean([one.over for one in found]))
    if sync == "step":
        dense = [one.over for one in found if one.per_rank >= DENSE]
        few = [one.over for one in found if one.per_rank < DENSE]
        fewer = f", worst with fewer than {DENSE} per rank {max(few) - 1:.2%}" if few else ""
        return [
            _at_most("once per step: mean over the makespan bound", mean, PER_STEP_MEAN, fewer),
            _at_most(
                f"once per step: worst with {DENSE} or more per rank",
                max(dense, default=1.0),
                PER_STEP_WORST,
                f", {sum(over > PER_STEP_WORST for over in dense)} of {len(dense)} above",
            ),
        ]
    large = [one.over for one in found if len(one.instance.lengths) >= LARGE]
    small = [one.over for one in found if len(one.instance.lengths) < LARGE]
    return [
        _at_most("every micro-batch: mean over the floor", mean, LOCK_STEP_MEAN),
        *(
            _at_most(
                f"every micro-batch: worst {word} {LARGE} samples",
                max(overs),
                limit,
                f", {sum(over > limit for over in overs)} of {len(overs)} above",
            )
            for word, overs, limit in (
                ("from", large, LOCK_STEP_LARGE),
                ("below", small, LOCK_STEP_SMALL),
            )
            if overs
        ),
    ]


def _at_most(promise: str, value: float, limit: float, more: str = "") -> Target:
    wanted = f"{promise} ≤ {(limit - 1) * 100:g} %"
    return Target(wanted, f"{value - 1:.3%}{more}", value <= limit)


def _never_slower(found: list[Found], sync: SyncEvery) -> list[Target]:
    """Whether another way is faster, with and without a cost per micro-batch."""
    targets = []
    for start, word in ((True, "above 0: never slower"), (False, "0: never slower by over 1 %")):
        same = [o for o in found if bool(o.instance.recipe.cost.per_micro_batch) == start]
        slower = [one for one in same if one.slower > 1 + one.allowed]
        worst = max(same, key=lambda one: one.slower)
        figure = f"{len(slower)} of {len(same)} slower, worst {worst.slower:.4f}× ({worst.other})"
        promise = f"sync_every={sync!r}, per_micro_batch {word} than another way"
        targets.append(Target(promise, figure, not slower))
    return targets
