"""Cuts for ranks that synchronise once per step: the largest sum of a rank counts.

The cut with the least cost in total has blocks of very different cost, which few micro-batches per
rank cannot even out. A cap on the dearest block evens them out, at the price of more padding.
Several caps are tried; the cuts of the best are shifted and the blocks swapped between ranks.
"""

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.planning.balance.partition import DEALS, partition
from evenstep.planning.batching.blocks import (
    SortedUnits,
    block_costs,
    capped_starts,
    cheapest_cuts,
    dearest,
    even_blocks,
)
from evenstep.planning.batching.shifts import slowest_lowered

_CAPS = 5  # between the dearest blocks of the even and of the cheapest cut
_IMPROVED = 2  # cuts whose slowest rank is lowered
_TURNS = 2  # times the blocks of one cut are dealt
_FEW = 2048  # blocks for which several cuts are improved
_REFINED = 2**14  # blocks that are dealt by the refined balance
_WORK = 100_000  # blocks looked at while the slowest rank is lowered


def rank_sum_cuts(
    units: SortedUnits, ranks: int, waves: int, given: list[IntArray]
) -> list[tuple[IntArray, IntArray]]:
    """(ends of the blocks, rank of each block) of the cuts worth comparing.

    `given` are the ends of cuts to start from: that with the fewest slots, which is dealt by every
    balance, the cheapest, and others.
    """
    even = even_blocks(units, 0, len(units.price), ranks * waves)
    cuts = [*given, even, *_capped(units, even, given[1])]
    dealt = [deal_blocks(units, ends, ranks, waves, "lpt") for ends in cuts]
    slowest = [_slowest(units, *cut, ranks) for cut in zip(cuts, dealt, strict=True)]
    many = ranks * waves > _FEW
    fastest = np.argsort(slowest, kind="stable")[: 1 if many else _IMPROVED]
    improved = [lower_slowest(units, cuts[at], ranks, waves) for at in fastest]
    balances = [name for name in DEALS if name != "refined" or not many]
    fewest = [(given[0], deal_blocks(units, given[0], ranks, waves, name)) for name in balances]
    return improved + fewest


def _capped(units: SortedUnits, even: IntArray, cheapest: IntArray) -> list[IntArray]:
    """The ends of the cheapest cuts whose dearest block is capped, at several caps."""
    low, high = dearest(units, 0, even), dearest(units, 0, cheapest)
    caps = np.geomspace(low, high, _CAPS + 1)[:-1] if high > low else np.array([low])
    count = len(cheapest)
    return [cheapest_cuts(units, capped_starts(units, cap), count) for cap in caps]


def deal_blocks(
    units: SortedUnits, ends: IntArray, ranks: int, waves: int, balance: str = "refined"
) -> IntArray:
    """The rank of each block; no rank has more than `waves`."""
    costs = np.full(ranks * waves, units.empty)
    costs[: len(ends)] = block_costs(units, ends)
    return partition(costs, ranks, balance, equal_sizes=True)[: len(ends)]


def lower_slowest(
    units: SortedUnits, ends: IntArray, ranks: int, waves: int
) -> tuple[IntArray, IntArray]:
    """(ends, rank of each block) after shifts and swaps, dealt again while that helps."""
    rank_of, time = ends, np.inf
    balance = "refined" if len(ends) <= _REFINED else "lpt"
    for _ in range(_TURNS if len(ends) <= _FEW else 1):
        dealt = deal_blocks(units, ends, ranks, waves, balance)
        cut, dealt, reached = slowest_lowered(units, ends, dealt, ranks, waves, _WORK)
        if reached >= time * (1 - 1e-9):
            break
        ends, rank_of, time = cut, dealt, reached
    return ends, rank_of


def _slowest(units: SortedUnits, ends: IntArray, rank_of: IntArray, ranks: int) -> float:
    return float(np.bincount(rank_of, block_costs(units, ends) - units.empty, ranks).max())
