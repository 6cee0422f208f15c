"""Planned micro-batches as a torch `batch_sampler`: of sample ids, and of parts for trainers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from evenstep.core.plan import MicroBatch
from evenstep.core.step import Cursor, Step
from evenstep.core.text import truth_value, whole_number
from evenstep.data.planned import PlannedStream, StreamPosition
from evenstep.data.pool import micro_batch
from evenstep.data.source import Progress
from evenstep.errors import ConfigError, CursorError, PlanError
from evenstep.integrations.dataloader import refuse_dispatching

__all__ = ["PlannedBatchSampler"]


class Part(NamedTuple):
    """A micro-batch of a step, or an empty one that fills up a step or an epoch.

    `state` is the position after the step, with its last micro-batch only: a trainer repeats a
    step that has begun.
    """

    micro: MicroBatch
    epoch: int
    state: dict[str, Any] | None = None


class _MicroBatchSampler:
    """The micro-batches of this rank as `Part`s, with an exact length and an exact position.

    epochs     the epochs that are run. All then have the length of the longest, and shorter ones
               end with empty micro-batches
    drop_last  leave out steps in which a rank has no work
    progress   `progress(done, total)` is called while `len` counts, which plans the epochs once
    """

    def __init__(
        self,
        stream: PlannedStream,
        *,
        epochs: int | None = None,
        drop_last: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.stream, self.progress = stream, progress
        self.epochs = None if epochs is None else whole_number("epochs", epochs)
        self._drop_last = truth_value("drop_last", drop_last)
        if epochs is not None and (stream.infinite_loop or stream.max_num_steps is not None):
            raise ConfigError(
                "epochs cannot be combined with max_num_steps or infinite_loop, which end a stream "
                "elsewhere. Remove epochs."
            )
        self.dropped = 0
        """Number of samples in steps that were left out so far."""
        self._now: Cursor | None = None  # after the last micro-batch; None: not iterated
        self._filled = 0  # empty micro-batches at the end of the epoch that were yielded
        self._skipped = 0  # those before the start
        self._longest: int | None = None  # micro-batches of the longest of `epochs`
        self._lengths: dict[tuple[StreamPosition, int], int] = {}

    # Iterating ---------------------------------------------------------------------------------

    def _parts(self) -> Iterator[Part]:
        self._now, self._filled = self.stream.start(), self._skipped
        before = _position(self._now)
        epoch = last_epoch = before.epoch  # the last one with a step that was not left out
        for step in self.stream.walk():
            if step.epoch != before.epoch:  # the previous step was the last of its epoch
                before = StreamPosition(step.epoch, 0, before.step)
            after = _position(step.cursor)
            if self._left_out(step):
                if after.epoch > last_epoch + 1:
                    raise PlanError(
                        f"all steps of epoch {last_epoch + 1} have less work than ranks and are "
                        f"left out. Use fewer ranks, more samples per step, or a StreamLoader."
                    )
                self.dropped += int(step.totals.get("samples", 0))
                self._now = step.cursor
            else:
                last_epoch = after.epoch
                yield from self._parts_of(step, before)
            before = after
        missing = 0 if self.epochs is None else len(self) - self._micro_batches(epoch)
        empty = micro_batch([], self.stream.recipe)
        while self._filled < missing:
            self._filled += 1
            yield Part(empty, epoch)

    def _parts_of(self, step: Step, before: StreamPosition) -> Iterator[Part]:
        """The micro-batches of a step. The position is known within it, too."""
        ranks = self.stream.world.size
        done = before.inside[-1][1] if before.inside and before.inside[-1][0] == ranks else 0
        for number, micro in enumerate(step.micro_batches, 1):
            self._now = step.cursor
            if number < len(step):
                self._now = self.stream.cursor(before.within(ranks, done + number))
            if micro.is_empty and self.epochs is None:
                raise _without_work(step)
            yield Part(micro, step.epoch)

    def _left_out(self, step: Step) -> bool:
        """Whether a step is left out because a rank has no work in it. All ranks must agree, so
        this depends on the whole plan, not on the rank's micro-batches."""
        return self._drop_last and bool(step.totals) and step.totals["empty"] > 0

    # Length ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The exact number of micro-batches of an epoch; with `max_num_steps`, of those steps."""
        stream = self.stream
        if stream.infinite_loop or stream.max_num_steps is not None:
            return self._counted()
        if self.epochs is None:
            return self._micro_batches(self._epoch)
        if self._longest is None:
            self._count(self.epochs)
            self._longest = max(map(self._micro_batches, range(self.epochs)))
        return self._longest

    def _micro_batches(self, epoch: int) -> int:
        """Micro-batches of an epoch with work."""
        size = self.stream.epoch_size(epoch, drop_last=self._drop_last, progress=self.progress)
        return size.micro_batches

    def _count(self, epochs: int) -> None:
        """Plan epochs to count them, with one report of progress for all."""
        self.stream.micro_batches_per_epoch(
            epochs, drop_last=self._drop_last, progress=self.progress
        )

    def _counted(self) -> int:
        """Micro-batches from the start to `max_num_steps`."""
        key = _position(self.stream.start()), len(self.stream)
        if key not in self._lengths:
            steps = copy.copy(self.stream).walk()  # a copy: counting is not iterating
            self._lengths[key] = sum(len(step) for step in steps if not self._left_out(step))
        return self._lengths[key]

    # Position ----------------------------------------------------------------------------------

    @property
    def _epoch(self) -> int:
        """The epoch of the next iteration."""
        return int(self.stream.start().position["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`, or at a position within it that
        was loaded and not iterated yet."""
        if self.epochs is not None and not epoch < self.epochs:
            raise ConfigError(
                f"epoch {epoch} was not planned: there are {self.epochs} epochs. Set epochs to the "
                f"number that is run."
            )
        kept = self._now is None and epoch == self._epoch
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


class PlannedBatchSampler(_MicroBatchSampler):
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
    >>> from evenstep.data import Lengths
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
        super().__init__(stream, epochs=epochs, drop_last=drop_last, progress=progress)

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

    def __iter__(self) -> Iterator[list[int]]:
        refuse_dispatching(batch_sampler=self)
        return (part.micro.segments.sample.tolist() for part in self._parts())


class StepSampler(_MicroBatchSampler):
    """A batch sampler of `Part`s for trainers, which count steps. Read them with `PartDataset`.

    Trainers make an optimizer step after a fixed number of batches. So every step has `per_step`
    micro-batches; empty ones follow if it needs fewer. With `epochs`, shorter epochs end with steps
    of empty micro-batches. Steps of `Steps(samples=...)` are counted without planning them.
    """

    def __init__(
        self,
        stream: PlannedStream,
        *,
        per_step: int,
        epochs: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.per_step = whole_number("per_step", per_step)
        fixed = stream.recipe.steps.micro_batches
        if stream.max_num_steps is not None or stream.infinite_loop:
            raise ConfigError(
                "max_num_steps and infinite_loop cannot be used with a trainer, which counts steps "
                "and epochs itself. Remove them, and set max_steps of the trainer."
            )
        if fixed is not None and fixed > per_step:
            raise ConfigError(
                f"steps have {fixed} micro-batches, more than {per_step} gradient accumulation "
                f"steps. Set Steps(micro_batches={per_step})."
            )
        super().__init__(stream, epochs=epochs, progress=progress)
        self._passed: list[StreamPosition] = []  # after each step of this epoch

    def __iter__(self) -> Iterator[Part]:
        self._passed = []
        return self._parts()

    def _parts_of(self, step: Step, before: StreamPosition) -> Iterator[Part]:
        """The micro-batches of a step, and empty ones up to `per_step`."""
        if len(step) > self.per_step:
            raise PlanError(
                f"step {step.number} has {len(step)} micro-batches per rank, more than "
                f"{self.per_step} gradient accumulation steps. Set gradient accumulation to "
                f"{len(step)} or more and resume, or raise the budget."
            )
        self._now = step.cursor
        self._passed.append(_position(step.cursor))
        empty = micro_batch([], self.stream.recipe)
        *others, last = [*step.micro_batches, *[empty] * (self.per_step - len(step))]
        for micro in others:
            yield Part(micro, step.epoch)
        yield Part(last, step.epoch, step.cursor.to_dict())

    def _micro_batches(self, epoch: int) -> int:
        return self.steps_of(epoch) * self.per_step

    def _count(self, epochs: int) -> None:
        if self.stream.steps_in_every_epoch is None:
            super()._count(epochs)

    def steps_of(self, epoch: int) -> int:
        """Steps of an epoch with work."""
        known = self.stream.steps_in_every_epoch
        return self.stream.epoch_size(epoch).steps if known is None else known

    def num_steps(self, epochs: int) -> int:
        """Steps of the first epochs together."""
        self._count(whole_number("epochs", epochs, least=0))
        return sum(self.steps_of(epoch) for epoch in range(epochs))

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epoch

    # Trainers that only save the number of steps, over epochs of equal length --------------------

    @property
    def steps(self) -> int:
        """Steps of an epoch, with those that fill up shorter ones."""
        return len(self) // self.per_step

    def is_filler(self, step: int) -> bool:
        """Whether a step, counted over all epochs, only has empty micro-batches."""
        epoch, number = divmod(step, self.steps)
        return number >= self.steps_of(epoch)

    @property
    def has_fillers(self) -> bool:
        """Whether any of the planned epochs is shorter than the longest."""
        return any(self.steps_of(epoch) < self.steps for epoch in range(self.epochs or 0))

    def position_after(self, step: int) -> dict[str, Any]:
        """The cursor after so many steps over all epochs."""
        epoch, done = divmod(step, self.steps)
        passed = self._passed[:done]  # of an epoch that was begun at its first step
        if not passed or self._epoch != epoch or len(passed) < min(done, self.steps_of(epoch)):
            passed = [self._skipped_to(epoch, done)]
        return self.stream.cursor(replace(passed[-1], step=step)).to_dict()

    def _skipped_to(self, epoch: int, done: int) -> StreamPosition:
        stream = copy.copy(self.stream)
        stream.set_epoch(epoch, 0)
        stream.skip_batches(done)
        return _position(stream.start())

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
        in_epoch = self._samples.in_epoch(part.epoch)
        samples = {number: in_epoch[number] for number in ids}
        missing = [number for number, sample in samples.items() if sample is None]
        micro = part.micro.without(missing) if missing else part.micro
        return part._replace(micro=micro), samples

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler."""
        self._sampler.set_epoch(epoch)


def _position(cursor: Cursor) -> StreamPosition:
    return StreamPosition.from_dict(cursor.position, cursor.step)


def _without_work(step: Step) -> PlanError:
    """The error for a micro-batch that has no sample to name."""
    if not step.totals:  # a step that was begun before
        return PlanError(
            f"the rest of step {step.number} has less work than ranks, and a batch sampler "
            f"cannot express empty micro-batches. Resume on fewer ranks, or use a StreamLoader."
        )
    return PlanError(
        f"step {step.number} has less work than ranks, and a batch sampler cannot express "
        f"empty micro-batches. Set drop_last=True to leave out such steps, set "
        f"epochs to get them as [], or use a StreamLoader."
    )
