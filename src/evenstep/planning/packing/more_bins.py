"""Spread items evenly over more bins than they need."""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray, Ragged, offsets_of
from evenstep.core.text import MOST_RANKS
from evenstep.planning.balance.partition import partition
from evenstep.planning.heap import rise, sink
from evenstep.planning.kernel import kernel
from evenstep.planning.packing.spread import spread_kernel

_NONE: IntArray = np.empty(0, np.int64)


def even_bins(sizes: IntArray, bins: Ragged, capacity: int, target: int) -> Ragged:
    """The items of `bins` in `target` bins of similar size.

    `partition` is tried first. If it exceeds the capacity, or for over a million bins, each item
    goes, longest first, to the emptiest bin with room. If an item fits nowhere, `bins` are divided.

    >>> even_bins(np.full(12, 10), Ragged.of([[*range(12)]]), 120, 3).sums(np.full(12, 10)).tolist()
    [40, 40, 40]
    """
    bin_of = partition(sizes, target) if target <= MOST_RANKS else _NONE
    if len(bin_of) == 0 or np.bincount(bin_of, sizes, target).max() > capacity:
        order = np.argsort(-sizes, kind="stable")
        bin_of = spread_kernel(
            sizes.astype(np.float64)[:, None], order, np.array([float(capacity)]), target
        )
    if len(bin_of) < len(sizes) or np.bincount(bin_of, minlength=target).min() == 0:
        return divide_bins(sizes, bins, target)
    return Ragged.group(bin_of, target)


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
    count = 0
    for b in range(bins):
        start[b], stop[b] = offsets[b], offsets[b + 1]
        count = put_bin(b, start, stop, sizes, values, emptiness, heap, count)
    while bins < target and count > 0:
        b = heap[0]
        count -= 1
        heap[0] = heap[count]
        sink(heap, count, emptiness, 0, True)
        start[bins], stop[bins] = start[b] + halve(sizes, values[start[b] : stop[b]]), stop[b]
        stop[b] = start[bins]
        count = put_bin(b, start, stop, sizes, values, emptiness, heap, count)
        count = put_bin(bins, start, stop, sizes, values, emptiness, heap, count)
        bins += 1
    return start[:bins], stop[:bins]


@kernel
def put_bin(
    b: int,
    start: IntArray,
    stop: IntArray,
    sizes: IntArray,
    values: IntArray,
    emptiness: FloatArray,
    heap: IntArray,
    count: int,
) -> int:
    """Put bin `b` onto the heap of `count` bins if it can be divided; return the new count."""
    if stop[b] - start[b] < 2:
        return count
    emptiness[b] = -float(sizes[values[start[b] : stop[b]]].sum())
    heap[count] = b
    rise(heap, count + 1, emptiness, True)
    return count + 1


@kernel
def halve(sizes: IntArray, row: IntArray) -> int:
    """Order the items of a bin, in place, as two halves of similar size, neither empty.

    Longest first, each goes to the smaller half. Returns how many are in the first half.
    """
    ordered = row[np.argsort(-sizes[row], kind="mergesort")]
    second = np.empty_like(row)
    in_first, in_second = 0, 0
    first_size, second_size = 0, 0
    for item in ordered:
        if second_size < first_size:
            second[in_second] = item
            in_second += 1
            second_size += sizes[item]
        else:
            row[in_first] = item
            in_first += 1
            first_size += sizes[item]
    for k in range(in_second):  # compiles 2 s faster than a slice, which checks shapes
        row[in_first + k] = second[k]
    return in_first
