"""Which rows of a batch each rank gets, by NeMo-RL's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
from torch import Tensor

from evenstep.compat.nemo_rl.packers import algorithm_of
from evenstep.compat.nemo_rl.packing_metrics import bin_metrics
from evenstep.compat.nemo_rl.rank_rows import RankRows, deal_bins, deal_sorted
from evenstep.compat.nemo_rl.rows import BatchError
from evenstep.core.ragged import IntArray, Ragged, rounded_up
from evenstep.core.text import one_of, whole_number

_ORDERS = Literal["packer", "largest_first"]


class DynamicBatchingArgs(TypedDict):
    """Arguments of dynamic batching.

    DynamicBatchingArgs(
        max_tokens_per_microbatch=4096, sequence_length_round=64,
        input_key="input_ids", input_lengths_key="input_lengths",
    )
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str


class SequencePackingArgs(TypedDict):
    """Arguments of sequence packing.

    SequencePackingArgs(
        max_tokens_per_microbatch=2048, algorithm="modified_first_fit_decreasing",
        input_key="input_ids", input_lengths_key="input_lengths", sequence_length_pad_multiple=4,
    )
    """

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: str
    sequence_length_pad_multiple: int
    microbatch_order: NotRequired[_ORDERS]


def check_even(total: int, chunk: int, shards: int) -> None:
    """Raise unless chunks and shards are equally large."""
    if chunk and total % chunk:
        raise BatchError(
            f"Total batch size ({total}) is not a multiple of batch_size ({chunk}). Pass "
            f"allow_uneven_shards=True to divide it anyway."
        )
    if chunk % shards:
        raise BatchError(
            f"Batch size ({chunk}) is not a multiple of shards ({shards}). Pass "
            f"allow_uneven_shards=True to divide it anyway."
        )


def dynamic_rows(
    data: Mapping[str, Any], shards: int, chunk: int, args: DynamicBatchingArgs
) -> list[RankRows]:
    """The rows and micro-batches of each shard, for dynamic batching."""
    return deal_sorted(
        _lengths(data[args["input_lengths_key"]]),
        shards,
        chunk,
        whole_number("max_tokens_per_microbatch", args["max_tokens_per_microbatch"]),
        whole_number("sequence_length_round", args["sequence_length_round"]),
        int(data[args["input_key"]].shape[1]),
    )


def packed_rows(
    data: Mapping[str, Any], shards: int, chunk: int, args: SequencePackingArgs
) -> tuple[list[RankRows], dict[str, float]]:
    """The rows and packs of each shard, and the metrics of all packs."""
    order = args.get("microbatch_order", "packer")
    one_of("microbatch_order", order, _ORDERS)
    multiple = whole_number("sequence_length_pad_multiple", args["sequence_length_pad_multiple"])
    capacity = whole_number("max_tokens_per_microbatch", args["max_tokens_per_microbatch"])
    sizes = rounded_up(_lengths(data[args["input_lengths_key"]]), multiple)
    packer = algorithm_of(args["algorithm"]).value
    dealt = deal_bins(sizes, shards, chunk, capacity, packer, order == "largest_first")
    bins = [
        mine.rows[at][start:end].tolist()
        for mine in dealt
        for at in range(len(mine.rows))
        for start, end in mine.spans(at)
    ]
    return dealt, bin_metrics(sizes, Ragged.of(bins), capacity)


def _lengths(values: Tensor | Sequence[int]) -> IntArray:
    return np.asarray(values.cpu() if isinstance(values, Tensor) else values, np.int64)
