"""BatchShard: the slots of a Batch on one context- or sequence-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.slots import PER_SLOT, PER_TILE, Slots

Sharding: TypeAlias = Literal["context", "sequence"]
"""How a batch was sharded: by `shard_context` (zigzag) or `shard_sequence` (contiguous runs)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BatchShard(Slots):
    """One rank's slots of a batch, rows × width / size, with the tiles of the whole batch.

    Labels are shifted before sharding, so they are correct at shard boundaries. Positions count
    from the start of the whole tile. `cu_seqlens` (with alignment) and `real_cu_seqlens` (without)
    describe the whole batch, as attention over gathered keys needs them; `local_cu_seqlens` and
    `local_seqlens` describe this shard. A shard is not a `Batch`: the token after a slot may be on
    another rank.

        shard = shard_context(batch, rank, size)
        logits = model(shard)  # (rows, width / size, vocabulary)
    """

    slot_ids: Tensor  # (rows, width / size) int64: slot numbers in the whole batch
    rank: int
    size: int
    sharding: Sharding
    """Which slots the ranks hold. Pass it to `restore_tokens` with the results of all ranks."""

    @property
    def real_cu_seqlens(self) -> Tensor:
        """(tiles + 1) int32: boundaries of the real tokens of the whole batch, without padding."""
        return _offsets(self.seqlens)

    @property
    def local_cu_seqlens(self) -> Tensor:
        """(tiles + 1) int32: where each tile begins in this shard; it may have no slots here."""
        # Slots are in order: tiles [0 0 1 1 2] begin at [0, 2, 4] and end at 5.
        tiles = torch.arange(len(self.seqlens) + 1, device=self.device)
        return torch.searchsorted(self.segment_ids.reshape(-1), tiles).to(torch.int32)

    @property
    def local_seqlens(self) -> Tensor:
        """(tiles) int64: real tokens of each tile in this shard; they precede its padding."""
        real = _offsets(self.token_mask.reshape(-1), torch.int64)
        return real[self.local_cu_seqlens.long()].diff()

    def take(self, values: Tensor) -> Tensor:
        """This rank's slots of a (rows, width, ...) tensor of the whole batch.

        Example: `shard.take(batch.labels_at(2))` gives the labels two tokens ahead.
        """
        return _take(values, self.slot_ids)


def take_slots(
    batch: Batch, slot_ids: Tensor, rank: int, size: int, sharding: Sharding
) -> BatchShard:
    """The shard of `batch` with these slots, (rows, width / size), in order."""
    return BatchShard(
        **{name: _take(getattr(batch, name), slot_ids) for name in PER_SLOT},
        **{name: getattr(batch, name) for name in PER_TILE},
        slot_ids=slot_ids,
        rank=rank,
        size=size,
        sharding=sharding,
        extras={
            name: _take(extra, slot_ids) if _is_per_slot(batch, name) else extra
            for name, extra in batch.extras.items()
        },
        aligned=batch.aligned,
    )


def join_shards(shards: Sequence[BatchShard]) -> Batch:
    """The whole batch from the shards of all ranks of the group, in any order."""
    shards = sorted(shards, key=lambda shard: shard.rank)
    size = shards[0].size if shards else 1
    ranks = [shard.rank for shard in shards]
    if ranks != list(range(size)) or any(shard.size != size for shard in shards):
        raise InputError(
            f"expected one shard from each of {size} ranks, got shards of ranks {ranks}. Pass "
            f"each rank's shard of one batch exactly once."
        )
    if len({shard.sharding for shard in shards}) > 1:
        raise InputError(
            "expected shards of one kind, got both context- and sequence-parallel ones. Shard all "
            "ranks' batches with the same function."
        )
    whole, slot_ids = shards[0], [shard.slot_ids for shard in shards]
    return Batch(
        **{name: join_slots([getattr(s, name) for s in shards], slot_ids) for name in PER_SLOT},
        **{name: getattr(whole, name) for name in PER_TILE},
        extras={
            name: join_slots([s.extras[name] for s in shards], slot_ids)
            if _is_per_slot(whole, name)
            else extra
            for name, extra in whole.extras.items()
        },
        aligned=whole.aligned,
    )


def join_slots(shards: Sequence[Tensor], slot_ids: Sequence[Tensor]) -> Tensor:
    """(rows, width / size, ...) tensors of all ranks and their slots -> (rows, width, ...)."""
    slots = torch.cat([ids.reshape(-1) for ids in slot_ids])  # index in the shards -> slot
    index = torch.empty_like(slots)
    index[slots] = torch.arange(len(slots), device=slots.device)  # slot -> index in the shards
    flat = torch.cat([shard.flatten(0, 1) for shard in shards])
    return flat.index_select(0, index).view(shards[0].shape[0], -1, *shards[0].shape[2:])


def check_rank(rank: int, size: int) -> None:
    """Raise if `rank` is not in a group of `size`."""
    if not 0 <= rank < size:
        raise InputError(f"rank must be in [0, {size}), got {rank}.")


def _take(values: Any, slot_ids: Tensor) -> Tensor:
    taken = values.flatten(0, 1).index_select(0, slot_ids.reshape(-1))
    return taken.view(*slot_ids.shape, *values.shape[2:])


def _is_per_slot(whole: Batch | BatchShard, name: str) -> bool:
    if name not in whole.aligned:
        raise InputError(
            f"the alignment of the extra {name!r} is unknown. Declare it in "
            f"Collator(extras=...), or add it to `aligned`."
        )
    return whole.aligned[name] in ("token", "label")


def _offsets(counts: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """counts [3, 0, 2] -> [0, 3, 3, 5]"""
    offsets = torch.zeros(len(counts) + 1, dtype=dtype, device=counts.device)
    offsets[1:] = counts.cumsum(0)
    return offsets
