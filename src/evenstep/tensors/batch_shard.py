"""BatchShard: the slots of a Batch that one rank of a context- or sequence-parallel group holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.slots import PER_TILE, PER_SLOT, Slots


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BatchShard(Slots):
    """Rows times width / size. What is per slot is cut; what describes tiles is the whole batch's.

    A type of its own, because a shard cannot do all that a batch can: the token after a slot may
    lie on another rank. Labels were shifted before the cut, so they are right at every edge, and
    positions count from the beginning of the whole tile. `cu_seqlens` (with alignment) and
    `real_cu_seqlens` (without) are those of the whole batch, as attention over gathered keys
    needs them; `local_cu_seqlens` and `local_seqlens` describe what lies here.
    """

    slot_ids: Tensor  # (rows, width / size) int64: which slots of the whole batch these are
    rank: int
    size: int

    @property
    def real_cu_seqlens(self) -> Tensor:
        """(tiles + 1) int32: boundaries of the whole batch's real tokens laid end to end."""
        return _offsets(self.seqlens)

    @property
    def local_cu_seqlens(self) -> Tensor:
        """(tiles + 1) int32: where each tile begins here; a tile may have no slot here."""
        # Slots keep their order, so the tiles of [0 0 1 1 2] begin at [0, 2, 4] and end at 5.
        tiles = torch.arange(len(self.seqlens) + 1, device=self.device)
        return torch.searchsorted(self.segment_ids.reshape(-1), tiles).to(torch.int32)

    @property
    def local_seqlens(self) -> Tensor:
        """(tiles) int64: how many slots of each tile are real here. They come first in it."""
        real = _offsets(self.token_mask.reshape(-1), torch.int64)
        return real[self.local_cu_seqlens.long()].diff()

    def take(self, values: Tensor) -> Tensor:
        """This rank's part of any (rows, width, ...) tensor of the whole batch.

        `shard.take(batch.labels_at(2))` are the labels two tokens ahead, right at every edge.
        """
        return _take(values, self.slot_ids)


def cut(batch: Batch, slot_ids: Tensor, rank: int, size: int) -> BatchShard:
    """The shard of `batch` that holds these slots, (rows, width / size) of them, in order."""
    return BatchShard(
        **{name: _take(getattr(batch, name), slot_ids) for name in PER_SLOT},
        **{name: getattr(batch, name) for name in PER_TILE},
        slot_ids=slot_ids,
        rank=rank,
        size=size,
        extras={
            name: _take(extra, slot_ids) if _is_per_slot(batch, name) else extra
            for name, extra in batch.extras.items()
        },
        aligned=batch.aligned,
    )


def join_shards(shards: Sequence[BatchShard]) -> Batch:
    """The batch that these shards were cut from; all ranks of the group, in any order."""
    shards = sorted(shards, key=lambda shard: shard.rank)
    size = shards[0].size if shards else 1
    ranks = [shard.rank for shard in shards]
    if ranks != list(range(size)) or any(shard.size != size for shard in shards):
        raise InputError(
            f"shards of the ranks {ranks} were given but their group has {size}, so slots would "
            f"be missing or double. Pass each rank's shard of one batch, once."
        )
    whole, slot_ids = shards[0], [shard.slot_ids for shard in shards]
    return Batch(
        **{name: put([getattr(s, name) for s in shards], slot_ids) for name in PER_SLOT},
        **{name: getattr(whole, name) for name in PER_TILE},
        extras={
            name: put([s.extras[name] for s in shards], slot_ids)
            if _is_per_slot(whole, name)
            else extra
            for name, extra in whole.extras.items()
        },
        aligned=whole.aligned,
    )


def put(parts: Sequence[Tensor], slot_ids: Sequence[Tensor]) -> Tensor:
    """Parts of (rows, width / size, ...), each with its slots -> (rows, width, ...)."""
    order = torch.cat([ids.reshape(-1) for ids in slot_ids])  # place in parts -> slot
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)  # slot -> place in parts
    flat = torch.cat([part.flatten(0, 1) for part in parts])
    return flat.index_select(0, place).view(parts[0].shape[0], -1, *parts[0].shape[2:])


def check_rank(rank: int, size: int) -> None:
    """Refuse a rank that its group does not have."""
    if not 0 <= rank < size:
        raise InputError(
            f"rank {rank} of a group of {size} does not exist, so it holds nothing. "
            f"Pass a rank from 0 to {size - 1}."
        )


def _take(values: Any, slot_ids: Tensor) -> Tensor:
    taken = values.flatten(0, 1).index_select(0, slot_ids.reshape(-1))
    return taken.view(*slot_ids.shape, *values.shape[2:])


def _is_per_slot(whole: Batch | BatchShard, name: str) -> bool:
    if name not in whole.aligned:
        raise InputError(
            f"nothing says how the extra {name!r} is aligned, so it cannot be cut or joined. Let "
            f"a Collator declare it, or name it in `aligned`."
        )
    return whole.aligned[name] in ("token", "label")


def _offsets(counts: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """counts [3, 0, 2] -> [0, 3, 3, 5]"""
    offsets = torch.zeros(len(counts) + 1, dtype=dtype, device=counts.device)
    offsets[1:] = counts.cumsum(0)
    return offsets
