"""Next fit and the first-fit family.

First fit needs the lowest-numbered bin with room. A tree finds it in log(bins) steps: its leaves
are the bins, and each inner node holds the largest space below it.
"""

import numpy as np

from evenstep.core.ragged import IntArray, Ragged
from evenstep.planning.kernel import kernel
from evenstep.planning.packing.items import bins_by, bins_in_order, check_items


@kernel
def next_fit_kernel(lengths: IntArray, capacity: int) -> IntArray:
    """The bin of each item, in order. A new bin starts when the current one has no room."""
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
    """The bin of each item in `order` (-1 for the others), bins numbered from `first`.

    order [2, 0] packs item 2, then item 0; item 1 keeps -1.
    """
    bin_of = np.full(lengths.shape[0], -1, np.int64)
    leaves = 1
    while leaves < order.shape[0]:
        leaves *= 2
    # Node i has the children 2i and 2i + 1. Unopened bins have all of the capacity.
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
    """The nearest free entry from `index` on, in the direction of the links.

    `link[i]` is i for a free entry and points towards a neighbour once the entry is taken. Paths
    are shortened on the way. The entry at the end of the array is never taken and means "none".
    """
    while link[index] != index:
        link[index] = link[link[index]]
        index = link[index]
    return index


@kernel
def first_at_most(lengths: IntArray, order: IntArray, start: int, stop: int, most: int) -> int:
    """The first index in `order[start:stop]`, longest first, with a length of at most `most`."""
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

    Each large item (over a half) opens a bin. In turn, each bin gets the largest medium item (over
    a third) that fits. From the last bin back, bins without one get a pair of small items (over a
    sixth): the smallest, and the largest that fits with it. Then each bin gets whatever fits,
    largest first. The remaining items are packed first-fit decreasing.
    """
    n = lengths.shape[0]
    bin_of = np.full(n, -1, np.int64)
    large = first_at_most(lengths, order, 0, n, capacity // 2)
    medium = first_at_most(lengths, order, large, n, capacity // 3)
    small = first_at_most(lengths, order, medium, n, capacity // 6)
    space = np.empty(large, np.int64)
    paired = np.zeros(large, np.bool_)
    after = np.arange(n + 1)  # leads to the next unpacked index of `order`
    before = np.arange(n + 1)  # to the previous one; entry i + 1 is index i
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


def concatenative(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """Next fit in the given order: a new bin when the next item does not fit. For debugging.

    >>> concatenative(np.array([4, 1, 3, 2, 1, 3, 4, 5]), 5).tolist()
    [[0, 1], [2, 3], [4, 5], [6], [7]]
    """
    check_items(lengths, capacity)
    return bins_in_order(next_fit_kernel(lengths, capacity))


def first_fit_decreasing(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """Longest first into the first bin with room. Of equal lengths, the later item goes first.

    >>> first_fit_decreasing(np.array([30, 30, 30, 30, 30]), 100).tolist()
    [[4, 3, 2], [1, 0]]
    """
    check_items(lengths, capacity)
    order = np.argsort(lengths, kind="stable")[::-1]
    return bins_by(first_fit_kernel(lengths, order, capacity, 0), order)


def modified_first_fit_decreasing(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """The five phases of Johnson and Garey: large items with one medium or two small, then rest.

    >>> sizes = np.array([46, 24, 55, 88, 11, 14, 73, 17])
    >>> sorted(sorted(b) for b in modified_first_fit_decreasing(sizes, 100).tolist())
    [[0], [1, 2, 7], [3, 4], [5, 6]]
    """
    check_items(lengths, capacity)
    order = np.argsort(-lengths, kind="stable")
    return bins_by(modified_first_fit_kernel(lengths, order, capacity), order)


def first_fit_shuffle(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """First fit in a random order that depends on `seed` alone."""
    check_items(lengths, capacity)
    order = np.random.default_rng(seed).permutation(len(lengths))
    return bins_by(first_fit_kernel(lengths, order, capacity, 0), order)
