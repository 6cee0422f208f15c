"""`pack`, the packers by name, and more bins than a packer needs.

A packer is a pure function (lengths, capacity, seed) -> the items of each bin. Next fit and the
first-fit family are here; `best_fit` and `optimal` have modules of their own.
"""

from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.bounds import pack_bound
from evenstep.core.layout import Packer
from evenstep.core.ragged import IntArray, Ragged, offsets_of, rounded_up
from evenstep.core.text import MOST, MOST_RANKS, seed_number, whole_number
from evenstep.errors import ConfigError, InputError, PlanError
from evenstep.planning.best_fit import best_fit, best_fit_few, bins_by, bins_in_order, check_items
from evenstep.planning.kernels import kernel, nearest_free, rise, sink
from evenstep.planning.optimal import optimal_kernel
from evenstep.planning.partition import partition
from evenstep.planning.vector_packing import LimitedPacker

_LARGE, _EACH = 2**22, 64  # largest useful table of spaces: in all, or per item
_FEW, _WIDE = 2**14, 16  # up to so many items, no table for capacities of so much per item


def pack(
    lengths: ArrayLike,
    capacity: int,
    packer: str | Packer = "best_fit_decreasing",
    *,
    seed: int = 0,
    min_bin_count: int = 0,
    bin_count_multiple: int = 1,
) -> Ragged:
    """Pack items of these lengths into bins of `capacity`; bin i holds the items `result[i]`.

    Where `min_bin_count` or `bin_count_multiple` ask for more bins than the packer needs, all items
    are spread evenly over that many bins.

    >>> pack([5, 4, 3, 2], 7).tolist()
    [[0, 3], [1, 2]]
    >>> pack([5, 4, 3, 2], 14, bin_count_multiple=2).tolist()
    [[0, 3], [1, 2]]
    """
    items = np.asarray(lengths)
    if items.ndim != 1 or (items.size and items.dtype.kind not in "iu"):
        raise InputError(
            f"lengths must be a flat sequence of integers, got shape {items.shape} and dtype "
            f"{items.dtype}."
        )
    if items.dtype.kind == "u" and items.size and int(items.max()) > MOST:
        at = int(items.argmax())
        raise InputError(f"item {at} has length {items[at]}; expected at most {MOST}.")
    items = np.ascontiguousarray(items, np.int64)
    capacity = whole_number("capacity", capacity)
    seed = seed_number(seed)
    min_bin_count = whole_number("min_bin_count", min_bin_count, least=0)
    bin_count_multiple = whole_number("bin_count_multiple", bin_count_multiple)
    packed = _packed(items, capacity, packer, seed)
    target = rounded_up(max(len(packed), min_bin_count), bin_count_multiple)
    if target > len(packed):
        if target > len(items):
            raise InputError(
                f"Cannot create {target} bins with only {len(items)} sequences. Lower "
                f"min_bin_count or bin_count_multiple."
            )
        packed = even_bins(items, packed, capacity, target)
    return packed


def _packed(items: IntArray, capacity: int, packer: str | Packer, seed: int) -> Ragged:
    """The bins of a packer, given by name or as a function. The bins of a function are checked."""
    if isinstance(packer, str) and packer not in PACKERS:
        if ":" in packer:
            raise ConfigError(
                f"packer {packer!r} is a function's name, read from a file. Pass the function."
            )
        raise ConfigError(f"unknown packer {packer!r}; expected one of: {', '.join(PACKERS)}.")
    if len(items) == 0:
        return Ragged.of([])
    if isinstance(packer, str):
        return PACKERS[packer](items, capacity, seed)
    check_items(items, capacity)
    name = getattr(packer, "__qualname__", repr(packer))
    bins: Any = packer(items.copy(), capacity, seed)
    if not isinstance(bins, Ragged):
        try:
            bins = Ragged.of([[index(item) for item in row] for row in bins])
        except TypeError:
            raise PlanError(
                f"packer {name} returned {type(bins).__name__}; expected a Ragged, or a list of "
                f"item numbers for each bin."
            ) from None
    fault = _fault(bins, items, capacity)
    if fault:
        raise PlanError(f"packer {name} {fault}. Correct the packer.")
    full = np.flatnonzero(bins.lengths)
    return Ragged(bins.values, np.append(bins.offsets[full], len(bins.values)))


