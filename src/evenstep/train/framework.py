"""Framework: when gradients are exchanged, and by whom.

plain   nobody exchanges them; the runner sums them over ranks at the end of a step
ddp     DistributedDataParallel averages them in the last backward (`no_sync` in the others)
fsdp    fully_shard averages them by reduce-scatter; all ranks must run the same forwards
"""

from __future__ import annotations

import math
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
    """The ranks that the framework exchanges between: DDP's group, or those over which fully_shard
    shards and replicates. 1 where nobody exchanges."""
    divided_by: int | None = None
    """By what fully_shard divides where it was told to (`set_gradient_divide_factor`)."""

    @classmethod
    def of(cls, model: Any) -> Framework:
        """The framework around a model, compiled or not."""
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, DistributedDataParallel):
            return cls("ddp", inner, torch.distributed.get_world_size(inner.process_group))
        if isinstance(inner, FSDPModule):
            for module in inner.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a forward alone leaves the root without sharded parameters
            _refuse_unsharded(inner)
            return cls("fsdp", inner, *_fsdp_ranks(inner))
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
        if self.ranks != size:
            raise ConfigError(
                f"the model exchanges gradients between {self.ranks} ranks but the collective has "
                f"{size}, so sums and gradients would be of different steps. Pass "
                f"collective=Distributed(group), with the group of all data- and "
                f"context-parallel ranks."
            )
        return size if self.divided_by is None else self.divided_by

    @property
    def owns_gradients(self) -> bool:
        """Whether `.grad` are views of the framework's own memory, which the next step reuses."""
        return self.kind == "ddp" and bool(self.model.gradient_as_bucket_view)

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        """Around a forward and backward: exchange gradients in this backward, or not yet."""
        if self.kind == "ddp":
            if not now and self.model.static_graph:
                raise ConfigError(
                    "DistributedDataParallel(static_graph=True) has to exchange gradients in every "
                    "backward, but a step of several micro-batches exchanges them in its last. "
                    "Leave static_graph out."
                )
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


def _fsdp_ranks(model: Any) -> tuple[int, int | None]:
    """(the ranks between which fully_shard exchanges, what it divides by if not by those)."""
    found = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [
                getattr(state, "_fsdp_param_group", None)  # torch < 2.13
            ]
            for group in filter(None, groups):
                mesh = group.mesh_info
                sizes = [getattr(mesh, f"{way}_mesh_size", 1) for way in ("shard", "replicate")]
                factor = getattr(group, "gradient_divide_factor", None)
                found.add((math.prod(sizes), factor))
    if len(found) > 1 or any(factor and factor != int(factor) for _, factor in found):
        shown = ", ".join(f"{ranks} / {factor}" for ranks, factor in sorted(found, key=str))
        raise ConfigError(
            f"the parts of the model that were given to fully_shard exchange gradients between "
            f"other ranks or divide them by other factors (ranks / factor: {shown}), so no single "
            f"factor makes them exact. BatchShard all parts over the same ranks, and set one whole "
            f"gradient divide factor on all of them or none."
        )
    ranks, factor = found.pop() if found else (1, None)
    return ranks, int(factor) if factor else None


def _refuse_unsharded(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not hasattr(parameter, "device_mesh"):
            raise ConfigError(
                f"the parameter {name!r} is trained but fully_shard was told to ignore it, so "
                f"nobody would exchange its gradient. Freeze it, or let fully_shard have it."
            )


def sum_gradients(parameters: list[Tensor], collective: Collective) -> None:
    """Sum gradients over ranks in place, in buckets. A rank without a gradient brings zeros.

    A sparse gradient (`nn.Embedding(sparse=True)`) travels as a dense one and is made sparse again:
    rows 1 on one rank and 3 on another -> rows 1 and 3 on both. A rank that had none has it dense.
    """
    if collective.size == 1:
        return
    # A frozen parameter stays without: with zeros, an optimizer would decay it.
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    sparse: list[tuple[Tensor, int]] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            sparse.append((parameter, parameter.grad.sparse_dim()))
            parameter.grad = parameter.grad.to_dense()
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
    for parameter, dimensions in sparse:
        parameter.grad = parameter.grad.to_sparse(dimensions)


def _sum_bucket(gradients: list[Tensor], collective: Collective) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat = collective.all_reduce_sum(flat).to(gradients[0].device)
    sizes = [gradient.numel() for gradient in gradients]
    parts = [p.view_as(g) for p, g in zip(flat.split(sizes), gradients, strict=True)]
    torch._foreach_copy_(gradients, parts)
