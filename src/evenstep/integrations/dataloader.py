"""Streams with torch's `DataLoader`: a dataset, and a loader that can be resumed."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evenstep.core.step import Cursor, Step
from evenstep.core.text import truth_value, whole_number
from evenstep.data.planned import PlannedStream, Progress
from evenstep.data.pooled import PooledStream
from evenstep.data.stream import Stream
from evenstep.errors import ConfigError, CursorError
from evenstep.integrations.dispatching import refuse_dispatching
from evenstep.integrations.last_steps import LastSteps
from evenstep.integrations.parcel import Parcel, register
from evenstep.integrations.run_state import Gather
from evenstep.train.collectives import Distributed
from evenstep.train.step_checks import check_fingerprints

__all__ = ["StreamDataset", "StreamLoader"]


Collate = Callable[[Any, Mapping[int, Any]], Any]

_RESERVED = ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last", "collate_fn")


class StreamDataset(IterableDataset):  # type: ignore[misc]
    """A stream as a torch dataset: `DataLoader(StreamDataset(stream), batch_size=None, ...)`.

    Each item is a `Step` with its samples, or with `collate` its batches, read in the worker.
    Workers take turns with the steps of their rank. The cursor of a step from a planned stream is
    the whole position. From a pooled stream it is the position of the worker only; `StreamLoader`
    merges those of all workers.

    `state_dict` and `load_state_dict` are for torchdata's `StatefulDataLoader`, which keeps one
    state per worker. `set_epoch` also reaches persistent workers.

    capped  whether each worker stops at `max_num_steps` by its own count. It stops too early if
            other workers have ended before; pass False if the caller counts steps
    """

    def __init__(
        self, stream: Stream, collate: Collate | None = None, *, capped: bool = True
    ) -> None:
        super().__init__()
        self.stream, self.collate = stream, collate
        self._capped = truth_value("capped", capped)
        # Shared with the workers: the epoch that was set last, and the steps done before it.
        self._epoch = torch.tensor([-1, 0], device="cpu").share_memory_()
        self._applied: list[int] = [-1, 0]
        self._now: Cursor | None = None
        self._turn: int | None = None  # of the state that was loaded into this worker

    def __iter__(self) -> Iterator[Step]:
        # Not in a generator: the state may be read before the first step.
        refuse_dispatching(dataset=self)
        worker, workers = _worker()
        if get_worker_info() is not None:
            register()
        epoch = self._epoch.tolist()
        if epoch != self._applied:
            self._applied, self._turn = epoch, None
            self.stream.set_epoch(*epoch)
        self._now = None
        return self._prepared(self.stream.walk(worker, workers, self._turn))

    def _prepared(self, steps: Iterator[Step]) -> Iterator[Step]:
        most = self.stream.max_num_steps
        for step in steps:
            if self._capped and most is not None and step.number >= most:
                return
            ready = step.loaded() if self.collate is None else step.collated(self.collate)
            self._now = step.cursor
            yield ready

    def __len__(self) -> int:
        """Steps of one pass: exact for planned streams, otherwise an estimate."""
        return _num_steps(self.stream)

    def set_epoch(self, epoch: int, done: int | None = None) -> None:
        """Start the next iteration at the beginning of `epoch` in all workers, or at a position
        within it that was loaded and not iterated yet."""
        self.stream.set_epoch(epoch, done)
        self._applied = [epoch, self.stream.done]
        self._turn = None
        self._epoch.copy_(torch.tensor(self._applied))

    def skip_batches(self, steps: int) -> None:
        """Start `steps` steps later."""
        self.stream.skip_batches(steps)

    def state_dict(self) -> dict[str, Any]:
        """The position of this worker after the step that it yielded last."""
        _, workers = _worker()
        if self._now is not None:
            return {"cursor": self._now.to_dict(), "turn": workers - 1, "workers": workers}
        if self._turn is not None:  # the worker's own state was loaded
            cursor = self.stream.state_dict()
        else:
            cursor = self.stream.start(workers).to_dict()
        return {"cursor": cursor, "turn": self._turn, "workers": workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start after the step that the state was taken at. The state is a cursor, or in a worker
        the result of its own `state_dict`."""
        given: object = state
        if not isinstance(given, Mapping) or "cursor" not in state:
            self.stream.load_state_dict(state)
            self._turn = None
            return
        _, workers = _worker()
        if state.get("workers") != workers:
            raise CursorError(
                f"the state was taken with {state.get('workers')} workers, but now there are "
                f"{workers}. Keep the number of workers, or load the cursor of a step, which fits "
                f"any number."
            )
        self.stream.load_state_dict(state["cursor"])
        self._turn = state["turn"]


