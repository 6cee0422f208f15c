"""What leaves a pool together: the samples of the next micro-batch.

A pool holds samples in order of arrival; index 0 is the oldest. Every strategy takes the oldest, so
a sample waits for at most as many micro-batches as there were samples before it. The oldest sample
alone is always allowed, however long it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.errors import ConfigError
from evenstep.planning.kernels import kernel

_ANY = 2**62  # more than any limit
_NEVER = 2**30  # the weight of values that no set reaches
_KEPT_WEIGHTS = 2**20  # weights over all stages of `lightest`: about half a millisecond
_KEPT_WORDS = 2**24  # words over all stages of `fill_window`: 128 MiB, of which few are used
_STEPS = 100_000  # items that `search` tries: a tenth of a millisecond or more
_OLDEST = np.zeros(1, np.int64)

# sizes, counted (zeros if nothing is), capacity, unit, most counted, most samples -> indices
Strategy: TypeAlias = Callable[[IntArray, IntArray, int, int, int, int], IntArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What one micro-batch may hold."""

    capacity: int
    """Slots. Packed: the sum of aligned sizes; padded: rows times width."""

    unit: int = 1
    """Padded: widths are rounded up to a multiple of this."""

    counted: int | None = None
    """The most of a second column, for example loss tokens; None: not counted."""

    most: int | None = None
    """The most samples; None: any number."""

    def __post_init__(self) -> None:
        for name in ("capacity", "unit", "counted", "most"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} of a micro-batch must be 1 or more, got {value}.")


@kernel
def greedy(
    sizes: IntArray, counted: IntArray, capacity: int, unit: int, limit: int, most: int
) -> IntArray:
    """In order, each sample that still fits.

    >>> greedy(np.array([7, 6, 3]), np.array([0, 0, 0]), 10, 1, 9, 9).tolist()
    [0, 2]
    """
    n = sizes.shape[0]
    chosen = np.zeros(n, np.int64)
    count, used, spent = 1, sizes[0], counted[0]
    i = 1
    while i < n and count < most and used < capacity:
        if used + sizes[i] <= capacity and spent + counted[i] <= limit:
            chosen[count] = i
            count += 1
            used += sizes[i]
            spent += counted[i]
        i += 1
    return chosen[:count]


def subset_sum(
    sizes: IntArray, counted: IntArray, capacity: int, unit: int, limit: int, most: int
) -> IntArray:
    """Fill as much as possible around the oldest sample, by the counted column or else by size.

    Exact if only size is limited and, up to some size, if a counted column is limited too. A
    bounded search that is no worse than greedy handles larger cases and those where `most` binds.
    Of equally full choices, the older samples are taken.

    >>> subset_sum(np.array([7, 2, 3]), np.array([0, 5, 4]), 10, 1, 9, 9).tolist()
    [0, 1]
    """
    rest, space = sizes[1:], capacity - int(sizes[0])
    values, goal = (counted[1:], limit - int(counted[0])) if limit < _ANY else (rest, space)
    if space <= 0 or goal < 0 or most <= 1:
        return np.zeros(1, np.int64)
    filled, exact = best_set(values, rest[:0], goal, 0), True
    if values is not rest and int(rest[filled].sum()) > space:
        filled = best_set(values, rest, goal, space) if space < _NEVER else rest[:0]
        exact = len(filled) > 0
    if not exact or len(filled) >= most:
        filled = search(values, rest, goal, space, most - 1)
    return np.concatenate((_OLDEST, filled + 1))


@kernel
def row_width(size: int, unit: int) -> int:
    """The width of a row for this size: 5 in fours is 8."""
    return (size + unit - 1) // unit * unit


@kernel
def closest(
    sizes: IntArray,
    counted: IntArray,
    capacity: int,
    unit: int,
    limit: int,
    most: int,
    near: bool,
) -> IntArray:
    """Add, while it fits, the sample that gives the fewest slots; of equals, the one closest in
    length if `near`, else the first.

    sizes [5, 9, 3, 4], capacity 16: 3 and 4 both make 2 rows of 5, 9 makes 2 of 9. If `near`, 4 is
    added before 3, else 3 before 4. Three rows of 5 are full.
    """
    n = sizes.shape[0]
    chosen = np.zeros(n, np.int64)
    waiting = np.ones(n, np.bool_)
    waiting[0] = False
    longest, spent = sizes[0], counted[0]
    count = 1
    while count < most:
        # Look at all that wait for the one with the fewest slots.
        best, fewest, distance = -1, capacity + 1, 0
        for i in range(1, n):
            slots = row_width(max(longest, sizes[i]), unit) * (count + 1)
            if not waiting[i] or slots > fewest or spent + counted[i] > limit:
                continue
            away = abs(sizes[i] - longest)
            if slots < fewest or (near and best >= 0 and away < distance):
                best, fewest, distance = i, slots, away
        if best < 0:
            break
        waiting[best] = False
        chosen[count] = best
        count += 1
        longest = max(longest, sizes[best])
        spent += counted[best]
    return chosen[:count]


