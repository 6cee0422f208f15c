"""verl's dynamic batching and balance, planned with a hard budget.

Arguments, results and their order are those of `verl.utils.seqlen_balancing`. Unlike there, no
micro-batch exceeds `max_token_len`, work is balanced better than by Karmarkar-Karp, and errors are
raised on all ranks alike.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.compat.over_ranks import most_over_ranks
from evenstep.compat.rank_packs import WORK, pack_recipe, packs_needed, packs_of
from evenstep.core.measures import slowest
from evenstep.core.ragged import FloatArray, IntArray, Ragged, rounded_up, sum_by
from evenstep.core.recipe import Recipe, Topology
from evenstep.errors import InputError
from evenstep.planning.partition import partition
from evenstep.planning.planner import make_plan

__all__ = [
    "balance_batch_partitions",
    "get_group_balanced_partitions",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "log_seqlen_unbalance",
    "prepare_dynamic_batch",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
]

_LEAST = np.finfo(np.float64).tiny  # so that parts of free items are not left empty


class RowsError(InputError, AssertionError):
    """Rows that cannot be divided as asked; verl raises `AssertionError` or `ValueError`."""


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """The rows of this rank as micro-batches of similar work, and the rows of each.

    `batch` is a `TensorDict` with `input_ids`, jagged or with an `attention_mask`. With
    `dp_group`, all its ranks have equally many micro-batches, agreed by one all-reduce. With
    `use_dynamic_bsz_balance`, small micro-batches come first and last, for pipelines; else the
    largest comes first. `force_group_size` consecutive rows stay together.

        micro_batches, rows = rearrange_micro_batches(batch, max_token_len=16384, dp_group=group)
    """
    lengths, budget = _lengths(batch), int(max_token_len)
    if len(lengths) % force_group_size:
        raise RowsError(
            f"{len(lengths)} rows are not a multiple of force_group_size={force_group_size}."
        )
    groups = np.arange(len(lengths)) // force_group_size if force_group_size > 1 else None
    recipe = pack_recipe(budget)
    longest = int(np.maximum(lengths, 1).reshape(-1, force_group_size).sum(axis=1).max(initial=0))
    needed = packs_needed(lengths, recipe, groups) if longest <= budget else 1
    needed, fewest, longest = most_over_ranks(
        [max(needed, min_num_micro_batch or 1), -len(lengths) // force_group_size, longest],
        dp_group if same_micro_num_in_dp else None,
    )
    if longest > budget:
        raise RowsError(
            f"a row or forced group has {longest} tokens, more than max_token_len={budget}. Raise "
            f"max_token_len."
        )
    count = rounded_up(needed, num_batches_divided_by or 1)
    if count > -fewest:
        raise RowsError(
            f"{count} micro-batches are needed, but a rank has only {-fewest} rows or forced "
            f"groups. Raise max_token_len, or lower min_num_micro_batch or num_batches_divided_by."
        )
    rows = packs_of(lengths, recipe, count, groups)
    if use_dynamic_bsz_balance:
        rows = rows[::2][::-1] + rows[1::2]
    return [_select(batch, own) for own in rows], rows


def prepare_dynamic_batch(
    data: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Any], list[list[int]]]:
    """`rearrange_micro_batches` for a `DataProto`, with its other data.

    Each micro-batch is a `DataProto` with a copy of `meta_info`:

        micro_batches, rows = prepare_dynamic_batch(data, max_token_len=16384)
    """
    batches, rows = rearrange_micro_batches(
        data.batch,
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        use_dynamic_bsz_balance,
    )
    made = [
        type(data).from_dict(
            tensors=dict(batch.items()),
            non_tensors={name: value[own] for name, value in data.non_tensor_batch.items()},
            meta_info=copy.deepcopy(data.meta_info),
        )
        for batch, own in zip(batches, rows, strict=True)
    ]
    return made, rows


def restore_dynamic_batch(data: Tensor, batch_idx_list: Sequence[Sequence[int]]) -> Tensor:
    """Results in the order of micro-batches -> in the order of rows.

    >>> restore_dynamic_batch(torch.tensor([20, 0, 10]), [[2], [0, 1]]).tolist()
    [0, 10, 20]
    """
    order = list(chain.from_iterable(batch_idx_list))
    if len(order) != data.shape[0]:
        raise RowsError(f"{data.shape[0]} results cannot be those of {len(order)} rows.")
    return _taken(data, get_reverse_idx(order))


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse of a permutation.

    >>> get_reverse_idx([2, 0, 1])
    [1, 2, 0]
    """
    return [int(at) for at in np.argsort(np.asarray(idx_map))]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int] | Tensor, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """The items of each part, with similar sums, the largest first; none is empty.

    >>> get_seqlen_balanced_partitions([5, 4, 3, 3, 3], 2, equal_size=False)
    [[0, 1], [2, 3, 4]]
    """
    costs = np.asarray(seqlen_list, np.float64)
    if len(costs) < k_partitions:
        raise RowsError(f"number of items:[{len(costs)}] < k_partitions:[{k_partitions}].")
    if equal_size and len(costs) % k_partitions:
        raise RowsError(f"{len(costs)} items cannot form {k_partitions} parts of equal size.")
    part = partition(np.maximum(costs, _LEAST), k_partitions, equal_sizes=equal_size)
    return _by_sum(Ragged.group(part, k_partitions), costs)


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[Hashable], k_partitions: int
) -> list[list[int]]:
    """The samples of each part: equally many groups of similar work; a uid is in one part only.

    >>> get_group_balanced_partitions([9, 9, 5, 5, 6, 6, 8, 8], list("aabbccdd"), 2)
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    if len(seqlen_list) != len(uid_list):
        raise RowsError(f"{len(seqlen_list)} lengths but {len(uid_list)} uids. Pass one for each.")
    numbers: dict[Hashable, int] = {}
    group = np.array([numbers.setdefault(uid, len(numbers)) for uid in uid_list], np.int64)
    work = sum_by(group, _work(np.asarray(seqlen_list)), len(numbers))
    parts = get_seqlen_balanced_partitions(work.tolist(), k_partitions, equal_size=True)
    members = Ragged.group(group, len(numbers))
    return [sorted(np.concatenate([members[g] for g in part]).tolist()) for part in parts]


def balance_batch_partitions(
    seqlen_list: Sequence[int] | Tensor,
    dp_size: int,
    *,
    max_token_len: int | None = None,
    mini_batch_size: int | None = None,
) -> list[list[int]]:
    """The rows of each rank for `_balance_batch`: equally many, of similar work.

    With `max_token_len`, ranks also need equally many micro-batches of similar work. With
    `mini_batch_size`, each mini-batch is divided by itself, in order. Joined, the parts are the
    permutation for `batch.reorder`.

    >>> balance_batch_partitions([7, 1, 2, 8], 2)
    [[1, 3], [0, 2]]
    """
    lengths = np.asarray(seqlen_list, np.int64)
    size = mini_batch_size or max(len(lengths), 1)
    if len(lengths) % size or size % dp_size:
        raise RowsError(
            f"{len(lengths)} rows in mini-batches of {size} cannot be divided equally between "
            f"{dp_size} ranks."
        )
    rows: list[list[int]] = [[] for _ in range(dp_size)]
    for first in range(0, len(lengths), size):
        for rank, part in enumerate(_ranks(lengths[first : first + size], dp_size, max_token_len)):
            rows[rank] += [first + row for row in sorted(part)]
    return rows


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Sums of lengths in the given order and in these parts, as metrics.

    >>> log_seqlen_unbalance([4, 4, 1, 1], [[0, 2], [1, 3]], "seqlen")["seqlen/balanced_max"]
    5
    """
    lengths = [int(length) for length in seqlen_list]
    size = len(lengths) // len(partitions)
    sums = [sum(lengths[at : at + size]) for at in range(0, len(lengths), size)]
    balanced = [sum(lengths[item] for item in part) for part in partitions]
    return {
        f"{prefix}/min": min(sums),
        f"{prefix}/max": max(sums),
        f"{prefix}/minmax_diff": max(sums) - min(sums),
        f"{prefix}/balanced_min": min(balanced),
        f"{prefix}/balanced_max": max(balanced),
        f"{prefix}/mean": sum(sums) / len(partitions),
    }


