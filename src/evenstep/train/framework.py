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
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from evenstep.errors import ConfigError
from evenstep.train.collectives import Collective

_BUCKET = 32 * 2**20  # bytes of gradients that are summed at once


@dataclass(frozen=True, slots=True)
class Framework:
    """How a model exchanges its gradients."""

    kind: Literal["plain", "ddp", "fsdp"]
    model: Any
    ranks: int
    """The ranks that the framework exchanges between: DDP's group, or the mesh of fully_shard,
    which has the tensor-parallel ranks in it too. 1 where nobody exchanges."""

    @classmethod
    def of(cls, model: Any) -> Framework:
        """The framework around a model, compiled or not."""
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, DistributedDataParallel):
            return cls("ddp", inner, torch.distributed.get_world_size(inner.process_group))
        if isinstance(inner, FSDPModule):
            return cls("fsdp", inner, _mesh_size(inner))
        for name, module in inner.named_modules():
            if isinstance(module, (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)):
                raise ConfigError(
                    f"{type(module).__name__} at {name or 'the root'!r} exchanges gradients by "
                    f"itself, but not those of the whole model, so their scale would be wrong. "
                    f"Wrap the whole model, in DistributedDataParallel or fully_shard."
                )
        return cls("plain", inner, 1)

    def averaged_over(self, collective: Collective) -> int:
        """Over how many ranks the framework takes the mean of gradients; 1 where it does not."""
        if self.kind == "plain":
            return 1
        size = collective.size
        # A mesh may have tensor-parallel ranks, which hold other parts of the same parameters.
        if self.ranks != size and (self.kind == "ddp" or self.ranks % size or size == 1):
            raise ConfigError(
                f"the model exchanges gradients between {self.ranks} ranks but the collective has "
                f"{size}, so sums and gradients would be of different steps. Pass "
                f"collective=Distributed(group), with the group of all data- and "
                f"context-parallel ranks."
            )
        return size

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


def _mesh_size(model: Any) -> int:
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
    # A frozen parameter stays without: with zeros, an optimizer would decay it.
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
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
