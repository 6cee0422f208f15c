"""Choose the set with the most value under limits of weight and number.

`fill_under_weight` uses the classical table: for every value the least weight that reaches it. As
in `subset_sum`, items are added in the given order, every stage is kept, and a narrow window below
the running total is tried first. `search` handles all limits at once, with a bound on its steps.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray
from evenstep.planning.kernel import kernel

Int32Array: TypeAlias = NDArray[np.int32]

_KEPT = 2**20  # table entries over all stages: about half a millisecond
_STEPS = 100_000  # items a search tries: some tenths of a millisecond
_NEVER = 2**30  # the weight of values that no set reaches


@kernel
def fill_under_weight(
    values: IntArray, weights: IntArray, most_value: int, most_weight: int
) -> IntArray:
    """Ascending indices of the set with the most value within both limits.

    Of equal sets, the one whose last item comes first. Empty if the table would be too large, or
    if nothing fits.
    """
    taken = np.empty(0, np.int64)
    if most_weight >= _NEVER:
        return taken
    indices = np.empty(values.shape[0], np.int64)
    n, total, largest = 0, 0, 0
    for i in range(values.shape[0]):
        if values[i] <= most_value and weights[i] <= most_weight:
            indices[n] = i
            n += 1
            total += values[i]
            largest = max(largest, values[i])
    indices = indices[:n].copy()
    values, weights = values[indices], weights[indices]
    window = 2 * largest
    while 2 * window < min(total, most_value) and taken.shape[0] == 0:
        taken = lightest(values, weights, most_value, most_weight, window)
        window *= 4
    if taken.shape[0] == 0:
        taken = lightest(values, weights, most_value, most_weight, total)
    for i in range(taken.shape[0]):
        taken[i] = indices[taken[i]]
    return taken


@kernel
def lightest(
    values: IntArray, weights: IntArray, most_value: int, most_weight: int, window: int
) -> IntArray:
    """Indices of the best set; empty if the window or the table is too small to find one.

    Stage k holds the least weight of every value of the first k items, from their total less
    `window` up to `most_value`.
    """
    n = values.shape[0]
    width = min(most_value, window) + 1
    stages = np.empty((min(n, _KEPT // width) + 1, width), np.int32)
    totals = np.zeros(n + 1, np.int64)
    stages[0, 0] = 0
    stage, found = 0, False
    while stage < n and not found:
        before, value, weight = totals[stage], values[stage], np.int32(weights[stage])
        total = before + value
        if total - window > most_value or stage + 1 == stages.shape[0]:
            return np.empty(0, np.int64)
        old_base, base = max(0, before - window), max(0, total - window)
        old, new = stages[stage], stages[stage + 1]
        old_end, end = min(before, most_value) + 1, min(total, most_value) + 1
        kept = max(base, old_end) - base
        for i in range(kept):
            new[i] = old[i + base - old_base]
        for i in range(kept, end - base):
            new[i] = _NEVER
        first = max(base, old_base + value)
        target, source = new[first - base :], old[first - value - old_base :]
        for i in range(min(end, old_end + value) - first):
            target[i] = min(target[i], source[i] + weight)
        stage += 1
        totals[stage] = total
        found = total >= most_value and new[most_value - base] <= most_weight
    if not found and window < totals[n]:
        return np.empty(0, np.int64)
    reached, spare = min(most_value, totals[stage]), most_weight
    base = max(0, totals[stage] - window)
    while stages[stage, reached - base] > spare:
        reached -= 1
    taken = np.empty(stage, np.int64)
    count = 0
    for k in range(stage - 1, -1, -1):
        base = max(0, totals[k] - window)
        if reached > totals[k] or stages[k, reached - base] > spare:
            taken[count] = k
            count += 1
            reached -= values[k]
            spare -= weights[k]
    return taken[:count][::-1].copy()


@kernel
def search(
    values: IntArray, sizes: IntArray, most_value: int, most_size: int, most: int
) -> IntArray:
    """Ascending indices of the set with the most value within all three limits.

    Depth first, taking an item before leaving it out, so of equal sets the first in order wins.
    After `_STEPS` the best set so far is returned. It is at least as good as the greedy one.
    """
    n = values.shape[0]
    most = min(most, n)
    left = np.zeros(n + 1, np.int64)  # the total and the largest value from each index on
    largest = np.zeros(n + 1, np.int64)
    for i in range(n - 1, -1, -1):
        left[i] = left[i + 1] + values[i]
        largest[i] = max(largest[i + 1], values[i])
    taken = np.empty(n, np.int64)
    best = np.empty(n, np.int64)
    count, held, best_value = 0, 0, -1
    value, size, i, steps = 0, 0, 0, 0
    while True:
        while i < n and count < most:
            could = value + min(left[i], largest[i] * (most - count))
            if could <= best_value:
                break
            if value + values[i] <= most_value and size + sizes[i] <= most_size:
                taken[count] = i
                count += 1
                value += values[i]
                size += sizes[i]
            i += 1
            steps += 1
        if value > best_value:
            best_value, held = value, count
            best[:count] = taken[:count]
        if count == 0 or best_value == most_value or steps > _STEPS:
            return best[:held].copy()
        count -= 1
        i = taken[count]
        value -= values[i]
        size -= sizes[i]
        i += 1
        steps += 1
