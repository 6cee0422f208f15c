"""What no plan of a step can beat, from the lengths and the recipe alone, with proofs.

A bound does not depend on how a plan packs, cuts or deals its segments, so a plan that reaches it
is optimal for its layout, budget, limits, topology and steps. Bounds include what the recipe forces
(alignment and rounding of each segment, a fixed width, fixed rows, one shape for a pipeline, as
many micro-batches on every rank) and no padding that another plan might avoid.

packs       `pack_bound` of one capacity, `bins_bound` of several limits, `row_bound` of padded rows
one work    `makespans` where ranks wait once per step, `lock_steps` where they wait in every wave,
            `cut_times` for the padding of sorted rows
one step    `StepFloor` takes the largest of the bounds on time, each under the name of its cause:

mean        the work of all units, divided by the ranks
share       units that must share a rank
shape       slots that every micro-batch has, filled or not
sample      the most expensive unit, which one rank runs in addition to its other micro-batches
waves       long units that cannot share a micro-batch, so that ranks wait for them in every wave
widths      micro-batches that are as wide as others
cuts        rows of different lengths that share a padded micro-batch
second      the second work, which is bounded by itself and added

Most functions measure several steps at once: a step is a row of an array, and rows have equal
length, so steps with fewer items end with zeros.
"""

from __future__ import annotations

from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import FloatArray, IntArray, divided_up, rounded_up, sum_by

if TYPE_CHECKING:
    from evenstep.core.layout import Packed, Padded
    from evenstep.core.recipe import Recipe

BoolArray: TypeAlias = NDArray[np.bool_]

# Rounding errors of a sum of floats, with a margin.
_SLACK = 1e-9

# Packs ---------------------------------------------------------------------------------------

_PARTS = (1, 2, 3, 4)
_TINY = 1 / 32  # an item of this share of a pack hardly keeps another out
_RESOLUTION = 2**30  # integer resolution of a limit that is not an integer


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
    # Parts. Items up to a fifth of a pack weigh nothing for any k, so later columns are left out.
    wide = _columns(share > 1 / (_PARTS[-1] + 1))
    large = np.zeros_like(share)  # how many of the first items exceed half a pack
    for parts in _PARTS:
        weight = np.maximum(np.ceil((parts + 1) * share[:, :wide] - _SLACK) - 1, 0)
        weights = np.cumsum(weight, axis=1)
        np.maximum(packs[:, :wide], np.ceil(weights / parts - _SLACK), out=packs[:, :wide])
        if parts == 1 and wide:
            large[:, :wide], large[:, wide:] = weights, weights[:, -1:]
    # Conflicts. `least` descends: no item so far is smaller than its entry.
    least = np.minimum.accumulate(share, axis=1)
    end = _columns(least > _TINY)
    conflict = _conflicts(least[:, :end], volume[:, :end], large[:, :end])
    np.maximum(packs[:, :end], conflict, out=packs[:, :end])
    return np.maximum.accumulate(packs, axis=1).astype(np.int64)


def _columns(rows: BoolArray) -> int:
    """How many columns there are up to the last one with an entry that is true."""
    columns = np.flatnonzero(rows.any(axis=0))
    return int(columns[-1]) + 1 if len(columns) else 0


def _conflicts(least: FloatArray, volume: FloatArray, large: FloatArray) -> FloatArray:
    """The packs of items that share a pack with no item so far, and those that the rest need.

    Columns of the first i + 1 items: the least size, the sum of sizes, how many exceed half.
    """
    index = np.arange(1, least.shape[1] + 1)
    wide = np.minimum(_rank_among(-least, least - 1 - _SLACK), index)  # items over 1 - least
    volume_of_wide = np.take_along_axis(_zero_first(volume), wide, axis=1)
    large_of_wide = np.take_along_axis(_zero_first(large), wide, axis=1)
    rest = np.maximum(large - large_of_wide, np.ceil(volume - volume_of_wide - _SLACK))
    return np.asarray(wide + rest)


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
    sizes = np.minimum(sizes, capacity)
    # Setting pairs aside can help where an item has room for exactly one of the smallest.
    least = np.where(sizes > 0, sizes, capacity).min(axis=1, initial=capacity)[:, None]
    pairs = (2 * sizes > capacity) & (sizes > capacity - 2 * least) & (sizes <= capacity - least)
    for row in np.flatnonzero(pairs.any(axis=1)).tolist():
        bound[row] = max(int(bound[row]), pack_bound(sizes[row][sizes[row] > 0], capacity))
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
    single = _shares_with_none(taken, caps)
    rest = taken[~single]
    least = (_column_bound(rest[:, d], float(cap)) for d, cap in enumerate(caps))
    return int(single.sum()) + max(least, default=0)


