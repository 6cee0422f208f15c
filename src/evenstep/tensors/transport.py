"""What ranks exchange inside a forward, with gradients: rows of keys and values, and sums.

Operators of torch take no objects, so ranks are known to them by a name (`name_of`). A compiled
model calls the same operators.
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
    values: Tensor,  # (slots, entries)
    slots: Tensor,  # those that are sent, in the order of ranks
    sent: list[int],  # how many to each rank
    received: list[int],  # how many from each rank
    ranks: str,
) -> Tensor:
    """(received, entries): the rows that other ranks send."""
    CALLS[ranks] += 1
    rows: Tensor = _RANKS[ranks].all_to_all(values.index_select(0, slots), sent, received)
    return rows


@exchange.register_fake  # type: ignore[untyped-decorator]
def _exchange_fake(
    values: Tensor, slots: Tensor, sent: list[int], received: list[int], ranks: str
) -> Tensor:
    return values.new_empty(sum(received), values.shape[1])


@torch.library.custom_op("evenstep::exchange_backward", mutates_args=())  # type: ignore[untyped-decorator]
def exchange_backward(
    gradient: Tensor, slots: Tensor, count: int, sent: list[int], received: list[int], ranks: str
) -> Tensor:
    """(count, entries): the gradients of all slots; those of all ranks are summed in float32."""
    rows = _RANKS[ranks].all_to_all(gradient.contiguous(), received, sent)
    return sum_rows(rows, slots, count)


@exchange_backward.register_fake  # type: ignore[untyped-decorator]
def _backward_fake(gradient: Tensor, slots: Tensor, count: int, *_: Any) -> Tensor:
    return gradient.new_empty(count, gradient.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, slots, *ctx.how = inputs
    ctx.save_for_backward(slots)
    ctx.count = values.shape[0]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (slots,) = ctx.saved_tensors
    return exchange_backward(gradient, slots, ctx.count, *ctx.how), None, None, None, None


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


class SumOverRanks(torch.autograd.Function):  # type: ignore[misc]
    """The sum of a tensor over ranks; so is that of its gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_reduce_sum(values.clone()).to(values.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_reduce_sum(gradient.clone()).to(gradient.device), None
