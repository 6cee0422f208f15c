"""How a model is called with a batch, and how its framework exchanges gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from importlib import import_module
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
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
PLAIN: WeakSet[Any] = WeakSet()
"""Forwards that return the model's logits as they are, whatever the batch holds."""


def call(model: Any, batch: Any) -> Any:
    """The forward of models that take a batch: `model(batch)`."""
    return model(batch)


def mark_plain(forward: Forward) -> Forward:
    """Add a forward to `PLAIN`: a runner may compute losses without its logits."""
    PLAIN.add(forward)
    return forward


mark_plain(call)


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
    for kind in type(unwrapped(model)).__mro__:  # a user's subclass counts as its base
        library = kind.__module__.partition(".")[0]
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


def device_of(model: Any) -> torch.device | None:
    """The device of the model's first parameter; None if there is none or it has no memory yet."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    device = next((parameter.device for parameter in parameters), None)
    return None if device is not None and device.type == "meta" else device


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode, without gradients; each module in its own mode again at the end."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []  # or a function
    training = {module: module.training for module in modules}
    for module in modules:
        module.training = False
    torch.clear_autocast_cache()  # casts of weights before the last update
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
        torch.clear_autocast_cache()  # casts without a gradient


ASIDE: ContextVar[int] = ContextVar("ASIDE", default=0)
"""How many `undisturbed` are entered: forwards in them are not those of a step."""


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Evaluation mode, without gradients, compilation and warnings; everything as before after."""
    devices = {each.device for each in model.parameters()} if isinstance(model, nn.Module) else ()
    outside = ASIDE.set(ASIDE.get() + 1)
    try:
        with (
            evaluating(model),
            torch.random.fork_rng(devices=[each.index for each in devices if each.type == "cuda"]),
            # Compiled layers would run neither the attention function again, nor hooks.
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        ASIDE.reset(outside)


class Framework:
    """How a model exchanges its gradients: the answers of a plain model, which does not.

    `DataParallel` and `FullyShard` answer for DDP and fully_shard.
    """

    locks_step = False
    """Whether ranks synchronise inside every micro-batch."""
    ranks = 1
    """Ranks that exchange gradients."""
    exchanges = False
    """Whether the framework exchanges gradients; otherwise a runner sums them."""
    owns_gradients = False
    """Whether `.grad` tensors are views of the framework's buckets, which it reuses."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @staticmethod
    def of(model: Any) -> Framework:
        """The framework that wraps a model, compiled or not."""
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, DistributedDataParallel):
            return DataParallel(inner)
        if isinstance(inner, FSDPModule):
            return FullyShard(inner)
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
        return Framework(inner)

    def averaged_over(self, collective: Collective) -> int:
        """The number by which the framework divides sums of gradients."""
        if self.ranks != collective.size:
            raise ConfigError(
                f"the model exchanges gradients between {self.ranks} ranks, but the collective has "
                f"{collective.size}. Pass collective=Distributed(group) with the group of all "
                f"data- and context-parallel ranks."
            )
        return self.ranks

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        """Context for one forward and backward; `now` exchanges gradients in this backward."""
        return nullcontext()

    def leaves(self) -> list[Tensor]:
        """The parameters that a forward reads."""
        return list(self.model.parameters())

    def pending(self) -> list[Tensor]:
        """Gradients of this step that were not exchanged yet and are not in `.grad`."""
        return []

    def recover(self) -> None:
        """Make the model ready for the next step, as if the failed one had not run.

        DDP and fully_shard keep state between a forward and the end of its backward. There is no
        communication; call it on every rank on which the step failed. Collectives that a rank
        started alone are not undone: if only some ranks failed, the group of processes has to be
        started again (see `Watch`).
        """


_EXCHANGED: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
"""By DDP module: the ids of the parameters whose gradients it exchanges, once they are known."""


class DataParallel(Framework):
    """DistributedDataParallel, which averages gradients over its process group."""

    exchanges = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.ranks = torch.distributed.get_world_size(model.process_group)
        self.owns_gradients = bool(model.gradient_as_bucket_view)

    def averaged_over(self, collective: Collective) -> int:
        if self.ranks > 1:
            self._check_trained()
        return super().averaged_over(collective)

    def _check_trained(self) -> None:
        """Raise if parameters are trained that DDP does not exchange: it knows those that required
        a gradient when it was made, and says how many."""
        trained = {id(each) for each in self.model.parameters() if each.requires_grad}
        exchanged = _EXCHANGED.get(self.model)
        if exchanged is None:
            count = int(self.model._get_ddp_logging_data()["num_parameter_tensors"])
            count += len(getattr(self.model, "_delay_all_reduce_params", ()))
            if len(trained) == count:
                _EXCHANGED[self.model] = trained
            if len(trained) <= count:
                return
        elif trained <= exchanged:
            return
        raise ConfigError(
            "DistributedDataParallel exchanges the gradients of parameters that required one when "
            "it was made, but others require one now. Wrap the model again after unfreezing "
            "parameters, and let DDP ignore none of those that are trained."
        )

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        if not now and self.model.static_graph:
            raise ConfigError(
                "DistributedDataParallel(static_graph=True) exchanges gradients in every "
                "backward, but a step of several micro-batches exchanges them only in the "
                "last. Set static_graph=False."
            )
        no_sync: AbstractContextManager[None] = self.model.no_sync()
        return self._require_exchange() if now else no_sync

    @contextmanager
    def _require_exchange(self) -> Iterator[None]:
        """Raises at the end if DDP has not exchanged all gradients: no forward went through it, or
        it still waits for a parameter without a gradient."""
        begin = getattr(self.model, "_pre_forward", None)
        if begin is None or getattr(self.model, "_use_python_reducer", False):
            yield  # torch without this method, or exchanges that were compiled into the graph
            return
        called = False

        def begin_forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal called
            called = True
            return begin(*args, **kwargs)

        self.model.__dict__["_pre_forward"] = begin_forward
        try:
            yield
        finally:
            del self.model.__dict__["_pre_forward"]
        if not called and self.ranks > 1:
            raise ConfigError(
                "forward did not call the DistributedDataParallel module, so gradients were not "
                "exchanged between ranks. Call the model that forward is given (`model(...)`, not "
                "`model.module(...)`)."
            )
        try:
            self.model._check_reducer_finalized()
        except RuntimeError as error:
            raise ConfigError(
                "a parameter had no gradient in the last micro-batch, so DistributedDataParallel "
                "has not exchanged all gradients. Set find_unused_parameters=True, and wrap the "
                "model after freezing parameters."
            ) from error

    def recover(self) -> None:
        """Reset the reducer, on every rank that failed, wherever it failed: DDP exchanges the order
        of its buckets in the second step after a reset, on all ranks or none."""
        reset = getattr(self.model.reducer, "_reset_state", None)
        if reset is not None:
            reset()


class FullyShard(Framework):
    """fully_shard, which averages gradients over the ranks that shard and replicate."""

    locks_step = exchanges = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward alone leaves the root without sharded parameters
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not hasattr(parameter, "device_mesh"):
                raise ConfigError(
                    f"the parameter {name!r} requires a gradient but is ignored by fully_shard, so "
                    f"its gradient is not exchanged. Freeze it, or do not pass it as ignored."
                )
        states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
        groups = [group for state in states for group in _groups_of(state)]
        self._groups = list({id(group): group for group in groups}.values())
        self.ranks, self._divided_by = self._ranks()

    def _ranks(self) -> tuple[int, int | None]:
        """(ranks that exchange gradients, the factor of `set_gradient_divide_factor`)."""
        exchanges = set()
        for group in self._groups:
            info = group.mesh_info
            sizes = [getattr(info, f"{way}_mesh_size", 1) for way in ("shard", "replicate")]
            exchanges.add((math.prod(sizes), getattr(group, "gradient_divide_factor", None)))
        odd = [factor for _, factor in exchanges if factor and (factor < 1 or factor % 1)]
        if len(exchanges) > 1 or odd:
            shown = ", ".join(f"{ranks} / {factor}" for ranks, factor in sorted(exchanges, key=str))
            raise ConfigError(
                f"modules wrapped by fully_shard exchange gradients over different ranks or with "
                f"different divide factors (ranks / factor: {shown}). Shard all modules over the "
                f"same ranks, and set the same integer divide factor on all of them or on none."
            )
        ranks, factor = exchanges.pop() if exchanges else (1, None)
        return ranks, int(factor) if factor else None

    def averaged_over(self, collective: Collective) -> int:
        size = super().averaged_over(collective)
        meshes = [group.mesh_info.mesh.mesh for group in self._groups]
        peers = {rank for mesh in meshes for rank in mesh.flatten().tolist()}
        if peers and isinstance(collective, Distributed):
            others = set(torch.distributed.get_process_group_ranks(collective.group))
            if others != peers:
                raise ConfigError(
                    f"the model exchanges gradients between ranks {sorted(peers)}, but the "
                    f"collective has ranks {sorted(others)}. Pass collective=Distributed(group) "
                    f"with the group of fully_shard's mesh."
                )
        return size if self._divided_by is None else self._divided_by

    @contextmanager
    def exchange(self, now: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(now)
        self.model.set_is_last_backward(now)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)
            self.model.set_is_last_backward(True)

    def leaves(self) -> list[Tensor]:
        """Shards are gathered into parameters of their own."""
        gathered = (
            getattr(parameter, "_unsharded_param", None)
            for group in self._groups
            for parameter in group.fsdp_params
        )
        return [*super().leaves(), *(each for each in gathered if each is not None)]

    def pending(self) -> list[Tensor]:
        """Gradients that are accumulated without shards."""
        gradients = [
            gradient
            for group in self._groups
            for parameter in group.fsdp_params
            for gradient in (
                getattr(parameter, "unsharded_accumulated_grad", None),
                getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
            )
        ]
        return [gradient for gradient in gradients if gradient is not None]

    def recover(self) -> None:
        """End what is in flight and drop gradients that were not exchanged, which fully_shard would
        add to those of the next step."""
        end_forward(self.model)
        for group in self._groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None
                event = getattr(parameter, "grad_offload_event", None)
                if event is not None:
                    event.synchronize()
                    parameter.grad_offload_event = None


def end_forward(model: Any) -> None:
    """End a forward of fully_shard that raised: without it, weights stay gathered."""
    if not isinstance(model, FSDPModule):
        return
    root = model._get_fsdp_state()
    if root._is_root is not None:  # it ran a forward
        reset = getattr(model, "reset_iter_state", None)  # torch >= 2.13
        if reset is None:
            _reset_state(root)
        else:
            reset()


def reshard(model: Any) -> None:
    """Drop gathered parameters of fully_shard, which are copies of the shards. Also those of a
    root whose forward raised, which `FSDPModule.reshard` keeps."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, FSDPModule):
            for group in _groups_of(module._get_fsdp_state()):
                group._to_sharded()


def _groups_of(state: Any) -> list[Any]:
    """The parameter groups of one call of fully_shard."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch < 2.13
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _reset_state(root: Any) -> None:
    """What `FSDPModule.reset_iter_state` does since torch 2.13: end all that is in flight."""
    context, shared = root._comm_ctx, root._state_ctx
    stream = root._device_handle.current_stream()

    def wait(event: Any) -> None:
        if event is not None:
            stream.wait_event(event)

    for name in ("all_gather_state", "reduce_scatter_state"):
        wait(getattr(getattr(context, name, None), "event", None))
        if hasattr(context, name):
            setattr(context, name, None)
    for state in getattr(context, "reduce_scatter_states", ()):
        wait(state.event)
    for name in ("reduce_scatter_states", "post_forward_order"):
        getattr(context, name, []).clear()
    for state in shared.all_states:
        getattr(state, "_modules_to_run_forward", set()).clear()
        idle = state._training_state = type(state._training_state).IDLE
        for group in _groups_of(state):
            gathered = group._all_gather_result
            if gathered is not None:
                wait(gathered.all_gather_event)
                if hasattr(gathered.all_gather_work, "wait"):
                    gathered.all_gather_work.wait()
            wait(getattr(group, "_post_reduce_event", None))
            wait(getattr(group, "_reshard_after_forward_event", None))
            wait(getattr(getattr(group, "_all_reduce_state", None), "event", None))
            group._all_gather_result = group._all_reduce_state = None
            group._post_reduce_event = group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
