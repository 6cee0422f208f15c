"""Select the samples of a pool that form the next micro-batch.

A pool holds samples in order of arrival; index 0 is the oldest. Every strategy takes the oldest, so
a sample waits for at most as many micro-batches as there were samples before it. The oldest sample
alone is always allowed, however long it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.errors import ConfigError
from evenstep.planning.kernel import kernel
from evenstep.planning.packing.knapsack import fill_under_weight, search
from evenstep.planning.packing.subset_sum import fill_space

_ANY = 2**62  # more than any limit
_UNCOUNTED = np.empty(0, np.int64)
_OLDEST = np.zeros(1, np.int64)

# sizes, counted (empty if nothing is), capacity, unit, most counted, most samples -> indices
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
    count, used = 1, sizes[0]
    counts = counted.shape[0] > 0
    spent = counted[0] if counts else 0
    i = 1
    while i < n and count < most and used < capacity:
        more = counted[i] if counts else 0
        if used + sizes[i] <= capacity and spent + more <= limit:
            chosen[count] = i
            count += 1
            used += sizes[i]
            spent += more
        i += 1
    return chosen[:count]


def subset_sum(
    sizes: IntArray, counted: IntArray, capacity: int, unit: int, limit: int, most: int
) -> IntArray:
    """Fill as much as possible around the oldest sample, by the counted column or else by size.

    Exact if only size is limited and, up to some size, if a counted column is limited too. A
    bounded search that is no worse than greedy handles larger cases and those where `most` binds.
    Of equally full choices, the older samples are taken.

    >>> subset_sum(np.array([7, 2, 3]), np.empty(0, np.int64), 10, 1, 9, 9).tolist()
    [0, 2]
    """
    rest, space = sizes[1:], capacity - int(sizes[0])
    values, goal = (counted[1:], limit - int(counted[0])) if len(counted) else (rest, space)
    if space <= 0 or goal < 0 or most <= 1:
        return np.zeros(1, np.int64)
    filled = fill_space(values, goal)
    fits = values is rest or int(rest[filled].sum()) <= space
    if not fits:
        filled = fill_under_weight(values, rest, goal, space)
        fits = len(filled) > 0
    if not fits or len(filled) >= most:
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
    length if `near`, else the first."""
    n = sizes.shape[0]
    chosen = np.zeros(n, np.int64)
    counts = counted.shape[0] > 0
    spent = counted[0] if counts else 0
    waiting = np.arange(1, n)
    left = n - 1
    longest = sizes[0]
    count = 1
    while count < most and left > 0:
        best, fewest, distance = -1, capacity + 1, 0
        for at in range(left):
            i = waiting[at]
            width = row_width(max(longest, sizes[i]), unit)
            slots = width * (count + 1)
            away = abs(sizes[i] - longest) if near else 0
            if slots < fewest or (slots == fewest and away < distance and best >= 0):
                if counts and spent + counted[i] > limit:
                    continue
                best, fewest, distance = at, slots, away
        if best < 0:
            break
        i = waiting[best]
        waiting[best : left - 1] = waiting[best + 1 : left].copy()
        left -= 1
        chosen[count] = i
        count += 1
        longest = max(longest, sizes[i])
        if counts:
            spent += counted[i]
    return chosen[:count]


@kernel
def prefer_closest(
    sizes: IntArray, counted: IntArray, capacity: int, unit: int, limit: int, most: int
) -> IntArray:
    """Add the sample that gives the fewest slots; of equals, the closest to the longest."""
    return closest(sizes, counted, capacity, unit, limit, most, True)


@kernel
def prefer_first(
    sizes: IntArray, counted: IntArray, capacity: int, unit: int, limit: int, most: int
) -> IntArray:
    """Add the sample that gives the fewest slots; of equals, the first in the pool."""
    return closest(sizes, counted, capacity, unit, limit, most, False)


@kernel
def fullest(
    sizes: IntArray, counted: IntArray, capacity: int, unit: int, limit: int, most: int
) -> IntArray:
    """The rows that hold the most tokens, over all widths; of equals, those with fewer slots.

    At any width, the longest rows up to it are the fullest. Where a counted column excludes one of
    them, the next shorter row that fits is taken, which need not be the best.
    """
    n = sizes.shape[0]
    counts = counted.shape[0] > 0
    best = np.zeros(1, np.int64)
    best_tokens, best_slots, youngest = sizes[0], row_width(sizes[0], unit), 0
    order = (
        np.argsort(-sizes[1:], kind="mergesort") + 1
    )  # longest first; of equals, the oldest first
    rows = np.zeros(n, np.int64)
    for start in range(n - 1):
        longest = max(sizes[0], sizes[order[start]])
        width = row_width(longest, unit)
        if start > 0 and width == row_width(max(sizes[0], sizes[order[start - 1]]), unit):
            continue
        fit = min(most, capacity // max(width, 1))
        count, tokens = 1, sizes[0]
        spent = counted[0] if counts else 0
        for at in range(start, n - 1):
            if count >= fit:
                break
            i = order[at]
            if counts:
                if spent + counted[i] > limit:
                    continue
                spent += counted[i]
            rows[count] = i
            count += 1
            tokens += sizes[i]
        if count < 2 or tokens < best_tokens:
            continue
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
    "prefer_closest": prefer_closest,
    "prefer_first": prefer_first,
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
        column, limit = _UNCOUNTED, _ANY
    else:
        assert counted is not None, "a limited column must be given"
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
