"""Lower the heaviest part of a partition: swaps, and other starts where few items stay uneven."""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.balance.differencing import differenced
from evenstep.planning.balance.multifit import multifit_kernel
from evenstep.planning.balance.swapping import swap_kernel
from evenstep.planning.kernels import kernel

_CLOSE = 1e-4  # a heaviest part this close to its bound is accepted
_FEW = 4096  # items up to which other starts are tried
_TABLE = 2**17  # items x parts up to which largest differencing is tried: some milliseconds
_SHAKES = 10_000  # effort for random swaps: some tenths of a millisecond


def lower_heaviest(costs: FloatArray, part_of: IntArray, parts: int, equal_sizes: bool) -> IntArray:
    """The part of each item, with a heaviest part no heavier than that of `part_of`.

    Costs are heaviest first. With equal sizes, parts keep their number of items.
    """
    bound = heaviest_bound(costs, parts, equal_sizes)
    best = _swapped(costs, part_of, parts, equal_sizes, bound)
    if len(costs) > _FEW:
        return best
    if not equal_sizes and _heaviest(costs, best, parts) > bound * (1 + _CLOSE):
        most = _heaviest(costs, best, parts)
        found = multifit_kernel(costs, parts, bound, most)
        if found[0] >= 0:
            best = _swapped(costs, found, parts, equal_sizes, bound)
    if len(costs) * parts <= _TABLE and _heaviest(costs, best, parts) > bound * (1 + _CLOSE):
        found = differenced(costs, parts, equal_sizes)
        found = _swapped(costs, found, parts, equal_sizes, bound)
        best = min(best, found, key=lambda each: _heaviest(costs, each, parts))
    if _heaviest(costs, best, parts) > bound * (1 + _CLOSE):
        best = _swapped(costs, best, parts, equal_sizes, bound, _SHAKES)
    return best


def _heaviest(costs: FloatArray, part_of: IntArray, parts: int) -> float:
    return float(np.bincount(part_of, costs, parts).max())


def _swapped(
    costs: FloatArray,
    part_of: IntArray,
    parts: int,
    equal_sizes: bool,
    bound: float,
    shakes: int = 0,
) -> IntArray:
    """The parts after swaps. Without equal sizes, items may also move: two items of no cost in
    each part let one or two others move without a swap."""
    n, own = len(costs), np.arange(0 if equal_sizes else parts)
    padded = np.concatenate((costs, np.zeros(2 * len(own))))
    return swap_kernel(
        padded, np.concatenate((part_of, own, own)), parts, bound * (1 + _CLOSE), shakes
    )[:n]


@kernel
def heaviest_bound(costs: FloatArray, parts: int, equal_sizes: bool) -> float:
    """A lower bound on the heaviest part, for costs heaviest first.

    The mean; and of the parts * j + 1 heaviest items, j + 1 share a part. With equal sizes, the
    heaviest item shares its part with as many items as all parts have, at least the lightest.
    Sums of integers are integers.
    """
    n = costs.shape[0]
    total = np.zeros(n + 1)
    whole = True
    for i in range(n):
        total[i + 1] = total[i] + costs[i]
        whole = whole and costs[i] == np.floor(costs[i])
    bound = total[n] / parts
    for shared in range((n - 1) // parts + 1):
        last = parts * shared
        bound = max(bound, total[last + 1] - total[last - shared])
    if equal_sizes and n >= parts:
        bound = max(bound, costs[0] + total[n] - total[n - n // parts + 1])
    bound *= 1 - 1e-12  # rounding errors of the sums
    return float(np.ceil(bound)) if whole else float(bound)
