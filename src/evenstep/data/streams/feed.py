"""Feed: samples that are still being made -> micro-batches, as soon as one can be filled."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from evenstep.core.micro_batch import MicroBatch
from evenstep.core.recipe import Recipe
from evenstep.data.sources.source import Sample, length_of
from evenstep.data.streams.pool import Entry, Measure, Pool, PoolBatcher, entries_of
from evenstep.errors import InputError, SampleError
from evenstep.planning.overflow import refusal

_LOOK = 0.5  # seconds


@dataclass(frozen=True, slots=True, eq=False)
class FedMicroBatch:
    """A micro-batch, its samples, and when each of them was made (`time.time()`)."""

    micro: MicroBatch
    samples: dict[int, Sample]
    born: dict[int, float]


class Feed:
    """A step that is filled while it runs: rollouts go in by `put`, micro-batches come out.

    Whoever makes samples calls `put` from any thread and `close` after the last; the runner
    iterates. A micro-batch comes out as soon as the pool holds enough for a full one, so that
    samples are as young as they can be, and the last ones when the feed is closed.

    >>> from evenstep import Packed
    >>> feed = Feed(Recipe(layout=Packed(max_tokens=4)))
    >>> for n in (3, 1, 2):
    ...     feed.put({"input_ids": [0] * n})
    >>> feed.close()
    >>> [sorted(fed.samples) for fed in feed]
    [[0, 1], [2]]
    """

    def __init__(
        self, recipe: Recipe, *, pool: Pool | None = None, length_of: Measure = length_of
    ) -> None:
        # Without a pool of the caller's, as many samples as a micro-batch takes are enough, too.
        self._samples = recipe.layout.samples if pool is None else None
        pool = _just_enough(recipe) if pool is None else pool
        self._batcher, self._length_of = PoolBatcher(recipe, pool), length_of
        self._waiting: list[Entry] = []
        self._born: dict[int, float] = {}
        self._count = 0
        self._closed = self._abandoned = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, sample: Sample, born: float | None = None) -> None:
        """Add a sample; `born` is when it was made, now if not given."""
        length = self._length_of(sample)
        pieces = self._batcher.segments(length) if length > 0 else None
        with self._changed:
            if self._closed:
                raise InputError(
                    "a sample was put into a feed that is closed, so it would never run. Put it "
                    "into the next step's feed."
                )
            if self._abandoned:
                raise InputError(
                    "a sample was put into a feed whose step has failed, so it would never run. "
                    "Put it into the next step's feed."
                )
            number = self._count
            if pieces is None:
                if length < 1:
                    raise SampleError(f"sample {number} has length {length}. Leave it out.")
                raise SampleError(refusal(number, length, self._batcher.recipe))
            self._count += 1
            self._born[number] = time.time() if born is None else born
            self._waiting += entries_of(0, number, sample, length, pieces)
            self._changed.notify_all()

    def close(self) -> None:
        """No more samples will come for this step."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Samples can no longer be made: raised where the next micro-batch would have been."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nobody will take micro-batches any more: `put` is an error, and iterating ends."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    @property
    def budget(self) -> int | None:
        """The most slots of a micro-batch."""
        return self._batcher.recipe.layout.budget

    @property
    def empty_micro_batch(self) -> MicroBatch:
        """A micro-batch with nothing in it, of a shape that the recipe's topology can cut."""
        return self._batcher.take([], 0)[0]

    def __iter__(self) -> Iterator[FedMicroBatch]:
        while True:
            with self._changed:
                while not self._changed.wait_for(self._ready, timeout=_LOOK):
                    pass  # Python runs, so that other threads can interrupt who waits here
                if self._failure is not None:
                    raise self._failure
                if self._abandoned or not self._waiting:
                    return
                micro, taken = self._batcher.take(self._waiting, 0)
                samples = {entry.number: entry.sample for entry in taken}
                born = {number: self._born[number] for number in samples}
            yield FedMicroBatch(micro, samples, born)

    def _ready(self) -> bool:
        count, pool = len(self._waiting), self._batcher.pool
        full = self._samples is not None and count >= self._samples
        if count >= pool.samples and not full:
            full = sum(entry.length for entry in self._waiting) >= self._batcher.enough
        return full or self._closed or self._abandoned or self._failure is not None


def _just_enough(recipe: Recipe) -> Pool:
    """A pool that gives a micro-batch as soon as it can be full."""
    layout = recipe.layout
    if layout.budget is None:
        return Pool(samples=layout.samples or 1, tokens=0)
    return Pool(samples=1, tokens=layout.budget)
