"""Attention over the ranks that share a batch: local queries, keys gathered from all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from evenstep.tensors.batch import BatchShard
from evenstep.tensors.parallel import join_context, join_sequence


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, shard: BatchShard, group: Any, window: int | None = None
) -> Tensor:
    """Compute attention within each segment of the whole batch for the slots of `shard`.

    q, k and v are (rows, heads, width / size, dim), the slots of this rank. Keys and values are
    gathered, so their memory does not shrink with more ranks; queries, scores and other
    activations do.

        shard = shard_context(batch, rank, size)
        out = context_attention(q, k, v, shard, group)
    """
    # (rows, heads, width / size, dim) -> (rows, width / size, 2, heads, dim), and the whole width
    own = torch.stack((k, v)).permute(1, 3, 0, 2, 4)
    parts = gather(own, group)
    context = shard.sharding == "context"
    every = join_context(parts, shard.cu_seqlens) if context else join_sequence(parts)
    k, v = every.permute(2, 0, 3, 1, 4)
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible(shard, window), enable_gqa=q.shape[1] != k.shape[1]
    )


def visible(shard: BatchShard, window: int | None = None) -> Tensor:
    """(rows, 1, width / size, width) bool: which slots of its row each slot attends to."""
    width = shard.width * shard.size
    row = torch.arange(shard.rows, device=shard.device)[:, None] * width
    last = shard.slot_ids - row
    first = shard.cu_seqlens[shard.segment_ids] - row
    if window is not None:
        first = torch.maximum(first, last - (window - 1))
    slot = torch.arange(width, device=shard.device)
    return ((first[..., None] <= slot) & (slot <= last[..., None])).unsqueeze(1)


def gather(x: Tensor, group: Any) -> list[Tensor]:
    """Every rank's `x`, in group order. The backward sums each rank's gradient over ranks."""
    return list(_Gather.apply(x, group))


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> tuple[Tensor, ...]:
        ctx.group = group
        gathered = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(gathered, x.contiguous(), group=group)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every backend supports all-reduce; reduce-scatter would move half as much data.
        every = torch.stack(gradients)
        distributed.all_reduce(every, group=ctx.group)
        return every[distributed.get_rank(ctx.group)], None
