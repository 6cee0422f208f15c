"""Lower bounds on the time of steps whose ranks synchronise at every micro-batch.

A wave takes as long as its most expensive pack, and a step as long as the sum over its waves. Let
P[1] >= P[2] >= ... be the costs of the packs. The first (j - 1) * ranks + 1 of them lie in at least
j waves, so the j-th slowest wave takes at least G[j] = P[(j - 1) * ranks + 1], and the step at
least the sum of G. With j(k) = ceil(k / ranks),

    ranks * time >= sum of G[j(k)] over all k = total cost + sum of (G[j(k)] - P[k])

The last sum is what ranks wait at least. It is large where a pack of short sequences is full before
it costs as much as one long sequence. It is bounded from both sides:

G[j] >= L[j]. If the items that cost at least c need n packs (`core.crowding`), then P[n] >= c. L[j]
is the greatest c with n > (j - 1) * ranks.

P[k] = P'[k] + X[k]. Choose a price m >= 0 per slot. A small item, at most half the capacity, pays
x = max(0, cost - m * size). The rest of its cost is at most size * min(m, d(size)), where d(s) is
the greatest cost per slot of small items up to size s. X[k] is what the small items of pack k pay;
P'[k] is the rest of its cost. Let i be the pack's largest item. If i is small, then
P'[k] <= capacity * min(m, d(size[i])). Otherwise the other items fit into the room
r = capacity - size[i], they are small, and P'[k] <= cost[i] + r * min(m, d(r)). Call this bound the
reach of item i. An item is the largest of at most one pack, so the k-th greatest P' is at most
U[k], the k-th greatest reach.

    sum of (G[j(k)] - P[k]) >= sum of max(0, L[j(k)] - P'[k] - X[k])
                            >= sum of max(0, L[j(k)] - P'[k]) - sum of all x
                            >= sum of max(0, L[j(k)] - U[k]) - sum of all x

The last line holds because a sum of a convex function of differences is least where both sequences
descend. The bound holds for every price; the best of several is taken.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.crowding import descends, packs_of_first, rank_among, zero_first
from evenstep.core.ragged import FloatArray, IntArray

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
