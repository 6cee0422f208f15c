"""Divide items of known cost between parts (ranks) such that the heaviest part is light.

stride          sorted, then dealt round-robin, as in NeMo-RL and ROLL
lpt             heaviest first, each to the lightest part
karmarkar_karp  largest differencing: combine the two least even partial partitions
refined         lpt, then swaps that lower the heaviest part (the default); if few items stay
                uneven, exactly filled parts are tried too
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.rounding import divided_up
from evenstep.core.validate import MOST_RANKS, truth_value, whole_number
from evenstep.errors import ConfigError, InputError
from evenstep.planning.balance.differencing import differencing_kernel
from evenstep.planning.heap import sink
from evenstep.planning.kernel import kernel
from evenstep.planning.packing.optimal import optimal_kernel

Deal: TypeAlias = Callable[[FloatArray, int, bool], IntArray]

_PARTNERS = 16  # parts tried for one swap
_PAIRS_UP_TO = 32  # items a part may have for two-against-two swaps
_CLOSE = 1e-4  # a heaviest part this close to the mean is accepted
_STUCK, _FEW = 1e-3, 2048  # farther from the bound than this, with so few items: try other ways
_UNITS = 2**18  # the bound in integer sizes; rounding up costs 4e-6 per item


@kernel
def lpt_kernel(costs: FloatArray, order: IntArray, room: IntArray) -> IntArray:
    """The part of each item. `order` is heaviest first; part p takes at most `room[p]` items."""
    parts = room.shape[0]
    part_of = np.empty(costs.shape[0], np.int64)
    load = np.zeros(parts)
    left = room.copy()
    heap = np.arange(parts)  # lightest part at the root; ties by number
    alive = parts
    for i in order:
        part = heap[0]
        part_of[i] = part
        load[part] += costs[i]
        left[part] -= 1
        if left[part] == 0:
            alive -= 1
            heap[0] = heap[alive]
        sink(heap, alive, load, 0, True)
    return part_of


@kernel
def swap_gain(heavy: FloatArray, light: FloatArray, gap: float) -> tuple[float, int, int]:
    """The swap that best halves `gap`: (distance from half, index in heavy, index in light).

    Both are costs, heaviest first, so two pointers find the best pair.
    """
    best, at, to = gap / 2, -1, -1
    j = 0
    for i in range(heavy.shape[0]):
        # The ideal partner is lighter than item i by half the gap.
        wanted = heavy[i] - gap / 2
        while j < light.shape[0] and light[j] > wanted:
            j += 1
        for k in (j - 1, j):
            if 0 <= k < light.shape[0]:
                off = abs(heavy[i] - light[k] - gap / 2)
                if off < best:
                    best, at, to = off, i, k
    return best, at, to


@kernel
def pair_sums(costs: FloatArray, row: IntArray) -> tuple[FloatArray, IntArray]:
    """(the cost of every pair of items of a part, heaviest first, and its name i * n + j)."""
    n = row.shape[0]
    sums = np.empty(n * (n - 1) // 2)
    names = np.empty(sums.shape[0], np.int64)
    k = 0
    for i in range(n):
        for j in range(i + 1, n):
            sums[k] = costs[row[i]] + costs[row[j]]
            names[k] = i * n + j
            k += 1
    order = np.argsort(-sums, kind="mergesort")
    return sums[order], names[order]


@kernel
def put_sorted(costs: FloatArray, row: IntArray, at: int, item: int) -> None:
    """Replace `row[at]` by `item`, keeping the row sorted heaviest first."""
    while at > 0 and costs[row[at - 1]] < costs[item]:
        row[at] = row[at - 1]
        at -= 1
    while at + 1 < row.shape[0] and costs[row[at + 1]] > costs[item]:
        row[at] = row[at + 1]
        at += 1
    row[at] = item


@kernel
def swap_items(
    costs: FloatArray,
    part_of: IntArray,
    load: FloatArray,
    heavy: int,
    light: int,
    mine: IntArray,
    theirs: IntArray,
    at: int,
    to: int,
) -> None:
    """Swap item `mine[at]` of the heavy part with `theirs[to]` of the light one."""
    given, taken = mine[at], theirs[to]
    difference = costs[given] - costs[taken]
    load[heavy] -= difference
    load[light] += difference
    put_sorted(costs, mine, at, taken)
    put_sorted(costs, theirs, to, given)
    part_of[given] = light
    part_of[taken] = heavy


@kernel
def refine_kernel(costs: FloatArray, part_of: IntArray, parts: int) -> None:
    """Swap items between the heaviest part and lighter ones while that lowers the heaviest.

    Parts keep their number of items. Items of no cost let another item move without a swap.
    """
    n = costs.shape[0]
    order = np.argsort(-costs, kind="mergesort")
    start = np.zeros(parts + 1, np.int64)
    for i in range(n):
        start[part_of[i] + 1] += 1
    for part in range(parts):
        start[part + 1] += start[part]
    cursor = start.copy()
    member = np.empty(n, np.int64)
    load = np.zeros(parts)
    for i in order:
        member[cursor[part_of[i]]] = i
        cursor[part_of[i]] += 1
        load[part_of[i]] += costs[i]
    mean = load.sum() / parts
    for _ in range(20 * parts + 100):
        heavy = int(np.argmax(load))
        if load[heavy] <= mean * (1 + _CLOSE):
            break
        mine = member[start[heavy] : start[heavy + 1]]
        lightest = int(np.argmin(load))
        best = load[heavy] * (1 - 1e-12)
        with_part, at, to = -1, -1, -1
        tried = 0
        for step in range(parts):
            other = int((lightest + step) % parts)
            # At best, a swap makes both parts cost their mean.
            if other == heavy or (load[heavy] + load[other]) / 2 >= best:
                continue
            theirs = member[start[other] : start[other + 1]]
            gap = load[heavy] - load[other]
            off, i, j = swap_gain(costs[mine], costs[theirs], gap)
            reached = (load[heavy] + load[other]) / 2 + off
            if i >= 0 and reached < best:
                best, with_part, at, to = reached, other, i, j
            tried += 1
            if tried >= _PARTNERS and with_part >= 0:
                break
        if with_part >= 0:
            theirs = member[start[with_part] : start[with_part + 1]]
            swap_items(costs, part_of, load, heavy, with_part, mine, theirs, at, to)
            continue
        # No single swap helps: swap two for two.
        if mine.shape[0] > _PAIRS_UP_TO:
            break
        my_sums, my_names = pair_sums(costs, mine)
        for step in range(parts):
            other = int((lightest + step) % parts)
            theirs = member[start[other] : start[other + 1]]
            gap = load[heavy] - load[other]
            if other == heavy or gap <= 0 or theirs.shape[0] > _PAIRS_UP_TO:
                continue
            sums, names = pair_sums(costs, theirs)
            off, i, j = swap_gain(my_sums, sums, gap)
            if i >= 0 and (load[heavy] + load[other]) / 2 + off < load[heavy] * (1 - 1e-12):
                n, m = mine.shape[0], theirs.shape[0]
                given = mine[np.array([my_names[i] // n, my_names[i] % n])]
                taken = theirs[np.array([names[j] // m, names[j] % m])]
                for k in range(2):
                    at = int(np.argmax(mine == given[k]))
                    to = int(np.argmax(theirs == taken[k]))
                    swap_items(costs, part_of, load, heavy, other, mine, theirs, at, to)
                with_part = other
                break
        if with_part < 0:
            break


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
    room = np.full(parts, len(costs))
    if equal_sizes:
        room = (len(costs) + np.arange(parts)[::-1]) // parts  # 5 items on 3 parts: 2, 2, 1
        parts = min(parts, len(costs))
    return lpt_kernel(costs, np.argsort(-costs, kind="stable"), room[:parts])


def karmarkar_karp(costs: FloatArray, parts: int, equal_sizes: bool = False) -> IntArray:
    """Largest differencing: partial partitions are combined, heaviest part with lightest.

    >>> karmarkar_karp(np.array([8.0, 7, 6, 5, 4]), 2).tolist()
    [1, 0, 1, 0, 0]
    """
    size = divided_up(len(costs), parts)
    padded = _padded(costs, size * parts) if equal_sizes else costs
    order = np.argsort(-padded, kind="stable")
    part_of = differencing_kernel(padded, order, parts, parts if equal_sizes else 1)
    return part_of[: len(costs)]


def refined(costs: FloatArray, parts: int, equal_sizes: bool = False) -> IntArray:
    """LPT, then swaps and moves that lower the heaviest part; never worse than LPT.

    >>> refined(np.array([5.0, 4, 3, 3, 3]), 2).tolist()
    [0, 0, 1, 1, 1]
    """
    part_of = lpt(costs, parts, equal_sizes)
    if equal_sizes:
        refine_kernel(costs, part_of, parts)
    else:
        part_of = _filled_exactly(costs, _swapped(costs, part_of, parts), parts)
    if not _is_stuck(costs, part_of, parts):
        return part_of
    other = karmarkar_karp(costs, parts, equal_sizes)
    return min(part_of, other, key=lambda found: _heaviest(costs, found, parts))


def _heaviest(costs: FloatArray, part_of: IntArray, parts: int) -> float:
    return float(np.bincount(part_of, costs, parts).max())


def _is_stuck(costs: FloatArray, part_of: IntArray, parts: int) -> bool:
    """Whether there are few items and the heaviest part is far from its bound."""
    least = max(float(costs.sum()) / parts, float(costs.max()))
    return len(costs) <= _FEW and _heaviest(costs, part_of, parts) > least * (1 + _STUCK)


def _swapped(costs: FloatArray, part_of: IntArray, parts: int) -> IntArray:
    # Two items of no cost in each part let one or two others move without a swap.
    whole = np.concatenate((part_of, np.arange(parts), np.arange(parts)))
    refine_kernel(_padded(costs, len(whole)), whole, parts)
    return whole[: len(costs)]


def _filled_exactly(costs: FloatArray, part_of: IntArray, parts: int) -> IntArray:
    """The parts as bins slightly larger than the bound, if that gives a lighter heaviest part.

    Swaps between two parts miss this where one part cannot reach the mean and all others must
    share what it leaves.
    """
    if not _is_stuck(costs, part_of, parts):
        return part_of
    most = _heaviest(costs, part_of, parts)
    least = max(float(costs.sum()) / parts, float(costs.max()))
    sizes = np.maximum(np.ceil(costs / least * _UNITS), 1).astype(np.int64)
    for over in (_STUCK / 2, _STUCK * 0.9):
        found = optimal_kernel(sizes, int(_UNITS * (1 + over)), parts, parts + 1)
        if len(found):
            found = _swapped(costs, found, parts)
            return found if _heaviest(costs, found, parts) < most else part_of
    return part_of


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


def _padded(costs: FloatArray, count: int) -> FloatArray:
    """The costs, padded with zeros to `count` items."""
    return np.concatenate((costs, np.zeros(count - len(costs))))
