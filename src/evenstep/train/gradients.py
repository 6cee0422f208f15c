"""Gradients of a step apart from earlier ones, their sum over ranks, and their norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from evenstep.train.collectives import Collective

_BUCKET = 32 * 2**20  # bytes of gradients that are summed at once
_HALF = (torch.float16, torch.bfloat16)

Root: TypeAlias = tuple[Tensor, Tensor]
"""A scalar to call backward on, and the gradient there: what the scalar is multiplied by."""


def local_tensor(gradient: Any) -> Tensor:
    """The values on this rank: the shard of a DTensor, or a plain tensor itself."""
    shard: Tensor = getattr(gradient, "_local_tensor", gradient)
    return shard


@contextmanager
def set_aside(
    parameters: Iterable[Tensor], copied: bool = False, recover: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], None]]:
    """Context for a step: earlier gradients are removed inside and added back at the end.

    So rescaling and summing over ranks apply to the gradients of the step only. On an error, and
    after a call of what is yielded, the gradients of the step are discarded and the earlier ones
    restored. Set `copied` if the framework writes into their tensors. On an error, `recover` is
    called first.
    """
    parameters, discarded = list(parameters), False
    earlier = [
        gradient.clone() if copied and gradient is not None else gradient
        for gradient in (parameter.grad for parameter in parameters)
    ]
    for parameter in parameters:
        parameter.grad = None

    def discard() -> None:
        nonlocal discarded
        discarded = True

    try:
        yield discard
    except BaseException:
        discarded = True
        recover()
        raise
    finally:
        for parameter, before in zip(parameters, earlier, strict=True):
            if discarded or parameter.grad is None:
                parameter.grad = before
            elif before is None:
                continue
            elif copied or (before.is_sparse and not parameter.grad.is_sparse):
                parameter.grad.add_(before)
            else:
                parameter.grad = before.add_(parameter.grad)  # keeps the tensor object


class Gradients:
    """The gradients of a step: in `.grad`, or with several denominators in one accumulator each.

    With one denominator that is known at the end, all gradients are multiplied by one factor. With
    several, each has a backward of its own, and each after the first needs the memory of one more
    gradient. With `fully_shard` the accumulators are shards, and every backward must exchange
    gradients; DDP must not exchange any (`no_sync`): sum them after `combine`. A compiled model
    needs `torch._functorch.config.donated_buffer = False`.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> gradients = Gradients([x])
    >>> one = torch.tensor(1.0)
    >>> gradients.backward({"tokens": [(2 * x, one)], "groups": [(x * x, one)]})
    >>> gradients.combine({"tokens": 0.5, "groups": 10.0})
    >>> float(x.grad)
    61.0
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._sums: dict[str, list[Tensor | None]] = {}
        self._noted: int | None = None

    def backward(self, objectives: Mapping[str, Sequence[Root]]) -> None:
        """Add the gradient of each objective to its own accumulator; a single one is `.grad`."""
        if len(objectives) == 1:
            (roots,) = objectives.values()
            torch.autograd.backward(*zip(*roots, strict=True))
            return
        before, left = self._take(), len(objectives)
        try:
            for name, roots in objectives.items():
                left -= 1
                self._put(self._sums.get(name, [None] * len(self.parameters)))
                torch.autograd.backward(*zip(*roots, strict=True), retain_graph=left > 0)
                self._sums[name] = self._take()
        finally:
            self._put(before)

    def combine(self, factors: Mapping[str, float]) -> None:
        """Leave the sum of factor times gradient in `.grad`; a factor of 0 gives zeros.

        Without factors, gradients stay as they are.
        """
        if len(factors) == 1:
            (factor,) = factors.values()
            gradients = [local_tensor(p.grad) for p in self.parameters if p.grad is not None]
            if gradients and factor:
                torch._foreach_mul_(gradients, factor)
            elif gradients:
                torch._foreach_zero_(gradients)
        for name, sums in self._sums.items():
            for parameter, gradient in zip(self.parameters, sums, strict=True):
                if gradient is None:
                    continue
                scaled = gradient * factors[name] if factors[name] else torch.zeros_like(gradient)
                sum_so_far = parameter.grad
                parameter.grad = scaled if sum_so_far is None else sum_so_far + scaled
        self._sums.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """The gradients so far, of all accumulators."""
        sums = [*self._sums.values()] or [[parameter.grad for parameter in self.parameters]]
        return [gradient for gradients in sums for gradient in gradients if gradient is not None]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Add to `used` which parameters get a gradient inside, whether or not they have one."""
        got: set[int] = set()
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda each: got.add(id(each)))
            for parameter in self.parameters
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._noted = crc32(bytes(id(each) in got for each in self.parameters), self._noted or 0)

    @property
    def used(self) -> int:
        """A number of 32 bits for the set of parameters that have a gradient; after `noting`, for
        the sets of those that got one in each."""
        if self._noted is not None:
            return self._noted
        sums = [*self._sums.values()] or [[parameter.grad for parameter in self.parameters]]
        return crc32(bytes(gradient is not None for each in sums for gradient in each))

    def _take(self) -> list[Tensor | None]:
        taken = [parameter.grad for parameter in self.parameters]
        self._put([None] * len(taken))
        return taken

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient


# The norm ----------------------------------------------------------------------------------------


def square_of(gradients: Iterable[Tensor]) -> Tensor:
    """A float64 scalar: the sum of squares of plain tensors, 0 for none.

    >>> float(square_of([torch.tensor([3.0]), torch.tensor([[4.0]])]))
    25.0
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        values = gradient.detach()
        values = values.coalesce().values() if values.is_sparse else values
        by_kind.setdefault((values.dtype, values.device), []).append(values)
    if not by_kind:
        return torch.zeros((), dtype=torch.float64)
    norms: list[Tensor] = []
    for (dtype, _), tensors in by_kind.items():
        # A norm in 16 bits has three digits.
        wide = torch.float32 if dtype in _HALF else None
        norms.append(torch.stack(torch._foreach_norm(tensors, 2, wide)).double())
    device = norms[0].device
    return torch.cat([each.to(device) for each in norms]).square().sum()


