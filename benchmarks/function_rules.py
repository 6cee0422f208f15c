"""How other systems divide one step: installed functions, or short re-implementations.

Rules that the planning benchmark has too are in `systems.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from benchmarks import systems
from benchmarks.peers import installed
from benchmarks.problem import Problem, RanksAndWaves
from evenstep.core.ragged import IntArray

Rule = Callable[[Problem], RanksAndWaves]

INSTALLED = "installed"
AGAIN = "re-implemented"


def their_rules() -> dict[str, dict[str, Rule]]:
    """By system: the rules to compare with, and where each comes from."""
    verl: dict[str, Rule] = {f"1dda039b, {AGAIN}": systems.verl}
    if installed("verl"):
        verl[f"0.9, {INSTALLED}"] = verl_grown
    axolotl: dict[str, Rule] = {f"first fit in order, {AGAIN}": axolotl_again}
    if installed("axolotl"):
        axolotl = {f"pack_parallel, {INSTALLED}": axolotl_installed}
    return {
        "verl": verl,
        "slime": {AGAIN: systems.slime},
        "Megatron-LM": {f"DpBalancedScheduler, {AGAIN}": megatron},
        "AReaL": {f"ffd, {AGAIN}": systems.areal_ffd, f"kk, {AGAIN}": systems.areal_kk},
        "TRL": {f"TokenBudgetBatcher, {AGAIN}": token_budget},
        "axolotl": axolotl,
    }


def verl_grown(problem: Problem) -> RanksAndWaves:
    """verl 0.9: Karmarkar-Karp to ranks, then to ever more micro-batches until all fit."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions as parts

    work = (24576 * problem.lengths + problem.lengths**2).tolist()
    ranks = parts(work, problem.ranks, equal_size=True)
    tokens = [int(problem.lengths[own].sum()) for own in ranks]
    count = max(-(-total // problem.budget) for total in tokens)
    while True:
        found = [parts([work[i] for i in own], count, equal_size=False) for own in ranks]
        packs = [
            [[own[i] for i in part] for part in of_rank]
            for own, of_rank in zip(ranks, found, strict=True)
        ]
        sums = [int(problem.lengths[pack].sum()) for of_rank in packs for pack in of_rank]
        if max(sums) <= problem.budget:
            return dealt(len(work), packs)
        count += 1


def megatron(problem: Problem) -> RanksAndWaves:
    """Packs filled in order; samples of the last ones move until ranks divide their number."""
    packs: list[list[int]] = [[]]
    used = 0
    for item, length in enumerate(problem.lengths.tolist()):
        if used + length > problem.budget:
            packs.append([])
            used = 0
        packs[-1].append(item)
        used += length
    last = len(packs) - 1
    while len(packs) % problem.ranks:
        while len(packs[last]) == 1:
            last -= 1
        packs.append([packs[last].pop()])
    return dealt_in_turn(len(problem.lengths), packs, problem.ranks)


def axolotl_again(problem: Problem) -> RanksAndWaves:
    """First fit in order; consecutive bins run on consecutive ranks."""
    packs = systems.first_fit(problem.lengths, problem.budget)
    return dealt_in_turn(len(problem.lengths), packs, problem.ranks)


def axolotl_installed(problem: Problem) -> RanksAndWaves:
    """axolotl's packing; consecutive bins run on consecutive ranks."""
    from axolotl.utils.samplers.multipack import pack_parallel

    lengths = problem.lengths.astype(np.int32)
    packs = pack_parallel(lengths, problem.budget, 100_000, problem.budget, num_processes=1)
    return dealt_in_turn(len(lengths), [list(pack) for pack in packs], problem.ranks)


def token_budget(problem: Problem) -> RanksAndWaves:
    """As samples arrive, each into the row with the least Σ L(L+1) that has room."""
    rank, wave = np.zeros((2, len(problem.lengths)), np.int64)
    room = np.full(problem.ranks, problem.budget)
    load = np.zeros(problem.ranks)
    now = 0
    for item, length in enumerate(problem.lengths.tolist()):
        fits = np.flatnonzero(room >= length)
        if not len(fits):
            room[:], load[:], now = problem.budget, 0, now + 1
            fits = np.arange(problem.ranks)
        row = fits[np.argmin(load[fits])]
        rank[item], wave[item] = row, now
        room[row] -= length
        load[row] += length * (length + 1)
    return rank, wave


def dealt(count: int, packs: Iterable[Iterable[Iterable[int] | IntArray]]) -> RanksAndWaves:
    """The rank and wave of each sample from the packs of each rank."""
    found = np.full((2, count), -1, np.int64)
    for rank, own in enumerate(packs):
        for wave, pack in enumerate(own):
            found[:, list(pack)] = np.array([[rank], [wave]])
    return found[0], found[1]


def dealt_in_turn(count: int, packs: list[list[int]], ranks: int) -> RanksAndWaves:
    """Pack p runs on rank p mod ranks."""
    return dealt(count, [packs[rank::ranks] for rank in range(ranks)])
