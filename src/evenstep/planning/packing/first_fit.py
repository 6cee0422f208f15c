"""Next-fit and the first-fit family.

First fit asks for the lowest-numbered bin with room. A tree whose leaves are the bins and whose
inner nodes hold the largest space below them answers in log(bins) steps.
"""

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.planning.kernel import kernel


@kernel
def next_fit_kernel(lengths: IntArray, capacity: int) -> IntArray:
    """The bin of each item: in order, a new bin whenever the current one has no room."""
    bin_of = np.empty(lengths.shape[0], np.int64)
    current = -1
    space = 0
    for i in range(lengths.shape[0]):
        if lengths[i] > space:
            current += 1
            space = capacity
        space -= lengths[i]
        bin_of[i] = current
    return bin_of


@kernel
def first_fit_kernel(lengths: IntArray, order: IntArray, capacity: int, first: int) -> IntArray:
    """The bin of each item named in `order` (-1 for the rest), bins numbered from `first`.

    order [2, 0] places item 2, then item 0; item 1 keeps -1.
    """
    bin_of = np.full(lengths.shape[0], -1, np.int64)
    leaves = 1
    while leaves < order.shape[0]:
        leaves *= 2
    # Node i has the children 2i and 2i + 1; unopened bins hold all of the capacity.
    space = np.full(2 * leaves, capacity, np.int64)
    for i in order:
        length = lengths[i]
        node = 1
        while node < leaves:
            node *= 2
            if space[node] < length:
                node += 1
        bin_of[i] = first + node - leaves
        space[node] -= length
        node //= 2
        while node >= 1:
            space[node] = max(space[2 * node], space[2 * node + 1])
            node //= 2
    return bin_of


@kernel
def nearest_free(link: IntArray, index: int) -> int:
    """The nearest entry from `index` on that was not taken yet, in the direction that links point.

    `link[i]` is i for a free entry; once taken it points to its neighbour, back or forth, and
    walks are shortened on the way. The entry at that end of the array is never taken: it is none.
    """
    while link[index] != index:
        link[index] = link[link[index]]
        index = link[index]
    return index


@kernel
def first_at_most(lengths: IntArray, order: IntArray, start: int, stop: int, most: int) -> int:
    """In `order[start:stop]`, longest first, the first position whose length is at most `most`."""
    while start < stop:
        middle = (start + stop) // 2
        if lengths[order[middle]] <= most:
            stop = middle
        else:
            start = middle + 1
    return start


@kernel
def modified_first_fit_kernel(lengths: IntArray, order: IntArray, capacity: int) -> IntArray:
    """The bin of each item, by Johnson and Garey's rules. `order` is longest first.

    Large items (over a half) open a bin each. In turn each bin gets the largest medium (over a
    third) that fits; then, from the emptiest back, a pair of smalls (over a sixth): the smallest
    and the largest that fits beside it; then whatever fits, largest first. What is left over is
    packed first-fit decreasing.
    """
    n = lengths.shape[0]
    bin_of = np.full(n, -1, np.int64)
    large = first_at_most(lengths, order, 0, n, capacity // 2)
    medium = first_at_most(lengths, order, large, n, capacity // 3)
    small = first_at_most(lengths, order, medium, n, capacity // 6)
    space = np.empty(large, np.int64)
    paired = np.zeros(large, np.bool_)
    after = np.arange(n + 1)  # the next position that is not placed yet
    before = np.arange(n + 1)  # shifted by one: entry p + 1 is position p
    for b in range(large):
        space[b] = capacity - lengths[order[b]]
        bin_of[order[b]] = b
        after[b] = b + 1
        before[b + 1] = b
    for b in range(large):
        at = nearest_free(after, first_at_most(lengths, order, large, medium, space[b]))
        if at < medium:
            space[b] -= lengths[order[at]]
            bin_of[order[at]] = b
            after[at] = at + 1
            before[at + 1] = at
            paired[b] = True
    for b in range(large - 1, -1, -1):
        if paired[b]:
            continue
        least = nearest_free(before, small) - 1
        if least < medium:
            break
        second = nearest_free(before, least) - 1
        if second < medium or lengths[order[least]] + lengths[order[second]] > space[b]:
            continue
        room = space[b] - lengths[order[least]]
        after[least] = least + 1
        before[least + 1] = least
        mate = nearest_free(after, first_at_most(lengths, order, medium, small, room))
        after[mate] = mate + 1
        before[mate + 1] = mate
        bin_of[order[least]] = b
        bin_of[order[mate]] = b
        space[b] = room - lengths[order[mate]]
    for b in range(large):
        while True:
            at = nearest_free(after, first_at_most(lengths, order, large, n, space[b]))
            if at >= n:
                break
            space[b] -= lengths[order[at]]
            bin_of[order[at]] = b
            after[at] = at + 1
            before[at + 1] = at
    left = np.empty(n, np.int64)
    count = 0
    at = nearest_free(after, 0)
    while at < n:
        left[count] = order[at]
        count += 1
        at = nearest_free(after, at + 1)
    rest = first_fit_kernel(lengths, left[:count], capacity, large)
    for i in left[:count]:
        bin_of[i] = rest[i]
    return bin_of
