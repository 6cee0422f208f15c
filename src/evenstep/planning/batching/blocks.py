"""Blocks: contiguous micro-batches of sorted units, and what they cost.

Units are sorted from narrow to wide and cut from the wide end: a block ends at j, its widest unit
is j - 1, and it starts where a level (the most it may cost) or a limit is reached. Narrower units
never need more than wider ones, so the earliest start is best for the blocks that follow.
"""

from typing import NamedTuple

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.batching.cuts import optimal_cuts
from evenstep.planning.kernels import kernel

_EXACT = 2**24
_ROUNDING = 1 + 1e-12  # 3 rows of cost 0.1 fit a level of 0.3


class SortedUnits(NamedTuple):
    """Units from narrow to wide.

    rows    the rows of each unit
    below   the rows of the first j units
    width   the width of a row of each unit
    price   what one row costs at that width
    scaled  the prices as integers, for exact sums
    starts  for each end, where the limits let a block start (`feasible_starts`)
    empty   what an empty micro-batch costs
    """

    rows: IntArray
    below: IntArray
    width: IntArray
    price: FloatArray
    scaled: IntArray
    starts: IntArray
    empty: float


def whole_prices(price: FloatArray) -> IntArray:
    """Prices as integers in proportion, exact if they are integers already.

    >>> whole_prices(np.array([0.5, 1.0])).tolist()
    [8388608, 16777216]
    """
    if price[-1] < _EXACT and (price == np.floor(price)).all():
        return np.asarray(price, np.int64)
    return np.asarray(np.maximum(np.rint(price / price[-1] * _EXACT), 1), np.int64)


@kernel
def block_cost(units: SortedUnits, start: int, end: int) -> float:
    """The cost of the units from `start` up to `end` in one micro-batch."""
    return float((units.below[end] - units.below[start]) * units.price[end - 1])


@kernel
def block_start(units: SortedUnits, end: int, level: float) -> int:
    """Where a block that ends at `end` and costs at most `level` starts; `end` if none does."""
    rows = level / units.price[end - 1] * _ROUNDING
    if rows >= units.below[end]:
        return int(units.starts[end])
    least = units.below[end] - int(rows)
    if units.below[end] == end:  # one row per unit up to here
        return max(int(units.starts[end]), int(least))
    low, high = int(units.starts[end]), end
    while low < high:
        middle = (low + high) // 2
        if units.below[middle] >= least:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def blocks_at(units: SortedUnits, start: int, end: int, level: float, most: int) -> IntArray:
    """The ends, ascending, of at most `most` blocks that cost at most `level`; empty if more."""
    ends = np.empty(most, np.int64)
    count = 0
    j = end
    while j > start and count < most:
        i = max(start, block_start(units, j, level))
        if i == j:
            break
        ends[count] = j
        count += 1
        j = i
    return ends[:count][::-1].copy() if j == start else ends[:0]


@kernel
def even_blocks(units: SortedUnits, start: int, end: int, most: int) -> IntArray:
    """The ends of at most `most` blocks whose dearest costs least; empty if they cannot fit.

    Exact where every unit is one row and there are no further limits.
    """
    best = blocks_at(units, start, end, np.inf, most)
    if best.shape[0] == 0:
        return best
    total = 0.0
    for j in range(start, end):
        total += (units.below[j + 1] - units.below[j]) * units.price[j]
    low, high = total / most, dearest(units, start, best)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        found = blocks_at(units, start, end, middle, most)
        if found.shape[0]:
            best = found
            high = min(middle, dearest(units, start, found))
        else:
            low = middle
    return best


@kernel
def dearest(units: SortedUnits, start: int, ends: IntArray) -> float:
    """The cost of the dearest block."""
    most = 0.0
    for end in ends:
        most = max(most, block_cost(units, start, end))
        start = end
    return most


@kernel
def block_costs(units: SortedUnits, ends: IntArray) -> FloatArray:
    """The cost of each block; the first starts at 0."""
    costs = np.empty(ends.shape[0])
    start = 0
    for b in range(ends.shape[0]):
        costs[b] = block_cost(units, start, ends[b])
        start = ends[b]
    return costs


@kernel
def capped_starts(units: SortedUnits, level: float) -> IntArray:
    """For each end, where a block within the limits that costs at most `level` starts.

    A single unit always counts as fitting.
    """
    n = units.price.shape[0]
    starts = np.zeros(n + 1, np.int64)
    for j in range(1, n + 1):
        starts[j] = min(block_start(units, j, level), j - 1)
    return starts


def cheapest_cuts(units: SortedUnits, starts: IntArray, count: int) -> IntArray:
    """The ends of exactly `count` blocks that cost least in total."""
    return optimal_cuts(units.scaled, units.rows, starts, count)


@kernel
def step_time(
    units: SortedUnits, address: IntArray, ranks: int, waves: int, lock_step: bool
) -> tuple[float, float]:
    """(modelled time, cost of all micro-batches) of units at `wave * ranks + rank`.

    Both without `per_micro_batch`. Empty micro-batches cost an empty row.
    """
    rows = np.zeros(waves * ranks, np.int64)
    widest = np.zeros(waves * ranks)
    for u in range(address.shape[0]):
        rows[address[u]] += units.rows[u]
        widest[address[u]] = units.price[u]  # the last is the widest
    total = 0.0
    slowest = 0.0
    load = np.zeros(ranks)
    for wave in range(waves):
        most = 0.0
        for rank in range(ranks):
            at = wave * ranks + rank
            cost = rows[at] * widest[at] if rows[at] else units.empty
            most = max(most, cost)
            load[rank] += cost
            total += cost
        slowest += most
    return (slowest if lock_step else load.max()), total
