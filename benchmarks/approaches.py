"""Approaches that solve the parts of a problem one after another, in a few lines each."""

from __future__ import annotations

import numpy as np

from benchmarks.problem import Problem, RanksAndWaves
from evenstep import pack, partition
from evenstep.core.ragged import FloatArray, IntArray, sum_by


def ranks_then_packs(problem: Problem, balance: str = "refined") -> RanksAndWaves:
    """Balance ranks first, then pack within each rank; the fullest rank sets the count."""
    lengths, costs = problem.lengths, problem.costs
    rank = partition(costs, problem.ranks, balance)
    wave = np.zeros(len(lengths), np.int64)
    for own in items_by_rank(rank, problem.ranks):
        packs = pack(lengths[own], problem.budget)
        items = own[packs.values]
        wave[items] = by_cost(costs[items], packs.owner)
    return rank, wave


def differencing_twice(problem: Problem) -> RanksAndWaves:
    """Balance ranks, then balance each rank's micro-batches; the budget is not a hard limit."""
    costs = problem.costs
    rank = partition(costs, problem.ranks, "karmarkar_karp")
    tokens = np.bincount(rank, weights=problem.lengths, minlength=problem.ranks)
    count = int(np.ceil(tokens / problem.budget).max())
    wave = np.zeros(len(costs), np.int64)
    for own in items_by_rank(rank, problem.ranks):
        part = partition(costs[own], count, "karmarkar_karp")
        wave[own] = by_cost(costs[own], part)
    return rank, wave


def packs_then_ranks(problem: Problem) -> RanksAndWaves:
    """Pack first, then deal packs to ranks; each rank runs its heaviest pack first."""
    packs = pack(problem.lengths, problem.budget, bin_count_multiple=problem.ranks)
    costs = sum_by(packs.owner, problem.costs[packs.values], len(packs))
    rank_of_pack = partition(costs, problem.ranks, "lpt")
    rank, wave = np.empty((2, len(problem.lengths)), np.int64)
    rank[packs.values] = rank_of_pack[packs.owner]
    wave[packs.values] = heaviest_first(costs, rank_of_pack)[packs.owner]
    return rank, wave


def heaviest_first(costs: FloatArray, rank: IntArray) -> IntArray:
    """The wave of each pack if every rank runs its heaviest pack first."""
    order = np.lexsort((-costs, rank))
    starts = np.searchsorted(rank[order], np.arange(int(rank.max(initial=0)) + 1))
    wave = np.empty(len(costs), np.int64)
    wave[order] = np.arange(len(costs)) - starts[rank[order]]
    return wave


def by_cost(costs: FloatArray, pack_of_item: IntArray) -> IntArray:
    """Renumber packs from the heaviest, so that waves have similar costs."""
    total = np.bincount(pack_of_item, weights=costs)
    wave = np.empty(len(total), np.int64)
    wave[np.argsort(-total, kind="stable")] = np.arange(len(total))
    return wave[pack_of_item]


def items_by_rank(rank: IntArray, ranks: int) -> list[IntArray]:
    """The samples of each rank that has some."""
    order = np.argsort(rank, kind="stable")
    held = np.split(order, np.searchsorted(rank[order], np.arange(1, ranks)))
    return [own for own in held if len(own)]
