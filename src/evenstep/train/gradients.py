"""Gradients apart from `.grad`, their norm, and where they are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.core.ragged import IntArray
from evenstep.tensors.batch import Batch
from evenstep.tensors.losses import Sums
from evenstep.train.collectives import Collective


def local_tensor(gradient: Any) -> Tensor:
    """The values on this rank: the shard of a DTensor, or a plain tensor itself."""
    shard: Tensor = getattr(gradient, "_local_tensor", gradient)
    return shard


def rescale(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients by `factor` in place; a factor of 0 sets them to zero."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    if factor == 0.0:
        torch._foreach_zero_(gradients)
    else:
        torch._foreach_mul_(gradients, factor)


class Aside:
    """Gradients from before a step; `drop` discards those of the step."""

    def __init__(self) -> None:
        self.dropped = False

    def drop(self) -> None:
        """Discard the gradients of the step when its context ends."""
        self.dropped = True


@contextmanager
def set_aside(parameters: Iterable[Tensor], copied: bool = False) -> Iterator[Aside]:
    """Context for a step: earlier gradients are removed inside and added back at the end.

    So rescaling and summing over ranks apply to the gradients of the step only. On an error, and
    after `drop`, the earlier gradients are restored. Set `copied` if the framework writes into
    their tensors.
    """
    parameters, aside = list(parameters), Aside()
    earlier = [
        gradient.clone() if copied and gradient is not None else gradient
        for gradient in (parameter.grad for parameter in parameters)
    ]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield aside
    except BaseException:
        aside.drop()
        raise
    finally:
        if aside.dropped:
            for parameter, before in zip(parameters, earlier, strict=True):
                parameter.grad = before
    if aside.dropped:
        return
    for parameter, before in zip(parameters, earlier, strict=True):
        if before is None:
            continue
        if parameter.grad is None:
            parameter.grad = before
        elif copied or (before.is_sparse and not parameter.grad.is_sparse):
            parameter.grad.add_(before)
        else:
            parameter.grad = before.add_(parameter.grad)  # keeps the tensor object


class SeparateGradients:
    """One gradient accumulator per denominator, combined when all denominators are known.

    Each denominator after the first needs a backward of its own and the memory of one more
    gradient. With `fully_shard` the accumulators are shards, and every backward must exchange
    gradients; DDP must not exchange any (`no_sync`): sum them after `combine`. A compiled model
    needs `torch._functorch.config.donated_buffer = False`.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> separate = SeparateGradients([x])
    >>> separate.backward({"tokens": 2 * x, "groups": x * x})
    >>> separate.combine({"tokens": 0.5, "groups": 10.0})
    >>> float(x.grad)
    61.0
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._sums: dict[str, list[Tensor | None]] = {}

    def backward(self, objectives: Mapping[str, Tensor]) -> None:
        """Add the gradient of each objective to its own accumulator."""
        before = self._take()
        left = len(objectives)
        try:
            for name, objective in objectives.items():
                left -= 1
                self._put(self._sums.get(name, [None] * len(self.parameters)))
                objective.backward(retain_graph=left > 0)
                self._sums[name] = self._take()
        finally:
            self._put(before)

    def combine(self, factors: Mapping[str, float]) -> None:
        """Add the sum of factor times gradient to each `.grad`, and clear the accumulators."""
        for name, held in self._sums.items():
            both = [(p, g) for p, g in zip(self.parameters, held, strict=True) if g is not None]
            for parameter, gradient in both:
                scaled = gradient * factors[name] if factors[name] else torch.zeros_like(gradient)
                known = parameter.grad
                parameter.grad = scaled if known is None else known + scaled
        self._sums.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """All accumulators."""
        return [each for held in self._sums.values() for each in held if each is not None]

    def _take(self) -> list[Tensor | None]:
        taken = [parameter.grad for parameter in self.parameters]
        self._put([None] * len(taken))
        return taken

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient


_HALF = (torch.float16, torch.bfloat16)


def square_of(gradients: Iterable[Tensor]) -> Tensor:
    """A float64 scalar: the sum of squares of plain tensors, 0 for none.

    >>> float(square_of([torch.tensor([3.0]), torch.tensor([[4.0]])]))
    25.0
    """
    norms: list[Tensor] = []
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        values = gradient.detach()
        values = values.coalesce().values() if values.is_sparse else values
        by_kind.setdefault((values.dtype, values.device), []).append(values)
    for (dtype, _), values in by_kind.items():
        # A norm in 16 bits has three digits.
        wide = torch.float32 if dtype in _HALF else None
        norms += [each.double() for each in torch._foreach_norm(values, 2, wide)]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    device = norms[0].device
    return torch.stack([norm.to(device) for norm in norms]).square().sum()


def square_share(parameters: Iterable[Tensor], ranks: int, fsdp: bool = False) -> Tensor:
    """This rank's share of the squared norm: the sum over `ranks` ranks is that of the gradient.

    Plain gradients are equal on all ranks. A shard of `fully_shard` counts once, however often it
    is replicated. Shards over other ranks (tensor parallelism) are summed over these here.

    >>> x = torch.ones(2, requires_grad=True)
    >>> x.grad = torch.tensor([3.0, 4.0])
    >>> float(square_share([x], ranks=2))
    12.5
    """
    plain: list[Tensor] = []
    sharded: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        mesh: Any = getattr(gradient, "device_mesh", None)
        if mesh is None:
            plain.append(gradient)
        elif any(placement.is_partial() for placement in gradient.placements):
            plain.append(gradient.full_tensor())
        else:
            ways = tuple(i for i, p in enumerate(gradient.placements) if not p.is_replicate())
            sharded.setdefault((mesh, ways), []).append(gradient.to_local())
    found = [square_of(plain) / ranks]
    found += [
        _of_shards(mesh, ways, held, ranks, fsdp and mesh.size() == ranks)
        for (mesh, ways), held in sharded.items()
    ]
    device = next((each.device for each in found if each.device.type != "cpu"), found[0].device)
    return torch.stack([each.to(device) for each in found]).sum()


def _of_shards(
    mesh: Any, ways: Sequence[int], held: list[Tensor], ranks: int, same_ranks: bool
) -> Tensor:
    square = square_of(held)
    if same_ranks:
        return square / math.prod(mesh.size(i) for i in range(mesh.ndim) if i not in ways)
    for way in ways:
        torch.distributed.all_reduce(square, group=mesh.get_group(way))
    return square / ranks


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