@kernel
def fullest(
    sizes: IntArray, counted: IntArray, capacity: int, unit: int, limit: int, most: int
) -> IntArray:
    """The rows that hold the most tokens, over all widths; of equals, those with fewer slots.

    At any width, the longest rows up to it are the fullest. Where a counted column excludes one of
    them, the next shorter row that fits is taken, which need not be the best.

    sizes [5, 9, 4, 3], capacity 18: width 9 holds two rows, 9 + 5 tokens; width 5 holds three,
    5 + 4 + 3. So rows 0 and 1 are chosen.
    """
    n = sizes.shape[0]
    best = np.zeros(1, np.int64)
    best_tokens, best_slots, youngest = sizes[0], row_width(sizes[0], unit), 0
    # Longest first; of equals, the oldest first.
    order = np.argsort(-sizes[1:], kind="mergesort") + 1
    rows = np.zeros(n, np.int64)
    for start in range(n - 1):
        # The next width, unless it is the one before.
        longest = max(sizes[0], sizes[order[start]])
        width = row_width(longest, unit)
        if start > 0 and width == row_width(max(sizes[0], sizes[order[start - 1]]), unit):
            continue
        # The oldest row and the longest others of this width, as many as fit.
        fit = min(most, capacity // max(width, 1))
        count, tokens, spent = 1, sizes[0], counted[0]
        for at in range(start, n - 1):
            if count >= fit:
                break
            i = order[at]
            if spent + counted[i] > limit:
                continue
            rows[count] = i
            count += 1
            tokens += sizes[i]
            spent += counted[i]
        if count < 2 or tokens < best_tokens:
            continue
        # Compare by tokens, then slots, then how long the youngest row has waited.
        longest = max(sizes[0], sizes[rows[1]])  # less than the width if its rows were excluded
        slots = row_width(longest, unit) * count
        last = rows[:count].max()
        if tokens > best_tokens or (slots, last) < (best_slots, youngest):
            best_tokens, best_slots, youngest = tokens, slots, last
            best = rows[:count].copy()
    return best


PACKED: dict[str, Strategy] = {"subset_sum": subset_sum, "greedy": greedy}
PADDED: dict[str, Strategy] = {
    "fullest": fullest,
    "prefer_closest": partial(closest, near=True),
    "prefer_first": partial(closest, near=False),
}
STRATEGIES: dict[str, Strategy] = {**PACKED, **PADDED}


def select(strategy: str, sizes: IntArray, room: Room, counted: IntArray | None = None) -> IntArray:
    """Indices in the pool of the next micro-batch: the oldest first, then in order of choice.

    >>> select("greedy", np.array([5, 6, 3, 5]), Room(capacity=10)).tolist()
    [0, 2]
    >>> select("subset_sum", np.array([5, 6, 3, 5]), Room(capacity=10)).tolist()
    [0, 3]
    """
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"unknown strategy {strategy!r}; expected one of: {', '.join(STRATEGIES)}."
        )
    assert len(sizes), "a pool holds at least one sample"
    if room.counted is None:
        column, limit = np.zeros(len(sizes), np.int64), _ANY
    else:
        assert counted is not None, "a limited column has counts"
        assert len(counted) == len(sizes), "one count per sample"
        column, limit = np.ascontiguousarray(counted, np.int64), room.counted
    return STRATEGIES[strategy](
        np.ascontiguousarray(sizes, np.int64),
        column,
        room.capacity,
        room.unit,
        limit,
        room.most or _ANY,
    )


