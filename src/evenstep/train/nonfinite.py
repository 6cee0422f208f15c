"""Suspects: which micro-batch and samples made the loss or gradient of a step inf or NaN.

Each micro-batch leaves a few numbers on the device: the loss of each segment, the gradient of the
model's outputs summed over each segment, and the squared norm of all gradients so far. They are
read only if the reduced loss or gradient of the step is not finite, which all ranks see alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.core.ragged import IntArray
from evenstep.tensors.batch import Batch
from evenstep.tensors.losses import Sums
from evenstep.train.collectives import Collective
from evenstep.train.gradient_norm import square_of
from evenstep.train.gradients import local_tensor

_PLACES = ("the loss", "the gradient of the model's outputs", "the gradient of the parameters")
_SHOWN = 6  # samples named per rank
_NOWHERE = 2.0**40


@dataclass(slots=True)
class _Traces:
    """The numbers of one micro-batch."""

    sample_ids: IntArray  # of its segments
    exchanged: bool
    losses: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    outputs: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    square: Tensor | None = None


class Suspects:
    """Collects the numbers of a rank's micro-batches and finds the first that is not finite."""

    def __init__(self) -> None:
        self._traces: list[_Traces] = []

    def begin(self, sample_ids: IntArray, exchanged: bool) -> None:
        """A micro-batch begins; `exchanged` if gradients of all ranks are mixed in its backward."""
        self._traces.append(_Traces(sample_ids, exchanged))

    def watch(self, outputs: Any, batch: Any) -> None:
        """Record the gradient of the outputs in the backward."""
        outputs = getattr(outputs, "logits", outputs)
        if not isinstance(outputs, Tensor) or not outputs.requires_grad:
            return
        traces = self._traces[-1]

        def note(gradient: Tensor) -> None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            if isinstance(batch, Batch) and gradient.shape[:2] == batch.tokens.shape:
                by_slot = gradient.flatten(2).sum(-1, dtype=wide).flatten()
                tiles = by_slot.new_zeros(len(batch.sample_ids))
                by_tile = tiles.index_add_(0, batch.segment_ids.flatten(), by_slot)
                traces.outputs.append((by_tile, batch.sample_ids >= 0))
            else:
                traces.outputs.append((gradient.sum(dtype=wide), None))

        outputs.register_hook(note)

    def losses(self, found: Iterable[Sums | Tensor]) -> None:
        """Record the losses of the segments, or of the micro-batch."""
        for each in found:
            sums = self._traces[-1].losses
            if isinstance(each, Sums) and each.by_tile is not None:
                sums.append((each.by_tile.detach(), each.real))
            sums.append(((each.loss if isinstance(each, Sums) else each).detach(), None))

    def gradients(self, gradients: Iterable[Tensor]) -> None:
        """Record the norm of the gradients so far, exchanged or not."""
        self._traces[-1].square = square_of(map(local_tensor, gradients))

    def source(self, collective: Collective, count: int | None) -> str:
        """Where the first non-finite number of all ranks appeared, for an error message.

        A collective call.
        """
        mine = self._first()
        rows = torch.zeros(collective.size, 4 + _SHOWN, dtype=torch.float64)
        rows[collective.rank] = torch.tensor(mine, dtype=torch.float64)
        table = collective.all_reduce_sum(rows).cpu().tolist()
        # A gradient that was exchanged is not finite on all ranks, so it does not tell the rank.
        order = [(row[2], row[0], row[1], rank) for rank, row in enumerate(table)]
        unsure, position, place, rank = min(order)
        if position == _NOWHERE:
            return "no micro-batch shows where it came from"
        of = "" if count is None else f" of {count}"
        where = f"{_PLACES[int(place)]} of micro-batch {int(position)}{of}"
        if unsure:
            return f"{where} on one of the ranks"
        return f"{where} on rank {rank} ({_named(table[rank])})"

    def _first(self) -> list[float]:
        """[position, place, 1 if the rank is unsure, number of samples, their ids]."""
        for position, traces in enumerate(self._traces):
            for place, held in enumerate((traces.losses, traces.outputs)):
                bad = [_bad(values, real, traces.sample_ids) for values, real in held]
                if any(each is not None for each in bad):
                    known = [each for each in bad if each is not None and len(each)]
                    ids = known[0] if known else traces.sample_ids
                    return _row(position, place, False, ids)
            if traces.square is not None and not bool(traces.square.isfinite()):
                return _row(position, 2, traces.exchanged, traces.sample_ids)
        return _row(_NOWHERE, 0, True, ())


def _bad(values: Tensor, real: Tensor | None, ids: IntArray) -> IntArray | None:
    """Samples whose value is not finite; empty if only their sum tells, None if all are finite."""
    odd = ~values.isfinite()
    if not bool(odd.any()):
        return None
    if values.ndim == 0:
        return ids[:0]
    odd = odd if real is None else odd[real]
    return np.unique(ids[odd.cpu().numpy()])


def _row(position: float, place: int, unsure: bool, ids: Sequence[int] | IntArray) -> list[float]:
    shown = [float(number) for number in ids[:_SHOWN]]
    return [position, place, unsure, len(ids), *shown, *[-1.0] * (_SHOWN - len(shown))]


def _named(row: Sequence[float]) -> str:
    """sample 4, or samples 4, 7 and 5 more"""
    number, ids = int(row[3]), [str(int(each)) for each in row[4:] if each >= 0]
    if not ids:
        return "no sample"
    more = f" and {number - len(ids)} more" if number > len(ids) else ""
    return f"sample{'s' if number > 1 else ''} {', '.join(ids)}{more}"
