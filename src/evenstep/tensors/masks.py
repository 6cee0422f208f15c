"""Attention masks of a batch, for SDPA and FlexAttention."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from evenstep.core.ragged import divided_up
from evenstep.errors import ConfigError
from evenstep.tensors.batch import Batch

BLOCK = 128
"""Slots per side of a FlexAttention block."""


class Tiles(Protocol):
    """Slots divided into tiles: a `Batch` or `Boundaries`."""

    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def cu_seqlens(self) -> Tensor: ...
    @property
    def segment_ids(self) -> Tensor: ...


def check_window(window: int | None) -> None:
    """Raise if the window is not positive."""
    if window is not None and window < 1:
        raise ConfigError(f"window must be at least 1, or None for no window; got {window}.")


def visible(batch: Tiles, causal: bool = True, window: int | None = None) -> tuple[Tensor, Tensor]:
    """The first and last slot of its row that each slot attends to, (rows, width) each.

    A window reaches window - 1 slots back and, without `causal`, as far ahead.

    Both never decrease along a row, and a slot attends to itself; `block_mask` relies on this.
    cu_seqlens [0, 3, 5] in one row -> first [0, 0, 0, 3, 3], last [0, 1, 2, 3, 4].
    """
    check_window(window)
    row = torch.arange(batch.rows, device=batch.device)[:, None] * batch.width
    slot = torch.arange(batch.width, device=batch.device).expand(batch.rows, -1)
    first = batch.cu_seqlens[batch.segment_ids] - row
    last = slot if causal else batch.cu_seqlens[batch.segment_ids + 1] - row - 1
    if window is not None:
        first = torch.maximum(first, slot - (window - 1))
        last = torch.minimum(last, slot + (window - 1))
    return first, last


def sdpa_mask(batch: Tiles, *, causal: bool = True, window: int | None = None) -> Tensor:
    """The mask for `scaled_dot_product_attention`: (rows, 1, width, width) bool, True = attend.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> sdpa_mask(batch)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    first, last = visible(batch, causal, window)
    slot = torch.arange(batch.width, device=batch.device)
    return ((first[..., None] <= slot) & (slot <= last[..., None])).unsqueeze(1)


def block_mask(batch: Tiles, *, causal: bool = True, window: int | None = None) -> BlockMask:
    """The mask for `flex_attention`, built without a width × width tensor.

    The keys of a query block are one contiguous range, from the first key of its first query to
    the last key of its last query. A key block is computed if it overlaps the range, and needs no
    mask if both the first and the last query of the block attend to all of it.

        flex_attention(q, k, v, block_mask=block_mask(batch))
    """
    first, last = visible(batch, causal, window)
    count = divided_up(batch.width, BLOCK)
    begin = torch.arange(count, device=batch.device) * BLOCK
    end = torch.clamp(begin + BLOCK, max=batch.width) - 1
    overlaps = (last[:, end, None] >= begin) & (first[:, begin, None] <= end)
    whole = (first[:, end, None] <= begin) & (last[:, begin, None] >= begin + BLOCK - 1)
    whole &= (begin + BLOCK <= batch.width)[:, None]
    return BlockMask.from_kv_blocks(
        *_listed(overlaps & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(batch.segment_ids, causal, window),
        seq_lengths=(batch.width, batch.width),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, queries, keys) bool -> number of key blocks per query block, and their indices."""
    listed = blocks.int().argsort(dim=-1, descending=True, stable=True)
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    return counts.unsqueeze(1), listed.int().unsqueeze(1).contiguous()


def _mask_mod(tiles: Tensor, causal: bool, window: int | None):  # type: ignore[no-untyped-def]
    """FlexAttention's mask function. It refers to the tile numbers only, not to the batch."""

    def same(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return tiles[row, query] == tiles[row, key]

    def before(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (tiles[row, query] == tiles[row, key]) & (key <= query)

    def near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query - key < window)
        return (tiles[row, query] == tiles[row, key]) & seen

    def around(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key - query < window) & (query - key < window)
        return (tiles[row, query] == tiles[row, key]) & seen

    if window is None:
        return before if causal else same
    return near if causal else around


def one_segment_per_row(batch: Batch) -> bool:
    """Whether every segment begins a row (padded layout, or a single sequence)."""
    begins = batch.cu_seqlens[:-1][batch.sample_ids >= 0]
    return bool((begins % batch.width == 0).all())