def _ranks(lengths: IntArray, dp_size: int, max_token_len: int | None) -> list[list[int]]:
    even = get_seqlen_balanced_partitions(_work(lengths).tolist(), dp_size, equal_size=True)
    if max_token_len is None:
        return even
    differenced = partition(_work(lengths), dp_size, "karmarkar_karp", equal_sizes=True)
    recipe = replace(pack_recipe(max_token_len), topology=Topology(dp=dp_size), equal_sizes=True)
    planned = [
        [i for micro in rank for i in micro.segments.sample.tolist()]
        for rank in make_plan(np.maximum(lengths, 1), recipe)[0]
    ]
    ways = [even, Ragged.group(differenced, dp_size).tolist(), planned]
    return min(ways, key=lambda ranks: _lock_step(lengths, ranks, pack_recipe(max_token_len)))


def _lock_step(lengths: IntArray, ranks: list[list[int]], recipe: Recipe) -> float:
    """The work of the slowest rank, summed over the even micro-batches of the ranks."""
    count = max(packs_needed(lengths[own], recipe) for own in ranks)
    total = np.zeros((len(ranks), count))
    for rank, own in enumerate(ranks):
        work = _work(lengths[own])
        total[rank] = sum_by(partition(work, count, "karmarkar_karp"), work, count)
    return float(slowest(np.sort(total, axis=1), "micro_batch"))


def _by_sum(parts: Ragged, costs: FloatArray) -> list[list[int]]:
    return sorted(parts.tolist(), key=lambda part: (-float(costs[part].sum()), part[0]))


def _work(lengths: IntArray) -> FloatArray:
    return WORK.of_lengths(lengths.astype(np.int64))


def _lengths(batch: Mapping[str, Tensor]) -> IntArray:
    ids = batch["input_ids"]
    counts = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(-1)
    return np.asarray(counts.detach().cpu(), np.int64).reshape(-1)


def _select(batch: Any, rows: list[int]) -> Any:
    """Some rows of a TensorDict. What has no rows is kept as it is."""
    chosen = {
        name: _taken(value, rows) if len(getattr(value, "shape", ())) else value
        for name, value in batch.items()
    }
    return type(batch)(chosen, batch_size=[len(rows)])


def _taken(value: Any, rows: list[int]) -> Any:
    if not getattr(value, "is_nested", False):
        return value[torch.tensor(rows, dtype=torch.int64)]
    ragged = getattr(value, "_ragged_idx", 1)  # the dimension whose length varies
    parts = value.unbind()
    chosen = [parts[row].transpose(0, ragged - 1) for row in rows]
    joined = torch.nested.as_nested_tensor(chosen, layout=torch.jagged)
    return joined if ragged == 1 else joined.transpose(1, ragged)
