"""Overflow: what happens to samples that are longer than a micro-batch can hold."""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import IntArray, Segments, divided_up
from evenstep.core.recipe import Overflow, Recipe


def refused(lengths: IntArray, limit: int | None, overflow: Overflow) -> IntArray:
    """The samples longer than `limit`, if `overflow` does not say how to handle them."""
    if limit is None or overflow == "alone" or (overflow != "error" and limit > 0):
        return np.empty(0, np.int64)
    return np.flatnonzero(lengths > limit)


def segments_of(
    lengths: IntArray, limit: int | None, overflow: Overflow
) -> tuple[Segments, IntArray]:
    """(segments in sample order, the samples that are dropped). `refused` must be empty.

    Splitting gives segments of the longest length that fits, the last one shorter.

    >>> found, _ = segments_of(np.array([20, 3]), 8, "split")
    >>> found.start.tolist(), found.length.tolist()
    ([0, 8, 16, 0], [8, 8, 4, 3])
    """
    everything, none = np.arange(len(lengths)), np.empty(0, np.int64)
    over = none if limit is None else np.flatnonzero(lengths > limit)
    if len(over) == 0 or overflow == "alone":
        return Segments(everything, np.zeros_like(lengths), lengths), none
    assert limit, "samples that fit nowhere are refused"
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
    """The error message for a sample that is too long, and `more` others."""
    limit, by_cost = recipe.longest_segment, recipe.limits.cost is not None
    wider = recipe.layout.pad_to is None and not recipe.topology.equal_widths
    ways = [*(["split", "truncate", "drop"] if limit else []), *(["alone"] if wider else [])]
    remedy = f", or set overflow to {' or '.join(ways)}" if ways else ""
    others = f" ({more} more samples are too long)" if more else ""
    bound = "max_tokens" if recipe.layout.pad_to is None else "pad_to"
    bounds = [
        *([f"layout.{bound}"] if recipe.capacity else []),
        *(["limits.cost"] if by_cost else []),
    ]
    return (
        f"sample {name} has {length} tokens but a micro-batch holds "
        f"{limit}{' within limits.cost' if by_cost else ''}{others}. Raise "
        f"{' or '.join(bounds)}{remedy}."
    )
