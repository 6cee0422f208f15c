"""PlannedBatchSampler: a planned stream as a torch `batch_sampler`, for existing loaders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evenstep.core.cursor import Cursor
from evenstep.core.micro_batch import MicroBatch
from evenstep.core.step import Step
from evenstep.core.validate import truth_value
from evenstep.data.streams.planned import PlannedStream
from evenstep.data.streams.position import StreamPosition
from evenstep.errors import ConfigError, PlanError

__all__ = ["PlannedBatchSampler"]


class PlannedBatchSampler:
    """The sample ids of every micro-batch: `DataLoader(data, batch_sampler=...)`.

    A batch sampler can only name whole samples. So over-long samples cannot be split or truncated,
    and there are no empty micro-batches: if the last step of an epoch has less work than ranks,
    set `drop_last` to leave that step out (counted in `dropped`).

    It yields the micro-batches of the stream's rank. accelerate, and so the Hugging Face Trainer,
    distributes the batches of a sampler over its processes. Pass it
    `PlannedBatchSampler.for_accelerate(stream)`, which yields the micro-batches of all ranks in
    turn, so that each process gets its own.

    A trainer that counts batches makes an optimizer step after `gradient_accumulation_steps` of
    them. Use `Steps(micro_batches=gradient_accumulation_steps)`, so that its steps are those of
    the plan. With steps of samples or tokens, `len` is an estimate, so a trainer may stop slightly
    before the end of its last epoch.

    `state_dict` is exact after any micro-batch, also within a step and for another number of
    ranks. It is the position after the last batch that the loader requested. torch's `DataLoader`
    requests batches ahead for its workers; with `num_workers` above 0, save the state of
    torchdata's `StatefulDataLoader` instead, which is that of the batch yielded last.

    >>> import numpy as np
    >>> from evenstep import Packed, Recipe, Steps
    >>> from evenstep.data.sources.lengths import Lengths
    >>> recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=4))
    >>> stream = PlannedStream(Lengths(np.array([5, 3, 4, 2])), recipe, shuffle=False)
    >>> list(PlannedBatchSampler(stream))
    [[0, 1], [2, 3]]
    """

    def __init__(
        self, stream: PlannedStream, *, drop_last: bool = False, all_ranks: bool = False
    ) -> None:
        if stream.recipe.overflow in ("split", "truncate"):
            raise ConfigError(
                f"overflow={stream.recipe.overflow!r} cannot be used with a batch sampler, which "
                f"can only name whole samples. Use overflow 'drop', 'alone' or 'error', or a "
                f"StreamLoader."
            )
        self.stream = stream
        self._drop_last = truth_value("drop_last", drop_last)
        self.all_ranks = truth_value("all_ranks", all_ranks)
        self.dropped = 0
        """Number of samples in steps that were left out so far."""
        self._now: Cursor | None = None

    @classmethod
    def for_accelerate(
        cls, stream: PlannedStream, *, drop_last: bool = False
    ) -> PlannedBatchSampler:
        """A sampler for accelerate, which distributes its batches over processes: those of all
        ranks in turn."""
        return cls(stream, drop_last=drop_last, all_ranks=True)

    @property
    def batch_size(self) -> None:
        """None, because micro-batches differ in size. Only code that distributes batches over
        processes itself reads it, which is wrong for the batches of one rank."""
        if not self.all_ranks and self.stream.world.size > 1:
            raise ConfigError(
                f"this sampler yields the micro-batches of rank {self.stream.world.rank} only; "
                f"distributing them over {self.stream.world.size} processes would lose samples. "
                f"Use PlannedBatchSampler.for_accelerate(stream)."
            )

    @property
    def drop_last(self) -> bool:
        """False, as read by code that distributes batches: all ranks have the same number."""
        return False

    def __iter__(self) -> Iterator[list[int]]:
        ranks = self.stream.world.size
        before = self._begin()
        last_epoch = before.epoch  # with a step that was not left out
        walk = self.stream.walk_all() if self.all_ranks else ([step] for step in self.stream.walk())
        for steps in walk:
            if steps[0].epoch != before.epoch:  # the previous step was the last of its epoch
                before = StreamPosition(steps[0].epoch, 0, before.step)
            after = StreamPosition.from_dict(steps[0].cursor.place, steps[0].cursor.step)
            if self._left_out(steps):
                if after.epoch > last_epoch + 1:
                    raise PlanError(
                        f"all steps of epoch {last_epoch + 1} have less work than ranks and are "
                        f"left out. Use fewer ranks, more samples per step, or a StreamLoader."
                    )
                before, self._now = after, steps[0].cursor
                continue
            last_epoch = after.epoch
            done = before.inside[-1][1] if before.inside and before.inside[-1][0] == ranks else 0
            count = len(steps[0])
            for k in range(count):
                for step in steps:
                    at = after if k + 1 == count else before.within(ranks, done + k + 1)
                    if step is steps[-1]:
                        self._now = self.stream.cursor(at)
                    yield self._sample_ids(step.micro_batches[k], step)
            before = after

    def _begin(self) -> StreamPosition:
        cursor = self.stream.start()
        self._now = cursor
        return StreamPosition.from_dict(cursor.place, cursor.step)

    def _left_out(self, steps: list[Step]) -> bool:
        """Whether a step is left out because a rank has no work in it."""
        step = steps[0]
        if not self._drop_last or not step.totals:
            return False
        # All ranks must agree, so this depends on the whole plan, not on the rank's micro-batches.
        empty = step.totals["empty"] > 0
        if empty:
            self.dropped += int(step.totals.get("samples", 0))
        return empty

    def _sample_ids(self, micro: MicroBatch, step: Step) -> list[int]:
        if micro.is_empty and not step.totals:
            raise PlanError(
                f"the rest of step {step.number} has less work than ranks, and a batch sampler "
                f"cannot express empty micro-batches. Resume on fewer ranks, or use a StreamLoader."
            )
        if micro.is_empty:
            raise PlanError(
                f"step {step.number} has less work than ranks, and a batch sampler cannot express "
                f"empty micro-batches. Set drop_last=True to leave out such steps, or use a "
                f"StreamLoader."
            )
        sample_ids: list[int] = micro.segments.sample.tolist()
        return sample_ids

    def __len__(self) -> int:
        """Micro-batches of one pass; an estimate if they depend on lengths."""
        stream = self.stream
        each = stream.micro_batches_per_step
        return len(stream) * each * (stream.world.size if self.all_ranks else 1)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`, or at a position within it that
        was loaded and not iterated yet."""
        self.stream.set_epoch(epoch, None if self._now is None else self._now.step)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last micro-batch that was yielded; with `all_ranks`, that was
        yielded for every rank."""
        return (self.stream.start() if self._now is None else self._now).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start after the micro-batch that the state was taken at."""
        self.stream.load_state_dict(state)
        self._now = None
