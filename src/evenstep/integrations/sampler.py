"""PlannedBatchSampler: a planned stream as torch's `batch_sampler`, for loaders we do not own."""

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


class PlannedBatchSampler:
    """The sample numbers of one micro-batch after the other: `DataLoader(data, batch_sampler=...)`.

    A sampler names whole samples, so it has no words for a piece of one or for an empty
    micro-batch: over-long samples cannot be split or truncated, and where an epoch's last step
    has less work than ranks, `drop_last` leaves that step out (and counts it in `dropped`).

    It gives out the micro-batches of the stream's rank. accelerate, and with it the Hugging Face
    Trainer, deals the batches of any sampler to its processes once more, and would leave most of
    them out; it is stopped. Give it `PlannedBatchSampler.for_accelerate(stream)`, which names the
    micro-batches of all ranks in turn, so that each process is dealt its own.

    A trainer that counts batches makes an optimizer step after `gradient_accumulation_steps` of
    them. Plan with `Steps(micro_batches=gradient_accumulation_steps)`, so that its steps are the
    plan's. With steps of samples or tokens `len` is an estimate, by which a trainer may stop a
    little before the end of its last epoch.

    `state_dict` is exact after any micro-batch, also within a step, and also on another number of
    ranks. It is the place behind what the loader has asked for: torch's own `DataLoader` asks
    ahead for its workers, so with `num_workers` above 0 save the state of torchdata's
    `StatefulDataLoader` instead, which keeps the sampler's state of every batch it hands on.

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
                f"overflow is {stream.recipe.overflow!r}, but a batch sampler can only name whole "
                f"samples, so the rest of an over-long one would run too. Use overflow 'drop', "
                f"'alone' or 'error', or a StreamLoader."
            )
        self.stream = stream
        self.leave_out = truth_value("drop_last", drop_last)
        self.all_ranks = truth_value("all_ranks", all_ranks)
        self.dropped = 0
        """Samples of steps that were left out, so far."""
        self._now: Cursor | None = None

    @classmethod
    def for_accelerate(
        cls, stream: PlannedStream, *, drop_last: bool = False
    ) -> PlannedBatchSampler:
        """A sampler whose batches accelerate deals to its processes: those of all ranks in turn."""
        return cls(stream, drop_last=drop_last, all_ranks=True)

    @property
    def batch_size(self) -> None:
        """None: micro-batches have no common size. Whoever asks deals batches out by itself."""
        if not self.all_ranks and self.stream.world.size > 1:
            raise ConfigError(
                f"this sampler gives out the micro-batches of rank {self.stream.world.rank} alone; "
                f"dealing them to {self.stream.world.size} processes again would leave most "
                f"samples out. Use PlannedBatchSampler.for_accelerate(stream)."
            )

    @property
    def drop_last(self) -> bool:
        """False for whoever deals batches out: all ranks have equally many."""
        return False

    def __iter__(self) -> Iterator[list[int]]:
        ranks = self.stream.world.size
        before = self._begin()
        fruitful = before.epoch
        walk = self.stream.walk_all() if self.all_ranks else ([step] for step in self.stream.walk())
        for steps in walk:
            if steps[0].epoch != before.epoch:  # the step before was the last of its epoch
                before = StreamPosition(steps[0].epoch, 0, before.step)
            after = StreamPosition.from_dict(steps[0].cursor.place, steps[0].cursor.step)
            if self._left_out(steps):
                if after.epoch > fruitful + 1:
                    raise PlanError(
                        f"all steps of epoch {fruitful + 1} have less work than ranks and are left "
                        f"out, so the sampler would never go on. Use fewer ranks or more samples "
                        f"a step, or a StreamLoader."
                    )
                before, self._now = after, steps[0].cursor
                continue
            fruitful = after.epoch
            done = before.inside[-1][1] if before.inside and before.inside[-1][0] == ranks else 0
            count = len(steps[0])
            for k in range(count):
                for step in steps:
                    here = after if k + 1 == count else before.within(ranks, done + k + 1)
                    if step is steps[-1]:
                        self._now = self.stream.cursor(here)
                    yield self._named(step.micro_batches[k], step)
            before = after

    def _begin(self) -> StreamPosition:
        cursor = self.stream.start()
        self._now = cursor
        return StreamPosition.from_dict(cursor.place, cursor.step)

    def _left_out(self, steps: list[Step]) -> bool:
        """Whether a step is left out, because some rank would have nothing to do in it."""
        step = steps[0]
        if not self.leave_out or not step.totals:
            return False
        # Every rank must decide alike, so not by its own micro-batches but by the plan of all.
        empty = step.totals["empty"] > 0
        if empty:
            self.dropped += int(step.totals.get("samples", 0))
        return empty

    def _named(self, micro: MicroBatch, step: Step) -> list[int]:
        if micro.is_empty and not step.totals:
            raise PlanError(
                f"of step {step.number}, which other ranks began, less is left than there are "
                f"ranks, so a micro-batch is empty, which a batch sampler cannot express. Go on "
                f"with fewer ranks, or use a StreamLoader."
            )
        if micro.is_empty:
            raise PlanError(
                f"step {step.number} has less work than ranks, so a micro-batch of it is empty, "
                f"which a batch sampler cannot express. Set drop_last=True to leave such a step "
                f"out, or use a StreamLoader."
            )
        numbers: list[int] = micro.segments.sample.tolist()
        return numbers

    def __len__(self) -> int:
        """Micro-batches of one pass; an estimate wherever lengths decide it."""
        stream = self.stream
        each = stream.micro_batches_per_step
        return len(stream) * each * (stream.world.size if self.all_ranks else 1)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the beginning of `epoch`, or at the place within it that was
        loaded and not iterated yet."""
        self.stream.set_epoch(epoch, None if self._now is None else self._now.step)

    def state_dict(self) -> dict[str, Any]:
        """The place behind the micro-batch that was given out last (of the last rank)."""
        return (self.stream.start() if self._now is None else self._now).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin behind the micro-batch that the state was taken after."""
        self.stream.load_state_dict(state)
        self._now = None
