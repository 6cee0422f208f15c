"""Best fit for few items: a sorted list of spaces instead of a table over the capacity."""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.planning.kernel import kernel


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

    Items of length `present[k]` end at `stops[k]`. Bins of equal space are a stack.
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
            place = place_of(spaces, count, length)
            fresh = place == count  # no open bin is large enough: open new ones
            space = capacity if fresh else spaces[place]
            each = min(space // length, stop - item)
            rest = space - each * length
            target = place_of(spaces, count, rest)
            known = target < count and spaces[target] == rest
            newest = tops[target] if known else -1
            chosen = bins if fresh else tops[place]
            while chosen >= 0 and item + each <= stop:
                after = bins + 1 if fresh else below[chosen]
                bins += fresh
                below[chosen] = newest
                newest = chosen
                bin_of[item : item + each] = chosen
                item += each
                chosen = after
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
