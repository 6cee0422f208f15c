"""Step: the work of one rank in one optimizer update, and the cursor after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from evenstep.core import summary
from evenstep.core.cursor import Cursor
from evenstep.core.micro_batch import MicroBatch, samples_of
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray


class Samples(Protocol):
    """Samples by id: a dict, or a look-up that reads from a source."""

    def __getitem__(self, sample_id: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """The micro-batches of one rank in one step, and the cursor that holds **after** it.

    Samples are read lazily: `read(k)` reads the samples of micro-batch k only. The cursor belongs
    to the step, so saving it is correct however far a loader has prefetched.

    >>> from evenstep import Packed, PlannedStream, Recipe
    >>> from evenstep.data import InMemory
    >>> source = InMemory([{"input_ids": [1, 2, 3]}])
    >>> (step,) = PlannedStream(source, Recipe(layout=Packed(max_tokens=8)))
    >>> [samples for micro, samples in step]
    [{0: {'input_ids': [1, 2, 3]}}]
    """

    number: int
    """Steps before this one, over all epochs."""
    epoch: int
    micro_batches: tuple[MicroBatch, ...]
    samples: Samples
    """Sample id -> sample; a look-up may read it from its source."""
    cursor: Cursor
    totals: Mapping[str, float] = field(default_factory=dict)
    """Totals of the step over all ranks, known before samples are read: `samples`, `tokens`,
    `empty` micro-batches, the imbalance of planned costs (`imbalance_step`,
    `imbalance_micro_batch`) and, if the stream knows them, `loss_tokens`, `sequences` (those with
    a label) and `groups`."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Samples lost before or in this step, by reason: skipped, dropped, truncated."""
    batches: tuple[Any, ...] | None = None
    """The micro-batches as tensors, if a loader has collated them."""
    budget: int | None = None
    """The most slots of a micro-batch, the same on all ranks."""
    ranks: int = 1
    """Data-parallel ranks that share the step."""
    loss_tokens: Mapping[int, int] = field(default_factory=dict)
    """The loss tokens that `totals` assumes for each sample of this rank, by id; collating checks
    them."""
    plan: Plan | None = None
    """The plan of this step on all ranks; it numbers samples from 0. Planned streams set it for
    every whole step. None for pooled steps and for steps that were resumed midway."""
    sample_ids: IntArray | None = None
    """Sample i of `plan` has the id `sample_ids[i]` in the source. None if `plan` is None."""
    costs: tuple[float, ...] = ()
    """The planned work of each micro-batch of this rank, second work included; empty if `plan` is
    None."""
    fingerprint: str = ""
    """A digest of the stream and the position, equal on all ranks of a planned stream; empty if
    unknown. `Runner` compares it over ranks at its first step."""
    _read: dict[MicroBatch, MicroBatch] = field(default_factory=dict)
    """Micro-batches of which reading skipped a sample -> what remains of them."""

    def __repr__(self) -> str:
        """This rank's share of the step, in one line."""
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
        """(micro-batch k, its samples by id).

        The micro-batch does not contain samples that the source skipped, for which it gives None.
        """
        micro = self.micro_batches[k]
        found = {id_: self._sample(id_) for id_ in micro.segments.sample.tolist()}
        missing = [id_ for id_, sample in found.items() if sample is None]
        if not missing:
            return micro, found
        self._read[micro] = micro.without(missing)
        return self._read[micro], found

    def _sample(self, sample_id: int) -> Any:
        try:
            return self.samples[sample_id]
        except Exception as error:
            with suppress(Exception):
                error.add_note(f"while reading sample {sample_id}")
            raise

    @property
    def read_micro_batches(self) -> tuple[MicroBatch, ...]:
        """The micro-batches as read so far, without skipped samples."""
        return tuple(self._read.get(micro, micro) for micro in self.micro_batches)

    @property
    def own_sample_ids(self) -> IntArray:
        """The ids of the samples that this rank runs, ascending, without skipped ones."""
        return samples_of(self.read_micro_batches)

    def __iter__(self) -> Iterator[tuple[MicroBatch, dict[int, Any]]]:
        return (self.read(k) for k in range(len(self)))

    def pin_memory(self) -> Step:
        """The same step with its batches in pinned memory, for a `DataLoader(pin_memory=True)`."""
        pinned = (b.pin_memory() if hasattr(b, "pin_memory") else b for b in self.batches or ())
        return self if self.batches is None else replace(self, batches=tuple(pinned))

    def loaded(self) -> Step:
        """The same step with every sample read, for another process."""
        read = [self.read(k) for k in range(len(self))]
        samples = {id_: sample for _, found in read for id_, sample in found.items()}
        skipped = sum(sample is None for sample in samples.values())
        lost = {**self.lost, "skipped": self.lost.get("skipped", 0) + skipped}
        micro_batches = tuple(micro for micro, _ in read)
        return replace(self, micro_batches=micro_batches, samples=samples, lost=lost, _read={})

    def collated(self, collate: Callable[[MicroBatch, Mapping[int, Any]], Any]) -> Step:
        """The same step with its micro-batches as tensors and without its samples."""
        step = self.loaded()
        batches = tuple(collate(micro, found) for micro, found in step)
        return replace(step, batches=batches, samples={})
