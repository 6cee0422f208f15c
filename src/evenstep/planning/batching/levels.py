"""Levels: how dear each wave may be, lowered pair by pair.

Blocks of one wave need not be neighbours: a wide sample alone in its wave's level leaves room that
narrow rows fill better than those next to it. Given the levels of all waves, units are cut from the
wide end, and each block goes to the wave that it fills best.
"""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.batching.blocks import SortedUnits, block_cost, block_costs, block_start
from evenstep.planning.kernels import kernel

_SHARES = np.array([0.6, 0.45, 0.3, 0.2, 0.14, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005])
_TRIALS = 6  # bisections of one level
_ROUNDS = 20
_LESS = 1 - 1e-9


@kernel
def blocks_in_waves(
    units: SortedUnits, levels: FloatArray, ranks: int, relative: bool
) -> tuple[IntArray, int]:
    """(ends of blocks such that each wave of `ranks` blocks keeps its level, blocks tried).

    There are no ends if the levels are too low.

    Each block goes to the wave whose level it leaves least of: as a share of it if `relative`.

    rows of 8 and 5, 5, 1 x 8 with 2 ranks and levels 8, 5 -> 8 and 1 x 8; 5 and 5
    """
    waves = levels.shape[0]
    left = np.full(waves, ranks)
    ends = np.empty(waves * ranks, np.int64)
    count = 0
    j = units.price.shape[0]
    while j > 0:
        chosen, start, least = -1, 0, np.inf
        for wave in range(waves):
            if left[wave] == 0 or (
                wave > 0 and left[wave - 1] and levels[wave] == levels[wave - 1]
            ):
                continue
            i = block_start(units, j, levels[wave])
            if i == j:
                continue
            unused = levels[wave] - block_cost(units, i, j)
            if relative:
                unused /= levels[wave]
            if unused < least:
                chosen, start, least = wave, i, unused
        if chosen < 0:
            return ends[:0], (count + 1) * waves
        left[chosen] -= 1
        ends[count] = j
        count += 1
        j = start
    return ends[:count][::-1].copy(), count * waves


@kernel
def levels_of(units: SortedUnits, ends: IntArray, ranks: int, waves: int) -> FloatArray:
    """The dearest block of each wave where blocks of similar cost share a wave, dearest first."""
    costs = np.full(waves * ranks, units.empty)
    for block, cost in enumerate(block_costs(units, ends)):
        costs[block] = cost
    return np.sort(costs)[::-1][::ranks].copy()


@kernel
def lower_levels(
    units: SortedUnits, ends: IntArray, ranks: int, waves: int, relative: bool, work: int
) -> IntArray:
    """The ends after levels are lowered, one by one and one at the expense of another.

    A level falls by a share; the other rises by as little as bisection finds. The change is kept if
    the sum of levels falls. Stops after about `work` blocks are tried.
    """
    levels = levels_of(units, ends, ranks, waves)
    time = levels.sum()
    for _ in range(_ROUNDS):
        before = time
        for share in _SHARES:
            for lower in range(waves):
                for higher in range(waves):
                    if work < 0:
                        return ends
                    gain = levels[lower] * share
                    trial = levels.copy()
                    trial[lower] -= gain
                    low, high = 0.0, gain * _LESS
                    if higher != lower:
                        trial[higher] += high
                    found, tried = blocks_in_waves(units, trial, ranks, relative)
                    work -= tried
                    if found.shape[0] == 0:
                        continue
                    for _ in range(_TRIALS if higher != lower else 0):
                        middle = (low + high) / 2
                        trial[higher] = levels[higher] + middle
                        lower_ends, tried = blocks_in_waves(units, trial, ranks, relative)
                        work -= tried
                        if lower_ends.shape[0]:
                            high, found = middle, lower_ends
                        else:
                            low = middle
                    reached = levels_of(units, found, ranks, waves)
                    if reached.sum() < time * _LESS:
                        time, levels, ends = reached.sum(), reached, found
        if time == before:
            break
    return ends
