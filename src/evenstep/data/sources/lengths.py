"""Lengths: a source of lengths only, for callers that read the samples themselves."""

from __future__ import annotations

import hashlib
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray
from evenstep.errors import InputError

_ENTRIES = 4096  # of a column in its digest


class Lengths:
    """One length per sample, in memory or memory-mapped; never copied or scanned.

    >>> Lengths(np.array([5, 3, 4])).lengths_of(np.array([2, 0])).tolist()
    [4, 5]
    """

    def __init__(self, lengths: NDArray[np.integer]) -> None:
        given: object = lengths
        if not (isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu"):
            raise InputError(
                f"lengths must be a flat numpy array of integers, got {_what(lengths)}. Use "
                f"np.asarray(lengths), or np.load(..., mmap_mode='r') for a large file."
            )
        self._lengths = lengths

    @property
    def fingerprint(self) -> str:
        """Covers the number of lengths and 4096 of them, evenly spread."""
        return column_digest(self._lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items."""
        return self._lengths[items].astype(np.int64)

    def __getitem__(self, item: int) -> NoReturn:
        raise InputError(
            f"sample {item} cannot be read: the source holds only lengths. Read it from your own "
            f"dataset by its id, or pass the stream a source of samples."
        )


def column_digest(column: NDArray[np.integer]) -> str:
    """A digest of the length of a column and of 4096 entries, evenly spread.

    The cost does not depend on the length.
    """
    spread = np.linspace(0, max(len(column) - 1, 0), _ENTRIES).astype(np.int64)
    spread = spread[np.diff(spread, prepend=-1) > 0]
    seen = np.asarray(column[spread] if len(column) else column, "<i8")
    return hashlib.blake2b(b"%d " % len(column) + seen.tobytes(), digest_size=8).hexdigest()


def _what(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return f"a {type(value).__name__}"
