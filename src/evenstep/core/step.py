"""Step: one optimizer update's work on one rank, and the place behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from evenstep.core import summary
from evenstep.core.cursor import Cursor
from evenstep.core.micro_batch import MicroBatch, samples_of
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray


class Samples(Protocol):
    """Samples by number: a dict, or a look-up that reads from a source."""

    def __getitem__(self, number: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """The micro-batches of one rank in one step, and the cursor that holds **after** it.

    Nothing is read until it is asked for: `read(k)` gets the samples of micro-batch k alone, so
    the first forward waits for one micro-batch. Because the cursor travels with the step,
    saving it is right however far a loader has run ahead.
    """

    number: int
    """Steps before this one, over all epochs."""
    epoch: int
    micro_batches: tuple[MicroBatch, ...]
    samples: Samples
    """Sample number -> sample; a look-up may read it from its source."""
    cursor: Cursor
    totals: Mapping[str, float] = field(default_factory=dict)
    """What is known of the whole step on all ranks before anything is read: `samples`, `tokens`,
    `empty` micro-batches, the imbalance of planned costs (`imbalance_step`,
    `imbalance_micro_batch`), and where the stream knows them `loss_tokens`, `sequences` (with a
    label) and `groups`."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Samples that went missing on the way here, by reason: skipped, dropped, truncated."""
    batches: tuple[Any, ...] | None = None
    """The micro-batches as tensors, where a loader has collated them already."""
    budget: int | None = None
    """The most slots of a micro-batch, the same on all ranks."""
    ranks: int = 1
    """Data-parallel ranks that share the step."""
    loss_tokens: Mapping[int, int] = field(default_factory=dict)
    """How many labels each sample of this rank trains, where `totals` counts on it: whoever
    collates a sample can tell whether that is so."""
    plan: Plan | None = None
    """The plan of this one step on all ranks, which numbers its samples from 0. Planned streams
    give it with every whole step; None for pooled steps and steps that were resumed inside."""
    sample_ids: IntArray | None = None
    """The id of each sample that `plan` numbers: sample i of the plan is `sample_ids[i]` of the
    source. None where `plan` is."""
    _read: dict[MicroBatch, MicroBatch] = field(default_factory=dict)
    """Each micro-batch in which reading skipped a sample, and what was read of it."""

    def __repr__(self) -> str:
        """What this rank runs of it, in one line."""
        micros = self.read_micro_batches
        tokens, slots = (sum(getattr(m, name) for m in micros) for name in ("tokens", "slots"))
        when = None
        if self.plan is not None:
            when = self.totals.get(f"imbalance_{self.plan.recipe.sync_every}")
        parts = (
            f"number {self.number}",
            f"epoch {self.epoch}",
            f"1 of {summary.counted(self.ranks, 'rank')}",
            summary.counted(len(self.own_sample_ids), "sample"),
            summary.counted(len(self), "micro-batch"),
            summary.fill(tokens, slots),
            "" if when is None else f"imbalance {when:.3f}",
            "" if self.batches is None else "collated",
        )
        return summary.line("Step", parts)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def read(self, k: int) -> tuple[MicroBatch, dict[int, Any]]:
        """Micro-batch k and its samples. One without those that could not be read and may be
        skipped: a source that skips gives None for them."""
        micro = self.micro_batches[k]
        found = {number: self.samples[number] for number in micro.segments.sample.tolist()}
        missing = [number for number, sample in found.items() if sample is None]
        if not missing:
            return micro, found
        self._read[micro] = micro.without(missing)
        return self._read[micro], found

    @property
    def read_micro_batches(self) -> tuple[MicroBatch, ...]:
        """The micro-batches as they were read so far: without the samples that were skipped."""
        return tuple(self._read.get(micro, micro) for micro in self.micro_batches)

    @property
    def own_sample_ids(self) -> IntArray:
        """The ids of the samples that this rank runs, ascending, each once. Those that reading
        skipped are not among them."""
        return samples_of(self.read_micro_batches)

    def __iter__(self) -> Iterator[tuple[MicroBatch, dict[int, Any]]]:
        return (self.read(k) for k in range(len(self)))

    def pin_memory(self) -> Step:
        """The same step with its batches in pinned memory, for a `DataLoader(pin_memory=True)`."""
        pinned = (b.pin_memory() if hasattr(b, "pin_memory") else b for b in self.batches or ())
        return self if self.batches is None else replace(self, batches=tuple(pinned))

    def loaded(self) -> Step:
        """The same step with every sample read, to be handed to another process."""
        read = [self.read(k) for k in range(len(self))]
        samples = {number: sample for _, found in read for number, sample in found.items()}
        skipped = sum(sample is None for sample in samples.values())
        lost = {**self.lost, "skipped": self.lost.get("skipped", 0) + skipped}
        micro_batches = tuple(micro for micro, _ in read)
        return replace(self, micro_batches=micro_batches, samples=samples, lost=lost, _read={})

    def collated(self, collate: Callable[[MicroBatch, Mapping[int, Any]], Any]) -> Step:
        """The same step with its micro-batches made into tensors and its samples let go."""
        step = self.loaded()
        batches = tuple(collate(micro, found) for micro, found in step)
        return replace(step, batches=batches, samples={})
