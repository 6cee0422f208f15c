"""Values per tile of a whole batch, for normalizations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch, BatchShard


def whole_batch(batch: Any) -> Batch:
    """The batch itself; raises for a batch shard."""
    if isinstance(batch, BatchShard):
        raise InputError(
            "a normalization needs a whole batch, got a batch shard. Weight the batch before "
            "sharding it: shard weighted(batch, normalization)."
        )
    assert isinstance(batch, Batch)
    return batch


def first_tiles(batch: Batch) -> Tensor:
    """(tiles) bool: whether a sample begins here. Each sample begins once per step."""
    return (whole_batch(batch).starts == 0) & (batch.sample_ids >= 0)


def spread(batch: Batch, per_tile: Tensor) -> Tensor:
    """(rows, width) float64: the weight of each slot times that of its tile."""
    own = whole_batch(batch).loss_weights
    return torch.where(own != 0, own * per_tile[batch.segment_ids], 0.0)


def extra_by_tile(batch: Batch, name: str, dtype: torch.dtype | None = torch.float64) -> Tensor:
    """(tiles): a sequence-aligned extra, 0 for tails; `dtype=None` keeps its dtype."""
    value: Any = batch.extras.get(name)
    if whole_batch(batch).aligned.get(name) != "sequence" or value is None or value.ndim != 1:
        raise InputError(
            f"the normalization needs an extra {name!r} with one number per sequence. Declare it: "
            f"Collator(extras={{{name!r}: Extra(aligned='sequence')}})."
        )
    real = batch.sample_ids >= 0
    value = value if dtype is None else value.to(dtype)
    return value.new_zeros(len(real)).masked_scatter_(real, value)


def group_ids(batch: Batch) -> Tensor:
    """(tiles): the group of each tile. Raises if the dtype may have rounded group ids."""
    groups = extra_by_tile(batch, "group", dtype=None)
    if groups.is_floating_point():
        exact = 2 / torch.finfo(groups.dtype).eps
        if bool((groups.abs() >= exact).any()):
            raise InputError(
                f"the extra 'group' holds ids of {exact:.0f} or more in {groups.dtype}, which "
                f"cannot represent them exactly. Declare it with dtype=torch.int64."
            )
    return groups


def check_samples_whole(batch: Batch) -> None:
    """Raise if other segments of a split sample are in another micro-batch."""
    counts = (batch.labels != IGNORE_INDEX).reshape(-1).long()
    here = torch.zeros_like(batch.loss_tokens).index_add_(0, batch.segment_ids.reshape(-1), counts)
    number = torch.unique(batch.sample_ids, return_inverse=True)[1]
    short = torch.zeros_like(here).index_add_(0, number, here)[number] != batch.loss_tokens
    if bool((short & (batch.sample_ids >= 0)).any()):
        sample = int(batch.sample_ids[short & (batch.sample_ids >= 0)][0])
        raise InputError(
            f"sample {sample} was split and one of its segments is in another micro-batch, so its "
            f"group cannot be counted here. Add the sequence-aligned extra 'group_tokens'."
        )