@kernel
def best_set(values: IntArray, weights: IntArray, most_value: int, most_weight: int) -> IntArray:
    """Ascending indices of the set with the most value within both limits.

    Without weights, if their array is empty. Of equal sets, the one whose last item comes first,
    then the one whose last but one does, and so on. Empty if nothing fits, or if a table of weights
    would be too large.

    A set that leaves out little has a value close to the running total. So a narrow window below
    that total is tried first, where an item takes less time.
    """
    # Leave out what is too large.
    weighed = weights.shape[0] > 0
    indices = np.empty(values.shape[0], np.int64)
    n, total, largest, divisor = 0, 0, 0, 0
    for i in range(values.shape[0]):
        if values[i] <= most_value and (not weighed or weights[i] <= most_weight):
            indices[n] = i
            n += 1
            total += values[i]
            largest = max(largest, values[i])
            if divisor != 1:
                a, b = divisor, values[i]
                while b > 0:
                    a, b = b, a % b
                divisor = a
    indices = indices[:n].copy()
    values = values[indices]
    if weighed:
        weights, divisor = weights[indices], 1
    elif total <= most_value:
        return indices
    # Divide by what divides all values.
    for i in range(n):
        values[i] //= divisor
    total, largest, most_value = total // divisor, largest // divisor, most_value // divisor
    # Ever wider windows, then all sums.
    taken = np.empty(0, np.int64)
    window, widest = 2 * largest, False
    while taken.shape[0] == 0 and not widest:
        widest = 2 * window >= min(total, most_value)
        if widest:
            window = total
        if weighed:
            taken = lightest(values, weights, most_value, most_weight, window)
        else:
            taken = fill_window(values, most_value, window)
        window *= 4
    for i in range(taken.shape[0]):
        taken[i] = indices[taken[i]]
    return taken


