"""Choose the sizes that fill a space best, exactly.

The reachable sums are a bitset, and adding an item shifts all of them at once. Items are added in
the given order and every stage is kept, so the first stage that has a sum shows which item
completed it. That makes the choice unique: of all sets with the largest sum, the one whose last
item comes first, then the one whose last but one does, and so on.

    sizes 3, 5, 2, space 7    {0} -> {0, 3} -> {0, 3, 5} -> {0, 2, 3, 5, 7}    7 = 2 + 5

A set that leaves out little has a sum close to the running total. So a narrow window below that
total is tried first, where an item needs only a few words.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray
from evenstep.planning.kernel import kernel

WordArray: TypeAlias = NDArray[np.uint64]

_KEPT = 2**21  # words over all stages (16 MiB); beyond it, one stage and the item of each sum


@kernel
def fill_space(sizes: IntArray, space: int) -> IntArray:
    """Ascending indices of the set with the largest sum within `space`."""
    indices = np.empty(sizes.shape[0], np.int64)
    units = np.empty(sizes.shape[0], np.int64)
    n, total, divisor = 0, 0, 0
    for i in range(sizes.shape[0]):
        if sizes[i] <= space:
            indices[n] = i
            units[n] = sizes[i]
            total += sizes[i]
            n += 1
            if divisor != 1:
                a, b = divisor, sizes[i]
                while b > 0:
                    a, b = b, a % b
                divisor = a
    indices, units = indices[:n], units[:n]
    if total <= space:
        return indices
    space //= divisor
    largest = 0
    for i in range(n):
        units[i] //= divisor
        largest = max(largest, units[i])
    window = 2 * largest
    taken = np.empty(0, np.int64)
    while 2 * window < space and taken.shape[0] == 0:
        taken = from_stages(units, space, window)
        window *= 4
    if taken.shape[0] == 0:
        if n * ((space >> 6) + 3) <= _KEPT:
            taken = from_stages(units, space, total)
        else:
            taken = from_records(units, space)
    for i in range(taken.shape[0]):
        taken[i] = indices[taken[i]]
    return taken


@kernel
def from_stages(units: IntArray, space: int, window: int) -> IntArray:
    """Indices of the set with the largest sum; empty if the window is too narrow to fill `space`.

    Stage k holds the sums of the first k items from their total less `window` up to `space`. What
    a set leaves out only grows, so a set that ends inside the window was never outside.
    """
    n = units.shape[0]
    words = min(space >> 6, (window >> 6) + 1) + 3
    stages = np.empty((n + 1, words), np.uint64)
    stages[0, :2] = np.uint64(1), np.uint64(0)
    totals = np.zeros(n + 1, np.int64)
    stage, found = 0, False
    while stage < n and not found:
        before = totals[stage]
        total = before + units[stage]
        if total - window > space:
            return np.empty(0, np.int64)
        shift_in(
            stages[stage],
            stages[stage + 1],
            max(0, before - window) >> 6,
            max(0, total - window) >> 6,
            min(before, space) >> 6,
            min(total, space) >> 6,
            units[stage],
        )
        stage += 1
        totals[stage] = total
        found = holds(stages[stage], total, window, space)
    if not found and window < totals[n]:
        return np.empty(0, np.int64)
    reached = space
    while not holds(stages[stage], totals[stage], window, reached):
        reached -= 1
    taken = np.empty(stage, np.int64)
    count = 0
    for k in range(stage - 1, -1, -1):
        if not holds(stages[k], totals[k], window, reached):
            taken[count] = k
            count += 1
            reached -= units[k]
    return taken[:count][::-1].copy()


@kernel
def holds(stage: WordArray, total: int, window: int, wanted: int) -> bool:
    """Whether a stage has the sum `wanted`, which is not below its window."""
    if wanted > total:
        return False
    bit = wanted - (max(0, total - window) >> 6 << 6)
    return bool((stage[bit >> 6] >> np.uint64(bit & 63)) & np.uint64(1))


@kernel
def shift_in(
    old: WordArray, new: WordArray, old_base: int, base: int, old_top: int, top: int, unit: int
) -> None:
    """new = old | old << unit, each in words from its own base up to its top.

    One word of zeros follows the top, because the next shift reads it.
    """
    skipped = base - old_base
    kept = max(0, old_top - base + 1)
    source = old[skipped:]
    for i in range(kept):
        new[i] = source[i]
    for i in range(kept, top - base + 2):
        new[i] = np.uint64(0)
    whole, part = unit >> 6, np.uint64(unit & 63)
    rest = np.uint64(63) - part
    # Word i of `new` gets word i + ahead of `old`, shifted up, and the carry from the one below.
    ahead = skipped - whole
    first = max(0, -ahead)
    if first + ahead == 0 and first <= top - base:
        new[first] |= old[0] << part
        first += 1
    count = top - base + 1 - first
    if count > 0:
        target, upper, lower = new[first:], old[first + ahead :], old[first + ahead - 1 :]
        for i in range(count):
            target[i] |= (upper[i] << part) | ((lower[i] >> np.uint64(1)) >> rest)


@kernel
def from_records(units: IntArray, space: int) -> IntArray:
    """`from_stages` with all sums in less memory: it records the item that first made each sum."""
    words = np.zeros((space >> 6) + 1, np.uint64)
    words[0] = np.uint64(1)
    made_by = np.empty(space + 1, np.int32)
    total = 0
    for k in range(units.shape[0]):
        whole, part = units[k] >> 6, np.uint64(units[k] & 63)
        total += units[k]
        for i in range(min(total, space) >> 6, whole - 1, -1):
            moved = words[i - whole] << part
            if i > whole:
                moved |= (words[i - whole - 1] >> np.uint64(1)) >> (np.uint64(63) - part)
            fresh = moved & ~words[i]
            if fresh != np.uint64(0):
                words[i] |= fresh
                for bit in range(64):
                    if (fresh >> np.uint64(bit)) & np.uint64(1) and (i << 6) + bit <= space:
                        made_by[(i << 6) + bit] = k
        if holds(words, total, total, space):
            break
    reached = space
    while not holds(words, total, total, reached):
        reached -= 1
    taken = np.empty(units.shape[0], np.int64)
    count = 0
    while reached > 0:
        taken[count] = made_by[reached]
        reached -= units[taken[count]]
        count += 1
    return taken[:count][::-1].copy()
