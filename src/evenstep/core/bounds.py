"""What no plan of a step can beat: packs, micro-batches and time from below, with proofs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import FloatArray, IntArray, divided_up, rounded_up, sum_by

if TYPE_CHECKING:
    from evenstep.core.layout import Packed
    from evenstep.core.recipe import Recipe


# -------------------------------------------------------------------------------------------------
# How many packs the most expensive items need, for several steps at once.
#
# A step is a row of an array. Rows have equal length: steps with fewer items end with zeros.
# -------------------------------------------------------------------------------------------------

_PARTS = (1, 2, 3, 4)
_TINY = 1 / 32  # an item of this share of a pack hardly keeps another out
_SLACK = 1e-9  # rounding errors of a sum of floats, with a margin


def packs_of_first(sizes: FloatArray, capacity: FloatArray) -> IntArray:
    """A lower bound on the packs that hold the first i + 1 items of a row, for each i.

    `capacity` is a column, one per row; no size exceeds it. The largest of these counts, and of
    those of fewer items, for a capacity of 1:

    volume   the sizes divided by the capacity, rounded up
    parts    for k = 1, 2, 3, 4 let w = ceil((k + 1) * size) - 1. In a pack, the sum of w is less
             than the sum of (k + 1) * size, which is at most k + 1. The sum is an integer, so it is
             at most k. The packs are at least the sum of w over all items, divided by k. For k = 1
             these are the items over half.
    conflict let t be the smallest size so far. Items over 1 - t share a pack with none of the
             items; the others need at least their volume, and one pack for each item over half.

    >>> packs_of_first(np.array([[6.0, 6, 5, 3]]), np.array([[10.0]])).tolist()
    [[1, 2, 3, 3]]
    """
    share = sizes / capacity
    volume = np.cumsum(share, axis=1)
    packs = np.ceil(volume - _SLACK)
    wide = _columns(share > 1 / (_PARTS[-1] + 1))  # smaller items weigh nothing
    large = np.zeros_like(share)
    for parts in _PARTS:
        weight = np.maximum(np.ceil((parts + 1) * share[:, :wide] - _SLACK) - 1, 0)
        held = np.cumsum(weight, axis=1)
        np.maximum(packs[:, :wide], np.ceil(held / parts - _SLACK), out=packs[:, :wide])
        if parts == 1 and wide:
            large[:, :wide], large[:, wide:] = held, held[:, -1:]
    least = np.minimum.accumulate(share, axis=1)  # descends; no item is smaller than its entry
    some = _columns(least > _TINY)
    conflict = _conflicts(least[:, :some], volume[:, :some], large[:, :some])
    np.maximum(packs[:, :some], conflict, out=packs[:, :some])
    return np.maximum.accumulate(packs, axis=1).astype(np.int64)


def _columns(rows: NDArray[np.bool_]) -> int:
    """How many columns there are up to the last one with an entry that is true."""
    found = np.flatnonzero(rows.any(axis=0))
    return int(found[-1]) + 1 if len(found) else 0


def _conflicts(least: FloatArray, volume: FloatArray, large: FloatArray) -> FloatArray:
    """The packs of items that share a pack with no item so far, and those that the rest need.

    Columns of the first i + 1 items: the least size, the sum of sizes, how many exceed half.
    """
    index = np.arange(1, least.shape[1] + 1)
    wide = np.minimum(rank_among(-least, least - 1 - _SLACK), index)
    before = np.take_along_axis(zero_first(volume), wide, axis=1)
    kept = np.take_along_axis(zero_first(large), wide, axis=1)
    return np.asarray(wide + np.maximum(large - kept, np.ceil(volume - before - _SLACK)))


def zero_first(rows: FloatArray) -> FloatArray:
    """The rows with a 0 before the first entry."""
    found = np.zeros((rows.shape[0], rows.shape[1] + 1))
    found[:, 1:] = rows
    return found


def rank_among(ordered: FloatArray, values: FloatArray) -> IntArray:
    """How many entries of the same row of `ordered` are less than each value. Rows ascend.

    >>> rank_among(np.array([[1.0, 2, 3], [4, 5, 6]]), np.array([[2.5], [4]])).tolist()
    [[2], [0]]
    """
    if len(ordered) == 1:
        return np.asarray(np.searchsorted(ordered[0], values[0])[None, :], np.int64)
    found = [row.searchsorted(some) for row, some in zip(ordered, values, strict=True)]
    return np.array(found, np.int64).reshape(values.shape)


def descends(rows: FloatArray) -> bool:
    """Whether every row descends."""
    return bool((rows[:, 1:] <= rows[:, :-1]).all())


# -------------------------------------------------------------------------------------------------
# Lower bounds on the load of the slowest rank, for several steps at once.
# -------------------------------------------------------------------------------------------------

_FEW = 5  # items per rank up to which counting packs of the bound's size can raise the bound
_HALVINGS = 14


def makespans(costs: FloatArray, ranks: int) -> FloatArray:
    """A lower bound on the load of the slowest rank, for each row of items.

    Rows have equal length; missing items cost 0. The largest of three bounds:

    mean     the total divided by the ranks
    crowd    of the ranks * j + 1 largest items, some rank has j + 1, at least the smallest of
             them; for j = 0 that is the largest item
    packs    no load is at most t if the items need more than `ranks` packs of capacity t

    >>> makespans(np.array([[3.0, 3, 2], [9, 1, 0]]), 2).tolist()
    [5.0, 9.0]
    """
    count = costs.shape[1]
    if count == 0 or ranks == 1:
        return np.asarray(costs.sum(axis=1), np.float64)
    if not descends(costs):
        costs = -np.sort(-costs, axis=1)
    total = zero_first(np.cumsum(costs, axis=1))
    shared = np.arange((count - 1) // ranks + 1)
    crowd = total[:, ranks * shared + 1] - total[:, ranks * shared - shared]
    bound: FloatArray = np.maximum(total[:, -1] / ranks, crowd.max(axis=1))
    if ranks < count <= _FEW * ranks:
        bound = _raised(costs, ranks, bound)
    return bound


def _raised(costs: FloatArray, ranks: int, bound: FloatArray) -> FloatArray:
    """The bound, raised to a load at which the items still need more packs than there are ranks."""

    def too_low(load: FloatArray) -> NDArray[np.bool_]:
        capacity = np.maximum(load, np.finfo(np.float64).tiny)[:, None]
        return np.asarray(packs_of_first(costs, capacity)[:, -1] > ranks)

    low, high = bound, 1.5 * bound
    if not too_low(low * (1 + 1e-6)).any():
        return bound
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = too_low(middle)
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return low


# -------------------------------------------------------------------------------------------------
# Lower bounds on the time of steps whose ranks synchronise at every micro-batch.
#
# A wave takes as long as its most expensive pack, and a step as long as the sum over its waves.
# Let
# P[1] >= P[2] >= ... be the costs of the packs. The first (j - 1) * ranks + 1 of them lie in at
# least
# j waves, so the j-th slowest wave takes at least G[j] = P[(j - 1) * ranks + 1], and the step at
# least the sum of G. With j(k) = ceil(k / ranks),
#
#     ranks * time >= sum of G[j(k)] over all k = total cost + sum of (G[j(k)] - P[k])
#
# The last sum is what ranks wait at least. It is large where a pack of short sequences is full
# before
# it costs as much as one long sequence. It is bounded from both sides:
#
# G[j] >= L[j]. If the items that cost at least c need n packs (`packs_of_first`), then P[n] >= c.
# L[j]
# is the greatest c with n > (j - 1) * ranks.
#
# P[k] = P'[k] + X[k]. Choose a price m >= 0 per slot. A small item, at most half the capacity,
# pays
# x = max(0, cost - m * size). The rest of its cost is at most size * min(m, d(size)), where d(s)
# is
# the greatest cost per slot of small items up to size s. X[k] is what the small items of pack k
# pay;
# P'[k] is the rest of its cost. Let i be the pack's largest item. If i is small, then
# P'[k] <= capacity * min(m, d(size[i])). Otherwise the other items fit into the room
# r = capacity - size[i], they are small, and P'[k] <= cost[i] + r * min(m, d(r)). Call this bound
# the
# reach of item i. An item is the largest of at most one pack, so the k-th greatest P' is at most
# U[k], the k-th greatest reach.
#
#     sum of (G[j(k)] - P[k]) >= sum of max(0, L[j(k)] - P'[k] - X[k])
#                             >= sum of max(0, L[j(k)] - P'[k]) - sum of all x
#                             >= sum of max(0, L[j(k)] - U[k]) - sum of all x
#
# The last line holds because a sum of a convex function of differences is least where both
# sequences
# descend. The bound holds for every price; the best of several is taken.
# -------------------------------------------------------------------------------------------------

BoolArray: TypeAlias = NDArray[np.bool_]

_PRICES = 12
_ENTRIES = 1 << 22  # of an array of steps x prices x items


def lock_steps(
    sizes: IntArray,
    costs: FloatArray,
    capacity: int,
    ranks: int,
    packs: IntArray | None = None,
) -> FloatArray:
    """A lower bound on the sum over waves of the most expensive pack, for each row of items.

    Rows have equal length; missing items have size and cost 0. An item over the capacity is alone
    in its pack. The number of waves is free. `packs` is `packs_of_first` of these items if costs
    descend.

    >>> lock_steps(np.array([[10, 1, 1, 1]]), np.array([[100.0, 1, 1, 1]]), 10, 2).tolist()
    [100.0]
    """
    total = costs.sum(axis=1)
    if ranks == 1 or not total.any():
        return np.asarray(total / ranks, np.float64)
    size = np.minimum(sizes, capacity).astype(np.float64)
    if not descends(costs):
        packs = None
        order = np.argsort(-costs, axis=1, kind="stable")
        size, costs = (np.take_along_axis(part, order, axis=1) for part in (size, costs))
    if packs is None:
        packs = packs_of_first(size, np.full((len(size), 1), float(capacity)))
    level = np.repeat(_wave_starts(packs, costs, ranks), ranks, axis=1)
    waiting = _waiting(size, costs, float(capacity), level)
    return np.asarray((total + waiting) / ranks, np.float64)


def _wave_starts(packs: IntArray, costs: FloatArray, ranks: int) -> FloatArray:
    """L of each wave; 0 where a step has no further wave.

    packs [[1, 2, 3]] of costs [[9, 8, 7]] on 2 ranks -> [[9, 7]]
    """
    first = np.arange(1.0, int(packs.max()) + 1, ranks)  # the first pack of each wave
    at = rank_among(packs.astype(np.float64), np.broadcast_to(first, (len(packs), len(first))))
    last = packs.shape[1] - 1
    return np.where(at > last, 0.0, np.take_along_axis(costs, np.minimum(at, last), axis=1))


def _waiting(size: FloatArray, costs: FloatArray, capacity: float, level: FloatArray) -> FloatArray:
    """What ranks wait at least, summed over ranks. `level[:, k]` is L of the wave of pack k."""
    small = 2 * size <= capacity
    rate = np.divide(costs, size, out=np.zeros_like(costs), where=small & (size > 0))  # per slot
    price, paid = _prices(size, costs, rate, small)
    packs = level.shape[1]
    # Where sizes descend, large items come first, one pack each, and items after all packs reach no
    # further than these.
    own = slice(packs + 1 if descends(size) else None)
    fits = np.where(small[:, own], size[:, own], capacity - size[:, own])
    densest = _densest(size, rate, fits)
    room = np.where(small[:, own], capacity, fits)
    fixed = np.where(small[:, own], 0.0, costs[:, own])
    best = np.zeros(len(size))
    some = max(1, _ENTRIES // max(room.size, 1))  # prices at a time
    for at in range(0, price.shape[1], some):
        own_price, own_paid = price[:, at : at + some], paid[:, at : at + some]
        # steps x prices x items
        reach = np.minimum(own_price[:, :, None], densest[:, None])
        reach *= room[:, None]
        reach += fixed[:, None]
        reach = np.maximum.accumulate(reach[:, :, ::-1], axis=2)[:, :, ::-1][:, :, :packs]
        short = np.maximum(level[:, None, : reach.shape[2]] - reach, 0).sum(axis=2)
        short += level[:, None, reach.shape[2] :].sum(axis=2)
        np.maximum(best, (short - own_paid).max(axis=1), out=best)
    return best


def _densest(size: FloatArray, rate: FloatArray, fits: FloatArray) -> FloatArray:
    """The greatest cost per slot of the small items whose size is at most `fits`."""
    if descends(size):
        size, rate = size[:, ::-1], rate[:, ::-1]
    else:
        order = np.argsort(size, axis=1)
        size, rate = (np.take_along_axis(part, order, axis=1) for part in (size, rate))
    table = np.maximum.accumulate(rate, axis=1)
    at = rank_among(size, fits + 0.5) - 1  # sizes are integers
    return np.where(at < 0, 0.0, np.take_along_axis(table, np.maximum(at, 0), axis=1))


def _prices(
    size: FloatArray, costs: FloatArray, rate: FloatArray, small: BoolArray
) -> tuple[FloatArray, FloatArray]:
    """(prices per slot to try, what all small items pay at each of them).

    The prices are 0 and the costs per slot of some small items, more of the densest than of others.
    """
    key = np.where(small, rate, np.inf)
    if not descends(key):
        order = np.argsort(-key, axis=1)
        key, size, costs = (np.take_along_axis(part, order, axis=1) for part in (key, size, costs))
    last = size.shape[1] - 1
    large = (~small).sum(axis=1, keepdims=True)  # these come first
    steps = np.unique(np.geomspace(1, last + 1, _PRICES).astype(np.int64)) - 1
    at = np.minimum(large + steps, last)
    price = np.take_along_axis(key, at, axis=1)
    price[np.isinf(price)] = 0.0  # no item is small
    price = np.column_stack((np.zeros(len(price)), price))
    at = np.column_stack((np.full(len(at), last), at))
    total = zero_first(np.cumsum(costs, axis=1)), zero_first(np.cumsum(size, axis=1))
    cost, slots = (
        np.take_along_axis(part, at + 1, axis=1) - np.take_along_axis(part, large, axis=1)
        for part in total
    )
    return price, np.where(large > last, 0.0, cost - price * slots)


# -------------------------------------------------------------------------------------------------
# Lower bounds on the number of packs and on the load of the slowest rank.
# -------------------------------------------------------------------------------------------------

_RESOLUTION = 2**30  # integer resolution of a limit that is not an integer
_SUM_SLACK = 2e-9  # rounding errors of a sum of floats, with a margin


def pack_bound(sizes: NDArray[np.integer], capacity: int) -> int:
    """A lower bound on the packs of `capacity` that hold items of these sizes.

    An item that can share a pack with at most one other is paired with the largest that fits, which
    is optimal, and set aside. For the rest, the L2 bound of Martello and Toth is used.

    >>> pack_bound(np.array([6, 6, 6]), 10), pack_bound(np.array([5, 5, 4]), 10)
    (3, 2)
    """
    ordered = np.sort(sizes).astype(np.int64)
    fixed, best = 0, _l2(ordered, capacity)
    while len(ordered):
        packs, rest = _set_aside(ordered, capacity)
        if packs == 0:
            break
        fixed, ordered = fixed + packs, rest
        best = max(best, fixed + _l2(ordered, capacity))
    return best


def pack_bounds(sizes: IntArray, capacity: int, packs: IntArray) -> IntArray:
    """`pack_bound` of each row, and 1 for each size over the capacity. A size of 0 is no item.

    `packs` is `packs_of_first` of the sizes, up to the capacity.
    """
    bound = packs.max(axis=1, initial=0)
    held = np.minimum(sizes, capacity)
    # Setting pairs aside can help where an item has room for exactly one of the smallest.
    least = np.where(held > 0, held, capacity).min(axis=1, initial=capacity)[:, None]
    pairs = (2 * held > capacity) & (held > capacity - 2 * least) & (held <= capacity - least)
    for row in np.flatnonzero(pairs.any(axis=1)).tolist():
        bound[row] = max(int(bound[row]), pack_bound(held[row][held[row] > 0], capacity))
    return np.asarray(bound, np.int64)


def _set_aside(ordered: IntArray, capacity: int) -> tuple[int, IntArray]:
    """(packs of large items with their best single partner, the other sizes).

    capacity 10, sizes [3, 4, 6, 9] -> 9 alone, 6 with 4: 2 packs, and [3] remains
    """
    smallest = int(ordered[0])
    # Over half, and with no room for two of the smallest.
    large = int(np.searchsorted(ordered, max(capacity // 2, capacity - 2 * smallest), "right"))
    waiting: list[int] = []
    small = ordered[:large].tolist()
    at = 0
    for size in ordered[large:][::-1].tolist():
        while at < large and small[at] <= capacity - size:
            waiting.append(small[at])
            at += 1
        if waiting:
            waiting.pop()
    return len(ordered) - large, np.array(waiting + small[at:], np.int64)


def _l2(ordered: IntArray, capacity: int) -> int:
    """The L2 bound, over all thresholds t.

    Items over capacity - t share no pack with items of t or more, and two items over half share no
    pack. Items between t and half that do not fit with these need further packs.
    """
    if len(ordered) == 0:
        return 0
    total = np.zeros(len(ordered) + 1, np.int64)
    np.cumsum(ordered, out=total[1:])
    half = int(np.searchsorted(ordered, capacity // 2, "right"))
    # Thresholds: 0, and each size that occurs up to half the capacity.
    first = np.concatenate(([0], np.flatnonzero(np.diff(ordered[:half])) + 1))
    threshold = ordered[first]
    threshold[0] = 0
    wide = np.searchsorted(ordered, capacity - threshold, "right")  # where items over C - t begin
    large = wide - half  # over half, up to capacity - t
    room = large * capacity - (total[wide] - total[half])
    middle = total[half] - total[np.minimum(first, half)]
    extra = np.maximum(0, divided_up(middle - room, capacity))
    bound = (len(ordered) - wide) + large + extra
    return int(max(bound.max(), divided_up(int(total[-1]), capacity)))


def bins_bound(taken: FloatArray, caps: FloatArray) -> int:
    """A lower bound on bins under several limits: item i takes `taken[i, d]` of `caps[d]`.

    Items that can share a bin with no other are counted. For the rest, the largest bound of any
    limit holds.

    >>> two = np.array([[5.0, 50.0]] * 16)  # tokens, patches
    >>> bins_bound(two, np.array([100.0, 1000.0])), bins_bound(two, np.array([100.0, 100.0]))
    (1, 8)
    >>> bins_bound(np.array([[10.0, 0.0], [1.0, 3.0], [1.0, 3.0]]), np.array([10.0, 4.0]))
    3
    """
    single = shares_with_none(taken, caps)
    rest = taken[~single]
    least = (_column_bound(rest[:, d], float(cap)) for d, cap in enumerate(caps))
    return int(single.sum()) + max(least, default=0)


def shares_with_none(taken: FloatArray, caps: FloatArray) -> NDArray[np.bool_]:
    """Which items can share a bin with no other item, by one limit or by two together.

    For limits a and b: of the items that fit beside it by a, the one that takes least of b is
    still too much.
    """
    single = (taken > caps).any(axis=1)
    for a, b in combinations(range(len(caps)), 2):
        order = np.argsort(taken[:, a], kind="stable")
        least = np.concatenate(([np.inf], np.minimum.accumulate(taken[order, b])))
        room = caps * (1 + _SUM_SLACK) - taken
        beside = np.searchsorted(taken[order, a], room[:, a], "right")
        single |= least[beside] > room[:, b]
    return np.asarray(single, np.bool_)


def _column_bound(column: FloatArray, cap: float) -> int:
    """A lower bound on bins that hold `cap` of this column each; no entry exceeds the cap.

    Numbers that are not integers are rounded down to shares of the cap, so that what fits still
    fits.
    """
    column = column[column > 0]
    if len(column) == 0:
        return 0
    whole = cap == np.floor(cap) and (column == np.floor(column)).all()
    if whole and max(cap, column.sum()) < 2**53:
        return pack_bound(column.astype(np.int64), int(cap))
    share = column / (cap * (1 + _SUM_SLACK))
    parts = np.floor(share * _RESOLUTION).astype(np.int64)
    return max(
        pack_bound(parts[parts > 0], _RESOLUTION), int(np.ceil(share.sum() * (1 - _SUM_SLACK)))
    )


def row_bound(most: NDArray[np.integer]) -> int:
    """A lower bound on the padded micro-batches that hold these rows.

    `most[i]` rows fit where row i is the widest. Narrower rows allow at least as many. From the
    widest down, each micro-batch takes rows while they fit, which is optimal.

    >>> row_bound(16 // np.array([8, 8, 3, 3]))
    2
    """
    ordered = np.sort(most)
    bound, at = 0, 0
    while at < len(ordered):
        at += max(int(ordered[at]), 1)
        bound += 1
    return bound


def makespan_bound(costs: NDArray[np.floating], ranks: int) -> float:
    """A lower bound on the load of the slowest rank: `makespans` for one step.

    >>> makespan_bound(np.array([3.0, 3.0, 2.0]), 2), makespan_bound(np.array([9.0, 1.0]), 2)
    (5.0, 9.0)
    """
    return float(makespans(np.asarray(costs, np.float64)[None, :], ranks)[0])


def lock_step_bound(
    sizes: NDArray[np.integer], costs: NDArray[np.floating], capacity: int, ranks: int
) -> float:
    """A lower bound on the sum over waves of the heaviest pack: `lock_steps` for one step.

    >>> lock_step_bound(np.array([10, 1, 1, 1]), np.array([100.0, 1, 1, 1]), 10, 2)
    100.0
    """
    row = np.asarray(sizes, np.int64)[None, :], np.asarray(costs, np.float64)[None, :]
    return float(lock_steps(*row, capacity, ranks)[0])


# -------------------------------------------------------------------------------------------------
# Loads: the units of steps as rows of arrays, as far as bounds on time need them.
# -------------------------------------------------------------------------------------------------

Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Steps x units. Rows have equal length; missing units have size 0 and cost nothing.

    size      the aligned slots of each unit: a segment, or a group that shares a micro-batch
    count     its segments
    attended  its cost that does not depend on padding: pairs and segments
    second    its second work, or None
    """

    size: IntArray
    count: IntArray
    attended: FloatArray
    second: FloatArray | None = None
    _known: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_step(
        cls,
        recipe: Recipe,
        aligned: IntArray,
        unit_of: IntArray | None = None,
        second: FloatArray | None = None,
    ) -> Loads:
        """One step. `unit_of` is the unit of each segment, by default a unit each.

        `second` is the second work of each unit. The rows of a padded layout are segments, also
        where groups share a micro-batch. Units without second work come largest first, as bounds
        would otherwise sort them one by one.
        """
        if unit_of is None or recipe.layout.segments_per_row is not None:
            unit_of = np.arange(len(aligned))
        count = int(unit_of.max(initial=-1)) + 1
        if second is None and count == len(aligned):
            return cls.of_segments(recipe, -np.sort(-aligned)[None])
        size, attended = (
            sum_by(unit_of, column, count)[None]
            for column in (aligned, attended_costs(recipe, aligned))
        )
        held = np.bincount(unit_of, minlength=count)[None]
        return cls(size.astype(np.int64), held, attended, None if second is None else second[None])

    @classmethod
    def of_segments(cls, recipe: Recipe, aligned: IntArray) -> Loads:
        """Steps x segments, each segment a unit; missing segments have length 0."""
        held = aligned > 0
        return cls(aligned, held.astype(np.int64), attended_costs(recipe, aligned) * held)

    def once(self, name: str, measure: Callable[[], Measured]) -> Measured:
        """The result of `measure`, which is called once for these units."""
        if name not in self._known:
            self._known[name] = measure()
        return cast(Measured, self._known[name])

    def packs_of_first(self, capacity: int) -> IntArray:
        """`packs_of_first` of these units; a larger one fills a pack."""
        size = np.minimum(self.size, capacity).astype(np.float64)
        column = np.full((len(size), 1), float(capacity))
        return self.once(f"packs of {capacity}", lambda: packs_of_first(size, column))

    def work(self, recipe: Recipe) -> FloatArray:
        """What each unit costs without padding."""
        return recipe.cost.per_token * self.size + self.attended


def attended_costs(recipe: Recipe, aligned: NDArray[np.integer]) -> FloatArray:
    """The cost of segments that does not depend on padding."""
    length = aligned.astype(np.float64)  # a square may not fit 64 bits
    return recipe.cost.per_pair * length * length + recipe.cost.per_segment


# -------------------------------------------------------------------------------------------------
# Lower bounds on the time of packed steps, by what each of them names.
#
# mean     the work of all units, divided by the ranks
# share    units that must share a rank
# shape    slots that every micro-batch has, filled or not
# sample   the most expensive unit, which one rank runs in addition to its other micro-batches
# waves    long units that cannot share a micro-batch, so that ranks wait for them in every wave
# widths   micro-batches that are as wide as others
#
# Where several are equal, the first is named.
# -------------------------------------------------------------------------------------------------

_WIDTHS = 64  # numbers of micro-batches per rank whose common width is bounded one by one


def packed_times(
    layout: Packed, recipe: Recipe, loads: Loads, per_rank: IntArray
) -> dict[str, FloatArray]:
    """The bounds of each step. Each rank runs at least `per_rank` micro-batches."""
    cost, ranks = recipe.cost, recipe.topology.dp
    calls = per_rank * cost.per_micro_batch
    least = _least_slots(layout, recipe, loads)
    empty = cost.per_token * least
    widths = np.maximum(layout.widths(loads.size, recipe.width_unit), least[:, None])
    alone = np.where(loads.size > 0, cost.per_token * widths + loads.attended, empty[:, None])
    slots = _fewest_slots(layout, recipe, loads, per_rank, least)
    found = {
        "mean": loads.work(recipe).sum(axis=1) / ranks,
        "share": loads.once("share", lambda: makespans(loads.work(recipe), ranks)),
        "shape": (cost.per_token * slots + loads.attended.sum(axis=1)) / ranks,
        "sample": alone.max(axis=1, initial=0) + (per_rank - 1) * empty,
    }
    waves = _waves_of(layout, recipe, loads)
    if waves is not None:
        found["waves"] = loads.once("waves", lambda: waves(loads.work(recipe)))
    if layout.pad_to is not None:
        fixed = per_rank * empty + _attention(layout, recipe, loads)
        found["shape"] = np.maximum(found["shape"], fixed)
    found = {name: time + calls for name, time in found.items()}
    if layout.pad_to is None and recipe.topology.equal_widths:
        tokens = _one_width(layout, recipe, loads, per_rank)
        found["widths"] = tokens + _attention(layout, recipe, loads)
    if recipe.equal_tokens:
        tokens = cost.per_token * _widest(layout, recipe, loads)
        found["widths"] = tokens + _attention(layout, recipe, loads) + calls
    return found


def second_times(layout: Packed, recipe: Recipe, loads: Loads) -> FloatArray:
    """A lower bound on the time of each step's second work; 0 without one."""
    second, waves = loads.second, _waves_of(layout, recipe, loads)
    if second is None:
        return np.zeros(len(loads.size))
    return loads.once("second", lambda: _slowest(second, recipe.topology.dp, waves))


Waves = Callable[[FloatArray], FloatArray]


def _slowest(work: FloatArray, ranks: int, waves: Waves | None) -> FloatArray:
    """The least time of this work by itself."""
    least = makespans(work, ranks)
    return least if waves is None else np.maximum(least, waves(work))


def _attention(layout: Packed, recipe: Recipe, loads: Loads) -> FloatArray:
    """The least time of what does not depend on padding."""
    waves, ranks = _waves_of(layout, recipe, loads), recipe.topology.dp
    return loads.once("attention", lambda: _slowest(loads.attended, ranks, waves))


def _widest(layout: Packed, recipe: Recipe, loads: Loads) -> FloatArray:
    """The least sum over waves of the widest micro-batch."""
    waves, ranks = _waves_of(layout, recipe, loads, always=True), recipe.topology.dp
    return loads.once("widest", lambda: _slowest(loads.size.astype(np.float64), ranks, waves))


def _waves_of(
    layout: Packed, recipe: Recipe, loads: Loads, *, always: bool = False
) -> Waves | None:
    """The lock-step bound of some work of these units; None if ranks do not wait in every wave.

    A micro-batch of several rows counts as one pack of all their slots.
    """
    if recipe.sync_every != "micro_batch" and not always:
        return None
    ranks, capacity = recipe.topology.dp, layout.capacity(recipe)
    limits: list[tuple[IntArray, int, IntArray | None]] = []
    if capacity is not None:
        capacity *= layout.rows
        limits.append((loads.size, capacity, loads.packs_of_first(capacity)))
    if layout.samples is not None:
        limits.append((loads.count, layout.samples, None))

    def bound(work: FloatArray) -> FloatArray:
        found = [lock_steps(size, work, most, ranks, packs) for size, most, packs in limits]
        return np.asarray(np.max(found, axis=0), np.float64)

    return bound if limits else None


def _least_slots(layout: Packed, recipe: Recipe, loads: Loads) -> IntArray:
    """The least slots of a micro-batch: those of an empty one, or of the step's one shape."""
    steps = len(loads.size)
    if layout.pad_to is not None:
        return np.full(steps, layout.least_slots)
    if not recipe.topology.equal_widths:
        return np.full(steps, recipe.width_unit)
    largest = np.asarray(loads.size.max(axis=1, initial=0), np.int64)
    return np.asarray(layout.widths(largest, recipe.width_unit), np.int64)


def _fewest_slots(
    layout: Packed, recipe: Recipe, loads: Loads, per_rank: IntArray, least: IntArray
) -> IntArray:
    """The fewest slots of at least `per_rank` micro-batches per rank that hold these units."""
    micro_batches = recipe.topology.dp * per_rank
    if layout.pad_to is not None:
        return micro_batches * least
    unit, capacity, size = recipe.width_unit, layout.capacity(recipe), loads.size
    long = np.zeros(size.shape, bool) if capacity is None else size > capacity
    alone = np.where(long, layout.widths(size, unit), 0).sum(axis=1)
    tokens = rounded_up(np.where(long, 0, size).sum(axis=1), unit)
    spare = np.maximum(0, micro_batches - (size > 0).sum(axis=1))  # these are empty
    shared = np.maximum(tokens + spare * least, (micro_batches - long.sum(axis=1)) * least)
    return np.asarray(alone + shared, np.int64)


def _one_width(layout: Packed, recipe: Recipe, loads: Loads, per_rank: IntArray) -> FloatArray:
    """What the slots and the number of micro-batches cost where all have one width.

    For k micro-batches per rank, the width is at least the largest unit, the mean of all
    k * ranks micro-batches, and what units use that must share one. The least over k is taken.
    """
    cost, ranks, unit = recipe.cost, recipe.topology.dp, recipe.width_unit
    multiple, found = recipe.topology.multiple, np.zeros(len(per_rank))
    for step, (size, fewest) in enumerate(zip(loads.size, per_rank.tolist(), strict=True)):
        total, largest = int(size.sum()), layout.widths(int(size.max(initial=0)), unit)
        # From `last` on, the width is that of the largest unit, and more cost more.
        last = max(fewest, rounded_up(divided_up(total, ranks * largest), multiple))
        counts = np.arange(fewest, last + 1, multiple)
        widths = np.maximum(largest, rounded_up(-(-total // (counts * ranks)), unit))
        if len(counts) <= _WIDTHS:
            row = size.astype(np.float64)[None]
            used = [int(np.ceil(makespans(row, int(k) * ranks)[0] - 1e-6)) for k in counts]
            widths = np.maximum(widths, rounded_up(np.array(used), unit))
        found[step] = (counts * (cost.per_token * widths + cost.per_micro_batch)).min()
    return found


# -------------------------------------------------------------------------------------------------
# Floor: a lower bound for all plans of a step, from the lengths and the recipe alone.
#
# The floor does not depend on how a plan packs, cuts or deals its segments, so a plan that reaches
# it
# is optimal for its layout, budget, limits, topology and steps. It includes what the recipe
# forces:
# alignment and rounding of each segment, a fixed width, fixed rows, one shape for a pipeline,
# equally
# many micro-batches on every rank. It excludes padding that another cut might avoid.
# -------------------------------------------------------------------------------------------------

_EQUAL = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bounds of one step: non-empty micro-batches, micro-batches per rank, modelled time.

    `binds` names the bound on time that is the largest: see `packed_times`; `second` if the
    second work exceeds its own mean by more than the first does.
    """

    packs: int
    per_rank: int
    time: float
    binds: str


class StepFloor:
    """The floor of one step's time, without a plan.

    `aligned` are the lengths of the segments, aligned; `unit_of` is the unit of each, by default a
    unit each; `second` is the second work of each unit in the unit of the cost.

    >>> from evenstep import Packed, Recipe, Topology
    >>> recipe = Recipe(layout=Packed(max_tokens=10), topology=Topology(dp=2))
    >>> StepFloor(recipe, np.array([9, 6, 6])).time(per_rank=2)
    15.0
    """

    def __init__(
        self,
        recipe: Recipe,
        aligned: IntArray,
        unit_of: IntArray | None = None,
        second: FloatArray | None = None,
    ) -> None:
        self._recipe = recipe
        self._loads = Loads.of_step(recipe, aligned, unit_of, second)

    def time(self, per_rank: int = 1) -> float:
        """The least time if each rank runs at least `per_rank` micro-batches."""
        return float(floor_times(self._recipe, self._loads, np.array([per_rank]))[0][0])


def floor_times(recipe: Recipe, loads: Loads, per_rank: IntArray) -> tuple[FloatArray, list[str]]:
    """(the floor of each step's time, what binds)."""
    found = recipe.layout.least_times(recipe, loads, per_rank)
    names, bounds = list(found), np.stack(list(found.values()))
    time = bounds.max(axis=0)
    first = (bounds >= time * _EQUAL).argmax(axis=0)
    binds = [names[at] for at in first.tolist()]
    if loads.second is not None:
        second = recipe.layout.least_second_times(recipe, loads)
        beyond = second - loads.second.sum(axis=1) / recipe.topology.dp
        more = beyond > time - bounds[0]
        binds = ["second" if above else name for above, name in zip(more, binds, strict=True)]
        time = time + second
    return time, binds
