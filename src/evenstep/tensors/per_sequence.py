"""Per-sequence functions on a packed batch: a loss is written for one sequence, and runs on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.batch_shard import BatchShard
from evenstep.tensors.metrics import Metric, merge
from evenstep.tensors.view import View

Outcome: TypeAlias = Tensor | tuple[Tensor, Mapping[str, Metric]]
"""A sum (a scalar) or values per slot (n), and metrics if there are any."""
SequenceFunction: TypeAlias = Callable[[Tensor, View], Outcome]
"""From the outputs (n, ...) of one sequence and a view of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What a function gave for a batch, not divided by anything; the caller knows by what.

    A shard holds parts of sequences and has the loss and metrics alone.
    """

    loss: Tensor
    metrics: dict[str, Metric]
    tiles: Tensor | None  # per tile, or per segment where `real` is None
    real: Tensor | None = None

    @property
    def by_sequence(self) -> Tensor:
        """(segments): each real segment's part of the loss, ready for `restore_sequences`."""
        if self.tiles is None:
            raise InputError(
                "these sums come from one rank's shard, which holds only parts of sequences. Join "
                "the outputs of all ranks first."
            )
        return self.tiles if self.real is None else self.tiles[self.real]


@dataclass(frozen=True, slots=True)
class PerSequence:
    """Runs a function of one sequence on every sequence of a batch, and sums.

    Any function runs in a loop, one segment at a time: it sees real tokens alone and cannot tell
    that they were packed. `vectorised` declares that it may see all slots at once: that it returns
    values per slot, of which each depends on its own slot (or, through `sum_by_segment`, on its
    own segment), and 0 where the weight is 0; and that its metrics leave out slots of weight 0.
    Both ways agree. A dummy has no sequence: its loss is 0 and its metrics are empty, but they have
    the same names as on every rank, so a function must bear a sequence that trains nothing.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=8)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> trained = PerSequence(lambda outputs, sequence: sequence.loss_weights.sum())
    >>> trained(torch.zeros(1, 5, 10), batch).by_sequence.tolist()
    [2.0, 1.0]
    """

    function: SequenceFunction
    vectorised: bool = False

    def __call__(self, outputs: Tensor, batch: Batch | BatchShard) -> Sums:
        """The sums over `batch`, given the model's (rows, width, ...) outputs for it."""
        if tuple(outputs.shape[:2]) != (batch.rows, batch.width):
            raise InputError(
                f"outputs of the shape {tuple(outputs.shape)} were given for a batch of "
                f"{batch.rows} rows and width {batch.width}, so slots cannot be matched. Pass the "
                f"model's outputs for this batch, (rows, width, ...)."
            )
        if self.vectorised:
            return self._at_once(outputs, batch)
        if isinstance(batch, BatchShard):
            raise InputError(
                "a function of whole sequences was given one rank's shard, which holds only parts "
                "of them. Join the outputs of all ranks first, or declare it vectorised if its "
                "values depend on single tokens."
            )
        return self._one_by_one(outputs, batch)

    def looped(self) -> PerSequence:
        """The same function, one sequence at a time."""
        return PerSequence(self.function)

    def _at_once(self, outputs: Tensor, batch: Batch | BatchShard) -> Sums:
        view = View.of_all(batch)
        values, metrics = _parts(self.function(view.flat(outputs), view))
        if tuple(values.shape) != tuple(view.labels.shape):
            raise InputError(
                f"a vectorised function returned the shape {tuple(values.shape)} for "
                f"{len(view.labels)} slots, so its values cannot be told apart. Return one value "
                f"per slot, or do not declare it vectorised."
            )
        if isinstance(batch, BatchShard):
            return Sums(values.sum(), metrics, None)
        tiles = view.sum_by_segment(values)
        return Sums(values.sum(), metrics, tiles, batch.sample_ids >= 0)

    def _one_by_one(self, outputs: Tensor, batch: Batch) -> Sums:
        # An empty slice keeps the outputs in the graph, so that a dummy has a backward too.
        losses, flat = [outputs[:0].sum()], outputs.flatten(0, 1)
        metrics: list[dict[str, Metric]] = []
        for view in View.of_segments(batch):
            value, found = _parts(self.function(flat[view.slots], view))
            losses.append(value.sum())
            metrics.append(found)
        if not metrics:
            metrics.append(self._empty_metrics(flat, batch))
        by_sequence = torch.stack(losses)[1:]
        return Sums(by_sequence.sum(), merge(metrics), by_sequence)

    def _empty_metrics(self, flat: Tensor, batch: Batch) -> dict[str, Metric]:
        """The metrics of a dummy, all of nothing: ranks that reduce them need the same names.
        What they are called is learnt from the padding, whose values are thrown away."""
        view = View(batch, slice(0, int(batch.cu_seqlens[1])), 0)
        with torch.no_grad():
            _, found = _parts(self.function(flat[view.slots], view))
        return {name: metric.emptied() for name, metric in found.items()}


def _parts(outcome: Outcome) -> tuple[Tensor, dict[str, Metric]]:
    if isinstance(outcome, Tensor):
        return outcome, {}
    return outcome[0], dict(outcome[1])
