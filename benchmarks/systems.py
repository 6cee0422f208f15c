"""Systems: what other systems' rules give on the same lengths, budget and cost.

The rules are short re-implementations on our kernels, written from their descriptions; they show
what a rule does, not how fast a system is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from benchmarks.approaches import by_cost, items_by_rank
from benchmarks.bench import Bench
from benchmarks.instances import distributions
from benchmarks.lengths import draw
from benchmarks.peers import installed
from benchmarks.problem import Outcome, Problem, RanksAndWaves, deal_of_groups, deal_of_plan
from benchmarks.tables import Section, Table, Target
from evenstep import Cost, Packed, Recipe, Topology, make_plan, pack, partition
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import SyncEvery

COST = Cost(per_token=24576, per_pair=1)
SHAPES = ((512, 16, 16384), (2048, 64, 16384), (2048, 64, 32768))  # (samples, ranks, budget)
OURS: dict[str, SyncEvery] = {"evenstep": "micro_batch", "evenstep, sync_every='step'": "step"}

Rule: TypeAlias = Callable[[Problem], RanksAndWaves]


def systems(bench: Bench) -> Section:
    """Compare plans with the rules of other systems."""
    section = Section(
        "Rules of other systems",
        notes=[
            "One step, cost 24576·L + L², over-long samples truncated. Rules are re-implemented "
            "here in a few lines. verl: Karmarkar–Karp to ranks with equally many samples, then to "
            "as many micro-batches as the fullest rank's tokens need. slime: first fit in order, "
            "the largest micro-batches divided until the ranks divide their number, "
            "Karmarkar–Karp to ranks. AReaL: greedy to ranks by tokens with equally many samples, "
            "then first fit decreasing into the group with the fewest samples, or Karmarkar–Karp "
            "where that fits; ranks agree on the largest count. TRL: best fit decreasing, packs "
            "dealt in order. lightbinpack: ogbfd.",
            "Lock-step and rank sum are over the ideal. Largest is the largest micro-batch over "
            "the budget; above 1 it exceeds it. Mean over all instances of these lengths.",
        ],
    )
    table = Table(
        "Rules by lengths",
        {
            "lengths": "",
            "rule": "",
            "instances": "d",
            "micro-batches per rank": ".2f",
            "lock-step": ".4f",
            "rank sum": ".4f",
            "largest": ".3f",
            "micro-batches over budget": "d",
        },
    )
    faster: dict[str, int] = {"lock-step": 0, "rank sum": 0}
    rounds = 0
    for source, lengths in distributions(bench).items():
        found: dict[str, list[Outcome]] = {}
        for samples, ranks, budget in bench.pick(SHAPES, ((64, 8, 16384),)):
            bench.say(f"rules: {samples:,} of {source} on {ranks}, budget {budget:,}")
            problem = Problem(draw(lengths, samples, budget), budget, ranks, COST)
            outcomes = {name: problem.measure(*rule(problem)) for name, rule in _rules().items()}
            for name, outcome in outcomes.items():
                found.setdefault(name, []).append(outcome)
            _count_faster(outcomes, faster)
            rounds += 1
        for name, same in found.items():
            _add(table, source, name, same)
    section.tables.append(table)
    for measure, count in faster.items():
        promise = f"{measure}: no rule that keeps the budget is faster by over 1 %"
        section.targets.append(Target(promise, f"{count} of {rounds} faster", count == 0))
    return section


def _add(table: Table, source: str, name: str, found: list[Outcome]) -> None:
    def mean(field: str) -> float:
        return float(np.mean([getattr(outcome, field) for outcome in found]))

    largest = max(outcome.largest for outcome in found)
    over = sum(outcome.over_budget for outcome in found)
    quality = (mean("micro_batches"), mean("lock_step"), mean("rank_sum"))
    table.add(source, name, len(found), *quality, largest, over)


def _count_faster(outcomes: dict[str, Outcome], faster: dict[str, int]) -> None:
    """Count where a rule within the budget is faster than the plan made for that measure."""
    rules = [o for name, o in outcomes.items() if name not in OURS and o.over_budget == 0]
    by_wave, by_step = (outcomes[name] for name in OURS)
    allowed = 1 / (1 - Recipe(layout=Packed(max_tokens=1), cost=COST).saving)
    faster["lock-step"] += any(o.lock_step * allowed < by_wave.lock_step for o in rules)
    faster["rank sum"] += any(o.rank_sum * allowed < by_step.rank_sum for o in rules)


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {name: _plan(sync) for name, sync in OURS.items()}
    if installed("lightbinpack"):
        rules["lightbinpack"] = _lightbinpack
    return {
        **rules,
        "verl (re-implemented)": verl,
        "slime (re-implemented)": slime,
        "AReaL ffd (re-implemented)": areal_ffd,
        "AReaL kk (re-implemented)": areal_kk,
        "TRL bfd (re-implemented)": trl,
    }


def _plan(sync: SyncEvery) -> Rule:
    def planned(problem: Problem) -> RanksAndWaves:
        layout, topology = Packed(max_tokens=problem.budget), Topology(dp=problem.ranks)
        recipe = Recipe(layout=layout, topology=topology, cost=problem.cost, sync_every=sync)
        return deal_of_plan(make_plan(problem.lengths, recipe))

    return planned


def _lightbinpack(problem: Problem) -> RanksAndWaves:
    import lightbinpack

    groups = lightbinpack.ogbfd(problem.lengths.tolist(), problem.budget, problem.ranks, -1)
    return deal_of_groups(groups, len(problem.lengths))


def verl(problem: Problem) -> RanksAndWaves:
    """Karmarkar–Karp to ranks and to micro-batches; the budget only gives their number.

    All ranks run their micro-batches in the same order by cost.
    """
    costs = problem.costs
    rank = partition(costs, problem.ranks, "karmarkar_karp", equal_sizes=True)
    tokens = np.bincount(rank, weights=problem.lengths, minlength=problem.ranks)
    held = np.bincount(rank, minlength=problem.ranks)
    count = int(np.minimum(held, np.ceil(tokens / problem.budget)).max())
    wave = np.zeros(len(costs), np.int64)
    for own in items_by_rank(rank, problem.ranks):
        wave[own] = by_cost(costs[own], partition(costs[own], count, "karmarkar_karp"))
    return rank, wave


def slime(problem: Problem) -> RanksAndWaves:
    """First fit in order, largest packs divided, Karmarkar–Karp to ranks."""
    packs = first_fit(problem.lengths, problem.budget)
    while len(packs) % problem.ranks:
        sizes = [int(problem.lengths[held].sum()) if len(held) > 1 else 0 for held in packs]
        largest = int(np.argmax(sizes))
        if sizes[largest] == 0:
            break  # one sample each
        own = np.array(packs[largest])
        part = partition(problem.lengths[own].astype(np.float64), 2, "lpt")
        packs[largest] = own[part == 0].tolist()
        packs.append(own[part == 1].tolist())
    costs = np.array([float(problem.costs[held].sum()) for held in packs])
    rank = partition(costs, problem.ranks, "karmarkar_karp", equal_sizes=True)
    wave = np.zeros(len(packs), np.int64)
    for own in items_by_rank(rank, problem.ranks):
        wave[own] = np.arange(len(own))  # in the order in which the packs were made
    return _spread(packs, rank, wave, len(problem.lengths))


def areal_ffd(problem: Problem) -> RanksAndWaves:
    """Greedy to ranks by tokens, then first fit decreasing; ranks agree on the largest count."""
    return _areal(problem, differencing=False)


def areal_kk(problem: Problem) -> RanksAndWaves:
    """The same with Karmarkar–Karp inside each rank, and first fit where a group is too large."""
    return _areal(problem, differencing=True)


def _areal(problem: Problem, differencing: bool) -> RanksAndWaves:
    tokens = problem.lengths.astype(np.float64)
    rank = partition(tokens, problem.ranks, "lpt", equal_sizes=True)
    members = items_by_rank(rank, problem.ranks)
    count = 1
    while True:  # until every rank has the largest count of all
        wave = np.zeros(len(tokens), np.int64)
        for own in members:
            wave[own] = _allocate(problem.lengths[own], problem.budget, count, differencing)
        needed = int(wave.max()) + 1
        if needed == count or count >= min(map(len, members)):
            return rank, wave
        count = min(needed, *map(len, members))


def _allocate(lengths: IntArray, budget: int, least: int, differencing: bool) -> IntArray:
    """The group of each sample: `least` groups or more."""
    if differencing:
        count = min(max(least, int(np.ceil(lengths.sum() / budget))), len(lengths))
        part = partition(lengths.astype(np.float64), count, "karmarkar_karp")
        if np.bincount(part, weights=lengths).max() <= budget:
            return by_cost(lengths.astype(np.float64), part)
    group = np.zeros(len(lengths), np.int64)
    sums: list[int] = []
    held: list[int] = []
    for item in np.argsort(-lengths, kind="stable"):
        size = int(lengths[item])
        open_groups = [g for g, used in enumerate(sums) if used + size <= budget]
        if len(sums) < least or not open_groups:
            sums.append(0)
            held.append(0)
            chosen = len(sums) - 1
        else:
            chosen = min(open_groups, key=lambda g: (held[g], sums[g]))
        group[item] = chosen
        sums[chosen] += size
        held[chosen] += 1
    return group


def trl(problem: Problem) -> RanksAndWaves:
    """Best fit decreasing; pack b runs on rank b mod ranks."""
    packs = pack(problem.lengths, problem.budget)
    rank, wave = np.empty((2, len(problem.lengths)), np.int64)
    rank[packs.values] = packs.owner % problem.ranks
    wave[packs.values] = packs.owner // problem.ranks
    return rank, wave


def first_fit(lengths: IntArray, budget: int) -> list[list[int]]:
    """In the order of the samples, each into the first pack with room."""
    packs: list[list[int]] = []
    room = np.zeros(len(lengths), np.int64)
    for item, length in enumerate(lengths):
        fits = np.flatnonzero(room[: len(packs)] >= length)
        if len(fits):
            chosen = int(fits[0])
            packs[chosen].append(item)
        else:
            chosen = len(packs)
            packs.append([item])
            room[chosen] = budget
        room[chosen] -= length
    return packs


def _spread(packs: list[list[int]], rank: IntArray, wave: IntArray, count: int) -> RanksAndWaves:
    """The rank and wave of each sample from those of its pack."""
    dealt = np.empty((2, count), np.int64)
    for at, held in enumerate(packs):
        dealt[:, held] = np.array([[rank[at]], [wave[at]]])
    return dealt[0], dealt[1]
