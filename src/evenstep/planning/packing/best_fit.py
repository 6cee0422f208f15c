"""Best-fit decreasing in near-linear time.

Lengths are small integers, so nothing is compared: items are sorted by counting, open bins wait in
stacks by remaining space, and a two-level bitmap finds the smallest space that is large enough.
Equal lengths are placed together: a bin that was the best fit for one stays the best fit for the
next, as long as it has room, and then its whole stack is.

What is left is memory. Both passes that scatter (items by length, then items by bin) first work
out a block of targets and ask for them, then write: a write that has to wait for its cache line
holds up all that come after it, and that took half of the time. Arrays of scratch are unsigned,
because an index that cannot be negative needs no test for it.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray, Ragged
from evenstep.planning.kernel import kernel, prefetch, trailing_zeros
from evenstep.planning.packing.items import check_items

Natural: TypeAlias = NDArray[np.unsignedinteger]

_TOGETHER = 2**19  # lengths from which two threads share what need not wait for each other
BLOCK = 256  # targets asked for at a time: enough to hide memory, few enough to stay in cache
NONE = np.uint32(2**32 - 1)  # no bin


def best_fit(lengths: IntArray, capacity: int) -> Ragged:
    """Items by bin, longest first."""
    n = len(lengths)
    # One large array of numpy's comes in huge pages; a kernel's own, or two small ones, do not.
    scratch = np.empty((2, n), np.uint32)
    values = np.empty(n, np.int64)
    run = _alone if n < _TOGETHER else _together
    return Ragged(values, run(lengths, capacity, scratch, values))


def _alone(lengths: IntArray, capacity: int, scratch: Natural, values: IntArray) -> IntArray:
    """Fill `values` with the items by bin; the offsets of the bins."""
    following, present, stops = _counted(lengths, capacity)
    return fit_counted(
        lengths.view(np.uint64), following, present, stops, capacity, scratch, values
    )


def _together(lengths: IntArray, capacity: int, scratch: Natural, values: IntArray) -> IntArray:
    """What `fit_counted` does, by two threads: neither sorting nor placing needs the other, and
    one that would wait has the system provide the memory that comes next."""
    naturals = lengths.view(np.uint64)
    order, bin_of = scratch
    below, size = values.view(np.uint32).reshape(2, -1)
    with ThreadPoolExecutor(1) as beside:
        touching = beside.submit(touch, scratch.reshape(-1))
        following, present, stops = _counted(lengths, capacity)
        sorting = beside.submit(sort_items, naturals, following, order)
        touching.result()
        bins = place_items(present, stops, capacity, bin_of, below, size)
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
        check_items(lengths, capacity)  # says which one it was
    return following, present, stops


@kernel
def touch(memory: Natural) -> None:
    """Have the system provide every page now, while there is time: it clears each one first."""
    for i in range(0, memory.shape[0], 1024):  # a page has 4,096 bytes or more
        memory[i] = 0


@kernel
def count_lengths(lengths: Natural, longest: int) -> tuple[Natural, Natural, Natural]:
    """Where each length's items would lie if they were sorted, longest first.

    What is not between 1 and `longest` is left out, a negative length too: unsigned it is huge.
    Gives the first place of each length, the lengths that occur, and where each of these stops:
    lengths [2, 5, 2] -> following[5] = 0, following[2] = 1, present [5, 2], stops [1, 3]
    """
    following = np.zeros(longest + 1, np.uint32)
    other = np.zeros(longest + 1, np.uint32)  # in turn, because equal lengths wait for each other
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
    """Fill `order` with the items, longest first. `following` is used up."""
    targets = np.empty(BLOCK, np.uint32)
    n = lengths.shape[0]
    for start in range(0, n, BLOCK):
        stop = min(BLOCK, n - start)
        for i in range(stop):
            length = lengths[start + i]
            place = following[length]
            following[length] = place + 1
            targets[i] = place
            prefetch(order, place)
        for i in range(stop):
            order[targets[i]] = start + i


@kernel
def bit(number: int) -> np.uint64:
    """The bit of `number` in its word of 64: 66 -> 0b100."""
    return np.uint64(1) << np.uint64(number & 63)


@kernel
def smallest_space(low: Natural, high: Natural, length: int) -> int:
    """The smallest space of `length` or more that some open bin has, or -1.

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
def place_items(
    present: Natural,
    stops: Natural,
    capacity: int,
    bin_of: Natural,
    below: Natural,
    size: Natural,
) -> int:
    """Fill `bin_of` (the bin of each item, longest first) and `size` (items by bin); count bins."""
    top = np.full(capacity + 1, NONE, np.uint32)  # the newest bin of each remaining space
    low = np.zeros((capacity >> 6) + 1, np.uint64)
    high = np.zeros((capacity >> 12) + 1, np.uint64)
    bins = 0
    position = 0
    for at in range(present.shape[0]):
        length, stop = int(present[at]), int(stops[at])
        while position < stop:
            space = smallest_space(low, high, length)
            fresh = space < 0  # nothing open is large enough: all that are left open new bins
            if fresh:
                space = capacity
            # Most need no division.
            each = 1 if space < 2 * length else min(space // length, stop - position)
            rest = space - each * length
            newest = top[rest]
            if fresh:
                while position + each <= stop:
                    size[bins] = each
                    below[bins] = newest
                    newest = bins
                    bin_of[position] = bins  # most hold one: no loop for it
                    for i in range(position + 1, position + each):
                        bin_of[i] = bins
                    position += each
                    bins += 1
            else:
                chosen = top[space]
                while chosen != NONE and position + each <= stop:
                    size[chosen] += each
                    after = below[chosen]
                    below[chosen] = newest
                    newest = chosen
                    bin_of[position] = chosen  # most hold one: no loop for it
                    for i in range(position + 1, position + each):
                        bin_of[i] = chosen
                    position += each
                    chosen = after
                top[space] = chosen
                if chosen == NONE:
                    low[space >> 6] &= ~bit(space)
                    if low[space >> 6] == 0:
                        high[space >> 12] &= ~bit(space >> 6)
            # A full bin goes onto the stack of space 0, where no length ever looks.
            top[rest] = newest
            low[rest >> 6] |= bit(rest)
            high[rest >> 12] |= bit(rest >> 6)
    return bins


@kernel
def start_bins(size: Natural, offsets: IntArray) -> None:
    """Set `offsets[b + 1]` to where bin b begins; once it is filled, that is where it ends.

    sizes [2, 1, 3] -> offsets [0, 0, 2, 3], and when all are filled [0, 2, 3, 6]
    """
    total = 0
    offsets[0] = 0
    for b in range(offsets.shape[0] - 1):
        offsets[b + 1] = total
        total += size[b]


@kernel
def fill_bins(bin_of: Natural, order: Natural, following: IntArray, values: IntArray) -> None:
    """Write each item into its bin, at the next free place that `following` has for the bin."""
    targets = np.empty(BLOCK, np.uint32)
    n = order.shape[0]
    for start in range(0, n, BLOCK):
        stop = min(BLOCK, n - start)
        for i in range(stop):
            chosen = bin_of[start + i]
            place = following[chosen]
            following[chosen] = place + 1
            targets[i] = place
            prefetch(values, place)
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
    """Fill `values` with the items by bin; the offsets of the bins.

    Until the bins are filled, the memory of the result serves as that of the stacks.
    """
    order, bin_of = scratch[0], scratch[1]
    halves = values.view(np.uint32)
    below, size = halves[: order.shape[0]], halves[order.shape[0] :]
    sort_items(lengths, following, order)
    bins = place_items(present, stops, capacity, bin_of, below, size)
    offsets = np.empty(bins + 1, np.int64)
    start_bins(size, offsets)
    fill_bins(bin_of, order, offsets[1:], values)
    return offsets
