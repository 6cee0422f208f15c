"""Continuation: the tokens that follow a segment where overflow='split' split its sample.

sample a b c d e split at 3 -> segments [a b c] [d e]; d continues the first one

The last slot of [a b c] predicts d. So the loss tokens of a sample, and every denominator, do not
depend on where it was split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """Per tile, the next tokens of its sample and the values aligned to them."""

    counts: Tensor  # (tiles) int64: number of tokens held, 0 where the sample ends here
    values: Mapping[str, Tensor]  # (tiles, lookahead, ...) of tokens, targets and extras, by name

    @property
    def lookahead(self) -> int:
        """The most tokens held per tile."""
        return int(self.values["targets"].shape[1])

    def next(self, name: str, tile: int) -> Tensor:
        """(1, ...): the value of the token that follows a tile, 0 if its sample ends there."""
        value = self.values[name][tile, :1]
        return torch.where(self.counts[tile] > 0, value, torch.zeros_like(value))

    def fill(self, ahead: Tensor, name: str, tiles: Tensor, index: Tensor) -> Tensor:
        """`ahead` (n, ...) with each slot set to the value `index` tokens after its tile.

        Slots with a negative index, or one past the end of the sample, keep their value.
        """
        at = index.clamp(0, self.lookahead - 1)
        known = (index >= 0) & (index < self.counts[tiles])
        return torch.where(
            known.view(-1, *(1,) * (ahead.ndim - 1)), self.values[name][tiles, at], ahead
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Continuation:
        """Copy to a device."""
        moved = {
            name: value.to(device, non_blocking=non_blocking) for name, value in self.values.items()
        }
        return Continuation(self.counts.to(device, non_blocking=non_blocking), moved)

    def pin_memory(self) -> Continuation:
        """Copy to page-locked memory."""
        moved = {name: value.pin_memory() for name, value in self.values.items()}
        return Continuation(self.counts.pin_memory(), moved)
