"""Step: the work of one rank in one optimizer update, and the cursor after it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from evenstep.core.plan import MicroBatch, Plan, samples_of
from evenstep.core.ragged import IntArray
from evenstep.core.text import counted, fill, line
from evenstep.errors import CursorError

_VERSION = 1  # of the JSON of a cursor


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """The position of a stream after `step` steps, and a description of that stream.

    `identity` describes the stream: data, order, steps. `position` is what the stream needs to
    continue, as plain JSON. Neither depends on rank or worker unless the stream's order does.

    >>> cursor = Cursor(identity={"seed": "0"}, step=3, position={"epoch": 0, "position": 24})
    >>> Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))) == cursor
    True
    """

    identity: Mapping[str, str]
    step: int
    position: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """A `state_dict` of plain data, for JSON and checkpoints."""
        # The keys are those of the first release, so that either reads the other's files.
        body = {"step": self.step, "belongs": dict(self.identity), "place": dict(self.position)}
        return {"evenstep_cursor": _VERSION, **body, "digest": _digest(body)}

    @classmethod
    def from_dict(cls, state: object) -> Cursor:
        """The cursor of a `state_dict`. Raises `CursorError` if it is damaged or not a cursor."""
        if not isinstance(state, Mapping) or "evenstep_cursor" not in state:
            what = type(state).__name__
            if isinstance(state, Mapping):
                what = f"keys {', '.join(map(repr, list(state)[:4]))}" if state else "empty"
            raise CursorError(
                f"this state ({what}) is not an Evenstep cursor. Pass the result of "
                f"state_dict() or step.cursor.to_dict()."
            )
        if state["evenstep_cursor"] != _VERSION:
            raise CursorError(
                f"the cursor has version {state['evenstep_cursor']}; this release reads version "
                f"{_VERSION}. Resume with the release that wrote it."
            )
        step, identity, position = (state.get(name) for name in ("step", "belongs", "place"))
        try:
            body = {"step": step, "belongs": identity, "place": position}
            intact = state.get("digest") == _digest(body)
        except (TypeError, ValueError):
            intact = False
        if not (
            intact
            and isinstance(step, int)
            and isinstance(identity, Mapping)
            and isinstance(position, Mapping)
        ):
            raise CursorError(
                "the cursor is damaged (its digest does not match). Use an earlier checkpoint."
            )
        return cls(identity=dict(identity), step=step, position=dict(position))

    def differences(self, identity: Mapping[str, str]) -> dict[str, str]:
        """What differs from the stream of this cursor, by name, in words."""
        return {
            name: f"{name} was {self.identity.get(name, 'not given')!s} and is "
            f"{identity.get(name, 'not given')!s}"
            for name in sorted({*self.identity, *identity})
            if self.identity.get(name) != identity.get(name)
        }

    def check(self, identity: Mapping[str, str]) -> None:
        """Raise if the cursor belongs to another stream."""
        differing = self.differences(identity)
        if differing:
            raise CursorError(
                f"the cursor belongs to another stream: {'; '.join(differing.values())}. Resuming "
                f"would repeat or lose samples. Restore the stream as it was, or start without the "
                f"cursor."
            )


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


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
    context_ranks: int = 1
    """Context-parallel ranks of each of them (`topology.cp`), which divide its samples."""
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
            f"1 of {counted(self.ranks, 'rank')}",
            counted(len(self.own_sample_ids), "sample"),
            counted(len(self), "micro-batch"),
            fill(tokens, slots),
            "" if when is None else f"imbalance {when:.3f}",
            "" if self.batches is None else "collated",
        )
        return line("Step", parts)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def read(self, k: int) -> tuple[MicroBatch, dict[int, Any]]:
        """(micro-batch k, its samples by id).

        The micro-batch does not contain samples that the source skipped, for which it gives None.
        """
        micro = self.micro_batches[k]
        samples = {id_: self._sample(id_) for id_ in micro.segments.sample.tolist()}
        # A source gives None for a sample that it skips: its slots become padding.
        missing = [id_ for id_, sample in samples.items() if sample is None]
        if not missing:
            return micro, samples
        self._read[micro] = micro.without(missing)
        return self._read[micro], samples

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
        samples = {id_: sample for _, by_id in read for id_, sample in by_id.items()}
        skipped = sum(sample is None for sample in samples.values())
        lost = {**self.lost, "skipped": self.lost.get("skipped", 0) + skipped}
        micro_batches = tuple(micro for micro, _ in read)
        return replace(self, micro_batches=micro_batches, samples=samples, lost=lost, _read={})

    def collated(self, collate: Callable[[MicroBatch, Mapping[int, Any]], Any]) -> Step:
        """The same step with its micro-batches as tensors and without its samples."""
        step = self.loaded()
        batches = tuple(collate(micro, samples) for micro, samples in step)
        return replace(step, batches=batches, samples={})
