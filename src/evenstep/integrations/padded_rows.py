"""A packed batch as padded rows, and back: for models that cannot run it packed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evenstep.tensors.batch import PER_SLOT, Batch


@dataclass(frozen=True, slots=True, eq=False)
class PaddedRows:
    """The segments of a batch in rows of their own, as wide as the longest.

    a a a b b . .  ->  a a a
                       b b .
    """

    batch: Batch
    source: Tensor
    """(tokens): the slots of the packed batch, row by row of the padded one."""
    packed_shape: tuple[int, int]

    @classmethod
    def of(cls, batch: Batch) -> PaddedRows:
        """Move every segment to its own row. Labels and continuations are left out: the padded
        batch is for the model, not for the loss."""
        tiles = (batch.sample_ids >= 0).nonzero()[:, 0]
        begins, lengths = batch.cu_seqlens[:-1][tiles].long(), batch.seqlens[tiles]
        width = max(int(lengths.max()), 1) if len(lengths) else 1
        column = torch.arange(width, device=batch.device)
        inside = column < lengths[:, None]  # (segments, width)
        slots = torch.where(inside, begins[:, None] + column, begins[:, None])

        def moved(values: Tensor) -> Tensor:
            return values.flatten(0, 1)[slots]

        rows = len(lengths)
        per_slot = {name: moved(getattr(batch, name)) for name in PER_SLOT}
        per_slot["position_ids"] = column.expand(rows, -1)
        per_slot["segment_ids"] = torch.arange(rows, device=batch.device)[:, None].expand(-1, width)
        extras = {
            name: moved(extra) if batch.aligned.get(name) in ("token", "label") else extra
            for name, extra in batch.extras.items()
        }
        padded = replace(
            batch,
            **per_slot,
            cu_seqlens=torch.arange(rows + 1, device=batch.device, dtype=torch.int32) * width,
            seqlens=lengths,
            sample_ids=batch.sample_ids[tiles],
            starts=batch.starts[tiles],
            loss_tokens=batch.loss_tokens[tiles],
            max_seqlen=width,
            continuation=None,
            extras=extras,
        )
        return cls(padded, slots[inside], (batch.rows, batch.width))

    def restore(self, outputs: Tensor) -> Tensor:
        """(segments, longest, ...) -> (rows, width, ...) of the packed batch, zeros in padding."""
        rows, width = self.packed_shape
        packed = outputs.new_zeros((rows * width, *outputs.shape[2:]))
        packed = packed.index_copy(0, self.source, outputs[self.batch.token_mask])
        return packed.view(rows, width, *outputs.shape[2:])
