"""Collator: the samples of one micro-batch -> Batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from evenstep.core.plan import MicroBatch, Placement
from evenstep.core.ragged import IntArray
from evenstep.core.text import truth_field, whole_number
from evenstep.data.source import LOSS_MASKS
from evenstep.errors import InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch
from evenstep.tensors.columns import Columns, Sample
from evenstep.tensors.continuation import Continuation
from evenstep.tensors.extras import Extra
from evenstep.tensors.numbering import number_slots

Samples: TypeAlias = Mapping[int, Sample] | Sequence[Sample]

_TARGETS = ("labels", *LOSS_MASKS, "loss_masking_spans")
SAMPLE_KEYS = ("input_ids", *_TARGETS, "attention_mask")
"""The keys of a sample that are read without being declared as extras."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collator:
    """Turns the samples of a micro-batch into a `Batch`. Samples are never modified.

    A sample is a mapping with `input_ids`, every declared extra, and optionally:

    labels              the target of each token, not shifted; -100 to ignore a token. Default: the
                        tokens themselves
    loss_mask           per token, 1 to count it in the loss and 0 to ignore it. For weights use
                        the normalization `Custom`
    assistant_masks     the same, as `apply_chat_template(..., return_assistant_tokens_mask=True)`
                        of Hugging Face tokenizers names it. So are response_mask (verl, ROLL),
                        final_response_mask (ROLL), completion_mask and tool_mask (TRL), token_mask
                        and sample_mask (NeMo-RL), and action_mask (OpenRLHF). Tokens that one of
                        them hides are ignored; one number is that of all tokens of the sample
    loss_masking_spans  (begin, end) pairs of tokens to ignore in the loss
    attention_mask      must be 1 for every token; remove padding from samples

    Other keys are an error. `lookahead` is how many tokens after the end of a segment are kept
    where a sample was split; multi-token prediction needs more than 1.

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
        """The batch of `micro`; `samples[i]` is the whole sample i of the plan."""
        chosen = [samples[i] for i in micro.segments.sample.tolist()]
        keys = set().union(*chosen)
        if not keys <= {*SAMPLE_KEYS, *self.extras}:
            self._refuse_keys(micro, chosen)
        columns = Columns(micro, chosen)
        if "attention_mask" in keys and "attention_mask" not in self.extras:
            columns.check_attention_masks()
        placement = columns.placement
        tokens = columns.slots("input_ids", torch.int64, self.pad_token)
        targets = tokens
        if not keys.isdisjoint(_TARGETS):
            targets = columns.targets(keys)
        shape = (micro.rows, micro.width)
        numbers = np.empty((3, micro.slots), np.int64)
        weights = np.empty(micro.slots, np.float32)
        loss_tokens = np.empty(len(placement.real), np.int64)
        number_slots(
            placement.offsets, placement.real, targets.numpy(), IGNORE_INDEX,
            numbers[0], numbers[1], numbers[2], weights, loss_tokens,
        )  # fmt: skip
        continuation = self._continue_split(columns, numbers[2], weights, loss_tokens)
        positions, tiles, labels = torch.from_numpy(numbers).view(3, *shape).unbind()
        batch = Batch(
            tokens=tokens.view(shape),
            targets=targets.view(shape),
            labels=labels,
            position_ids=positions,
            segment_ids=tiles,
            loss_weights=torch.from_numpy(weights).view(shape),
            cu_seqlens=torch.from_numpy(placement.offsets.astype(np.int32)),
            seqlens=torch.from_numpy(np.array(placement.real)),
            sample_ids=torch.from_numpy(_by_tile(micro.segments.sample, placement, -1)),
            starts=torch.from_numpy(_by_tile(micro.segments.start, placement, 0)),
            loss_tokens=torch.from_numpy(loss_tokens),
            continuation=continuation,
            max_seqlen=int(placement.slots.max(initial=0)),
            extras={name: columns.extra(name, extra) for name, extra in self.extras.items()},
            aligned={name: extra.aligned for name, extra in self.extras.items()},
        )
        return batch.pin_memory() if self.pin_memory and torch.cuda.is_available() else batch

    def _continue_split(
        self,
        columns: Columns,
        labels: IntArray,
        weights: NDArray[np.float32],
        loss_tokens: IntArray,
    ) -> Continuation | None:
        """Complete labels and counts of split samples; returns None if none continues elsewhere."""
        micro, placement = columns.micro, columns.placement
        if columns.whole:
            return None
        end = micro.segments.start + micro.segments.length
        partial = (micro.segments.start > 0) | (end < micro.sample_ends)
        if not partial.any():
            return None
        tiles = np.flatnonzero(placement.segment >= 0)
        after: dict[int, torch.Tensor] = {}  # per tile, the targets that follow it in its sample
        for at in np.flatnonzero(partial).tolist():
            tile, last = int(tiles[at]), int(micro.sample_ends[at])
            targets = columns.sample_targets(at)[:last]
            loss_tokens[tile] = int((targets[1:] != IGNORE_INDEX).sum())
            if end[at] < last:
                after[tile] = targets[end[at] : end[at] + self.lookahead]
                slot = placement.offsets[tile] + placement.real[tile] - 1
                labels[slot] = int(after[tile][0])
                weights[slot] = float(labels[slot] != IGNORE_INDEX)
        return columns.continuation(after, self.lookahead, self.extras) if after else None

    def _refuse_keys(self, micro: MicroBatch, chosen: list[Sample]) -> NoReturn:
        known = {*SAMPLE_KEYS, *self.extras}
        at = next(n for n, sample in enumerate(chosen) if not known >= sample.keys())
        raise InputError(
            f"sample {micro.segments.sample[at]} has the undeclared key "
            f"{min(chosen[at].keys() - known)!r}; expected "
            f"{', '.join(sorted(known - {*LOSS_MASKS[1:]}))}. Remove it from the sample, or "
            f"declare it: Runner(collate=Collator(extras=...))."
        )


def _by_tile(column: IntArray, placement: Placement, otherwise: int) -> IntArray:
    """A column per segment -> per tile, with `otherwise` for tails."""
    return np.concatenate((column, (otherwise,)))[placement.segment]  # -1 picks the last entry
