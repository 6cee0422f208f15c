"""Our functions in the place of other systems' functions, on one step, as they would be called."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import numpy as np

from benchmarks.function_rules import Rule, dealt
from benchmarks.problem import Problem, RanksAndWaves
from evenstep import Cost
from evenstep.compat.areal import balanced_greedy_partition, ffd_allocate
from evenstep.compat.axolotl import MultipackBatchSampler
from evenstep.compat.megatron import PlannedPacking
from evenstep.compat.rank_packs import WORK, pack_recipe, packs_needed, packs_of
from evenstep.compat.slime import build_dp_schedule
from evenstep.compat.trl import TokenBudgetBatcher
from evenstep.compat.verl import balance_batch_partitions


def our_rules() -> dict[str, Rule]:
    """By system: what our function gives."""
    return {
        "verl": verl,
        "slime": slime,
        "Megatron-LM": megatron,
        "AReaL": areal,
        "TRL": token_budget,
        "axolotl": axolotl,
    }


def verl(problem: Problem) -> RanksAndWaves:
    """`balance_batch_partitions` on the controller, `rearrange_micro_batches` on every rank."""
    ranks = balance_batch_partitions(problem.lengths, problem.ranks, max_token_len=problem.budget)
    return _agreed(problem, ranks, WORK)


def areal(problem: Problem) -> RanksAndWaves:
    """`balanced_greedy_partition` to ranks; `ffd_allocate` on each, with the largest count."""
    lengths, budget = problem.lengths, problem.budget
    ranks = balanced_greedy_partition(lengths.tolist(), problem.ranks)
    least = max(len(ffd_allocate(lengths[own].tolist(), budget, 1)) for own in ranks)
    packs = [
        [np.array(own)[pack] for pack in ffd_allocate(lengths[own].tolist(), budget, least)]
        for own in ranks
    ]
    return dealt(len(lengths), packs)


def _agreed(problem: Problem, ranks: list[list[int]], cost: Cost) -> RanksAndWaves:
    """Packs of each rank, as many as the rank that needs most."""
    lengths, recipe = problem.lengths, pack_recipe(problem.budget, cost)
    count = max(packs_needed(lengths[own], recipe) for own in ranks)
    packs = [
        [np.array(own)[pack] for pack in packs_of(lengths[own], recipe, count)] for own in ranks
    ]
    return dealt(len(lengths), packs)


def slime(problem: Problem) -> RanksAndWaves:
    """`build_dp_schedule` for one step."""
    count = len(problem.lengths)
    partitions, batches, _, _ = build_dp_schedule(
        SimpleNamespace(
            use_dynamic_batch_size=True, max_tokens_per_gpu=problem.budget, balance_data=True
        ),
        {"dp_size": problem.ranks, "cp_size": 1, "vpp_size": 1},
        problem.lengths.tolist(),
        global_batch_size=count,
        rollout_indices=list(range(count)),
    )
    return dealt(
        count,
        [
            [[own[i] for i in micro] for micro in micros]
            for own, micros in zip(partitions, batches, strict=True)
        ],
    )


class _Scheduler(PlannedPacking):
    def __init__(self, problem: Problem) -> None:
        self.max_seqlen_per_dp_cp_rank, self.cp_size = problem.budget, 1
        self.dp_size, self.microbatch_group_size_per_vp_stage = problem.ranks, None


def megatron(problem: Problem) -> RanksAndWaves:
    """`get_groups_and_subsamples`."""
    found = _Scheduler(problem).get_groups_and_subsamples(list(enumerate(problem.lengths.tolist())))
    return dealt(len(problem.lengths), zip(*found, strict=True))


def token_budget(problem: Problem) -> RanksAndWaves:
    """`TokenBudgetBatcher` over samples that arrive in order."""
    samples = [{"input_ids": range(n), "at": i} for i, n in enumerate(problem.lengths.tolist())]
    with warnings.catch_warnings(action="ignore"):  # of the last samples, which follow below
        batches = list(TokenBudgetBatcher(samples, problem.ranks, problem.budget))
    found = [[[sample["at"] for sample in row] for row in rows] for rows in batches]
    held = {at for rows in found for row in rows for at in row}
    rest = [at for at in range(len(samples)) if at not in held]  # too few for all ranks
    found.append([rest[rank : rank + 1] for rank in range(problem.ranks)])
    return dealt(len(samples), zip(*found, strict=True))


def axolotl(problem: Problem) -> RanksAndWaves:
    """`MultipackBatchSampler`; accelerate gives consecutive batches to consecutive ranks."""
    count = len(problem.lengths)
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(problem.ranks)
    try:
        sampler = MultipackBatchSampler(range(count), 1, problem.budget, problem.lengths, None)
        bins = [batch[0] for batch in sampler]
    finally:
        os.environ.pop("WORLD_SIZE")
        if before is not None:
            os.environ["WORLD_SIZE"] = before
    return dealt(count, [bins[rank :: problem.ranks] for rank in range(problem.ranks)])
