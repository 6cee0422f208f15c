"""Checks of lengths that a source knows, before anything is read."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

from evenstep.core.recipe import Recipe
from evenstep.data.sources.source import MeasuredSource, Source, has_random_access
from evenstep.errors import InputError, SampleError
from evenstep.planning.overflow import refusal, refused

_CHUNK, _SAMPLED = 1 << 20, 4096


def knows_lengths(source: Source) -> TypeGuard[MeasuredSource]:
    """Whether the source knows the lengths of all its items, each of which is one sample."""
    if not (has_random_access(source) and hasattr(source, "lengths_of")):
        return False
    try:
        source.lengths_of(np.arange(min(1, len(source))))
    except InputError:  # an item of several samples, or one without a length
        return False
    return True


def check_lengths(source: MeasuredSource, recipe: Recipe) -> None:
    """Raise if a sample is empty or too long for the recipe."""
    limit, first, count = recipe.longest_segment, None, 0
    for begin in range(0, len(source), _CHUNK):
        items = np.arange(begin, min(begin + _CHUNK, len(source)))
        lengths = source.lengths_of(items)
        if len(lengths) and lengths.min() < 1:
            at = int(np.argmax(lengths < 1))
            raise SampleError(
                f"sample {begin + at} has length {lengths[at]}; expected at least 1. Remove it, or "
                f"skip such samples with on_error='skip' of a PooledStream."
            )
        long = refused(lengths, limit, recipe.overflow)
        count += len(long)
        if len(long) and first is None:
            first = begin + int(long[0]), int(lengths[long[0]])
    if first is not None:
        raise SampleError(refusal(*first, recipe, more=count - 1))


def estimated_tokens(source: MeasuredSource) -> float:
    """The number of tokens of all samples, from the lengths of up to 4096 of them."""
    if not len(source):
        return 0.0
    spread = np.linspace(0, len(source) - 1, min(len(source), _SAMPLED)).astype(np.int64)
    return float(source.lengths_of(spread).mean()) * len(source)
