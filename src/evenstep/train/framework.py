"""What wraps a model: DDP, `fully_shard`, their gradients, and a model after a failed step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from evenstep.errors import ConfigError
from evenstep.train.collectives import Collective, Distributed
from evenstep.train.gradients import local_tensor

Forward: TypeAlias = Callable[[Any, Any], Any]
"""(model, batch) -> outputs, as the loss function takes them."""

# The module that registers the forward of a library. It is imported when such a model is met,
# because `train` may not import what stands above it.
HOMES = {
    "transformers": "evenstep.integrations.huggingface",
    "peft": "evenstep.integrations.huggingface",
}
_MAKERS: dict[str, Callable[[Any], Forward]] = {}


def call(model: Any, batch: Any) -> Any:
    """The forward of models that take a batch: `model(batch)`."""
    return model(batch)


def register_forward(library: str, make: Callable[[Any], Forward]) -> None:
    """Use `make(model)` as the forward of models whose class comes from the package `library`.

    >>> register_forward("my_models", lambda model: lambda model, batch: model(batch.tokens))
    """
    _MAKERS[library] = make


def forward_of(model: Any) -> Forward:
    """The registered forward of the model's library, else `call`. Looks through DDP, torch.compile
    and fully_shard.

    >>> forward_of(nn.Linear(2, 2)) is call
    True
    """
    for library in _libraries(unwrapped(model)):
        if library not in _MAKERS and library in HOMES:
            import_module(HOMES[library])
        if library in _MAKERS:
            return _MAKERS[library](model)
    return call


def unwrapped(model: Any) -> Any:
    """The module inside DistributedDataParallel and torch.compile.

    >>> inner = nn.Linear(2, 2)
    >>> unwrapped(inner) is inner
    True
    """
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else None
        inner = getattr(model, "_orig_mod", inner)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _libraries(model: Any) -> Iterator[str]:
    """The packages of the model's class and its bases: a user's subclass counts as its base."""
    for kind in type(model).__mro__:
        yield kind.__module__.partition(".")[0]


_BUCKET = 32 * 2**20  # bytes of gradients that are summed at once


@dataclass(frozen=True, slots=True)
class Framework:
    """How a model exchanges its gradients."""

    kind: Literal["plain", "ddp", "fsdp"]
    model: Any
    ranks: int
    """Ranks that exchange gradients: DDP's group, or those over which fully_shard shards and
    replicates. 1 for plain."""
    divided_by: int | None = None
    """The factor set with `set_gradient_divide_factor` of fully_shard, if any."""

    @classmethod
    def of(cls, model: Any) -> Framework:
        """The framework that wraps a model, compiled or not."""
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, DistributedDataParallel):
            return cls("ddp", inner, torch.distributed.get_world_size(inner.process_group))
        if isinstance(inner, FSDPModule):
            for module in inner.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a forward alone leaves the root without sharded parameters
            _refuse_unsharded(inner)
            return cls("fsdp", inner, *_fsdp_ranks(inner))
        if isinstance(inner, FullyShardedDataParallel):
            raise ConfigError(
                "FullyShardedDataParallel (FSDP1) is not supported. Use "
                "torch.distributed.fsdp.fully_shard or DistributedDataParallel."
            )
        for name, module in inner.named_modules():
            if isinstance(module, (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)):
                raise ConfigError(
                    f"{type(module).__name__} at {name or 'the root'!r} exchanges gradients of "
                    f"only a part of the model. Wrap the whole model in DistributedDataParallel or "
                    f"fully_shard."
                )
        return cls("plain", inner, 1)

    def averaged_over(self, collective: Collective) -> int:
        """The number of ranks over which the framework averages gradients; 1 if it does not."""
        if self.kind == "plain":
            return 1
        size = collective.size
        if self.ranks != size:
            raise ConfigError(
                f"the model exchanges gradients between {self.ranks} ranks, but the collective has "
                f"{size}. Pass collective=Distributed(group) with the group of all data- and "
                f"context-parallel ranks."
            )
        peers = _fsdp_peers(self.model) if self.kind == "fsdp" else set()
        if peers and isinstance(collective, Distributed):
            others = set(torch.distributed.get_process_group_ranks(collective.group))
            if others != peers:
                raise ConfigError(
                    f"the model exchanges gradients between ranks {sorted(peers)}, but the "
                    f"collective has ranks {sorted(others)}. Pass collective=Distributed(group) "
                    f"with the group of fully_shard's mesh."
                )
        return size if self.divided_by is None else self.divided_by

    @property
    def owns_gradients(self) -> bool:
        """Whether `.grad` tensors are views of the framework's buckets, which it reuses."""
        return self.kind == "ddp" and bool(self.model.gradient_as_bucket_view)

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        """Context for one forward and backward; `now` exchanges gradients in this backward."""
        if self.kind == "ddp":
            if not now and self.model.static_graph:
                raise ConfigError(
                    "DistributedDataParallel(static_graph=True) exchanges gradients in every "
                    "backward, but a step of several micro-batches exchanges them only in the "
                    "last. Set static_graph=False."
                )
            return self._ddp() if now else self.model.no_sync()
        if self.kind == "fsdp":
            return self._fsdp(now)
        return nullcontext()

    @contextmanager
    def _ddp(self) -> Iterator[None]:
        """Raises at the end if no forward went through DDP: it has exchanged nothing then."""
        calls: list[bool] = []
        with _noticing(self.model, lambda: calls.append(True)):
            yield
        if not calls and self.ranks > 1:
            raise ConfigError(
                "forward did not call the DistributedDataParallel module, so gradients were not "
                "exchanged between ranks. Call the model that forward is given (`model(...)`, not "
                "`model.module(...)`)."
            )

    @contextmanager
    def _fsdp(self, now: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(now)
        self.model.set_is_last_backward(now)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)
            self.model.set_is_last_backward(True)


