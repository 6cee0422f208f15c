"""Feed: samples that are still being produced -> micro-batches, as soon as one is full."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from evenstep.core.plan import MicroBatch
from evenstep.core.recipe import Recipe, check_recipe
from evenstep.core.text import MOST
from evenstep.data.pool import Entry, Measure, Pool, Segment, refuse_sharing
from evenstep.data.reader import PoolBatcher
from evenstep.data.source import Sample, length_of
from evenstep.errors import ConfigError, InputError, SampleError

# Producers ----------------------------------------------------------------------------------------


_GRACE = 5.0  # seconds after the last sample in which a feed is closed, once all have ended


def _fault(watched: list[Any], idle: float, timeout: float | None) -> SampleError | None:
    """Why no further sample can be expected although the feed is not closed, after `idle` seconds
    without one; else None."""
    outcomes = [_outcome(producer) for producer in watched]
    for _, reason, cause in outcomes:
        if reason:
            fault = SampleError(
                f"{reason} before the feed was closed, so samples of the step are missing. "
                f"Start it again, and put its samples into the feed of a new step."
            )
            fault.__cause__ = cause
            return fault
    if outcomes and all(ended for ended, _, _ in outcomes) and idle > _GRACE:
        return SampleError(
            f"all {len(outcomes)} producers of the feed have ended, but it was not closed. Call "
            f"close() after the last sample and fail(error) on an error, or produce samples "
            f"inside `with feed:`."
        )
    if timeout is not None and idle > timeout:
        return SampleError(
            f"the feed got no sample for {timeout:g} seconds and was not closed. Check its "
            f"producers, or raise timeout."
        )
    return None


def _outcome(producer: Any) -> tuple[bool, str, BaseException | None]:
    """(whether a producer has ended, how it failed or "", its error)."""
    if hasattr(producer, "done"):
        if not producer.done():
            return False, "", None
        if producer.cancelled():
            return True, "a future that fills the feed was cancelled", None
        error = producer.exception()
        return True, f"a future that fills the feed failed ({error!r})" if error else "", error
    if not hasattr(producer, "exitcode"):  # a thread; without an identity it was not started
        return producer.ident is not None and not producer.is_alive(), "", None
    status = producer.exitcode
    reason = f"the process {producer.name!r} ended with exit code {status}" if status else ""
    return status is not None, reason, None


# The feed -----------------------------------------------------------------------------------------


_WAKE_UP = 0.5  # seconds


@dataclass(frozen=True, slots=True, eq=False)
class FedMicroBatch:
    """A micro-batch, its samples by id, and when each was produced (`time.time()`).

    >>> from evenstep import Packed
    >>> feed = Feed(Recipe(layout=Packed(max_tokens=4)))
    >>> feed.put({"input_ids": [1, 2]}, born=0.0)
    >>> feed.close()
    >>> [(fed.micro.tokens, fed.born) for fed in feed]
    [(2, {0: 0.0})]
    """

    micro: MicroBatch
    samples: dict[int, Sample]
    born: dict[int, float]


class Feed:
    """A step whose samples arrive while it runs: `put` adds them, iterating gives micro-batches.

    Producers call `put` from any thread and `close` after the last sample; the runner iterates. A
    micro-batch is yielded as soon as the pool holds enough for a full one, so that samples are
    used early. The remaining samples follow when the feed is closed.

    With context-, tensor- or pipeline-parallel ranks, micro-batches depend on the samples and their
    order alone, not on when they are taken. Put the same samples in the same order on all ranks
    that share a batch.

    `with feed:` closes the feed at the end of the block and passes an error on to the runner. A
    producer that ends without `close` or `fail` would be waited for without end: pass its thread,
    process or future to `watch`, or set `timeout`, the most seconds without a new sample.

    >>> from evenstep import Packed
    >>> feed = Feed(Recipe(layout=Packed(max_tokens=4)))
    >>> for n in (3, 1, 2):
    ...     feed.put({"input_ids": [0] * n})
    >>> feed.close()
    >>> [sorted(fed.samples) for fed in feed]
    [[0, 1], [2]]
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        pool: Pool | None = None,
        length_of: Measure = length_of,
        timeout: float | None = None,
    ) -> None:
        check_recipe(recipe)
        refuse_sharing(recipe)
        if pool is not None and pool.warmup_tokens is not None:
            raise ConfigError(
                "pool.warmup_steps has no effect in a feed, which is one step. Leave it out."
            )
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"timeout must be above 0 seconds, got {timeout!r}.")
        self._samples = MOST
        if pool is None:  # then as many samples as fit also fill a micro-batch
            layout = recipe.layout
            _, most = layout.pack_bounds(recipe, np.array([recipe.topology.alignment]))
            self._samples = int(most[0]) * layout.packs_per_micro_batch
            just_enough = 1 if layout.budget is not None else layout.samples or 1
            pool = Pool(samples=just_enough, tokens=layout.budget or 0)
        self._batcher, self._length_of = PoolBatcher(recipe, pool), length_of
        topology = recipe.topology
        self._shared = topology.cp * topology.tp * topology.pp > 1
        self._formed: deque[FedMicroBatch] = deque()  # if shared, micro-batches not yet taken
        self._waiting: list[Entry] = []
        self._watched: list[Any] = []
        self._timeout = timeout
        self._active = time.monotonic()  # when a sample was put, or waiting for one began
        self._born: dict[int, float] = {}
        self._count = 0
        self._closed = self._abandoned = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, sample: Sample, born: float | None = None) -> None:
        """Add a sample; `born` is when it was produced (default: now)."""
        length = self._length_of(sample)
        with self._changed:
            ended = ""
            if self._closed:
                ended = "the feed is closed and takes no more samples"
            elif self._abandoned:
                ended = "the step of this feed has failed, so the feed takes no more samples"
            elif self._failure is not None:
                error = self._failure
                ended = (
                    f"producing samples for this feed has failed ({error!r}), so it takes no more"
                )
            if ended:
                raise InputError(f"{ended}. Put the sample into the feed of the next step.")
            sample_id = self._count
            if length < 1:
                raise SampleError(f"sample {sample_id} has length {length}; expected at least 1.")
            segment = Segment(0, length, length)
            self._waiting += self._batcher.entries(0, sample_id, sample, length, segment)
            self._count += 1
            self._born[sample_id] = time.time() if born is None else born
            self._active = time.monotonic()
            while self._shared and self._full():
                self._formed.append(self._taken())
            self._changed.notify_all()

    def close(self) -> None:
        """Declare that no more samples follow in this step."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close the feed, or pass an error on."""
        if error is None:
            self.close()
        else:
            self.fail(error)

    def watch(self, *producers: Any) -> None:
        """Raise in the runner if these threads, processes or futures end without closing the feed.

        A process with an exit code other than 0 or a future with an error fails the step at once.
        Otherwise it fails when all of them have ended and the feed is not closed soon after.
        """
        for producer in producers:
            if not hasattr(producer, "is_alive") and not hasattr(producer, "exception"):
                raise ConfigError(
                    f"expected a thread, a process or a future to watch, got "
                    f"{type(producer).__name__}."
                )
        with self._changed:
            self._watched += producers

    def fail(self, error: BaseException) -> None:
        """Report that producing samples failed. Iterating raises `error`."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Stop consuming: iterating ends, and `put` raises."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    @property
    def budget(self) -> int | None:
        """The most slots of a micro-batch."""
        return self._batcher.recipe.layout.budget

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of the recipe."""
        return self._batcher.recipe.topology.dp

    @property
    def context_ranks(self) -> int:
        """Context-parallel ranks of each of them, which divide its samples."""
        return self._batcher.recipe.topology.cp

    @property
    def empty_micro_batch(self) -> MicroBatch:
        """An empty micro-batch of a width that the recipe's topology can shard."""
        return self._batcher.take([], 0)[0]

    def __iter__(self) -> Iterator[FedMicroBatch]:
        while True:
            with self._changed:
                self._wait()
                if self._failure is not None:
                    raise self._failure
                if self._abandoned or not (self._formed or self._waiting):
                    return
                fed = self._formed.popleft() if self._formed else self._taken()
            yield fed
            del fed

    def _wait(self) -> None:
        """Wait for a full micro-batch or the end. Called with the lock."""
        self._active = time.monotonic()
        # Wake up regularly: for producers that ended, and so that signals can interrupt.
        while not self._changed.wait_for(self._ready, timeout=_WAKE_UP):
            idle = time.monotonic() - self._active
            self._failure = _fault(self._watched, idle, self._timeout)

    def _taken(self) -> FedMicroBatch:
        micro, taken = self._batcher.take(self._waiting, 0)
        samples = {entry.sample_id: entry.sample for entry in taken}
        return FedMicroBatch(micro, samples, {number: self._born[number] for number in samples})

    def _ready(self) -> bool:
        """Whether there is a micro-batch to take, or nothing to wait for."""
        there = bool(self._formed) or (not self._shared and self._full())
        return there or self._closed or self._abandoned or self._failure is not None

    def _full(self) -> bool:
        """Whether the waiting samples are enough for a micro-batch."""
        count, pool = len(self._waiting), self._batcher.pool
        if count >= self._samples:
            return True
        enough = self._batcher.enough
        return count >= pool.samples and sum(entry.length for entry in self._waiting) >= enough
