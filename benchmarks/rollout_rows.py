"""Selecting the rows of a rank, compared with `torch.index_select` on the same tensors."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.bench import Bench
from benchmarks.rollout_plans import rollout_lengths
from benchmarks.tables import Section, Table, Target, verdict
from benchmarks.timing import interleave
from evenstep import Packed, Recipe, Topology
from evenstep.train import RolloutBatch, RolloutPlan

ROWS, RANKS, RATIO = 16_384, 64, 1.3


def selecting(bench: Bench) -> Section:
    """Measure `batch.select(plan.rows_of(rank))` for several numbers of ranks."""
    count = bench.pick(ROWS, 512)
    lengths = rollout_lengths(bench, count)
    width = int(lengths.max())
    tensors = {
        "input_ids": torch.ones((count, width), dtype=torch.int64),
        "loss_mask": torch.ones((count, width), dtype=torch.bool),
        "old_log_probs": torch.ones((count, width)),
        "advantages": torch.ones(count),
    }
    batch = RolloutBatch(tensors, lengths=lengths, padding_side="left")
    section = Section(
        "Rows of a rank",
        notes=[
            f"{count:,} rollouts of width {width:,} with tokens, a loss mask, log-probs and "
            f"advantages, one thread. Selecting includes finding the rows in the plan.",
        ],
    )
    table = Table(
        "One rank",
        {
            "ranks": "d",
            "rows": "d",
            "select, ms": ".2f",
            "index_select, ms": ".2f",
            "ratio": ".2f",
            "target": "",
        },
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    measured = 0.0
    for ranks in bench.pick([8, RANKS, 256], [RANKS]):
        bench.say(f"rows: {ranks} ranks")
        recipe = Recipe(layout=Packed(max_tokens=8 * width), topology=Topology(dp=ranks))
        plan = batch.plan(recipe)
        rows = torch.from_numpy(plan.rows_of(1))
        timed = interleave(
            {"select": partial(_select, batch, plan), "plain": partial(_plainly, tensors, rows)},
            repeats=bench.pick(20, 3),
        )
        ours, floor = timed["select"].ms, timed["plain"].ms
        judged = ranks == RANKS
        measured = ours / floor if judged else measured
        met = verdict(ours / floor <= RATIO) if judged else ""
        table.add(ranks, len(rows), ours, floor, ours / floor, met)
    torch.set_num_threads(threads)
    section.tables.append(table)
    what = f"rows of one of {RANKS} ranks: at most {RATIO:g}× index_select"
    section.targets.append(Target(what, f"{measured:.2f}×", measured <= RATIO))
    return section


def _select(batch: RolloutBatch, plan: RolloutPlan) -> RolloutBatch:
    return batch.select(plan.rows_of(1))


def _plainly(tensors: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: tensor.index_select(0, rows) for name, tensor in tensors.items()}
