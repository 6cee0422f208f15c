"""Shard: the slots of a Batch that one rank of a context- or sequence-parallel group holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.batch import Aligned, Batch
from evenstep.tensors.beyond import Beyond
from evenstep.tensors.extras import RaggedTensor

_PER_SLOT = ("tokens", "targets", "labels", "position_ids", "segment_ids", "loss_weights")
_WHOLE = ("cu_seqlens", "seqlens", "sample_ids", "starts", "trained", "max_seqlen", "beyond")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Shard:
    """Rows times width / size. What is per slot is cut; what describes pieces is the whole batch's.

    A type of its own, because a shard cannot do all that a batch can: the token after a slot may
    lie on another rank. Labels were shifted before the cut, so they are right at every edge, and
    positions count from the beginning of the whole piece. `cu_seqlens` (with alignment) and
    `real_cu_seqlens` (without) are those of the whole batch, as attention over gathered keys
    needs them; `local_cu_seqlens` and `local_seqlens` describe what lies here.
    """

    tokens: Tensor  # (rows, width / size) int64
    targets: Tensor  # (rows, width / size) int64
    labels: Tensor  # (rows, width / size) int64
    position_ids: Tensor  # (rows, width / size) int64, in the whole piece
    segment_ids: Tensor  # (rows, width / size) int64, of the whole batch
    loss_weights: Tensor  # (rows, width / size) float32
    slot_ids: Tensor  # (rows, width / size) int64: which slots of the whole batch these are
    cu_seqlens: Tensor  # (pieces + 1) int32
    seqlens: Tensor  # (pieces) int64
    sample_ids: Tensor  # (pieces) int64
    starts: Tensor  # (pieces) int64
    trained: Tensor  # (pieces) int64
    max_seqlen: int
    rank: int
    size: int
    beyond: Beyond | None = None  # the whole batch's; labels were shifted already
    extras: Mapping[str, Tensor | RaggedTensor] = field(default_factory=dict)
    aligned: Mapping[str, Aligned] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows, as many as the whole batch has."""
        return int(self.tokens.shape[0])

    @property
    def width(self) -> int:
        """Slots of a row here."""
        return int(self.tokens.shape[1])

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.tokens.device

    @property
    def is_dummy(self) -> bool:
        """Whether nothing in the whole batch is real."""
        return bool((self.sample_ids < 0).all())

    @property
    def token_mask(self) -> Tensor:
        """(rows, width / size) bool: which slots hold real tokens."""
        flat = self.segment_ids.reshape(-1)
        return (self.position_ids.reshape(-1) < self.seqlens[flat]).view_as(self.tokens)

    @property
    def real_cu_seqlens(self) -> Tensor:
        """(pieces + 1) int32: boundaries of the whole batch's real tokens laid end to end."""
        return _offsets(self.seqlens)

    @property
    def local_cu_seqlens(self) -> Tensor:
        """(pieces + 1) int32: where each piece begins here; a piece may have no slot here."""
        # Slots keep their order, so the pieces of [0 0 1 1 2] begin at [0, 2, 4] and end at 5.
        pieces = torch.arange(len(self.seqlens) + 1, device=self.device)
        return torch.searchsorted(self.segment_ids.reshape(-1), pieces).to(torch.int32)

    @property
    def local_seqlens(self) -> Tensor:
        """(pieces) int64: how many slots of each piece are real here. They come first in it."""
        real = _offsets(self.token_mask.reshape(-1), torch.int64)
        return real[self.local_cu_seqlens.long()].diff()

    def take(self, values: Tensor) -> Tensor:
        """This rank's part of any (rows, width, ...) tensor of the whole batch.

        `shard.take(batch.labels_at(2))` are the labels two tokens ahead, right at every edge.
        """
        return _take(values, self.slot_ids)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Shard:
        """The same shard on a device; from pinned memory the copy does not block."""
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Shard:
        """The same shard in page-locked memory."""
        return self._map(lambda value: value.pin_memory())

    def _map(self, change: Callable[[Any], Any]) -> Shard:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        kinds = (Tensor, Beyond)
        moved = {name: change(value) for name, value in values if isinstance(value, kinds)}
        extras = {name: change(value) for name, value in self.extras.items()}
        return replace(self, **moved, extras=extras)


def cut(batch: Batch, slot_ids: Tensor, rank: int, size: int) -> Shard:
    """The shard of `batch` that holds these slots, (rows, width / size) of them, in order."""
    return Shard(
        **{name: _take(getattr(batch, name), slot_ids) for name in _PER_SLOT},
        **{name: getattr(batch, name) for name in _WHOLE},
        slot_ids=slot_ids,
        rank=rank,
        size=size,
        extras={
            name: _take(extra, slot_ids) if _is_per_slot(batch, name) else extra
            for name, extra in batch.extras.items()
        },
        aligned=batch.aligned,
    )


def join_shards(shards: Sequence[Shard]) -> Batch:
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
        **{name: put([getattr(s, name) for s in shards], slot_ids) for name in _PER_SLOT},
        **{name: getattr(whole, name) for name in _WHOLE},
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


def _is_per_slot(whole: Batch | Shard, name: str) -> bool:
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
