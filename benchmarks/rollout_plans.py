"""Planning rollouts for 64 ranks, compared with padded micro-batches in order."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from benchmarks.bench import Bench
from benchmarks.lengths import draw
from benchmarks.tables import Section, Table, Target, verdict
from benchmarks.timing import best
from evenstep import Packed, Padded, Recipe, Steps, Topology
from evenstep.core.ragged import IntArray
from evenstep.train import RolloutBatch

SEQUENCES, RANKS, MOST_MS = 16_384, 64, 20.0
BUDGET, ROUND, PLAIN = 32_768, 64, 8


def rollout_lengths(bench: Bench, count: int) -> IntArray:
    """Lengths of rollouts, or of the only corpus there is."""
    names = [name for name in bench.corpora if "rollouts" in name] or list(bench.corpora)
    return draw(bench.corpora[names[0]], count)


def planning(bench: Bench) -> Section:
    """Measure `RolloutBatch.plan` and the padding that its plans remove."""
    count, ranks = bench.pick(SEQUENCES, 256), bench.pick(RANKS, 8)
    lengths = rollout_lengths(bench, count)
    width = int(np.ceil(lengths.max() / ROUND)) * ROUND
    tokens = torch.zeros((1, width), dtype=torch.int64).expand(count, width)  # takes no memory
    batch = RolloutBatch({"input_ids": tokens}, lengths=lengths, padding_side="left")
    section = Section(
        "Planning",
        notes=[
            f"{count:,} rollouts of width {width:,} for {ranks} ranks, in steps of an eighth of "
            f"them. Removed padding is relative to all rows at full width. In order: micro-batches "
            f"of {PLAIN} rows at full width; others have {BUDGET:,} slots. Imbalance: the slowest "
            f"rank over the mean.",
        ],
    )
    table = Table(
        "One epoch",
        {
            "batching": "",
            "plan, ms": ".1f",
            "slots, millions": ".1f",
            "removed padding": ".1%",
            "padding left": ".1%",
            "imbalance per micro-batch": ".3f",
            "imbalance per step": ".3f",
            "target": "",
        },
    )
    slowest = 0.0
    for name, recipe, judged in _recipes(ranks, width, count // 8):
        bench.say(f"plan: {name}")
        timed = best(partial(batch.plan, recipe, seed=1), repeats=bench.pick(25, 1))
        found = timed.result.metrics()
        if judged:
            slowest = max(slowest, timed.ms)
        table.add(
            name,
            timed.ms,
            found["slots"] / 1e6,
            found["removed_padding_ratio"],
            found["padding_ratio"],
            found["imbalance_micro_batch"],
            found["imbalance_step"],
            verdict(timed.ms < MOST_MS) if judged else "",
        )
    section.tables.append(table)
    what = f"{count:,} sequences, {ranks} ranks: planned in under {MOST_MS:g} ms"
    section.targets.append(Target(what, f"{slowest:.1f} ms", slowest < MOST_MS))
    return section


def _recipes(ranks: int, width: int, samples: int) -> list[tuple[str, Recipe, bool]]:
    """(name, recipe, whether the target is about it)"""

    def recipe(layout: Padded | Packed, steps: Steps, **options: str) -> Recipe:
        return Recipe(layout=layout, topology=Topology(dp=ranks), steps=steps, **options)  # type: ignore[arg-type]

    whole, parts = Steps(), Steps(samples=samples)
    in_order = Padded(samples=PLAIN, pad_to=width)
    packed = Packed(max_tokens=BUDGET)
    optimal = Padded(max_tokens=BUDGET, round_to=ROUND)
    greedy = Padded(max_tokens=BUDGET, round_to=ROUND, cut="greedy")
    return [
        ("padded, in order", recipe(in_order, parts, balance="none"), False),
        ("greedy cuts (ROLL)", recipe(greedy, parts), True),
        ("padded", recipe(optimal, parts), False),
        ("packed", recipe(packed, parts), True),
        ("packed, one step", recipe(packed, whole), True),
        ("packed, ranks synchronise per step", recipe(packed, whole, sync_every="step"), False),
    ]
