"""Planned micro-batches as a torch `batch_sampler`: of sample ids, and of parts for trainers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from evenstep.core.plan import MicroBatch
from evenstep.core.step import Step
from evenstep.core.text import truth_value, whole_number
from evenstep.data.planned import PlannedStream, StreamPosition
from evenstep.data.pool import micro_batch
from evenstep.data.source import Progress
from evenstep.errors import ConfigError, CursorError, PlanError
from evenstep.integrations.dataloader import Collate, refuse_dispatching

__all__ = ["PlannedBatchSampler"]


class Part(NamedTuple):
    """A micro-batch of a step, or an empty one that fills up a step or an epoch.

    `state` is the position after the step, with its last micro-batch only: a trainer repeats a
    step that has begun.
    """

    micro: MicroBatch
    epoch: int
    state: dict[str, Any] | None = None


class PlannedBatchSampler:
    """The sample ids of every micro-batch of this rank: `DataLoader(data, batch_sampler=...)`.

    A batch sampler can only name whole samples, so over-long samples cannot be split or truncated,
    and samples cannot share prefixes.
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
    per_step  for loaders of trainers, which make an optimizer step after a fixed number of batches:
              every step has as many micro-batches, and empty ones follow if it needs fewer. The
              sampler then yields `Part`s, which `PartDataset` reads, also of divided samples

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
        per_step: int | None = None,
    ) -> None:
        self.per_step = None if per_step is None else whole_number("per_step", per_step)
        if per_step is None and stream.recipe.overflow in ("split", "truncate"):
            raise ConfigError(
                f"overflow={stream.recipe.overflow!r} cannot be used with a batch sampler, which "
                f"can only name whole samples. Use overflow 'drop', 'alone' or 'error', or a "
                f"StreamLoader."
            )
        if per_step is None and stream.shares_prefixes:
            raise ConfigError(
                "micro-batches whose samples share prefixes, or are shared between ranks, cannot "
                "be used with a batch sampler, which can only name whole samples. Plan without "
                "prefixes and sharing, or use a StreamLoader."
            )
        ends_elsewhere = stream.infinite_loop or stream.max_num_steps is not None
        if per_step is not None and ends_elsewhere:
            raise ConfigError(
                "max_num_steps and infinite_loop cannot be used with a trainer, which counts steps "
                "and epochs itself. Remove them, and set max_steps of the trainer."
            )
        fixed = stream.recipe.steps.micro_batches
        if per_step is not None and fixed is not None and fixed > per_step:
            raise ConfigError(
                f"steps have {fixed} micro-batches, more than {per_step} gradient accumulation "
                f"steps. Set Steps(micro_batches={per_step})."
            )
        self.stream, self.progress = stream, progress
        self.epochs = None if epochs is None else whole_number("epochs", epochs)
        self._drop_last = truth_value("drop_last", drop_last)
        if epochs is not None and ends_elsewhere:
            raise ConfigError(
                "epochs cannot be combined with max_num_steps or infinite_loop, which end a stream "
                "elsewhere. Remove epochs."
            )
        self.dropped = 0
        """Number of samples in steps that were left out so far."""
        self._filled = 0  # empty micro-batches at the end of the epoch that were yielded
        self._skipped = 0  # those before the start
        self._passed: list[StreamPosition] = []  # after each step of this iteration
        self._longest: int | None = None  # micro-batches of the longest of `epochs`
        self._lengths: dict[tuple[StreamPosition, int], int] = {}

    # Iterating ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        self._passed = []
        if self.per_step is not None:
            return self._parts()
        refuse_dispatching(self)
        return (part.micro.segments.sample.tolist() for part in self._parts())

    def _parts(self) -> Iterator[Part]:
        start, self._filled = self.stream.start(), self._skipped
        self.stream.passed(start)
        before = StreamPosition.of(start)
        epoch = last_epoch = before.epoch  # the last one with a step that was not left out
        for step in self.stream.walk():
            if step.epoch != before.epoch:  # the previous step was the last of its epoch
                before = StreamPosition(step.epoch, 0, before.step)
            after = StreamPosition.of(step.cursor)
            if self._left_out(step):
                if after.epoch > last_epoch + 1:
                    raise PlanError(
                        f"all steps of epoch {last_epoch + 1} have less work than ranks and are "
                        f"left out. Use fewer ranks, more samples per step, or a StreamLoader."
                    )
                self.dropped += int(step.totals.get("samples", 0))
                self.stream.passed(step.cursor)
            else:
                last_epoch = after.epoch
                yield from self._parts_of(step, before)
            before = after
        missing = 0 if self.epochs is None else len(self) - self.micro_batches_of(epoch)
        empty = micro_batch([], self.stream.recipe)
        while self._filled < missing:
            self._filled += 1
            yield Part(empty, epoch)

    def _parts_of(self, step: Step, before: StreamPosition) -> Iterator[Part]:
        """The micro-batches of a step, and empty ones up to `per_step`. A trainer repeats a step
        that has begun; otherwise the position is known within it, too."""
        count = len(step) if self.per_step is None else self.per_step
        if len(step) > count:
            raise PlanError(
                f"step {step.number} has {len(step)} micro-batches per rank, more than "
                f"{count} gradient accumulation steps. Set gradient accumulation to "
                f"{len(step)} or more and resume, or raise the budget."
            )
        ranks = self.stream.world.size
        done = before.inside[-1][1] if before.inside and before.inside[-1][0] == ranks else 0
        missing = count - len(step)
        empty = [micro_batch([], self.stream.recipe)] * missing if missing else []
        if self.per_step is not None:
            self._passed.append(StreamPosition.of(step.cursor))
        for number, micro in enumerate([*step.micro_batches, *empty], 1):
            now, state = step.cursor, None
            if self.per_step is None:
                if number < count:
                    now = self.stream.cursor(before.within(ranks, done + number))
                if micro.is_empty and self.epochs is None:
                    raise _without_work(step)
            elif number == count:
                state = step.cursor.to_dict()
            self.stream.passed(now)
            yield Part(micro, step.epoch, state)

    def _left_out(self, step: Step) -> bool:
        """Whether a step is left out because a rank has no work in it. All ranks must agree, so
        this depends on the whole plan, not on the rank's micro-batches."""
        return self._drop_last and bool(step.totals) and step.totals["empty"] > 0

    @property
    def batch_size(self) -> None:
        """None, because micro-batches differ in size. Only code that distributes batches over
        processes itself reads it, which is wrong for the batches of one rank."""
        if self.per_step is None and self.stream.world.size > 1:
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

    # Length ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The exact number of micro-batches of an epoch; with `max_num_steps`, of those steps."""
        stream = self.stream
        if stream.infinite_loop or stream.max_num_steps is not None:
            return self._counted()
        if self.epochs is None:
            return self.micro_batches_of(self.epoch)
        if self._longest is None:
            self._count(self.epochs)
            self._longest = max(map(self.micro_batches_of, range(self.epochs)))
        return self._longest

    def micro_batches_of(self, epoch: int) -> int:
        """Micro-batches of an epoch with work."""
        if self.per_step is not None:
            return self.steps_of(epoch) * self.per_step
        size = self.stream.epoch_size(epoch, drop_last=self._drop_last, progress=self.progress)
        return size.micro_batches

    def _count(self, epochs: int) -> None:
        """Plan epochs to count them, with one report of progress for all."""
        if self.per_step is None or self.stream.steps_in_every_epoch is None:
            self.stream.micro_batches_per_epoch(
                epochs, drop_last=self._drop_last, progress=self.progress
            )

    def _counted(self) -> int:
        """Micro-batches from the start to `max_num_steps`."""
        key = StreamPosition.of(self.stream.start()), len(self.stream)
        if key not in self._lengths:
            steps = copy.copy(self.stream).walk()  # a copy: counting is not iterating
            self._lengths[key] = sum(len(step) for step in steps if not self._left_out(step))
        return self._lengths[key]

    def steps_of(self, epoch: int) -> int:
        """Steps of an epoch with work."""
        known = self.stream.steps_in_every_epoch
        return self.stream.epoch_size(epoch).steps if known is None else known

    def num_steps(self, epochs: int) -> int:
        """Steps of the first epochs together."""
        self._count(whole_number("epochs", epochs, least=0))
        return sum(self.steps_of(epoch) for epoch in range(epochs))

    # Position ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
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
        before = self.stream.moves
        self.stream.set_epoch(epoch)
        self._skipped = self._skipped if self.stream.moves == before else 0
        self._filled = self._skipped

    def state_dict(self) -> dict[str, Any]:
        """The position after the last micro-batch that was yielded."""
        state = self.stream.state_dict()
        return {**state, "filled": self._filled} if self._filled else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start after the micro-batch that the state was taken at."""
        self.stream.load_state_dict(state)
        self._filled = self._skipped = int(state.get("filled", 0))

    # Trainers that only save the number of steps, over epochs of equal length --------------------

    @property
    def steps(self) -> int:
        """Steps of an epoch, with those that fill up shorter ones."""
        assert self.per_step is not None
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
        if not passed or self.epoch != epoch or len(passed) < min(done, self.steps_of(epoch)):
            stream = copy.copy(self.stream)
            stream.set_epoch(epoch, 0)
            stream.skip_batches(done)
            passed = [StreamPosition.of(stream.start())]
        return self.stream.cursor(replace(passed[-1], step=step)).to_dict()

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


# Keys of what is added to the inputs of a micro-batch; the model does not get them.
PREDICTED, STATE = "evenstep_predicted", "evenstep_state"


class PartDataset(Dataset):  # type: ignore[misc]
    """Reads the samples of a sampler's micro-batches and makes inputs of them, in the worker.

    `set_epoch` sets that of the sampler: the one hook that accelerate keeps in all its loaders.
    """

    def __init__(self, sampler: PlannedBatchSampler, collate: Collate) -> None:
        self._sampler, self._samples = sampler, sampler.stream.samples
        self._collate = CountedCollate(collate)

    def __len__(self) -> int:
        return len(self._samples.source)

    def __getitems__(self, part: Part) -> dict[str, Any]:
        """The inputs of a micro-batch without samples that the source skipped, and its state."""
        in_epoch = self._samples.in_epoch(part.epoch)
        samples = {number: in_epoch[number] for number in part.micro.segments.sample.tolist()}
        missing = [number for number, sample in samples.items() if sample is None]
        micro = part.micro.without(missing) if missing else part.micro
        return {**self._collate(micro, samples), STATE: part.state}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler."""
        self._sampler.set_epoch(epoch)


@dataclass(frozen=True, slots=True)
class CountedCollate:
    """The inputs of a micro-batch, and how many of its tokens are predicted: all but the first of
    each sample."""

    collate: Collate

    def __call__(self, micro: MicroBatch, samples: Mapping[int, Any]) -> dict[str, Any]:
        segments = micro.segments
        predicted = int(segments.length.sum() - (segments.start == 0).sum())
        return {**self.collate(micro, samples), PREDICTED: predicted}


def pop_predicted(inputs: dict[str, Any]) -> int:
    """Remove what was added to the inputs; the number of tokens to predict, 1 if not known."""
    inputs.pop(STATE, None)
    return int(inputs.pop(PREDICTED, 1))


def _without_work(step: Step) -> PlanError:
    """The error for a micro-batch that has no sample to name."""
    begun = not step.totals  # a step that was begun before
    remedy = "Set drop_last=True to leave out such steps, set epochs to get them as []"
    return PlanError(
        f"{'the rest of ' if begun else ''}step {step.number} has less work than ranks, and a "
        f"batch sampler cannot express empty micro-batches. "
        f"{'Resume on fewer ranks' if begun else remedy}, or use a StreamLoader."
    )
