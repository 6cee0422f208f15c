"""Measure dispatching rollouts to Ray actors.

python benchmarks/ray_dispatch.py            written to benchmarks/results
python benchmarks/ray_dispatch.py --quick    a small version
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import ray
import torch

from benchmarks.bench import Bench
from benchmarks.rollout_plans import rollout_lengths
from benchmarks.runner import run
from benchmarks.tables import Section, Table, Target
from benchmarks.timing import Timed, interleave
from evenstep import Packed, Recipe, Topology, World
from evenstep.integrations.ray import RayDispatcher
from evenstep.train import RolloutBatch, RolloutPlan

ACTORS, MEGABYTES, RATIO = 4, 64, 2.0
SETTLE = 15  # seconds, in which workers that Ray starts ahead are still importing
PLANS = 6
FLOOR = "ray.put and ray.get of the same bytes"


class Worker:
    def rank(self, plan: RolloutPlan, batch: RolloutBatch, world: World) -> int:
        """Receives everything and looks at nothing."""
        return world.rank

    def read(self, plan: RolloutPlan, batch: RolloutBatch, world: World) -> int:
        """Reads every token of its rows."""
        rows = torch.from_numpy(plan.rows_of(world.rank))
        return int(batch.tensors["input_ids"].index_select(0, rows).sum())

    def size(self, value: Any) -> int:
        return len(value)


def dispatching(bench: Bench) -> Section:
    """Measure `RayDispatcher.dispatch` of a batch, compared with what Ray needs for its bytes."""
    tokens = bench.pick(MEGABYTES, 1) * 2**20 // 8
    count = bench.pick(2048, 64)
    batch = _batch(bench, count, tokens // count)
    recipe = Recipe(layout=Packed(max_tokens=4 * batch.width), topology=Topology(dp=ACTORS))
    plans = [batch.plan(recipe, seed=seed) for seed in range(PLANS)]
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else one is written at home
    ray.init(
        num_cpus=ACTORS, include_dashboard=False, object_store_memory=2**30, log_to_driver=False
    )
    try:
        timed = _measure(bench, plans, batch)
    finally:
        ray.shutdown()
    floor = timed[FLOOR]
    section = Section(
        "Dispatch",
        notes=[
            f"{count:,} rollouts of width {batch.width:,}, {tokens * 8 / 2**20:g} MiB, to "
            f"{ACTORS} actors on one machine. Dispatching includes sending another plan each "
            f"time, the calls and gathering. Plain Ray: `ray.put`, then a call of each "
            f"actor. The first line involves no actor: the memory of the rollouts as one numpy "
            f"array, put and read again. The second is an array that numpy allocated, in large "
            f"pages, which are copied faster. The target is judged by medians: driver, raylet and "
            f"actors share the cores, and the best of many calls is a matter of luck.",
        ],
    )
    table = Table(
        "One call",
        {"": "", "best, ms": ".1f", "ratio": ".2f", "median, ms": ".1f", "its ratio": ".2f"},
    )
    for name, found in timed.items():
        ratio, usual = found.seconds / floor.seconds, found.median / floor.median
        table.add(name, found.ms, ratio, found.median * 1e3, usual)
    section.tables.append(table)
    judged = timed["dispatch"]
    ratio, best = judged.median / floor.median, judged.seconds / floor.seconds
    what = f"{MEGABYTES} MB to {ACTORS} actors: at most {RATIO:g}× {FLOOR}"
    measured = f"{ratio:.2f}× (best calls {best:.2f}×)"
    section.targets.append(Target(what, measured, ratio <= RATIO))
    return section


def _batch(bench: Bench, count: int, width: int) -> RolloutBatch:
    lengths = np.minimum(rollout_lengths(bench, count), width)
    ids = torch.ones((count, width), dtype=torch.int64)
    return RolloutBatch({"input_ids": ids}, lengths=lengths, padding_side="left")


def _measure(bench: Bench, plans: list[RolloutPlan], batch: RolloutBatch) -> dict[str, Timed]:
    actors = [ray.remote(Worker).remote() for _ in range(ACTORS)]
    dispatcher = RayDispatcher(actors)
    plain = dict(batch.tensors)
    same = batch.tensors["input_ids"].numpy()
    in_large_pages = np.ones(same.nbytes, np.uint8)
    each_plan = cycle(plans)

    def to_all(value: Any) -> Any:
        stored = ray.put(value)
        return ray.get([actor.size.remote(stored) for actor in actors])

    time.sleep(bench.pick(SETTLE, 0))
    bench.say("dispatch")
    short: dict[str, Callable[[], Any]] = {
        FLOOR: lambda: len(ray.get(ray.put(same))),
        "ray.put and ray.get of another array": lambda: len(ray.get(ray.put(in_large_pages))),
        "dispatch": lambda: dispatcher.dispatch("rank", next(each_plan), batch),
        "the same bytes to the actors, plain Ray": partial(to_all, same),
    }
    long: dict[str, Callable[[], Any]] = {
        "dispatch, workers read their rows": partial(dispatcher.dispatch, "read", plans[0], batch),
        "the tensors to the actors, plain Ray": partial(to_all, plain),
    }
    for _ in range(bench.pick(20, 1)):
        short["dispatch"]()  # the store touches its memory for the first time
    timed = interleave(short, repeats=bench.pick(100, 2), patience=10.0)
    return timed | interleave(long, repeats=bench.pick(10, 2))  # apart: they leave cold caches


SECTIONS: dict[str, Callable[[Bench], Section]] = {"dispatch": dispatching}


def main(arguments: list[str] | None = None) -> int:
    """Measure dispatching to Ray actors."""
    return run("ray_dispatch", "Ray benchmark", SECTIONS, arguments)


if __name__ == "__main__":
    sys.exit(main())
