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
    shortest, longest = extent(lengths)
    if shortest < 1:
        at = int(lengths.argmin())
        raise InputError(
            f"item {at} has length {lengths[at]}; expected 1 or more. Remove the item."
        )
    if longest > capacity:
        at = int(lengths.argmax())
        raise InputError(
            f"item {at} has length {lengths[at]} but a bin holds {capacity}. Raise the capacity, "
            f"or split or drop the item."
        )


@kernel
def extent(lengths: IntArray) -> tuple[int, int]:
    """The shortest and the longest length."""
    low, high = lengths[0], lengths[0]
    for i in range(lengths.shape[0]):
        low = min(low, lengths[i])
        high = max(high, lengths[i])
    return low, high


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
    ordered = lengths[order]
    stops = np.append(np.flatnonzero(np.diff(ordered)) + 1, len(ordered))
    bins = bins_in_order(fit_few_items(ordered[stops - 1], stops, capacity))
    return Ragged(order[bins.values], bins.offsets)


def best_fit(lengths: IntArray, capacity: int) -> Ragged:
    """The items of each bin, longest first."""
    n = len(lengths)
    # One large numpy array uses huge pages; arrays made in a kernel, or two small ones, do not.
    scratch = np.empty((2, n), np.uint32)
    values = np.empty(n, np.int64)
    run = _alone if n < _TOGETHER else _together
    return Ragged(values, run(lengths, capacity, scratch, values))


def _alone(lengths: IntArray, capacity: int, scratch: Natural, values: IntArray) -> IntArray:
    """Fill `values` with the items by bin and return the offsets of the bins."""
    following, present, stops = _counted(lengths, capacity)
    return fit_counted(
        lengths.view(np.uint64), following, present, stops, capacity, scratch, values
    )


def _together(lengths: IntArray, capacity: int, scratch: Natural, values: IntArray) -> IntArray:
    """`fit_counted` on two threads: one sorts the items, the other fits them into bins.

    A thread that would wait touches the memory that is used next.
    """
    naturals = lengths.view(np.uint64)
    order, bin_of = scratch
    below, size = values.view(np.uint32).reshape(2, -1)
    with ThreadPoolExecutor(1) as second:
        touching = second.submit(touch, scratch.reshape(-1))
        following, present, stops = _counted(lengths, capacity)
        sorting = second.submit(sort_items, naturals, following, order)
        touching.result()
        bins = fit_items(present, stops, capacity, bin_of, below, size)
        touch(below[bins:])
        touch(size[bins:])
        sorting.result()
    offsets = np.empty(bins + 1, np.int64)
    start_bins(size, offsets)
    fill_bins(bin_of, order, offsets[1:], values)
    return offsets


def _counted(lengths: IntArray, capacity: int) -> tuple[Natural, Natural, Natural]:
    following, present, stops = count_lengths(lengths.view(np.uint64), capacity)
    if len(stops) == 0 or stops[-1] < len(lengths):
        check_items(lengths, capacity)  # raises, and names the item
    return following, present, stops


@kernel
def touch(memory: Natural) -> None:
    """Touch every page, so that the system allocates and clears it now."""
    for i in range(0, memory.shape[0], 1024):  # a page has 4,096 bytes or more
        memory[i] = 0


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
            newest = top[rest]
            if fresh:
                # Open bins while each can be given `each` items of this length.
                while item + each <= stop:
                    size[bins] = each
                    below[bins] = newest
                    newest = bins
                    bin_of[item] = bins  # most take one: no loop for it
                    for i in range(item + 1, item + each):
                        bin_of[i] = bins
                    item += each
                    bins += 1
            else:
                # Move bins from their stack to the one of the space that they have left.
                chosen = top[space]
                while chosen != NONE and item + each <= stop:
                    size[chosen] += each
                    after = below[chosen]
                    below[chosen] = newest
                    newest = chosen
                    bin_of[item] = chosen  # most take one: no loop for it
                    for i in range(item + 1, item + each):
                        bin_of[i] = chosen
                    item += each
                    chosen = after
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
def start_bins(size: Natural, offsets: IntArray) -> None:
    """Set `offsets[b + 1]` to the start of bin b. Filling the bin advances it to the bin's end.

    sizes [2, 1, 3] -> offsets [0, 0, 2, 3], and [0, 2, 3, 6] when all are filled
    """
    total = 0
    offsets[0] = 0
    for b in range(offsets.shape[0] - 1):
        offsets[b + 1] = total
        total += size[b]


@kernel
def fill_bins(bin_of: Natural, order: Natural, following: IntArray, values: IntArray) -> None:
    """Write each item into its bin, at the bin's next free index in `following`."""
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
    """Fill `values` with the items by bin and return the offsets of the bins.

    Until the bins are filled, `values` holds the stacks.
    """
    order, bin_of = scratch[0], scratch[1]
    halves = values.view(np.uint32)
    below, size = halves[: order.shape[0]], halves[order.shape[0] :]
    sort_items(lengths, following, order)
    bins = fit_items(present, stops, capacity, bin_of, below, size)
    offsets = np.empty(bins + 1, np.int64)
    start_bins(size, offsets)
    fill_bins(bin_of, order, offsets[1:], values)
    return offsets


@kernel
def place_of(spaces: IntArray, count: int, wanted: int) -> int:
    """The first of `count` ascending spaces that is `wanted` or more; `count` if none is."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if spaces[middle] >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def fit_few_items(present: IntArray, stops: IntArray, capacity: int) -> IntArray:
    """The bin of each item, longest first, as `fit_items` finds it.

    A sorted list of spaces takes the place of its tables over the capacity. Items of length
    `present[k]` end at `stops[k]`. Bins of equal space are a stack.
    """
    n = stops[-1]
    bin_of = np.empty(n, np.int64)
    below = np.empty(n, np.int64)  # the next bin of the same stack, or -1
    spaces = np.empty(n + 1, np.int64)  # of open bins, ascending
    tops = np.empty(n + 1, np.int64)  # the newest bin of each space
    count, bins, item = 0, 0, 0
    for at in range(present.shape[0]):
        length, stop = present[at], stops[at]
        while item < stop:
            # The stack whose bins fit best, how many items each of them takes, and their new stack.
            place = place_of(spaces, count, length)
            fresh = place == count  # no open bin is large enough: open new ones
            space = capacity if fresh else spaces[place]
            each = min(space // length, stop - item)
            rest = space - each * length
            target = place_of(spaces, count, rest)
            known = target < count and spaces[target] == rest
            newest = tops[target] if known else -1
            # Move bins to it, from their stack or newly opened.
            chosen = bins if fresh else tops[place]
            while chosen >= 0 and item + each <= stop:
                after = bins + 1 if fresh else below[chosen]
                bins += fresh
                below[chosen] = newest
                newest = chosen
                bin_of[item : item + each] = chosen
                item += each
                chosen = after
            # Take an empty stack off the list, and put a new one onto it.
            if not fresh:
                tops[place] = chosen
                if chosen < 0:
                    count -= 1
                    for k in range(place, count):
                        spaces[k], tops[k] = spaces[k + 1], tops[k + 1]
            if rest > 0:
                # Less space than before: removing `place` did not move `target`.
                if not known:
                    for k in range(count, target, -1):
                        spaces[k], tops[k] = spaces[k - 1], tops[k - 1]
                    count += 1
                    spaces[target] = rest
                tops[target] = newest
    return bin_of
