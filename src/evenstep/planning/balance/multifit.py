"""MULTIFIT: the smallest capacity at which the items fit into the parts as bins."""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernels import kernel

_HALVINGS = 24  # of the distance between the bound and the best known


@kernel
def best_fit_parts(costs: FloatArray, parts: int, most: float) -> tuple[IntArray, float]:
    """(part of each item, the heaviest load): each item into the fullest part with room.

    The part is -1 for all items if they do not fit into `parts` parts of `most`.
    """
    part_of = np.full(costs.shape[0], -1, np.int64)
    ranked = np.arange(parts)  # parts by load, fullest first
    load = np.zeros(parts)
    used = 0
    for item in range(costs.shape[0]):
        cost = costs[item]
        # The first of `ranked` with room: loads fall along it.
        low, high = 0, used
        while low < high:
            middle = (low + high) // 2
            if load[ranked[middle]] + cost <= most:
                high = middle
            else:
                low = middle + 1
        if low == parts or cost > most:
            part_of[:] = -1
            return part_of, np.inf
        used = max(used, low + 1)
        part = ranked[low]
        load[part] += cost
        part_of[item] = part
        while low > 0 and load[ranked[low - 1]] < load[part]:
            ranked[low] = ranked[low - 1]
            low -= 1
        ranked[low] = part
    return part_of, load[ranked[0]]


@kernel
def multifit_kernel(costs: FloatArray, parts: int, least: float, most: float) -> IntArray:
    """The part of each item with a heaviest load below `most`; -1 for all items if none is found.

    Costs are heaviest first; `least` is a lower bound.
    """
    best = np.full(costs.shape[0], -1, np.int64)
    for _ in range(_HALVINGS):
        if most <= least * (1 + 1e-6):
            break
        middle = (least + most) / 2
        found, heaviest = best_fit_parts(costs, parts, middle)
        if heaviest < most:
            best, most = found, heaviest
        else:
            least = middle
    return best
