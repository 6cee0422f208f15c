"""Gradients: rescaling, keeping earlier ones, and separate accumulators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from evenstep.errors import ConfigError


def rescale(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients by `factor` in place; a factor of 0 sets them to zero."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    if factor == 0.0:
        torch._foreach_zero_(gradients)
    else:
        torch._foreach_mul_(gradients, factor)


@contextmanager
def set_aside(parameters: Iterable[Tensor], copied: bool = False) -> Iterator[None]:
    """Context for a step: earlier gradients are removed inside and added back at the end.

    So rescaling and summing over ranks apply to the gradients of the step only. On an error, the
    earlier gradients are restored. Set `copied` if the framework writes into their tensors.
    """
    parameters = list(parameters)
    earlier = [
        gradient.clone() if copied and gradient is not None else gradient
        for gradient in (parameter.grad for parameter in parameters)
    ]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter, before in zip(parameters, earlier, strict=True):
            parameter.grad = before
        raise
    for parameter, before in zip(parameters, earlier, strict=True):
        if before is None:
            continue
        if parameter.grad is None:
            parameter.grad = before
        elif copied or (before.is_sparse and not parameter.grad.is_sparse):
            parameter.grad.add_(before)
        else:
            parameter.grad = before.add_(parameter.grad)  # keeps the tensor object


class SeparateGradients:
    """One gradient accumulator per denominator, combined when all denominators are known.

    Each needs its own backward and the memory of a gradient. For plain parameters only: frameworks
    that reduce gradients during backward (DDP, FSDP) do not reduce these.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> separate = SeparateGradients([x])
    >>> separate.backward({"tokens": 2 * x, "groups": x * x})
    >>> separate.combine({"tokens": 0.5, "groups": 10.0})
    >>> float(x.grad)
    61.0
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._sums: dict[str, list[Tensor | None]] = {}
        if any(hasattr(p, "device_mesh") for p in self.parameters):
            raise ConfigError(
                "separate gradients do not support sharded parameters (DTensor), whose framework "
                "reduces gradients during backward. Use one normalization for all losses, or "
                "mode='known'."
            )

    def backward(self, objectives: Mapping[str, Tensor]) -> None:
        """Add the gradient of each objective to its own accumulator."""
        left = len(objectives)
        for name, objective in objectives.items():
            left -= 1
            found = torch.autograd.grad(
                objective, self.parameters, retain_graph=left > 0, allow_unused=True
            )
            held = self._sums.get(name, [None] * len(self.parameters))
            # Out of place: two parameters may share one gradient tensor.
            self._sums[name] = [
                old if new is None else new if old is None else old + new
                for old, new in zip(held, found, strict=True)
            ]

    def combine(self, factors: Mapping[str, float]) -> None:
        """Add the sum of factor times gradient to each `.grad`, and clear the accumulators."""
        for name, held in self._sums.items():
            both = [(p, g) for p, g in zip(self.parameters, held, strict=True) if g is not None]
            if not both:
                continue
            scaled = torch._foreach_mul([gradient for _, gradient in both], factors[name])
            for (parameter, _), gradient in zip(both, scaled, strict=True):
                known = parameter.grad
                parameter.grad = gradient if known is None else known + gradient
        self._sums.clear()
