"""View: the slots of one segment or of a whole batch, flattened, for losses and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.batch_shard import BatchShard
from evenstep.tensors.extras import RaggedTensor


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One segment, or all slots of a batch or shard, with the same interface.

    A view of one segment holds its real tokens only. A view of all slots includes padding, where
    labels are -100 and weights 0. `segment_ids` starts at 0 in both: sum per sequence with
    `sum_by_segment`, and expand values per sequence to slots with `values[segment_ids]`.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> [view.tokens.tolist() for view in View.of_segments(batch)]
    [[1, 2], [3]]
    """

    source: Batch | BatchShard
    slots: slice
    tile: int | None  # None for all slots

    @classmethod
    def of_all(cls, source: Batch | BatchShard) -> View:
        """A view of all slots, row by row."""
        return cls(source, slice(0, source.rows * source.width), None)

    @classmethod
    def of_segments(cls, batch: Batch) -> list[View]:
        """One view per segment, in the order of the batch."""
        # One transfer from the device for all segments.
        begin, length = batch.cu_seqlens[:-1].tolist(), batch.seqlens.tolist()
        real = (batch.sample_ids >= 0).nonzero().flatten().tolist()
        return [cls(batch, slice(begin[p], begin[p] + length[p]), p) for p in real]

    @property
    def tokens(self) -> Tensor:
        """(n) int64."""
        return self.flat(self.source.tokens)

    @property
    def labels(self) -> Tensor:
        """(n) int64, shifted: the next token, -100 where it is not in the loss."""
        return self.flat(self.source.labels)

    @property
    def loss_weights(self) -> Tensor:
        """(n) float32."""
        return self.flat(self.source.loss_weights)

    @property
    def position_ids(self) -> Tensor:
        """(n) int64."""
        return self.flat(self.source.position_ids)

    @property
    def segment_ids(self) -> Tensor:
        """(n) int64: the segment of each slot, starting at 0."""
        ids = self.flat(self.source.segment_ids)
        return ids if self.tile is None else torch.zeros_like(ids)

    @property
    def sample_ids(self) -> Tensor:
        """(n) int64: the sample of each slot, -1 for padding."""
        ids = self.flat(self.source.segment_ids)
        real = self.flat(self.source.token_mask)
        return torch.where(real, self.source.sample_ids[ids], -1)

    def flat(self, values: Tensor) -> Tensor:
        """The slots of this view of a (rows, width, ...) tensor, as (n, ...)."""
        return values.flatten(0, 1)[self.slots]

    def extra(self, name: str) -> Tensor:
        """(n, ...): an extra per slot; a sequence-aligned one is repeated along its sequence."""
        aligned, value = self._declared(name)
        if aligned == "ragged":
            raise ConfigError(
                f"the extra {name!r} is ragged and has no entry per slot. Read it with "
                f"view.ragged({name!r}), or declare it token- or sequence-aligned."
            )
        if aligned in ("token", "label"):
            return self.flat(value)
        if len(value) == 0:
            return value.new_zeros((self.tokens.numel(), *value.shape[1:]))
        # tiles [a, tail, b] -> segments [0, 0, 1]; the entry of a tail has no weight
        segment = (self.source.sample_ids >= 0).cumsum(0).sub_(1).clamp_(min=0)
        return value[segment[self.flat(self.source.segment_ids)]]

    def ahead(self, name: str) -> Tensor:
        """(n, ...): an extra aligned to labels: slot i holds the value of token i + 1.

        Old log-probs and advantages are given per token, while the log-prob of a label is computed
        one slot before its token. Sequence-aligned extras are returned as by `extra`.
        """
        if self._declared(name)[0] != "token":
            return self.extra(name)
        if isinstance(self.source, BatchShard):
            raise InputError(
                f"the extra {name!r} must be shifted by one token, but in a batch shard the next "
                f"token may be on another rank. Shard batch.at_labels({name!r}) instead of batch."
            )
        if self.tile is None:
            return self.flat(self.source.ahead(name))
        mine = self.flat(self.source.column(name))
        continuation = self.source.continuation
        last = (
            torch.zeros_like(mine[:1])
            if continuation is None
            else continuation.next(name, self.tile)
        )
        return torch.cat((mine[1:], last))

    def by_segment(self, name: str) -> Tensor:
        """A sequence-aligned extra, one entry per segment; in a view of all slots, per tile.

        Tiles of padding have 0. Entries are in the order of `sum_by_segment`.
        """
        aligned, value = self._declared(name)
        if aligned != "sequence":
            raise ConfigError(
                f"the extra {name!r} is {aligned}-aligned, but one value per sequence is needed. "
                f"Declare it with Extra(aligned='sequence')."
            )
        real = self.source.sample_ids >= 0
        # tiles [a, tail, b] -> entries [0, -, 1]
        by_tile = value.new_zeros((len(real), *value.shape[1:]))
        by_tile[real] = value
        return by_tile if self.tile is None else by_tile[self.tile : self.tile + 1]

    def check_whole_samples(self) -> None:
        """Raise if the batch holds a part of a split sample."""
        split = (self.source.starts > 0) & (self.source.sample_ids >= 0)
        if self.source.continuation is not None:
            split = split | (self.source.continuation.counts > 0)
        if bool(split.any()):
            raise InputError(
                f"sample {int(self.source.sample_ids[split][0])} was split, but this loss is of "
                f"whole sequences. Set overflow to 'truncate' or 'drop', or raise max_tokens."
            )

    def ragged(self, name: str) -> RaggedTensor:
        """A ragged extra of the segments in this view."""
        aligned, value = self._declared(name)
        if aligned != "ragged":
            raise ConfigError(
                f"the extra {name!r} is {aligned}-aligned, not ragged. Read it with "
                f"view.extra({name!r})."
            )
        if self.tile is None:
            return RaggedTensor(value.values, value.offsets)
        if self.source.sample_ids[self.tile] < 0:  # padding has no entries
            return RaggedTensor(value.values[:0], value.offsets.new_zeros(2))
        segment = int((self.source.sample_ids[: self.tile] >= 0).sum())
        begin, end = value.offsets[segment : segment + 2].tolist()
        offsets = value.offsets.new_tensor([0, end - begin])
        return RaggedTensor(value.values[begin:end], offsets)

    def sum_by_segment(self, values: Tensor) -> Tensor:
        """(n, ...) values -> sums per segment; in a view of all slots, per tile."""
        if isinstance(self.source, BatchShard):
            raise InputError(
                "sum_by_segment needs whole sequences, but this view is of a batch shard. Join the "
                "outputs of all ranks first, or use a function of single tokens."
            )
        count = 1 if self.tile is not None else len(self.source.seqlens)
        sums = values.new_zeros((count, *values.shape[1:]))
        return sums.index_add(0, self.segment_ids, values)

    def _declared(self, name: str) -> tuple[str, Any]:
        if name not in self.source.extras or name not in self.source.aligned:
            raise InputError(
                f"the batch has no extra {name!r}; it has "
                f"{', '.join(sorted(self.source.aligned)) or 'none'}. Declare it in "
                f"Collator(extras=...)."
            )
        return self.source.aligned[name], self.source.extras[name]
