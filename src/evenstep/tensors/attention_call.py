"""Call: the validated arguments of one attention, as every backend takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from evenstep.errors import ConfigError, InputError
from evenstep.tensors.boundaries import Boundaries
from evenstep.tensors.masks import check_window


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """q, k and v, where segments begin and end, and what the softmax does.

    softcap  scores become softcap * tanh(scores / softcap), before masking
    sinks    (heads) one logit per query head that joins the denominator of the softmax
    dropout  probability of dropping an attention weight
    """

    q: Tensor  # (rows, heads, width, dim)
    k: Tensor  # (rows, kv heads, width, dim)
    v: Tensor  # (rows, kv heads, width, value dim)
    bounds: Boundaries
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_window(self.window)
        q, k, v, bounds = self.q, self.k, self.v, self.bounds
        shape = (bounds.rows, bounds.width)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.ndim != 4 or (tensor.shape[0], tensor.shape[2]) != shape:
                raise InputError(
                    f"{name} has shape {tuple(tensor.shape)}, but the batch has {shape[0]} rows "
                    f"of {shape[1]} slots. Pass q, k and v as (rows, heads, width, dim)."
                )
        if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
            raise InputError(
                f"q has {q.shape[1]} heads, k has {k.shape[1]} and v has {v.shape[1]}. k and v "
                f"must have the same number of heads, a divisor of q's."
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ConfigError(f"softcap must be positive, or None for none; got {self.softcap}.")
        if self.sinks is not None and tuple(self.sinks.shape) != (q.shape[1],):
            raise InputError(
                f"sinks has shape {tuple(self.sinks.shape)}, expected one logit for each of the "
                f"{q.shape[1]} heads of q, ({q.shape[1]},)."
            )

    @property
    def shared(self) -> int:
        """Query heads per key head (grouped-query attention)."""
        return int(self.q.shape[1] // self.k.shape[1])

    @property
    def scaling(self) -> float:
        """What scores are multiplied by."""
        return float(self.q.shape[3] ** -0.5 if self.scale is None else self.scale)

    @property
    def plain(self) -> bool:
        """Whether the softmax is the usual one: no soft cap and no sinks."""
        return self.softcap is None and self.sinks is None

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass may follow."""
        given = (self.q, self.k, self.v, self.sinks)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)

    def keys(self, repeat: bool) -> tuple[Tensor, Tensor]:
        """k and v; with `repeat`, each head is repeated for the query heads that share it."""
        if not repeat or self.shared == 1:
            return self.k, self.v
        return (
            self.k.repeat_interleave(self.shared, dim=1),
            self.v.repeat_interleave(self.shared, dim=1),
        )


def _never(call: Call) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """A function that runs a call, and one that says why it cannot (None if it can)."""

    run: Callable[[Call], Tensor]
    refuses: Callable[[Call], str | None] = _never
