"""Slots: rows times width and the tiles that tile them, of a whole batch or one rank's shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor

from evenstep.tensors.continuation import Continuation
from evenstep.tensors.extras import Alignment, RaggedTensor

# label: token-aligned, but moved to the slot that predicts the token, as labels are
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
    """What is per slot and what is per tile, as tensors. Made as a `Batch`, or cut to a `BatchShard`.

    Neither is the other: a shard holds a part of each row, but describes the tiles of the whole.
    So positions, tiles and lengths are the whole batch's in both, and what follows from them
    alone is here; what looks at the next slot is the batch's.
    """

    tokens: Tensor  # (rows, width) int64
    targets: Tensor  # (rows, width) int64: what each slot should have been predicted as, unshifted
    labels: Tensor  # (rows, width) int64
    position_ids: Tensor  # (rows, width) int64, from 0 in each tile
    segment_ids: Tensor  # (rows, width) int64: the tile of each slot
    loss_weights: Tensor  # (rows, width) float32
    cu_seqlens: Tensor  # (tiles + 1) int32
    seqlens: Tensor  # (tiles) int64
    sample_ids: Tensor  # (tiles) int64
    starts: Tensor  # (tiles) int64
    loss_tokens: Tensor  # (tiles) int64: labels that the tile's whole sample trains, 0 for a tail
    max_seqlen: int
    continuation: Continuation | None = None
    extras: Mapping[str, Tensor | RaggedTensor] = field(default_factory=dict)
    aligned: Mapping[str, Aligned] = field(default_factory=dict)  # of each extra

    @property
    def rows(self) -> int:
        """Rows, empty ones included; a shard has as many as its batch."""
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
    def is_empty(self) -> bool:
        """Whether nothing in the whole batch is real."""
        return bool((self.sample_ids < 0).all())

    @property
    def token_mask(self) -> Tensor:
        """(rows, width) bool: which slots hold real tokens. A one-token segment is real."""
        flat = self.segment_ids.reshape(-1)
        return (self.position_ids.reshape(-1) < self.seqlens[flat]).view_as(self.tokens)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same on a device; from pinned memory the copy does not block."""
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same in page-locked memory, as `DataLoader(pin_memory=True)` asks for it."""
        return self._map(lambda value: value.pin_memory())

    def _map(self, change: Callable[[Any], Any]) -> Self:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        kinds = (Tensor, Continuation)
        moved = {name: change(value) for name, value in values if isinstance(value, kinds)}
        extras = {name: change(value) for name, value in self.extras.items()}
        return replace(self, **moved, extras=extras)
