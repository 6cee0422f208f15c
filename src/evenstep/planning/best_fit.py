"""Best-fit decreasing in near-linear time.

Lengths are small integers, so no comparisons are needed: items are sorted by counting, open bins
are kept in stacks by remaining space, and a two-level bitmap finds the smallest space that is large
enough. Items of equal length are packed together: the best fit for one stays the best fit for the
next while it has room, and then the rest of its stack does.

The remaining time is memory access. Both scattering passes (items by length, items by bin) compute
a block of targets, prefetch them, and then write: without this, writes that miss the cache took
half of the time. Scratch arrays are unsigned, because numba checks signed indices for wrap-around.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray, Ragged
from evenstep.errors import InputError
from evenstep.planning.kernels import kernel, prefetch, trailing_zeros

Natural: TypeAlias = NDArray[np.unsignedinteger]

_TOGETHER = 2**19  # items from which on two threads share the work
BLOCK = 256  # targets prefetched at a time: enough to hide latency, few enough to stay in cache
NONE = np.uint32(2**32 - 1)  # no bin


def check_items(lengths: IntArray, capacity: int) -> None:
    """Raise if an item is shorter than 1 or longer than a bin."""
    shortest, longest = int(lengths.argmin()), int(lengths.argmax())
    if lengths[shortest] < 1:
        raise InputError(
            f"item {shortest} has length {lengths[shortest]}; expected 1 or more. Remove the item."
        )
    if lengths[longest] > capacity:
        raise InputError(
            f"item {longest} has length {lengths[longest]} but a bin holds {capacity}. Raise the "
            f"capacity, or split or drop the item."
        )


def bins_in_order(bin_of: IntArray) -> Ragged:
    """The items of each bin, by index: bins [1, 0, 1] -> [[1], [0, 2]]."""
    return Ragged.group(bin_of, int(bin_of.max(initial=-1)) + 1)


def bins_by(bin_of: IntArray, order: IntArray) -> Ragged:
    """The items of each bin, in `order`: bins [1, 0, 1], order [2, 1, 0] -> [[1], [2, 0]]."""
    grouped = bins_in_order(bin_of[order])
    return Ragged(order[grouped.values], grouped.offsets)


def best_fit_few(lengths: IntArray, capacity: int) -> Ragged:
    """`best_fit` without tables over the capacity."""
    check_items(lengths, capacity)
    order = np.argsort(-lengths, kind="stable")
    return bins_by(fit_few_items(lengths, order, capacity), order)


def best_fit(lengths: IntArray, capacity: int) -> Ragged:
    """The items of each bin, longest first."""
    n, naturals = len(lengths), lengths.view(np.uint64)
    # One large numpy array uses huge pages; arrays made in a kernel, or two small ones, do not.
    scratch, values = np.empty((2, n), np.uint32), np.empty(n, np.int64)
    following, present, stops = count_lengths(naturals, capacity)
    if len(stops) == 0 or stops[-1] < n:
        check_items(lengths, capacity)  # raises, and names the item
    if n < _TOGETHER:
        offsets = fit_counted(naturals, following, present, stops, capacity, scratch, values)
        return Ragged(values, offsets)
    order, bin_of = scratch
    below, size = values.view(np.uint32).reshape(2, -1)  # until the bins are filled
    with ThreadPoolExecutor(1) as second:
        sorting = second.submit(sort_items, naturals, following, order)
        bins = fit_items(present, stops, capacity, bin_of, below, size)
        sorting.result()
    return Ragged(values, fill_bins(bin_of, order, size[:bins], values))


@kernel
def count_lengths(lengths: Natural, longest: int) -> tuple[Natural, Natural, Natural]:
    """Where the items of each length begin and end when sorted longest first.

    Lengths outside of 1 to `longest` are left out; a negative length is huge when unsigned.
    Returns the first index of each length, the lengths that occur, and where each of these ends:
    lengths [2, 5, 2] -> following[5] = 0, following[2] = 1, present [5, 2], stops [1, 3]
    """
    following = np.zeros(longest + 1, np.uint32)
    # Two counters in turn: repeated updates of one wait for each other.
    other = np.zeros(longest + 1, np.uint32)
    none, bound = np.uint64(0), np.uint64(longest)
    for i in range(0, lengths.shape[0] - 1, 2):
        following[lengths[i] if lengths[i] <= bound else none] += 1
        other[lengths[i + 1] if lengths[i + 1] <= bound else none] += 1
    if lengths.shape[0] % 2:
        following[lengths[-1] if lengths[-1] <= bound else none] += 1
    present = np.empty(longest, np.uint32)
    stops = np.empty(longest, np.uint32)
    distinct = 0
    total = 0
    for length in range(longest, 0, -1):
        count = int(following[length]) + int(other[length])
        following[length] = total
        total += count
        present[distinct] = length
        stops[distinct] = total
        distinct += count > 0  # no branch: half of all lengths may be missing
    return following, present[:distinct], stops[:distinct]


@kernel
def sort_items(lengths: Natural, following: Natural, order: Natural) -> None:
    """Fill `order` with the items, longest first. Overwrites `following`."""
    targets = np.empty(BLOCK, np.uint32)
    n = lengths.shape[0]
    for start in range(0, n, BLOCK):
        stop = min(BLOCK, n - start)
        for i in range(stop):
            length = lengths[start + i]
            target = following[length]
            following[length] = target + 1
            targets[i] = target
            prefetch(order, target)
        for i in range(stop):
            order[targets[i]] = start + i


@kernel
def bit(number: int) -> np.uint64:
    """The bit of `number` in its word of 64: 66 -> 0b100."""
    return np.uint64(1) << np.uint64(number & 63)


@kernel
def smallest_space(low: Natural, high: Natural, length: int) -> int:
    """The smallest space of `length` or more that an open bin has, or -1.

    `low` has a bit per space, 64 to a word; `high` has a bit per word of `low`.
    """
    word = length >> 6
    bits = low[word] >> np.uint64(length & 63)
    if bits != 0:
        return length + trailing_zeros(bits)
    word += 1
    if word >= low.shape[0]:
        return -1
    group = word >> 6
    bits = high[group] >> np.uint64(word & 63)
    if bits != 0:
        word += trailing_zeros(bits)
        return (word << 6) + trailing_zeros(low[word])
    for later in range(group + 1, high.shape[0]):
        if high[later] != 0:
            word = (later << 6) + trailing_zeros(high[later])
            return (word << 6) + trailing_zeros(low[word])
    return -1


@kernel
def fit_items(
    present: Natural,
    stops: Natural,
    capacity: int,
    bin_of: Natural,
    below: Natural,
    size: Natural,
) -> int:
    """Fill `bin_of` (the bin of each item, longest first) and `size` (items per bin); return the
    number of bins.

    `below` links the bins of a stack: bins of equal space, the newest on top.

        capacity 10, lengths 6, 6, 3, 2    bins            stacks by space
        6 opens a bin for each of its two  [6] [6]         4: 1 -> 0
        3 goes onto the newest of space 4  [6] [6, 3]      4: 0      1: 1
        2 has space 4, not 1               [6, 2] [6, 3]   2: 0      1: 1
    """
    top = np.full(capacity + 1, NONE, np.uint32)  # the newest bin of each remaining space
    low = np.zeros((capacity >> 6) + 1, np.uint64)
    high = np.zeros((capacity >> 12) + 1, np.uint64)
    bins = 0
    item = 0
    for at in range(present.shape[0]):
        length, stop = int(present[at]), int(stops[at])
        while item < stop:
            # The stack whose bins fit best, how many items each of them takes, and their new stack.
            space = smallest_space(low, high, length)
            fresh = space < 0  # no open bin is large enough: open new ones
            if fresh:
                space = capacity
            # Avoid the division where one item fits.
            each = 1 if space < 2 * length else min(space // length, stop - item)
            rest = space - each * length
            # Move bins to it, from their stack or newly opened.
            newest = top[rest]
            chosen = np.uint32(bins) if fresh else top[space]
            while chosen != NONE and item + each <= stop:
                bins += fresh
                after = np.uint32(bins) if fresh else below[chosen]
                size[chosen] = each if fresh else size[chosen] + each
                below[chosen] = newest
                newest = chosen
                bin_of[item] = chosen  # most take one: no loop for it
                for i in range(item + 1, item + each):
                    bin_of[i] = chosen
                item += each
                chosen = after
            if not fresh:
                top[space] = chosen
                if chosen == NONE:
                    low[space >> 6] &= ~bit(space)
                    if low[space >> 6] == 0:
                        high[space >> 12] &= ~bit(space >> 6)
            # A full bin goes onto the stack of space 0, which no length uses.
            top[rest] = newest
            low[rest >> 6] |= bit(rest)
            high[rest >> 12] |= bit(rest >> 6)
    return bins


@kernel
def fill_bins(bin_of: Natural, order: Natural, size: Natural, values: IntArray) -> IntArray:
    """Write the items into `values`, bin by bin, and return the offsets of the bins.

    `offsets[b + 1]` is at first the start of bin b. Filling the bin advances it to the bin's end:
    sizes [2, 1, 3] -> offsets [0, 0, 2, 3], and [0, 2, 3, 6] when all are filled. `size` may be in
    the memory of `values`.
    """
    offsets = np.empty(size.shape[0] + 1, np.int64)
    following, total = offsets[1:], 0
    offsets[0] = 0
    for b in range(size.shape[0]):
        following[b] = total
        total += size[b]
    targets = np.empty(BLOCK, np.uint32)
    n = order.shape[0]
    for start in range(0, n, BLOCK):
        stop = min(BLOCK, n - start)
        for i in range(stop):
            chosen = bin_of[start + i]
            target = following[chosen]
            following[chosen] = target + 1
            targets[i] = target
            prefetch(values, target)
        for i in range(stop):
            values[targets[i]] = order[start + i]
    return offsets


@kernel
def fit_counted(
    lengths: Natural,
    following: Natural,
    present: Natural,
    stops: Natural,
    capacity: int,
    scratch: Natural,
    values: IntArray,
) -> IntArray:
    """Sort, fit and fill in one call: three calls take 2 us longer."""
    order, bin_of = scratch[0], scratch[1]
    halves = values.view(np.uint32)
    below, size = halves[: order.shape[0]], halves[order.shape[0] :]
    sort_items(lengths, following, order)
    bins = fit_items(present, stops, capacity, bin_of, below, size)
    return fill_bins(bin_of, order, size[:bins], values)


@kernel
def fit_few_items(lengths: IntArray, order: IntArray, capacity: int) -> IntArray:
    """The bin of each item, taken in `order`, as `fit_items` finds it.

    The open bins are a list by ascending space, which takes the place of its tables over the
    capacity. Of bins with equal space, the newest comes first.

        capacity 10, lengths 6, 6, 3 -> spaces [4], [4, 4], [1, 4] of bins [0], [1, 0], [1, 0]
    """
    n = order.shape[0]
    bin_of = np.empty(n, np.int64)
    spaces, numbers = np.empty(n, np.int64), np.empty(n, np.int64)

    count, bins = 0, 0
    for item in order:
        place = np.searchsorted(spaces[:count], lengths[item])
        if place == count:  # no open bin is large enough: open one
            spaces[count], numbers[count] = capacity, bins
            bins += 1
            count += 1
        chosen, rest = numbers[place], spaces[place] - lengths[item]
        bin_of[item] = chosen
        if rest == 0:  # full: take it off the list
            count -= 1
            for k in range(place, count):
                spaces[k], numbers[k] = spaces[k + 1], numbers[k + 1]
            continue
        # It has less space than before, so it moves towards the front.
        target = np.searchsorted(spaces[:place], rest)
        for k in range(place, target, -1):
            spaces[k], numbers[k] = spaces[k - 1], numbers[k - 1]
        spaces[target], numbers[target] = rest, chosen
    return bin_of
