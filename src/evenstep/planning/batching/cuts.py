"""Cut sorted rows into padded micro-batches.

The optimal cut has the fewest slots for a number of micro-batches, or the least cost in total.
Rows times width, or times the cost of a row, is a Monge cost, so the optimum is convex in the
number of cuts. A price per micro-batch, found by bisection, therefore gives the optimum for an
exact number of cuts. Each trial of a price is one pass of dynamic programming in O(n log n).

The greedy cut is that of NeMo-RL and ROLL: sorted samples are dealt to ranks in turn, and all
ranks cut at the same turns, by the widest row of each turn.
"""

import heapq
from itertools import pairwise

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernels import kernel


@kernel
def feasible_starts(
    rows: IntArray, most: IntArray, extra: FloatArray, caps: FloatArray
) -> IntArray:
    """For each end j, the first i such that units i..j-1 fit one micro-batch.

    Units are sorted from narrow to wide. `most[j]` rows fit where unit j is the widest. A single
    unit always counts as fitting.
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
def first_wider(widths: IntArray, width: int) -> int:
    """The first of the ascending widths that exceeds `width`, or their number."""
    low, high = 0, widths.shape[0]
    while low < high:
        middle = (low + high) // 2
        if widths[middle] > width:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def turning_end(
    early: int,
    late: int,
    widths: IntArray,
    below: IntArray,
    expires: IntArray,
    value: IntArray,
    cuts: IntArray,
    sign: int,
) -> int:
    """The first end for which `late` is a better start of the last micro-batch than `early`.

    `late` stays better for all later ends: they are wider, so the rows between the two starts cost
    more in the last micro-batch, and from some end on, a start at `early` is infeasible.
    """
    worse = value[late] - value[early]
    between = below[late] - below[early]
    if sign * cuts[late] < sign * cuts[early]:
        width = -(-worse // between) - 1  # at equal cost, the later one wins too
    else:
        width = worse // between
    return min(int(expires[early]), first_wider(widths, width) + 1)


@kernel
def priced_cuts(
    widths: IntArray, below: IntArray, starts: IntArray, expires: IntArray, price: int, sign: int
) -> tuple[IntArray, IntArray]:
    """(least slots plus prices up to each end, number of cuts).

    Among equal values, the one with the fewest cuts (sign 1) or the most (sign -1) is taken.
    `below[j]` counts the rows of the first j units. A queue holds starts, early to late, each with
    the first end for which it is best.
    """
    n = widths.shape[0]
    value = np.zeros(n + 1, np.int64)
    cuts = np.zeros(n + 1, np.int64)
    queue = np.empty(n + 1, np.int64)
    since = np.empty(n + 1, np.int64)
    front, back = 0, 0
    for j in range(1, n + 1):
        late, turn = j - 1, j
        while back > front:
            early = queue[back - 1]
            turn = max(j, turning_end(early, late, widths, below, expires, value, cuts, sign))
            if turn > since[back - 1]:
                break
            back -= 1
        if back == front:
            turn = j
        if turn <= n:
            queue[back], since[back] = late, turn
            back += 1
        while front + 1 < back and since[front + 1] <= j:
            front += 1
        best = queue[front]
        value[j] = value[best] + (below[j] - below[best]) * widths[j - 1] + price
        cuts[j] = cuts[best] + 1
    return value, cuts


@kernel
def optimal_cuts(widths: IntArray, rows: IntArray, starts: IntArray, count: int) -> IntArray:
    """The ends of exactly `count` micro-batches with the fewest slots; `count` must be feasible.

    With the costs of one row in place of `widths`, the total cost is least.

    widths [1, 1, 8], rows of one, count 2 -> ends [2, 3]: 1*2 + 8 slots
    """
    n = widths.shape[0]
    below = np.zeros(n + 1, np.int64)
    for j in range(n):
        below[j + 1] = below[j] + rows[j]
    expires = np.full(n + 1, n + 1, np.int64)  # the first end that each start cannot reach
    for j in range(n, 0, -1):
        for i in range(starts[j - 1], starts[j]):
            expires[i] = j
    # A higher price gives fewer cuts. Find a price that gives `count`, or else the lowest that
    # gives fewer. It is rarely more than the slots of one micro-batch, and never more than all rows
    # at full width.
    low, high = 0, below[n] * widths[n - 1]
    price = (below[n] - below[starts[n]]) * widths[n - 1]
    while low < high:
        _, fewest = priced_cuts(widths, below, starts, expires, price, 1)
        if fewest[n] == count:
            low = high = price
        elif fewest[n] < count:
            high = price
        else:
            low = price + 1
        price = (low + high) // 2
    value, fewest = priced_cuts(widths, below, starts, expires, low, 1)
    _, most = priced_cuts(widths, below, starts, expires, low, -1)
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
    """The ends of the micro-batches, the same for all ranks, cut as late as the budget allows.

    rows[t, r] and extra[t, r] describe the unit that rank r gets in turn t. `most[t]` rows fit at
    the width of the widest unit of turn t over all ranks.
    """
    turns, ranks = rows.shape
    ends = np.empty(turns, np.int64)
    count = 0
    held_rows = np.zeros(ranks, np.int64)
    held = np.zeros((ranks, caps.shape[0]))
    begun = False
    for t in range(turns):
        over = False
        for r in range(ranks):
            over = over or held_rows[r] + rows[t, r] > most[t]
            for d in range(caps.shape[0]):
                over = over or held[r, d] + extra[t, r, d] > caps[d]
        if over and begun:
            ends[count] = t
            count += 1
            held_rows[:] = 0
            held[:] = 0
        begun = True
        for r in range(ranks):
            held_rows[r] += rows[t, r]
            for d in range(caps.shape[0]):
                held[r, d] += extra[t, r, d]
    if begun:
        ends[count] = turns
        count += 1
    return ends[:count]


def divide_cuts(ends: IntArray, widths: IntArray, wanted: int) -> IntArray:
    """Halve the largest micro-batches until there are `wanted`, or none can be divided.

    ends [2, 3, 4] with widths [2, 6, 8, 8], 4 wanted -> [1, 2, 3, 4]: the first is divided.
    """
    held = [_largest_first(a, b, widths) for a, b in pairwise([0, *ends.tolist()])]
    heapq.heapify(held)
    while len(held) < wanted and held[0][0] < 0:
        _, start, end = heapq.heappop(held)
        middle = (start + end) // 2
        heapq.heappush(held, _largest_first(start, middle, widths))
        heapq.heappush(held, _largest_first(middle, end, widths))
    return np.array(sorted(end for _, _, end in held), np.int64)


def _largest_first(start: int, end: int, widths: IntArray) -> tuple[int, int, int]:
    """An entry of a heap: a micro-batch of one turn cannot be divided and comes last."""
    size = (end - start) * int(widths[end - 1]) if end - start > 1 else 0
    return -size, start, end