@kernel
def fill_window(units: IntArray, space: int, window: int) -> IntArray:
    """Indices of the set with the largest sum; empty if the window is too narrow to fill `space`.

    The reachable sums are a bitset, and adding an item shifts all of them at once. Items are added
    in order and every stage is kept, so the first stage that has a sum shows which item completed
    it.

        sizes 3, 5, 2, space 7    {0} -> {0, 3} -> {0, 3, 5} -> {0, 2, 3, 5, 7}    7 = 2 + 5

    Stage k holds the sums of the first k items from their total less `window` up to `space`. What
    a set leaves out only grows, so a set that ends inside the window was never outside. If the
    stages would be too large, the last items are left out.
    """
    width = min(space >> 6, (window >> 6) + 1) + 4
    n = min(units.shape[0], _KEPT_WORDS // width)
    # The words of each stage between two zeros, which the next shift reads.
    stages = np.empty((n + 1, width), np.uint64)
    stages[0, :3] = np.uint64(0), np.uint64(1), np.uint64(0)
    totals = np.zeros(n + 1, np.int64)

    def holds(stage: int, wanted: int) -> bool:
        """Whether a stage has the sum `wanted`, which is not below its window."""
        if wanted > totals[stage]:
            return False
        bit = wanted - (max(0, totals[stage] - window) >> 6 << 6)
        return bool((stages[stage, (bit >> 6) + 1] >> np.uint64(bit & 63)) & np.uint64(1))

    # Add items until a stage has the sum `space`.
    stage, complete = 0, False
    while stage < n and not complete:
        before, total = totals[stage], totals[stage] + units[stage]
        if total - window > space:
            return np.empty(0, np.int64)
        old, new = stages[stage], stages[stage + 1]
        old_base, base = max(0, before - window) >> 6, max(0, total - window) >> 6
        old_top, top = min(before, space) >> 6, min(total, space) >> 6
        # The sums without this item.
        new[0] = np.uint64(0)
        kept, source = max(base, old_top + 1) - base, old[base - old_base :]
        for i in range(1, kept + 1):
            new[i] = source[i]
        for i in range(kept + 1, top - base + 3):
            new[i] = np.uint64(0)
        # And with it: moved up by whole words, and by a part of a word with its carry.
        whole, part = units[stage] >> 6, np.uint64(units[stage] & 63)
        rest = np.uint64(63) - part
        first = max(base, old_base + whole)
        lower, target = old[first - whole - old_base :], new[first - base + 1 :]
        upper = lower[1:]
        for i in range(top - first + 1):
            target[i] |= (upper[i] << part) | ((lower[i] >> np.uint64(1)) >> rest)
        stage += 1
        totals[stage] = total
        complete = holds(stage, space)
    if not complete and window < totals[stage]:
        return np.empty(0, np.int64)
    # The largest sum, then back through the stages: an item was needed where the stage before it
    # does not have the sum. Sizes 3, 5, 2, space 7: stage 3 has 7, stage 2 does not, so 2 is taken;
    # stage 2 has 5 and stage 1 does not, so 5 is taken; 0 remains.
    reached = min(space, totals[stage])
    while not holds(stage, reached):
        reached -= 1
    taken = np.empty(stage, np.int64)
    count = 0
    for k in range(stage - 1, -1, -1):
        if not holds(k, reached):
            taken[count] = k
            count += 1
            reached -= units[k]
    return taken[:count][::-1].copy()


@kernel
def lightest(
    values: IntArray, weights: IntArray, most_value: int, most_weight: int, window: int
) -> IntArray:
    """Indices of the best set; empty if the window or the table is too small to find one.

    Stages as in `fill_window`: stage k holds, for every value of the first k items from their total
    less `window` up to `most_value`, the least weight that reaches it.

        values 3, 2, 4 with weights 5, 1, 2; x is a value that no set reaches
        value     0  1  2  3  4  5  6
        stage 1   0  x  x  5
        stage 2   0  x  1  5  x  6
        stage 3   0  x  1  5  2  6  3     value 6 with a weight of at most 4: items 2 and 1
    """
    n = values.shape[0]
    width = min(most_value, window) + 1
    stages = np.empty((min(n, _KEPT_WEIGHTS // width) + 1, width), np.int32)
    totals = np.zeros(n + 1, np.int64)
    stages[0, 0] = 0
    stage, complete = 0, False
    while stage < n and not complete:
        before, value, weight = totals[stage], values[stage], np.int32(weights[stage])
        total = before + value
        if total - window > most_value or stage + 1 == stages.shape[0]:
            return np.empty(0, np.int64)
        # The next stage: as before, or with this item where that is lighter.
        old_base, base = max(0, before - window), max(0, total - window)
        old, new = stages[stage], stages[stage + 1]
        old_end, end = min(before, most_value) + 1, min(total, most_value) + 1
        kept = max(base, old_end) - base
        for i in range(kept):
            new[i] = old[i + base - old_base]
        for i in range(kept, end - base):
            new[i] = _NEVER
        first = max(base, old_base + value)
        target, source = new[first - base :], old[first - value - old_base :]
        for i in range(min(end, old_end + value) - first):
            target[i] = min(target[i], source[i] + weight)
        stage += 1
        totals[stage] = total
        complete = total >= most_value and new[most_value - base] <= most_weight
    if not complete and window < totals[n]:
        return np.empty(0, np.int64)
    # The highest value that is light enough, then back through the stages: an item was needed where
    # the stage before it does not reach the value as lightly.
    reached, spare = min(most_value, totals[stage]), most_weight
    base = max(0, totals[stage] - window)
    while stages[stage, reached - base] > spare:
        reached -= 1
    taken = np.empty(stage, np.int64)
    count = 0
    for k in range(stage - 1, -1, -1):
        base = max(0, totals[k] - window)
        if reached > totals[k] or stages[k, reached - base] > spare:
            taken[count] = k
            count += 1
            reached -= values[k]
            spare -= weights[k]
    return taken[:count][::-1].copy()


@kernel
def search(
    values: IntArray, sizes: IntArray, most_value: int, most_size: int, most: int
) -> IntArray:
    """Ascending indices of the set with the most value within all three limits.

    Depth first, taking an item before leaving it out, so of equal sets the first in order wins.
    After `_STEPS` the best set so far is returned. It is at least as good as the greedy one.
    """
    n = values.shape[0]
    most = min(most, n)
    left = np.zeros(n + 1, np.int64)  # the total and the largest value from each index on
    largest = np.zeros(n + 1, np.int64)
    for i in range(n - 1, -1, -1):
        left[i] = left[i + 1] + values[i]
        largest[i] = max(largest[i + 1], values[i])
    taken = np.empty(n, np.int64)
    best = np.empty(n, np.int64)
    count, best_count, best_value = 0, 0, -1
    value, size, i, steps = 0, 0, 0, 0
    while True:
        # Down: take all that fits, unless what is left cannot beat the best set.
        while i < n and count < most:
            could = value + min(left[i], largest[i] * (most - count))
            if could <= best_value:
                break
            if value + values[i] <= most_value and size + sizes[i] <= most_size:
                taken[count] = i
                count += 1
                value += values[i]
                size += sizes[i]
            i += 1
            steps += 1
        if value > best_value:
            best_value, best_count = value, count
            best[:count] = taken[:count]
        if count == 0 or best_value == most_value or steps > _STEPS:
            return best[:best_count].copy()
        # Up: leave out the item taken last, and go on behind it.
        count -= 1
        i = taken[count]
        value -= values[i]
        size -= sizes[i]
        i += 1
        steps += 1
