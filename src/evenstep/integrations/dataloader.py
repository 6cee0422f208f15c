"""Streams with torch's `DataLoader`: a dataset, and a loader that can be resumed."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evenstep.core.ragged import rounded_up
from evenstep.core.step import Cursor, Step
from evenstep.core.text import truth_value, whole_number
from evenstep.data.planned import PlannedStream
from evenstep.data.pooled import PooledStream
from evenstep.data.source import Progress, digest_of
from evenstep.data.stream import Stream, empty_step
from evenstep.errors import ConfigError, CursorError
from evenstep.integrations.run_state import Gather, all_gather
from evenstep.train.checks import check_fingerprints
from evenstep.train.collectives import Distributed, has_group

__all__ = ["StreamDataset", "StreamLoader"]


Collate = Callable[[Any, Mapping[int, Any]], Any]

_NOWHERE = Cursor(identity={}, step=0, position={})
_RESERVED = ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last", "collate_fn")


class StreamDataset(IterableDataset):  # type: ignore[misc]
    """A stream as a torch dataset: `DataLoader(StreamDataset(stream), batch_size=None, ...)`.

    Each item is a `Step` with its samples, or with `collate` its batches, read in the worker.
    Workers take turns with the steps of their rank. The cursor of a step from a planned stream is
    the whole position. From a pooled stream it is the position of the worker only; `StreamLoader`
    merges those of all workers.

    `state_dict` and `load_state_dict` are for torchdata's `StatefulDataLoader`, which keeps one
    state per worker. `set_epoch`, and `skip_batches` after it, also reach persistent workers. Any
    other start that is set while these run is an error when they are iterated.

    capped  whether each worker stops at `max_num_steps` by its own count. It stops too early if
            other workers have ended before; pass False if the caller counts steps
    """

    def __init__(
        self, stream: Stream, collate: Collate | None = None, *, capped: bool = True
    ) -> None:
        super().__init__()
        self.stream, self.collate = stream, collate
        self._capped = truth_value("capped", capped)
        # Shared with the workers: how often the start of the stream was set. And the epoch that was
        # set last, the steps done before it and those skipped since, and `stream.moves` after that.
        if stream.shared_moves is None:
            stream.shared_moves = torch.tensor([stream.moves], device="cpu").share_memory_()
        self._moves = stream.shared_moves
        self._epoch = torch.tensor([0, 0, 0, -1], device="cpu").share_memory_()
        self._applied: int | None = None  # `stream.moves` that this worker follows
        self._now: Cursor | None = None
        self._loaded: dict[str, Any] = {}  # the state of this worker that was loaded

    def __iter__(self) -> Iterator[Step]:
        # Not in a generator: the state may be read before the first step.
        refuse_dispatching(self)
        worker, workers = self._worker()
        if self._applied is not None:
            register_shared_steps()
            if not self._follows():
                return iter(_refuse_moves, None)  # torch does not pass on an error before a step
        self._now = None
        return self._prepared(self.stream.walk(worker, workers, self._loaded.get("turn")))

    def _worker(self) -> tuple[int, int]:
        """The number of this worker, and of all. In a worker, the copy of the stream begins where
        the stream was when the worker was made."""
        info = get_worker_info()
        if info is None:
            return 0, 1
        if self._applied is None:
            self._applied, self.stream.shared_moves = self.stream.moves, None
        return info.id, info.num_workers

    def _follows(self) -> bool:
        """Set the start as in the process that made this worker, if it was set there since; False
        if that is not possible."""
        epoch, done, skipped, moves = self._epoch.tolist()
        now = int(self._moves[0])
        if now != self._applied:
            if now != moves:
                return False
            self._applied, self._loaded = now, {}
            self.stream.set_epoch(epoch, done)
            self.stream.skip_batches(skipped)
        return True

    def _prepared(self, steps: Iterator[Step]) -> Iterator[Step]:
        most = self.stream.max_num_steps
        for step in steps:
            if self._capped and most is not None and step.number >= most:
                return
            ready = step.loaded() if self.collate is None else step.collated(self.collate)
            self._now = step.cursor
            if self._capped:
                self.stream.passed(step.cursor)
            yield ready

    def __len__(self) -> int:
        """Steps of one pass: exact for planned streams, otherwise an estimate."""
        return _num_steps(self.stream)

    def set_epoch(self, epoch: int, done: int | None = None) -> None:
        """Start the next iteration at the beginning of `epoch` in all workers, or at a position
        within it that was loaded and not iterated yet.

        `done` is the number of steps before. By default it is that of this process, which does not
        know how many steps its workers have made; a `StreamLoader` counts them.
        """
        before = self.stream.moves
        self.stream.set_epoch(epoch, done)
        if self.stream.moves != before:
            self._now, self._loaded = None, {}
            self._share(epoch, self.stream.done, 0)

    def skip_batches(self, steps: int) -> None:
        """Start `steps` steps later. Persistent workers that run need `set_epoch` before it."""
        epoch, done, skipped, moves = self._epoch.tolist()
        before = self.stream.moves
        self.stream.skip_batches(steps)
        if self.stream.moves != before:
            self._now, self._loaded = None, {}
        if before == moves:
            self._share(epoch, done, skipped + steps)

    def _share(self, epoch: int, done: int, skipped: int) -> None:
        self._epoch.copy_(torch.tensor([epoch, done, skipped, self.stream.moves]))

    def follows(self, moves: int) -> bool:
        """Whether workers that were made when the stream had so many `moves` are or will be where
        it is now."""
        return self.stream.moves in (moves, int(self._epoch[-1]))

    def state_dict(self) -> dict[str, Any]:
        """The position of this worker after the step that it yielded last."""
        _, workers = self._worker()
        if self._now is not None:
            return {"cursor": self._now.to_dict(), "turn": workers - 1, "workers": workers}
        if self._loaded:
            return self._loaded
        return {"cursor": self.stream.start(workers).to_dict(), "turn": None, "workers": workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start after the step that the state was taken at. The state is a cursor, or in a worker
        the result of its own `state_dict`."""
        loaded: object = state
        _, workers = self._worker()
        own = isinstance(loaded, Mapping) and "cursor" in state
        if own and state.get("workers") != workers:
            raise CursorError(
                f"the state was taken with {state.get('workers')} workers, but now there are "
                f"{workers}. Keep the number of workers, or load the cursor of a step, which fits "
                f"any number."
            )
        self.stream.load_state_dict(state["cursor"] if own else state)
        self._now, self._loaded = None, dict(state) if own else {}


