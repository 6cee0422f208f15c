"""InMemory: samples held in a sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.data.sources.source import Sample, check_items, length_of
from evenstep.errors import InputError

_ITEMS = 64  # in the fingerprint


class InMemory:
    """Samples held in a sequence. An item that is a `list` is several samples.

    If every item is one sample, the source knows its lengths. They are counted on first use.

    >>> source = InMemory([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    >>> len(source), source[1], source.lengths_of(np.array([1, 0])).tolist()
    (2, {'input_ids': [8]}, [1, 3])
    """

    def __init__(self, samples: Sequence[Sample | list[Sample]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, item: int, /) -> Sample | list[Sample]:
        if not 0 <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        return self._samples[item]

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items. Raises if an item of the source is several samples."""
        check_items(items, len(self))
        return self._lengths[items]

    @cached_property
    def fingerprint(self) -> str:
        """Covers the number of items and the tokens of up to 64 of them, evenly spread."""
        digest = hashlib.blake2b(f"memory {len(self)}".encode(), digest_size=16)
        spread = np.linspace(0, len(self) - 1, min(len(self), _ITEMS)).astype(np.int64)
        for item in spread.tolist():
            found = self._samples[item]
            samples = found if isinstance(found, list) else [found]
            digest.update(f" {item} {len(samples)}".encode())
            for sample in samples:
                digest.update(_content(sample))
        return digest.hexdigest()

    @cached_property
    def _lengths(self) -> IntArray:
        return np.array([_length(item, sample) for item, sample in enumerate(self._samples)], int)


def _length(item: int, sample: Sample) -> int:
    if isinstance(sample, list):
        raise InputError(
            f"item {item} is a list, that is several samples, so it has no single length. Pass one "
            f"mapping or array per item, or use a PooledStream."
        )
    try:
        return length_of(sample)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"item {item} has no length ({type(error).__name__}: {error}). Pass a mapping with "
            f"input_ids, or a sequence of tokens."
        ) from None


def _content(sample: Sample) -> bytes:
    """The length and tokens of a sample; only the length of values that are not integers."""
    tokens: Any = sample.get("input_ids") if isinstance(sample, Mapping) else sample
    try:
        size = len(tokens)
    except TypeError:
        return b" -"
    array = np.asarray(tokens)
    values = array.astype("<i8").tobytes() if array.dtype.kind in "biu" else b""
    return f" {size} ".encode() + values
