"""Steps: which samples belong to one optimizer update. Decided by order alone, before balance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Steps
from evenstep.errors import PlanError
from evenstep.planning.first_fit import next_fit_kernel


def deal_steps(
    steps: Steps,
    names: IntArray,
    tokens: IntArray,
    groups: IntArray | None,
    fits: Callable[[IntArray], bool],
) -> IntArray:
    """The step of each of these samples: the next ones in order, groups never divided.

    A group takes its place where its first member stands. `fits` says whether samples, given by
    their places, fill no more than one step's micro-batches. `names` is what messages call the
    samples.

    5 samples, 2 a step -> steps [0, 0, 1, 1, 2]
    """
    n = len(names)
    if n == 0 or (steps.samples is None and steps.tokens is None and steps.micro_batches is None):
        return np.zeros(n, np.int64)
    if groups is None:
        unit, size, weight = np.arange(n), np.ones(n, np.int64), tokens
    else:
        _, first, owner = np.unique(groups, return_index=True, return_inverse=True)
        renumber = np.empty(len(first), np.int64)
        renumber[np.argsort(first)] = np.arange(len(first))
        unit = renumber[owner]
        size = np.bincount(unit)
        weight = np.bincount(unit, weights=tokens).astype(np.int64)
    if steps.samples is not None:
        if groups is not None:
            check_groups(groups[np.sort(first)], size, steps.samples)
        return next_fit_kernel(size, steps.samples)[unit]
    if steps.tokens is not None:
        return next_fit_kernel(weight, steps.tokens)[unit]
    by_unit = np.argsort(unit, kind="stable")
    ends = np.concatenate(([0], np.cumsum(size)))
    step_of_unit = np.empty(len(size), np.int64)
    begin, step = 0, 0
    while begin < len(size):
        here = by_unit[ends[begin] :]
        count = most_units(ends[begin:] - ends[begin], partial(_fits_first, fits, here))
        assert count is not None
        if count == 0:
            at = here[0]
            whose = f"sample {names[at]}" if groups is None else f"group {groups[at]}"
            raise too_large(whose, int(weight[begin]), steps)
        step_of_unit[begin : begin + count] = step
        begin, step = begin + count, step + 1
    return step_of_unit[unit]


def _fits_first(fits: Callable[[IntArray], bool], samples: IntArray, count: int) -> bool:
    return fits(samples[:count])


def check_groups(groups: IntArray, sizes: IntArray, most: int) -> None:
    """Refuse a group of more samples than a step holds.

    groups [7, 5] of sizes [1, 3], at most 2 a step -> group 5 is refused
    """
    large = int(np.argmax(sizes))
    if sizes[large] > most:
        raise PlanError(
            f"group {groups[large]} has {sizes[large]} samples but a step holds {most}; it could "
            f"never stay together. Raise steps.samples or use smaller groups."
        )


def too_large(whose: str, tokens: int, steps: Steps) -> PlanError:
    """The error for what does not fit into a step of so many micro-batches by itself."""
    return PlanError(
        f"{whose} has {tokens} tokens, more than the {steps.micro_batches} micro-batches a rank of "
        f"one step hold; no step could take it. Raise steps.micro_batches or the budget."
    )


def most_units(
    offsets: IntArray, fits: Callable[[int], bool], *, complete: bool = True
) -> int | None:
    """How many leading units fit a step, where unit u holds samples `offsets[u]` onwards.

    Doubles until too many, then halves: what it finds depends on the samples it looks at, never
    on how many more there are. None where it would look at more than there are, and these are
    not `complete`.
    """
    count = len(offsets) - 1
    low, high = 0, 1
    while True:
        if high > count:
            if not complete:
                return None
            high = count
            if low == count or fits(int(offsets[count])):
                return count
            break
        if not fits(int(offsets[high])):
            break
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(int(offsets[middle])):
            low = middle
        else:
            high = middle
    return low


def first_step(amounts: IntArray, limit: int, *, complete: bool) -> int | None:
    """How many leading units the first step takes, when their amounts may add up to `limit`.

    A unit beyond the limit by itself is taken alone. Units of amount 0, which were dropped, go
    with what follows them. None where more units are needed to tell.

    >>> first_step(np.array([3, 2, 4]), 5, complete=False)
    2
    """
    total = np.cumsum(amounts)
    real = np.flatnonzero(amounts)
    if len(real) == 0:
        return 0 if complete else None
    count = int(np.searchsorted(total, limit, "right"))
    if count == len(amounts) and not complete and total[-1] < limit:
        return None
    taken = real[real < max(count, real[0] + 1)]
    return int(taken[-1]) + 1
