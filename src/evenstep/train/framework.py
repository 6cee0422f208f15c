"""Framework: when gradients are exchanged, and by whom.

plain   nobody exchanges them; the runner sums them over ranks at the end of a step
ddp     DistributedDataParallel averages them in the last backward (`no_sync` in the others)
fsdp    fully_shard averages them by reduce-scatter; all ranks must run the same forwards
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from evenstep.train.collectives import Collective

_BUCKET = 32 * 2**20  # bytes of gradients that are summed at once


@dataclass(frozen=True, slots=True)
class Framework:
    """How a model exchanges its gradients."""

    kind: Literal["plain", "ddp", "fsdp"]
    model: Any
    averaged_over: int
    """Over how many ranks the framework takes the mean of gradients; 1 where it does not."""

    @classmethod
    def of(cls, model: Any) -> Framework:
        """The framework around a model, compiled or not."""
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, DistributedDataParallel):
            size = torch.distributed.get_world_size(inner.process_group)
            return cls("ddp", inner, size)
        if isinstance(inner, FSDPModule):
            return cls("fsdp", inner, _shards(inner))
        return cls("plain", inner, 1)

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        """Around a forward and backward: exchange gradients in this backward, or not yet."""
        if self.kind == "ddp":
            return nullcontext() if now else self.model.no_sync()
        if self.kind == "fsdp":
            return self._fsdp(now)
        return nullcontext()

    @contextmanager
    def _fsdp(self, now: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(now)
        self.model.set_is_last_backward(now)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)
            self.model.set_is_last_backward(True)


def _shards(model: Any) -> int:
    """The ranks over which fully_shard averages: those of its parameters' meshes."""
    sizes = {
        parameter.device_mesh.size()
        for parameter in model.parameters()
        if hasattr(parameter, "device_mesh")
    }
    return max(sizes, default=1)


def sum_gradients(parameters: list[Tensor], collective: Collective) -> None:
    """Sum gradients over ranks in place, in buckets. A rank without a gradient brings zeros."""
    if collective.size == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    bucket: list[Tensor] = []
    held = 0
    for parameter in parameters:
        grad = parameter.grad
        assert grad is not None
        if bucket and (held > _BUCKET or grad.dtype != bucket[0].dtype):
            _sum_bucket(bucket, collective)
            bucket, held = [], 0
        bucket.append(grad)
        held += grad.numel() * grad.element_size()
    if bucket:
        _sum_bucket(bucket, collective)


def _sum_bucket(gradients: list[Tensor], collective: Collective) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat = collective.all_reduce_sum(flat).to(gradients[0].device)
    sizes = [gradient.numel() for gradient in gradients]
    parts = [p.view_as(g) for p, g in zip(flat.split(sizes), gradients, strict=True)]
    torch._foreach_copy_(gradients, parts)