def _fault(packed: Ragged, items: IntArray, capacity: int) -> str:
    """What is wrong with the bins of a caller's packer; empty if nothing is."""
    values, n = packed.values, len(items)
    if len(values) and (values.min() < 0 or values.max() >= n):
        return f"returned item {values[(values < 0) | (values >= n)][0]} of {n}"
    seen = np.bincount(values, minlength=n)
    if (seen != 1).any():
        at = int(np.argmax(seen != 1))
        return f"returned item {at} {seen[at]} times"
    used = packed.sums(items)
    if used.max(initial=0) > capacity:
        at = int(used.argmax())
        return f"put {used[at]} tokens into bin {at}, which holds {capacity}"
    return ""


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

    An item goes to the lowest-numbered bin with room. A tree finds it in log(bins) steps: its
    leaves are the bins, and each inner node holds the largest space below it.

    order [2, 0] packs item 2, then item 0; item 1 keeps -1. Lengths [5, 6, 4], capacity 8, two
    bins: the tree [8; 8, 8] becomes [8; 4, 8] with item 2 in bin 0, then [4; 4, 3] with item 0 in
    bin 1.
    """
    bin_of = np.full(lengths.shape[0], -1, np.int64)
    leaves = 1
    while leaves < order.shape[0]:
        leaves *= 2
    # Node i has the children 2i and 2i + 1. Unopened bins have all of the capacity.
    space = np.full(2 * leaves, capacity, np.int64)
    for i in order:
        length = lengths[i]
        # Go down to the leftmost leaf with room: left wherever that side has it.
        node = 1
        while node < leaves:
            node *= 2
            if space[node] < length:
                node += 1
        bin_of[i] = first + node - leaves
        # Correct the largest space of every node above.
        space[node] -= length
        node //= 2
        while node >= 1:
            space[node] = max(space[2 * node], space[2 * node + 1])
            node //= 2
    return bin_of


@kernel
def modified_first_fit_kernel(lengths: IntArray, order: IntArray, capacity: int) -> IntArray:
    """The bin of each item, by Johnson and Garey's rules. `order` is longest first.

    Bins of 100 and the lengths 88, 73, 55 | 46 | 24, 17 | 14, 11 (large, medium, small, rest):

        large items open bins                       [88] [73] [55]
        each the largest medium item that fits      46 fits beside none
        from the last back, a pair of small items   [88] [73] [55, 17, 24]
        each bin what fits, largest first           [88, 11] [73, 14] [55, 17, 24]
        the rest by first fit                       [46]
    """
    n = lengths.shape[0]
    bin_of = np.full(n, -1, np.int64)
    space = np.full(n, capacity, np.int64)  # of each bin
    after = np.arange(n + 1)  # leads to the next unpacked index of `order`
    before = np.arange(n + 1)  # to the previous one; entry i + 1 is index i

    def put(at: int, b: int) -> None:
        """Put item `order[at]` into bin `b`, and take it off the links of unpacked items."""
        bin_of[order[at]] = b
        space[b] -= lengths[order[at]]
        after[at] = at + 1
        before[at + 1] = at

    def longest(start: int, stop: int, most: int) -> int:
        """The first unpacked index of `order[start:stop]` with a length of at most `most`; `stop`
        or more if there is none.
        """
        while start < stop:
            middle = (start + stop) // 2
            if lengths[order[middle]] <= most:
                stop = middle
            else:
                start = middle + 1
        return nearest_free(after, start)

    # Large items are over a half of a bin, medium ones over a third, small ones over a sixth.
    large = longest(0, n, capacity // 2)
    medium = longest(large, n, capacity // 3)
    small = longest(medium, n, capacity // 6)
    paired = np.zeros(large, np.bool_)
    # 1. Each large item opens a bin.
    for b in range(large):
        put(b, b)
    # 2. In turn, each bin gets the largest medium item that fits.
    for b in range(large):
        at = longest(large, medium, space[b])
        if at < medium:
            put(at, b)
            paired[b] = True
    # 3. From the last bin back, those without one get the smallest of the small items and the
    #    largest that fits with it. If the two smallest do not fit, no pair does.
    for b in range(large - 1, -1, -1):
        if paired[b]:
            continue
        least = nearest_free(before, small) - 1
        if least < medium:
            break
        second = nearest_free(before, least) - 1
        if second < medium or lengths[order[least]] + lengths[order[second]] > space[b]:
            continue
        put(least, b)
        put(longest(medium, small, space[b]), b)
    # 4. Each bin gets whatever fits, largest first.
    for b in range(large):
        at = longest(large, n, space[b])
        while at < n:
            put(at, b)
            at = longest(large, n, space[b])
    # 5. The others are packed first-fit decreasing, into bins of their own.
    left = order[bin_of[order] < 0]
    rest = first_fit_kernel(lengths, left, capacity, large)
    for i in left:
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


def best_fit_decreasing(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """Longest first into the fullest bin with room.

    For few items and a large capacity, the spaces of open bins are kept in a sorted list instead of
    a table. For many items and a capacity that is very large even so, first fit decreasing is used:
    it has the same worst-case guarantee.

    >>> best_fit_decreasing(np.array([10, 20, 30, 40, 50, 60, 70, 80, 90]), 100).tolist()
    [[8, 0], [7, 1], [6, 2], [5, 3], [4]]
    """
    if len(lengths) <= _FEW and capacity > _WIDE * len(lengths):
        return best_fit_few(lengths, capacity)
    if capacity > max(_LARGE, _EACH * len(lengths)):
        return first_fit_decreasing(lengths, capacity)
    return best_fit(lengths, capacity)


def optimal(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """As few bins as the search finds; proven optimal if their number equals `pack_bound`.

    Best fit comes first. If it needs more bins than the bound, bins are filled exactly with several
    tolerances until the bound is reached.

    >>> len(optimal(np.array([6, 5, 4, 3, 2]), 10)), pack_bound(np.array([6, 5, 4, 3, 2]), 10)
    (2, 2)
    """
    packed = best_fit_decreasing(lengths, capacity)
    bound = pack_bound(lengths, capacity)
    if len(packed) > bound:
        order = np.argsort(lengths, kind="stable")
        better = optimal_kernel(lengths[order], order, capacity, bound, len(packed))
        if len(better):
            return bins_in_order(better)
    return packed


PACKERS: dict[str, Packer] = {
    packer.__name__: packer
    for packer in (
        concatenative,
        first_fit_decreasing,
        modified_first_fit_decreasing,
        first_fit_shuffle,
        best_fit_decreasing,
        optimal,
    )
}


def even_bins(sizes: IntArray, bins: Ragged, capacity: int, target: int) -> Ragged:
    """The items of `bins` in `target` bins of similar size.

    `partition` is tried first. If it exceeds the capacity, or for over a million bins, each item
    goes, longest first, to the emptiest bin with room. If an item fits nowhere, `bins` are divided.

    >>> even_bins(np.full(12, 10), Ragged.of([[*range(12)]]), 120, 3).sums(np.full(12, 10)).tolist()
    [40, 40, 40]
    """
    even = Ragged.group(partition(sizes, target), target) if target <= MOST_RANKS else None
    if even is None or even.sums(sizes).max() > capacity:
        even = LimitedPacker(sizes, np.empty((len(sizes), 0)), capacity, np.empty(0)).spread(target)
    return divide_bins(sizes, bins, target) if even is None or not even.lengths.all() else even


def divide_bins(sizes: IntArray, bins: Ragged, target: int) -> Ragged:
    """Divide the largest bins into two halves of similar size until there are `target`.

    >>> divide_bins(np.array([4, 3, 2, 1]), Ragged.of([[0, 1, 2, 3]]), 2).tolist()
    [[0, 3], [1, 2]]
    """
    if len(bins) >= target:
        return bins
    values = bins.values.copy()
    start, stop = divide_kernel(sizes, values, bins.offsets, target)
    offsets = offsets_of(stop - start)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], stop - start)
    return Ragged(values[np.repeat(start, stop - start) + within], offsets)


@kernel
def divide_kernel(
    sizes: IntArray, values: IntArray, offsets: IntArray, target: int
) -> tuple[IntArray, IntArray]:
    """(start, stop) of each bin in `values`, whose entries change places within their bins.

    Fewer than `target` bins if no bin has two items any more.
    """
    bins = offsets.shape[0] - 1
    start, stop = np.empty(target, np.int64), np.empty(target, np.int64)
    emptiness = np.empty(target)  # minus the size of a bin
    heap = np.empty(target, np.int64)  # the largest bin at the root; ties by number

    def push(b: int, count: int) -> int:
        """Put bin `b` onto the heap of `count` bins if it can be divided; return the new count."""
        if stop[b] - start[b] < 2:
            return count
        emptiness[b] = -float(sizes[values[start[b] : stop[b]]].sum())
        heap[count] = b
        rise(heap, count + 1, emptiness, True)
        return count + 1

    count = 0
    for b in range(bins):
        start[b], stop[b] = offsets[b], offsets[b + 1]
        count = push(b, count)
    while bins < target and count > 0:
        b = heap[0]
        count -= 1
        heap[0] = heap[count]
        sink(heap, count, emptiness, 0, True)
        # Two halves of similar size, neither empty: longest first, each item goes to the smaller.
        row = values[start[b] : stop[b]]
        ordered = row[np.argsort(-sizes[row], kind="mergesort")]
        in_first = np.empty(row.shape[0], np.bool_)
        ahead = 0  # the size of the first half less that of the second
        for k, item in enumerate(ordered):
            in_first[k] = ahead <= 0
            ahead += sizes[item] if in_first[k] else -sizes[item]
        middle = in_first.sum()
        first, second = 0, middle
        for k, item in enumerate(ordered):
            row[first if in_first[k] else second] = item
            first, second = first + in_first[k], second + (not in_first[k])
        start[bins], stop[bins] = start[b] + middle, stop[b]
        stop[b] = start[bins]
        count = push(bins, push(b, count))
        bins += 1
    return start[:bins], stop[:bins]
