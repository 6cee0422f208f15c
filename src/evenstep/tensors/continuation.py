"""Continuation: what follows a tile in its sample where overflow='split' cut the sample in two.

sample a b c d e cut at 3 -> tiles [a b c] [d e]; beyond the first lies d, then nothing

The last slot of [a b c] still predicts d. So the number of labels that a sample trains does not
depend on where it was cut, and neither does any denominator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """The next few tokens of each tile's sample, and what is aligned to them."""

    counts: Tensor  # (tiles) int64: how many are known, 0 where the sample ends with the tile
    values: Mapping[str, Tensor]  # (tiles, lookahead, ...) of tokens, targets and extras, by name

    @property
    def lookahead(self) -> int:
        """The most tokens that are known beyond any tile."""
        return int(self.values["targets"].shape[1])

    def next(self, name: str, tile: int) -> Tensor:
        """(1, ...): the value of the token that follows a tile, 0 where its sample ends."""
        value = self.values[name][tile, :1]
        return torch.where(self.counts[tile] > 0, value, torch.zeros_like(value))

    def put(self, ahead: Tensor, name: str, tiles: Tensor, index: Tensor) -> Tensor:
        """`ahead` (n, ...) with the value of token `index` beyond its tile at each slot that
        looks past a cut; slots whose index is negative or past the sample stay as they are."""
        at = index.clamp(0, self.lookahead - 1)
        known = (index >= 0) & (index < self.counts[tiles])
        return torch.where(
            known.view(-1, *(1,) * (ahead.ndim - 1)), self.values[name][tiles, at], ahead
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Continuation:
        """The same on a device."""
        moved = {
            name: value.to(device, non_blocking=non_blocking) for name, value in self.values.items()
        }
        return Continuation(self.counts.to(device, non_blocking=non_blocking), moved)

    def pin_memory(self) -> Continuation:
        """The same in page-locked memory."""
        moved = {name: value.pin_memory() for name, value in self.values.items()}
        return Continuation(self.counts.pin_memory(), moved)
