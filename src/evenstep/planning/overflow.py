"""Overflow: what becomes of a sample that is longer than a micro-batch can hold."""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Overflow, Recipe
from evenstep.core.rounding import divided_up
from evenstep.core.segments import Segments


def refused(lengths: IntArray, limit: int | None, overflow: Overflow) -> IntArray:
    """The samples that cannot run: longer than `limit`, and nothing may be done about it."""
    if limit is None or overflow == "alone" or (overflow != "error" and limit > 0):
        return np.empty(0, np.int64)
    return np.flatnonzero(lengths > limit)


def segments_of(
    lengths: IntArray, limit: int | None, overflow: Overflow
) -> tuple[Segments, IntArray]:
    """(segments in sample order, the samples that are dropped). None of them is refused.

    Splitting gives segments of the longest length that fits, the last one shorter.

    >>> found, _ = segments_of(np.array([20, 3]), 8, "split")
    >>> found.start.tolist(), found.length.tolist()
    ([0, 8, 16, 0], [8, 8, 4, 3])
    """
    everything, none = np.arange(len(lengths)), np.empty(0, np.int64)
    over = none if limit is None else np.flatnonzero(lengths > limit)
    if len(over) == 0 or overflow == "alone":
        return Segments(everything, np.zeros_like(lengths), lengths), none
    assert limit, "what nothing can hold is refused"
    if overflow == "drop":
        kept = np.delete(everything, over)
        return Segments(kept, np.zeros_like(kept), lengths[kept]), over
    if overflow == "truncate":
        return Segments(everything, np.zeros_like(lengths), np.minimum(lengths, limit)), none
    count = divided_up(lengths, limit)
    sample = np.repeat(everything, count)
    first = np.repeat(np.cumsum(count) - count, count)
    start = (np.arange(len(sample)) - first) * limit
    return Segments(sample, start, np.minimum(limit, lengths[sample] - start)), none


def refusal(name: object, length: int, recipe: Recipe, more: int = 0) -> str:
    """The sentence that refuses a sample, and `more` others."""
    limit, by_cost = recipe.longest_segment, recipe.limits.cost is not None
    wider = recipe.layout.pad_to is None and not recipe.topology.equal_widths
    ways = [*(["split", "truncate", "drop"] if limit else []), *(["alone"] if wider else [])]
    remedy = f", or set overflow to {' or '.join(ways)}" if ways else ""
    others = f" (and {more} more samples)" if more else ""
    return (
        f"sample {name} has {length} tokens but a micro-batch holds "
        f"{limit}{' within limits.cost' if by_cost else ''}{others}. Raise the budget"
        f"{' or limits.cost' if by_cost else ''}{remedy}."
    )
