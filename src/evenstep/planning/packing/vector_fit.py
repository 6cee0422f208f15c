"""Best fit where several limits must hold."""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernel import kernel

_OPEN = 256  # bins that are considered at a time


@kernel
def scored_fit_kernel(
    taken: FloatArray, caps: FloatArray, order: IntArray, score: int, most: int
) -> IntArray:
    """The bin of each item, taken in `order`; empty if more than `most` bins are needed.

    Item i takes `taken[d, i]` of limit d, at most `caps[d]`, which is above 0. Of all bins with
    room, the one with the lowest score is chosen, by what it has left in shares of each limit: the
    dot product with the item, largest first (0); or, after the item, the sum of squares (1), the
    largest share (2) or the sum (3).
    """
    limits, n = taken.shape
    room = np.empty((limits, most + 1))
    scores = np.empty(most + 1)
    bin_of = np.empty(n, np.int64)
    bins = 0
    for item in order:
        scores[:bins] = 0.0
        for d in range(limits):
            wanted, left = taken[d, item], room[d]
            share = 1 / caps[d]
            # One loop per score and no branch inside, so that the compiler uses vectors.
            if score == 0:
                for b in range(bins):
                    value = scores[b] - (wanted * share) * (left[b] * share)
                    scores[b] = value if left[b] >= wanted else np.inf
            elif score == 1:
                for b in range(bins):
                    rest = (left[b] - wanted) * share
                    value = scores[b] + rest * rest
                    scores[b] = value if left[b] >= wanted else np.inf
            elif score == 2:
                for b in range(bins):
                    value = max(scores[b], (left[b] - wanted) * share)
                    scores[b] = value if left[b] >= wanted else np.inf
            else:
                for b in range(bins):
                    value = scores[b] + (left[b] - wanted) * share
                    scores[b] = value if left[b] >= wanted else np.inf
        chosen, best = -1, np.inf
        for b in range(bins):
            if scores[b] < best:
                chosen, best = b, scores[b]
        if chosen < 0:
            if bins == most:
                return np.empty(0, np.int64)
            chosen = bins
            bins += 1
            for d in range(limits):
                room[d, chosen] = caps[d]
        for d in range(limits):
            room[d, chosen] -= taken[d, item]
        bin_of[item] = chosen
    return bin_of
