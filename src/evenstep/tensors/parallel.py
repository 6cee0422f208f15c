"""BatchShard: the slots of a Batch on one context- or sequence-parallel rank.

Sequence parallelism divides each row into contiguous runs of equal width.

    a a a b | b . . .      size 2: rank 0 holds a a a b, rank 1 holds b . . .

Context parallelism divides each tile into 2 * size chunks; rank r holds chunks r and
2 * size - 1 - r (zigzag). Late chunks attend to more keys than early ones, and each pair costs the
same, so that causal work is even.

    | 0 1 | 2 3 | 4 5 | p p |      size 2: rank 0 holds 0 1 p p, rank 1 holds 2 3 4 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from evenstep.core.plan import MicroBatch, SharedParts
from evenstep.core.ragged import ELSEWHERE, Segments, offsets_of, rounded_up
from evenstep.errors import InputError
from evenstep.tensors.batch import (
    PER_SLOT,
    Batch,
    BatchExchange,
    BatchShard,
    Boundaries,
    Sharding,
    Slots,
)
from evenstep.tensors.trees import exchange_of, keys_of


def shard_context(batch: Batch, rank: int, size: int) -> BatchShard:
    """The shard of `batch` on rank `rank` of `size` context-parallel ranks.

    Plan with `Topology(cp=size)`, which aligns segments and widths as required. Shift extras that
    a loss compares with predictions (old log-probs, advantages) with `batch.at_labels(...)` first.
    `join_context` joins the results of all ranks.

    >>> from evenstep import Packed, Recipe, Topology, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> recipe = Recipe(layout=Packed(max_tokens=16), topology=Topology(cp=2))
    >>> batch = Collator()(make_plan([6], recipe)[0, 0][0], [{"input_ids": range(10, 16)}])
    >>> [shard_context(batch, rank, 2).tokens.tolist() for rank in range(2)]
    [[[10, 11, 0, 0]], [[12, 13, 14, 15]]]
    """
    _check_rank(rank, size)
    _check_tiles(batch.cu_seqlens, size, batch.sample_ids)
    slot_ids = _zigzag(batch.cu_seqlens, rank, size)
    return _shard(batch, slot_ids.view(batch.rows, -1), rank, size, "context")


def shard_sequence(batch: Batch, rank: int, size: int) -> BatchShard:
    """The shard of `batch` on rank `rank` of `size` sequence-parallel ranks.

    Labels are shifted before sharding: the last slot of a rank predicts the first token of the
    next rank. Boundaries are those of the whole batch. `join_sequence` joins results.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> plan = make_plan([4], Recipe(layout=Packed(max_tokens=8)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [5, 6, 7, 8]}])
    >>> shard_sequence(batch, 0, 2).labels.tolist(), shard_sequence(batch, 1, 2).labels.tolist()
    ([[6, 7]], [[8, -100]])
    """
    _check_rank(rank, size)
    if batch.width % size:
        raise InputError(
            f"the width {batch.width} is not a multiple of {size}, the number of "
            f"sequence-parallel ranks; the next one is {rounded_up(batch.width, size)}. Set "
            f"round_to={size}, or plan with Topology(tp={size}, sequence_parallel=True)."
        )
    run = batch.width // size
    slots = torch.arange(batch.rows * batch.width, device=batch.device)
    slot_ids = slots.view(batch.rows, batch.width)[:, rank * run : (rank + 1) * run]
    return _shard(batch, slot_ids, rank, size, "sequence")


def join_context(shards: Sequence[Tensor], cu_seqlens: Tensor) -> Tensor:
    """Per-slot results of all context-parallel ranks -> results of the whole batch.

    `shards[r]` is rank r's (rows, width / size, ...) tensor; `cu_seqlens` is that of the whole
    batch, which every `BatchShard` has. Differentiable.

    >>> shards = [torch.tensor([[0, 1, 6, 7]]), torch.tensor([[2, 3, 4, 5]])]
    >>> join_context(shards, torch.tensor([0, 8])).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    shapes = {tuple(shard.shape) for shard in shards}
    total, size = int(cu_seqlens[-1]), len(shards)
    if len(shapes) != 1 or sum(shard.shape[:2].numel() for shard in shards) != total:
        raise InputError(
            f"{size} tensors of shapes {sorted(shapes)} do not make up the {total} slots of the "
            f"batch. Pass one (rows, width / size, ...) tensor per rank, in rank order."
        )
    _check_tiles(cu_seqlens, size)
    boundaries = cu_seqlens.to(shards[0].device)
    # The entry of each slot in the shards, laid end to end.
    slots = torch.cat([_zigzag(boundaries, rank, size) for rank in range(size)])
    index = torch.empty_like(slots)
    index[slots] = torch.arange(total, device=slots.device)
    joined = torch.cat([shard.flatten(0, 1) for shard in shards]).index_select(0, index)
    return joined.view(shards[0].shape[0], -1, *shards[0].shape[2:])


def join_sequence(shards: Sequence[Tensor]) -> Tensor:
    """Per-slot results of all sequence-parallel ranks -> results of the whole batch.

    One (rows, width / size, ...) tensor per rank, in rank order -> (rows, width, ...).

    >>> join_sequence([torch.tensor([[0, 1]]), torch.tensor([[2, 3]])]).tolist()
    [[0, 1, 2, 3]]
    """
    shapes = {tuple(shard.shape) for shard in shards}
    if len(shapes) != 1:
        raise InputError(
            f"expected tensors of one shape, got {sorted(shapes)}. Pass one "
            f"(rows, width / size, ...) tensor per rank."
        )
    return torch.cat(list(shards), dim=1)


