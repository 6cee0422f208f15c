"""Sequence parallelism: every row of a batch cut into contiguous runs of equal width.

a a a b | b . . .      size 2: rank 0 holds a a a b, rank 1 holds b . . .
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenstep.core.rounding import rounded_up
from evenstep.errors import InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.batch_shard import BatchShard, check_rank, cut


def shard_sequence(batch: Batch, rank: int, size: int) -> BatchShard:
    """What rank `rank` of `size` sequence-parallel ranks holds of `batch`.

    Labels were shifted before the cut, so the last slot of a rank still predicts the first token
    of the next one's. Boundaries stay those of the whole batch. `join_shards` is the inverse.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> plan = make_plan([4], Recipe(layout=Packed(max_tokens=8)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [5, 6, 7, 8]}])
    >>> shard_sequence(batch, 0, 2).labels.tolist(), shard_sequence(batch, 1, 2).labels.tolist()
    ([[6, 7]], [[8, -100]])
    """
    check_rank(rank, size)
    if batch.width % size:
        raise InputError(
            f"rows are {batch.width} slots wide, which {size} sequence-parallel ranks cannot share "
            f"evenly; {rounded_up(batch.width, size)} would do. Round widths with round_to="
            f"{size}, or plan with Topology(tp={size}, sequence_parallel=True)."
        )
    run = batch.width // size
    slots = torch.arange(batch.rows * batch.width, device=batch.device)
    mine = slots.view(batch.rows, batch.width)[:, rank * run : (rank + 1) * run]
    return cut(batch, mine, rank, size)


def join_sequence(parts: Sequence[Tensor]) -> Tensor:
    """Per-slot results of all sequence-parallel ranks, in their order -> the whole batch's.

    Parts of (rows, width / size, ...) -> (rows, width, ...).
    """
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) != 1:
        raise InputError(
            f"parts of the shapes {sorted(shapes)} are not equal shares of one batch, so they "
            f"cannot be joined. Pass one (rows, width / size, ...) part of each rank."
        )
    return torch.cat(list(parts), dim=1)
