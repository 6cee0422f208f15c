"""Cuts for ranks that synchronise at every micro-batch: waves of equally dear blocks.

The time of a step is the sum over waves of the dearest block. A wave takes consecutive units, cut
into one block per rank, each up to a level. Dynamic programming over the units where waves start
chooses the levels.
"""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.batching.blocks import (
    SortedUnits,
    block_cost,
    block_start,
    even_blocks,
)
from evenstep.planning.kernels import kernel

_LEVELS = 48
_STATES = 512  # wave starts kept after each wave
_TABLE = 2**23  # entries of the table of waves
_RANGE = 32  # the mean of a wave relative to the lowest level tried


@kernel
def wave_table(units: SortedUnits, levels: FloatArray, ranks: int) -> tuple[IntArray, FloatArray]:
    """For each level and end: (where a wave of `ranks` blocks starts, what its dearest costs).

    Blocks are doubled: a wave of 6 is one of 2 followed by one of 4.
    """
    n = units.price.shape[0]
    count = levels.shape[0]
    reach = np.empty((count, n + 1), np.int64)
    most = np.zeros((count, n + 1))
    step = np.empty(n + 1, np.int64)
    cost = np.empty(n + 1)
    for at in range(count):
        step[0], cost[0] = 0, 0.0
        for j in range(1, n + 1):
            step[j] = block_start(units, j, levels[at])
            cost[j] = block_cost(units, step[j], j)
        for j in range(n + 1):
            reach[at, j] = j
        left = ranks
        while left > 0:
            if left % 2:
                for j in range(n + 1):
                    i = reach[at, j]
                    most[at, j] = max(most[at, j], cost[i])
                    reach[at, j] = step[i]
            left //= 2
            if left:
                for j in range(n, -1, -1):  # step[i] is needed for i below j only
                    i = step[j]
                    cost[j] = max(cost[j], cost[i])
                    step[j] = step[i]
    return reach, most


@kernel
def choose_waves(
    units: SortedUnits, levels: FloatArray, ranks: int, fewest: int, most: int
) -> IntArray:
    """Where the waves of the least time end, for each number of waves.

    Row w has `fewest + w` waves, from wide to narrow; those that end at 0 are empty. After each
    wave, only wave starts that no other reaches farther in less time are kept.

    units of 8, 8, 1, 1 on two ranks, one or two waves -> [[4, 0], [4, 2]]: times 16 and 9
    """
    n = units.price.shape[0]
    reach, cost = wave_table(units, levels, ranks)
    needed = np.zeros(n + 1, np.int64)  # blocks of the first j units
    for j in range(1, n + 1):
        needed[j] = needed[units.starts[j]] + 1
    states = max(8, min(_STATES, _TABLE // (most + 1)))
    place = np.zeros((most + 1, states), np.int64)
    parent = np.zeros((most + 1, states), np.int64)
    time = np.zeros((most + 1, states))
    held = 1
    place[0, 0] = n
    best = np.full(n + 1, np.inf)
    origin = np.zeros(n + 1, np.int64)
    kept = np.empty(n + 1, np.int64)
    ends = np.zeros((most - fewest + 1, most), np.int64)
    for wave in range(1, most + 1):
        least, largest = n, 0
        for s in range(held):
            j = place[wave - 1, s]
            largest = max(largest, j)
            for at in range(levels.shape[0]):
                i = reach[at, j]
                if i == j and j > 0:
                    continue
                reached = time[wave - 1, s] + (cost[at, j] if j > 0 else units.empty)
                least = min(least, i)
                if reached < best[i]:
                    best[i], origin[i] = reached, s
                if i == 0:
                    break  # higher levels reach no further
        count = 0
        lowest = np.inf
        for i in range(least, largest + 1):
            if best[i] < lowest and needed[i] <= (most - wave) * ranks:
                lowest = best[i]
                kept[count] = i
                count += 1
        held = min(count, states)
        for s in range(held):
            i = kept[s * (count - 1) // max(held - 1, 1)]
            place[wave, s], parent[wave, s], time[wave, s] = i, origin[i], best[i]
        best[least : largest + 1] = np.inf
        if wave >= fewest and held and place[wave, 0] == 0:
            s = 0
            for w in range(wave, 0, -1):
                s = parent[w, s]
                ends[wave - fewest, w - 1] = place[w - 1, s]
    return ends


def levels_to_try(units: SortedUnits, ranks: int, waves: int) -> FloatArray:
    """Levels of a wave, ascending: up to the dearest block that the limits allow.

    A wave far below the mean is of no use, except for the narrowest units.
    """
    n = len(units.price)
    most = float(((units.below[1:] - units.below[units.starts[1:]]) * units.price).max())
    mean = float((units.rows * units.price).sum()) / (ranks * waves)
    least = min(max(float(units.price[0]), mean / _RANGE), most)
    levels = np.geomspace(least, most, max(8, min(_LEVELS, _TABLE // (n + 1))))
    levels[-1] = most  # exactly, or the fewest waves might not suffice
    return np.unique(levels)


def wave_cuts(units: SortedUnits, ranks: int, fewest: int, most: int) -> list[IntArray]:
    """The ends of the blocks for each number of waves from `fewest` to `most`; may be empty."""
    levels = levels_to_try(units, ranks, fewest)
    waves = choose_waves(units, levels, ranks, fewest, most)
    return [cut_waves(units, ends, ranks) for ends in waves]


@kernel
def cut_waves(units: SortedUnits, waves: IntArray, ranks: int) -> IntArray:
    """The ends of all blocks, ascending, where each wave is cut as evenly as its ranks allow."""
    ends = np.empty(waves.shape[0] * ranks, np.int64)
    count, start = 0, 0
    for end in waves[::-1]:
        if end > start:
            for cut in even_blocks(units, start, end, ranks):
                ends[count] = cut
                count += 1
            start = end
    return ends[:count]
