"""Assign samples to optimizer steps, by order alone, and size steps of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray, Ragged, by_first_appearance
from evenstep.core.recipe import Recipe, Steps
from evenstep.errors import PlanError
from evenstep.planning.packers import next_fit_kernel
from evenstep.planning.units import Units

_PACKINGS = 6  # packings tried per step
_SLACK = 1e-9


class Leading(Protocol):
    """How many leading units fill a step of micro-batches.

    Unit u holds `samples[offsets[u]]` onwards. None if more units are needed to tell, and these
    are not `complete`.
    """

    def __call__(self, samples: IntArray, offsets: IntArray, *, complete: bool) -> int | None: ...


def assign_steps(
    steps: Steps, tokens: IntArray, groups: IntArray | None, leading: Leading
) -> IntArray:
    """The step of each sample. Steps take the next samples in order and never divide a group.

    A group counts where its first member is. `leading` sizes steps of micro-batches.

    5 samples, 2 per step -> steps [0, 0, 1, 1, 2]
    """
    n = len(tokens)
    if n == 0:
        return np.zeros(n, np.int64)
    if groups is None:
        unit, size, weight = np.arange(n), np.ones(n, np.int64), tokens
    else:
        unit, first = by_first_appearance(groups)
        size = np.bincount(unit)
        weight = np.bincount(unit, weights=tokens).astype(np.int64)
    if steps.samples is not None:
        if groups is not None:
            check_groups(groups[first], size, steps.samples)
        return next_fit_kernel(size, steps.samples)[unit]
    if steps.tokens is not None:
        return next_fit_kernel(weight, steps.tokens)[unit]
    by_unit = Ragged.group(unit, len(size))
    step_of_unit = np.empty(len(size), np.int64)
    begin, step, window = 0, 0, 64
    while begin < len(size):
        end = min(begin + window, len(size))
        offsets = by_unit.offsets[begin : end + 1]
        samples = by_unit.values[offsets[0] : offsets[-1]]
        count = leading(samples, offsets - offsets[0], complete=end == len(size))
        if count is None:
            window *= 2
            continue
        step_of_unit[begin : begin + count] = step
        begin, step, window = begin + count, step + 1, count + count // 4 + 64
    return step_of_unit[unit]


def check_groups(groups: IntArray, sizes: IntArray, most: int) -> None:
    """Raise if a group has more samples than a step holds.

    groups [7, 5] of sizes [1, 3], at most 2 per step -> group 5 is refused
    """
    large = int(np.argmax(sizes))
    if sizes[large] > most:
        raise PlanError(
            f"group {groups[large]} has {sizes[large]} samples but a step holds {most}. Raise "
            f"steps.samples or use smaller groups."
        )


def too_large(name: str, tokens: int, steps: Steps) -> PlanError:
    """The error for a sample or group that does not fit into a step of `steps.micro_batches`."""
    return PlanError(
        f"{name} with {tokens} tokens does not fit into a step of {steps.micro_batches} "
        f"micro-batches per rank. Raise steps.micro_batches or layout.max_tokens."
    )


def first_step(amounts: IntArray, limit: int, *, complete: bool) -> int | None:
    """How many leading units the first step takes if their amounts may add up to `limit`.

    A unit over the limit is taken alone. None if more units are needed to tell.

    >>> first_step(np.array([3, 2, 4]), 5, complete=False)
    2
    """
    total = np.cumsum(amounts)
    count = int(np.searchsorted(total, limit, "right"))
    if count == len(amounts) and not complete and (count == 0 or total[-1] < limit):
        return None
    return min(max(count, 1), len(amounts))


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
