"""Plans of many steps, and the time of a process until its first plan."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial

import numpy as np

from benchmarks.bench import Bench
from benchmarks.lengths import draw
from benchmarks.tables import Section, Table, Target, verdict
from benchmarks.timing import interleave
from evenstep import Cost, Packed, Recipe, Steps, Topology, make_plan

SAMPLES, RANKS = 512, 64
CLOSE, LIMIT_MS, SEARCHED_MS = 1.002, 5.0, 50.0


def plans(bench: Bench) -> Section:
    """Measure plans of many steps."""
    steps = bench.pick(200, 20)
    section = Section(
        "Whole plans",
        notes=[
            f"{SAMPLES} samples per step, {RANKS} ranks, packed, cost 24576·L + L², over-long "
            f"samples truncated; {steps} steps in one call, and the first step alone. Imbalance "
            "(from plan.stats()) is the slowest rank over the ideal; 1 is even. It cannot be 1 "
            "where one sequence costs more than a rank's mean load.",
            f"The limit is {LIMIT_MS:g} ms where plans are within {CLOSE - 1:.1%} of the floor, "
            f"and {SEARCHED_MS:g} ms elsewhere, where other plans are searched for. The plan is "
            "judged as it is returned; a first plan that was farther off and then improved counts "
            "as close, which is stricter.",
        ],
    )
    table = Table(
        f"A plan of {steps} steps",
        {
            "lengths": "",
            "budget": ",",
            "micro-batches per rank": ".2f",
            "at the bound": "",
            "imbalance per micro-batch": ".4f",
            "imbalance per step": ".4f",
            "time over floor": ".4f",
            "ms per step": ".3f",
            "one step alone, ms": ".3f",
            "target": "",
        },
    )
    slowest = {LIMIT_MS: 0.0, SEARCHED_MS: 0.0}
    for corpus, lengths in bench.corpora.items():
        drawn = draw(lengths, steps * SAMPLES)
        for budget in (8192, 16384, 32768):
            bench.say(f"plans: {corpus}, budget {budget:,}")
            recipe = Recipe(
                layout=Packed(max_tokens=budget),
                topology=Topology(dp=RANKS),
                steps=Steps(samples=SAMPLES),
                cost=Cost(per_token=24576, per_pair=1),
                overflow="truncate",
            )
            calls = {
                "many": partial(make_plan, drawn, recipe),
                "one": partial(make_plan, drawn[:SAMPLES], recipe),
            }
            timed = interleave(calls, repeats=bench.pick(3, 1), patience=bench.pick(2.0, 0.5))
            plan = timed["many"].result
            assert plan.num_steps == steps, "the requested number of steps"
            assert plan.slots.max() <= budget, "nothing over budget"
            found = plan.stats()
            each, alone = timed["many"].ms / steps, timed["one"].ms
            over = float(found["time_over_floor"])
            limit = LIMIT_MS if over <= CLOSE else SEARCHED_MS
            slowest[limit] = max(slowest[limit], each, alone)
            table.add(
                corpus,
                budget,
                plan.num_micro_batches / steps / RANKS,
                "yes" if found["packs_optimal"] else "no",
                float(found["imbalance_cost_micro_batch"]),
                float(found["imbalance_cost_step"]),
                over,
                each,
                alone,
                f"< {limit:g}: {verdict(max(each, alone) < limit)}",
            )
    section.tables.append(table)
    for limit, word in ((LIMIT_MS, "within"), (SEARCHED_MS, "over")):
        promise = f"plan in under {limit:g} ms per step, {word} {CLOSE - 1:.1%} of the floor"
        figure = f"slowest {slowest[limit]:.2f} ms"
        section.targets.append(Target(promise, figure, slowest[limit] < limit))
    return section


PROGRAM = f"""
import numpy as np
from evenstep import Packed, Recipe, Topology, make_plan
lengths = np.random.default_rng(0).integers(1, 4096, {SAMPLES})
make_plan(lengths, Recipe(layout=Packed(max_tokens=8192), topology=Topology(dp={RANKS})))
"""


def starts(bench: Bench) -> Section:
    """Measure the start of a process: the first one compiles, the second one reads the cache."""
    section = Section(
        "Starts",
        notes=[
            "Wall time of a fresh process that makes one plan. The first start has an empty cache "
            "of compiled kernels, the second a filled one.",
        ],
    )
    table = Table("A process that makes one plan", {"start": "", "seconds": ".2f"})
    table.add("only importing numpy and numba", _wall("import numpy, numba", dict(os.environ)))
    with tempfile.TemporaryDirectory() as cache:
        environment = dict(os.environ)
        if not bench.quick:
            environment["NUMBA_CACHE_DIR"] = cache
        bench.say("first start")
        first = _wall(PROGRAM, environment)
        bench.say("second start")
        second = float(np.min([_wall(PROGRAM, environment) for _ in range(bench.pick(3, 1))]))
    if not bench.quick:
        table.add("first, compiling", first)
        promise = "second start faster than the first"
        figure = f"{second:.2f} s, first {first:.2f} s"
        section.targets.append(Target(promise, figure, second < first))
    table.add("second, from the cache", second)
    section.tables.append(table)
    return section


def _wall(program: str, environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    return time.perf_counter() - start
