"""Ways to form the packs of a step. Each gives the address of every unit, or none if units do not
fit that way."""

from __future__ import annotations

import numpy as np

from evenstep.core.layout import Packer
from evenstep.core.ragged import IntArray, Ragged, sum_by
from evenstep.planning.balance.deal import deal_packs, deal_rows
from evenstep.planning.balance.equal_sizes import deal_equal
from evenstep.planning.balance.exchange import PackLimits, UnitArrays, WavePacks, refine_waves
from evenstep.planning.balance.partition import partition
from evenstep.planning.balance.problem import Problem
from evenstep.planning.balance.ranks_first import fit_ranks
from evenstep.planning.balance.waves import best_waves
from evenstep.planning.packers import divide_bins, pack
from evenstep.planning.units import Units
from evenstep.planning.vector_packing import vector_pack

NONE: IntArray = np.empty(0, np.int64)
_SCANNED = 128  # packs of a rank up to which all are scanned for each unit


def waves_first(problem: Problem, waves: int) -> IntArray:
    """Packs formed as waves of similar cost, then dealt to the ranks."""
    units, capacity, packs = problem.units, problem.capacity, problem.per_wave
    order = np.lexsort((-units.cost, -units.size))
    sizes = units.size[order]
    if int((sizes > capacity).sum()) > packs * waves:
        return NONE
    found = best_waves(
        UnitArrays(sizes, units.cost[order], units.extra[order]),
        PackLimits(min(capacity, int(sizes.sum())), units.caps),
        packs,
        waves,
    )
    if len(found) < len(units):
        return NONE
    pack_of = np.empty(len(units), np.int64)
    pack_of[order] = found
    return dealt(problem, pack_of, waves)


def ranks_first(problem: Problem, waves: int, *, equal: bool = False) -> IntArray:
    """Units divided between ranks, then packed inside each rank by best fit.

    With `equal`, ranks get equally many segments.
    """
    units, ranks = problem.units, problem.ranks
    balance = problem.recipe.balance
    balance = balance if balance != "none" else "refined"
    if equal:
        rank_of = deal_equal(units, ranks, balance)
    else:
        rank_of = partition(units.cost + units.second, ranks, balance)
    packs = waves * problem.rows
    if packs > _SCANNED and not len(units.caps):
        return _ranks_apart(problem, rank_of, waves)
    order = np.lexsort((-units.cost, -units.size))
    found = fit_ranks(
        order,
        rank_of,
        units.size,
        units.cost,
        units.extra,
        problem.capacity,
        units.caps,
        ranks,
        packs,
        equal,
    )
    if len(found) < len(units):
        return NONE
    return _heaviest_first(problem, found, waves)


def _ranks_apart(problem: Problem, rank_of: IntArray, waves: int) -> IntArray:
    """The addresses when each rank's units are packed by best fit, for very many packs."""
    packs = waves * problem.rows
    found = np.empty(len(problem.units), np.int64)
    by_rank = Ragged.group(rank_of, problem.ranks)
    for rank, own in enumerate(by_rank):
        bins = fill_bins(problem.units.take(own), problem.capacity, "best_fit_decreasing", 0)
        if len(bins) > packs:
            return NONE
        found[own[bins.values]] = rank * packs + bins.owner
    return _heaviest_first(problem, found, waves)


def _heaviest_first(problem: Problem, found: IntArray, waves: int) -> IntArray:
    """The addresses of packs `rank * packs + i`: each rank runs its packs heaviest first."""
    units, ranks, packs = problem.units, problem.ranks, waves * problem.rows
    cost = sum_by(found, units.cost, ranks * packs).reshape(ranks, packs)
    place = np.argsort(np.argsort(-cost, axis=1, kind="stable"), axis=1)
    at: IntArray = place.ravel()[found]
    return (at // problem.rows * ranks + found // packs) * problem.rows + at % problem.rows


def of_bins(
    problem: Problem, bins: Ragged, waves: int, *, refined: bool, balance: str | None = None
) -> IntArray:
    """Bins that are filled one by one, dealt to the ranks.

    Where there are fewer bins than packs, the largest are divided. If `refined`, units are
    exchanged within each wave of bins of similar cost.
    """
    units, packs = problem.units, problem.per_wave * waves
    if len(bins) > packs:
        return NONE
    if len(bins) < packs:
        bins = divide_bins(units.size, bins, packs)
    bin_of = np.empty(len(units), np.int64)
    bin_of[bins.values] = bins.owner
    cost = sum_by(bin_of, units.cost, packs)
    pack_of_bin = np.empty(packs, np.int64)
    pack_of_bin[np.argsort(-cost, kind="stable")] = np.arange(packs)
    pack_of = pack_of_bin[bin_of]
    if refined:
        _refine(problem, pack_of, waves)
    return dealt(problem, pack_of, waves, balance)


def fill_bins(
    units: Units, capacity: int, packer: str | Packer, seed: int, enough: int = 0
) -> Ragged:
    """Units in as few bins as the packer finds.

    Where there are further limits, several packers are tried until `enough` bins suffice.
    """
    if len(units.caps) and len(units):
        return vector_pack(units.size, units.extra, capacity, units.caps, enough)
    alone = np.flatnonzero(units.size > capacity)
    rest = np.flatnonzero(units.size <= capacity)
    packed = pack(units.size[rest], capacity, packer, seed=seed)
    values = np.concatenate((rest[packed.values], alone))
    ends = packed.offsets[-1] + 1 + np.arange(len(alone))
    return Ragged(values, np.concatenate((packed.offsets, ends)))


def dealt(problem: Problem, pack_of: IntArray, waves: int, balance: str | None = None) -> IntArray:
    """The addresses when packs are dealt to ranks by this balance, or by the recipe's."""
    costs = sum_by(pack_of, problem.units.cost, waves * problem.per_wave)
    recipe = problem.recipe
    address = deal_packs(costs, problem.per_wave, balance or recipe.balance, recipe.sync_every)
    if problem.rows > 1:
        by_address = np.empty_like(costs)
        by_address[address] = costs
        address = deal_rows(by_address, waves, problem.ranks, problem.rows)[address]
    return np.asarray(address[pack_of], np.int64)


def _refine(problem: Problem, pack_of: IntArray, waves: int) -> None:
    """Exchange units within each wave, in place, while that lowers its heaviest pack."""
    units, packs = problem.units, problem.per_wave * waves
    held = np.zeros((packs, len(units.caps)))
    np.add.at(held, pack_of, units.extra)
    size = sum_by(pack_of, units.size, packs).astype(np.int64)
    cost = sum_by(pack_of, units.cost, packs)
    refine_waves(
        UnitArrays(units.size, units.cost, units.extra),
        PackLimits(problem.capacity, units.caps),
        problem.per_wave,
        waves,
        WavePacks(pack_of, size, cost, held),
    )
