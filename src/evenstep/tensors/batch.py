"""Batch: one micro-batch as a model takes it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evenstep.core import summary
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.slots import Slots

IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class Batch(Slots):
    """Rows times width. Slots are numbered row by row; tiles tile them.

    A tile is a segment with its alignment padding, or the tail padding of a row. `cu_seqlens`
    holds the boundaries of the tiles, so it always ends at rows * width; `seqlens` holds how
    many slots of each tile are real (0 for a tail), `sample_ids` whose they are (-1 for a tail)
    and `starts` from which token of the sample on.

    `labels` are shifted already: the label of a slot is the token that follows it in its own
    sample, -100 where nothing follows or nothing is trained. `loss_weights` is 0 there. Where a
    sample was split, the last slot of a tile predicts the first token of the next tile, wherever
    that runs; `beyond` knows it, and is None where nothing of this batch was split.
    """

    def __repr__(self) -> str:
        """Sizes, fill and where it is, in one line. Of tensors without values, the shape alone."""

        def held() -> str:
            real = self.seqlens[self.sample_ids >= 0]
            segments, tokens = len(real), int(real.sum())
            if not segments:
                return "empty"
            parts = (summary.counted(segments, "segment"), summary.counted(tokens, "token"))
            return ", ".join((*parts, summary.fill(tokens, self.rows * self.width)))

        parts = (
            summary.attempt(
                lambda: (
                    f"{summary.counted(self.rows, 'row')} of {summary.counted(self.width, 'slot')}"
                )
            ),
            summary.attempt(held),
            summary.attempt(lambda: str(self.device)),
            f"extras {', '.join(self.extras)}" if self.extras else "",
        )
        return summary.line("Batch", parts)

    def labels_at(self, distance: int = 1) -> Tensor:
        """Labels for predicting `distance` tokens ahead (multi-token prediction).

        The last `distance` slots of each sample predict nothing. `labels_at(1)` is `labels`;
        `labels_at(0)` is the targets themselves, unshifted, padding ignored. Where samples were
        split, `Collator(lookahead=...)` says how far labels reach past the cut.
        """
        if distance < 0:
            raise ConfigError(f"distance {distance} looks back; a label lies ahead. Use 0 or more.")
        return self.ahead("targets", distance, IGNORE_INDEX)

    def ahead(self, values: Tensor | str, distance: int = 1, fill: float = 0) -> Tensor:
        """Each slot's own value `distance` tokens later in its sample, `fill` where none follows.

        segments [a b c] [d e] and distance 1 -> [b c .] [e .]

        `values` is "tokens", "targets" or a token-aligned extra, by name; or any (rows, width, ...)
        tensor. Of a tensor nobody knows what lies beyond a cut, so there a split sample's tile
        ends as any segment does.
        """
        given = self.column(values, distance) if isinstance(values, str) else values
        flat = given.reshape(-1, *given.shape[2:])
        ahead = torch.full_like(flat, fill)
        end = len(flat) - distance
        if end > 0:
            ahead[:end] = flat[distance:]
        tiles, positions = self.segment_ids.reshape(-1), self.position_ids.reshape(-1)
        left = self.seqlens[tiles] - positions  # tokens from here to the end of the tile
        none = (left <= distance).view(-1, *(1,) * (flat.ndim - 1))
        ahead = ahead.masked_fill_(none, fill)
        if self.continuation is not None and isinstance(values, str):
            index = torch.where(left > 0, distance - left, -1)  # padding looks at nothing
            ahead = self.continuation.put(ahead, values, tiles, index)
        return ahead.view_as(given)

    def column(self, name: str, distance: int = 1) -> Tensor:
        """The tokens, targets or token-aligned extra of that name, (rows, width, ...), refused if
        a label `distance` ahead would need what is not known beyond a cut."""
        named = {"tokens": self.tokens, "targets": self.targets}
        named |= {key: self.extras[key] for key, way in self.aligned.items() if way == "token"}
        if name not in named:
            raise ConfigError(
                f"the extra {name!r} is aligned to {self.aligned.get(name)!r}, so it has no values "
                f"to move. Token-aligned are {sorted(named)}."
            )
        if self.continuation is not None and name not in self.continuation.values:
            raise InputError(
                f"a sample of this batch was split and {name!r} was added after collating, so its "
                f"value beyond the cut is not known. Let the Collator lay it out, or move it to "
                f"its labels yourself and align it to 'label'."
            )
        if self.continuation is not None and distance > self.continuation.lookahead:
            raise ConfigError(
                f"a sample of this batch was split, and {distance} tokens ahead lies beyond the "
                f"{self.continuation.lookahead} that are known past the cut; labels would be lost. Set "
                f"Collator(lookahead={distance})."
            )
        return named[name]

    def at_labels(self, *names: str) -> Batch:
        """The same batch with these token-aligned extras where labels are: at the slot that
        predicts their token. Losses do this by themselves; a batch that is to be cut for
        parallel ranks needs it first, because afterwards the next token may be elsewhere."""
        extras, aligned = dict(self.extras), dict(self.aligned)
        for name in names:
            extras[name], aligned[name] = self.ahead(name), "label"
        return replace(self, extras=extras, aligned=aligned)

    @property
    def unshifted_labels(self) -> Tensor:
        """Labels for models that shift by themselves (Hugging Face): the first label of each
        segment is ignored, so that no segment's end predicts the next one's beginning.

        Such a model cannot see past a cut, so of a split sample the first label of every later
        tile is lost, and `trained` counts more than the model trains. `labels` lose none.
        """
        return self.labels_at(0).masked_fill(self.position_ids == 0, IGNORE_INDEX)
