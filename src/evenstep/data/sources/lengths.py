"""Lengths: a source of which only the lengths are known, for whoever reads samples elsewhere."""

from __future__ import annotations

import hashlib
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray
from evenstep.errors import InputError

_LOOKS = 4096


class Lengths:
    """One length per sample, in memory or memory-mapped; looked up, never copied or scanned.

    >>> Lengths(np.array([5, 3, 4])).lengths_of(np.array([2, 0])).tolist()
    [4, 5]
    """

    def __init__(self, lengths: NDArray[np.integer]) -> None:
        given: object = lengths
        if not (isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu"):
            raise InputError(
                f"lengths are {_what(lengths)}, so samples could not be looked up by number. Pass "
                f"a flat numpy array of integers (np.load(..., mmap_mode='r') for a large one)."
            )
        self._lengths = lengths

    @property
    def fingerprint(self) -> str:
        """Of the count and some thousand lengths, evenly spread."""
        return column_digest(self._lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items."""
        return self._lengths[items].astype(np.int64)

    def __getitem__(self, item: int) -> NoReturn:
        raise InputError(
            f"sample {item} was asked for, but of this stream only lengths are known. Read it "
            f"from your own dataset by its number, or give the stream a source of samples."
        )


def column_digest(column: NDArray[np.integer]) -> str:
    """A digest of the height of a column and of some thousand entries, evenly spread.

    Cheap for any height, so that a stream over a billion samples starts at once.
    """
    places = np.unique(np.linspace(0, max(len(column) - 1, 0), _LOOKS).astype(np.int64))
    seen = np.asarray(column[places] if len(column) else column, "<i8")
    return hashlib.blake2b(b"%d " % len(column) + seen.tobytes(), digest_size=8).hexdigest()


def _what(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and type {value.dtype}"
    return f"a {type(value).__name__}"
