"""InMemory: samples that are already there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.data.sources.source import Sample, check_items, length_of
from evenstep.errors import InputError

_LOOKED_AT = 64


class InMemory:
    """Samples held in a sequence. An item that is a `list` is several samples.

    Where every item is one sample, their lengths are counted once, when they are first asked for.

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
        """The lengths of these items. Items of several samples have none."""
        check_items(items, len(self))
        return self._lengths[items]

    @cached_property
    def fingerprint(self) -> str:
        """Judged by the number of items and the tokens of up to 64 of them, evenly spread."""
        digest = hashlib.blake2b(f"memory {len(self)}".encode(), digest_size=16)
        looked_at = np.linspace(0, len(self) - 1, min(len(self), _LOOKED_AT)).astype(np.int64)
        for item in looked_at.tolist():
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
            f"item {item} is a list, which stands for several samples, so its length cannot be "
            f"planned with. Pass one mapping or array per item, or read them with a PooledStream."
        )
    try:
        return length_of(sample)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"item {item} has no length ({type(error).__name__}: {error}), so it cannot be "
            f"planned. Give it input_ids."
        ) from None


def _content(sample: Sample) -> bytes:
    """The tokens of a sample; of anything else only its length, for its text may not be stable."""
    tokens: Any = sample.get("input_ids") if isinstance(sample, Mapping) else sample
    try:
        size = len(tokens)
    except TypeError:
        return b" -"
    array = np.asarray(tokens)
    values = array.astype("<i8").tobytes() if array.dtype.kind in "biu" else b""
    return f" {size} ".encode() + values
