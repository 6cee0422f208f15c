"""Samples to segments: what becomes of a sample that is longer than a micro-batch can hold."""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe
from evenstep.core.segments import Segments
from evenstep.errors import PlanError


def cut_samples(lengths: IntArray, recipe: Recipe, names: IntArray) -> tuple[Segments, IntArray]:
    """(segments in sample order, the samples that were dropped).

    Splitting cuts pieces of the longest length that fits, the last one shorter: a sample of 20 at
    8 becomes 8, 8 and 4. `names` is what messages call the samples.
    """
    limit = recipe.longest_segment
    everything = np.arange(len(lengths))
    none = np.empty(0, np.int64)
    over = none if limit is None else np.flatnonzero(lengths > limit)
    if len(over) == 0 or recipe.overflow == "alone":
        return Segments(everything, np.zeros_like(lengths), lengths), none
    assert limit is not None
    if recipe.overflow == "error" or limit == 0:
        by = "" if recipe.limits.cost is None else " within limits.cost"
        what = "the budget" if recipe.limits.cost is None else "the budget or limits.cost"
        ways = "split, truncate, alone or drop" if limit else "alone"  # nothing else leaves a token
        raise PlanError(
            f"sample {names[over[0]]} has {lengths[over[0]]} tokens but a micro-batch holds "
            f"{limit}{by}; it could never run{_and_more(len(over))}. Raise {what}, or set overflow "
            f"to {ways}."
        )
    if recipe.overflow == "drop":
        kept = np.delete(everything, over)
        return Segments(kept, np.zeros_like(kept), lengths[kept]), over
    if recipe.overflow == "truncate":
        return Segments(everything, np.zeros_like(lengths), np.minimum(lengths, limit)), none
    pieces = -(-lengths // limit)
    sample = np.repeat(everything, pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = (np.arange(len(sample)) - first) * limit
    return Segments(sample, start, np.minimum(limit, lengths[sample] - start)), none


def _and_more(count: int) -> str:
    return f", and so with {count - 1} more" if count > 1 else ""
