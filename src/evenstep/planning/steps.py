"""Steps: which samples belong to one optimizer update. Decided by order alone, before balance."""

from __future__ import annotations

from collections.abc import Callable

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
    most: int,
) -> IntArray:
    """The step of each of these samples: the next ones in order, groups never divided.

    A group takes its place where its first member stands. `fits` says whether samples, given by
    their places, fill no more than one step's micro-batches; `most` bounds how many tokens do, so
    that the search knows where to stop. `names` is what messages call the samples.

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
        if int(size.max()) > steps.samples:
            large = int(np.argmax(size))
            assert groups is not None
            name = groups[np.flatnonzero(unit == large)[0]]
            raise PlanError(
                f"group {name} has {size[large]} samples but a step holds {steps.samples}; it "
                f"could never stay together. Raise steps.samples or use smaller groups."
            )
        return next_fit_kernel(size, steps.samples)[unit]
    if steps.tokens is not None:
        return next_fit_kernel(weight, steps.tokens)[unit]
    by_unit = np.argsort(unit, kind="stable")
    ends = np.cumsum(size)
    total = np.concatenate(([0], np.cumsum(weight)))
    step_of_unit = np.empty(len(size), np.int64)
    begin, step = 0, 0
    while begin < len(size):
        # More tokens than `most` never fit; between one unit and that, search by halves.
        low = begin + 1
        high = max(low, int(np.searchsorted(total, total[begin] + most, "right")) - 1)
        from_sample = ends[begin - 1] if begin else 0
        if not fits(by_unit[from_sample : ends[begin]]):
            at = by_unit[from_sample]
            whose = f"sample {names[at]}" if groups is None else f"group {groups[at]}"
            raise PlanError(
                f"{whose} has {weight[begin]} tokens, more than the {steps.micro_batches} "
                f"micro-batches a rank of one step hold; no step could take it. Raise "
                f"steps.micro_batches or the budget."
            )
        while low < high:
            middle = (low + high + 1) // 2
            if fits(by_unit[from_sample : ends[middle - 1]]):
                low = middle
            else:
                high = middle - 1
        step_of_unit[begin:low] = step
        begin, step = low, step + 1
    return step_of_unit[unit]
