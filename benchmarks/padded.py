"""Padded: cuts by modelled time, compared with the greedy cuts that other systems make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.bench import Bench
from benchmarks.instances import COSTS, Instance, distributions, with_start
from benchmarks.lengths import draw
from benchmarks.problem import time_of
from benchmarks.tables import Section, Table, Target, verdict
from benchmarks.timing import best
from evenstep import Padded, Recipe, Topology, make_plan
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import SyncEvery

SYNCS: tuple[SyncEvery, ...] = ("step", "micro_batch")
SHAPES = ((64, 8, 16384), (256, 8, 32768), (512, 16, 65536))  # (samples, ranks, budget)
TIMED, LIMIT_MS = 512, 40.0


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """One plan, its time over that of greedy cuts, and its own."""

    instance: Instance
    sync_every: SyncEvery
    ratio: float
    ms: float


def padded(bench: Bench) -> Section:
    """Compare padded plans with greedy cuts."""
    section = Section(
        "Padded micro-batches",
        notes=[
            "One step, rows padded to the longest of their micro-batch. Greedy: samples sorted, "
            "dealt to ranks in turn, the same cuts on every rank (cut='greedy', as in NeMo-RL and "
            "ROLL). Ratio is the modelled time over that of greedy; below 1 is faster. Costs L and "
            "4096·L + L², without and with a cost per micro-batch.",
        ],
    )
    found: list[Found] = []
    for at, instance in enumerate(_instances(bench)):
        bench.say(f"padded, {at + 1}: {instance.name}")
        found += [_measured(instance, sync) for sync in SYNCS]
    section.tables.append(_by_source(found))
    for sync in SYNCS:
        same = [one for one in found if one.sync_every == sync]
        worst = max(same, key=lambda one: one.ratio)
        slower = sum(one.ratio > 1 + 1e-9 for one in same)
        figure = f"{slower} of {len(same)} slower, worst {worst.ratio:.4f}×"
        promise = f"padded, sync_every={sync!r}: never slower than greedy cuts"
        section.targets.append(Target(promise, figure, slower == 0))
    section.tables.append(_named(section))
    slowest = max((one.ms for one in found if len(one.instance.lengths) == TIMED), default=None)
    if slowest is not None:
        promise = f"padded: {TIMED} samples in under {LIMIT_MS:g} ms"
        section.targets.append(Target(promise, f"slowest {slowest:.1f} ms", slowest < LIMIT_MS))
    return section


def _instances(bench: Bench) -> Iterator[Instance]:
    sources = {**distributions(bench), **_narrow()}
    for source, lengths in sources.items():
        for samples, ranks, budget in bench.pick(SHAPES, SHAPES[:1]):
            for model in ("L", "4096·L + L²"):
                for cost in (COSTS[model], with_start(COSTS[model])):
                    recipe = Recipe(
                        layout=Padded(max_tokens=budget),
                        topology=Topology(dp=ranks),
                        cost=cost,
                        overflow="truncate",
                    )
                    yield Instance(source, model, draw(lengths, samples), recipe)


def _narrow() -> dict[str, IntArray]:
    """Lengths that are nearly equal, equal, or of two kinds."""
    rng = np.random.default_rng(0)
    near = {
        f"normal, ± {share:.0%}": rng.normal(2048, 2048 * share, 10_000) for share in (0.05, 0.2)
    }
    return {
        **{name: np.maximum(lengths, 1).astype(np.int64) for name, lengths in near.items()},
        "all 2,048": np.full(100, 2048),
        "512 or 16": np.where(rng.random(10_000) < 0.125, 512, 16),
    }


def _measured(instance: Instance, sync: SyncEvery) -> Found:
    recipe = instance.synced(sync)
    greedy = replace(recipe, layout=Padded(max_tokens=recipe.layout.max_tokens, cut="greedy"))
    run = best(partial(make_plan, instance.lengths, recipe), repeats=1)
    own, other = time_of(run.result), time_of(make_plan(instance.lengths, greedy))
    return Found(instance, sync, own / other, run.ms)


def _by_source(found: list[Found]) -> Table:
    table = Table(
        "Time over that of greedy cuts",
        {
            "lengths": "",
            "sync_every": "",
            "plans": "d",
            "mean": ".3f",
            "best": ".3f",
            "worst": ".4f",
            "slower": "d",
            "median ms": ".2f",
            "max ms": ".1f",
        },
    )
    sources = dict.fromkeys(one.instance.source for one in found)
    for source in (*sources, "all"):
        for sync in SYNCS:
            same = [
                one
                for one in found
                if one.sync_every == sync and source in (one.instance.source, "all")
            ]
            ratio, ms = np.array([one.ratio for one in same]), np.array([one.ms for one in same])
            table.add(
                source,
                sync,
                len(same),
                float(ratio.mean()),
                float(ratio.min()),
                float(ratio.max()),
                int((ratio > 1 + 1e-9).sum()),
                float(np.median(ms)),
                float(ms.max()),
            )
    return table


def _named(section: Section) -> Table:
    """Two cases that can be checked by hand."""
    table = Table(
        "Two cases, 8 ranks, cost L",
        {
            "lengths": "",
            "budget": ",",
            "sync_every": "",
            "micro-batches per rank": "d",
            "rows": "",
            "imbalance": ".3f",
            "target": "",
        },
    )
    cases = (
        ("64 × 2,048", np.full(64, 2048), 65536, 1, "8 rows on every rank in one micro-batch"),
        (
            "8 × 512, 56 × 16",
            np.repeat([512, 16], [8, 56]),
            4096,
            2,
            "even with two micro-batches per rank",
        ),
    )
    for name, lengths, budget, count, promise in cases:
        met = True
        for sync in SYNCS:
            recipe = Recipe(
                layout=Padded(max_tokens=budget), topology=Topology(dp=8), sync_every=sync
            )
            plan = make_plan(lengths, recipe)
            key = "imbalance_cost_micro_batch" if sync == "micro_batch" else "imbalance_cost_step"
            uneven = float(plan.stats()[key])
            per_rank = plan.num_micro_batches // plan.num_ranks
            right = per_rank == count and uneven <= 1 + 1e-9
            met &= right
            rows = ", ".join(map(str, plan.rows[:8])) + (", …" if len(plan.rows) > 8 else "")
            table.add(name, budget, sync, per_rank, rows, uneven, verdict(right))
        section.targets.append(Target(f"padded, {name}: {promise}", verdict(met), met))
    return table
