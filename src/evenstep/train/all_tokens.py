"""AllTokens: a normalization over every real token, not only loss tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from evenstep.tensors.batch import Batch
from evenstep.train.tile_values import whole_batch


@dataclass(frozen=True, slots=True)
class AllTokens:
    """The mean over all real tokens of the step, for losses that need no label.

    The other normalizations weight loss tokens only. A loss of labels, such as `cross_entropy`, is
    0 for the tokens added here but is divided by their number.

    >>> AllTokens().known({"tokens": 12, "samples": 2})
    12
    """

    name: ClassVar[str] = "tokens"

    def weights(self, batch: Batch) -> Tensor:
        """1 for each real token, 0 for padding."""
        return whole_batch(batch).token_mask.double()

    def amount(self, batch: Batch) -> Tensor:
        """The number of real tokens."""
        return whole_batch(batch).seqlens.sum(dtype=torch.float64)

    def known(self, totals: Mapping[str, float]) -> float | None:
        """The plan's `tokens`, if no sample can be skipped."""
        return totals.get(self.name) if "samples" in totals else None
