"""Slots: what a `Batch` and a `BatchShard` have in common.

A *tile* is a run of consecutive slots of one row: a segment with its alignment padding, or the
tail padding of the row. Tiles cover every slot exactly once.

    a a a . | b b . . | . . . .      lengths 3 and 2, alignment 4, width 12: three tiles
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor

from evenstep.tensors.continuation import Continuation
from evenstep.tensors.extras import Alignment, RaggedTensor

# label: token-aligned, shifted to the slot that predicts the token, as labels are
Aligned: TypeAlias = Alignment | Literal["label"]

PER_SLOT = ("tokens", "targets", "labels", "position_ids", "segment_ids", "loss_weights")
PER_TILE = (
    "cu_seqlens",
    "seqlens",
    "sample_ids",
    "starts",
    "loss_tokens",
    "max_seqlen",
    "continuation",
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Slots:
    """Base of `Batch` and `BatchShard`: tensors per slot and tensors per tile.

    A shard holds some slots of each row but describes the tiles of the whole batch: positions,
    tile numbers and lengths refer to the whole batch in both classes. Methods that need the next
    slot are in `Batch`.
    """

    tokens: Tensor  # (rows, width) int64
    targets: Tensor  # (rows, width) int64: prediction targets, not shifted
    labels: Tensor  # (rows, width) int64
    position_ids: Tensor  # (rows, width) int64, starting at 0 in each tile
    segment_ids: Tensor  # (rows, width) int64: the tile of each slot
    loss_weights: Tensor  # (rows, width) float32
    cu_seqlens: Tensor  # (tiles + 1) int32
    seqlens: Tensor  # (tiles) int64
    sample_ids: Tensor  # (tiles) int64
    starts: Tensor  # (tiles) int64
    loss_tokens: Tensor  # (tiles) int64: loss tokens of the tile's whole sample, 0 for a tail
    max_seqlen: int
    continuation: Continuation | None = None
    extras: Mapping[str, Tensor | RaggedTensor] = field(default_factory=dict)
    aligned: Mapping[str, Aligned] = field(default_factory=dict)  # of each extra

    @property
    def rows(self) -> int:
        """Number of rows, empty ones included. A shard has as many as its batch."""
        return int(self.tokens.shape[0])

    @property
    def width(self) -> int:
        """Slots per row; in a shard, those that it holds."""
        return int(self.tokens.shape[1])

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.tokens.device

    @property
    def is_empty(self) -> bool:
        """Whether the whole batch holds no real token."""
        return bool((self.sample_ids < 0).all())

    @property
    def token_mask(self) -> Tensor:
        """(rows, width) bool: True for real tokens, False for padding."""
        flat = self.segment_ids.reshape(-1)
        return (self.position_ids.reshape(-1) < self.seqlens[flat]).view_as(self.tokens)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Copy to a device; `non_blocking` needs pinned memory."""
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Copy to page-locked memory; `DataLoader(pin_memory=True)` calls this."""
        return self._map(lambda value: value.pin_memory())

    def _map(self, change: Callable[[Any], Any]) -> Self:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        kinds = (Tensor, Continuation)
        moved = {name: change(value) for name, value in values if isinstance(value, kinds)}
        extras = {name: change(value) for name, value in self.extras.items()}
        return replace(self, **moved, extras=extras)
