"""PlannedBatchSampler: a planned stream as a torch `batch_sampler`, for existing loaders."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from evenstep.core.plan import MicroBatch
from evenstep.core.step import Cursor, Step
from evenstep.core.text import truth_value, whole_number
from evenstep.data.planned import PlannedStream, Progress, StreamPosition
from evenstep.data.pool import micro_batch
from evenstep.errors import ConfigError, CursorError, PlanError
from evenstep.integrations.dataloader import refuse_dispatching

__all__ = ["PlannedBatchSampler"]


class PlannedBatchSampler:
    """The sample ids of every micro-batch of this rank: `DataLoader(data, batch_sampler=...)`.

    A batch sampler can only name whole samples, so over-long samples cannot be split or truncated.
    If the last step of an epoch has less work than ranks, some micro-batches are empty. They are an
    error, unless `drop_last` leaves such a step out (counted in `dropped`), or `epochs` is given.

    `len` is the exact number of micro-batches of an epoch, counted without reading samples and
    remembered. Epochs may differ by a few. Trainers that ask once, before the first epoch, need
    `epochs`, the number of epochs that are run: all then have the length of the longest, and
    shorter ones end with empty micro-batches. `collate_fn` gets `[]` for an empty micro-batch.

    For the Hugging Face Trainer, use `EvenstepMixin` (in `evenstep.integrations.trainer`), and for
    accelerate `accelerate_loader` (in `evenstep.integrations.accelerate`).

    `state_dict` is exact after any micro-batch, also within a step and for another number of
    ranks. It is the position after the last batch that the loader requested. torch's `DataLoader`
    requests batches ahead for its workers; with `num_workers` above 0, save the state of
    torchdata's `StatefulDataLoader` instead, which is that of the batch yielded last.

    progress  `progress(done, total)` is called while `len` counts

    >>> import numpy as np
    >>> from evenstep import Packed, Recipe, Steps
    >>> from evenstep.data.dataset import Lengths
    >>> recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=4))
    >>> stream = PlannedStream(Lengths(np.array([5, 3, 4, 2])), recipe, shuffle=False)
    >>> list(PlannedBatchSampler(stream)), len(PlannedBatchSampler(stream))
    ([[0, 1], [2, 3]], 2)
    """

    def __init__(
        self,
        stream: PlannedStream,
        *,
        drop_last: bool = False,
        epochs: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if stream.recipe.overflow in ("split", "truncate"):
            raise ConfigError(
                f"overflow={stream.recipe.overflow!r} cannot be used with a batch sampler, which "
                f"can only name whole samples. Use overflow 'drop', 'alone' or 'error', or a "
                f"StreamLoader."
            )
        self.stream = stream
        self._drop_last = truth_value("drop_last", drop_last)
        self.epochs = None if epochs is None else whole_number("epochs", epochs)
        if epochs is not None and (stream.infinite_loop or stream.max_num_steps is not None):
            raise ConfigError(
                "epochs cannot be combined with max_num_steps or infinite_loop, which end a stream "
                "elsewhere. Remove epochs."
            )
        self.progress = progress
        self.dropped = 0
        """Number of samples in steps that were left out so far."""
        self._now: Cursor | None = None
        self._filled = 0  # empty micro-batches at the end of the epoch that were yielded
        self._skipped = 0  # those before the start
        self._lengths: dict[tuple[StreamPosition, int], int] = {}

    @property
    def batch_size(self) -> None:
        """None, because micro-batches differ in size. Only code that distributes batches over
        processes itself reads it, which is wrong for the batches of one rank."""
        if self.stream.world.size > 1:
            raise ConfigError(
                f"this sampler yields the micro-batches of rank {self.stream.world.rank} only; "
                f"distributing them over {self.stream.world.size} processes would lose samples. "
                f"Do not prepare its loader with accelerate; use accelerate_loader of "
                f"evenstep.integrations.accelerate."
            )

    @property
    def drop_last(self) -> bool:
        """False, as read by code that distributes batches: all ranks have the same number."""
        return False

    # Iterating ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        refuse_dispatching(batch_sampler=self)
        return self._sample_lists()

    def _sample_lists(self) -> Iterator[list[int]]:
        ranks = self.stream.world.size
        before = self._begin()
        epoch = last_epoch = before.epoch  # the last one with a step that was not left out
        for step in self.stream.walk():
            if step.epoch != before.epoch:  # the previous step was the last of its epoch
                before = StreamPosition(step.epoch, 0, before.step)
            after = StreamPosition.from_dict(step.cursor.place, step.cursor.step)
            if self._left_out(step):
                if after.epoch > last_epoch + 1:
                    raise PlanError(
                        f"all steps of epoch {last_epoch + 1} have less work than ranks and are "
                        f"left out. Use fewer ranks, more samples per step, or a StreamLoader."
                    )
                self.dropped += int(step.totals.get("samples", 0))
                before, self._now = after, step.cursor
                continue
            last_epoch = after.epoch
            done = before.inside[-1][1] if before.inside and before.inside[-1][0] == ranks else 0
            for k, micro in enumerate(step.micro_batches, 1):
                at = after if k == len(step) else before.within(ranks, done + k)
                self._now = self.stream.cursor(at)
                yield self._sample_ids(micro, step)
            before = after
        missing = 0 if self.epochs is None else len(self) - self._micro_batches(epoch)
        while self._filled < missing:
            self._filled += 1
            yield []

    def _begin(self) -> StreamPosition:
        """Where the iteration starts."""
        cursor = self.stream.start()
        self._now, self._filled = cursor, self._skipped
        return StreamPosition.from_dict(cursor.place, cursor.step)

    def _left_out(self, step: Step) -> bool:
        """Whether a step is left out because a rank has no work in it. All ranks must agree, so
        this depends on the whole plan, not on the rank's micro-batches."""
        return self._drop_last and bool(step.totals) and step.totals["empty"] > 0

    def _sample_ids(self, micro: MicroBatch, step: Step) -> list[int]:
        if micro.is_empty and self.epochs is not None:
            return []
        if micro.is_empty and not step.totals:
            raise PlanError(
                f"the rest of step {step.number} has less work than ranks, and a batch sampler "
                f"cannot express empty micro-batches. Resume on fewer ranks, or use a StreamLoader."
            )
        if micro.is_empty:
            raise PlanError(
                f"step {step.number} has less work than ranks, and a batch sampler cannot express "
                f"empty micro-batches. Set drop_last=True to leave out such steps, set "
                f"epochs to get them as [], or use a StreamLoader."
            )
        sample_ids: list[int] = micro.segments.sample.tolist()
        return sample_ids

    # Length ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The exact number of micro-batches of an epoch; with `max_num_steps`, of those steps."""
        stream = self.stream
        if stream.infinite_loop or stream.max_num_steps is not None:
            return self._counted()
        if self.epochs is None:
            return self._micro_batches(int(stream.start().place["epoch"]))
        counts = stream.micro_batches_per_epoch(
            self.epochs, drop_last=self._drop_last, progress=self.progress
        )
        return max(counts)

    def _micro_batches(self, epoch: int) -> int:
        size = self.stream.epoch_size(epoch, drop_last=self._drop_last, progress=self.progress)
        return size.micro_batches

    def _counted(self) -> int:
        """Micro-batches from the start to `max_num_steps`."""
        num_steps, cursor = len(self.stream), self.stream.start()
        key = StreamPosition.from_dict(cursor.place, cursor.step), num_steps
        if key not in self._lengths:
            steps = copy.copy(self.stream).walk()  # a copy: counting is not iterating
            self._lengths[key] = sum(len(step) for step in steps if not self._left_out(step))
        return self._lengths[key]

    # Position ----------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`, or at a position within it that
        was loaded and not iterated yet."""
        if self.epochs is not None and not epoch < self.epochs:
            raise ConfigError(
                f"epoch {epoch} was not planned: there are {self.epochs} epochs. Set epochs to the "
                f"number that is run."
            )
        kept = self._now is None and epoch == self.stream.start().place["epoch"]
        self.stream.set_epoch(epoch, None if self._now is None else self._now.step)
        self._now, self._skipped = None, self._skipped if kept else 0
        self._filled = self._skipped

    def state_dict(self) -> dict[str, Any]:
        """The position after the last micro-batch that was yielded."""
        state = (self.stream.start() if self._now is None else self._now).to_dict()
        return {**state, "filled": self._filled} if self._filled else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start after the micro-batch that the state was taken at."""
        self.stream.load_state_dict(state)
        self._now = None
        self._filled = self._skipped = int(state.get("filled", 0))


