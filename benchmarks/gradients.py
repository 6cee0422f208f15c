"""Gradients: how far two gradients of a model are apart, judged per parameter."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from evenstep.testing.gradients import errors_of_parameters

PER_PARAMETER = (
    "Each parameter is judged by itself: the largest difference of its gradient, relative to its "
    "largest entry, or to 1 % of the model's largest if that is more. The worst parameter is shown."
)


def gradient_of(model: Any) -> dict[str, Tensor]:
    """The gradient of each parameter, in double precision."""
    return {name: each.grad.double() for name, each in model.named_parameters()}


def worst_parameter(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The error of the parameter that differs most; a norm of all would hide small ones.

    >>> import torch
    >>> right = {"large": torch.full((100,), 10.0), "small": torch.tensor([1.0])}
    >>> worst_parameter({**right, "small": torch.tensor([0.5])}, right)
    0.5
    """
    return max(errors_of_parameters(found, expected).values())
