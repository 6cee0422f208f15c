"""compile_layers: torch.compile for the layers of a model, and what it compiled in a step."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from evenstep.errors import ConfigError
from evenstep.train.framework import unwrapped


def layers_of(model: nn.Module) -> list[Any]:
    """The layers of a decoder: those of the longest outer list of modules.

    >>> layers_of(nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])))
    [Linear(in_features=2, out_features=2, bias=True), ReLU()]
    """
    return max(map(list, _outer_lists(unwrapped(model))), key=len, default=[])


def _outer_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Those that are in no other list, as the experts of a layer are."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outer_lists(child)


def compile_layers(model: Any, *, backend: str = "inductor") -> None:
    """Compile each layer of a decoder or Hugging Face model, in place, for batches of any length.

    All layers share one graph, whose lengths, numbers of segments and longest segment are dynamic.
    Call it before DDP or `fully_shard` wrap the model. Norms and gated activations are computed
    again in the backward: a quarter less memory. `StepResult.compiled` says what was compiled in a
    step; a second graph in the first steps is normal, later ones cost seconds each.

        compile_layers(model)
        runner = Runner(model=model, loss=cross_entropy())
    """
    layers = layers_of(model)
    if not layers:
        raise ConfigError(
            f"{type(unwrapped(model)).__name__} has no list of layers (nn.ModuleList) to compile. "
            f"Call torch.compile(model, dynamic=True) instead."
        )
    for layer in layers:
        layer.compile(backend=_thrifty(backend), dynamic=True)


@cache  # layers share graphs of the same backend only
def _thrifty(name: str) -> Callable[..., Any]:
    """The backend, but what takes no product to compute is not kept for the backward.

    Norms and gated activations enter products, so by default they are kept. A 1B Llama on an H200
    takes 30 GiB instead of 41 without them, and 0.4 % more time.
    """
    from torch._functorch import config

    compile_graph, options = torch._dynamo.lookup_backend(name), {}
    if name == "inductor":
        from torch._inductor import config as inductor

        # Otherwise its fusions depend on the number of tokens, and small batches need a new graph.
        strict = "mix_order_reduction_non_strict_mode"
        if hasattr(inductor.triton, strict):  # torch >= 2.10
            options = {"config_patches": {f"triton.{strict}": True}}

    def compile_thriftily(graph: Any, inputs: Any) -> Any:
        with config.patch(ban_recompute_materialized_backward=False):
            return compile_graph(graph, inputs, **options)

    return compile_thriftily


@dataclass(frozen=True, slots=True)
class Compilations:
    """What torch.compile has done in this process: graphs, graph breaks, and guards that failed.

    >>> Compilations().since(Compilations()).graphs
    0
    """

    graphs: int = 0
    graph_breaks: int = 0
    failed_guards: tuple[str, ...] = ()
    """Why a graph could not be used again, one reason per guard."""

    @classmethod
    def so_far(cls) -> Compilations:
        """Counted by dynamo; nothing if it was not imported."""
        dynamo: Any = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return cls()
        return cls(
            dynamo.counters["stats"]["unique_graphs"],
            sum(dynamo.counters["graph_break"].values()),
            tuple(str(each) for failures in dynamo.guard_failures.values() for each in failures),
        )

    def since(self, before: Compilations) -> Compilations:
        """What was added to `before`."""
        return Compilations(
            self.graphs - before.graphs,
            self.graph_breaks - before.graph_breaks,
            tuple((Counter(self.failed_guards) - Counter(before.failed_guards)).elements()),
        )
