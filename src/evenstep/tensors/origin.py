"""Origin: which tokens of which samples lie in the micro-batches that results come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from evenstep.core.identity import sample_name
from evenstep.core.micro_batch import MicroBatch
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, offsets_of
from evenstep.core.segments import Segments
from evenstep.core.step import Step
from evenstep.data.streams.feed import FedMicroBatch
from evenstep.errors import InputError

Key: TypeAlias = tuple[int, int, int]
"""(step, rank, position): `plan[step, rank][position]`."""
Work: TypeAlias = Plan | Step | Sequence[MicroBatch | FedMicroBatch]
"""A plan of all ranks, or what one rank runs: a step, or micro-batches in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Micro-batches as flat arrays, numbered in the order of their results.

    Row i of what is restored is sample `ids[i]`, and `segments.sample` holds such rows. All
    samples of a plan have one, and those that a rank runs of its step, ascending by id.
    """

    work: Work
    ids: IntArray  # per sample
    lengths: IntArray  # per sample, the whole length
    segments: Segments
    ends: IntArray  # per segment, where its sample ends in what is run
    row_offsets: IntArray
    micro_offsets: IntArray
    widths: IntArray  # per micro-batch
    alignments: IntArray  # per micro-batch

    @classmethod
    def of(cls, work: Work) -> Origin:
        """The origin of what a plan, a step or micro-batches give."""
        if isinstance(work, Plan):
            return cls(
                work,
                np.arange(len(work.lengths)),
                work.lengths,
                work.segments,
                work.ends(work.segments.sample),
                work.row_offsets,
                work.micro_offsets,
                work.widths,
                np.full(work.num_micro_batches, work.recipe.topology.alignment),
            )
        return cls._of_micro_batches(work, _micro_batches(work))

    @classmethod
    def _of_micro_batches(cls, work: Work, micros: Sequence[MicroBatch]) -> Origin:
        segments = [micro.segments for micro in micros]
        ids, sample = np.unique(_joined([s.sample for s in segments]), return_inverse=True)
        lengths = np.zeros(len(ids), np.int64)
        lengths[sample] = _joined([micro.sample_lengths for micro in micros])
        before = offsets_of(np.array([len(s) for s in segments], np.int64))
        rows = [micro.row_offsets[1:] + first for micro, first in zip(micros, before, strict=False)]
        return cls(
            work,
            ids,
            lengths,
            Segments(
                sample, _joined([s.start for s in segments]), _joined([s.length for s in segments])
            ),
            _joined([micro.sample_ends for micro in micros]),
            _joined([np.zeros(1, np.int64), *rows]),
            offsets_of(np.array([micro.rows for micro in micros], np.int64)),
            np.array([micro.width for micro in micros], np.int64),
            np.array([micro.alignment for micro in micros], np.int64),
        )

    def __len__(self) -> int:
        return len(self.widths)

    @property
    def rows(self) -> IntArray:
        """Rows of each micro-batch."""
        return np.diff(self.micro_offsets)

    @property
    def segment_offsets(self) -> IntArray:
        """The first segment of each micro-batch, and the end of the last."""
        return self.row_offsets[self.micro_offsets]

    @property
    def micro_batch_of_segment(self) -> IntArray:
        """The micro-batch of each segment."""
        return np.repeat(np.arange(len(self)), np.diff(self.segment_offsets))

    @property
    def first_slots(self) -> IntArray:
        """Per segment, its first slot among the slots of its own micro-batch."""
        micro = self.micro_batch_of_segment
        row = np.repeat(np.arange(len(self.row_offsets) - 1), np.diff(self.row_offsets))
        unit = self.alignments[micro]
        end = offsets_of(-(-self.segments.length // unit) * unit)  # laid end to end over all rows
        inside = end[:-1] - end[self.row_offsets[row]]
        return (row - self.micro_offsets[micro]) * self.widths[micro] + inside

    def choose(self, results: Sequence[Any] | Mapping[Key, Any]) -> tuple[IntArray, list[Any]]:
        """The numbers of the micro-batches that have results, and these; of those that hold a
        segment, if any does."""
        if isinstance(results, Mapping):
            chosen = [self._number(key) for key in results]
            given = list(results.values())
        else:
            chosen, given = list(range(len(self))), list(results)
            if len(given) != len(self):
                some = ", or a mapping from (step, rank, position) to some of them"
                raise InputError(
                    f"{len(given)} results were given but {self._name} runs {len(self)} "
                    f"micro-batches, so they cannot be matched. Pass one for each, empty ones "
                    f"included{some if isinstance(self.work, Plan) else ''}."
                )
        if not given:
            raise InputError(
                "no results were given, so their type is unknown and nothing can be restored. "
                "Pass those of at least one micro-batch; an empty one's will do."
            )
        held = np.diff(self.segment_offsets)[chosen]
        kept = [at for at, count in enumerate(held) if count] or [0]
        return np.array(chosen, np.int64)[kept], [given[at] for at in kept]

    def _number(self, key: Key) -> int:
        plan = self.work
        if not isinstance(plan, Plan):
            raise InputError(
                f"results of {self._name} are given by name, but only a plan has names for them. "
                f"Pass a sequence, one for each micro-batch."
            )
        step, rank, position = key
        if 0 <= step < plan.num_steps and 0 <= rank < plan.num_ranks:
            first, end = plan.cell_offsets[step * plan.num_ranks + rank :][:2].tolist()
            if 0 <= position < end - first:
                return int(first + position)
        raise InputError(
            f"a result is named (step {step}, rank {rank}, position {position}), which the plan of "
            f"{plan.num_steps} steps on {plan.num_ranks} ranks does not run. Name it as plan[step, rank] "
            f"does."
        )

    @property
    def _name(self) -> str:
        if isinstance(self.work, Step):
            return f"step {self.work.number}"
        return "the plan" if isinstance(self.work, Plan) else "the rank"

    def describe(self, number: int) -> str:
        """'micro-batch 2 of step 0 on rank 1 (samples 4, 7, ...)'"""
        where = f"micro-batch {number}"
        if isinstance(self.work, Plan):
            plan = self.work
            cell = int(np.searchsorted(plan.cell_offsets, number, side="right")) - 1
            step, rank = divmod(cell, plan.num_ranks)
            where = f"micro-batch {number - plan.cell_offsets[cell]} of step {step} on rank {rank}"
        elif isinstance(self.work, Step):
            where += f" of step {self.work.number}"
        held = self.segments.sample[slice(*self.segment_offsets[number : number + 2].tolist())]
        named = ", ".join(map(self.name_of, held[:4])) + (", ..." if len(held) > 4 else "")
        return f"{where} ({f'samples {named}' if named else 'empty'})"

    def name_of(self, row: int) -> str:
        """What an error calls the sample of a row."""
        return sample_name(int(self.ids[row]))


def _micro_batches(work: Step | Sequence[MicroBatch | FedMicroBatch]) -> Sequence[MicroBatch]:
    if isinstance(work, Step):
        return work.read_micro_batches
    micros = [item.micro if isinstance(item, FedMicroBatch) else item for item in work]
    for item in micros:
        if not isinstance(item, MicroBatch):
            raise InputError(
                f"expected a Plan, a Step or micro-batches to restore by, got a "
                f"{type(item).__name__} among them."
            )
    return micros


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, np.int64), *arrays])
