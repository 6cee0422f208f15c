"""PlannedBatchSampler: a planned stream as a torch `batch_sampler`, for existing loaders."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from evenstep.core.plan import MicroBatch
from evenstep.core.step import Cursor, Step
from evenstep.core.text import truth_value, whole_number
from evenstep.data.planned import PlannedStream, Progress, StreamPosition
from evenstep.errors import ConfigError, PlanError
from evenstep.integrations.dispatching import refuse_dispatching

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
