"""verl's functions: its arguments and order, a hard budget, equal counts, results restored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.compat import verl
from evenstep.compat.verl import (
    balance_batch_partitions,
    get_group_balanced_partitions,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
)
from tests.compat.attempts import attempt, flat
from tests.examples import examples
from tests.internals import WORK

WIDTH = 24


class Batch(dict[str, Any]):
    """What is used of a TensorDict: items, and a constructor with `batch_size`."""

    def __init__(self, items: dict[str, Any], batch_size: list[int] | None = None) -> None:
        super().__init__(items)
        self.batch_size = batch_size


class Proto:
    """What is used of a DataProto."""

    def __init__(self, tensors: Any, non_tensors: dict[str, Any], meta_info: Any) -> None:
        self.batch, self.non_tensor_batch = Batch(tensors), non_tensors
        self.meta_info = meta_info

    @classmethod
    def from_dict(cls, tensors: Any, non_tensors: Any, meta_info: Any) -> Proto:
        return cls(tensors, non_tensors, meta_info)


def batch_of(lengths: list[int]) -> Batch:
    mask = (torch.arange(WIDTH) < torch.tensor(lengths)[:, None]).long()
    ids = torch.arange(len(lengths))[:, None].expand(-1, WIDTH)
    return Batch({"input_ids": ids, "attention_mask": mask, "temperature": 0.7})


LENGTHS = st.lists(st.integers(0, WIDTH), min_size=1, max_size=40)


@examples(300)
@given(
    lengths=LENGTHS,
    budget=st.integers(WIDTH, 3 * WIDTH),
    least=st.sampled_from([None, 1, 3]),
    multiple=st.sampled_from([None, 2, 3]),
    group=st.sampled_from([1, 2]),
    ends=st.booleans(),
)
def test_no_micro_batch_exceeds_the_budget_and_every_row_is_in_one(
    lengths: list[int], budget: int, least: int | None, multiple: int | None, group: int, ends: bool
) -> None:
    lengths = [n // group for n in lengths] * group
    found, fault = attempt(
        lambda: rearrange_micro_batches(
            batch_of(lengths),
            max_token_len=budget,
            dp_group=None,
            num_batches_divided_by=multiple,
            same_micro_num_in_dp=True,
            min_num_micro_batch=least,
            use_dynamic_bsz_balance=ends,
            force_group_size=group,
        ),
        AssertionError,
    )
    if found is None:
        units = len(lengths) // group
        assert "micro-batches are needed" in fault
        assert (least or 1) > units or units % (multiple or 1)
        return
    micros, rows = found
    assert len(micros) == len(rows) >= max(least or 1, -(-sum(lengths) // budget))
    assert len(micros) % (multiple or 1) == 0
    assert all(own and own == sorted(own) for own in rows)
    assert sorted(flat(rows)) == list(range(len(lengths)))
    for micro, own in zip(micros, rows, strict=True):
        assert sum(lengths[i] for i in own) <= budget
        held = [row // group for row in own]
        assert all(held.count(unit) == group for unit in held)
        assert micro.batch_size == [len(own)]
        assert micro["input_ids"][:, 0].tolist() == own
        assert micro["temperature"] == 0.7
    joined = torch.cat([micro["input_ids"][:, 0] for micro in micros])
    assert restore_dynamic_batch(joined, rows).tolist() == list(range(len(lengths)))
    work = [sum(24576 * lengths[i] + lengths[i] ** 2 for i in own) for own in rows]
    peak = work.index(max(work))
    falling = work[peak:] if ends else work
    assert falling == sorted(falling, reverse=True)
    if ends:
        assert work[: peak + 1] == sorted(work[: peak + 1])


def test_three_rows_of_2500_need_three_micro_batches_of_4096() -> None:
    """verl at 1dda039b makes two, one of 5000 tokens."""
    ids = torch.nested.as_nested_tensor([torch.ones(2500)] * 3, layout=torch.jagged)
    micros, rows = rearrange_micro_batches(Batch({"input_ids": ids}), max_token_len=4096)
    assert sorted(rows) == [[0], [1], [2]]
    assert [micro["input_ids"].offsets().tolist() for micro in micros] == [[0, 2500]] * 3


def test_ranks_agree_on_the_largest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def agreed(numbers: list[int], group: object) -> list[int]:
        asked.append((list(numbers), group))
        return [5, -8, 24] if group == "dp" else numbers

    monkeypatch.setattr(verl, "most_over_ranks", agreed)
    lengths = [3] * 8
    assert len(rearrange_micro_batches(batch_of(lengths), 24, dp_group="dp")[0]) == 5
    alone = rearrange_micro_batches(
        batch_of(lengths), 24, dp_group="dp", same_micro_num_in_dp=False
    )
    assert len(alone[0]) == 1
    assert asked == [([1, -8, 3], "dp"), ([1, -8, 3], None)]


def test_all_ranks_raise_if_one_rank_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, match in (([9, -6, 24], "9 micro-batches"), ([2, -8, 25], "25 tokens")):
        monkeypatch.setattr(verl, "most_over_ranks", lambda numbers, group, f=found: f)
        with pytest.raises(AssertionError, match=match):
            rearrange_micro_batches(batch_of([3] * 8), 24, dp_group="dp")


def test_jagged_position_ids_of_several_axes_keep_their_shape() -> None:
    ids = torch.nested.as_nested_tensor([torch.arange(n) for n in (3, 5, 2)], layout=torch.jagged)
    parts = [torch.arange(3 * n).view(3, n).T for n in (3, 5, 2)]
    axes = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    micros, rows = rearrange_micro_batches(Batch({"input_ids": ids, "position_ids": axes}), 5)
    found = {
        row: part.tolist()
        for micro, own in zip(micros, rows, strict=True)
        for row, part in zip(own, micro["position_ids"].unbind(), strict=True)
    }
    assert found == {row: parts[row].T.tolist() for row in range(3)}


def test_a_data_proto_keeps_its_other_data() -> None:
    names = np.array(["a", "b", "c"], object)
    data = Proto(batch_of([9, 20, 9]), {"uid": names}, {"step": [3]})
    micros, rows = prepare_dynamic_batch(data, max_token_len=24)
    assert [micro.non_tensor_batch["uid"].tolist() for micro in micros] == [
        names[own].tolist() for own in rows
    ]
    assert micros[0].meta_info == {"step": [3]}
    assert micros[0].meta_info["step"] is not data.meta_info["step"]


@examples(300)
@given(costs=st.lists(st.integers(0, 99), min_size=1, max_size=30), k=st.integers(1, 6))
def test_parts_are_sorted_balanced_and_not_empty(costs: list[int], k: int) -> None:
    equal = len(costs) % k == 0
    if len(costs) < k:
        with pytest.raises(AssertionError, match="number of items"):
            get_seqlen_balanced_partitions(costs, k, equal_size=False)
        return
    parts = get_seqlen_balanced_partitions(costs, k, equal_size=equal)
    assert len(parts) == k
    assert all(part and part == sorted(part) for part in parts)
    assert sorted(flat(parts)) == list(range(len(costs)))
    assert not equal or {len(part) for part in parts} == {len(costs) // k}
    sums = [sum(costs[i] for i in part) for part in parts]
    assert sums == sorted(sums, reverse=True)
    if not equal:
        with pytest.raises(AssertionError, match="equal size"):
            get_seqlen_balanced_partitions(torch.tensor(costs), k, equal_size=True)


def test_groups_stay_together_also_if_not_adjacent() -> None:
    uids = list("abcdabcd")
    parts = get_group_balanced_partitions([9, 1, 2, 8, 9, 1, 2, 8], uids, 2)
    assert sorted({uids[i] for i in part} for part in parts) == [{"a", "b"}, {"c", "d"}]
    with pytest.raises(AssertionError, match="2 lengths but 1 uids"):
        get_group_balanced_partitions([1, 2], ["a"], 1)


@examples(150)
@given(
    lengths=st.lists(st.integers(1, WIDTH), min_size=16, max_size=16),
    dp=st.sampled_from([2, 4]),
    budget=st.sampled_from([None, WIDTH, 3 * WIDTH]),
    mini=st.sampled_from([None, 8]),
)
def test_the_permutation_gives_ranks_equally_many_rows_of_every_mini_batch(
    lengths: list[int], dp: int, budget: int | None, mini: int | None
) -> None:
    parts = balance_batch_partitions(
        torch.tensor(lengths), dp, max_token_len=budget, mini_batch_size=mini
    )
    assert sorted(flat(parts)) == list(range(16))
    size = mini or 16
    for part in parts:
        assert [i // size for i in part] == [i * dp // size for i in range(16 // dp)]


def test_with_a_budget_ranks_need_equally_many_micro_batches() -> None:
    lengths = np.random.default_rng(0).integers(1, 2048, 512)
    parts = balance_batch_partitions(lengths, 8, max_token_len=4096)
    loads = [WORK.of_lengths(lengths[part]).sum() for part in parts]
    assert max(loads) <= 1.01 * np.mean(loads)
    needed = {len(rearrange_micro_batches(long_batch(lengths[part]), 4096)[1]) for part in parts}
    assert len(needed) == 1


def long_batch(lengths: Any) -> Batch:
    mask = (torch.arange(2048) < torch.tensor(lengths)[:, None]).long()
    return Batch({"input_ids": mask, "attention_mask": mask})


def test_metrics_and_inverse() -> None:
    found = log_seqlen_unbalance([9, 9, 1, 1], [[0, 2], [1, 3]], "global_seqlen")
    assert found == {
        "global_seqlen/min": 2,
        "global_seqlen/max": 18,
        "global_seqlen/minmax_diff": 16,
        "global_seqlen/balanced_min": 10,
        "global_seqlen/balanced_max": 10,
        "global_seqlen/mean": 10.0,
    }
    order = [3, 0, 2, 1]
    assert [order[i] for i in get_reverse_idx(order)] == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="3 results"):
        restore_dynamic_batch(torch.zeros(3), [[0], [1]])
