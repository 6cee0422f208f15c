"""Dynamic batching: sorted rows are cut where the width grows, each cut a padded micro-batch.

The optimal cut takes the fewest micro-batches that the budget and the ranks allow and, of those,
the fewest slots. Rows times the widest is a Monge cost, so the fewest slots are convex in the
number of cuts: one price per micro-batch, found by bisection, gives the optimum for exactly the
wanted number, each time by one pass of dynamic programming.

The greedy cut is that of NeMo-RL and ROLL: sorted samples are dealt to ranks in turn, and all
ranks cut at the same places, by the largest row at each place.
"""

from itertools import pairwise

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernel import kernel


@kernel
def feasible_starts(
    rows: IntArray, most: IntArray, extra: FloatArray, caps: FloatArray
) -> IntArray:
    """For each end j, the first i such that units i..j-1 fit one micro-batch.

    Units run from narrow to wide; `most[j]` rows fit where unit j is the widest. A unit by itself
    always counts as fitting.
    """
    n = rows.shape[0]
    starts = np.zeros(n + 1, np.int64)
    first = 0
    held_rows = 0
    held = np.zeros(caps.shape[0])
    for j in range(1, n + 1):
        held_rows += rows[j - 1]
        for d in range(caps.shape[0]):
            held[d] += extra[j - 1, d]
        while first < j - 1:
            over = held_rows > most[j - 1]
            for d in range(caps.shape[0]):
                over = over or held[d] > caps[d]
            if not over:
                break
            held_rows -= rows[first]
            for d in range(caps.shape[0]):
                held[d] -= extra[first, d]
            first += 1
        starts[j] = first
    return starts


@kernel
def fewest_cuts(starts: IntArray) -> int:
    """The fewest contiguous micro-batches, taken greedily from the widest end."""
    count = 0
    j = starts.shape[0] - 1
    while j > 0:
        j = starts[j]
        count += 1
    return count


@kernel
def priced_cuts(
    widths: IntArray, below: IntArray, starts: IntArray, price: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Least slots + price per micro-batch: (value, fewest and most cuts that reach it) up to each
    end. `below[j]` counts the rows of the first j units."""
    n = widths.shape[0]
    value = np.zeros(n + 1, np.int64)
    fewest = np.zeros(n + 1, np.int64)
    most = np.zeros(n + 1, np.int64)
    hint = 0  # the best start never moves back
    for j in range(1, n + 1):
        best = -1
        at = max(starts[j], hint)
        hint = at
        for i in range(at, j):
            total = value[i] + (below[j] - below[i]) * widths[j - 1] + price
            if best < 0 or total < best:
                best, hint = total, i
                fewest[j], most[j] = fewest[i] + 1, most[i] + 1
            elif total == best:
                fewest[j] = min(fewest[j], fewest[i] + 1)
                most[j] = max(most[j], most[i] + 1)
        value[j] = best
    return value, fewest, most


@kernel
def optimal_cuts(widths: IntArray, rows: IntArray, starts: IntArray, count: int) -> IntArray:
    """The ends of exactly `count` micro-batches with the fewest slots; count is feasible.

    widths [1, 1, 8], rows of one, count 2 -> ends [2, 3]: 1*2 + 8 slots
    """
    n = widths.shape[0]
    below = np.zeros(n + 1, np.int64)
    for j in range(n):
        below[j + 1] = below[j] + rows[j]
    # A higher price gives fewer cuts. Find the lowest price that allows `count` or fewer.
    low, high = 0, below[n] * widths[n - 1] + 1
    while low < high:
        price = (low + high) // 2
        _, fewest, _ = priced_cuts(widths, below, starts, price)
        if fewest[n] <= count:
            high = price
        else:
            low = price + 1
    value, fewest, most = priced_cuts(widths, below, starts, low)
    ends = np.empty(count, np.int64)
    j = n
    for left in range(count, 0, -1):
        ends[left - 1] = j
        found = -1
        for i in range(starts[j], j):
            total = value[i] + (below[j] - below[i]) * widths[j - 1] + low
            if total == value[j] and fewest[i] <= left - 1 <= most[i]:
                found = i
                break
        j = found
    return ends


@kernel
def greedy_cuts(rows: IntArray, most: IntArray, extra: FloatArray, caps: FloatArray) -> IntArray:
    """The ends of the micro-batches that all ranks share, cut as late as the budget allows.

    rows[p, r] and extra[p, r] are what rank r holds at place p; `most[p]` rows fit where the
    widest unit of place p, over all ranks, sets the width.
    """
    places, ranks = rows.shape
    ends = np.empty(places, np.int64)
    count = 0
    held_rows = np.zeros(ranks, np.int64)
    held = np.zeros((ranks, caps.shape[0]))
    begun = False
    for p in range(places):
        over = False
        for r in range(ranks):
            over = over or held_rows[r] + rows[p, r] > most[p]
            for d in range(caps.shape[0]):
                over = over or held[r, d] + extra[p, r, d] > caps[d]
        if over and begun:
            ends[count] = p
            count += 1
            held_rows[:] = 0
            held[:] = 0
        begun = True
        for r in range(ranks):
            held_rows[r] += rows[p, r]
            for d in range(caps.shape[0]):
                held[r, d] += extra[p, r, d]
    if begun:
        ends[count] = places
        count += 1
    return ends[:count]


def split_cuts(ends: IntArray, widths: IntArray, wanted: int) -> IntArray:
    """Divide the heaviest divisible micro-batches in halves until there are `wanted`, or no more.

    ends [2, 3, 4] with widths [2, 6, 8, 8], 4 wanted -> [1, 2, 3, 4]: the first is divided.
    """
    cuts = [0, *ends.tolist()]
    while len(cuts) - 1 < wanted:
        spans = [(b - a) * int(widths[b - 1]) if b - a > 1 else 0 for a, b in pairwise(cuts)]
        heaviest = int(np.argmax(spans))
        if spans[heaviest] == 0:
            break
        cuts.insert(heaviest + 1, (cuts[heaviest] + cuts[heaviest + 1]) // 2)
    return np.array(cuts[1:], np.int64)
