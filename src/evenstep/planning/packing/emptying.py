"""Empty bins into others, under several limits.

The least filled bin gives its items away, largest first. An item moves to a bin with room, or is
swapped for a smaller item of another bin, which then takes its turn. Every swap keeps all limits
and makes the bin less full, so the bin is either emptied or left with less.

    bins of 10 with [6, 3], [5, 4], [2]    2 is swapped for nothing smaller; it fits nowhere
    bins of 10 with [6, 3], [5, 3], [2]    2 moves beside 5 and 3, and one bin is gone
"""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernel import kernel

_FAILED = 24  # bins in a row that could not be emptied, after which to stop


@kernel
def room_for(wanted: FloatArray, room: FloatArray, caps: FloatArray, source: int, bins: int) -> int:
    """The bin other than `source` with room for `wanted` and the least left afterwards, or -1."""
    chosen, least = -1, np.inf
    for b in range(bins):
        rest = 0.0
        for d in range(caps.shape[0]):
            left = room[b, d] - wanted[d]
            rest += left / caps[d]
            if left < 0:
                rest = np.inf
                break
        if rest < least and b != source:
            chosen, least = b, rest
    return chosen


@kernel
def swap_for(
    item: int,
    taken: FloatArray,
    weight: FloatArray,
    bin_of: IntArray,
    room: FloatArray,
    source: int,
) -> int:
    """The lightest item that can be swapped for `item` of bin `source`, or -1 if none is lighter.

    Both bins keep all limits.
    """
    chosen, least = -1, weight[item] * (1 - 1e-9)
    for other in range(weight.shape[0]):
        b = bin_of[other]
        if weight[other] >= least or b == source:
            continue
        fit = True
        for d in range(taken.shape[1]):
            fit = (
                fit
                and taken[item, d] <= room[b, d] + taken[other, d]
                and taken[other, d] <= room[source, d] + taken[item, d]
            )
        if fit:
            chosen, least = other, weight[other]
    return chosen


@kernel
def move(
    item: int, taken: FloatArray, bin_of: IntArray, room: FloatArray, source: int, target: int
) -> None:
    """Move an item from bin `source` to bin `target`."""
    bin_of[item] = target
    for d in range(taken.shape[1]):
        room[target, d] -= taken[item, d]
        room[source, d] += taken[item, d]


@kernel
def items_of(bin_of: IntArray, source: int, weight: FloatArray) -> IntArray:
    """The items of a bin, heaviest first."""
    count = 0
    for b in bin_of:
        count += b == source
    items = np.empty(count, np.int64)
    at = 0
    for item in range(bin_of.shape[0]):
        if bin_of[item] == source:
            k = at
            while k > 0 and weight[items[k - 1]] < weight[item]:
                items[k] = items[k - 1]
                k -= 1
            items[k] = item
            at += 1
    return items


@kernel
def give_away(
    source: int,
    taken: FloatArray,
    weight: FloatArray,
    caps: FloatArray,
    bin_of: IntArray,
    room: FloatArray,
    bins: int,
) -> tuple[int, int]:
    """(items that remain in bin `source`, steps). Moves and swaps its items, in place."""
    items = items_of(bin_of, source, weight)
    remaining, steps = items.shape[0], 0
    changed = True
    while changed and remaining > 0:
        changed = False
        for k in range(items.shape[0]):
            while items[k] >= 0:
                steps += 1
                item = items[k]
                target = room_for(taken[item], room, caps, source, bins)
                if target >= 0:
                    move(item, taken, bin_of, room, source, target)
                    items[k] = -1
                    remaining -= 1
                    changed = True
                    break
                other = swap_for(item, taken, weight, bin_of, room, source)
                if other < 0:
                    break
                target = bin_of[other]
                move(other, taken, bin_of, room, target, source)
                move(item, taken, bin_of, room, source, target)
                items[k] = other
                changed = True
    return remaining, steps


@kernel
def empty_bins_kernel(
    taken: FloatArray,
    weight: FloatArray,
    caps: FloatArray,
    bin_of: IntArray,
    bins: int,
    least: int,
    looks: int,
) -> int:
    """Empty bins, in place, until there are `least` or no more can be; return their number.

    Item i takes `taken[i, d]` of limit d; `weight` is how hard it is to place. About `looks` items
    are looked at.
    """
    n, limits = taken.shape
    room = np.empty((bins, limits))
    load = np.empty(bins)
    tried = np.zeros(bins, np.bool_)
    failed = 0
    while bins > least and looks > 0 and failed < _FAILED:
        for b in range(bins):
            load[b] = 0.0
            for d in range(limits):
                room[b, d] = caps[d]
        for i in range(n):
            load[bin_of[i]] += weight[i]
            for d in range(limits):
                room[bin_of[i], d] -= taken[i, d]
        source = -1
        for b in range(bins):
            if not tried[b] and (source < 0 or load[b] < load[source]):
                source = b
        if source < 0:
            break
        tried[source] = True
        remaining, steps = give_away(source, taken, weight, caps, bin_of, room, bins)
        looks -= (steps + 1) * n
        if remaining > 0:
            failed += 1
            continue
        # The last bin takes the number of the empty one.
        bins -= 1
        for i in range(n):
            if bin_of[i] == bins:
                bin_of[i] = source
        for b in range(bins):
            tried[b] = False
        failed = 0
    return bins
