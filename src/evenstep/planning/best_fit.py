"""Best-fit decreasing in near-linear time.

Lengths are small integers, so nothing is compared twice: a counting sort orders the items, open
bins wait in stacks by remaining space, and a two-level bitmap finds the smallest space that is
large enough. Equal lengths are placed together: a bin that was the best fit for one stays the
best fit for the next, as long as it has room.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray
from evenstep.planning.kernel import kernel

Int32Array: TypeAlias = NDArray[np.int32]

# Multiplying a power of two by this puts a number unique to it into the top five bits.
_DE_BRUIJN = 0x077CB531
_BIT = np.zeros(32, np.int64)
for _i in range(32):
    _BIT[((_DE_BRUIJN << _i) & 0xFFFFFFFF) >> 27] = _i


@kernel
def lowest_bit(word: int) -> int:
    """The number of the lowest set bit of a 32-bit word: 0b1000 -> 3."""
    return _BIT[(((word & -word) * _DE_BRUIJN) & 0xFFFFFFFF) >> 27]  # type: ignore[no-any-return]


@kernel
def sort_decreasing(lengths: IntArray, longest: int) -> tuple[Int32Array, Int32Array]:
    """Counting sort, longest first, equal lengths in order: (order, end of each length's run).

    lengths [2, 5, 2] -> order [1, 0, 2]; end[5] = 1, end[2] = 3
    """
    count = np.zeros(longest + 1, np.int32)
    for i in range(lengths.shape[0]):
        count[lengths[i]] += 1
    total = 0
    for length in range(longest, -1, -1):
        here = count[length]
        count[length] = total
        total += here
    order = np.empty(lengths.shape[0], np.int32)
    for i in range(lengths.shape[0]):
        at = count[lengths[i]]
        order[at] = i
        count[lengths[i]] = at + 1
    return order, count


@kernel
def smallest_space(low: IntArray, high: IntArray, length: int) -> int:
    """The smallest space of `length` or more that some open bin has, or -1.

    `low` has a bit per space, 32 to a word; `high` has a bit per word of `low`.
    """
    word = length >> 5
    bits = low[word] >> (length & 31)
    if bits != 0:
        return length + lowest_bit(bits)
    word += 1
    if word >= low.shape[0]:
        return -1
    group = word >> 5
    bits = high[group] >> (word & 31)
    if bits != 0:
        word += lowest_bit(bits)
        return (word << 5) + lowest_bit(low[word])
    for later in range(group + 1, high.shape[0]):
        if high[later] != 0:
            word = (later << 5) + lowest_bit(high[later])
            return (word << 5) + lowest_bit(low[word])
    return -1


@kernel
def best_fit_kernel(lengths: IntArray, capacity: int) -> tuple[IntArray, IntArray]:
    """(items by bin, offsets of the bins). Lengths lie between 1 and capacity."""
    n = lengths.shape[0]
    order, end = sort_decreasing(lengths, capacity)
    # Items that go to one bin together are a run: so many from `order`, starting there.
    run_bin = np.empty(n, np.int32)
    run_end = np.empty(n, np.int32)
    runs = 0
    top = np.full(capacity + 1, -1, np.int32)  # the newest bin of each remaining space
    below = np.empty(n, np.int32)  # the next bin of the same space
    size = np.zeros(n + 1, np.int32)  # items in each bin
    low = np.zeros((capacity >> 5) + 1, np.int64)
    high = np.zeros((capacity >> 10) + 1, np.int64)
    bins = 0
    position = 0
    for length in range(capacity, 0, -1):
        stop = end[length]
        fresh = False  # no open bin is large enough, nor becomes so while this length lasts
        while position < stop:
            space = -1 if fresh else smallest_space(low, high, length)
            if space < 0:
                fresh = True
                space = capacity
                chosen = bins
                bins += 1
            else:
                chosen = top[space]
                top[space] = below[chosen]
                if top[space] < 0:
                    word = space >> 5
                    low[word] &= ~(1 << (space & 31))
                    if low[word] == 0:
                        high[word >> 5] &= ~(1 << (word & 31))
            together = min(space // length, stop - position)
            position += together
            size[chosen] += together
            run_bin[runs] = chosen
            run_end[runs] = position
            runs += 1
            space -= together * length
            if space > 0:
                below[chosen] = top[space]
                top[space] = chosen
                word = space >> 5
                low[word] |= 1 << (space & 31)
                high[word >> 5] |= 1 << (word & 31)
    offsets = np.empty(bins + 1, np.int64)
    total = 0
    for b in range(bins):
        offsets[b] = total
        total += size[b]
        size[b] = offsets[b]
    offsets[bins] = total
    values = np.empty(n, np.int64)
    position = 0
    for run in range(runs):
        at = size[run_bin[run]]
        size[run_bin[run]] += run_end[run] - position
        for i in range(position, run_end[run]):
            values[at] = order[i]
            at += 1
        position = run_end[run]
    return values, offsets
