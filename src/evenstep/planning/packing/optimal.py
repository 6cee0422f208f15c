"""Pack into exactly filled bins, until the lower bound is reached.

The largest remaining item opens a bin. The rest of the bin is filled with one, two or three items
whose lengths add up exactly, by look-ups in a table of lengths. Large partners are taken first,
because small items fit anywhere later. Several settings of the waste to accept are tried until the
number of bins equals the bound.
"""

import numpy as np

from evenstep.core.bounds import pack_bound
from evenstep.core.ragged import IntArray, Ragged
from evenstep.planning.kernel import kernel
from evenstep.planning.packing.best_fit import LARGE, best_fit_decreasing
from evenstep.planning.packing.first_fit import nearest_free
from evenstep.planning.packing.items import bins_in_order

_LIMIT = 2000  # partners tried for one gap
_LOOKS = 500_000  # partners tried in all: some milliseconds


@kernel
def take(count: IntArray, link: IntArray, length: int) -> None:
    """Remove one item of `length` from the table."""
    count[length] -= 1
    if count[length] == 0:
        link[length] = length - 1


@kernel
def best_pair(
    count: IntArray, link: IntArray, gap: int, held: int, enough: int, limit: int
) -> tuple[int, int, int, int]:
    """Two lengths with the least waste in `gap`: (waste, longer, shorter, looks).

    The most even pair that wastes at most `enough` wins. One item of length `held` is already
    taken.
    """
    waste, longer, shorter, looks = gap + 1, 0, 0, 0
    b = nearest_free(link, gap // 2)
    while b > 0 and looks < limit:
        looks += 1
        if b != held or count[b] > 1:
            a = nearest_free(link, gap - b)
            while a > 0 and count[a] <= (1 if a == b else 0) + (1 if a == held else 0):
                a = nearest_free(link, a - 1)
            if a >= b and gap - a - b < waste:
                waste, longer, shorter = gap - a - b, a, b
                if waste <= enough:
                    break
        b = nearest_free(link, b - 1)
    return waste, longer, shorter, looks


@kernel
def fill_exactly(
    lengths: IntArray, capacity: int, spare: int, enough: int, looks: int
) -> tuple[IntArray, IntArray, int, int]:
    """(lengths in the order in which they fill bins, the bin of each, bins, looks left).

    A partner that wastes at most `enough` is taken at once. If `enough` is negative, the accepted
    waste adapts: `spare` is the waste that the bound allows in all, shared by the remaining bins.
    """
    n = lengths.shape[0]
    count = np.zeros(capacity + 1, np.int64)
    left = 0
    for length in lengths:
        count[length] += 1
        left += length
    link = np.arange(capacity + 1)
    for length in range(1, capacity + 1):
        if count[length] == 0:
            link[length] = length - 1
    filled = np.empty(n, np.int64)
    bin_of = np.empty(n, np.int64)
    packed = 0
    bins = 0
    while packed < n:
        gap = capacity
        allowed = enough
        if enough < 0:
            allowed = max(0, spare * -enough * capacity // (2 * max(left, capacity)))
        while True:
            one = nearest_free(link, gap)
            if one == 0:
                break
            two, three = 0, 0
            if gap < capacity and 3 * one >= gap:  # three items can fill the gap
                waste = gap - one
                limit = min(_LIMIT, looks)
                if waste > allowed:
                    found, a, b, more = best_pair(count, link, gap, -1, allowed, limit)
                    looks -= more
                    if found < waste:
                        waste, one, two = found, a, b
                if waste > allowed:
                    tried = 0
                    c = nearest_free(link, gap // 3)
                    while c > 0 and tried < limit:
                        found, a, b, more = best_pair(count, link, gap - c, c, allowed, limit)
                        tried += more + 1
                        if found < waste:
                            waste, one, two, three = found, a, b, c
                            if waste <= allowed:
                                break
                        c = nearest_free(link, c - 1)
                    looks -= tried
            for length in (one, two, three):
                if length > 0:
                    take(count, link, length)
                    filled[packed] = length
                    bin_of[packed] = bins
                    packed += 1
                    gap -= length
                    left -= length
        spare -= gap
        bins += 1
    return filled, bin_of, bins, max(looks, 0)


@kernel
def name_items(lengths: IntArray, filled: IntArray, bin_of_filled: IntArray) -> IntArray:
    """The bin of each item, given the lengths that fill each bin."""
    longest = 0
    for length in lengths:
        longest = max(longest, length)
    end = np.zeros(longest + 2, np.int64)
    for length in lengths:
        end[length + 1] += 1
    for length in range(1, longest + 2):
        end[length] += end[length - 1]
    by_length = np.empty(lengths.shape[0], np.int64)
    cursor = end.copy()
    for i in range(lengths.shape[0]):
        by_length[cursor[lengths[i]]] = i
        cursor[lengths[i]] += 1
    bin_of = np.empty(lengths.shape[0], np.int64)
    for k in range(filled.shape[0]):
        bin_of[by_length[end[filled[k]]]] = bin_of_filled[k]
        end[filled[k]] += 1
    return bin_of


@kernel
def optimal_kernel(lengths: IntArray, capacity: int, bound: int, bins: int) -> IntArray:
    """The bin of each item in fewer than `bins` bins; empty if no such packing is found."""
    smallest = capacity
    for length in lengths:
        smallest = min(smallest, length)
    # Space left next to an item that no other item fits is wasted in any packing.
    spare = bound * capacity
    for length in lengths:
        spare -= capacity if length + smallest > capacity else length
    each = max(0, spare // max(bound, 1))
    looks = _LOOKS
    best = np.empty(0, np.int64)
    for enough in (0, -2, each, -1, 10, -4, 50, 5, 20, 2):
        if bins <= bound or looks == 0:
            break
        filled, bin_of, used, looks = fill_exactly(lengths, capacity, spare, enough, looks)
        if used < bins:
            bins = used
            best = name_items(lengths, filled, bin_of)
    return best


def optimal(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """As few bins as the search finds; proven optimal if their number equals `pack_bound`.

    Best fit comes first. If it needs more bins than the bound, bins are filled exactly with several
    tolerances until the bound is reached. There is no search for capacities over four million.

    >>> len(optimal(np.array([6, 5, 4, 3, 2]), 10)), pack_bound(np.array([6, 5, 4, 3, 2]), 10)
    (2, 2)
    """
    packed = best_fit_decreasing(lengths, capacity)
    bound = pack_bound(lengths, capacity)
    if len(packed) > bound and capacity <= LARGE:
        better = optimal_kernel(lengths, capacity, bound, len(packed))
        if len(better):
            return bins_in_order(better)
    return packed
