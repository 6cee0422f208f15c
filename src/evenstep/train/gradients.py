"""Gradients: rescaling, keeping earlier ones, and separate accumulators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def local_tensor(gradient: Any) -> Tensor:
    """The values on this rank: the shard of a DTensor, or a plain tensor itself."""
    shard: Tensor = getattr(gradient, "_local_tensor", gradient)
    return shard


def rescale(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients by `factor` in place; a factor of 0 sets them to zero."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    if factor == 0.0:
        torch._foreach_zero_(gradients)
    else:
        torch._foreach_mul_(gradients, factor)


class Aside:
    """Gradients from before a step; `drop` discards those of the step."""

    def __init__(self) -> None:
        self.dropped = False

    def drop(self) -> None:
        """Discard the gradients of the step when its context ends."""
        self.dropped = True


@contextmanager
def set_aside(parameters: Iterable[Tensor], copied: bool = False) -> Iterator[Aside]:
    """Context for a step: earlier gradients are removed inside and added back at the end.

    So rescaling and summing over ranks apply to the gradients of the step only. On an error, and
    after `drop`, the earlier gradients are restored. Set `copied` if the framework writes into
    their tensors.
    """
    parameters, aside = list(parameters), Aside()
    earlier = [
        gradient.clone() if copied and gradient is not None else gradient
        for gradient in (parameter.grad for parameter in parameters)
    ]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield aside
    except BaseException:
        aside.drop()
        raise
    finally:
        if aside.dropped:
            for parameter, before in zip(parameters, earlier, strict=True):
                parameter.grad = before
    if aside.dropped:
        return
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

    Each denominator after the first needs a backward of its own and the memory of one more
    gradient. With `fully_shard` the accumulators are shards, and every backward must exchange
    gradients; DDP must not exchange any (`no_sync`): sum them after `combine`. A compiled model
    needs `torch._functorch.config.donated_buffer = False`.

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

    def backward(self, objectives: Mapping[str, Tensor]) -> None:
        """Add the gradient of each objective to its own accumulator."""
        before = self._take()
        left = len(objectives)
        try:
            for name, objective in objectives.items():
                left -= 1
                self._put(self._sums.get(name, [None] * len(self.parameters)))
                objective.backward(retain_graph=left > 0)
                self._sums[name] = self._take()
        finally:
            self._put(before)

    def combine(self, factors: Mapping[str, float]) -> None:
        """Add the sum of factor times gradient to each `.grad`, and clear the accumulators."""
        for name, held in self._sums.items():
            both = [(p, g) for p, g in zip(self.parameters, held, strict=True) if g is not None]
            for parameter, gradient in both:
                scaled = gradient * factors[name] if factors[name] else torch.zeros_like(gradient)
                known = parameter.grad
                parameter.grad = scaled if known is None else known + scaled
        self._sums.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """All accumulators."""
        return [each for held in self._sums.values() for each in held if each is not None]

    def _take(self) -> list[Tensor | None]:
        taken = [parameter.grad for parameter in self.parameters]
        self._put([None] * len(taken))
        return taken

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
