"""EpochSource: reads any source by epoch and position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from evenstep.core.ragged import IntArray, item_and_part
from evenstep.core.text import truth_value
from evenstep.data.sources.source import (
    Draw,
    MeasuredSource,
    Sample,
    SequentialSource,
    Source,
    has_random_access,
    is_seeded,
    read_samples,
)
from evenstep.data.streams.order import EpochOrder
from evenstep.errors import ConfigError, CursorError


class EpochSource:
    """The items of an epoch by position; reads them, and samples that were read before.

    A source with random access is read in the epoch's order. A sequential source is read in its
    own order, and opened again to go back.
    """

    def __init__(self, source: Source, seed: int, shuffle: bool, measured: bool = False) -> None:
        self.source, self.seed, self.shuffle = source, seed, shuffle
        self.count = len(source) if has_random_access(source) else None
        self.measured = measured
        """Whether the lengths of all items are known."""
        self.failed = False
        """Whether the source's iterator raised. It is finished then, so nothing can be skipped."""
        self.seeded = is_seeded(source)
        """Whether samples differ between epochs."""
        self._open: Iterator[Any] | None = None
        self._at = (-1, -1)  # epoch, position of the next raw item
        self._again_for = (-1, -1)  # epoch, item that was read again last
        self._again: list[tuple[int, Sample]] = []

    def length_of_item(self, item: int) -> int:
        """The length of an item, if the source knows it."""
        assert self.measured
        return int(cast("MeasuredSource", self.source).lengths_of(np.array([item]))[0])

    def items(self, epoch: int, positions: IntArray) -> list[int]:
        """The items at these positions."""
        if self.count is not None:
            order = EpochOrder(count=self.count, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
            positions = order.samples(positions)
        items: list[int] = positions.tolist()
        return items

    def read(self, epoch: int, item: int) -> list[tuple[int, Sample]] | None:
        """(sample id, sample) of every sample of an item; None past an end that was unknown."""
        draw = Draw(item, epoch, self.seed) if self.seeded else None
        if self.count is not None:
            return read_samples(self.source, item, None, draw)
        found, raw = self._raw(epoch, item)
        return read_samples(self.source, item, raw, draw) if found else None

    def again(self, epoch: int, sample_id: int) -> Sample:
        """A sample that was read before. Consecutive samples of one item are read once."""
        item, part = item_and_part(sample_id)
        if self._again_for != (epoch, item):
            self._again = self.read(epoch, item) or []
            self._again_for = (epoch, item)
        samples = self._again
        if part >= len(samples):
            raise CursorError(
                f"item {item} now has {len(samples)} samples, but the cursor names sample {part} "
                f"of it, so the data has changed. Restore the data, or start without the cursor."
            )
        return samples[part][1]

    def _raw(self, epoch: int, position: int) -> tuple[bool, Any]:
        """(whether there is an item, the raw item) at a position of a sequential source."""
        assert isinstance(self.source, SequentialSource)
        if self._open is None or self._at[0] != epoch or self._at[1] > position:
            self._open = self.source.open(position, epoch)
            self._at = (epoch, position)
        while True:
            try:
                raw = next(self._open)
            except StopIteration:
                self._open = None
                return False, None
            except BaseException:
                self.failed = True
                raise
            here = self._at[1]
            self._at = (epoch, here + 1)
            if here == position:
                return True, raw


def shuffles(source: Source, given: bool | None) -> bool:
    """Whether the epoch's order is shuffled: by default, if items can be read in any order."""
    by_index = has_random_access(source)
    found = by_index if given is None else truth_value("shuffle", given)
    if found and not by_index:
        raise ConfigError(
            f"shuffle=True has no effect on {type(source).__name__}, which is read in its own "
            f"order. Shuffle inside it (Hugging Face: dataset.shuffle(seed, buffer_size)), or use "
            f"a source with items by index, and omit shuffle."
        )
    return found
