"""balance="none": micro-batches take the next samples in order."""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.recipe import Recipe
from evenstep.planning.kernels import kernel
from evenstep.planning.units import Units

_ANY = 2**62  # more slots than any pack has


@kernel
def fill_in_order(
    sizes: IntArray,
    capacity: int,
    counts: IntArray,
    most: IntArray,
    extra: FloatArray,
    caps: FloatArray,
) -> IntArray:
    """The pack of each unit. A new pack starts when the next unit would exceed a bound.

    A pack holds `capacity` slots, `caps[d]` of each further limit, and at most `most[u]` segments
    if it holds unit u. A unit that exceeds a bound by itself gets its own pack.

    >>> none = np.zeros((4, 0))
    >>> fill_in_order(np.array([3, 2, 4, 1]), 5, np.ones(4, int), np.full(4, 9), none, none[0])
    array([0, 0, 1, 1])
    """
    n = sizes.shape[0]
    pack_of = np.empty(n, np.int64)
    pack, begun = 0, False
    size, count, least = 0, 0, 0
    held = np.zeros(caps.shape[0])
    for u in range(n):
        over = size + sizes[u] > capacity or count + counts[u] > min(least, most[u])
        for d in range(caps.shape[0]):
            over = over or held[d] + extra[u, d] > caps[d]
        if not begun or over:
            pack += begun
            begun = True
            size, count, least = 0, 0, most[u]
            held[:] = 0
        pack_of[u] = pack
        size += sizes[u]
        count += counts[u]
        least = min(least, most[u])
        for d in range(caps.shape[0]):
            held[d] += extra[u, d]
    return pack_of


def packs_in_order(units: Units, recipe: Recipe) -> IntArray:
    """The pack of each unit, in the order of the units."""
    widest = units.widest
    if recipe.topology.equal_widths:
        widest = np.full_like(widest, widest.max(initial=0))
    capacity, most = recipe.layout.pack_bounds(recipe, widest)
    return fill_in_order(
        units.size,
        _ANY if capacity is None else capacity,
        units.count,
        most,
        units.extra,
        units.caps,
    )
