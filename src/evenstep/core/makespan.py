"""Lower bounds on the load of the slowest rank, for several steps at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenstep.core.crowding import descends, packs_of_first, zero_first
from evenstep.core.ragged import FloatArray

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
