"""Streams in torch's `DataLoader`: as a dataset, and as a loader that knows where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evenstep.core.cursor import Cursor
from evenstep.core.step import Step
from evenstep.core.validate import truth_value, whole_number
from evenstep.data.streams.stream import Stream, until_all_end
from evenstep.errors import ConfigError, CursorError
from evenstep.integrations.parcel import Parcel, register

register()

Collate = Callable[[Any, Mapping[int, Any]], Any]

_OURS = ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last", "collate_fn")


class StreamDataset(IterableDataset):  # type: ignore[misc]
    """A stream as a torch dataset: `DataLoader(StreamDataset(stream), batch_size=None, ...)`.

    Each item is a `Step` with its samples read, or with `collate` its micro-batches made into
    tensors, in the worker. Workers share the work of their rank. Each step carries a cursor: of a
    planned stream it is the whole place; of a pooled one it is the worker's part of it, and
    `StreamLoader` puts the parts together.

    `state_dict` and `load_state_dict` are for torchdata's `StatefulDataLoader`, which keeps one
    state for each worker. `set_epoch` reaches workers that persist.

    capped  whether each worker keeps `max_num_steps` by its own count, which is too low where
            others have ended before it; False where the caller counts
    """

    def __init__(
        self, stream: Stream, collate: Collate | None = None, *, capped: bool = True
    ) -> None:
        super().__init__()
        self.stream, self.collate = stream, collate
        self._capped = truth_value("capped", capped)
        # Shared with the workers: the epoch that was set last, and steps done before it.
        self._epoch = torch.tensor([-1, 0], device="cpu").share_memory_()
        self._applied: list[int] = [-1, 0]
        self._now: Cursor | None = None
        self._turn: int | None = None  # of the state that was loaded into this worker

    def __iter__(self) -> Iterator[Step]:
        # All this at once, not with the first step: a state may be asked for before it.
        worker, workers = _worker()
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
        """The stream's length, which may be an estimate."""
        return len(self.stream)

    def set_epoch(self, epoch: int, done: int | None = None) -> None:
        """Begin the next iteration at the beginning of `epoch`, in all workers; or at the place
        within it that was loaded and not iterated yet."""
        self.stream.set_epoch(epoch, done)
        self._applied = [epoch, self.stream.done]
        self._turn = None
        self._epoch.copy_(torch.tensor(self._applied))

    def skip_batches(self, steps: int) -> None:
        """Begin so many steps later."""
        self.stream.skip_batches(steps)

    def state_dict(self) -> dict[str, Any]:
        """This worker's place, behind the step that it gave out last."""
        _, workers = _worker()
        if self._now is not None:
            return {"cursor": self._now.to_dict(), "turn": workers - 1, "workers": workers}
        if self._turn is not None:  # the worker's own state was loaded, and that is where it is
            cursor = self.stream.state_dict()
        else:
            cursor = self.stream.start(workers).to_dict()
        return {"cursor": cursor, "turn": self._turn, "workers": workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin behind the step that the state was taken after: a cursor, or in a worker what
        its own `state_dict` gave."""
        given: object = state
        if not isinstance(given, Mapping) or "cursor" not in state:
            self.stream.load_state_dict(state)
            self._turn = None
            return
        _, workers = _worker()
        if state.get("workers") != workers:
            raise CursorError(
                f"the state was taken by one of {state.get('workers')} workers and now there are "
                f"{workers}, so its turns do not match. Keep the number of workers, or load a "
                f"step's cursor, which fits any number."
            )
        self.stream.load_state_dict(state["cursor"])
        self._turn = state["turn"]


class _SentDataset(StreamDataset):
    """Steps that are wrapped by the worker itself, so that one that cannot be sent is an error."""

    def _prepared(self, steps: Iterator[Step]) -> Iterator[Any]:
        alone = get_worker_info() is None
        return (step if alone else Parcel(step) for step in super()._prepared(steps))


class StreamLoader:
    """Steps of this rank from workers that run ahead, with the cursor that holds after each.

    Wraps torch's `DataLoader`; `options` go to it (`prefetch_factor`, `persistent_workers`,
    `multiprocessing_context`, ...). `state_dict` is the place behind the step that the caller got
    last, whatever the workers have prepared since.

    anyone  for a finite stream on several ranks, `anyone(mine)` says whether any rank has another
            step (see `until_all_end`); by default asked through torch.distributed

    >>> from evenstep import Packed, Recipe, Steps
    >>> from evenstep.data.sources.memory import InMemory
    >>> from evenstep.data.streams.planned import PlannedStream
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
        **options: Any,
    ) -> None:
        _check_options(options)
        self.stream = stream
        self.num_workers = whole_number("num_workers", num_workers, least=0)
        self._dataset = _SentDataset(stream, collate, capped=False)
        self._options = options
        self._anyone = anyone
        self._loader: Any = None
        self._now: Cursor | None = None

    def __iter__(self) -> Iterator[Step]:
        if self._loader is None:
            # Its own generator: a draw from torch's would change the dropout of a resumed run.
            seeds = torch.Generator().manual_seed(torch.initial_seed())
            options = {"batch_size": None, "num_workers": self.num_workers, "generator": seeds}
            self._loader = DataLoader(self._dataset, **{**options, **self._options})
        # The start of every worker: one that has not given out anything yet has a place too.
        self._now = now = start = self.stream.start(max(1, self.num_workers))
        with torch.device("cpu"):  # where torch draws the workers' seeds, whatever the default is
            ready = iter(self._loader)
        steps: Iterator[Step] = _received(ready)
        if not (self.stream.infinite_loop or self.stream.ends_together):
            steps = until_all_end(steps, self._anyone or _anyone, self.stream.recipe)
        most = self.stream.max_num_steps
        left = None if most is None else max(most - start.step, 0)
        try:
            for number, step in enumerate(islice(steps, left), start.step):
                if self._dataset.collate and step.batches is None:  # one for who has ended
                    step = step.collated(self._dataset.collate)
                joined = self.stream.join([now, step.cursor]) if step.cursor.place else now
                self._now = now = replace(joined, step=number + 1)
                yield replace(step, number=number, cursor=now)
        finally:
            # An error that torch raises anew holds its workers in a cycle, until someone collects.
            if self.num_workers and not self._options.get("persistent_workers"):
                ready._shutdown_workers()

    def __len__(self) -> int:
        """The stream's length, which may be an estimate."""
        return len(self.stream)

    def state_dict(self) -> dict[str, Any]:
        """The cursor behind the step that was given out last."""
        now = self.stream.start(max(1, self.num_workers)) if self._now is None else self._now
        return now.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin behind the step that the state was taken after."""
        self.stream.load_state_dict(state)
        self._loader, self._now = None, None  # workers that persist would not hear of it

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the beginning of `epoch`, or at the place within it that was
        loaded and not iterated yet."""
        done = None if self._now is None else self._now.step
        self._dataset.set_epoch(epoch, done)
        self._now = None

    def skip_batches(self, steps: int) -> None:
        """Begin so many steps later."""
        self.stream.skip_batches(steps)
        self.load_state_dict(self.stream.start(max(1, self.num_workers)).to_dict())


