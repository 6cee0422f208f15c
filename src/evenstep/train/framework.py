"""How a model is called with a batch, and how its framework exchanges gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from evenstep.errors import ConfigError
from evenstep.train.collectives import Collective, Distributed

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
    exchanges = set()
    for group in fsdp_groups(model):
        sizes = [getattr(group.mesh_info, f"{way}_mesh_size", 1) for way in ("shard", "replicate")]
        exchanges.add((math.prod(sizes), getattr(group, "gradient_divide_factor", None)))
    if len(exchanges) > 1 or any(factor and factor != int(factor) for _, factor in exchanges):
        shown = ", ".join(f"{ranks} / {factor}" for ranks, factor in sorted(exchanges, key=str))
        raise ConfigError(
            f"modules wrapped by fully_shard exchange gradients over different ranks or with "
            f"different divide factors (ranks / factor: {shown}). Shard all modules over the same "
            f"ranks, and set the same integer divide factor on all of them or on none."
        )
    ranks, factor = exchanges.pop() if exchanges else (1, None)
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