def _refuse_moves() -> Step:
    raise CursorError(
        "the start of the stream was set while persistent workers run, which have copies of it. "
        "Call set_epoch of the dataset and then skip_batches, make another DataLoader to load a "
        "state, or use a StreamLoader."
    )


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
    iteration, and that after a state was loaded, compares the ranks' data, order, seed, recipe and
    position, and raises on all of them if one differs. All ranks must iterate then.

    >>> from evenstep import Packed, PlannedStream, Recipe, Steps
    >>> from evenstep.data import InMemory
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
        self._dataset = StreamDataset(stream, collate, capped=False)
        self._collate, self._options, self._progress = collate, options, progress
        self._anyone = anyone
        self._gather = all_gather if gather is None and anyone is None else gather
        self._loader: Any = None
        self._made_at = -1  # `stream.moves` when the workers of `_loader` were made

    def __iter__(self) -> Iterator[Step]:
        # Includes the start of every worker, also of those that have not yielded a step yet.
        start = self.stream.start(max(1, self.num_workers))
        self.stream.passed(start)
        if self._loader is None or not self._dataset.follows(self._made_at):
            _compare(self.stream, start)
            self._loader = self._loader_of(self._dataset, start, **self._options)
            self._made_at = self.stream.moves
        iterators: list[Any] = []  # torch's
        try:
            for step in self._numbered(start, iterators):
                self.stream.passed(step.cursor)
                yield step
        finally:
            # End the workers. An error that torch re-raises keeps them alive in a reference cycle.
            kept = 1 if self._options.get("persistent_workers") else 0
            for iterator in iterators[kept:] if self.num_workers else ():
                iterator._shutdown_workers()

    def _numbered(self, now: Cursor, iterators: list[Any]) -> Iterator[Step]:
        """The steps of this rank, each with its number and the position after it.

        Ranks of a finite pooled stream end together: when the first one has no step left, what is
        left on the others is shared by all. This happens again until less than a step is left; then
        ranks without work get empty steps. A rank that shares drops the step that it has at hand,
        which has not run yet.
        """
        stream, most, gather = self.stream, self.stream.max_num_steps, self._gather
        pooled = stream if isinstance(stream, PooledStream) else None
        agree = not (stream.infinite_loop or stream.ends_together)
        shared_at = -1 if self._shares_rest else None  # None: never
        steps, before = _steps_from(self._loader, iterators), None
        while most is None or now.step < most:
            step = next(steps, None)
            any_rank, all_ranks = (
                self._ranks_with_steps(step is not None) if agree else (step is not None, True)
            )
            if not any_rank:
                return
            if not all_ranks and shared_at not in (None, now.step):
                assert gather is not None
                assert pooled is not None
                shared_at = now.step
                cursors = [Cursor.from_dict(state) for state in gather(now.to_dict())]
                rest = copy.copy(pooled)  # the start of the stream stays
                now = rest.shared(cursors, max(1, self.num_workers))
                rest.load_state_dict(now.to_dict())
                dataset = StreamDataset(rest, self._collate, capped=False)
                options = {**self._options, "persistent_workers": False}
                steps = _steps_from(self._loader_of(dataset, now, **options), iterators)
                continue
            if step is None:  # the position stays, also after a share
                step = replace(empty_step(before, stream.recipe), cursor=_NOWHERE)
                step = step.collated(self._collate) if self._collate else step
            if self.num_workers and pooled is not None:
                pooled.observe(step)
            before, number = step, now.step
            joined = stream.join([now, step.cursor]) if step.cursor.position else now
            now = replace(joined, step=number + 1)
            yield replace(step, number=number, cursor=now)

    @property
    def _shares_rest(self) -> bool:
        """Whether ranks share what is left when the first of them ends."""
        stream = self.stream
        shares = isinstance(stream, PooledStream) and stream.can_share and not stream.infinite_loop
        return shares and not stream.ends_together and self._gather is not None

    def _ranks_with_steps(self, mine: bool) -> tuple[bool, bool]:
        """Whether any rank has a step, and whether every rank has."""
        if self._anyone is not None:
            any_rank = self._anyone(mine)
            all_ranks = self._gather is None or not any_rank or not self._anyone(not mine)
            return any_rank, all_ranks
        if not has_group():
            raise ConfigError(
                "ranks of a finite pooled stream must agree on its end, but there is no process "
                "group. Initialise torch.distributed, pass `anyone`, or set infinite_loop=True "
                "with max_num_steps."
            )
        count = int(Distributed().all_reduce_sum(torch.tensor([int(mine)])))
        return count > 0, count == Distributed().size

    def _loader_of(self, dataset: StreamDataset, start: Cursor, **options: Any) -> Any:
        # A separate generator: drawing from torch's would change the dropout of a resumed run. It
        # differs between ranks and starts, so that a resumed run does not repeat random numbers.
        text = f"{torch.initial_seed()} {start.to_dict()['digest']}"
        seed = int.from_bytes(digest_of(text, size=7), "little")
        settings = {
            "num_workers": self.num_workers,
            "generator": torch.Generator().manual_seed(seed),
        }
        return DataLoader(dataset, batch_size=None, collate_fn=_sent, **{**settings, **options})

    def __len__(self) -> int:
        """Steps of one pass. Exact for planned streams, counted once without reading samples;
        otherwise an estimate."""
        return _num_steps(self.stream, self._progress)

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the step that was yielded last."""
        return self.stream.now(max(1, self.num_workers)).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Start after the step that the state was taken at. `allow` names settings of a pooled
        stream that may have changed since; see `PooledStream.load_state_dict`."""
        self.stream.load_state_dict(state, allow)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`, or at a position within it that
        was loaded and not iterated yet."""
        self._dataset.set_epoch(epoch)

    def skip_batches(self, steps: int) -> None:
        """Start `steps` steps later; where ranks share what is left, not past the end of one."""
        before = self.stream.done
        self.stream.skip_batches(steps)
        start = self.stream.start(max(1, self.num_workers))
        if self._shares_rest and start.step < before + steps:
            raise CursorError(
                f"rank {self.stream.world.rank} has {start.step - before} of the {steps} steps to "
                f"skip. What other ranks have left is shared by all then, so the steps that follow "
                f"are unknown. Load a cursor instead."
            )
        self.load_state_dict(start.to_dict())


def _num_steps(stream: Stream, progress: Progress | None = None) -> int:
    """Steps of one pass. Counts those of the epoch if they are not known otherwise."""
    if not isinstance(stream, PlannedStream) or stream.infinite_loop:
        return len(stream)
    if stream.steps_in_every_epoch is None:
        stream.epoch_size(stream.start().position["epoch"], progress=progress)
    return len(stream)


def _compare(stream: Stream, start: Cursor) -> None:
    """Raise on all ranks if one has another stream or position. Positions of a pooled stream
    differ; only the number of steps is the same."""
    if not (has_group() and 1 < stream.world.size == torch.distributed.get_world_size()):
        return  # without a process group, or other ranks are tensor- or context-parallel
    place = {} if isinstance(stream, PooledStream) else start.position
    text = f"{stream.fingerprint} {start.step} {place}"
    check_fingerprints(digest_of(text, size=8).hex(), Distributed())


def _steps_from(loader: Any, iterators: list[Any]) -> Iterator[Step]:
    """The steps from workers, whose iterator is added to `iterators`. A worker that dies after it
    has announced a step, but before its memory was handed over, appears as a broken connection."""
    with torch.device("cpu"):  # torch draws the seeds of workers on the default device
        iterators.append(iter(loader))
    try:
        yield from iterators[-1]
    except (EOFError, ConnectionError) as error:
        if str(error).startswith("Caught "):  # an error of the worker's own, as torch raises it
            raise
        raise RuntimeError(
            "a DataLoader worker exited unexpectedly while it sent a step. Look for its error "
            "message above, and resume from the last cursor."
        ) from error


def refuse_reserved(options: Mapping[str, Any]) -> None:
    """Raise for options of torch's `DataLoader` that a stream decides."""
    reserved = [name for name in _RESERVED if name in options]
    if reserved:
        raise ConfigError(
            f"{reserved[0]} cannot be set, because the stream determines the samples of a step and "
            f"their order. Remove it; to make tensors, pass `collate`."
        )


def _check_options(options: Mapping[str, Any]) -> None:
    refuse_reserved(options)
    for name in ("in_order", "persistent_workers", "pin_memory"):
        truth_value(name, options.get(name, False))
    if not options.get("in_order", True):
        raise ConfigError(
            "in_order must be True: a cursor cannot express steps that are done out of order. "
            "Remove the option."
        )


# Steps in shared memory ------------------------------------------------------------------------

_ALIGN = 64  # bytes: suits any dtype, and the size of a cache line
_DTYPES = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
}  # fmt: skip


_ELSEWHERE = pickle.PickleBuffer(bytearray())
"""Stands for the values of a tensor while the step is pickled."""


def register_shared_steps() -> None:
    """Let queues of `torch.multiprocessing` send steps as `SharedStep`, in this process.

    Loaders call it in their workers, so that importing this module has no effect on pickling.
    """
    ForkingPickler.register(Step, lambda step: SharedStep(step).__reduce__())


def _sent(step: Step) -> Any:
    """A step as `StreamLoader` sends it: pickled in the worker's main thread."""
    return step if get_worker_info() is None else SharedStep(step)


class SharedStep:
    """A pickled step with all its tensors in one block of shared memory. Unpickling gives the step.

    torch sends every tensor in shared memory of its own. Each needs an open file and a handshake
    (half a millisecond), and a step of a few hundred micro-batches exceeds the limit on open files.
    The receiver of a `SharedStep` gets separate tensors over the same memory.

    The constructor pickles, so that its errors (out of memory, something that cannot be pickled)
    are raised to the caller. A queue pickles in a thread, which prints errors and drops the step.
    """

    def __init__(self, step: Step) -> None:
        file = io.BytesIO()
        pickler = _TensorPickler(file)
        pickler.dump({field.name: getattr(step, field.name) for field in fields(step)})
        sizes = [tensor.nbytes for tensor in pickler.tensors]
        total = sum(rounded_up(size, _ALIGN) for size in sizes)
        memory = torch.empty(total, dtype=torch.uint8, device="cpu")
        if len(memory):
            memory.share_memory_()
        for tensor, values in zip(pickler.tensors, _slices(memory, sizes), strict=True):
            _tensor_over(values, tensor.dtype, tensor.shape).copy_(tensor)
        self._arguments = (file.getvalue(), sizes, memory)

    def __reduce__(self) -> tuple[Callable[..., Step], tuple[bytes, list[int], Tensor]]:
        return _received_step, self._arguments


def _received_step(pickled: bytes, sizes: list[int], memory: Tensor) -> Step:
    return Step(**pickle.loads(pickled, buffers=_slices(memory, sizes)))


def _slices(memory: Tensor, sizes: list[int]) -> Iterator[Any]:
    """The bytes of each tensor."""
    values, start = memory.numpy(), 0
    for size in sizes:
        yield values[start : start + size]
        start += rounded_up(size, _ALIGN)


def _tensor_over(values: Any, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor over these bytes. Not a view: pickling a view would pickle all of its memory."""
    if not len(values):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(values, dtype=dtype).view(shape)


class _TensorPickler(ForkingPickler):
    """Pickles as torch's queues do, but collects plain tensors instead of pickling them."""

    def __init__(self, file: io.BytesIO) -> None:
        # Other buffers, such as those of numpy arrays, are a part of the pickled bytes.
        super().__init__(file, pickle.HIGHEST_PROTOCOL, True, lambda b: b is not _ELSEWHERE)
        self.tensors: list[Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        """Called by pickle once for each object that is not of a built-in type."""
        if not _is_plain(value):
            return NotImplemented
        self.tensors.append(value)
        return _tensor_over, (_ELSEWHERE, value.dtype, tuple(value.shape))


def _is_plain(value: Any) -> bool:
    """Whether copying the values preserves the tensor. Not so for expanded tensors, which would
    grow, nor for transposed ones, subclasses and leaves, which would change."""
    if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
        return False
    if value.dtype not in _DTYPES or value.requires_grad or value.is_nested:
        return False
    strides = value.stride()  # in memory order, possibly with gaps, as in x[:, 1:]
    in_order = strides[-1:] == (1,) and all(a >= b for a, b in pairwise(strides))
    return value.is_contiguous() or in_order


def refuse_dispatching(iterated: Any) -> None:
    """Raise if a `DataLoaderDispatcher` of accelerate iterates this batch sampler or dataset:
    process 0 would read for all processes, concatenate batches and cut them by rows."""
    accelerate = sys.modules.get("accelerate")
    active: Any = accelerate and accelerate.state.GradientState().active_dataloader
    if type(active).__name__ != "DataLoaderDispatcher":
        return
    loader = active.base_dataloader
    if iterated is loader.batch_sampler or iterated is loader.dataset:
        raise ConfigError(
            "dispatch_batches=True reads all batches on process 0 and divides them by rows, but "
            "each process has its own planned micro-batches. Use accelerate_loader of "
            "evenstep.integrations.accelerate, and do not prepare this loader."
        )