def square_share(parameters: Iterable[Tensor], ranks: int, fsdp: bool = False) -> Tensor:
    """This rank's share of the squared norm: the sum over `ranks` ranks is that of the gradient.

    It is computed on the device and summed over ranks with the other numbers of a step, so the
    norm needs no exchange of its own. Plain gradients are equal on all ranks. A shard of
    `fully_shard` counts once, however often it is replicated. Shards over other ranks (tensor
    parallelism) are summed over these here.

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
    share = square_of(plain) / ranks
    for (mesh, ways), shards in sharded.items():
        square = square_of(shards)
        if fsdp and mesh.size() == ranks:
            square /= math.prod(mesh.size(i) for i in range(mesh.ndim) if i not in ways)
        else:
            for way in ways:
                torch.distributed.all_reduce(square, group=mesh.get_group(way))
            square /= ranks
        share = share.to(square.device) + square
    return share


# The sum over ranks ------------------------------------------------------------------------------


def sum_gradients(parameters: list[Tensor], collective: Collective) -> None:
    """Sum gradients over ranks in place, in buckets. Missing gradients count as zeros.

    A parameter without a gradient on every rank stays without one, as on a single rank: with
    zeros, an optimizer would apply weight decay. Ranks learn this from one entry per parameter in
    the first bucket.

    A sparse gradient (`nn.Embedding(sparse=True)`) is reduced as a dense one and made sparse again:
    row 1 on one rank and row 3 on another -> rows 1 and 3 on both. On a rank without a gradient
    the result is dense.

    Of a tensor-parallel parameter, each rank sums its shard with those of the same part on other
    data-parallel ranks.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters:
        return
    first = parameters[0]
    flags = [float(parameter.grad is not None) for parameter in parameters]
    used = torch.tensor(flags, dtype=first.dtype, device=first.device)
    sparse: list[tuple[Tensor, int]] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            sparse.append((parameter, parameter.grad.sparse_dim()))
            parameter.grad = parameter.grad.to_dense()
        placements = getattr(parameter, "placements", None)
        if placements is not None and parameter.grad.placements != placements:
            parameter.grad = parameter.grad.redistribute(placements=placements)
    for bucket in _buckets([used, *(local_tensor(parameter.grad) for parameter in parameters)]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        flat = collective.all_reduce_sum(flat).to(bucket[0].device)
        parts = flat.split([gradient.numel() for gradient in bucket])
        summed = [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)]
        torch._foreach_copy_(bucket, summed)
    for parameter, dimensions in sparse:
        parameter.grad = parameter.grad.to_sparse(dimensions)
    if not all(flags):  # others need not wait for the device
        for parameter, count in zip(parameters, used.tolist(), strict=True):
            if not count:
                parameter.grad = None


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one dtype, about `_BUCKET` bytes each."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size > _BUCKET or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
    yield bucket
