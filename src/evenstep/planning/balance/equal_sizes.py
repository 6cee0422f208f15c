"""equal_sizes: ranks get equally many segments first, then each forms its own micro-batches."""

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

PlaceRank: TypeAlias = Callable[[Units, int | None], tuple[IntArray, int]]
"""(units of a rank, positions or None) -> (position * rows + row of each, positions)."""


def place_by_rank(
    units: Units, recipe: Recipe, wanted: int | None, place: PlaceRank
) -> tuple[IntArray, int]:
    """(place of each unit, positions). Where a step has a number of micro-batches, `count_by_rank`
    said that they are enough, and the balance gives way if its own deal needs more."""
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    placed = _placed(units, deal_equal(units, ranks, recipe.balance), wanted, place)
    asked = recipe.steps.micro_batches
    if asked is not None and placed[1] > asked:
        placed = _placed(units, deal_equal(units, ranks), wanted, place)
    rank_of, count, inside = placed
    position, row = inside // rows, inside % rows
    return position * ranks * rows + rank_of * rows + row, count


def count_by_rank(units: Units, ranks: int, count: Callable[[Units], int]) -> int:
    """The most that `count` says of any rank's units, whatever the balance."""
    rank_of = deal_equal(units, ranks)
    return max(count(units.take(np.flatnonzero(rank_of == rank))) for rank in range(ranks))


def _placed(
    units: Units, rank_of: IntArray, wanted: int | None, place: PlaceRank
) -> tuple[IntArray, int, IntArray]:
    """(rank of each unit, positions, place of each unit inside its rank)."""
    own = [np.flatnonzero(rank_of == rank) for rank in range(int(rank_of.max(initial=0)) + 1)]
    count = wanted
    while True:
        found = [place(units.take(index), count) for index in own]
        most = max(positions for _, positions in found)
        if count is not None and most <= count:
            break
        count = most
    inside = np.empty(len(units), np.int64)
    for index, (where, _) in zip(own, found, strict=True):
        inside[index] = where
    return rank_of, count, inside


def deal_equal(units: Units, ranks: int, balance: str = "lpt") -> IntArray:
    """The rank of each unit, equally many segments to each. Groups of several sizes are dealt by
    these: most segments first, to the rank with the fewest; where that leaves ranks uneven, by
    number of segments alone.

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
    """Raise where groups kept the ranks from holding equally many segments."""
    if _unevenness(rank, units, ranks) > 1:
        held = np.bincount(rank, weights=units.count, minlength=ranks)
        raise PlanError(
            f"equal_sizes asks for as many segments on each rank, but the {len(units)} groups of "
            f"this step leave ranks with {held.min():.0f} to {held.max():.0f}. Use groups of one "
            f"size, a multiple of {ranks} in each step, or equal_sizes=False."
        )


def _unevenness(rank_of: IntArray, units: Units, ranks: int) -> int:
    """By how many segments the ranks differ at most."""
    return int(np.ptp(np.bincount(rank_of, weights=units.count, minlength=ranks)))
