"""Pack under several limits: as few bins as several greedy ways and a local search find.

Best fit has several forms where an item takes of more than one limit: in which order items are
taken, and which bin fits best. None is best for all inputs, so all are tried until the number of
bins reaches the lower bound. Then bins are emptied into others, and items are spread over fewer
bins.

A try that scores every bin takes items x bins steps. For many items there is only the score that a
tree finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from evenstep.core.bounds import bins_bound
from evenstep.core.ragged import FloatArray, IntArray, Ragged
from evenstep.planning.packing.emptying import empty_bins_kernel
from evenstep.planning.packing.room_tree import tightest_fit_kernel
from evenstep.planning.packing.spread import spread_over
from evenstep.planning.packing.vector_fit import scored_fit_kernel

_SCORES = (1, 3, 2, 0)  # of `scored_fit_kernel`, the best on average first
_WORK = 2**25  # items x bins up to which every bin is scored: about 20 ms for one try
_MANY = 1024  # items from which on the tree is faster than scoring every bin
_LOOKS = 2**25  # items looked at to empty bins: some 50 ms
_CLOSE = 1.01  # packings this close to the best are kept, to have their bins emptied
_KEPT = 3  # packings whose bins are emptied


def vector_pack(
    sizes: IntArray, extra: FloatArray, capacity: int, caps: FloatArray, enough: int = 0
) -> Ragged:
    """The items of each bin. Item i takes `sizes[i]` of `capacity` and `extra[i, d]` of `caps[d]`.

    An item that exceeds a limit by itself has a bin of its own. The search ends when the number of
    bins is the lower bound, or at most `enough`.

    >>> patches = np.array([[3.0], [3.0], [0.0], [0.0]])
    >>> vector_pack(np.array([5, 5, 5, 4]), patches, 10, np.array([4.0])).tolist()
    [[0, 2], [1, 3]]
    """
    taken = np.column_stack((sizes.astype(np.float64), extra))
    most = np.append(float(capacity), caps)
    over = (taken > most).any(axis=1)
    fitting, alone = np.flatnonzero(~over), np.flatnonzero(over)
    bin_of = np.empty(len(sizes), np.int64)
    bin_of[fitting] = _packed(taken[fitting], most, enough - len(alone))
    bins = _count(bin_of[fitting])
    bin_of[alone] = bins + np.arange(len(alone))
    return Ragged.group(bin_of, bins + len(alone))


def _packed(taken: FloatArray, caps: FloatArray, enough: int) -> IntArray:
    """The bin of each item. Limits that hold for all items together are left out."""
    binding = taken.sum(axis=0) > caps
    if not binding.any():
        return np.zeros(len(taken), np.int64)
    taken, caps = np.ascontiguousarray(taken[:, binding]), caps[binding]
    bound = bins_bound(taken, caps)
    enough = max(enough, bound)
    found = _fitted(taken, caps, bound, enough)
    if _count(found[0]) > enough:
        found = [_emptied(taken, caps, bin_of, enough) for bin_of in found[:_KEPT]]
    best = min(found, key=_count)
    if _count(best) > enough:
        spread, packs = spread_over(taken, caps, enough, _count(best) - 1)
        best = spread if packs >= 0 else best
    return best


def _fitted(taken: FloatArray, caps: FloatArray, bound: int, enough: int) -> list[IntArray]:
    """Packings, fewest bins first, until one has `enough` bins; those far from the best are left
    out."""
    found: list[IntArray] = []
    most = len(taken)
    for fit in _ways(taken, caps, bound):
        bin_of = fit(most=most)
        if len(bin_of):
            found.append(bin_of)
            most = min(most, int(_count(bin_of) * _CLOSE))
            if _count(bin_of) <= enough:
                break
    return sorted(found, key=_count)


def _ways(taken: FloatArray, caps: FloatArray, bound: int) -> Iterator[partial[IntArray]]:
    """The forms of best fit: items by each limit, by their largest share, or by their sum of
    shares; times the scores of a bin. Those that are best for most inputs come first."""
    shares = taken / caps
    total = shares.sum(axis=1)
    scarce, *others = np.argsort(-shares.sum(axis=0), kind="stable").tolist()
    keys = [shares[:, scarce], shares.max(axis=1), total, *(shares[:, d] for d in others)]
    orders = [np.lexsort((-total, -key)) for key in keys]
    scored = len(taken) * bound <= _WORK
    if len(taken) >= _MANY or not scored:
        for order in orders:
            yield partial(tightest_fit_kernel, taken, caps, order, scarce)
    if scored:
        columns = np.ascontiguousarray(taken.T)
        for score in _SCORES:
            for order in orders:
                yield partial(scored_fit_kernel, columns, caps, order, score)


def _emptied(taken: FloatArray, caps: FloatArray, bin_of: IntArray, enough: int) -> IntArray:
    """The packing after bins are emptied. Items weigh more by limits that are scarce."""
    shares = taken / caps
    weight = shares @ (shares.sum(axis=0) / shares.sum(axis=0).max())
    better = bin_of.copy()
    empty_bins_kernel(taken, weight, caps, better, _count(bin_of), enough, _LOOKS)
    return better


def _count(bin_of: IntArray) -> int:
    """The number of bins."""
    return int(bin_of.max(initial=-1)) + 1
