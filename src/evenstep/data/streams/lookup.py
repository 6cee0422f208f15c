"""SampleLookup: samples by id. Unreadable ones raise, or are skipped and counted."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from evenstep.core.ragged import sample_name
from evenstep.core.text import one_of
from evenstep.data.sources.source import (
    Draw,
    Sample,
    SampleSource,
    cause_of,
    is_seeded,
    read_samples,
)
from evenstep.errors import InputError, SampleError

OnError: TypeAlias = Literal["raise", "skip"]

_MANY = 1000  # samples that cannot all be unreadable by chance


class SampleLookup:
    """Reads the samples of a planned stream. With `on_error="skip"` an unreadable one is None. That
    all samples are unreadable, or the first 1000, is an error.

    >>> from evenstep.data.sources.memory import InMemory
    >>> SampleLookup(InMemory(["zero", "one"]), "raise")[1]
    'one'
    """

    __iter__ = None  # indices are not tried one after another

    def __init__(self, source: SampleSource, on_error: OnError, seed: int = 0) -> None:
        one_of("on_error", on_error, OnError)
        self.source, self.on_error = source, on_error
        self.seed, self.epoch, self._seeded = seed, 0, is_seeded(source)
        self._tally = _Tally()

    def in_epoch(self, epoch: int) -> SampleLookup:
        """The samples as they are in this epoch."""
        if epoch == self.epoch or not self._seeded:
            return self
        other = copy.copy(self)
        other.epoch = epoch
        return other

    def __getitem__(self, sample_id: int) -> Sample | None:
        try:
            found = self._read(sample_id)
        except SampleError as error:
            if self.on_error == "raise":
                raise
            self._skip(sample_id, error)
            return None
        self._tally.any_read = True
        return found

    def _skip(self, sample_id: int, error: SampleError) -> None:
        tally = self._tally
        if not tally.first:
            tally.first = cause_of(error)
            warnings.warn(f"skipping unreadable samples. The first: {tally.first}", stacklevel=3)
        if tally.any_read:
            return
        tally.skipped.add(sample_id)
        if len(tally.skipped) >= min(len(self.source), _MANY):
            raise InputError(
                f"all of the first {len(tally.skipped)} samples were skipped. The first error: "
                f"{tally.first}"
            ) from error

    def _read(self, sample_id: int) -> Sample:
        draw = Draw(sample_id, self.epoch, self.seed) if self._seeded else None
        found = read_samples(self.source, sample_id, None, draw)
        if len(found) != 1:
            raise SampleError(
                f"item {sample_name(sample_id)} has {len(found)} samples; a planned stream expects "
                f"one per item. Use a PooledStream for items of several samples."
            )
        return found[0][1]


@dataclass(slots=True)
class _Tally:
    """What this process has read and skipped so far, over all epochs."""

    any_read: bool = False
    skipped: set[int] = field(default_factory=set)
    """Ids of the samples skipped before any was read. A sample is read for each part of it."""
    first: str = ""
