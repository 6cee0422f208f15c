"""What normalizations ask of the tiles of a whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch
from evenstep.tensors.batch_shard import BatchShard


def whole(batch: Any) -> Batch:
    """The batch itself; a shard is refused."""
    if isinstance(batch, BatchShard):
        raise InputError(
            "a normalization was given one rank's shard, which holds only parts of sequences, so "
            "it would count some twice or not at all. Weigh the whole batch first, and cut "
            "`weighted(batch, normalization)`."
        )
    assert isinstance(batch, Batch)
    return batch


def first_tiles(batch: Batch) -> Tensor:
    """(tiles) bool: where a sample begins; over the micro-batches of a step, each does once."""
    return (whole(batch).starts == 0) & (batch.sample_ids >= 0)


def spread(batch: Batch, per_tile: Tensor) -> Tensor:
    """(rows, width) float64: each trained slot's own weight times its tile's."""
    own = whole(batch).loss_weights
    return torch.where(own != 0, own * per_tile[batch.segment_ids], 0.0)


def extra_by_tile(batch: Batch, name: str, dtype: torch.dtype | None = torch.float64) -> Tensor:
    """(tiles): a sequence-aligned extra, 0 for tails. `dtype` None keeps its own."""
    value: Any = batch.extras.get(name)
    if whole(batch).aligned.get(name) != "sequence" or value is None or value.ndim != 1:
        raise InputError(
            f"the batch has no extra {name!r} with one number per sequence, by which its tokens "
            f"are weighed. Declare it to the Collator: Extra(aligned='sequence')."
        )
    real = batch.sample_ids >= 0
    value = value if dtype is None else value.to(dtype)
    return value.new_zeros(len(real)).masked_scatter_(real, value)


def group_ids(batch: Batch) -> Tensor:
    """(tiles): the number of each tile's group, as the batch has it. Refused where its type may
    have rounded different numbers to one."""
    groups = extra_by_tile(batch, "group", dtype=None)
    if groups.is_floating_point():
        exact = 2 / torch.finfo(groups.dtype).eps
        if bool((groups.abs() >= exact).any()):
            raise InputError(
                f"groups are numbered beyond {exact:.0f} in {groups.dtype}, which cannot tell such "
                f"numbers apart, so groups would be taken for one. Declare the extra 'group' with "
                f"dtype=torch.int64."
            )
    return groups


def check_samples_whole(batch: Batch) -> None:
    """A split sample whose other tiles run elsewhere cannot be counted here."""
    counts = (batch.labels != IGNORE_INDEX).reshape(-1).long()
    here = torch.zeros_like(batch.loss_tokens).index_add_(0, batch.segment_ids.reshape(-1), counts)
    number = torch.unique(batch.sample_ids, return_inverse=True)[1]
    short = torch.zeros_like(here).index_add_(0, number, here)[number] != batch.loss_tokens
    if bool((short & (batch.sample_ids >= 0)).any()):
        sample = int(batch.sample_ids[short & (batch.sample_ids >= 0)][0])
        raise InputError(
            f"sample {sample} was split and part of it runs in another micro-batch, so its group "
            f"cannot be counted here. Give the sequence-aligned extra 'group_tokens'."
        )
