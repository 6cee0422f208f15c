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
_KEPT_WORDS = 2**24  # words over all stages of `fill_window`: 128 MiB, of which few are used
_STEPS = 100_000  # items that `search` tries: a tenth of a millisecond or more
_SCARCER = 1.4  # slots or counts this many times scarcer than the other: filled by them alone
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
    """Fill as much as possible around the oldest sample, then add, in order, what still fits.

    A micro-batch is filled by slots, or by the counted column if the pool would fill more
    micro-batches with that; by both, as shares of what it may hold, if they are about equally
    scarce. Exact if one of them alone binds, else a bounded search that holds no less than greedy.
    Of equally full choices, the older samples are taken.

    >>> subset_sum(np.array([7, 2, 3]), np.array([0, 5, 4]), 10, 1, 30, 9).tolist()
    [0, 2]
    >>> subset_sum(np.array([7, 2, 3]), np.array([0, 5, 4]), 10, 1, 6, 9).tolist()
    [0, 1]
    """
    rest, counts, space, left = sizes[1:], counted[1:], capacity - sizes[0], limit - counted[0]
    if space <= 0 or left < 0 or most <= 1:
        return np.zeros(1, np.int64)
    slots_wanted, counts_wanted = int(sizes.sum()) / capacity, int(counted.sum()) / limit
    if max(slots_wanted, counts_wanted) < min(slots_wanted, counts_wanted) * _SCARCER:
        values = ((rest / capacity + counts / limit) * 2**30).astype(np.int64)
        filled = search(values, rest, counts, space, left, most - 1, _ANY)
    else:
        values, goal = (rest, space) if slots_wanted > counts_wanted else (counts, left)
        filled = best_set(values, goal)
        if len(filled) >= most or rest[filled].sum() > space or counts[filled].sum() > left:
            filled = search(values, rest, counts, space, left, most - 1, goal)
    if limit == _ANY:
        return np.concatenate((_OLDEST, filled + 1))
    # Samples without a count have no value there, and would stay in the pool until the end.
    order = np.concatenate((_OLDEST, filled + 1, 1 + np.delete(np.arange(len(rest)), filled)))
    chosen: IntArray = order[greedy(sizes[order], counted[order], capacity, unit, limit, most)]
    return chosen


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


# Micro-batches of short rows hold many samples, those of long rows few. If the oldest sample were
# always the seed of a padded micro-batch, long samples would gather in the pool until most of the
# oldest were long, and would run at the end of an epoch. So the seed is drawn by tokens: a sample
# of 700 tokens is ten times as likely as one of 70. In every other draw it is the oldest, so that
# no sample waits for long.

_OLDEST_EVERY = 2  # draws
_PRIME, _FACTOR = 2147483647, 48271  # products fit 64 bits


@kernel
def seed_sample_first(lengths: IntArray, ending: bool) -> IntArray:
    """The indices of a pool, the seed sample first, then the others in order.

    It is drawn from the older half by a hash of the lengths. If the epoch is `ending`, so
    that nothing more will be read, it is the longest: fewer micro-batches hold the rest.

    >>> seed_sample_first(np.array([3, 7]), ending=True).tolist()
    [1, 0]
    """
    n = lengths.shape[0]
    # A hash of all lengths, and the tokens of the older half.
    value, tokens = np.int64(1), np.int64(0)
    for i in range(n):
        value = (value * _FACTOR + lengths[i]) % _PRIME
        tokens += lengths[i] if i < (n + 1) // 2 else 0
    at = 0
    if ending:
        at = int(np.argmax(lengths))
    elif value % _OLDEST_EVERY:
        # A token of the older half: lengths [3, 7], token 4 -> sample 1
        drawn = (value * _FACTOR % _PRIME) * tokens // _PRIME
        before = lengths[0]
        while before <= drawn:
            at += 1
            before += lengths[at]
    # Move it to the front: 2 of 4 -> [2, 0, 1, 3]
    order = np.arange(n)
    for i in range(at, 0, -1):
        order[i] = i - 1
    order[0] = at
    return order


@kernel
def best_set(sizes: IntArray, space: int) -> IntArray:
    """Ascending indices of the set with the largest sum that fits; empty if nothing does.

    Of equal sets, the one whose last item comes first, then the one whose last but one does, and
    so on.

    A set that leaves out little has a sum close to the running total. So a narrow window below
    that total is tried first, where an item takes less time.
    """
    # Leave out what is too large.
    indices = np.empty(sizes.shape[0], np.int64)
    n, total, largest, divisor = 0, 0, 0, 0
    for i in range(sizes.shape[0]):
        if sizes[i] <= space:
            indices[n] = i
            n += 1
            total += sizes[i]
            largest = max(largest, sizes[i])
            if divisor != 1:
                a, b = divisor, sizes[i]
                while b > 0:
                    a, b = b, a % b
                divisor = a
    indices = indices[:n].copy()
    if total <= space:
        return indices
    # Divide by what divides all sizes, then ever wider windows, then all sums.
    units, total, space = sizes[indices] // divisor, total // divisor, space // divisor
    taken = np.empty(0, np.int64)
    window, widest = 2 * largest // divisor, False
    while taken.shape[0] == 0 and not widest:
        widest = 2 * window >= min(total, space)
        if widest:
            window = total
        taken = fill_window(units, space, window)
        window *= 4
    return indices[taken]


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
def search(
    values: IntArray,
    sizes: IntArray,
    counts: IntArray,
    most_size: int,
    most_counts: int,
    most: int,
    enough: int,
) -> IntArray:
    """Ascending indices of the set with the most value within the three limits.

    Depth first, taking an item before leaving it out, so of equal sets the first in order wins.
    After `_STEPS`, or with a value of `enough`, the best set so far is returned. It is at least as
    good as the greedy one.
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
    number, best_number, best_value = 0, 0, -1
    value, size, count, i, steps = 0, 0, 0, 0, 0
    while True:
        # Down: take all that fits, unless what is left cannot beat the best set.
        while i < n and number < most:
            could = value + min(left[i], largest[i] * (most - number))
            if could <= best_value:
                break
            if size + sizes[i] <= most_size and count + counts[i] <= most_counts:
                taken[number] = i
                number += 1
                value += values[i]
                size += sizes[i]
                count += counts[i]
            i += 1
            steps += 1
        if value > best_value:
            best_value, best_number = value, number
            best[:number] = taken[:number]
        if number == 0 or best_value == enough or steps > _STEPS:
            return best[:best_number].copy()
        # Up: leave out the item taken last, and go on behind it.
        number -= 1
        i = taken[number]
        value -= values[i]
        size -= sizes[i]
        count -= counts[i]
        i += 1
        steps += 1
