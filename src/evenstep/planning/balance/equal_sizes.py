"""equal_sizes: deal equally many segments to each rank, then form micro-batches per rank."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe
from evenstep.errors import PlanError
from evenstep.planning.balance.partition import partition
from evenstep.planning.units import Units

AssignRank: TypeAlias = Callable[[Units, int | None], tuple[IntArray, int]]
"""(units of one rank, waves or None) -> (wave * rows + row of each unit, waves)."""


def assign_by_rank(
    units: Units, recipe: Recipe, wanted: int | None, assign: AssignRank
) -> tuple[IntArray, int]:
    """(address of each unit, waves).

    Where `steps.micro_batches` is given, `count_by_rank` has checked that they suffice for a deal
    by "lpt". That deal is used if the recipe's own balance needs more.
    """
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    assigned = _assigned(units, deal_equal(units, ranks, recipe.balance), wanted, assign)
    asked = recipe.steps.micro_batches
    if asked is not None and assigned[1] > asked:
        assigned = _assigned(units, deal_equal(units, ranks), wanted, assign)
    rank_of, count, in_rank = assigned
    wave, row = in_rank // rows, in_rank % rows
    return wave * ranks * rows + rank_of * rows + row, count


def count_by_rank(units: Units, ranks: int, count: Callable[[Units], int]) -> int:
    """The largest `count` of any rank's units, dealt by "lpt"."""
    rank_of = deal_equal(units, ranks)
    return max(count(units.take(np.flatnonzero(rank_of == rank))) for rank in range(ranks))


def _assigned(
    units: Units, rank_of: IntArray, wanted: int | None, assign: AssignRank
) -> tuple[IntArray, int, IntArray]:
    """(rank of each unit, waves, wave * rows + row of each unit in its rank)."""
    own = [np.flatnonzero(rank_of == rank) for rank in range(int(rank_of.max(initial=0)) + 1)]
    count = wanted
    while True:
        found = [assign(units.take(index), count) for index in own]
        most = max(waves for _, waves in found)
        if count is not None and most <= count:
            break
        count = most
    in_rank = np.empty(len(units), np.int64)
    for index, (where, _) in zip(own, found, strict=True):
        in_rank[index] = where
    return rank_of, count, in_rank


def deal_equal(units: Units, ranks: int, balance: str = "lpt") -> IntArray:
    """The rank of each unit, with equally many segments on each rank.

    Groups of different sizes are dealt most segments first, each to the rank with the fewest. If
    ranks then differ by more than one segment, a partition by number of segments alone is tried.

    Groups of 3, 3, 2, 2 and 2 on two ranks -> 3 + 3 and 2 + 2 + 2
    """
    if int(units.count.max(initial=1)) == int(units.count.min(initial=1)):
        return partition(units.cost, ranks, balance, equal_sizes=True)
    rank_of = np.empty(len(units), np.int64)
    held = [(0, 0.0, rank) for rank in range(ranks)]
    for unit in np.lexsort((-units.cost, -units.count)).tolist():
        count, cost, rank = heapq.heappop(held)
        rank_of[unit] = rank
        heapq.heappush(held, (count + int(units.count[unit]), cost + units.cost[unit], rank))
    by_count = partition(units.count, ranks) if _unevenness(rank_of, units, ranks) > 1 else rank_of
    return by_count if _unevenness(by_count, units, ranks) <= 1 else rank_of


def check_equal(rank: IntArray, units: Units, ranks: int) -> None:
    """Raise if ranks hold different numbers of segments because of groups."""
    if _unevenness(rank, units, ranks) > 1:
        held = np.bincount(rank, weights=units.count, minlength=ranks)
        raise PlanError(
            f"equal_sizes needs equally many segments on each rank, but the {len(units)} groups of "
            f"this step give ranks {held.min():.0f} to {held.max():.0f} segments. Use groups of "
            f"one size and a multiple of {ranks} groups per step, or set equal_sizes=False."
        )


def _unevenness(rank_of: IntArray, units: Units, ranks: int) -> int:
    """The largest difference in segments between two ranks."""
    return int(np.ptp(np.bincount(rank_of, weights=units.count, minlength=ranks)))
