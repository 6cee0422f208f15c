"""Sizing a step of micro-batches: how many samples, from the first, fill it.

A lower bound on packs says which samples cannot all be in it. Just before that, samples are packed
and counted; where they take too many packs, the next guess follows from how many.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evenstep.core.ragged import FloatArray
from evenstep.core.recipe import Recipe
from evenstep.planning.units import Units

_PACKINGS = 6  # of one step
_SLACK = 1e-9


def fractions(units: Units, recipe: Recipe) -> FloatArray:
    """What share of a pack each unit takes, of every limit: (units, limits).

    No pack holds more than 1 of any. A unit that breaks a limit by itself takes a whole pack.
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

    `filled[n]` packs are needed at least for the first n units. Where counting packs is `limited`,
    it is done six times at most, and a few units more might have fitted. None where there are too
    few units to tell, and these are not `complete`.

    >>> filled = np.arange(8) / 2  # every two units fill a pack, but packing them takes three
    >>> most_that_fit(filled, 2, lambda n: -(-n // 1), limited=True, complete=True)
    2
    """
    total = len(filled) - 1
    beyond = int(np.searchsorted(filled, packs * (1 + _SLACK), "right"))
    if beyond > total and not complete:
        return None
    low, high, guess, needed = 0, beyond, beyond - 1, 0
    runs = 0
    while high - low > 1 and (runs < _PACKINGS or not limited):
        runs += 1
        if limited and runs == _PACKINGS and low == 0:
            guess = 1  # whether anything fits at all
        found = count(guess)
        if found <= packs:
            low = guess
        else:
            high, needed = guess, found
        guess = (low + high) // 2
        if needed and (limited or runs < _PACKINGS):
            # `needed` packs for `high` units: as many units as fill `packs` at that rate.
            guess = int(np.searchsorted(filled, filled[high] * packs / needed, "right")) - 1
            guess = guess if low < guess < high else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
    return low
