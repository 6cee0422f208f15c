"""Batch: one micro-batch as tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evenstep.core.text import attempt, counted, fill, line
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.slots import Slots

IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class Batch(Slots):
    """One micro-batch: rows × width slots. Slots are numbered row by row and divided into tiles.

    A tile is a segment with its alignment padding, or the tail padding of a row. `cu_seqlens`
    holds the boundaries of the tiles and ends at rows × width. Per tile, `seqlens` is the number
    of real tokens (0 for a tail), `sample_ids` the sample (-1 for a tail) and `starts` the first
    token's index in the sample.

    `labels` are shifted: the label of a slot is the next token of its own sample, or -100 where
    there is none or it is masked; `loss_weights` is 0 there. Where a sample was split, the last
    slot of a segment predicts the first token of the next segment, which may be in another
    micro-batch. `continuation` holds these tokens; it is None if the batch needs none.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> batch.labels.tolist(), batch.cu_seqlens.tolist()
    ([[2, -100, -100]], [0, 2, 3])
    """

    def __repr__(self) -> str:
        """Sizes, fill and device in one line; for meta tensors, the shape only."""

        def held() -> str:
            real = self.seqlens[self.sample_ids >= 0]
            segments, tokens = len(real), int(real.sum())
            if not segments:
                return "empty"
            parts = (counted(segments, "segment"), counted(tokens, "token"))
            return ", ".join((*parts, fill(tokens, self.rows * self.width)))

        parts = (
            attempt(lambda: f"{counted(self.rows, 'row')} of {counted(self.width, 'slot')}"),
            attempt(held),
            attempt(lambda: str(self.device)),
            f"extras {', '.join(self.extras)}" if self.extras else "",
        )
        return line("Batch", parts)

    def labels_at(self, distance: int = 1) -> Tensor:
        """Labels `distance` tokens ahead, for multi-token prediction.

        The last `distance` slots of each sample have no label. `labels_at(1)` is `labels`;
        `labels_at(0)` is the unshifted targets. For split samples, `Collator(lookahead=...)` must
        be at least `distance`.
        """
        if distance < 0:
            raise ConfigError(f"distance must be 0 or more, got {distance}.")
        return self.ahead("targets", distance, IGNORE_INDEX)

    def ahead(self, values: Tensor | str, distance: int = 1, fill: float = 0) -> Tensor:
        """Values shifted left by `distance` tokens within each sample; `fill` where none follows.

        segments [a b c] [d e] and distance 1 -> [b c .] [e .]

        `values` is "tokens", "targets", the name of a token-aligned extra, or any
        (rows, width, ...) tensor. By name, values continue in the next segment of a split sample.
        A tensor has no such continuation and ends with each segment.
        """
        given = self.column(values, distance) if isinstance(values, str) else values
        flat = given.reshape(-1, *given.shape[2:])
        ahead = torch.full_like(flat, fill)
        end = len(flat) - distance
        if end > 0:
            ahead[:end] = flat[distance:]
        tiles, positions = self.segment_ids.reshape(-1), self.position_ids.reshape(-1)
        left = self.seqlens[tiles] - positions  # tokens from here to the end of the segment
        none = (left <= distance).view(-1, *(1,) * (flat.ndim - 1))
        ahead = ahead.masked_fill_(none, fill)
        if self.continuation is not None and isinstance(values, str):
            index = torch.where(left > 0, distance - left, -1)  # padding has no continuation
            ahead = self.continuation.fill(ahead, values, tiles, index)
        return ahead.view_as(given)

    def column(self, name: str, distance: int = 1) -> Tensor:
        """The tokens, targets or token-aligned extra of that name, (rows, width, ...).

        Raises if values `distance` tokens ahead need more of a split sample than the batch holds.
        """
        named = {"tokens": self.tokens, "targets": self.targets}
        named |= {key: self.extras[key] for key, way in self.aligned.items() if way == "token"}
        if name not in named:
            raise ConfigError(
                f"the extra {name!r} is aligned to {self.aligned.get(name)!r} and cannot be "
                f"shifted; expected one of the token-aligned columns {sorted(named)}."
            )
        if self.continuation is not None and name not in self.continuation.values:
            raise InputError(
                f"{name!r} was added after collating, and this batch holds a split sample whose "
                f"next value of {name!r} is missing. Declare it in Collator(extras=...), or shift "
                f"it yourself and align it to 'label'."
            )
        if self.continuation is not None and distance > self.continuation.lookahead:
            raise ConfigError(
                f"a sample of this batch was split, and labels {distance} tokens ahead need more "
                f"than the {self.continuation.lookahead} tokens collated after the split. Set "
                f"Collator(lookahead={distance})."
            )
        return named[name]

    def at_labels(self, *names: str) -> Batch:
        """The batch with these token-aligned extras shifted to the slots that predict their tokens.

        Losses shift extras themselves. Call this before sharding a batch for context or sequence
        parallelism, because the next token may then be on another rank.
        """
        extras, aligned = dict(self.extras), dict(self.aligned)
        for name in names:
            extras[name], aligned[name] = self.ahead(name), "label"
        return replace(self, extras=extras, aligned=aligned)

    @property
    def unshifted_labels(self) -> Tensor:
        """Labels for models that shift them (Hugging Face).

        The first label of each segment is ignored, so the last token of a segment does not predict
        the first token of the next. For a split sample this also drops the first label of every
        later segment, so the model has fewer labels than `loss_tokens`. `labels` has them all.
        """
        return self.labels_at(0).masked_fill(self.position_ids == 0, IGNORE_INDEX)
