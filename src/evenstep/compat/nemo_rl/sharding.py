"""Which rows of a batch each rank gets, by NeMo-RL's arguments.

Rows are divided chunk by chunk. A chunk is what one optimizer step takes: rows never leave it, and
in every chunk all ranks have equally many micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
from torch import Tensor

from evenstep.compat.nemo_rl.packers import algorithm_of
from evenstep.compat.nemo_rl.packing_metrics import bin_metrics
from evenstep.compat.nemo_rl.rows import BatchError
from evenstep.core.ragged import IntArray, Ragged, divided_up, offsets_of, rounded_up
from evenstep.core.text import one_of, whole_number
from evenstep.errors import InputError
from evenstep.planning.packers import even_bins, pack
from evenstep.planning.policies import greedy_cuts

_ORDERS = Literal["packer", "largest_first"]
_NO_LIMITS = np.empty(0)


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


@dataclass(frozen=True, slots=True, eq=False)
class RankRows:
    """One rank's rows of each chunk.

    rows    per chunk, rows of the batch, in the order in which the rank runs them
    cuts    per chunk, where its micro-batches end in `rows`
    widths  per chunk, the width of each micro-batch
    """

    rows: list[IntArray]
    cuts: list[IntArray]
    widths: list[IntArray]

    def spans(self, chunk: int) -> list[list[int]]:
        """[start, end] of each micro-batch of a chunk."""
        ends = self.cuts[chunk].tolist()
        return [[start, end] for start, end in zip([0, *ends], ends, strict=False)]


def share_rows(total: int, ranks: int, chunk: int) -> list[list[IntArray]]:
    """[rank][chunk] -> rows: contiguous shares, all but the last ones equally large.

    >>> [[rows.tolist() for rows in rank] for rank in share_rows(8, 2, 4)]
    [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """
    shares: list[list[IntArray]] = [[] for _ in range(ranks)]
    for rows in _chunks(total, chunk):
        size = divided_up(len(rows), ranks)
        for rank in range(ranks):
            shares[rank].append(rows[rank * size : (rank + 1) * size])
    return shares


def deal_sorted(
    lengths: IntArray, ranks: int, chunk: int, budget: int, round_to: int, limit: int
) -> list[RankRows]:
    """Dynamic batching: rows by length, dealt to ranks in turn and cut at the same turns.

    A micro-batch has the same width on all ranks: that of its longest row on any of them, rounded
    up and at most `limit`, the width of the batch.

    >>> lengths = np.array([2, 8, 4, 16, 28, 32, 2, 32])
    >>> first, second = deal_sorted(lengths, 2, 8, 32, 4, 128)
    >>> first.rows[0].tolist(), first.spans(0), first.widths[0].tolist()
    ([0, 2, 3, 5], [[0, 2], [2, 3], [3, 4]], [8, 28, 32])
    """
    dealt = [RankRows([], [], []) for _ in range(ranks)]
    width = np.minimum(rounded_up(np.maximum(lengths, 1), round_to), limit)
    if len(width) and width.max() > budget:
        at = int(width.argmax())
        raise InputError(
            f"row {at} has length {lengths[at]}, {width[at]} when rounded up to a multiple of "
            f"{round_to}, but a micro-batch holds {budget} tokens. Raise the budget."
        )
    for rows in _chunks(len(lengths), chunk):
        order = rows[np.argsort(lengths[rows], kind="stable")]
        taken = np.zeros((divided_up(len(order), ranks), ranks), np.int64)
        taken.flat[: len(order)] = 1  # taken[turn, rank]: whether the rank gets a row
        widest = np.maximum.reduceat(width[order], np.arange(0, len(order), ranks))
        ends = greedy_cuts(taken, budget // widest, np.empty((*taken.shape, 0)), _NO_LIMITS)
        for rank, part in enumerate(dealt):
            part.rows.append(order[rank::ranks])
            part.cuts.append(np.minimum(ends, len(part.rows[-1])))
            part.widths.append(widest[ends - 1])
    return dealt


def deal_bins(
    sizes: IntArray, ranks: int, chunk: int, capacity: int, packer: str, largest_first: bool = False
) -> list[RankRows]:
    """Packing: the bins of each chunk, dealt to ranks in turn; `widths` are the sizes of bins.

    Where ranks need more bins than the packer makes, rows are spread evenly over them. A chunk with
    fewer rows than that has a bin for each, and empty bins. A rank runs its bins in the packer's
    order, or the largest first.

    >>> sizes = np.array([46, 24, 55, 88, 11, 14, 73, 17])
    >>> dealt = deal_bins(sizes, 2, 8, 100, "modified_first_fit_decreasing", largest_first=True)
    >>> [part.widths[0].tolist() for part in dealt]
    [[99, 96], [87, 46]]
    """
    dealt = [RankRows([], [], []) for _ in range(ranks)]
    for rows in _chunks(len(sizes), chunk):
        bins = _bins(sizes[rows], ranks, capacity, packer)
        filled = bins.sums(sizes[rows])
        for rank, part in enumerate(dealt):
            mine = np.arange(rank, len(bins), ranks)
            if largest_first:
                mine = mine[np.argsort(-filled[mine], kind="stable")]
            part.rows.append(rows[np.concatenate([bins[at] for at in mine.tolist()])])
            part.cuts.append(offsets_of(bins.lengths[mine])[1:])
            part.widths.append(filled[mine])
    return dealt


def _bins(sizes: IntArray, ranks: int, capacity: int, packer: str) -> Ragged:
    """The bins of one chunk, a multiple of `ranks`."""
    bins, count = pack(sizes, capacity, packer), len(sizes)
    target = rounded_up(max(len(bins), ranks), ranks)
    if target > count:
        return Ragged(np.arange(count), np.minimum(np.arange(target + 1), count))
    return even_bins(sizes, bins, capacity, target) if target > len(bins) else bins


def _chunks(total: int, chunk: int) -> list[IntArray]:
    """The rows of each chunk; the last one may have fewer."""
    return [np.arange(start, min(start + chunk, total)) for start in range(0, total, max(chunk, 1))]
