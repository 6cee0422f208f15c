"""Origin: the samples and tokens of the micro-batches that results belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from evenstep.core.plan import MicroBatch, Plan
from evenstep.core.ragged import IntArray, Segments, offsets_of, rounded_up, sample_name
from evenstep.core.recipe import Topology
from evenstep.core.step import Step
from evenstep.data.feed import FedMicroBatch
from evenstep.errors import InputError

Key: TypeAlias = tuple[int, int, int]
"""(step, rank, position): `plan[step, rank][position]`."""
Work: TypeAlias = Plan | Step | Sequence[MicroBatch | FedMicroBatch]
"""A plan of all ranks, or the work of one rank: a step, or micro-batches in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Micro-batches as flat arrays, in the order of their results.

    Row i of the restored tensor is sample `sample_ids[i]`; `segments.sample` holds row numbers.
    The rows are all samples of a plan, or the samples of one rank in ascending order of id.
    """

    work: Work
    sample_ids: IntArray  # per sample, ascending
    lengths: IntArray  # per sample, its whole length
    segments: Segments
    ends: IntArray  # per segment, the end of its sample after truncation
    row_offsets: IntArray
    micro_offsets: IntArray
    widths: IntArray  # per micro-batch
    alignments: IntArray  # per micro-batch
    topology: Topology | None  # that the micro-batches were planned for, if known

    @classmethod
    def of(cls, work: Work) -> Origin:
        """The origin of the results of a plan, a step or micro-batches."""
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
                work.recipe.topology,
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
            work.plan.recipe.topology if isinstance(work, Step) and work.plan else None,
        )

    def __len__(self) -> int:
        return len(self.widths)

    @property
    def rows(self) -> IntArray:
        """Rows of each micro-batch."""
        return np.diff(self.micro_offsets)

    @property
    def segment_offsets(self) -> IntArray:
        """First segment of each micro-batch, followed by the number of segments."""
        return self.row_offsets[self.micro_offsets]

    @property
    def micro_batch_of_segment(self) -> IntArray:
        """The micro-batch of each segment."""
        return np.repeat(np.arange(len(self)), np.diff(self.segment_offsets))

    @property
    def first_slots(self) -> IntArray:
        """First slot of each segment, counted in its micro-batch."""
        micro = self.micro_batch_of_segment
        row = np.repeat(np.arange(len(self.row_offsets) - 1), np.diff(self.row_offsets))
        unit = self.alignments[micro]
        end = offsets_of(rounded_up(self.segments.length, unit))  # laid end to end over all rows
        inside = end[:-1] - end[self.row_offsets[row]]
        return (row - self.micro_offsets[micro]) * self.widths[micro] + inside

    def choose(self, results: Sequence[Any] | Mapping[Key, Any]) -> tuple[IntArray, list[Any]]:
        """The micro-batch numbers and results to restore from; empty micro-batches are skipped."""
        if isinstance(results, Mapping):
            chosen = [self._number(key) for key in results]
            given = list(results.values())
        else:
            chosen, given = list(range(len(self))), list(results)
            if len(given) != len(self):
                some = ", or a mapping from (step, rank, position) to some of them"
                raise InputError(
                    f"expected {len(self)} results, one for each micro-batch of {self._name}, got "
                    f"{len(given)}. Pass one for each, empty ones "
                    f"included{some if isinstance(self.work, Plan) else ''}."
                )
        if not given:
            raise InputError(
                "no results were given, so their dtype is unknown. Pass the result of at least "
                "one micro-batch, which may be empty."
            )
        held = np.diff(self.segment_offsets)[chosen]
        kept = [at for at, count in enumerate(held) if count] or [0]
        return np.array(chosen, np.int64)[kept], [given[at] for at in kept]

    def _number(self, key: Key) -> int:
        plan = self.work
        if not isinstance(plan, Plan):
            raise InputError(
                f"results of {self._name} were passed as a mapping, which requires a Plan. Pass a "
                f"sequence with one result for each micro-batch."
            )
        step, rank, position = key
        if 0 <= step < plan.num_steps and 0 <= rank < plan.num_ranks:
            first, end = plan.cell_offsets[step * plan.num_ranks + rank :][:2].tolist()
            if 0 <= position < end - first:
                return int(first + position)
        raise InputError(
            f"the key (step {step}, rank {rank}, position {position}) is not in the plan of "
            f"{plan.num_steps} steps on {plan.num_ranks} ranks. Position p is "
            f"plan[step, rank][p]."
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
        """The sample of a row, as errors name it."""
        return sample_name(int(self.sample_ids[row]))


def _micro_batches(work: Step | Sequence[MicroBatch | FedMicroBatch]) -> Sequence[MicroBatch]:
    if isinstance(work, Step):
        return work.read_micro_batches
    micros = [item.micro if isinstance(item, FedMicroBatch) else item for item in work]
    for item in micros:
        if not isinstance(item, MicroBatch):
            raise InputError(
                f"expected a Plan, a Step or a sequence of micro-batches, got a sequence with a "
                f"{type(item).__name__}."
            )
    return micros


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, np.int64), *arrays])
