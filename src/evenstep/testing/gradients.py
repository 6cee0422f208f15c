"""Gradients: checks that a trainer's gradient of a step does not depend on how it is laid out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evenstep.core.layout import Packed, Padded
from evenstep.core.recipe import Recipe
from evenstep.errors import EvenstepError, InputError

Gradients: TypeAlias = dict[str, Tensor]

LAYOUTS = {
    "one sample per micro-batch": Recipe(layout=Padded(samples=1), balance="none"),
    "padded, 3 samples": Recipe(layout=Padded(samples=3)),
    "packed, 2 samples": Recipe(layout=Packed(samples=2)),
    "packed, 5 samples": Recipe(layout=Packed(samples=5)),
}
"""What `assert_same_gradient` compares by default; none depends on lengths."""
_LEAST = 0.01
"""Gradients below this share of the model's largest one are compared with this share of it: those
that are zero but for rounding have no scale of their own."""


class GradientError(EvenstepError, AssertionError):
    """The gradient of a step depends on its layout."""


def assert_same_gradient(
    run: Callable[[Recipe], Any],
    model: nn.Module,
    recipes: Mapping[str, Recipe] | None = None,
    *,
    tolerance: float = 1e-4,
) -> None:
    """Run one step of your trainer in several layouts and compare the gradients that it leaves.

    Each parameter is judged by itself: a wrong gradient of a small one is not hidden by the norm of
    all. Raises a `GradientError` that names the layout and the parameter that differs most, or the
    factor if all parameters differ by the same one. Clears `.grad`.

    run        trains one step on always the same samples, laid out by the recipe, up to but without
               the optimizer's update
    model      has the gradients in `.grad` of its parameters
    recipes    by name; the first is the one that others are compared with (default: one sample per
               micro-batch; padded; packed twice)
    tolerance  differences up to this, relative to the largest entry of the parameter's gradient,
               count as rounding

    >>> from evenstep import PlannedStream
    >>> from evenstep.demo import Decoder, DecoderShape
    >>> from evenstep.tensors import cross_entropy
    >>> from evenstep.train import run_step
    >>> samples = [{"input_ids": list(range(1, n))} for n in (3, 9, 5, 4, 7, 8)]
    >>> model = Decoder(DecoderShape(vocab=10))
    >>> def run(recipe: Recipe) -> None:
    ...     run_step(next(iter(PlannedStream(samples, recipe))), model, cross_entropy())
    >>> assert_same_gradient(run, model)
    """
    found = {name: _gradients(run, model, recipe) for name, recipe in (recipes or LAYOUTS).items()}
    if len(found) < 2:
        raise InputError(f"expected two or more recipes, got {len(found)}.")
    first, *others = found
    if not any(bool(gradient.any()) for gradient in found[first].values()):
        raise InputError(
            f"run left no gradient in the model's parameters ({first}). Let it call backward, and "
            f"not zero_grad."
        )
    broken = [name for name, each in found[first].items() if not bool(each.isfinite().all())]
    if broken:
        raise InputError(
            f"run left a gradient that is not finite in {broken[0]} ({first}), which cannot be "
            f"compared. Use samples and weights whose loss and gradient are finite."
        )
    again = _gradients(run, model, (recipes or LAYOUTS)[first])
    if max(errors_of_parameters(again, found[first]).values()) > tolerance:
        raise InputError(
            f"two runs with the same recipe ({first}) differ. Use the same samples, do not update "
            f"weights, and turn off randomness, for example with model.eval()."
        )
    for name in others:
        if max(errors_of_parameters(found[name], found[first]).values()) > tolerance:
            raise GradientError(_difference(name, first, found, tolerance))


def errors_of_parameters(found: Gradients, expected: Gradients) -> dict[str, float]:
    """By parameter, the largest difference of its gradient, relative to the largest entry of the
    expected one; infinite if either is not finite.

    >>> one, other = {"a": torch.tensor([4.0, 1.0])}, {"a": torch.tensor([4.0, 2.0])}
    >>> errors_of_parameters(one, other)
    {'a': 0.25}
    """
    scales = {name: _largest(gradient) for name, gradient in expected.items()}
    finite = [scale for scale in scales.values() if scale < math.inf]
    least = max(_LEAST * max(finite, default=0.0), 1e-30)
    return {
        name: _largest(found[name] - gradient) / max(scales[name], least)
        if scales[name] < math.inf
        else math.inf
        for name, gradient in expected.items()
    }


def _largest(values: Tensor) -> float:
    largest = float(values.abs().max()) if values.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


def _gradients(run: Callable[[Recipe], Any], model: nn.Module, recipe: Recipe) -> Gradients:
    """What a run leaves in `.grad`; zeros for parameters without a gradient."""
    model.zero_grad(set_to_none=True)
    run(recipe)
    gradients = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return gradients


def _difference(name: str, first: str, found: Mapping[str, Gradients], tolerance: float) -> str:
    one, other = found[name], found[first]
    product, square = (sum(float((g[n] * other[n]).sum()) for n in other) for g in (one, other))
    factor = product / square
    scaled = {n: gradient * factor for n, gradient in other.items()}
    if max(errors_of_parameters(one, scaled).values()) <= tolerance:
        return (
            f"the gradient of {name!r} is {factor:.3g} times that of {first!r}. Divide the loss of "
            f"a step by one number for all of its micro-batches."
        )
    errors = errors_of_parameters(one, other)
    worst = max(errors, key=errors.__getitem__)
    return (
        f"the gradient of {name!r} differs from that of {first!r}, most in {worst}: by "
        f"{errors[worst]:.1e} of its largest entry. Sum the losses of tokens over the step and "
        f"divide once, by the number of loss tokens of the step; then look for leaks between "
        f"segments (find_leaks)."
    )
