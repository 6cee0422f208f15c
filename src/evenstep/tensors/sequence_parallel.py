"""Sequence parallelism: each row of a batch sharded into contiguous runs of equal width.

a a a b | b . . .      size 2: rank 0 holds a a a b, rank 1 holds b . . .
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenstep.core.ragged import rounded_up
from evenstep.errors import InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.batch_shard import BatchShard, check_rank, take_slots


def shard_sequence(batch: Batch, rank: int, size: int) -> BatchShard:
    """The shard of `batch` on rank `rank` of `size` sequence-parallel ranks.

    Labels are shifted before sharding: the last slot of a rank predicts the first token of the
    next rank. Boundaries are those of the whole batch. `join_shards` is the inverse.

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
            f"the width {batch.width} is not a multiple of {size}, the number of "
            f"sequence-parallel ranks; the next one is {rounded_up(batch.width, size)}. Set "
            f"round_to={size}, or plan with Topology(tp={size}, sequence_parallel=True)."
        )
    run = batch.width // size
    slots = torch.arange(batch.rows * batch.width, device=batch.device)
    mine = slots.view(batch.rows, batch.width)[:, rank * run : (rank + 1) * run]
    return take_slots(batch, mine, rank, size, "sequence")


def shard_rows(
    values: Tensor, rank: int, size: int, *, multiple: int = 1, pad: float = 0
) -> Tensor:
    """One rank's run of entries along the first dimension, for example image patches.

    The entries are first padded to a multiple of `size * multiple`.

    >>> shard_rows(torch.tensor([1, 2, 3]), 1, 2).tolist()
    [3, 0]
    """
    check_rank(rank, size)
    run = rounded_up(len(values), size * multiple) // size
    missing = run * size - len(values)
    padding = values.new_full((missing, *values.shape[1:]), pad)
    return torch.cat((values, padding))[rank * run : (rank + 1) * run]


def join_sequence(shards: Sequence[Tensor]) -> Tensor:
    """Per-slot results of all sequence-parallel ranks -> results of the whole batch.

    One (rows, width / size, ...) tensor per rank, in rank order -> (rows, width, ...).

    >>> join_sequence([torch.tensor([[0, 1]]), torch.tensor([[2, 3]])]).tolist()
    [[0, 1, 2, 3]]
    """
    shapes = {tuple(shard.shape) for shard in shards}
    if len(shapes) != 1:
        raise InputError(
            f"expected tensors of one shape, got {sorted(shapes)}. Pass one "
            f"(rows, width / size, ...) tensor per rank."
        )
    return torch.cat(list(shards), dim=1)
