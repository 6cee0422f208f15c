"""Pack into exactly filled bins, until the lower bound is reached.

The largest remaining item opens a bin. The rest of the bin is filled with one, two or three items
whose lengths add up exactly, by look-ups in a table of the distinct lengths. Large partners are
taken first, because small items fit anywhere later. Several settings of the waste to accept are
tried until the number of bins equals the bound.

Lengths are named by their rank: of the lengths 3, 3, 5, 9, rank 1 is 3, rank 2 is 5, rank 3 is 9.
Rank 0 means none.
"""

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.planning.kernels import kernel, nearest_free

_LIMIT = 2000  # partners tried for one gap
_LOOKS = 500_000  # partners tried in all: some milliseconds


@kernel
def fill_exactly(
    ordered: IntArray,
    order: IntArray,
    capacity: int,
    shift: int,
    spare: int,
    enough: int,
    looks: int,
) -> tuple[IntArray, int, int]:
    """(the bin of each item, bins, looks left).

    `order` is shortest first and `ordered` is `lengths[order]`. A partner that wastes at most
    `enough` is taken at once. If `enough` is negative, the accepted waste adapts: `spare` is the
    waste that the bound allows in all, shared by the remaining bins.

        capacity 10, lengths 7, 6, 5, 4, 3, 2, 2, 1, no waste accepted
        7 opens a bin, gap 3: the longest length that fits, 3, leaves no waste       [7, 3]
        6 opens a bin, gap 4: 4                                                      [6, 4]
        5 opens a bin, gap 5: one item (2) wastes 3, two (2, 2) waste 1, three 0     [5, 2, 2, 1]
    """
    # The lengths that are not packed yet. Rank r has the length `value[r]`, of which `left[r]`
    # remain, the items `order[end[r] - left[r] : end[r]]`. `link` leads from a rank to the nearest
    # one at or below it that remains. `first[g >> shift]` is the highest rank whose length is at
    # most `g >> shift << shift`.
    #     lengths 3, 3, 5, 9 -> value [0, 3, 5, 9, capacity + 1], left [0, 2, 1, 1],
    #     link [0, 1, 2, 3]; once 5 is taken, link [0, 1, 1, 3]
    n = ordered.shape[0]
    value, left = np.zeros(n + 2, np.int64), np.zeros(n + 2, np.int64)
    end = np.zeros(n + 2, np.int64)
    ranks = 0
    for i in range(n):
        if ordered[i] != value[ranks]:
            ranks += 1
            value[ranks] = ordered[i]
        left[ranks] += 1
        end[ranks] = i + 1
    value[ranks + 1] = capacity + 1  # ends every search
    link = np.arange(ranks + 1)
    first = np.empty((capacity >> shift) + 1, np.int64)
    rank = 0
    for g in range(first.shape[0]):
        while value[rank + 1] <= g << shift:
            rank += 1
        first[g] = rank

    def at_most(most: int) -> int:
        """The highest rank that remains with a length of at most `most`; 0 if there is none."""
        rank = first[most >> shift]
        while value[rank + 1] <= most:
            rank += 1
        return nearest_free(link, rank)

    def best_pair(gap: int, taken: int, enough: int, limit: int) -> tuple[int, int, int, int]:
        """Two lengths with the least waste in `gap`: (waste, longer rank, shorter rank, looks).

        The most even pair that wastes at most `enough` wins. One item of rank `taken` counts as
        gone.

        gap 10, lengths 3, 4, 5, 7, enough 0: from the most even on, 5 has no partner, 4 finds 5 and
        wastes 1, 3 finds 7 and wastes 0
        """
        waste, longer, shorter, looks = gap + 1, 0, 0, 0
        b = at_most(gap // 2)
        while b > 0 and looks < limit:
            looks += 1
            if b != taken or left[b] > 1:
                a = at_most(gap - value[b])
                while a > 0 and left[a] <= (1 if a == b else 0) + (1 if a == taken else 0):
                    a = nearest_free(link, a - 1)
                if a >= b and gap - value[a] - value[b] < waste:
                    waste, longer, shorter = gap - value[a] - value[b], a, b
                    if waste <= enough:
                        break
            b = nearest_free(link, b - 1)
        return waste, longer, shorter, looks

    bin_of = np.empty(n, np.int64)
    tokens, packed, bins = ordered.sum(), 0, 0
    while packed < n:
        # A new bin, and how much of it may be wasted.
        gap = capacity
        allowed = enough
        if enough < 0:
            # In floats, because the product may exceed 64 bits.
            share = float(spare) * -enough * capacity / (2 * max(tokens, capacity))
            allowed = max(0, int(np.floor(share)))
        # Fill its gap, by one to three items at a time, until nothing fits.
        while True:
            one = at_most(gap)
            if one == 0:
                break
            two, three = 0, 0
            if gap < capacity and 3 * value[one] >= gap:  # three items can fill the gap
                waste = gap - value[one]
                limit = min(_LIMIT, looks)
                # Two items, if they waste less than one.
                if waste > allowed:
                    pair, a, b, more = best_pair(gap, -1, allowed, limit)
                    looks -= more
                    if pair < waste:
                        waste, one, two = pair, a, b
                # Three items: a short one, and the best pair beside it.
                if waste > allowed:
                    tried = 0
                    c = at_most(gap // 3)
                    while c > 0 and tried < limit:
                        pair, a, b, more = best_pair(gap - value[c], c, allowed, limit)
                        tried += more + 1
                        if pair < waste:
                            waste, one, two, three = pair, a, b, c
                            if waste <= allowed:
                                break
                        c = nearest_free(link, c - 1)
                    looks -= tried
            # Take them.
            for rank in (one, two, three):
                if rank > 0:
                    bin_of[order[end[rank] - left[rank]]] = bins
                    left[rank] -= 1
                    if left[rank] == 0:
                        link[rank] = rank - 1
                    packed += 1
                    gap -= value[rank]
                    tokens -= value[rank]
        spare -= gap
        bins += 1
    return bin_of, bins, max(looks, 0)


@kernel
def optimal_kernel(
    ordered: IntArray, order: IntArray, capacity: int, bound: int, bins: int
) -> IntArray:
    """The bin of each item in fewer than `bins` bins; empty if no such packing is found."""
    # The waste that a packing in `bound` bins may have in all. Space next to an item that no other
    # item fits is wasted in any packing.
    spare = bound * capacity
    for length in ordered:
        spare -= capacity if length + ordered[0] > capacity else length
    each = max(0, spare // max(bound, 1))
    # At most four entries of a table for an item, however large the capacity is.
    shift = 0
    while capacity >> shift > 4 * ordered.shape[0]:
        shift += 1
    looks = _LOOKS
    best = np.empty(0, np.int64)
    # No waste at first, then waste that adapts or is fixed, in an order that ends early on average.
    for enough in (0, -2, each, -1, 10, -4, 50, 5, 20, 2):
        if bins <= bound or looks == 0:
            break
        bin_of, used, looks = fill_exactly(ordered, order, capacity, shift, spare, enough, looks)
        if used < bins:
            bins, best = used, bin_of
    return best
