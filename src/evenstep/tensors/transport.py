"""What ranks exchange inside a forward, with gradients: rows of keys and values, and sums.

Operators of torch take no objects, so ranks are known to them by a name (`name_of`). A compiled
model calls the same operators. Their results are always used, also where ranks exchange nothing:
a compiler drops an operator without use, and other ranks would wait for it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from evenstep.errors import ConfigError


class Ranks(Protocol):
    """Ranks that exchange rows; every rank makes the same calls in the same order."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks. `tensor` may be overwritten."""
        ...

    def all_to_all(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows for each rank, `sent[r]` for rank r -> rows from each, `received[r]` from rank r."""
        ...


_RANKS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
CALLS: Counter[str] = Counter()
"""How often forwards exchanged rows, by the name of the ranks."""


def name_of(ranks: Any) -> str:
    """The name by which operators know these ranks, as long as the object is there."""
    if not hasattr(ranks, "all_to_all"):
        raise ConfigError(
            f"this step shares samples between ranks, which {type(ranks).__name__} cannot "
            f"exchange. Pass collective=Distributed(), or a collective with all_to_all(values, "
            f"sent, received)."
        )
    name = f"evenstep ranks {id(ranks)}"
    _RANKS[name] = ranks
    return name


@torch.library.custom_op("evenstep::exchange", mutates_args=())  # type: ignore[untyped-decorator]
def exchange(
    k: Tensor,  # (slots, heads, dim)
    v: Tensor,
    slots: Tensor,  # those that are sent, in the order of ranks
    sent: list[int],  # how many to each rank
    received: list[int],  # how many from each rank
    ranks: str,
) -> Tensor:
    """(received, entries of k and v): the rows that other ranks send; one of zeros if none does."""
    CALLS[ranks] += 1
    rows = torch.cat([x.index_select(0, slots).flatten(1) for x in (k, v)], dim=1)
    seen: Tensor = _RANKS[ranks].all_to_all(rows, sent, received)
    return seen if len(seen) else rows.new_zeros(1, rows.shape[1])


@exchange.register_fake  # type: ignore[untyped-decorator]
def _exchange_fake(
    k: Tensor, v: Tensor, slots: Tensor, sent: list[int], received: list[int], ranks: str
) -> Tensor:
    entries = k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]
    dtype = torch.promote_types(k.dtype, v.dtype)
    return k.new_empty(sum(received) or 1, entries, dtype=dtype)


@torch.library.custom_op("evenstep::exchange_backward", mutates_args=())  # type: ignore[untyped-decorator]
def exchange_backward(
    gradient: Tensor, k: Tensor, v: Tensor, slots: Tensor, sent: list[int], received: list[int],
    ranks: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of k and v, those of all ranks summed in float32; one zero if nothing was sent."""
    rows = _RANKS[ranks].all_to_all(gradient[: sum(received)].contiguous(), received, sent)
    if not len(rows):
        return k.new_zeros(1, 1, 1), v.new_zeros(1, 1, 1)
    parts = rows.split([k[0].numel(), v[0].numel()], dim=1)
    dk, dv = (
        sum_rows(part.contiguous(), slots, len(x)).unflatten(1, x.shape[1:]).to(x.dtype)
        for part, x in zip(parts, (k, v), strict=True)
    )
    return dk, dv


@exchange_backward.register_fake  # type: ignore[untyped-decorator]
def _backward_fake(
    gradient: Tensor, k: Tensor, v: Tensor, slots: Tensor, sent: list[int], *_: Any
) -> tuple[Tensor, Tensor]:
    dk, dv = (x.new_empty(x.shape if sum(sent) else (1, 1, 1)) for x in (k, v))
    return dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.sent, ctx.received, ctx.ranks = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    how = ctx.sent, ctx.received, ctx.ranks
    k, v, slots = ctx.saved_tensors
    dk, dv = exchange_backward(gradient, k, v, slots, *how)
    if not sum(ctx.sent):  # no pass over k
        dk, dv = None, dv.expand_as(v)
    return dk, dv, None, None, None, None


exchange.register_autograd(_differentiate, setup_context=_keep)


def sum_rows(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """(rows, ...) -> (count, ...), summed over the rows of each index.

    One bag per index: sums in float32 or wider, in the order of rows, without a wide copy.
    """
    sorted_index, order = index.sort(stable=True)
    first = torch.searchsorted(sorted_index, torch.arange(count, device=index.device))
    flat = rows.flatten(1)
    if not rows.is_cuda:  # CUDA adds bfloat16 in float32
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    sums = functional.embedding_bag(order, flat, first, mode="sum")
    return sums.to(rows.dtype).unflatten(1, rows.shape[1:])


def refuse_second_derivative() -> None:
    """Raise in the backward of a function whose gradients have no graph of their own."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ConfigError(
            "gradients of a head, and of sums over ranks, cannot be differentiated again, but "
            "create_graph=True asks for it. Compute the loss from logits, on one rank."
        )


class SumOverRanks(torch.autograd.Function):  # type: ignore[misc]
    """The sum of a tensor over ranks; so is that of its gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_reduce_sum(values.clone()).to(values.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        return ctx.ranks.all_reduce_sum(gradient.clone()).to(gradient.device), None
