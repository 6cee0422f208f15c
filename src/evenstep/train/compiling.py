"""compile_layers: torch.compile for the layers of a model, and what it compiled in a step."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    Call it before DDP or `fully_shard` wrap the model. `StepResult.compiled` says what was
    compiled in a step; a second graph in the first steps is normal, later ones cost seconds each.

        compile_layers(model)
        runner = Runner(model=model, loss=cross_entropy())
    """
    layers = layers_of(model)
    if not layers:
        raise ConfigError(
            f"{type(unwrapped(model)).__name__} has no list of layers (nn.ModuleList) to compile. "
            f"Call torch.compile(model, dynamic=True) instead."
        )
    options: dict[str, Any] = {}
    if backend == "inductor":
        from torch._inductor import config

        # Otherwise its fusions depend on the number of tokens, and small batches need a new graph.
        name = "mix_order_reduction_non_strict_mode"
        if hasattr(config.triton, name):  # torch >= 2.10
            options = {"options": {f"triton.{name}": True}}
    for layer in layers:
        layer.compile(backend=backend, dynamic=True, **options)


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
