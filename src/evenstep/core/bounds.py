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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenstep.core.layout import Padded
from evenstep.core.ragged import FloatArray, IntArray, divided_up, rounded_up, sum_by

if TYPE_CHECKING:
    from evenstep.core.recipe import Recipe

# Rounding errors of a sum of floats, with a margin.
_SLACK = 1e-9

# Packs ---------------------------------------------------------------------------------------

_PARTS = np.array([1.0, 2, 3, 4])[:, None, None]
_TINY = 1 / 32  # an item of this share of a pack rarely keeps another out


def packs_of_first(sizes: NDArray[Any], capacity: FloatArray | float) -> IntArray:
    """A lower bound on the packs that hold the first i + 1 items of a row, for each i.

    No size exceeds the capacity: a number, or a column of one per row. The largest of these counts,
    and of those of fewer items, for a capacity of 1:

    volume   the sizes divided by the capacity, rounded up
    parts    for k = 1, 2, 3, 4 let w = ceil((k + 1) * size) - 1. In a pack, the sum of w is less
             than the sum of (k + 1) * size, which is at most k + 1. The sum is an integer, so it is
             at most k. The packs are at least the sum of w over all items, divided by k. For k = 1
             these are the items over half.
    conflict let t be the smallest size so far. Items over 1 - t share a pack with none of the
             items; the others need at least their volume, and one pack for each item over half. If
             sizes descend, this is the L2 bound of Martello and Toth.

    >>> packs_of_first(np.array([[6, 6, 5, 3]]), 10).tolist()
    [[1, 2, 3, 3]]
    """
    share, total = sizes / capacity, _totals(sizes)
    packs = np.ceil(total[:, 1:] / capacity - _SLACK)
    # Parts x rows x items. Items up to a fifth weigh nothing for any k.
    heavy = np.flatnonzero((share > 1 / 5).any(axis=0))
    weight = np.maximum(np.ceil((_PARTS + 1) * share[:, heavy] - _SLACK) - 1, 0)
    weights = np.ceil(np.cumsum(weight, axis=2) / _PARTS - _SLACK)
    packs[:, heavy] = np.maximum(packs[:, heavy], weights.max(axis=0))
    if weight[0].any():
        # Conflicts. `least` descends: no item so far is smaller than its entry.
        least = np.minimum.accumulate(share, axis=1)
        end = np.count_nonzero((least > _TINY).any(axis=0))
        least, large = least[:, :end], _totals(2 * share[:, :end] > 1 + _SLACK)
        wide = _rank_among(-least, least - 1 - _SLACK)  # items over 1 - least
        wide = np.minimum(wide, np.arange(1, end + 1))
        volume, halves = (
            part[:, 1 : end + 1] - np.take_along_axis(part, wide, axis=1) for part in (total, large)
        )
        rest = np.maximum(halves, np.ceil(volume / capacity - _SLACK))
        packs[:, :end] = np.maximum(packs[:, :end], wide + rest)
    return np.maximum.accumulate(packs, axis=1).astype(np.int64)


def pack_bound(sizes: NDArray[Any], capacity: float) -> int:
    """A lower bound on the packs of `capacity` that hold items of these sizes; 0 is no item.

    An item that can share a pack with at most one other is paired with the largest that fits, which
    is optimal, and set aside. For the rest, `packs_of_first` holds.

    >>> pack_bound(np.array([6, 6, 6]), 10), pack_bound(np.array([5, 5, 4]), 10)
    (3, 2)
    """
    ordered = np.sort(sizes[sizes > 0]).astype(np.float64)
    room = capacity * (1 + 2 * _SLACK)  # what fits up to rounding fits
    fixed = best = 0
    while len(ordered):
        best = max(best, fixed + int(packs_of_first(ordered[None, ::-1], room)[0, -1]))
        packs, ordered = _set_aside(ordered, room)
        if packs == 0:
            break
        fixed += packs
    return max(best, fixed)


