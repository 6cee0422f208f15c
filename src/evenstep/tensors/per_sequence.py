"""PerSequence: run a function of one sequence on all sequences of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.batch_shard import BatchShard
from evenstep.tensors.metrics import Metric, merge
from evenstep.tensors.outputs import select_output
from evenstep.tensors.view import View

Outcome: TypeAlias = Tensor | tuple[Tensor, Mapping[str, Metric]]
"""A scalar sum or values per slot (n), optionally with metrics."""
SequenceFunction: TypeAlias = Callable[[Tensor, View], Outcome]
"""(outputs (n, ...) of one sequence, a view of it) -> outcome."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """The summed loss and the metrics of a batch; the loss is not normalized.

    For a `BatchShard`, only `loss` and `metrics` are available.

        sums = cross_entropy()(logits, batch)
        sums.loss.backward()
    """

    loss: Tensor
    metrics: dict[str, Metric]
    by_tile: Tensor | None  # per tile, or per segment if `real` is None
    real: Tensor | None = None  # per tile, whether it is a segment
    by_slot: Tensor | None = None  # (rows * width), if the function returns values per slot

    @property
    def by_sequence(self) -> Tensor:
        """(segments): the loss of each segment, as `restore_sequences` takes it."""
        if self.by_tile is None:
            raise InputError(
                "these sums were computed on a batch shard, which does not hold whole sequences. "
                "Join the outputs of all ranks first."
            )
        return self.by_tile if self.real is None else self.by_tile[self.real]


@dataclass(frozen=True, slots=True)
class PerSequence:
    """Runs a function of one sequence on every sequence of a batch and sums the results.

    By default the function runs once per segment and receives its real tokens only. With
    `vectorised`, it runs once on all slots. Then it must return one value per slot that depends
    only on that slot (or, through `sum_by_segment`, on its segment), 0 where the weight is 0, and
    its metrics must leave out slots of weight 0. Both ways give the same sums.

    If the model returns several outputs by name (a mapping, a transformers ModelOutput), the
    function gets the one called `output`. With unit="pair", the slots of two sequences hold the
    value of their pair; such a function cannot be looped and needs a normalization that gives
    sequences or groups equal weights.

    The loss of an empty micro-batch is 0. Its metrics are empty but have the same names as on
    other ranks, so the function must accept a sequence without loss tokens.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=8)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> loss_tokens = PerSequence(lambda outputs, sequence: sequence.loss_weights.sum())
    >>> loss_tokens(torch.zeros(1, 5, 10), batch).by_sequence.tolist()
    [2.0, 1.0]
    """

    function: SequenceFunction
    vectorised: bool = False
    output: str = "logits"
    unit: Literal["token", "pair"] = "token"

    def __call__(self, outputs: Any, batch: Batch | BatchShard) -> Sums:
        """Sums over `batch` from the model's (rows, width, ...) outputs."""
        outputs = select_output(outputs, self.output, batch.rows, batch.width)
        if tuple(outputs.shape[:2]) != (batch.rows, batch.width):
            raise InputError(
                f"outputs have shape {tuple(outputs.shape)}, but the batch has {batch.rows} rows "
                f"of width {batch.width}. Pass the model's outputs for this batch, "
                f"(rows, width, ...)."
            )
        if self.vectorised:
            return self._at_once(outputs, batch)
        if isinstance(batch, BatchShard):
            raise InputError(
                "a function of whole sequences cannot run on a batch shard. Join the outputs of "
                "all ranks first, or set vectorised=True if each value depends on one token only."
            )
        return self._one_by_one(outputs, batch)

    def looped(self) -> PerSequence:
        """The same function, run on one sequence at a time."""
        return replace(self, vectorised=False)

    def _at_once(self, outputs: Tensor, batch: Batch | BatchShard) -> Sums:
        view = View.of_all(batch)
        values, metrics = _value_and_metrics(self.function(view.flat(outputs), view))
        if tuple(values.shape) != tuple(view.labels.shape):
            raise InputError(
                f"a vectorised function returned shape {tuple(values.shape)} for "
                f"{len(view.labels)} slots. Return one value per slot, or set vectorised=False."
            )
        if isinstance(batch, BatchShard):
            return Sums(values.sum(), metrics, None)
        by_tile = view.sum_by_segment(values)
        return Sums(values.sum(), metrics, by_tile, batch.sample_ids >= 0, values.detach())

    def _one_by_one(self, outputs: Tensor, batch: Batch) -> Sums:
        # The empty slice keeps the outputs in the graph: an empty micro-batch has a backward too.
        losses, flat = [outputs[:0].sum()], outputs.flatten(0, 1)
        metrics: list[dict[str, Metric]] = []
        by_slot: Tensor | None = outputs.new_zeros(len(flat))
        for view in View.of_segments(batch):
            value, found = _value_and_metrics(self.function(flat[view.slots], view))
            losses.append(value.sum())
            metrics.append(found)
            if by_slot is not None and value.shape == by_slot[view.slots].shape:
                by_slot = by_slot.to(torch.promote_types(by_slot.dtype, value.dtype))
                by_slot[view.slots] = value.detach()
            else:
                by_slot = None
        if not metrics:
            metrics.append(self._empty_metrics(flat, batch))
        by_sequence = torch.stack(losses)[1:]
        return Sums(by_sequence.sum(), merge(metrics), by_sequence, by_slot=by_slot)

    def _empty_metrics(self, flat: Tensor, batch: Batch) -> dict[str, Metric]:
        """Empty metrics for an empty micro-batch; ranks that reduce them need the same names.

        The function runs on the padding for the names; its values are discarded.
        """
        view = View(batch, slice(0, int(batch.cu_seqlens[1])), 0)
        with torch.no_grad():
            _, found = _value_and_metrics(self.function(flat[view.slots], view))
        return {name: metric.emptied() for name, metric in found.items()}


def _value_and_metrics(outcome: Outcome) -> tuple[Tensor, dict[str, Metric]]:
    if isinstance(outcome, Tensor):
        return outcome, {}
    return outcome[0], dict(outcome[1])