def device_of(model: Any) -> torch.device | None:
    """The device of the model's first parameter; None if there is none or it has no memory yet."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    device = next((parameter.device for parameter in parameters), None)
    return None if device is not None and device.type == "meta" else device


def fsdp_groups(model: Any) -> list[Any]:
    """The parameter groups of all modules that fully_shard wraps, each once."""
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    return list({id(group): group for state in states for group in groups_of(state)}.values())


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of one call of fully_shard."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch < 2.13
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _fsdp_ranks(model: Any) -> tuple[int, int | None]:
    """(ranks over which fully_shard exchanges gradients, its divide factor if one was set)."""
    found = set()
    for group in fsdp_groups(model):
        sizes = [getattr(group.mesh_info, f"{way}_mesh_size", 1) for way in ("shard", "replicate")]
        found.add((math.prod(sizes), getattr(group, "gradient_divide_factor", None)))
    if len(found) > 1 or any(factor and factor != int(factor) for _, factor in found):
        shown = ", ".join(f"{ranks} / {factor}" for ranks, factor in sorted(found, key=str))
        raise ConfigError(
            f"modules wrapped by fully_shard exchange gradients over different ranks or with "
            f"different divide factors (ranks / factor: {shown}). Shard all modules over the same "
            f"ranks, and set the same integer divide factor on all of them or on none."
        )
    ranks, factor = found.pop() if found else (1, None)
    return ranks, int(factor) if factor else None


def _fsdp_peers(model: Any) -> set[int]:
    """The ranks that exchange gradients with this one, itself included."""
    return {
        rank
        for group in fsdp_groups(model)
        for rank in group.mesh_info.mesh.mesh.flatten().tolist()
    }


def _refuse_unsharded(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not hasattr(parameter, "device_mesh"):
            raise ConfigError(
                f"the parameter {name!r} requires a gradient but is ignored by fully_shard, so its "
                f"gradient is not exchanged. Freeze it, or do not pass it as ignored."
            )


@contextmanager
def _noticing(ddp: Any, notice: Callable[[], None]) -> Iterator[None]:
    """Calls `notice` when a forward of DDP begins, whether compiled, called or by `.forward`."""
    begin = getattr(ddp, "_pre_forward", None)
    if begin is None or getattr(ddp, "_use_python_reducer", False):
        notice()  # torch without this method, or exchanges that were compiled into the graph
        yield
        return

    def noticed(*args: Any, **kwargs: Any) -> Any:
        notice()
        return begin(*args, **kwargs)

    ddp.__dict__["_pre_forward"] = noticed
    try:
        yield
    finally:
        del ddp.__dict__["_pre_forward"]


def sum_gradients(
    parameters: list[Tensor], collective: Collective, counts: Sequence[float] = ()
) -> Tensor:
    """Sum gradients over ranks in place, in buckets. Missing gradients count as zeros.

    A parameter without a gradient on every rank stays without one, as on a single rank: with
    zeros, an optimizer would apply weight decay. Ranks learn this from one entry per parameter in
    the first bucket.

    A sparse gradient (`nn.Embedding(sparse=True)`) is reduced as a dense one and made sparse again:
    row 1 on one rank and row 3 on another -> rows 1 and 3 on both. On a rank without a gradient
    the result is dense.

    Of a tensor-parallel parameter, each rank sums its shard with those of the same part on other
    data-parallel ranks.

    Small `counts` travel in the first bucket too. Their sums are returned, on the device.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if collective.size == 1 or not parameters:
        return torch.tensor(counts)
    first = parameters[0]
    flags = [float(parameter.grad is not None) for parameter in parameters]
    used = torch.tensor([*flags, *counts], dtype=first.dtype, device=first.device)
    missing = any(parameter.grad is None for parameter in parameters)
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
        _sum_bucket(bucket, collective)
    for parameter, dimensions in sparse:
        parameter.grad = parameter.grad.to_sparse(dimensions)
    if missing:  # others need not wait for the device
        for parameter, count in zip(parameters, used.tolist(), strict=False):
            if not count:
                parameter.grad = None
    return used[len(parameters) :]


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one dtype, about `_BUCKET` bytes each."""
    bucket: list[Tensor] = []
    held = 0
    for gradient in gradients:
        if bucket and (held > _BUCKET or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(gradient)
        held += gradient.numel() * gradient.element_size()
    yield bucket


def _sum_bucket(gradients: list[Tensor], collective: Collective) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat = collective.all_reduce_sum(flat).to(gradients[0].device)
    sizes = [gradient.numel() for gradient in gradients]
    summed = [s.view_as(g) for s, g in zip(flat.split(sizes), gradients, strict=True)]
    torch._foreach_copy_(gradients, summed)


def recover(framework: Framework) -> None:
    """Make the model ready for the next step, as if the failed one had not run.

    Collectives that a rank started alone are not undone: if only some ranks failed, the group of
    processes has to be started again (see `Watch`).
    """
    if framework.kind == "ddp":
        # On every rank that failed, wherever it failed: DDP exchanges the order of its buckets in
        # the second step after a reset, on all ranks or none.
        reset = getattr(framework.model.reducer, "_reset_state", None)
        if reset is not None:
            reset()
    if framework.kind == "fsdp":
        _recover_sharded(framework.model)


def held_gradients(framework: Framework) -> list[Tensor]:
    """Gradients of this step that fully_shard has not exchanged yet."""
    if framework.kind != "fsdp":
        return []
    held = [
        gradient
        for group in fsdp_groups(framework.model)
        for parameter in group.fsdp_params
        for gradient in (
            getattr(parameter, "unsharded_accumulated_grad", None),
            getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
        )
    ]
    return [gradient for gradient in held if gradient is not None]


def _recover_sharded(model: Any) -> None:
    root = model._get_fsdp_state()
    if root._is_root is not None:  # it ran a forward
        reset = getattr(model, "reset_iter_state", None)  # torch >= 2.13
        if reset is None:
            reset_state(root)
        else:
            reset()
    for group in fsdp_groups(model):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None
            event = getattr(parameter, "grad_offload_event", None)
            if event is not None:
                event.synchronize()
                parameter.grad_offload_event = None


# Before torch 2.13 -------------------------------------------------------------------------------


def reset_state(root: Any) -> None:
    """What `FSDPModule.reset_iter_state` does since torch 2.13: end all that is in flight."""
    context, shared = root._comm_ctx, root._state_ctx
    stream = root._device_handle.current_stream()
    for name in ("all_gather_state", "reduce_scatter_state"):
        state = getattr(context, name, None)
        if state is not None:
            _wait(stream, getattr(state, "event", None))
            setattr(context, name, None)
    for state in getattr(context, "reduce_scatter_states", ()):
        _wait(stream, state.event)
    for name in ("reduce_scatter_states", "post_forward_order"):
        getattr(context, name, []).clear()
    for state in shared.all_states:
        getattr(state, "_modules_to_run_forward", set()).clear()
        idle = type(state._training_state).IDLE
        state._training_state = idle
        for group in groups_of(state):
            _reset_group(group, idle, stream)
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _reset_group(group: Any, idle: Any, stream: Any) -> None:
    gathered = group._all_gather_result
    if gathered is not None:
        _wait(stream, gathered.all_gather_event)
        if hasattr(gathered.all_gather_work, "wait"):
            gathered.all_gather_work.wait()
        group._all_gather_result = None
    for name in ("_post_reduce_event", "_reshard_after_forward_event"):
        _wait(stream, getattr(group, name, None))
        setattr(group, name, None)
    _wait(stream, getattr(getattr(group, "_all_reduce_state", None), "event", None))
    group._all_reduce_state = None
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = idle
    group._to_sharded()


def _wait(stream: Any, event: Any) -> None:
    if event is not None:
        stream.wait_event(event)