def pack_bounds(sizes: IntArray, capacity: int, packs: IntArray | None = None) -> IntArray:
    """`pack_bound` of each row, which descends, and 1 for each size over the capacity.

    `packs` is `packs_of_first` of the sizes up to the capacity, if it is known.
    """
    sizes = np.minimum(sizes, capacity)
    packs = packs_of_first(sizes, capacity) if packs is None else packs
    bound = packs.max(axis=1, initial=0)
    # Setting pairs aside can help where an item has room for exactly one of the smallest.
    least = np.where(sizes > 0, sizes, capacity).min(axis=1, initial=capacity)[:, None]
    pairs = (2 * sizes > capacity) & (sizes > capacity - 2 * least) & (sizes <= capacity - least)
    for row in np.flatnonzero(pairs.any(axis=1)).tolist():
        bound[row] = max(int(bound[row]), pack_bound(sizes[row], capacity))
    return np.asarray(bound, np.int64)


def _set_aside(ordered: FloatArray, capacity: float) -> tuple[int, FloatArray]:
    """(packs of large items with their best single partner, the other sizes).

    capacity 10, sizes [3, 4, 6, 9] -> 9 alone, 6 with 4: 2 packs, and [3] remains
    """
    # Over half, and with no room for two of the smallest.
    least = max(capacity / 2, capacity - 2 * float(ordered[0]))
    large = int(np.searchsorted(ordered, least, "right"))
    waiting: list[float] = []
    small = ordered[:large].tolist()
    at = 0
    for size in ordered[large:][::-1].tolist():
        while at < large and small[at] <= capacity - size:
            waiting.append(small[at])
            at += 1
        if waiting:
            waiting.pop()
    return len(ordered) - large, np.array(waiting + small[at:], np.float64)


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
    single = (taken > caps).any(axis=1)
    room = caps * (1 + 2 * _SLACK) - taken
    for a, b in combinations(range(len(caps)), 2):
        # Of the items that fit beside it by limit a, the one that takes least of b is too much.
        order = np.argsort(taken[:, a], kind="stable")
        least = np.concatenate(([np.inf], np.minimum.accumulate(taken[order, b])))
        beside = np.searchsorted(taken[order, a], room[:, a], "right")
        single |= least[beside] > room[:, b]
    rest = taken[~single]
    bounds = [pack_bound(rest[:, d], cap) for d, cap in enumerate(caps.tolist())]
    return int(single.sum()) + max(bounds, default=0)


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
_LEVELS, _ROUNDS = 32, 4


