"""Size a step of micro-batches: how many samples, from the first on, fill it.

A lower bound on packs gives the most samples that could fit. These are packed and counted. If they
need too many packs, the next guess is derived from that number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evenstep.core.ragged import FloatArray
from evenstep.core.recipe import Recipe
from evenstep.planning.units import Units

_PACKINGS = 6  # packings tried per step
_SLACK = 1e-9


def fractions(units: Units, recipe: Recipe) -> FloatArray:
    """The share of a pack that each unit takes of every limit: (units, limits).

    A pack holds at most 1 of each. A unit that exceeds a limit by itself takes a whole pack.
    """
    capacity, most = recipe.layout.pack_bounds(recipe, units.widest)
    columns = [units.count / most]
    if capacity is not None:
        columns.append(units.size / capacity)
    with np.errstate(divide="ignore", invalid="ignore"):
        columns += [np.nan_to_num(units.extra[:, d] / cap) for d, cap in enumerate(units.caps)]
    found = np.column_stack(columns)
    found[(found > 1).any(axis=1)] = 1.0
    return found


def most_that_fit(
    filled: FloatArray, packs: int, count: Callable[[int], int], *, limited: bool, complete: bool
) -> int | None:
    """The most leading units that `count` puts into `packs` or fewer.

    The first n units need at least `filled[n]` packs. If `limited`, packs are counted at most six
    times, and a few more units might fit. None if there are too few units to tell, and these are
    not `complete`.

    >>> filled = np.arange(8) / 2  # the bound is half a pack per unit, packing takes a whole one
    >>> most_that_fit(filled, 2, lambda n: -(-n // 1), limited=True, complete=True)
    2
    """
    total = len(filled) - 1
    beyond = int(np.searchsorted(filled, packs * (1 + _SLACK), "right"))
    full = filled[total] > packs * (1 - _SLACK)  # no further unit fits
    if beyond > total and not complete and not full:
        return None
    low, high, guess, needed = 0, beyond, beyond - 1, 0
    runs = 0
    while high - low > 1 and (runs < _PACKINGS or not limited):
        runs += 1
        if limited and runs == _PACKINGS and low == 0:
            guess = 1  # does anything fit at all?
        found = count(guess)
        if found <= packs:
            low = guess
        else:
            high, needed = guess, found
        guess = (low + high) // 2
        if needed and (limited or runs < _PACKINGS):
            # `high` units take `needed` packs: as many units as fill `packs` at that rate.
            guess = int(np.searchsorted(filled, filled[high] * packs / needed, "right")) - 1
            guess = guess if low < guess < high else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
    return low
