"""Boundaries: where the segments of rows × width slots begin and end, as attention needs it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evenstep.tensors.batch import Batch


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Boundaries:
    """Rows × width slots, numbered row by row and divided into tiles that never cross rows.

    What attention kernels derive from the boundaries is computed once and kept here, because all
    layers of a model use the same.

    >>> bounds = Boundaries(1, 5, torch.tensor([0, 3, 5], dtype=torch.int32), 3)
    >>> bounds.segment_ids.tolist(), bounds.lengths
    ([[0, 0, 0, 1, 1]], [3, 2])
    """

    rows: int
    width: int
    cu_seqlens: Tensor  # (tiles + 1) int32, from 0 to rows × width
    max_seqlen: int  # the longest tile, or more
    real: Tensor | None = None  # (tiles) bool: False for padding. None if there is no padding
    kept: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch) -> Boundaries:
        """The boundaries of a batch; the same object for the same batch."""
        if torch.compiler.is_compiling():
            return _of(batch)
        found = _known.get(batch)
        if found is None:
            found = _known[batch] = _of(batch)
        return found

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.cu_seqlens.device

    @property
    def tiles(self) -> int:
        """Number of tiles, empty ones included."""
        return int(self.cu_seqlens.shape[0]) - 1

    @property
    def segment_ids(self) -> Tensor:
        """(rows, width) int64: the tile of each slot."""
        if "segment_ids" not in self.kept:
            slots = torch.arange(self.rows * self.width, device=self.device, dtype=torch.int32)
            tiles = torch.bucketize(slots, self.cu_seqlens[1:], right=True)
            self.kept["segment_ids"] = tiles.view(self.rows, self.width)
        ids: Tensor = self.kept["segment_ids"]
        return ids

    @property
    def lengths(self) -> list[int]:
        """Slots per tile, on the host. Waits for the device."""
        if "lengths" not in self.kept:
            self.kept["lengths"] = self.cu_seqlens.diff().tolist()
        lengths: list[int] = self.kept["lengths"]
        return lengths

    @property
    def one_per_row(self) -> bool:
        """Whether every segment begins a row, so that only padding follows it there."""
        if "one_per_row" not in self.kept:
            begins = self.cu_seqlens[:-1]
            begins = begins if self.real is None else begins[self.real]
            self.kept["one_per_row"] = bool((begins % self.width == 0).all())
        return bool(self.kept["one_per_row"])


_known: weakref.WeakKeyDictionary[Batch, Boundaries] = weakref.WeakKeyDictionary()


def _of(batch: Batch) -> Boundaries:
    kept = {"segment_ids": batch.segment_ids}
    real = batch.sample_ids >= 0
    return Boundaries(batch.rows, batch.width, batch.cu_seqlens, batch.max_seqlen, real, kept)