def _received(steps: Iterator[Step]) -> Iterator[Step]:
    """What workers send. One that dies after it has announced a step, and before it has handed
    over its memory, shows as a broken connection."""
    try:
        yield from steps
    except (EOFError, ConnectionError) as error:
        if str(error).startswith("Caught "):  # an error of the worker's own, as torch raises it
            raise
        raise RuntimeError(
            "a DataLoader worker exited unexpectedly while it sent a step, which is lost with it. "
            "What the worker said stands above, if anything; resume from the last cursor."
        ) from error


def _check_options(options: Mapping[str, Any]) -> None:
    taken = [name for name in _OURS if name in options]
    if taken:
        raise ConfigError(
            f"{taken[0]} is not the caller's to set: the stream says what a step holds, and in "
            f"which order. Leave it out; tensors are made by `collate`."
        )
    for name in ("in_order", "persistent_workers", "pin_memory"):
        truth_value(name, options.get(name, False))
    if not options.get("in_order", True):
        raise ConfigError(
            "in_order=False hands out steps in another order than the stream's, so no cursor could "
            "say which of them are done. Leave it out."
        )


def _worker() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _anyone(mine: bool) -> bool:
    """Whether any rank of the default process group says yes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ConfigError(
            "ranks of a finite pooled stream end at different times and must agree on the end, but "
            "there is no process group to ask. Initialise torch.distributed, pass `anyone`, or set "
            "infinite_loop=True with max_num_steps."
        )
    flag = torch.tensor([int(mine)])
    if torch.distributed.get_backend() == "nccl":
        flag = flag.cuda()
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag.item())