class _SentDataset(StreamDataset):
    """Pickles steps in the worker's main thread, so that one that cannot be sent is an error."""

    def _prepared(self, steps: Iterator[Step]) -> Iterator[Any]:
        alone = get_worker_info() is None
        return (step if alone else Parcel(step) for step in super()._prepared(steps))


class StreamLoader:
    """The steps of this rank, prepared ahead by workers, each with the cursor after it.

    Wraps torch's `DataLoader`; `options` are passed to it (`prefetch_factor`,
    `persistent_workers`, `multiprocessing_context`, ...). `state_dict` is the position after the
    step that was yielded last, regardless of what the workers have prefetched.

    anyone    for finite pooled streams on several ranks: `anyone(mine)` returns whether any rank
              has another step (see `until_all_end`). By default an all-reduce of torch.distributed
    gather    for the same: an all-gather of objects. What is left when the first rank ends is then
              shared by all, so that they end together. By default that of torch.distributed, if
              `anyone` is not given. Sequential sources are not shared: they would be read again
    progress  `progress(done, total)` is called while `len` counts the steps of a planned stream

    If torch.distributed is initialised with as many processes as the stream has ranks, the first
    iteration compares the ranks' data, order, seed, recipe and position, and raises on all of them
    if one differs. All ranks must iterate then.

    >>> from evenstep import Packed, Recipe, Steps
    >>> from evenstep.data import InMemory
    >>> from evenstep.data.planned import PlannedStream
    >>> source = InMemory([{"input_ids": [7] * n} for n in (5, 3, 4, 2)])
    >>> recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=2))
    >>> loader = StreamLoader(PlannedStream(source, recipe, shuffle=False))
    >>> [sorted(step.samples) for step in loader], loader.state_dict()["step"]
    ([[0, 1], [2, 3]], 2)
    """

    def __init__(
        self,
        stream: Stream,
        *,
        collate: Collate | None = None,
        num_workers: int = 0,
        anyone: Callable[[bool], bool] | None = None,
        gather: Gather | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        _check_options(options)
        self.stream = stream
        self.num_workers = whole_number("num_workers", num_workers, least=0)
        self._dataset = _SentDataset(stream, collate, capped=False)
        self._options = options
        self._anyone, self._gather, self._progress = anyone, gather, progress
        self._loader: Any = None
        self._now: Cursor | None = None
        self._compared = False

    def __iter__(self) -> Iterator[Step]:
        # Includes the start of every worker, also of those that have not yielded a step yet.
        self._now = start = self.stream.start(max(1, self.num_workers))
        if not self._compared:
            _compare(self.stream, start)
            self._compared = True
        if self._loader is None:
            self._loader = self._made(self._dataset, start, **self._options)
        ready, now = [_iterator(self._loader)], [start]
        steps: Iterator[Step] = _received(ready[0])
        stream, collate = self.stream, self._dataset.collate
        if not (stream.infinite_loop or stream.ends_together):

            def share(cursors: list[Cursor]) -> Iterator[Step]:
                assert isinstance(stream, PooledStream)
                now.append(stream.shared(cursors, max(1, self.num_workers)))
                ready.append(_iterator(self._rest(stream, now[-1])))
                return _received(ready[-1])

            can_share = isinstance(stream, PooledStream) and stream.can_share
            last = LastSteps(
                self._anyone, self._gather, stream.recipe, share if can_share else None, now
            )
            steps = last.until_all_end(steps)
        most = stream.max_num_steps
        left = None if most is None else max(most - start.step, 0)
        try:
            for number, step in enumerate(islice(steps, left), start.step):
                if collate and step.batches is None:  # an empty step after the end
                    step = step.collated(collate)
                if self.num_workers and isinstance(stream, PooledStream):
                    stream.observe(step)
                mine = stream.join([now[-1], step.cursor]) if step.cursor.place else now[-1]
                now[:] = [replace(mine, step=number + 1)]
                self._now = now[-1]
                yield replace(step, number=number, cursor=now[-1])
        finally:
            # An error that torch re-raises keeps its workers alive in a reference cycle.
            if self.num_workers and self._options.get("persistent_workers"):
                del ready[0]
            for each in ready if self.num_workers else ():
                each._shutdown_workers()

    def _made(self, dataset: _SentDataset, start: Cursor, **options: Any) -> Any:
        # A separate generator: drawing from torch's would change the dropout of a resumed run.
        seeds = torch.Generator().manual_seed(_seed_of_workers(start))
        own = {"batch_size": None, "num_workers": self.num_workers, "generator": seeds}
        return DataLoader(dataset, **{**own, **options})

    def _rest(self, stream: PooledStream, start: Cursor) -> Any:
        """A loader of the same stream from another start, which leaves that of the stream."""
        rest = copy.copy(stream)
        rest.load_state_dict(start.to_dict())
        dataset = _SentDataset(rest, self._dataset.collate, capped=False)
        return self._made(dataset, start, **{**self._options, "persistent_workers": False})

    def __len__(self) -> int:
        """Steps of one pass. Exact for planned streams, counted once without reading samples;
        otherwise an estimate."""
        return _num_steps(self.stream, self._progress)

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the step that was yielded last."""
        now = self.stream.start(max(1, self.num_workers)) if self._now is None else self._now
        return now.to_dict()

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Start after the step that the state was taken at. `allow` names settings of a pooled
        stream that may have changed since; see `PooledStream.load_state_dict`."""
        self.stream.load_state_dict(state, allow)
        self._compared = False
        self._loader, self._now = None, None  # persistent workers have a copy of the old stream

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`, or at a position within it that
        was loaded and not iterated yet."""
        done = None if self._now is None else self._now.step
        self._dataset.set_epoch(epoch, done)
        self._now = None

    def skip_batches(self, steps: int) -> None:
        """Start `steps` steps later."""
        self.stream.skip_batches(steps)
        self.load_state_dict(self.stream.start(max(1, self.num_workers)).to_dict())


def _num_steps(stream: Stream, progress: Progress | None = None) -> int:
    """Steps of one pass. Counts those of the epoch if they are not known otherwise."""
    if not isinstance(stream, PlannedStream) or stream.infinite_loop:
        return len(stream)
    if stream.steps_in_every_epoch is None:
        stream.epoch_size(stream.start().place["epoch"], progress=progress)
    return len(stream)


def _iterator(loader: Any) -> Any:
    with torch.device("cpu"):  # torch draws the seeds of workers on the default device
        return iter(loader)


def _compare(stream: Stream, start: Cursor) -> None:
    """Raise on all ranks if one has another stream or position. Positions of a pooled stream
    differ; only the number of steps is the same."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if not 1 < stream.world.size == distributed.get_world_size():
        return  # without a process group, or other ranks are tensor- or context-parallel
    place = {} if isinstance(stream, PooledStream) else start.place
    text = f"{stream.fingerprint} {start.step} {place}".encode()
    check_fingerprints(hashlib.blake2b(text, digest_size=8).hexdigest(), Distributed())


def _received(steps: Iterator[Step]) -> Iterator[Step]:
    """The steps from workers. A worker that dies after it has announced a step, but before its
    memory has been handed over, appears as a broken connection."""
    try:
        yield from steps
    except (EOFError, ConnectionError) as error:
        if str(error).startswith("Caught "):  # an error of the worker's own, as torch raises it
            raise
        raise RuntimeError(
            "a DataLoader worker exited unexpectedly while it sent a step. Look for its error "
            "message above, and resume from the last cursor."
        ) from error


def _check_options(options: Mapping[str, Any]) -> None:
    reserved = [name for name in _RESERVED if name in options]
    if reserved:
        raise ConfigError(
            f"{reserved[0]} cannot be set, because the stream determines the samples of a step and "
            f"their order. Remove it; to make tensors, pass `collate`."
        )
    for name in ("in_order", "persistent_workers", "pin_memory"):
        truth_value(name, options.get(name, False))
    if not options.get("in_order", True):
        raise ConfigError(
            "in_order must be True: a cursor cannot express steps that are done out of order. "
            "Remove the option."
        )


def _seed_of_workers(start: Cursor) -> int:
    """Differs between ranks and starts, so that a resumed run does not repeat random numbers."""
    text = f"{torch.initial_seed()} {start.to_dict()['digest']}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def _worker() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
