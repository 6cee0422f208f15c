"""Forwards: how a model is called with a batch, by the library that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, TypeAlias

from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
