"""RolloutPlan: which rows of a rollout batch run in which epoch, step, rank and micro-batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, ranges_of
from evenstep.core.recipe import World
from evenstep.core.step import Step
from evenstep.core.text import counted, line
from evenstep.data.planned import PlannedStream
from evenstep.errors import InputError, SampleError

_ARRAYS = ("lengths", "row_digests")

if TYPE_CHECKING:
    from evenstep.train.rollouts.rollout_batch import RolloutBatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RolloutPlan:
    """The plan of every epoch, as pure data: small, and equal on all ranks.

    A controller plans once and sends each rank the plan and its rows:

        plan = batch.plan(recipe, epochs=2)
        send(rank, plan, batch.select(plan.rows_of(rank)))  # on the controller
        for step in plan.steps(mine, World(rank, size)): ...  # on the rank

    Where every rank has the whole batch, it makes the plan itself and passes the batch to `steps`.

    >>> import torch
    >>> from evenstep import Packed, Recipe, Topology
    >>> from evenstep.train import RolloutBatch
    >>> ids = torch.ones((4, 8), dtype=torch.int64)
    >>> batch = RolloutBatch({"input_ids": ids}, lengths=[8, 3, 5, 6], padding_side="left")
    >>> plan = batch.plan(Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2)))
    >>> plan
    RolloutPlan(1 epoch, 1 step, 2 ranks, 4 rows, removed padding 31.2%)
    >>> sorted(plan.rows_of(0).tolist() + plan.rows_of(1).tolist())
    [0, 1, 2, 3]
    """

    epochs: tuple[Plan, ...]
    """One plan per epoch. Its sample i is row `plan.sample_ids[i]`, or row i if that is None."""
    lengths: IntArray
    """The tokens of each row; 0 for an empty row, which is planned as one token."""
    width: int
    """The columns of a row, padding included."""
    row_digests: IntArray
    """Of the tokens of each row, to know the rows again."""

    @property
    def digest(self) -> str:
        """Of all rows; part of the fingerprint of each step, which ranks compare."""
        rows = np.concatenate((self.lengths, self.row_digests))
        return hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Arrays as bytes: a copy is read-only too, and shares no memory with a batch."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        return state | {name: np.asarray(state[name], np.int64).tobytes() for name in _ARRAYS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = {name: np.frombuffer(state[name], np.int64) for name in _ARRAYS}
        for name, value in (state | arrays).items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """Sizes and the padding that the plan removes, in one line."""
        found = self.metrics()
        parts = (
            counted(len(self.epochs), "epoch"),
            counted(int(found["num_steps"]), "step"),
            counted(self.num_ranks, "rank"),
            counted(len(self.lengths), "row"),
            f"removed padding {found['removed_padding_ratio']:.1%}",
        )
        return line("RolloutPlan", parts)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return self.epochs[0].num_ranks

    def mini_batches(self, epoch: int = 0) -> list[IntArray]:
        """The rows of each step of an epoch, ascending."""
        plan = self.epochs[epoch]
        ids = self._row_numbers(plan)
        return [np.sort(ids[plan.step_of == step]) for step in range(plan.num_steps)]

    def rows_of(self, rank: int) -> IntArray:
        """The rows that a rank runs in any epoch, ascending; pass them to `RolloutBatch.select`."""
        if not 0 <= rank < self.num_ranks:
            raise InputError(f"rank {rank} is out of range: the plan has {self.num_ranks} ranks.")
        rows = []
        for plan in self.epochs:
            cells = plan.segment_offsets[plan.cell_offsets]  # the first segment of each cell
            first, end = (cells[at :: plan.num_ranks] for at in (rank, rank + 1))
            first = first[: len(end)]
            samples = plan.segments.sample[ranges_of(first, end - first)]
            rows.append(samples if plan.sample_ids is None else plan.sample_ids[samples])
        return np.unique(np.concatenate(rows))

    def steps(self, batch: RolloutBatch, world: World | None = None) -> Iterator[Step]:
        """The steps of a rank, over all epochs, for `Runner.run` and `compute_log_probs`.

        `batch` holds at least the rows of this rank. Sample ids are row numbers. On fewer ranks
        than planned, which must divide them, a rank runs the micro-batches of several.
        """
        self.check(batch)
        source, done = _Rows(self, batch), 0
        for epoch, plan in enumerate(self.epochs):
            stream = PlannedStream.from_plan(source, plan, world=world)
            stream.set_epoch(epoch, done)
            yield from stream
            done += len(plan)

    def check(self, batch: RolloutBatch) -> None:
        """Raise if the batch is not the one that was planned, or rows selected from it."""
        whole = (len(self.lengths), self.width) == (batch.num_rows, batch.width)
        if not whole or not np.array_equal(self.lengths[batch.rows], batch.lengths):
            raise InputError(
                f"the plan is of {len(self.lengths)} rows of width {self.width}, but the batch "
                f"has {batch.num_rows} of width {batch.width}, or rows of other lengths. Pass the "
                f"batch that was planned, or rows selected from it."
            )
        other = np.flatnonzero(self.row_digests[batch.rows] != batch.row_digests)
        if len(other):
            raise InputError(
                f"row {batch.rows[other[0]]} has other tokens than the row that was planned "
                f"({len(other)} of {len(batch)} rows differ). Pass the batch that was planned, or "
                f"plan this one."
            )

    def metrics(self) -> dict[str, float]:
        """Padding and balance over all epochs, as plain numbers for a logger.

        `slots_before` counts rows at their full width, once per epoch. `imbalance_step` and
        `imbalance_micro_batch` are the planned cost of the slowest rank over the mean, if ranks
        synchronise once per step or at every micro-batch; epochs count equally.
        """
        found = [plan.stats() for plan in self.epochs]
        times, empty = len(self.epochs), int((self.lengths == 0).sum())
        tokens = sum(each["tokens"] for each in found) - empty * times
        before = len(self.lengths) * self.width * times
        slots = sum(each["slots"] for each in found)
        return {
            "num_steps": sum(each["num_steps"] for each in found),
            "num_micro_batches": sum(each["num_micro_batches"] for each in found),
            "num_empty_rows": empty,
            "tokens": tokens,
            "slots_before": before,
            "slots": slots,
            "removed_padding": before - slots,
            "removed_padding_ratio": (before - slots) / before if before else 0.0,
            "padding_ratio": (slots - tokens) / slots if slots else 0.0,
            "imbalance_step": sum(e["imbalance_cost_step"] for e in found) / times,
            "imbalance_micro_batch": sum(e["imbalance_cost_micro_batch"] for e in found) / times,
        }

    def _row_numbers(self, plan: Plan) -> IntArray:
        return np.arange(len(self.lengths)) if plan.sample_ids is None else plan.sample_ids


class _Rows:
    """The rows of a batch as a source; it knows all lengths and reads the rows that are here."""

    def __init__(self, plan: RolloutPlan, batch: RolloutBatch) -> None:
        self.fingerprint = plan.digest
        self._batch, self._lengths = batch, np.maximum(plan.lengths, 1)

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths_of(self, items: IntArray) -> IntArray:
        return self._lengths[items]

    def __getitem__(self, row: int, /) -> dict[str, Any]:
        at = int(np.searchsorted(self._batch.rows, row))
        if at == len(self._batch) or self._batch.rows[at] != row:
            raise SampleError(
                f"row {row} is not among the {len(self._batch)} rows of this batch. Select "
                f"plan.rows_of(rank) of the rank that runs it."
            )
        return self._batch[at]
