"""Outputs: the tensor that a loss reads from what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import InputError


def select_output(outputs: Any, name: str, rows: int, width: int) -> Tensor:
    """The tensor (rows, width, ...) called `name` in a model's outputs.

    A tensor is returned as it is. Outputs with names (a mapping, or an object such as a
    transformers ModelOutput) are read by name. One tensor per layer, (rows, width, ...) or
    (rows * width, ...) each, becomes (rows, width, layers, ...).

    >>> select_output({"router_logits": (torch.zeros(6, 4),) * 3}, "router_logits", 2, 3).shape
    torch.Size([2, 3, 3, 4])
    """
    if isinstance(outputs, Tensor):
        return outputs
    layers = outputs
    if name == "logits" or not isinstance(outputs, tuple | list):
        named = isinstance(outputs, Mapping)
        layers = outputs.get(name) if named else getattr(outputs, name, None)
    if isinstance(layers, Tensor):
        return layers
    found = [layer for layer in layers or () if isinstance(layer, Tensor)]
    if not found:
        raise InputError(
            f"the model returned {type(outputs).__name__} without {name!r}. Let `forward` return "
            f"the tensor, or an object that has it as {name!r}."
        )
    device = found[0].device
    shaped = [layer.to(device).unflatten(0, (rows, width)) if layer.ndim == 2 else layer.to(device)
              for layer in found]  # fmt: skip
    return torch.stack(shaped, dim=2)