def makespans(
    costs: FloatArray, ranks: int, *, equal_sizes: bool = False, packs: bool = True
) -> FloatArray:
    """A lower bound on the load of the slowest rank, for each row of items.

    Missing items cost 0. The largest of these bounds:

    mean     the total divided by the ranks
    crowd    of the ranks * j + 1 largest items, one rank has j + 1, at least the smallest of
             them; for j = 0 that is the largest item
    equal    with equal sizes, every rank has n // ranks items: one has the largest, and others
             that cost no less than the smallest
    packs    no load is at most t if the items need more than `ranks` packs of capacity t; takes
             longer than the others, and is left out unless `packs`

    >>> makespans(np.array([[3.0, 3, 2], [9, 1, 0]]), 2).tolist()
    [5.0, 9.0]
    """
    count = costs.shape[1]
    if count == 0 or ranks == 1:
        return np.asarray(costs.sum(axis=1), np.float64)
    costs = -np.sort(-costs, axis=1)
    total, each = _totals(costs), count // ranks
    shared = np.arange((count - 1) // ranks + 1)
    crowd = total[:, ranks * shared + 1] - total[:, ranks * shared - shared]
    bound: FloatArray = np.maximum(total[:, -1] / ranks, crowd.max(axis=1))
    if equal_sizes and each:
        bound = np.maximum(bound, costs[:, 0] + total[:, -1] - total[:, count - each + 1])
    if not packs:
        return bound
    # Where items are few, bisect for the greatest load at which they need more packs than there are
    # ranks, unless a load just above the bound is enough in each of these steps.
    filled = np.count_nonzero(costs, axis=1)
    few = (ranks < filled) & (filled <= _FEW * ranks)
    costs, low, high = costs[few, : _FEW * ranks], bound[few], 1.5 * bound[few]
    for halving in range(_HALVINGS + 1 if few.any() else 0):
        middle = (low + high) / 2 if halving else low * (1 + 1e-6)
        above = packs_of_first(costs, middle[:, None])[:, -1] > ranks
        if halving:
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        elif not above.any():
            break
    bound[few] = low
    return bound


def lock_steps(
    sizes: IntArray, costs: FloatArray, capacity: int, ranks: int, packs: IntArray | None = None
) -> FloatArray:
    """A lower bound on the sum over waves of the most expensive pack, for each row of items.

    Missing items have size and cost 0. An item over the capacity is alone in its pack. The number
    of waves is free. `packs` is `packs_of_first` of the sizes up to the capacity, if it is known.

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
    size, by_cost = _by(costs, np.minimum(sizes, capacity), costs)
    if packs is None or by_cost is not costs:
        packs, costs = packs_of_first(size, capacity), by_cost
    # L of each wave, 0 where a step has no further wave.
    # packs [[1, 2, 3]] of costs [[9, 8, 7]] on 2 ranks: waves start with packs 1 and 3 -> [[9, 7]]
    first = np.arange(1.0, int(packs.max()) + 1, ranks)
    at = _rank_among(packs.astype(np.float64), np.broadcast_to(first, (len(packs), len(first))))
    level = np.take_along_axis(np.column_stack((costs, np.zeros(len(costs)))), at, axis=1)
    waiting = _waiting(
        size.astype(np.float64), costs, float(capacity), np.repeat(level, ranks, axis=1)
    )
    return np.asarray((total + waiting) / ranks, np.float64)


def _waiting(size: FloatArray, costs: FloatArray, capacity: float, level: FloatArray) -> FloatArray:
    """What ranks wait at least, summed over ranks. `level[:, k]` is L of the wave of pack k."""
    size, costs = _by(size, size, costs)
    small = 2 * size <= capacity
    rate = np.divide(costs, size, out=np.zeros_like(costs), where=small & (size > 0))  # per slot
    # Prices to try: 0, and the cost per slot of a few small items, more of the densest than of
    # others; and what all small items pay at each of them.
    rates, paying, slots = _by(rate, rate, np.where(small, costs, 0.0), size)
    places = np.unique(np.geomspace(1, size.shape[1], _PRICES).astype(np.int64)) - 1
    prices, paying = rates[:, places], _totals(paying)
    paid = paying[:, places + 1] - prices * _totals(slots)[:, places + 1]
    prices = np.column_stack((np.zeros(len(prices)), prices))
    paid = np.column_stack((paying[:, -1], paid))
    # d of what fits beside each item. Large items come first, one pack each, and small ones reach
    # the further the larger they are, so items after all packs are left out.
    packs = level.shape[1]
    small, costs = small[:, : packs + 1], costs[:, : packs + 1]
    fits = np.where(small, size[:, : packs + 1], capacity - size[:, : packs + 1])
    up_to = np.zeros((rate.shape[0], rate.shape[1] + 1))
    up_to[:, :-1] = np.maximum.accumulate(rate[:, ::-1], axis=1)[:, ::-1]
    beside = np.take_along_axis(up_to, _rank_among(-size, -fits - 0.5), axis=1)  # whole sizes
    # Steps x prices x items: the reach of each item, then U, its greatest from there on.
    reach = np.minimum(prices[:, :, None], beside[:, None])
    reach *= np.where(small, capacity, fits)[:, None]
    reach += np.where(small, 0.0, costs)[:, None]
    reach = np.maximum.accumulate(reach[:, :, ::-1], axis=2)[:, :, ::-1][:, :, :packs]
    short = np.maximum(level[:, None, : reach.shape[2]] - reach, 0).sum(axis=2)
    short += level[:, None, reach.shape[2] :].sum(axis=2)  # packs without an item of their own
    return np.asarray(np.maximum((short - paid).max(axis=1), 0.0), np.float64)


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


def _totals(rows: NDArray[np.generic]) -> FloatArray:
    """The sum of the first i entries of each row: [[3, 1, 2]] -> [[0, 3, 4, 6]]."""
    totals = np.zeros((rows.shape[0], rows.shape[1] + 1))
    np.cumsum(rows, axis=1, out=totals[:, 1:])
    return totals


def _rank_among(ordered: FloatArray, values: FloatArray) -> IntArray:
    """How many entries of the same row of `ordered` are less than each value. Rows ascend.

    >>> _rank_among(np.array([[1.0, 2, 3], [4, 5, 6]]), np.array([[2.5], [4]])).tolist()
    [[2], [0]]
    """
    if len(ordered) == 1:
        return np.asarray(np.searchsorted(ordered[0], values[0])[None, :], np.int64)
    ranks = [row.searchsorted(entries) for row, entries in zip(ordered, values, strict=True)]
    return np.array(ranks, np.int64).reshape(values.shape)


def _by(key: NDArray[Any], *parts: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """The parts in the order in which each row of `key` descends; themselves if it does."""
    if (key[:, 1:] <= key[:, :-1]).all():
        return parts
    order = np.argsort(-key, axis=1, kind="stable")
    return tuple(np.take_along_axis(part, order, axis=1) for part in parts)


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

    size      the slots of each unit: a segment or a group, aligned; a padded row, at its width
    count     its segments
    attended  its cost that does not depend on padding: pairs and segments
    work      what it costs without padding
    second    its second work, or None

    All are steps x units, the largest units first; missing units have size 0 and cost nothing.
    `aligned` are the aligned lengths of segments. `unit_of` is the unit of each, by default a unit
    each; `starts` is where each step starts and the last ends, by default one step. `second` is the
    second work of each unit, in the unit of the cost. Rows of a padded layout are segments, also
    where groups share a micro-batch.

    Samples that share prefixes are units too: with the tokens that they do not share with the
    sample before them in the order of their prefixes, `behind` those that they can. Proof. Of some
    samples in a micro-batch, each computes at least the tokens that it does not share with the one
    of them before it. These are no fewer than with all samples between them, and what tokens cost
    grows with the number before them.

    >>> from evenstep import Packed, Recipe, Topology
    >>> recipe = Recipe(layout=Packed(max_tokens=10), topology=Topology(dp=2))
    >>> StepFloor(recipe, np.array([9, 6, 6])).times(np.array([2]))[0].tolist()
    [15.0]
    """

    def __init__(
        self,
        recipe: Recipe,
        aligned: IntArray,
        unit_of: IntArray | None = None,
        second: FloatArray | None = None,
        starts: IntArray | None = None,
        behind: IntArray | None = None,
    ) -> None:
        self.recipe, layout, cost = recipe, recipe.layout, recipe.cost
        if unit_of is None or layout.segments_per_row is not None:
            unit_of = np.arange(len(aligned))  # each segment is a unit
        # The units in rows, one for each step, from the largest down.
        units = int(unit_of.max(initial=-1)) + 1
        size = sum_by(unit_of, aligned, units).astype(np.int64)
        starts = np.array([0, len(aligned)]) if starts is None else starts
        step = np.zeros(units, np.int64)
        step[unit_of] = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        in_step = np.bincount(step, minlength=len(starts) - 1)
        by_step = np.argsort(step, kind="stable")
        present = np.arange(in_step.max(initial=0)) < in_step[:, None]
        length = aligned.astype(np.float64)  # a square may not fit 64 bits
        seen = length if behind is None else length + 2.0 * behind
        attended = cost.per_pair * length * seen + cost.per_segment
        columns = [size, np.bincount(unit_of, minlength=units), sum_by(unit_of, attended, units)]
        rows: list[NDArray[Any]] = []
        for column in columns if second is None else [*columns, second]:
            rows.append(np.zeros(present.shape, column.dtype))
            rows[-1][present] = column[by_step]
        rows = list(_by(rows[0], *rows))
        self.size, self.count, self.attended = rows[:3]
        self.second = None if second is None else rows[3]
        self.work = cost.per_token * self.size + self.attended
        if isinstance(layout, Padded):
            self.size = layout.step_widths(recipe, self.size) * self.count
            self.work = np.where(self.count > 0, cost.of_lengths(self.size), 0.0)
        unit, budget = recipe.width_unit, layout.budget
        self.slots = None if budget is None else budget // unit * unit  # of a micro-batch
        self.packs: IntArray | None = None  # that hold the first units
        if self.slots is not None:
            self.packs = packs_of_first(np.minimum(self.size, self.slots), self.slots)
        # What does not depend on the number of micro-batches.
        self.mean = self.work.sum(axis=1) / recipe.topology.dp
        self.share = makespans(self.work, recipe.topology.dp)
        self.waves = self._in_waves(self.work)

    def times(self, per_rank: IntArray) -> tuple[FloatArray, list[str]]:
        """(the least time of each step, what binds); each rank runs at least `per_rank`."""
        calls = per_rank * self.recipe.cost.per_micro_batch
        padded = isinstance(self.recipe.layout, Padded)
        by_name = self._padded_times(per_rank) if padded else self._packed_times(per_rank)
        by_name = {"mean": self.mean + calls, "share": self.share + calls, **by_name}
        if self.recipe.sharing is not None:  # ranks may divide every sequence
            by_name = {"mean": self.mean + calls}
        names, bounds = list(by_name), np.stack(list(by_name.values()))
        time = bounds.max(axis=0)
        binds = [names[at] for at in (bounds >= time * _EQUAL).argmax(axis=0).tolist()]
        if self.second is None:
            return time, binds
        beyond = self.second_time - self.second.sum(axis=1) / self.recipe.topology.dp
        more = beyond > time - bounds[0]  # over the mean
        binds = ["second" if above else name for above, name in zip(more, binds, strict=True)]
        return time + self.second_time, binds

    @cached_property
    def attention(self) -> FloatArray:
        """The least time of what does not depend on padding."""
        least = makespans(self.attended, self.recipe.topology.dp)
        return np.maximum(least, self._in_waves(self.attended))

    @cached_property
    def second_time(self) -> FloatArray:
        """The least time of the second work by itself."""
        assert self.second is not None
        least = makespans(self.second, self.recipe.topology.dp)
        return np.maximum(least, self._in_waves(self.second))

    def _in_waves(self, work: FloatArray, *, always: bool = False) -> FloatArray:
        """The least time of this work where ranks wait in every wave; 0 where they do not.

        `lock_steps` by each limit of a micro-batch that adds up over its units. A micro-batch of
        several packed rows counts as one pack of all their slots. A padded one is no wider than its
        rows need, so these fit into a pack of all its slots, and it costs at least what they cost.
        """
        least = np.zeros(len(work))
        if self.recipe.sync_every != "micro_batch" and not always:
            return least
        ranks, samples = self.recipe.topology.dp, self.recipe.layout.samples
        if self.slots is not None:
            least = lock_steps(self.size, work, self.slots, ranks, self.packs)
        if samples is not None:
            least = np.maximum(least, lock_steps(self.count, work, samples, ranks))
        return least

    def _packed_times(self, per_rank: IntArray) -> dict[str, FloatArray]:
        """The bounds on packed steps that depend on the number of micro-batches, by name."""
        recipe, layout, cost, size = self.recipe, self.recipe.layout, self.recipe.cost, self.size
        unit, ranks, fixed = recipe.width_unit, recipe.topology.dp, layout.pad_to is not None
        one_width = recipe.topology.equal_widths and not fixed
        calls = per_rank * cost.per_micro_batch
        # The least slots of a micro-batch: those of an empty one, or of the step's one shape.
        least = np.full(len(size), layout.least_slots if fixed else unit)
        if one_width:
            least = layout.widths(size.max(axis=1, initial=0), unit)
        empty = cost.per_token * least
        # The fewest slots of all micro-batches: units that are over-long, alone, and the others.
        alone = layout.widths(size, unit)
        long = np.zeros(size.shape, bool) if recipe.capacity is None else size > recipe.capacity
        tokens = rounded_up(np.where(long, 0, size).sum(axis=1), unit)
        spare = np.maximum(0, ranks * per_rank - (size > 0).sum(axis=1))  # these are empty
        shared = np.maximum(tokens + spare * least, (ranks * per_rank - long.sum(axis=1)) * least)
        slots = np.where(long, alone, 0).sum(axis=1) + shared
        if fixed:
            slots = ranks * per_rank * least
        shape = (cost.per_token * slots + self.attended.sum(axis=1)) / ranks
        if fixed:
            shape = np.maximum(shape, per_rank * empty + self.attention)
        # One unit in a micro-batch by itself; the other micro-batches of its rank are empty.
        widths = np.maximum(alone, least[:, None])
        costs = np.where(size > 0, cost.per_token * widths + self.attended, empty[:, None])
        sample = costs.max(axis=1, initial=0) + (per_rank - 1) * empty
        times = {"shape": shape + calls, "sample": sample + calls, "waves": self.waves + calls}
        if one_width:
            times["widths"] = self._one_width(per_rank) + self.attention
        if recipe.equal_tokens:
            slots_of_waves = np.maximum(
                makespans(size * 1.0, ranks), self._in_waves(size * 1.0, always=True)
            )
            times["widths"] = cost.per_token * slots_of_waves + self.attention + calls
        return times

    def _one_width(self, per_rank: IntArray) -> FloatArray:
        """What the slots and the number of micro-batches cost where all have one width.

        For k micro-batches per rank, the width is at least the largest unit, the mean of all
        k * ranks micro-batches, and what units use that must share one. The least over k is taken.
        """
        recipe, cost = self.recipe, self.recipe.cost
        ranks, unit, multiple = recipe.topology.dp, recipe.width_unit, recipe.topology.multiple
        times = np.zeros(len(per_rank))
        for step, (size, fewest) in enumerate(zip(self.size, per_rank.tolist(), strict=True)):
            total = int(size.sum())
            largest = recipe.layout.widths(int(size.max(initial=0)), unit)
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

    def _padded_times(self, per_rank: IntArray) -> dict[str, FloatArray]:
        """The bounds on padded steps that depend on the number of micro-batches, by name.

        Each segment is a row at its own width or wider, and every micro-batch has a row.
        """
        recipe, layout, cost = self.recipe, self.recipe.layout, self.recipe.cost
        assert isinstance(layout, Padded)
        ranks, one_width = recipe.topology.dp, recipe.topology.equal_widths
        calls = per_rank * cost.per_micro_batch
        least = np.full(len(per_rank), layout.pad_to or recipe.width_unit)
        if one_width:
            least = np.maximum(least, self.size.max(axis=1, initial=0))
        empty = cost.of_lengths(least)
        fixed = layout.row_counts(0)  # rows of every micro-batch
        filled = self.count.sum(axis=1)
        count = np.maximum(filled, ranks * per_rank * fixed)
        if one_width:
            count = rounded_up(count, ranks)  # all ranks run equally many rows
        largest = np.where(filled > 0, self.work.max(axis=1, initial=0), empty)
        times = {
            "shape": self.mean + (count - filled) * empty / ranks + calls,
            "sample": largest + (per_rank * fixed - 1) * empty + calls,
            "waves": self.waves + calls,
        }
        if cost.per_micro_batch > 0 and layout.pad_to is None and not one_width:
            widths = np.where(self.size > 0, self.size, recipe.width_unit)
            fits, price = layout.rows_that_fit(recipe, widths), cost.per_micro_batch
            multiple = recipe.topology.multiple
            times["cuts"] = cut_times(self.work, fits, ranks, price, per_rank, multiple)
        return times
