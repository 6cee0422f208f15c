"""StepSampler: the micro-batches of planned steps, one at a time, for trainers that count them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from evenstep.core.plan import MicroBatch
from evenstep.core.step import Step
from evenstep.core.text import whole_number
from evenstep.data.planned import PlannedStream, Progress, StreamPosition
from evenstep.data.pool import micro_batch
from evenstep.errors import ConfigError, CursorError, PlanError


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