class Part(NamedTuple):
    """A micro-batch of a step. `state` is the position after the step, with its last micro-batch
    only: a step that has begun is repeated on resume."""

    micro: MicroBatch
    state: dict[str, Any] | None
    epoch: int = 0


class StepSampler:
    """A `batch_sampler` whose batches are micro-batches, to be read with `PartDataset`.

    Trainers make an optimizer step after a fixed number of batches. So every step has `per_step`
    micro-batches; empty ones follow if it needs fewer. Its length is exact: `per_step` times the
    steps of the epoch. With `epochs`, it is that of the longest of these epochs, and shorter ones
    end with steps of empty micro-batches.

    Counting steps plans all epochs once, unless `Steps(samples=...)` gives their number.
    `progress(done, total)` is called in the meantime.
    """

    def __init__(
        self,
        stream: PlannedStream,
        *,
        per_step: int = 1,
        epochs: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.stream, self.progress = stream, progress
        self.per_step = whole_number("per_step", per_step)
        self.epochs = None if epochs is None else whole_number("epochs", epochs)
        self._check()
        self._done = 0  # steps of the epoch before the start
        self._loaded = False  # and not iterated since
        self._total = 0  # steps over all epochs
        self._longest: int | None = None
        self._passed: dict[int, StreamPosition] = {}  # after each step of the epoch, by its number

    def _check(self) -> None:
        stream, fixed = self.stream, self.stream.recipe.steps.micro_batches
        if stream.max_num_steps is not None or stream.infinite_loop:
            raise ConfigError(
                "max_num_steps and infinite_loop cannot be used with a trainer, which counts steps "
                "and epochs itself. Remove them, and set max_steps of the trainer."
            )
        if fixed is not None and fixed > self.per_step:
            raise ConfigError(
                f"steps have {fixed} micro-batches, more than {self.per_step} gradient "
                f"accumulation steps. Set Steps(micro_batches={self.per_step})."
            )

    # Length ------------------------------------------------------------------------------------

    def steps_of(self, epoch: int) -> int:
        """Steps of an epoch with work."""
        known = self.stream.steps_in_every_epoch
        return self.stream.epoch_size(epoch).steps if known is None else known

    def num_steps(self, epochs: int) -> int:
        """Steps of the first epochs together."""
        self._count(whole_number("epochs", epochs, least=0))
        return sum(self.steps_of(epoch) for epoch in range(epochs))

    def _count(self, epochs: int) -> None:
        if self.stream.steps_in_every_epoch is None:
            self.stream.micro_batches_per_epoch(epochs, progress=self.progress)

    @property
    def steps(self) -> int:
        """Steps of the next iteration, from the beginning of its epoch."""
        if self.epochs is None:
            return self.steps_of(self.epoch)
        if self._longest is None:
            self._count(self.epochs)
            self._longest = max(self.steps_of(epoch) for epoch in range(self.epochs))
        return self._longest

    def __len__(self) -> int:
        return self.steps * self.per_step

    def is_filler(self, step: int) -> bool:
        """Whether a step, counted over all epochs, only has empty micro-batches."""
        epoch, number = divmod(step, self.steps)
        return number >= self.steps_of(epoch)

    @property
    def has_fillers(self) -> bool:
        """Whether any of the planned epochs is shorter than the longest."""
        return any(self.steps_of(epoch) < self.steps for epoch in range(self.epochs or 0))

    # Position ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return int(self.stream.start().place["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """Start at the beginning of `epoch`, or at a position within it that was loaded and not
        iterated yet."""
        if self.epochs is not None and not epoch < self.epochs:
            raise ConfigError(
                f"epoch {epoch} was not planned: there are {self.epochs} epochs, and the length is "
                f"that of the longest of them. Plan as many epochs as are run."
            )
        if self._loaded and epoch == self.epoch:
            return
        self.stream.set_epoch(epoch, self._total)
        self._done, self._loaded = 0, False

    def state_dict(self) -> dict[str, Any]:
        """The position before the next iteration."""
        return self._state(self.stream.state_dict(), self._done)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start after the step that the state was taken at."""
        given: object = state
        if not isinstance(given, Mapping) or not {"cursor", "done"} <= given.keys():
            raise CursorError("this is not the state of a loader. Pass what state_dict() returned.")
        self.stream.load_state_dict(state["cursor"])
        self._done, self._loaded = whole_number("done", state["done"], least=0), True
        self._total = self.stream.done

    def position_after(self, step: int) -> dict[str, Any]:
        """The cursor after so many steps over all epochs of equal length, for trainers that only
        save their number."""
        epoch, done = divmod(step, self.steps)
        at = self._passed.get(done)
        if at is None or at.epoch != epoch:
            at = self._skipped_to(epoch, done)
        return self.stream.cursor(replace(at, step=step)).to_dict()

    def _skipped_to(self, epoch: int, done: int) -> StreamPosition:
        stream = copy.copy(self.stream)
        stream.set_epoch(epoch, 0)
        stream.skip_batches(done)
        start = stream.start()
        return StreamPosition.from_dict(start.place, start.step)

    def check_position(self, state: Mapping[str, Any]) -> None:
        """Raise if these settings would not resume at the position of a checkpoint, whose number of
        steps is all that a trainer resumes from."""
        copy.copy(self.stream).load_state_dict(state)  # raises if it is of other data
        was, now = state["place"], self.position_after(state["step"])["place"]
        if was != now:
            raise CursorError(
                f"the checkpoint was saved at sample {was['position']} of epoch {was['epoch']}, "
                f"but with these settings its {state['step']} steps end at sample "
                f"{now['position']} of epoch {now['epoch']}. Restore the recipe, the number of "
                f"processes, gradient_accumulation_steps and num_train_epochs. They may change if "
                f"steps are counted in samples (Steps(samples=...)). With ignore_data_skip=True "
                f"the epoch begins anew."
            )

    @staticmethod
    def _state(cursor: dict[str, Any], done: int) -> dict[str, Any]:
        return {"cursor": cursor, "done": done}

    # Iterating ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Part]:
        done, self._loaded = self._done, False
        return self._parts(done)

    def _parts(self, done: int) -> Iterator[Part]:
        state = self.state_dict()
        self._passed = {}
        for step in self.stream.walk():
            done += 1
            self._passed[done] = StreamPosition.from_dict(step.cursor.place, step.cursor.step)
            state = self._state(step.cursor.to_dict(), done)
            self._total = step.number + 1
            yield from self._full(step, state)
        epoch, empty = self.epoch, micro_batch([], self.stream.recipe)
        for number in range(done + 1, 1 + (0 if self.epochs is None else self.steps)):
            self._passed[number] = self._passed.get(number - 1, StreamPosition(epoch))
            state = {**state, "done": number}
            yield from self._numbered([empty] * self.per_step, state, epoch)

    def _full(self, step: Step, state: dict[str, Any]) -> Iterator[Part]:
        """The micro-batches of a step, and empty ones up to `per_step`."""
        if len(step) > self.per_step:
            raise PlanError(
                f"step {step.number} has {len(step)} micro-batches per rank, more than "
                f"{self.per_step} gradient accumulation steps. Set gradient accumulation to "
                f"{len(step)} or more and resume, or raise the budget."
            )
        empty = micro_batch([], self.stream.recipe)
        missing = [empty] * (self.per_step - len(step))
        yield from self._numbered([*step.micro_batches, *missing], state, step.epoch)

    def _numbered(
        self, micros: list[MicroBatch], state: dict[str, Any], epoch: int
    ) -> Iterator[Part]:
        for number, micro in enumerate(micros, 1):
            yield Part(micro, state if number == len(micros) else None, epoch)


class PartDataset(Dataset):  # type: ignore[misc]
    """Reads the samples of a `StepSampler`'s micro-batches, in the worker.

    `set_epoch` sets that of the sampler: the one hook that accelerate keeps in all its loaders.
    """

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler, self._samples = sampler, sampler.stream.samples

    def __len__(self) -> int:
        return len(self._samples.source)

    def __getitems__(self, part: Part) -> tuple[Part, dict[int, Any]]:
        """The micro-batch without samples that the source skipped, and its samples by id."""
        ids = part.micro.segments.sample.tolist()
        samples = self._samples.in_epoch(part.epoch)
        found = {number: samples[number] for number in ids}
        missing = [number for number, sample in found.items() if sample is None]
        micro = part.micro.without(missing) if missing else part.micro
        return part._replace(micro=micro), found

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler."""
        self._sampler.set_epoch(epoch)