def shard_rows(
    values: Tensor, rank: int, size: int, *, multiple: int = 1, pad: float = 0
) -> Tensor:
    """One rank's run of entries along the first dimension, for example image patches.

    The entries are first padded to a multiple of `size * multiple`.

    >>> shard_rows(torch.tensor([1, 2, 3]), 1, 2).tolist()
    [3, 0]
    """
    _check_rank(rank, size)
    run = rounded_up(len(values), size * multiple) // size
    missing = run * size - len(values)
    padding = values.new_full((missing, *values.shape[1:]), pad)
    return torch.cat((values, padding))[rank * run : (rank + 1) * run]


# Slots of one rank -----------------------------------------------------------------------------


def _shard(batch: Batch, slot_ids: Tensor, rank: int, size: int, sharding: Sharding) -> BatchShard:
    """The shard of `batch` with these slots, (rows, width / size), in order."""
    if batch.tree is not None:
        raise InputError(
            "a batch whose samples share prefixes cannot be divided between ranks. Set topology.cp "
            "and tp to 1, or plan without prefixes."
        )
    if batch.exchange is not None:
        raise InputError(
            "ranks share a sample of this batch already, so it cannot be divided between further "
            "ranks. Set topology.cp and tp to 1, or plan without sharing."
        )
    index = slot_ids.reshape(-1)

    def take(values: Any) -> Tensor:
        taken = values.flatten(0, 1).index_select(0, index)
        return taken.view(*slot_ids.shape, *values.shape[2:])

    values: dict[str, Any] = {each.name: getattr(batch, each.name) for each in fields(Slots)}
    for name in (*PER_SLOT, "place_ids"):
        if values[name] is not None:
            values[name] = take(values[name])
    values["extras"] = extras = dict(batch.extras)
    for name in extras:
        if name not in batch.aligned:
            raise InputError(
                f"the alignment of the extra {name!r} is unknown. Declare it in "
                f"Collator(extras=...), or add it to `aligned`."
            )
        if batch.aligned[name] in ("token", "label"):
            extras[name] = take(extras[name])
    return BatchShard(**values, slot_ids=slot_ids, rank=rank, size=size, sharding=sharding)


def shard_boundaries(shard: BatchShard) -> tuple[Boundaries, BatchExchange]:
    """Which keys the slots of a shard see, and what its rank exchanges with the others for them."""
    ends, size, slots = shard.cu_seqlens.cpu(), shard.size, shard.rows * shard.width
    every = torch.arange(slots * size).view(shard.rows, size, -1)
    context = shard.sharding == "context"
    of_ranks = [_zigzag(ends, r, size) if context else every[:, r].flatten() for r in range(size)]
    slot, rank = torch.cat(of_ranks), torch.arange(size).repeat_interleave(slots)
    tile = torch.bucketize(slot, ends[1:], right=True)
    # A part: slots of one tile that follow each other on one rank.
    new = (slot.diff() != 1) | (tile.diff() != 0) | (rank.diff() != 0)
    first = functional.pad(new.nonzero()[:, 0] + 1, (1, 0)).numpy()
    length = np.diff(first, append=len(slot))
    sample, rank = tile.numpy()[first], rank.numpy()[first]
    start = slot.numpy()[first] - ends.numpy()[sample]
    parts = Segments(sample, start, length, np.where(start > 0, ELSEWHERE, -1))
    shared = np.flatnonzero(parts.is_shared)
    mine = parts.take(np.flatnonzero(rank == shard.rank))
    lengths = np.diff(ends.numpy())
    wave = SharedParts.of(parts.take(shared), rank[shared])
    exchange = wave.exchange(shard.rank, size, mine, lengths[wave.samples])
    micro = MicroBatch(
        mine, np.array([0, len(mine)]), slots, lengths[mine.sample], exchange=exchange
    )
    exchanged = exchange_of(micro)
    offsets = torch.from_numpy(offsets_of(mine.length).astype(np.int32)).to(shard.device)
    bounds = Boundaries(shard.rows, shard.width, offsets, int(mine.length.max()))
    if mine.parent is not None:
        keys, received = keys_of(micro).to(shard.device), sum(exchanged.received)
        bounds = bounds.seeing(keys.slots, keys.cu_seqlens, keys.max_seqlen, received)
    return bounds, exchanged.to(shard.device)


def _zigzag(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
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


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise InputError(f"rank must be in [0, {size}), got {rank}.")


def _check_tiles(cu_seqlens: Tensor, size: int, sample_ids: Tensor | None = None) -> None:
    """Raise if a tile does not divide into two chunks per context-parallel rank."""
    slots = cu_seqlens.diff()
    if size == 1 or not bool((slots % (2 * size)).any()):
        return
    at = int((slots % (2 * size)).ne(0).nonzero()[0])
    sample = -1 if sample_ids is None else int(sample_ids[at])
    whose = f"of sample {sample}" if sample >= 0 else f"number {at}"
    raise InputError(
        f"the tile {whose} has {int(slots[at])} slots, but {size} context-parallel ranks require "
        f"a multiple of {2 * size}. Plan with Topology(cp={size})."
    )
