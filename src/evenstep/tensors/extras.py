"""Extras: what travels with the tokens of a sample, and how it is laid out in a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from evenstep.errors import ConfigError

Alignment: TypeAlias = Literal["token", "sequence", "ragged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    """A declared key of samples.

    token     one entry per token (advantages, old log-probs): laid out as the tokens are, padded
    sequence  one entry per sample (rewards, class labels): one per segment of the batch
    ragged    its own number of entries (image patches): end to end, with offsets
    """

    aligned: Alignment
    dtype: torch.dtype = torch.float32
    pad: float = 0.0
    shape: tuple[int, ...] = ()
    """Of one entry: () for a number, (8,) for a vector of eight."""

    def __post_init__(self) -> None:
        if self.aligned not in ("token", "sequence", "ragged"):
            raise ConfigError(
                f"an extra is aligned to {self.aligned!r}, so nobody could lay it out. "
                f"Choose token, sequence or ragged."
            )


@dataclass(frozen=True, slots=True, eq=False)
class RaggedTensor:
    """Entries of all segments end to end; segment i has `values[offsets[i]:offsets[i + 1]]`."""

    values: Tensor
    offsets: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RaggedTensor:
        """The same entries on a device."""
        return RaggedTensor(
            self.values.to(device, non_blocking=non_blocking),
            self.offsets.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> RaggedTensor:
        """The same entries in page-locked memory."""
        return RaggedTensor(self.values.pin_memory(), self.offsets.pin_memory())