def _shares_with_none(taken: FloatArray, caps: FloatArray) -> BoolArray:
    """Which items can share a bin with no other item, by one limit or by two together.

    For limits a and b: of the items that fit beside it by a, the one that takes least of b is
    still too much.
    """
    single = (taken > caps).any(axis=1)
    for a, b in combinations(range(len(caps)), 2):
        order = np.argsort(taken[:, a], kind="stable")
        least = np.concatenate(([np.inf], np.minimum.accumulate(taken[order, b])))
        room = caps * (1 + 2 * _SLACK) - taken
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
    share = column / (cap * (1 + 2 * _SLACK))
    parts = np.floor(share * _RESOLUTION).astype(np.int64)
    volume = int(np.ceil(share.sum() * (1 - 2 * _SLACK)))
    return max(pack_bound(parts[parts > 0], _RESOLUTION), volume)


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


# One work --------------------------------------------------------------------------------------

_FEW = 5  # items per rank up to which counting packs of the bound's size can raise the bound
_HALVINGS = 14
_PRICES = 12
_ENTRIES = 1 << 22  # of an array of steps x prices x items
_LEVELS, _ROUNDS = 32, 4


def makespans(costs: FloatArray, ranks: int) -> FloatArray:
    """A lower bound on the load of the slowest rank, for each row of items.

    Missing items cost 0. The largest of three bounds:

    mean     the total divided by the ranks
    crowd    of the ranks * j + 1 largest items, one rank has j + 1, at least the smallest of
             them; for j = 0 that is the largest item
    packs    no load is at most t if the items need more than `ranks` packs of capacity t

    >>> makespans(np.array([[3.0, 3, 2], [9, 1, 0]]), 2).tolist()
    [5.0, 9.0]
    """
    count = costs.shape[1]
    if count == 0 or ranks == 1:
        return np.asarray(costs.sum(axis=1), np.float64)
    if not _descends(costs):
        costs = -np.sort(-costs, axis=1)
    total = _zero_first(np.cumsum(costs, axis=1))
    shared = np.arange((count - 1) // ranks + 1)
    crowd = total[:, ranks * shared + 1] - total[:, ranks * shared - shared]
    bound: FloatArray = np.maximum(total[:, -1] / ranks, crowd.max(axis=1))
    if not ranks < count <= _FEW * ranks:
        return bound

    def too_low(load: FloatArray) -> BoolArray:
        capacity = np.maximum(load, np.finfo(np.float64).tiny)[:, None]
        return np.asarray(packs_of_first(costs, capacity)[:, -1] > ranks)

    # Bisect for the greatest load at which the items need more packs than there are ranks.
    low, high = bound, 1.5 * bound
    if not too_low(low * (1 + 1e-6)).any():
        return bound
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = too_low(middle)
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return low


def makespan_bound(costs: NDArray[np.floating], ranks: int) -> float:
    """`makespans` of one step.

    >>> makespan_bound(np.array([3.0, 3.0, 2.0]), 2), makespan_bound(np.array([9.0, 1.0]), 2)
    (5.0, 9.0)
    """
    return float(makespans(np.asarray(costs, np.float64)[None, :], ranks)[0])


def lock_steps(
    sizes: IntArray,
    costs: FloatArray,
    capacity: int,
    ranks: int,
    packs: IntArray | None = None,
) -> FloatArray:
    """A lower bound on the sum over waves of the most expensive pack, for each row of items.

    Missing items have size and cost 0. An item over the capacity is alone in its pack. The number
    of waves is free. `packs` is `packs_of_first` of these items if costs descend.

    Proof. Let P[1] >= P[2] >= ... be the costs of the packs. The first (j - 1) * ranks + 1 of them
    lie in at least j waves, so the j-th slowest wave takes at least G[j] = P[(j - 1) * ranks + 1],
    and the step at least the sum of G. With j(k) = ceil(k / ranks),

        ranks * time >= sum of G[j(k)] over all k = total cost + sum of (G[j(k)] - P[k])

    The last sum is what ranks wait at least. It is large where a pack of short sequences is full
    before it costs as much as one long sequence. It is bounded from both sides:

    G[j] >= L[j]. If the items that cost at least c need n packs, then P[n] >= c. L[j] is the
    greatest c with n > (j - 1) * ranks.

    P[k] = P'[k] + X[k]. Choose a price m >= 0 per slot. A small item, at most half the capacity,
    pays x = max(0, cost - m * size). The rest of its cost is at most size * min(m, d(size)), where
    d(s) is the greatest cost per slot of small items up to size s. X[k] is what the small items of
    pack k pay; P'[k] is the rest of its cost. Let i be the pack's largest item. If i is small, then
    P'[k] <= capacity * min(m, d(size[i])). Otherwise the other items fit into the room
    r = capacity - size[i], they are small, and P'[k] <= cost[i] + r * min(m, d(r)). Call this the
    reach of item i. An item is the largest of at most one pack, so the k-th greatest P' is at most
    U[k], the k-th greatest reach.

        sum of (G[j(k)] - P[k]) >= sum of max(0, L[j(k)] - P'[k] - X[k])
                                >= sum of max(0, L[j(k)] - P'[k]) - sum of all x
                                >= sum of max(0, L[j(k)] - U[k]) - sum of all x

    The last line holds because a sum of a convex function of differences is least where both
    sequences descend. The bound holds for every price; the best of several is taken.

    >>> lock_steps(np.array([[10, 1, 1, 1]]), np.array([[100.0, 1, 1, 1]]), 10, 2).tolist()
    [100.0]
    """
    total = costs.sum(axis=1)
    if ranks == 1 or not total.any():
        return np.asarray(total / ranks, np.float64)
    size = np.minimum(sizes, capacity).astype(np.float64)
    if not _descends(costs):
        packs = None
        order = np.argsort(-costs, axis=1, kind="stable")
        size, costs = (np.take_along_axis(part, order, axis=1) for part in (size, costs))
    if packs is None:
        packs = packs_of_first(size, np.full((len(size), 1), float(capacity)))
    level = np.repeat(_wave_starts(packs, costs, ranks), ranks, axis=1)
    waiting = _waiting(size, costs, float(capacity), level)
    return np.asarray((total + waiting) / ranks, np.float64)


def lock_step_bound(
    sizes: NDArray[np.integer], costs: NDArray[np.floating], capacity: int, ranks: int
) -> float:
    """`lock_steps` of one step.

    >>> lock_step_bound(np.array([10, 1, 1, 1]), np.array([100.0, 1, 1, 1]), 10, 2)
    100.0
    """
    row = np.asarray(sizes, np.int64)[None, :], np.asarray(costs, np.float64)[None, :]
    return float(lock_steps(*row, capacity, ranks)[0])


def _wave_starts(packs: IntArray, costs: FloatArray, ranks: int) -> FloatArray:
    """L of each wave; 0 where a step has no further wave.

    packs [[1, 2, 3]] of costs [[9, 8, 7]] on 2 ranks -> [[9, 7]]
    """
    first = np.arange(1.0, int(packs.max()) + 1, ranks)  # the first pack of each wave
    at = _rank_among(packs.astype(np.float64), np.broadcast_to(first, (len(packs), len(first))))
    last = packs.shape[1] - 1
    return np.where(at > last, 0.0, np.take_along_axis(costs, np.minimum(at, last), axis=1))


def _waiting(size: FloatArray, costs: FloatArray, capacity: float, level: FloatArray) -> FloatArray:
    """What ranks wait at least, summed over ranks. `level[:, k]` is L of the wave of pack k."""
    small = 2 * size <= capacity
    rate = np.divide(costs, size, out=np.zeros_like(costs), where=small & (size > 0))  # per slot
    prices, paid = _prices(size, costs, rate, small)
    packs = level.shape[1]
    # Where sizes descend, large items come first, one pack each, and items after all packs reach no
    # further than these.
    items = slice(packs + 1 if _descends(size) else None)
    fits = np.where(small[:, items], size[:, items], capacity - size[:, items])
    densest = _densest(size, rate, fits)
    room = np.where(small[:, items], capacity, fits)
    fixed = np.where(small[:, items], 0.0, costs[:, items])
    best = np.zeros(len(size))
    together = max(1, _ENTRIES // max(room.size, 1))  # prices at a time
    for at in range(0, prices.shape[1], together):
        now = slice(at, at + together)
        # Steps x prices x items: the reach of each item, then U, its greatest from there on.
        reach = np.minimum(prices[:, now, None], densest[:, None])
        reach *= room[:, None]
        reach += fixed[:, None]
        reach = np.maximum.accumulate(reach[:, :, ::-1], axis=2)[:, :, ::-1][:, :, :packs]
        short = np.maximum(level[:, None, : reach.shape[2]] - reach, 0).sum(axis=2)
        short += level[:, None, reach.shape[2] :].sum(axis=2)  # packs without an item of their own
        np.maximum(best, (short - paid[:, now]).max(axis=1), out=best)
    return best


def _densest(size: FloatArray, rate: FloatArray, fits: FloatArray) -> FloatArray:
    """The greatest cost per slot of the small items whose size is at most `fits`."""
    if _descends(size):
        size, rate = size[:, ::-1], rate[:, ::-1]
    else:
        order = np.argsort(size, axis=1)
        size, rate = (np.take_along_axis(part, order, axis=1) for part in (size, rate))
    table = np.maximum.accumulate(rate, axis=1)
    at = _rank_among(size, fits + 0.5) - 1  # sizes are integers
    return np.where(at < 0, 0.0, np.take_along_axis(table, np.maximum(at, 0), axis=1))


def _prices(
    size: FloatArray, costs: FloatArray, rate: FloatArray, small: BoolArray
) -> tuple[FloatArray, FloatArray]:
    """(prices per slot to try, what all small items pay at each of them).

    The prices are 0 and the costs per slot of a few small items, more of the densest than of
    others.
    """
    key = np.where(small, rate, np.inf)  # large items come first, then the densest
    if not _descends(key):
        order = np.argsort(-key, axis=1)
        key, size, costs = (np.take_along_axis(part, order, axis=1) for part in (key, size, costs))
    last = size.shape[1] - 1
    large = (~small).sum(axis=1, keepdims=True)
    steps = np.unique(np.geomspace(1, last + 1, _PRICES).astype(np.int64)) - 1
    at = np.minimum(large + steps, last)
    price = np.take_along_axis(key, at, axis=1)
    price[np.isinf(price)] = 0.0  # no item is small
    price = np.column_stack((np.zeros(len(price)), price))
    at = np.column_stack((np.full(len(at), last), at))
    total = _zero_first(np.cumsum(costs, axis=1)), _zero_first(np.cumsum(size, axis=1))
    cost, slots = (
        np.take_along_axis(part, at + 1, axis=1) - np.take_along_axis(part, large, axis=1)
        for part in total
    )
    return price, np.where(large > last, 0.0, cost - price * slots)


def cut_times(
    costs: FloatArray, fits: IntArray, ranks: int, price: float, per_rank: IntArray, multiple: int
) -> FloatArray:
    """A lower bound on the time of padded rows, for each step, with what micro-batches cost.

    `costs` are what rows cost at their own width, descending; missing rows cost 0. A micro-batch
    costs its rows times the most expensive of them, holds at most `fits` of that row, and adds
    `price`. Each rank runs k micro-batches, at least `per_rank` and a multiple of `multiple`.

    Proof. Let S(n) be the least cost of all rows in n micro-batches. The slowest rank, and the sum
    over waves of the slowest micro-batch, are at least the mean S(n) / ranks with n = k * ranks.
    S(n) is reached by cuts of the descending rows: order any micro-batches by their most expensive
    row, and let them have r[1], r[2], ... rows. Those before the j-th hold r[1] + ... + r[j - 1]
    rows, so it costs at least r[j] times the row after these, which is what cuts cost. That row is
    no more expensive than its own, so r[j] of it fit. For a price m per micro-batch let D(m) be the
    least of S(n) + m * n over all n: one pass over the rows. Then S(n) >= D(m) - m * n, so

        time >= least over k of (D(m) - m * k * ranks) / ranks + price * k, the best of several m

    With k = 1, each rank has one micro-batch and the time is the most expensive of them: see
    `_one_wave`. From k = 2 on, once every row can be alone, more micro-batches add their price.

    >>> rows, fits = np.array([[8.0, 8, 3, 3]]), np.array([[2, 2, 5, 5]])
    >>> cut_times(rows, fits, 1, 4.0, np.array([1]), 1).tolist()
    [30.0]
    """
    filled = (costs > 0).sum(axis=1)
    last = np.maximum(np.maximum(per_rank, 2), rounded_up(divided_up(filled, ranks), multiple))
    prices = price * np.array([0.5, 1.0, 2.0])
    least = _least_cuts(costs, fits, prices)  # D: steps x prices
    bounds = np.empty(len(costs))
    for step, (fewest, most) in enumerate(zip(per_rank.tolist(), last.tolist(), strict=True)):
        counts = np.arange(fewest, most + 1, multiple)
        times = (least[step][:, None] - prices[:, None] * counts * ranks) / ranks
        bounds[step] = (times.max(axis=0) + price * counts)[counts > 1].min(initial=np.inf)
    one = per_rank == 1
    if one.any():
        bounds[one] = np.minimum(bounds[one], _one_wave(costs[one], fits[one], ranks) + price)
    return bounds


def _least_cuts(costs: FloatArray, fits: IntArray, prices: FloatArray) -> FloatArray:
    """D of `cut_times`: the least cost of descending rows in any cuts, at each price of a block.

    From the last row back: the rows from i on cost at least k * costs[i], the price, and what the
    rows from i + k on cost, for the best k.
    """
    steps, rows = costs.shape
    best = np.zeros((steps, rows + 1, len(prices)))
    for row in range(rows - 1, -1, -1):
        most = int(min(fits[:, row].max(initial=1), rows - row))
        count = np.arange(1, most + 1)
        block = np.where(count <= fits[:, row, None], costs[:, row, None] * count, np.inf)
        total = (block[:, :, None] + best[:, row + 1 : row + 1 + most]).min(axis=1) + prices
        best[:, row] = np.where(costs[:, row, None] > 0, total, 0.0)
    return best[:, 0]


def _one_wave(costs: FloatArray, fits: IntArray, ranks: int) -> FloatArray:
    """A lower bound on the most expensive of one micro-batch per rank, for each step.

    If none may cost more than t, then from the most expensive row down each takes as many rows as
    fit and as t allows, which is optimal: what is left is cheaper. t is too low if rows are left.
    """
    steps, rows = costs.shape
    step = np.arange(steps)
    low = costs.sum(axis=1) / ranks
    high = np.maximum(low, rows * costs.max(axis=1, initial=0))
    costs = np.column_stack((costs, np.zeros(steps)))  # a row after the last, which ends all
    fits = np.column_stack((fits, np.ones(steps, np.int64)))
    for _ in range(_ROUNDS):  # all levels of a round at once: steps x levels
        level = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, _LEVELS)
        at = np.zeros(level.shape, np.int64)  # the first row that is left
        for _ in range(ranks):
            cost = costs[step[:, None], at]
            most = np.divide(level * (1 + _SLACK), cost, out=np.zeros_like(level), where=cost > 0)
            at += np.minimum(fits[step[:, None], at], most.astype(np.int64))
            np.minimum(at, rows, out=at)
        enough = costs[step[:, None], at] == 0
        first = enough.argmax(axis=1)  # the lowest level that is enough
        below, above = level[step, np.maximum(first - 1, 0)], level[step, first]
        low, high = np.where(enough.any(axis=1), (below, above), high)
    return np.asarray(low, np.float64)


def _zero_first(rows: FloatArray) -> FloatArray:
    """The rows with a 0 before the first entry."""
    longer = np.zeros((rows.shape[0], rows.shape[1] + 1))
    longer[:, 1:] = rows
    return longer


def _rank_among(ordered: FloatArray, values: FloatArray) -> IntArray:
    """How many entries of the same row of `ordered` are less than each value. Rows ascend.

    >>> _rank_among(np.array([[1.0, 2, 3], [4, 5, 6]]), np.array([[2.5], [4]])).tolist()
    [[2], [0]]
    """
    if len(ordered) == 1:
        return np.asarray(np.searchsorted(ordered[0], values[0])[None, :], np.int64)
    ranks = [row.searchsorted(entries) for row, entries in zip(ordered, values, strict=True)]
    return np.array(ranks, np.int64).reshape(values.shape)


def _descends(rows: FloatArray) -> bool:
    """Whether every row descends."""
    return bool((rows[:, 1:] <= rows[:, :-1]).all())


# One step ----------------------------------------------------------------------------------------

_EQUAL = 1 - 1e-9
_WIDTHS = 64  # numbers of micro-batches per rank whose common width is bounded one by one


class Floor(NamedTuple):
    """Lower bounds of one step: non-empty micro-batches, micro-batches per rank, modelled time.

    `binds` names the bound on time that is the largest, the first of those that are equal;
    `second` if the second work exceeds its own mean by more than the first does.
    """

    packs: int
    per_rank: int
    time: float
    binds: str


class StepFloor:
    """The units of steps, and the least time of any plan of them.

    size      the aligned slots of each unit: a segment, or a group that shares a micro-batch
    count     its segments
    attended  its cost that does not depend on padding: pairs and segments
    work      what it costs without padding
    second    its second work, or None

    All are steps x units; missing units have size 0 and cost nothing. `aligned` are the aligned
    lengths of one step's segments, or steps x segments, each row descending. For one step,
    `unit_of` is the unit of each segment, by default a unit each, and `second` the second work of
    each unit in the unit of the cost. Rows of a padded layout are segments, also where groups share
    a micro-batch.

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
        self.recipe, self.second = recipe, None if second is None else second[None]
        alone = unit_of is not None and int(unit_of.max(initial=-1)) + 1 == len(unit_of)
        if alone or recipe.layout.segments_per_row is not None:
            unit_of = None  # each segment is a unit
        if unit_of is None and second is None:
            # Largest first, as bounds would otherwise sort them one by one.
            self.size = aligned if aligned.ndim == 2 else -np.sort(-aligned)[None]
            self.count = (self.size > 0).astype(np.int64)
            self.attended = self._attended(self.size) * self.count
        else:
            unit_of = np.arange(len(aligned)) if unit_of is None else unit_of
            units = int(unit_of.max(initial=-1)) + 1
            self.size = sum_by(unit_of, aligned, units).astype(np.int64)[None]
            self.count = np.bincount(unit_of, minlength=units)[None]
            self.attended = sum_by(unit_of, self._attended(aligned), units)[None]
        self.work = recipe.cost.per_token * self.size + self.attended
        self._packs: dict[int, IntArray] = {}

    def time(self, per_rank: int = 1) -> float:
        """The least time of one step if each rank runs at least `per_rank` micro-batches."""
        return float(self.times(np.array([per_rank]))[0][0])

    def times(self, per_rank: IntArray) -> tuple[FloatArray, list[str]]:
        """(the least time of each step, what binds); each rank runs at least `per_rank`."""
        by_name = self.recipe.layout.least_times(self, per_rank)
        names, bounds = list(by_name), np.stack(list(by_name.values()))
        time = bounds.max(axis=0)
        binds = [names[at] for at in (bounds >= time * _EQUAL).argmax(axis=0).tolist()]
        if self.second is None:
            return time, binds
        beyond = self.second_time - self.second.sum(axis=1) / self.recipe.topology.dp
        more = beyond > time - bounds[0]  # over the mean
        binds = ["second" if above else name for above, name in zip(more, binds, strict=True)]
        return time + self.second_time, binds

    def packs_of_first(self, capacity: int) -> IntArray:
        """`packs_of_first` of these units; a larger one fills a pack."""
        if capacity not in self._packs:
            size = np.minimum(self.size, capacity).astype(np.float64)
            self._packs[capacity] = packs_of_first(size, np.full((len(size), 1), float(capacity)))
        return self._packs[capacity]

    # Times that do not depend on the number of micro-batches, measured once.

    @cached_property
    def share(self) -> FloatArray:
        """The least time of the work where ranks wait once per step."""
        return makespans(self.work, self.recipe.topology.dp)

    @cached_property
    def waves(self) -> FloatArray:
        """The least time of the work where ranks wait in every wave; 0 where they do not."""
        return self._in_waves(self.work)

    @cached_property
    def attention(self) -> FloatArray:
        """The least time of what does not depend on padding."""
        least = makespans(self.attended, self.recipe.topology.dp)
        return np.maximum(least, self._in_waves(self.attended))

    @cached_property
    def widest(self) -> FloatArray:
        """The least sum over waves of the slots of the widest micro-batch."""
        size = self.size.astype(np.float64)
        least = makespans(size, self.recipe.topology.dp)
        return np.maximum(least, self._in_waves(size, always=True))

    @cached_property
    def second_time(self) -> FloatArray:
        """The least time of the second work by itself."""
        assert self.second is not None
        least = makespans(self.second, self.recipe.topology.dp)
        return np.maximum(least, self._in_waves(self.second))

    def _in_waves(self, work: FloatArray, *, always: bool = False) -> FloatArray:
        """`lock_steps` of this work, by each limit of a micro-batch that adds up over its units.

        A micro-batch of several rows counts as one pack of all their slots.
        """
        least = np.zeros(len(work))
        if self.recipe.sync_every != "micro_batch" and not always:
            return least
        layout, ranks = self.recipe.layout, self.recipe.topology.dp
        capacity = layout.capacity(self.recipe)
        if capacity is not None:
            capacity *= layout.packs_per_micro_batch
            packs = self.packs_of_first(capacity)
            least = lock_steps(self.size, work, capacity, ranks, packs)
        if layout.samples is not None:
            by_count = lock_steps(self.count, work, layout.samples, ranks)
            least = np.maximum(least, by_count)
        return least

    def _attended(self, aligned: IntArray) -> FloatArray:
        length = aligned.astype(np.float64)  # a square may not fit 64 bits
        return self.recipe.cost.per_pair * length * length + self.recipe.cost.per_segment


def packed_times(layout: Packed, units: StepFloor, per_rank: IntArray) -> dict[str, FloatArray]:
    """The bounds on the time of packed steps, by name. Each rank runs at least `per_rank`."""
    recipe, cost, ranks = units.recipe, units.recipe.cost, units.recipe.topology.dp
    calls = per_rank * cost.per_micro_batch
    least = _least_slots(layout, units)
    empty = cost.per_token * least
    widths = np.maximum(layout.widths(units.size, recipe.width_unit), least[:, None])
    alone = np.where(units.size > 0, cost.per_token * widths + units.attended, empty[:, None])
    slots = _fewest_slots(layout, units, per_rank, least)
    times = {
        "mean": units.work.sum(axis=1) / ranks,
        "share": units.share,
        "shape": (cost.per_token * slots + units.attended.sum(axis=1)) / ranks,
        "sample": alone.max(axis=1, initial=0) + (per_rank - 1) * empty,
        "waves": units.waves,
    }
    if layout.pad_to is not None:
        times["shape"] = np.maximum(times["shape"], per_rank * empty + units.attention)
    times = {name: time + calls for name, time in times.items()}
    if layout.pad_to is None and recipe.topology.equal_widths:
        times["widths"] = _one_width(layout, units, per_rank) + units.attention
    if recipe.equal_tokens:
        times["widths"] = cost.per_token * units.widest + units.attention + calls
    return times


def _least_slots(layout: Packed, units: StepFloor) -> IntArray:
    """The least slots of a micro-batch: those of an empty one, or of the step's one shape."""
    recipe, steps = units.recipe, len(units.size)
    if layout.pad_to is not None:
        return np.full(steps, layout.least_slots)
    if not recipe.topology.equal_widths:
        return np.full(steps, recipe.width_unit)
    largest = np.asarray(units.size.max(axis=1, initial=0), np.int64)
    return np.asarray(layout.widths(largest, recipe.width_unit), np.int64)


def _fewest_slots(
    layout: Packed, units: StepFloor, per_rank: IntArray, least: IntArray
) -> IntArray:
    """The fewest slots of at least `per_rank` micro-batches per rank that hold these units."""
    recipe, size = units.recipe, units.size
    micro_batches = recipe.topology.dp * per_rank
    if layout.pad_to is not None:
        return micro_batches * least
    unit, capacity = recipe.width_unit, layout.capacity(recipe)
    long = np.zeros(size.shape, bool) if capacity is None else size > capacity
    alone = np.where(long, layout.widths(size, unit), 0).sum(axis=1)
    tokens = rounded_up(np.where(long, 0, size).sum(axis=1), unit)
    spare = np.maximum(0, micro_batches - (size > 0).sum(axis=1))  # these are empty
    shared = np.maximum(tokens + spare * least, (micro_batches - long.sum(axis=1)) * least)
    return np.asarray(alone + shared, np.int64)


def _one_width(layout: Packed, units: StepFloor, per_rank: IntArray) -> FloatArray:
    """What the slots and the number of micro-batches cost where all have one width.

    For k micro-batches per rank, the width is at least the largest unit, the mean of all
    k * ranks micro-batches, and what units use that must share one. The least over k is taken.
    """
    recipe, cost = units.recipe, units.recipe.cost
    ranks, unit, multiple = recipe.topology.dp, recipe.width_unit, recipe.topology.multiple
    times = np.zeros(len(per_rank))
    for step, (size, fewest) in enumerate(zip(units.size, per_rank.tolist(), strict=True)):
        total, largest = int(size.sum()), layout.widths(int(size.max(initial=0)), unit)
        # From `last` on, the width is that of the largest unit, and more cost more.
        last = max(fewest, rounded_up(divided_up(total, ranks * largest), multiple))
        counts = np.arange(fewest, last + 1, multiple)
        widths = np.maximum(largest, rounded_up(-(-total // (counts * ranks)), unit))
        if len(counts) <= _WIDTHS:
            row = size.astype(np.float64)[None]
            used = [int(np.ceil(makespans(row, int(k) * ranks)[0] - 1e-6)) for k in counts]
            widths = np.maximum(widths, rounded_up(np.array(used), unit))
        times[step] = (counts * (cost.per_token * widths + cost.per_micro_batch)).min()
    return times


def padded_times(layout: Padded, units: StepFloor, per_rank: IntArray) -> dict[str, FloatArray]:
    """The bounds on the time of padded steps, by name. Each rank runs at least `per_rank`.

    Each segment is a row at its own width or wider, and every micro-batch has a row. A micro-batch
    is no wider than its rows need, so its rows fit into a pack of `max_tokens` slots, and it costs
    at least what they cost: `lock_steps` bounds padded rows too.
    """
    recipe, cost, ranks = units.recipe, units.recipe.cost, units.recipe.topology.dp
    one_width = recipe.topology.equal_widths
    widths = layout.step_widths(recipe, units.size)
    rows = np.where(units.size > 0, cost.of_lengths(widths), 0.0)
    least = np.full(len(per_rank), layout.pad_to or recipe.width_unit)
    if one_width:
        least = np.maximum(least, widths.max(axis=1, initial=0))
    empty = cost.of_lengths(least)
    fixed = layout.row_counts(0)  # rows of every micro-batch
    filled = units.count.sum(axis=1)
    count = np.maximum(filled, ranks * per_rank * fixed)
    if one_width:
        count = rounded_up(count, ranks)  # all ranks run equally many rows
    largest = np.where(filled > 0, rows.max(axis=1, initial=0), empty)
    calls = per_rank * cost.per_micro_batch
    times = {
        "mean": rows.sum(axis=1) / ranks + calls,
        "share": makespans(rows, ranks) + calls,
        "shape": (rows.sum(axis=1) + (count - filled) * empty) / ranks + calls,
        "sample": largest + (per_rank * fixed - 1) * empty + calls,
    }
    if recipe.sync_every == "micro_batch":
        limits = ((widths * units.count, layout.max_tokens), (units.count, layout.samples))
        bounds = [lock_steps(size, rows, most, ranks) for size, most in limits if most is not None]
        times["waves"] = np.max(bounds, axis=0) + calls
    if cost.per_micro_batch > 0 and layout.pad_to is None and not one_width:
        fits, multiple = layout.rows_that_fit(recipe, widths), recipe.topology.multiple
        times["cuts"] = cut_times(rows, fits, ranks, cost.per_micro_batch, per_rank, multiple)
    return times
