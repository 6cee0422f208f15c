"""Streams with torch's `DataLoader`: a dataset, and a loader that can be resumed."""

from __future__ import annotations

import copy
import hashlib
import io
import math
import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice, pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evenstep.core.recipe import Recipe
from evenstep.core.step import Cursor, Step
from evenstep.core.text import truth_value, whole_number
from evenstep.data.planned import PlannedStream, Progress
from evenstep.data.pooled import PooledStream
from evenstep.data.stream import Stream, empty_step
from evenstep.errors import ConfigError, CursorError
from evenstep.integrations.run_state import Gather, all_gather
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
        self._loaded: dict[str, Any] = {}  # its cursor

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
            cursor = self._loaded
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
        self._turn, self._loaded = state["turn"], dict(state["cursor"])


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
    >>> from evenstep.data.dataset import InMemory
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


_NOWHERE = Cursor(belongs={}, step=0, place={})

Share = Callable[[list[Cursor]], Iterator[Step]]
"""From the cursors of all ranks to the steps of this rank, if what is left is shared anew."""


@dataclass(frozen=True)
class LastSteps:
    """Steps of this rank until all ranks have ended.

    When the first rank has no step left, what is left on the others is shared by all. This happens
    again until less than a step is left; then ranks without work get empty steps. A rank that
    shares drops the step that it has at hand, which has not run yet.

    anyone  `anyone(mine)` returns whether any rank has a step; default: torch.distributed
    gather  an all-gather of objects; default: torch.distributed, if `anyone` is not given
    """

    anyone: Callable[[bool], bool] | None
    gather: Gather | None
    recipe: Recipe
    share: Share | None
    """None if the source cannot be shared anew."""
    now: list[Cursor] = field(default_factory=list)
    """The cursor of this rank after its last step."""

    def until_all_end(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps, then those of a share, or empty ones."""
        before: Step | None = None
        shared_at = -1
        while True:
            step = next(steps, None)
            some, every = self._ranks_with_steps(step is not None)
            if not some:
                return
            at = self.now[-1].step
            if not every and self._gather is not None and self.share and at != shared_at:
                shared_at = at
                states = self._gather(self.now[-1].to_dict())
                steps = self.share([Cursor.from_dict(state) for state in states])
                continue
            if step is None:  # the position is `now`, also after a share
                step = replace(empty_step(before, self.recipe), cursor=_NOWHERE)
            before = step
            yield step

    @property
    def _gather(self) -> Gather | None:
        return all_gather if self.gather is None and self.anyone is None else self.gather

    def _ranks_with_steps(self, mine: bool) -> tuple[bool, bool]:
        """Whether any rank has a step, and whether every rank has."""
        if self.anyone is not None:
            some = self.anyone(mine)
            return some, self.gather is None or not some or not self.anyone(not mine)
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigError(
                "ranks of a finite pooled stream must agree on its end, but there is no process "
                "group. Initialise torch.distributed, pass `anyone`, or set infinite_loop=True "
                "with max_num_steps."
            )
        count = torch.tensor([int(mine)])
        if distributed.get_backend() == "nccl":
            count = count.cuda()
        distributed.all_reduce(count)
        return bool(count > 0), int(count) == distributed.get_world_size()


_ALIGN = 64  # bytes: suits any dtype, and the size of a cache line
_DTYPES = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
}  # fmt: skip


def register() -> None:
    """Let queues of `torch.multiprocessing` send steps as parcels, in this process.

    Loaders call it in their workers, so that importing this module has no effect on pickling.
    """
    ForkingPickler.register(Step, lambda step: Parcel(step).__reduce__())


class Parcel:
    """A pickled step. Unpickling it gives the step.

    The constructor pickles, so that its errors (out of memory, something that cannot be pickled)
    are raised to the caller. A queue pickles in a thread, which prints errors and drops the step.
    """

    def __init__(self, step: Step) -> None:
        file = io.BytesIO()
        pickler = _TensorPickler(file)
        pickler.dump({field.name: getattr(step, field.name) for field in fields(step)})
        memory = torch.empty(pickler.size, dtype=torch.uint8, device="cpu")
        if pickler.size:
            memory.share_memory_()
        for span, tensor in zip(pickler.spans, pickler.tensors, strict=True):
            span.of(memory).copy_(tensor)
        self._arguments = (file.getvalue(), pickler.spans, memory)

    def __reduce__(self) -> tuple[Callable[..., Step], tuple[bytes, list[TensorSpan], Tensor]]:
        return unpacked, self._arguments


def unpacked(pickled: bytes, spans: list[TensorSpan], memory: Tensor) -> Step:
    """The step in a parcel."""
    return Step(**_TensorUnpickler(pickled, [span.of(memory) for span in spans]).load())


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where a tensor is in the memory of a parcel."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        """The tensor over this memory. Not a view: pickling a view would pickle all of it."""
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat = torch.frombuffer(memory.numpy(), dtype=self.dtype, count=count, offset=self.start)
        return flat.view(self.shape)


class _TensorPickler(ForkingPickler):
    """Pickles as torch's queues do, but collects plain tensors instead of pickling them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.spans: list[TensorSpan] = []
        self.size = 0

    def reducer_override(self, value: Any) -> Any:
        """Called by pickle once for each object that is not of a built-in type."""
        if not _is_plain(value):
            return NotImplemented
        self.spans.append(TensorSpan(self.size, value.dtype, tuple(value.shape)))
        self.tensors.append(value)
        self.size += math.ceil(value.nbytes / _ALIGN) * _ALIGN
        return _tensor, (len(self.tensors) - 1,)


class _TensorUnpickler(pickle.Unpickler):
    """Puts the collected tensors back."""

    def __init__(self, pickled: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        here = (module, name) == (__name__, _tensor.__name__)
        return self._tensors.__getitem__ if here else super().find_class(module, name)


def _tensor(number: int) -> Tensor:
    raise AssertionError(f"tensor {number} was unpickled without its parcel")


def _is_plain(value: Any) -> bool:
    """Whether copying the values preserves the tensor. Not so for expanded tensors, which would
    grow, nor for transposed ones, subclasses and leaves, which would change."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.dtype in _DTYPES
        and not (value.requires_grad or value.is_nested)
        and (value.is_contiguous() or _is_slice(value))
    )


def _is_slice(value: Tensor) -> bool:
    """Whether its elements are in memory order, possibly with gaps, as in x[:, 1:]."""
    strides = value.stride()
    return strides[-1] == 1 and all(outer >= inner for outer, inner in pairwise(strides))


def refuse_dispatching(*, batch_sampler: Any = None, dataset: Any = None) -> None:
    """Raise if a `DataLoaderDispatcher` of accelerate iterates this sampler or dataset: process 0
    would read for all processes, concatenate batches and cut them by rows."""
    accelerate = sys.modules.get("accelerate")
    if accelerate is None:
        return
    active: Any = accelerate.state.GradientState().active_dataloader
    if type(active).__name__ != "DataLoaderDispatcher":
        return
    loader = active.base_dataloader
    if (batch_sampler is not None and loader.batch_sampler is batch_sampler) or (
        dataset is not None and loader.dataset is dataset
    ):
        raise ConfigError(
            "dispatch_batches=True reads all batches on process 0 and divides them by rows, but "
            "each process has its own planned micro-batches. Use accelerate_loader of "
            "evenstep.integrations.accelerate, and do not prepare this loader."
        )
