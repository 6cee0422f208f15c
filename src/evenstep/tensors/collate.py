"""Collate: the samples of one micro-batch -> Batch, in a few copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from evenstep.core.micro_batch import MicroBatch
from evenstep.core.placement import Placement
from evenstep.core.ragged import IntArray
from evenstep.core.validate import truth_field, whole_number
from evenstep.errors import InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch
from evenstep.tensors.columns import Columns, Sample
from evenstep.tensors.continuation import Continuation
from evenstep.tensors.extras import Extra
from evenstep.tensors.numbering import number_slots

Samples: TypeAlias = Mapping[int, Sample] | Sequence[Sample]

_TARGETS = ("labels", "loss_mask", "loss_masking_spans")
_KNOWN = ("input_ids", *_TARGETS, "attention_mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collator:
    """Turns the samples of a micro-batch into a `Batch`; nothing passed in is ever changed.

    A sample is a mapping with `input_ids` and, if it has them,

    labels              what each token should have been predicted as, -100 where nothing is
                        trained; the tokens themselves by default. Never shifted by the caller.
    loss_mask           per token, 1 where it is trained and 0 where not; nothing between, as tokens
                        are counted by it (weights are a normalization's: `train.loss.Custom`)
    loss_masking_spans  (begin, end) pairs of tokens that are not trained
    attention_mask      1 for every token, as tokenizers give it: it says nothing. Cut padding off.

    and every declared extra. Unknown keys are an error. Labels reach past the cuts of a split
    sample, `lookahead` tokens far: 1 is enough unless more are predicted at once.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> samples = [{"input_ids": torch.tensor([11, 12, 13])}, {"input_ids": torch.tensor([21, 22])}]
    >>> plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=8, pad_to=8)))
    >>> batch = Collator()(plan[0, 0][0], samples)
    >>> batch.labels.tolist(), batch.cu_seqlens.tolist()
    ([[12, 13, -100, 22, -100, -100, -100, -100]], [0, 3, 5, 8])
    """

    extras: Mapping[str, Extra] = field(default_factory=dict)
    pad_token: int = 0
    pin_memory: bool = False
    lookahead: int = 1

    def __post_init__(self) -> None:
        whole_number("lookahead", self.lookahead)
        truth_field(self, "pin_memory")

    def __call__(self, micro: MicroBatch, samples: Samples) -> Batch:
        """The batch of `micro`; `samples[i]` is sample i of the plan, whole."""
        chosen = [samples[i] for i in micro.segments.sample.tolist()]
        keys = set().union(*chosen)
        if not keys <= {*_KNOWN, *self.extras}:
            self._refuse_keys(micro, chosen)
        columns = Columns(micro, chosen)
        if "attention_mask" in keys and "attention_mask" not in self.extras:
            columns.check_attention_masks()
        place = columns.place
        tokens = columns.slots("input_ids", torch.int64, self.pad_token)
        targets = tokens
        if not keys.isdisjoint(_TARGETS):
            targets = columns.targets(keys)
        shape = (micro.rows, micro.width)
        numbers = np.empty((3, micro.slots), np.int64)
        weights = np.empty(micro.slots, np.float32)
        loss_tokens = np.empty(len(place.real), np.int64)
        number_slots(
            place.offsets, place.real, targets.numpy(), IGNORE_INDEX,
            numbers[0], numbers[1], numbers[2], weights, loss_tokens,
        )  # fmt: skip
        continuation = self._past_cuts(columns, numbers[2], weights, loss_tokens)
        positions, tiles, labels = torch.from_numpy(numbers).view(3, *shape).unbind()
        batch = Batch(
            tokens=tokens.view(shape),
            targets=targets.view(shape),
            labels=labels,
            position_ids=positions,
            segment_ids=tiles,
            loss_weights=torch.from_numpy(weights).view(shape),
            cu_seqlens=torch.from_numpy(place.offsets.astype(np.int32)),
            seqlens=torch.from_numpy(np.array(place.real)),
            sample_ids=torch.from_numpy(_by_tile(micro.segments.sample, place, -1)),
            starts=torch.from_numpy(_by_tile(micro.segments.start, place, 0)),
            loss_tokens=torch.from_numpy(loss_tokens),
            continuation=continuation,
            max_seqlen=int(place.slots.max(initial=0)),
            extras={name: columns.extra(name, extra) for name, extra in self.extras.items()},
            aligned={name: extra.aligned for name, extra in self.extras.items()},
        )
        return batch.pin_memory() if self.pin_memory and torch.cuda.is_available() else batch

    def _past_cuts(
        self,
        columns: Columns,
        labels: IntArray,
        weights: NDArray[np.float32],
        loss_tokens: IntArray,
    ) -> Continuation | None:
        """Complete what depends on the other tiles of split samples; None if none was cut here."""
        micro, place = columns.micro, columns.place
        if columns.whole:
            return None
        end = micro.segments.start + micro.segments.length
        partial = (micro.segments.start > 0) | (end < micro.sample_ends)
        if not partial.any():
            return None
        tiles = np.flatnonzero(place.segment >= 0)
        after: dict[int, torch.Tensor] = {}  # per tile that was cut, its sample's later targets
        for at in np.flatnonzero(partial).tolist():
            tile, last = int(tiles[at]), int(micro.sample_ends[at])
            targets = columns.sample_targets(at)[:last]
            loss_tokens[tile] = int((targets[1:] != IGNORE_INDEX).sum())
            if end[at] < last:
                after[tile] = targets[end[at] : end[at] + self.lookahead]
                slot = place.offsets[tile] + place.real[tile] - 1
                labels[slot] = int(after[tile][0])
                weights[slot] = float(labels[slot] != IGNORE_INDEX)
        return columns.beyond(after, self.lookahead, self.extras) if after else None

    def _refuse_keys(self, micro: MicroBatch, chosen: list[Sample]) -> NoReturn:
        known = {*_KNOWN, *self.extras}
        at = next(n for n, sample in enumerate(chosen) if not known >= sample.keys())
        raise InputError(
            f"sample {micro.segments.sample[at]} has the key {min(chosen[at].keys() - known)!r}, "
            f"which nobody declared, so it would be lost. Leave it out of the sample, or declare "
            f"it: Runner(collate=Collator(extras=...)). Known are {', '.join(sorted(known))}."
        )


def _by_tile(column: IntArray, place: Placement, otherwise: int) -> IntArray:
    """A per-segment column per tile, with `otherwise` for tails."""
    return np.concatenate((column, (otherwise,)))[place.segment]  # -1 picks the last entry
