"""Extras: declared keys of samples besides the tokens, and their layout in a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from evenstep.errors import ConfigError

Alignment: TypeAlias = Literal["token", "sequence", "ragged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    """Declares a key of samples that a `Collator` adds to `Batch.extras`.

    token     one entry per token (advantages, old log-probs), laid out like the tokens
    sequence  one entry per sample (rewards, class labels), one per segment of the batch
    ragged    any number of entries (image patches), concatenated, with offsets

    >>> from evenstep.tensors import Collator
    >>> collate = Collator(extras={"reward": Extra(aligned="sequence")})
    """

    aligned: Alignment
    dtype: torch.dtype = torch.float32
    pad: float = 0.0
    shape: tuple[int, ...] = ()
    """Shape of one entry: () for a number, (8,) for a vector of eight."""

    def __post_init__(self) -> None:
        if self.aligned not in ("token", "sequence", "ragged"):
            raise ConfigError(
                f"unknown alignment {self.aligned!r}; expected one of: token, sequence, ragged."
            )


@dataclass(frozen=True, slots=True, eq=False)
class RaggedTensor:
    """Concatenated entries of all segments; segment i has `values[offsets[i]:offsets[i + 1]]`.

    >>> ragged = RaggedTensor(torch.tensor([7, 8, 9]), torch.tensor([0, 2, 3]))
    >>> ragged.values[ragged.offsets[0] : ragged.offsets[1]].tolist()
    [7, 8]
    """

    values: Tensor
    offsets: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RaggedTensor:
        """Copy to a device."""
        return RaggedTensor(
            self.values.to(device, non_blocking=non_blocking),
            self.offsets.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> RaggedTensor:
        """Copy to page-locked memory."""
        return RaggedTensor(self.values.pin_memory(), self.offsets.pin_memory())
