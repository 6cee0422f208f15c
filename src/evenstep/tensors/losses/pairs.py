"""Pairs: the chosen and the rejected sequence of each group of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.batch_shard import BatchShard
from evenstep.tensors.view import View


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of a batch, by tile.

    Sequence-aligned extras say which sequences form a pair: `group` is equal for both (int64), and
    `chosen` is 1 for one and 0 for the other.
    """

    view: View
    chosen: Tensor  # (pairs) int64: a tile
    rejected: Tensor  # (pairs) int64: a tile

    @classmethod
    def of(cls, view: View) -> Pairs:
        """The pairs of a whole batch; raises if a sequence has no partner in it."""
        if isinstance(view.source, BatchShard):
            raise InputError(
                "a loss of pairs needs whole sequences, but this is a batch shard. Join the "
                "outputs of all ranks first."
            )
        if view.tile is not None:
            raise InputError(
                "a loss of pairs cannot run on one sequence at a time. Call it on the batch, not "
                "through looped()."
            )
        view.check_whole_samples()
        real = (view.source.sample_ids >= 0).nonzero()[:, 0]
        group = view.by_segment("group")[real]
        side = view.by_segment("chosen")[real]
        ids, number = torch.unique(group, return_inverse=True)
        tiles = torch.zeros((2, len(ids)), dtype=torch.int64, device=real.device)
        counts = torch.zeros_like(tiles)
        first = torch.where(side > 0, 0, 1)
        tiles.index_put_((first, number), real)
        counts.index_put_((first, number), torch.ones_like(real), accumulate=True)
        wrong = (counts != 1).any(0)
        if bool(wrong.any()):
            _refuse(ids[wrong][0], counts[:, wrong][:, 0])
        return cls(view, tiles[0], tiles[1])

    def __len__(self) -> int:
        return len(self.chosen)

    def spread(self, values: Tensor) -> Tensor:
        """(pairs) values -> (n): the value of a pair in each slot of both, times its weight."""
        view, count = self.view, len(self.view.source.seqlens)
        tiles = torch.cat((self.chosen, self.rejected))
        by_tile = values.new_zeros(count).index_copy(0, tiles, torch.cat((values, values)))
        return by_tile[view.segment_ids] * view.loss_weights


def _refuse(group: Tensor, counts: Tensor) -> None:
    chosen, rejected = counts.tolist()
    raise InputError(
        f"group {group.item():g} has {chosen} chosen and {rejected} rejected sequences in this "
        f"micro-batch; expected one of each. Give each pair its own `group`, and plan with "
        f"groups= and Recipe(groups='micro_batch')."
    )
