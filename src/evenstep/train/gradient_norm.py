"""Gradient norm: the norm of a step's gradient over all parameters, ranks and shards.

Each rank computes its share of the squared norm on the device. The shares are summed over ranks
with the other numbers of a step, so the norm needs no exchange of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

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
