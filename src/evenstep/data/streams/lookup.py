"""SampleLookup: samples by id. Unreadable ones raise, or are skipped and counted."""

from __future__ import annotations

import warnings
from typing import Literal, TypeAlias

from evenstep.core.identity import sample_name
from evenstep.core.validate import one_of
from evenstep.data.sources.source import Draw, Sample, SampleSource, is_seeded, read_samples
from evenstep.errors import SampleError

OnError: TypeAlias = Literal["raise", "skip"]


class SampleLookup:
    """Reads the samples of a planned stream. With `on_error="skip"` an unreadable one is None.

    >>> from evenstep.data.sources.memory import InMemory
    >>> SampleLookup(InMemory(["zero", "one"]), "raise")[1]
    'one'
    """

    def __init__(
        self, source: SampleSource, on_error: OnError, seed: int = 0, epoch: int = 0
    ) -> None:
        one_of("on_error", on_error, OnError)
        self.source, self.on_error = source, on_error
        self.seed, self.epoch, self._seeded = seed, epoch, is_seeded(source)
        self.skipped: list[int] = []
        """Ids of the samples that this process could not read so far."""

    def in_epoch(self, epoch: int) -> SampleLookup:
        """The samples as they are in this epoch; `skipped` is shared."""
        if epoch == self.epoch or not self._seeded:
            return self
        other = SampleLookup(self.source, self.on_error, self.seed, epoch)
        other.skipped = self.skipped
        return other

    def __getitem__(self, sample_id: int) -> Sample | None:
        try:
            return self._read(sample_id)
        except SampleError as error:
            if self.on_error == "raise":
                raise
            if not self.skipped:
                warnings.warn(f"skipping unreadable samples. The first: {error}", stacklevel=2)
            self.skipped.append(sample_id)
            return None

    def _read(self, sample_id: int) -> Sample:
        draw = Draw(sample_id, self.epoch, self.seed) if self._seeded else None
        found = read_samples(self.source, sample_id, None, draw)
        if len(found) != 1:
            raise SampleError(
                f"item {sample_name(sample_id)} has {len(found)} samples; a planned stream expects "
                f"one per item. Use a PooledStream for items of several samples."
            )
        return found[0][1]
