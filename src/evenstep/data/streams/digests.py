"""Digests of what a source and its columns hold, at a cost that does not grow with their size."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray
from evenstep.data.sources.source import MeasuredSource

_ALL, _SOME = 2**18, 4096


def lengths_digest(source: MeasuredSource) -> str:
    """A digest of all lengths of up to 262,144 samples; of 4096, evenly spread, of more.

    A sample that was edited usually has another length.
    """
    return _digest(len(source), source.lengths_of(_spread(len(source))))


def values_digest(values: NDArray[Any]) -> str:
    """A digest of a column with one entry per sample, of as many entries as `lengths_digest`."""
    return _digest(len(values), values[_spread(len(values))])


def _spread(count: int) -> IntArray:
    if count <= _ALL:
        return np.arange(count)
    return np.linspace(0, count - 1, _SOME).astype(np.int64)


def _digest(count: int, seen: NDArray[Any]) -> str:
    numbers = seen.dtype.kind in "biuf"
    kept = seen.astype("<f8" if seen.dtype.kind == "f" else "<i8").tobytes() if numbers else b""
    body = kept if numbers else repr(seen.tolist()).encode()
    return hashlib.blake2b(b"%d " % count + body, digest_size=8).hexdigest()
