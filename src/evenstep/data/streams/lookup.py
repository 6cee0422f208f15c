"""SampleLookup: samples by number, with what cannot be read either raised or skipped and counted."""

from __future__ import annotations

from typing import Literal, TypeAlias

from evenstep.core.identity import sample_name
from evenstep.core.validate import one_of
from evenstep.data.sources.source import Sample, SampleSource, read_samples
from evenstep.errors import SampleError

OnError: TypeAlias = Literal["raise", "skip"]


class SampleLookup:
    """Reads the samples of a planned stream. With `on_error="skip"` a bad one reads as None.

    >>> from evenstep.data.sources.memory import InMemory
    >>> SampleLookup(InMemory(["zero", "one"]), "raise")[1]
    'one'
    """

    def __init__(self, source: SampleSource, on_error: OnError) -> None:
        one_of("on_error", on_error, OnError)
        self.source, self.on_error = source, on_error
        self.skipped: list[int] = []
        """The samples that could not be read by this process so far."""

    def __getitem__(self, number: int) -> Sample | None:
        try:
            return self._read(number)
        except SampleError:
            if self.on_error == "raise":
                raise
            self.skipped.append(number)
            return None

    def _read(self, number: int) -> Sample:
        found = read_samples(self.source, number)
        if len(found) != 1:
            raise SampleError(
                f"item {sample_name(number)} holds {len(found)} samples but was planned as one by "
                f"its length, so its tokens cannot be matched. Use a PooledStream for items of "
                f"several samples."
            )
        return found[0][1]
