"""Divide items of known cost between parts (ranks) such that the heaviest part is light.

stride          sorted, then dealt round-robin, as in NeMo-RL and ROLL
lpt             heaviest first, each to the lightest part
karmarkar_karp  largest differencing: combine the two least even partial partitions
refined         lpt, then swaps that lower the heaviest part (the default); if few items stay
                uneven, multifit, karmarkar_karp and random swaps are tried too
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.text import MOST_RANKS, truth_value, whole_number
from evenstep.errors import ConfigError, InputError
from evenstep.planning.balance.descending import heaviest_first
from evenstep.planning.balance.differencing import differenced
from evenstep.planning.balance.lowering import lower_heaviest
from evenstep.planning.kernels import kernel, sink

Deal: TypeAlias = Callable[[FloatArray, int, bool], IntArray]


@kernel
def lpt_kernel(costs: FloatArray, room: IntArray) -> IntArray:
    """The part of each item. Costs are heaviest first; part p takes at most `room[p]` items."""
    parts = room.shape[0]
    part_of = np.empty(costs.shape[0], np.int64)
    load = np.zeros(parts)
    left = room.copy()
    heap = np.arange(parts)  # lightest part at the root; ties by number
    alive = parts
    for i in range(costs.shape[0]):
        part = heap[0]
        part_of[i] = part
        load[part] += costs[i]
        left[part] -= 1
        if left[part] == 0:
            alive -= 1
            heap[0] = heap[alive]
        sink(heap, alive, load, 0, True)
    return part_of


def stride(costs: FloatArray, parts: int, equal_sizes: bool = False) -> IntArray:
    """Lightest first, round-robin: sorted item i goes to part i mod parts.

    >>> stride(np.array([7.0, 6, 8, 5, 1, 3, 8, 6]), 2).tolist()
    [1, 1, 0, 0, 0, 1, 1, 0]
    """
    part_of = np.empty(len(costs), np.int64)
    part_of[np.argsort(costs, kind="stable")] = np.arange(len(costs)) % parts
    return part_of


def lpt(costs: FloatArray, parts: int, equal_sizes: bool = False) -> IntArray:
    """Heaviest first, each to the lightest part that may take another item.

    >>> lpt(np.array([5.0, 4, 3, 3, 3]), 2).tolist()
    [0, 1, 1, 0, 1]
    """
    order = heaviest_first(costs)
    return _unsorted(lpt_kernel(costs[order], _room(len(costs), parts, equal_sizes)), order)


def _room(items: int, parts: int, equal_sizes: bool) -> IntArray:
    """How many items each part may take. With equal sizes, 5 items on 3 parts: 2, 2, 1."""
    if not equal_sizes:
        return np.full(parts, items)
    return ((items + np.arange(parts)[::-1]) // parts)[: min(parts, items)]


def _unsorted(part_of: IntArray, order: IntArray) -> IntArray:
    """The part of each item, given the parts of the items in `order`."""
    found = np.empty(len(order), np.int64)
    found[order] = part_of
    return found


def karmarkar_karp(costs: FloatArray, parts: int, equal_sizes: bool = False) -> IntArray:
    """Largest differencing: partial partitions are combined, heaviest part with lightest.

    >>> karmarkar_karp(np.array([8.0, 7, 6, 5, 4]), 2).tolist()
    [1, 0, 1, 0, 0]
    """
    order = heaviest_first(costs)
    return _unsorted(differenced(costs[order], parts, equal_sizes), order)


def refined(costs: FloatArray, parts: int, equal_sizes: bool = False) -> IntArray:
    """LPT, then swaps and moves that lower the heaviest part; never worse than LPT.

    >>> refined(np.array([5.0, 4, 3, 3, 3]), 2).tolist()
    [0, 0, 1, 1, 1]
    """
    order = heaviest_first(costs)
    room = _room(len(costs), parts, equal_sizes)
    part_of = lower_heaviest(costs[order], lpt_kernel(costs[order], room), parts, equal_sizes)
    return _unsorted(part_of, order)


DEALS: dict[str, Deal] = {deal.__name__: deal for deal in (refined, lpt, karmarkar_karp, stride)}


def partition(
    costs: ArrayLike, parts: int, algorithm: str = "refined", *, equal_sizes: bool = False
) -> IntArray:
    """The part of each item. With `equal_sizes`, parts differ by one item at most.

    >>> partition([5, 4, 3, 3, 3], 2).tolist()
    [0, 0, 1, 1, 1]
    """
    if algorithm not in DEALS:
        raise ConfigError(f"unknown balance {algorithm!r}; expected one of: {', '.join(DEALS)}.")
    parts = whole_number("parts", parts, most=MOST_RANKS)
    equal_sizes = truth_value("equal_sizes", equal_sizes)
    try:
        items = np.ascontiguousarray(costs, np.float64)
    except (TypeError, ValueError):
        items = np.full(1, np.nan)  # refused below
    if items.ndim != 1 or not np.isfinite(items).all() or (items < 0).any():
        raise InputError("costs must be a flat sequence of finite numbers of 0 or more.")
    if len(items) == 0:
        return np.empty(0, np.int64)
    return DEALS[algorithm](items, parts, equal_sizes)
