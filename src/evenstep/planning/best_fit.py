"""Best-fit decreasing in near-linear time.

Lengths are small integers, so nothing is compared or even sorted: items are counted by length,
open bins wait in stacks by remaining space, and a two-level bitmap finds the smallest space that
is large enough. Equal lengths are placed together: a bin that was the best fit for one stays the
best fit for the next, as long as it has room, and then its whole stack is.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray, Ragged
from evenstep.planning.kernel import kernel, trailing_zeros

Int32Array: TypeAlias = NDArray[np.int32]


def best_fit(lengths: IntArray, capacity: int) -> Ragged:
    """Items by bin, longest first. Lengths lie between 1 and capacity."""
    n = len(lengths)
    # One large array of numpy's comes in huge pages; a kernel's own, or three small ones, do not,
    # and touching a million small pages for the first time costs a third of the whole.
    bin_of, below, size = np.empty((3, n), np.int32)
    end = count_ends(lengths, capacity)
    bins = place_items(end, capacity, bin_of, below, size)
    values, offsets = np.empty(n, np.int64), np.empty(bins + 1, np.int64)
    gather_items(lengths, end, bin_of, size, offsets, values)
    return Ragged(values, offsets)


@kernel
def extent(lengths: IntArray) -> tuple[int, int]:
    """The shortest and the longest, in one pass."""
    low, high = lengths[0], lengths[0]
    for i in range(lengths.shape[0]):
        low = min(low, lengths[i])
        high = max(high, lengths[i])
    return low, high


@kernel
def count_ends(lengths: IntArray, longest: int) -> Int32Array:
    """Where each length's run would end if the items were sorted, longest first.

    lengths [2, 5, 2] -> end[5] = 1, end[4] = end[3] = 1, end[2] = 3
    """
    end = np.zeros(longest + 1, np.int32)
    for i in range(lengths.shape[0]):
        end[lengths[i]] += 1
    total = 0
    for length in range(longest, -1, -1):
        total += end[length]
        end[length] = total
    return end


@kernel
def smallest_space(low: IntArray, high: IntArray, length: int) -> int:
    """The smallest space of `length` or more that some open bin has, or -1.

    `low` has a bit per space, 32 to a word; `high` has a bit per word of `low`.
    """
    word = length >> 5
    bits = low[word] >> (length & 31)
    if bits != 0:
        return length + trailing_zeros(bits)
    word += 1
    if word >= low.shape[0]:
        return -1
    group = word >> 5
    bits = high[group] >> (word & 31)
    if bits != 0:
        word += trailing_zeros(bits)
        return (word << 5) + trailing_zeros(low[word])
    for later in range(group + 1, high.shape[0]):
        if high[later] != 0:
            word = (later << 5) + trailing_zeros(high[later])
            return (word << 5) + trailing_zeros(low[word])
    return -1


@kernel
def place_items(
    end: Int32Array,
    capacity: int,
    bin_of: Int32Array,
    below: Int32Array,
    size: Int32Array,
) -> int:
    """Fill `bin_of` (the bin of each item, longest first) and `size` (items by bin); count bins."""
    top = np.full(capacity + 1, -1, np.int32)  # the newest bin of each remaining space
    low = np.zeros((capacity >> 5) + 1, np.int64)
    high = np.zeros((capacity >> 10) + 1, np.int64)
    bins = 0
    position = 0
    for length in range(capacity, 0, -1):
        stop = end[length]
        while position < stop:
            space = smallest_space(low, high, length)
            fresh = space < 0  # nothing open is large enough: all that are left open new bins
            if fresh:
                space = capacity
            each = 1 if space < 2 * length else space // length  # most need no division
            chosen = bins if fresh else top[space]
            while position < stop and (fresh or chosen >= 0):
                together = min(each, stop - position)
                if fresh:
                    after = chosen + 1
                    size[chosen] = together
                else:
                    after = below[chosen]
                    size[chosen] += together
                bin_of[position] = chosen
                for i in range(position + 1, position + together):
                    bin_of[i] = chosen
                position += together
                rest = space - together * length
                if rest > 0:
                    low[rest >> 5] |= 1 << (rest & 31)
                    high[rest >> 10] |= 1 << ((rest >> 5) & 31)
                    below[chosen] = top[rest]
                    top[rest] = chosen
                chosen = after
            if fresh:
                bins = chosen
            else:
                top[space] = chosen
                if chosen < 0:
                    low[space >> 5] &= ~(1 << (space & 31))
                    if low[space >> 5] == 0:
                        high[space >> 10] &= ~(1 << ((space >> 5) & 31))
    return bins


@kernel
def gather_items(
    lengths: IntArray,
    end: Int32Array,
    bin_of: Int32Array,
    size: Int32Array,
    offsets: IntArray,
    values: IntArray,
) -> None:
    """Items by bin: `offsets` and `values` of a Ragged.

    Which item of a length goes where is free, so each takes the next place of its length and
    nothing is ever sorted. `bin_of` is used up: it turns into where each place lies in `values`.
    """
    total = 0
    bins = offsets.shape[0] - 1
    for b in range(bins):
        offsets[b] = total
        total += size[b]
        size[b] = offsets[b]  # from here on, where the bin's next item goes
    offsets[bins] = total
    following = np.empty_like(end)  # the next place of each length
    for length in range(end.shape[0] - 1):
        following[length] = end[length + 1]
    following[end.shape[0] - 1] = 0
    for place in range(lengths.shape[0]):
        chosen = bin_of[place]
        bin_of[place] = size[chosen]
        size[chosen] += 1
    for i in range(lengths.shape[0]):
        length = lengths[i]
        place = following[length]
        following[length] = place + 1
        values[bin_of[place]] = i
