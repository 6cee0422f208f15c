"""Kept: loss values of a step by sample and by token, on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from evenstep.core.ragged import IntArray, offsets_of, ranges_of
from evenstep.errors import InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.losses import Sums

Keep: TypeAlias = Literal["samples", "tokens"]


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Loss values of the samples that this rank ran, on the host, in ascending order of id.

    Values are weighted as the normalization weights them and not divided: the sum of `samples`
    over all ranks is the loss times its denominator. Of a split sample, a rank has the values of
    its own segments.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.demo.decoder import Decoder, DecoderShape
    >>> from evenstep.tensors import Collator, cross_entropy
    >>> from evenstep.train import run_step
    >>> samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    >>> plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=3)))
    >>> batches = [Collator()(micro, samples) for micro in plan[0, 0]]
    >>> model = Decoder(DecoderShape(vocab=10))
    >>> kept = run_step(batches, model, cross_entropy(), keep="tokens").kept
    >>> kept.sample_ids.tolist(), [len(values) for values in kept.tokens["loss"]]
    ([0, 1], [3, 2])
    """

    sample_ids: IntArray
    samples: dict[str, Tensor]
    """By loss: (samples), the sum of the values of each sample."""
    tokens: dict[str, list[Tensor]]
    """By loss: one tensor per sample. Entry i is the value of token i, 0 for the first token and
    for tokens that do not count or did not run here. Empty with keep="samples"."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the segments of a micro-batch lie, on the host; tails are left out."""

    sample: IntArray
    start: IntArray  # in its sample
    length: IntArray
    first: IntArray  # slot
    continues: IntArray  # 1 if the last slot predicts the first token of the next segment

    @classmethod
    def of(cls, batch: Batch) -> Places:
        """The places of a batch's segments."""
        real = (batch.sample_ids >= 0).cpu().numpy()
        held = batch.continuation
        more = torch.zeros_like(batch.starts) if held is None else (held.counts > 0).long()
        columns = (batch.sample_ids, batch.starts, batch.seqlens, batch.cu_seqlens[:-1], more)
        return cls(*(each.cpu().numpy().astype(np.int64)[real] for each in columns))


class Keeper:
    """Collects the values of micro-batches as they run, on the device."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        self._places: list[Places] = []
        self._sums: dict[str, list[Sums]] = {}
        self._slots: dict[str, list[Tensor]] = {}

    def add(self, places: Places, found: Mapping[str, Sums | Tensor]) -> None:
        """The values of one micro-batch, by loss."""
        self._places.append(places)
        for name, sums in found.items():
            if not isinstance(sums, Sums) or sums.by_tile is None:
                raise InputError(
                    f"keep={self.keep!r} needs the loss of each sequence, but the loss {name!r} "
                    f"returned {'sums of a shard' if isinstance(sums, Sums) else 'a scalar'}. "
                    f"Return Sums of whole sequences (`PerSequence`), or set keep=None."
                )
            alone = Sums(sums.loss.detach(), {}, sums.by_tile.detach(), sums.real)
            self._sums.setdefault(name, []).append(alone)
            if self.keep == "tokens":
                if sums.by_slot is None:
                    raise InputError(
                        f"keep='tokens' needs one value per token, but the loss {name!r} returns "
                        f"one per sequence. Return values per slot, or set keep='samples'."
                    )
                self._slots.setdefault(name, []).append(sums.by_slot.detach())

    def kept(self) -> Kept:
        """All values in the order of samples."""
        sample, start, length, more = (
            np.concatenate([getattr(places, name) for places in self._places])
            for name in ("sample", "start", "length", "continues")
        )
        ids, row = np.unique(sample, return_inverse=True)
        index = torch.from_numpy(row)
        samples = {
            name: torch.zeros(len(ids), dtype=torch.float64).index_add_(
                0, index, torch.cat([each.by_sequence for each in sums]).double().cpu()
            )
            for name, sums in self._sums.items()
        }
        ends = np.zeros(len(ids), np.int64)
        np.maximum.at(ends, row, start + length + more)
        firsts = offsets_of(ends)
        # Slot j of a segment predicts token start + j + 1 of its sample.
        count = length - 1 + more
        target = ranges_of(firsts[row] + start + 1, count)
        tokens = {
            name: self._by_sample(values, target, count, ends)
            for name, values in self._slots.items()
        }
        return Kept(ids, samples, tokens)

    def _by_sample(
        self, values: list[Tensor], target: IntArray, count: IntArray, ends: IntArray
    ) -> list[Tensor]:
        before = offsets_of(np.array([each.numel() for each in values], np.int64))
        first = [places.first + at for places, at in zip(self._places, before, strict=False)]
        source = ranges_of(np.concatenate(first), count)
        flat = torch.cat([each.flatten() for each in values]).cpu()
        laid = flat.new_zeros(int(ends.sum()))
        laid[torch.from_numpy(target)] = flat[torch.from_numpy(source)]
        return list(laid.split(ends.tolist()))
