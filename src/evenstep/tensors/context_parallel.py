"""Context parallelism: shard each tile of a batch in zigzag, so that causal work is even.

A tile is divided into 2 * size chunks; rank r holds chunks r and 2 * size - 1 - r. Late chunks
attend to more keys than early ones, and each pair costs the same.

    | 0 1 | 2 3 | 4 5 | p p |      size 2: rank 0 holds 0 1 p p, rank 1 holds 2 3 4 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.batch_shard import BatchShard, check_rank, join_slots, take_slots


def shard_context(batch: Batch, rank: int, size: int) -> BatchShard:
    """The shard of `batch` on rank `rank` of `size` context-parallel ranks.

    Plan with `Topology(cp=size)`, which aligns segments and widths as required. Shift extras that
    a loss compares with predictions (old log-probs, advantages) with `batch.at_labels(...)` first.
    `join_shards` is the inverse.

    >>> from evenstep import Packed, Recipe, Topology, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> recipe = Recipe(layout=Packed(max_tokens=16), topology=Topology(cp=2))
    >>> batch = Collator()(make_plan([6], recipe)[0, 0][0], [{"input_ids": range(10, 16)}])
    >>> [shard_context(batch, rank, 2).tokens.tolist() for rank in range(2)]
    [[[10, 11, 0, 0]], [[12, 13, 14, 15]]]
    """
    check_rank(rank, size)
    _check_tiles(batch.cu_seqlens, size, batch.sample_ids)
    slot_ids = _slots(batch.cu_seqlens, rank, size)
    return take_slots(batch, slot_ids.view(batch.rows, -1), rank, size, "context")


def join_context(shards: Sequence[Tensor], cu_seqlens: Tensor) -> Tensor:
    """Per-slot results of all context-parallel ranks -> results of the whole batch.

    `shards[r]` is rank r's (rows, width / size, ...) tensor; `cu_seqlens` is that of the whole
    batch, which every `BatchShard` has. Differentiable.

    >>> shards = [torch.tensor([[0, 1, 6, 7]]), torch.tensor([[2, 3, 4, 5]])]
    >>> join_context(shards, torch.tensor([0, 8])).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    shapes = {tuple(shard.shape) for shard in shards}
    slots, size = int(cu_seqlens[-1]), len(shards)
    if len(shapes) != 1 or sum(shard.shape[:2].numel() for shard in shards) != slots:
        raise InputError(
            f"{size} tensors of shapes {sorted(shapes)} do not make up the {slots} slots of the "
            f"batch. Pass one (rows, width / size, ...) tensor per rank, in rank order."
        )
    _check_tiles(cu_seqlens, size)
    boundaries = cu_seqlens.to(shards[0].device)
    return join_slots(shards, [_slots(boundaries, rank, size) for rank in range(size)])


def _slots(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """(slots / size) int64: the slots of rank `rank`, in ascending order.

    cu_seqlens [0, 8, 12], rank 0 of 2 -> [0, 1, 6, 7, 8, 11]
    """
    total, device = int(cu_seqlens[-1]), cu_seqlens.device
    if size == 1:
        return torch.arange(total, device=device)
    begin, chunk = cu_seqlens[:-1].long(), cu_seqlens.diff().long() // (2 * size)
    # (tiles, 2): first slot of this rank's two chunks of each tile
    numbers = torch.tensor([rank, 2 * size - 1 - rank], device=device)
    first = (begin[:, None] + chunk[:, None] * numbers).reshape(-1)
    length = chunk.repeat_interleave(2)
    shift = first - (length.cumsum(0) - length)
    here = torch.arange(total // size, device=device)
    return here + shift.repeat_interleave(length, output_size=total // size)


@dataclass(frozen=True, slots=True, eq=False)
class ContextWork:
    """(query, key) pairs of each context-parallel rank under a causal mask, padding included.

    `zigzag` is the sharding of `shard_context`; `contiguous` gives each rank one run of slots per
    tile. Imbalance is the largest over the mean.
    """

    zigzag: Tensor  # (size) int64
    contiguous: Tensor  # (size) int64

    @property
    def zigzag_imbalance(self) -> float:
        """Imbalance of the zigzag sharding."""
        return _imbalance(self.zigzag)

    @property
    def contiguous_imbalance(self) -> float:
        """Imbalance of the contiguous sharding."""
        return _imbalance(self.contiguous)


def context_work(batch: Batch, size: int) -> ContextWork:
    """The causal attention work of each of `size` context-parallel ranks on `batch`.

    One tile of 8 on 2 ranks: zigzag [18, 18], contiguous [10, 26].
    """
    _check_tiles(batch.cu_seqlens, size, batch.sample_ids)
    slots, ranks = batch.cu_seqlens.diff().long()[:, None], torch.arange(size, device=batch.device)
    run = slots // size
    contiguous = _pairs(run * ranks, run).sum(0)
    if size == 1:
        return ContextWork(contiguous, contiguous)
    chunk = slots // (2 * size)
    late = 2 * size - 1 - ranks
    zigzag = (_pairs(chunk * ranks, chunk) + _pairs(chunk * late, chunk)).sum(0)
    return ContextWork(zigzag, contiguous)


def _pairs(first: Tensor, count: Tensor) -> Tensor:
    """Keys that `count` queries from position `first` attend to: 2 from 3 -> 4 + 5 = 9."""
    return count * first + count * (count + 1) // 2


def _imbalance(work: Tensor) -> float:
    return float(work.max() / work.double().mean())


def _check_tiles(cu_seqlens: Tensor, size: int, sample_ids: Tensor | None = None) -> None:
    if size > 1 and bool((cu_seqlens.diff() % (2 * size)).any()):
        _refuse_tile(cu_seqlens, size, sample_ids)


def _refuse_tile(cu_seqlens: Tensor, size: int, sample_ids: Tensor | None) -> NoReturn:
    slots = cu_seqlens.diff()
    at = int((slots % (2 * size)).ne(0).nonzero()[0])
    sample = -1 if sample_ids is None else int(sample_ids[at])
    whose = f"of sample {sample}" if sample >= 0 else f"number {at}"
    raise InputError(
        f"the tile {whose} has {int(slots[at])} slots, but {size} context-parallel ranks require "
        f"a multiple of {2 * size}. Plan with Topology(cp={size})."
    )
