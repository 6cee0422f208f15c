"""ROLL's dynamic batching: its document's examples, its rules on random rows, its names."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.compat.roll import (
    dynamic_batching_shard,
    make_micro_batch_iter_for_dynamic_batching,
    make_mini_batch_iter_for_dynamic_batching,
)
from evenstep.errors import ConfigError, InputError
from tests.compat.roll_data import rollouts
from tests.examples import examples

EXAMPLE = [7, 6, 8, 5, 1, 3, 8, 6]


def cut(lengths: list[int], width: int, *arguments: Any, **options: Any) -> tuple[Any, Any, Any]:
    """(order of rows, rows per micro-batch, widths)"""
    batch, _ = dynamic_batching_shard(rollouts(lengths, width), *arguments, **options)
    about = batch.meta_info
    assert about["micro_batch_indices"] == about["global_micro_batch_indices"]
    assert about["micro_batch_lengths"] == about["global_micro_batch_lengths"]
    assert about["num_micro_batchs"] == len(about["micro_batch_indices"])
    order = batch.batch["scores"].tolist()
    return order, about["global_micro_batch_indices"], about["global_micro_batch_lengths"]


class TestTheDocument:
    """Its example, with what its own budget gives."""

    @pytest.mark.parametrize(
        ("budget", "pipeline", "cuts", "widths", "slots", "removed"),
        [
            (10, {}, [[0, 1], [1, 2], [2, 3], [3, 4]], [4, 6, 8, 8], 52, 0.35),
            # What the document shows needs a budget of 12.
            (12, {}, [[0, 2], [2, 3], [3, 4]], [6, 8, 8], 56, 0.30),
            # ROLL keeps the widths 6, 6 of the divided micro-batch.
            (12, {"pp": 2, "vpp": 2}, [[0, 1], [1, 2], [2, 3], [3, 4]], [4, 6, 8, 8], 52, 0.35),
        ],
    )
    def test_the_worked_example(
        self,
        budget: int,
        pipeline: dict[str, int],
        cuts: list[list[int]],
        widths: list[int],
        slots: int,
        removed: float,
    ) -> None:
        batch, metrics = dynamic_batching_shard(
            rollouts(EXAMPLE, 10),
            dp_size=2,
            max_tokens_per_microbatch=budget,
            sequence_length_round=2,
            pipeline_model_parallel_size=pipeline.get("pp", 1),
            virtual_pipeline_model_parallel_size=pipeline.get("vpp"),
            log_prefix="actor_train/train_step",
        )
        lengths = batch.batch["attention_mask"].sum(-1).tolist()
        assert lengths == [1, 5, 6, 8, 3, 6, 7, 8]
        assert batch.batch["scores"].tolist() == [4, 3, 7, 2, 5, 1, 0, 6]
        assert batch.meta_info["global_micro_batch_indices"] == cuts
        assert batch.meta_info["global_micro_batch_lengths"] == widths
        prefix = "dynamic_batching/actor_train/train_step"
        assert metrics == {
            f"{prefix}/valid_tokens": 44,
            f"{prefix}/actual_tokens_origin": 80,
            f"{prefix}/actual_tokens": slots,
            f"{prefix}/removed_padding_tokens": 80 - slots,
            f"{prefix}/removed_padding_ratio": pytest.approx(removed),
        }

    def test_widths_are_multiples_of_the_rounding(self) -> None:
        """[200, 240] with a rounding of 64 is padded to 256."""
        assert cut([200, 240], 512, 1, 512, 64)[2] == [256]

    def test_the_micro_batches_of_both_shards_have_the_same_shapes(self) -> None:
        batch, _ = dynamic_batching_shard(rollouts(EXAMPLE, 10), 2, 12, 2)
        shapes = [
            [
                tuple(m.batch["input_ids"].shape)
                for m in make_micro_batch_iter_for_dynamic_batching(s)
            ]
            for s in (batch.slice(0, 4), batch.slice(4, 8))
        ]
        assert shapes == [[(2, 6), (1, 8), (1, 8)]] * 2

    def test_the_second_case(self) -> None:
        order, cuts, widths = cut([2, 4, 7, 6, 3, 4], 20, 2, 20, 2)
        assert (order, cuts, widths) == ([0, 1, 3, 4, 5, 2], [[0, 2], [2, 3]], [4, 8])
        _, metrics = dynamic_batching_shard(rollouts([2, 4, 7, 6, 3, 4], 20), 2, 20, 2)
        assert metrics["dynamic_batching/valid_tokens"] == 26
        assert metrics["dynamic_batching/actual_tokens_origin"] == 120
        assert metrics["dynamic_batching/actual_tokens"] == 32
        assert metrics["dynamic_batching/removed_padding_ratio"] == pytest.approx(0.7333, abs=1e-4)


# The rules, written out -------------------------------------------------------------------------


def by_the_rules(
    lengths: list[int], dp: int, budget: int, unit: int
) -> tuple[list[int], list[list[int]], list[int]]:
    """Sort, deal in turn, and close a micro-batch where the widest row over ranks exceeds it."""
    ranked = sorted(range(len(lengths)), key=lambda row: lengths[row])
    shards = [ranked[rank::dp] for rank in range(dp)]
    cuts: list[list[int]] = []
    widths: list[int] = []
    for turn in range(len(shards[0])):
        widest = max(lengths[shard[turn]] for shard in shards if turn < len(shard))
        width = max(math.ceil(widest / unit), 1) * unit
        rows = turn + 1 - cuts[-1][0] if cuts else 0
        if cuts and rows * width <= budget:
            cuts[-1][1], widths[-1] = turn + 1, width
        else:
            cuts.append([turn, turn + 1])
            widths.append(width)
    return [row for shard in shards for row in shard], cuts, widths


@st.composite
def cases(draw: st.DrawFn, even: bool) -> tuple[list[int], int, int, int, int]:
    """(lengths, width, ranks, budget, rounding)"""
    dp, unit = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4, 8]))
    width = unit * draw(st.integers(1, 6))
    budget = draw(st.integers(width, 5 * width))
    count = dp * draw(st.integers(1, 8)) + (0 if even else draw(st.integers(0, dp - 1)))
    lengths = draw(st.lists(st.integers(0, width), min_size=count, max_size=count))
    return lengths, width, dp, budget, unit


@examples(800)
@given(case=cases(even=True))
def test_order_cuts_and_widths_follow_the_rules(
    case: tuple[list[int], int, int, int, int],
) -> None:
    """ROLL's, except that empty rows have at least one column in every micro-batch."""
    lengths, width, dp, budget, unit = case
    assert cut(lengths, width, dp, budget, unit) == by_the_rules(lengths, dp, budget, unit)


@pytest.mark.slow
def test_five_thousand_random_batches_follow_the_rules() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5000):
        dp, unit = int(rng.integers(1, 9)), int(rng.choice([1, 2, 4, 16, 64]))
        width = unit * int(rng.integers(1, 12))
        budget = int(rng.integers(width, 6 * width + 1))
        lengths = rng.integers(0, width + 1, dp * int(rng.integers(1, 16))).tolist()
        expected = by_the_rules(lengths, dp, budget, unit)
        assert cut(lengths, width, dp, budget, unit) == expected


@examples(400)
@given(case=cases(even=False), pp=st.sampled_from([1, 2, 3, 4]))
def test_uneven_batches_and_pipelines_keep_budget_multiples_and_every_row(
    case: tuple[list[int], int, int, int, int], pp: int
) -> None:
    """By design: ROLL raises an IndexError for uneven ranks and splits a micro-batch once only."""
    lengths, width, dp, budget, unit = case
    per_rank = math.ceil(len(lengths) / dp)
    needed = len(by_the_rules(lengths, dp, budget, unit)[1])
    options = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": 2}
    if pp > 1 and math.ceil(needed / pp) * pp > per_rank:
        with pytest.raises(InputError, match="cannot be split into a multiple"):
            cut(lengths, width, dp, budget, unit, **options)
        return
    order, cuts, widths = cut(lengths, width, dp, budget, unit, **options)
    assert order == by_the_rules(lengths, dp, budget, unit)[0]
    assert len(cuts) == math.ceil(needed / pp) * pp
    assert [start for start, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == per_rank
    shards = [sorted(lengths)[rank::dp] for rank in range(dp)]
    for (start, end), wide in zip(cuts, widths, strict=True):
        longest = max(max(shard[start:end], default=0) for shard in shards)
        assert wide == max(math.ceil(longest / unit), 1) * unit  # as narrow as its rows allow
        assert (end - start) * wide <= budget


@examples(300)
@given(case=cases(even=False), ga_steps=st.integers(1, 4), epochs=st.integers(1, 2))
def test_every_token_of_every_row_is_in_one_micro_batch_of_each_epoch(
    case: tuple[list[int], int, int, int, int], ga_steps: int, epochs: int
) -> None:
    lengths, width, dp, budget, unit = case
    data = rollouts(lengths, width)
    before = copy.deepcopy(data.batch)
    batch, _ = dynamic_batching_shard(data, dp, budget, unit)
    seen: dict[int, list[int]] = {}
    counts, first = set(), 0
    for rank in range(dp):
        own = (len(lengths) - rank + dp - 1) // dp
        mine = batch.slice(first, first + own)
        first += own
        micros = [
            micro
            for mini in make_mini_batch_iter_for_dynamic_batching(mine, epochs, ga_steps)
            for micro in make_micro_batch_iter_for_dynamic_batching(mini)
        ]
        counts.add(len(micros))
        for micro in micros:
            for number, mask in zip(
                micro.batch["scores"], micro.batch["attention_mask"], strict=True
            ):
                seen.setdefault(int(number), []).append(int(mask.sum()))
    assert len(counts) == 1  # the same number on every rank
    assert seen == {row: [length] * epochs for row, length in enumerate(lengths)}
    assert data.meta_info == {"temperature": 0.9}
    assert all(torch.equal(before[name], data.batch[name]) for name in before)


class TestMiniBatches:
    def test_a_mini_batch_has_ga_steps_micro_batches(self) -> None:
        batch, _ = dynamic_batching_shard(rollouts([2, 4, 7, 6, 3, 4], 20), 2, 20, 2)
        mine = batch.slice(0, 3)
        minis = make_mini_batch_iter_for_dynamic_batching(mine, epochs=2, ga_steps=1)
        first = next(minis)
        assert first.meta_info["micro_batch_indices"] == [[0, 2]]
        assert first.meta_info["micro_batch_lengths"] == [4]
        # Slices share one meta_info, through which ROLL reads the current mini-batch.
        assert batch.meta_info["micro_batch_lengths"] == [4]
        rest = list(minis)
        assert len(rest) == 3
        assert rest[0].meta_info["micro_batch_indices"] == [[0, 1]]
        assert first.meta_info["micro_batch_indices"] == [[0, 2]], "each has its own"
        assert first.meta_info["temperature"] == 0.9
        assert [mini.meta_info["mini_batch_size"] for mini in (first, *rest)] == [2, 1, 2, 1]
        assert batch.meta_info["global_micro_batch_indices"] == [[0, 2], [2, 3]]

    def test_micro_batches_are_cut_to_their_width(self) -> None:
        batch, _ = dynamic_batching_shard(rollouts([2, 4, 7, 6, 3, 4], 20), 2, 20, 2)
        (mini,) = make_mini_batch_iter_for_dynamic_batching(batch.slice(0, 3), 1, ga_steps=2)
        first, second = make_micro_batch_iter_for_dynamic_batching(mini)
        shapes = {name: tuple(tensor.shape) for name, tensor in first.batch.items()}
        assert shapes == {
            "input_ids": (2, 4),
            "attention_mask": (2, 4),
            "response_mask": (2, 3),
            "position_ids": (2, 3, 4),
            "scores": (2,),
        }
        assert second.batch["input_ids"].shape == (1, 8)
        assert mini.batch["input_ids"].shape == (3, 20)

    @pytest.mark.parametrize("budget", [8, 16, 40, 64])
    def test_kept_mini_batches_hold_the_same_rows_with_any_budget(self, budget: int) -> None:
        batch, _ = dynamic_batching_shard(rollouts([8] * 8, 8), 1, budget, 8)
        minis = make_mini_batch_iter_for_dynamic_batching(
            batch, epochs=2, keep_mini_batch=True, mini_batch_size=4
        )
        rows = [mini.batch["scores"].tolist() for mini in minis]
        assert rows == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2

    def test_kept_mini_batches_are_split_for_a_pipeline(self) -> None:
        batch, _ = dynamic_batching_shard(rollouts([8] * 8, 8), 1, 64, 8)
        options: dict[str, Any] = {
            "keep_mini_batch": True,
            "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": 2,
        }
        minis = make_mini_batch_iter_for_dynamic_batching(batch, 1, mini_batch_size=4, **options)
        assert [mini.meta_info["micro_batch_indices"] for mini in minis] == (
            [[[0, 1], [1, 2], [2, 3], [3, 4]]] * 2
        )
        with pytest.raises(InputError, match="cannot be split into a multiple of 4"):
            list(make_mini_batch_iter_for_dynamic_batching(batch, 1, mini_batch_size=2, **options))
        with pytest.raises(ConfigError, match="divides the 8 rows, got 3"):
            list(make_mini_batch_iter_for_dynamic_batching(batch, 1, mini_batch_size=3, **options))

    def test_micro_batches_that_do_not_cover_the_rows_are_refused(self) -> None:
        data = rollouts([2] * 4, 2)
        data.meta_info["global_micro_batch_lengths"] = [2, 2]
        for ranges, fault in (
            ([[0, 2], [3, 4]], "not contiguous"),
            ([[0, 1], [1, 2]], "complete local batch"),
            ([[0, 4], [4, 9]], "complete local batch"),
        ):
            data.meta_info["global_micro_batch_indices"] = ranges
            with pytest.raises(InputError, match=fault):
                list(make_mini_batch_iter_for_dynamic_batching(data, 1))


class TestFaults:
    def test_a_row_over_the_budget_is_named(self) -> None:
        with pytest.raises(AssertionError, match="sample 1 has 9 tokens"):
            cut([2, 9], 12, 1, 8, 2)

    def test_seven_rows_on_two_ranks_work(self) -> None:
        """An IndexError there."""
        order, cuts, widths = cut(EXAMPLE[:7], 10, 2, 12, 2)
        assert sorted(order) == list(range(7))
        assert (cuts, widths) == ([[0, 2], [2, 3], [3, 4]], [6, 8, 8])

    def test_one_micro_batch_is_split_as_often_as_a_pipeline_needs(self) -> None:
        _, cuts, _ = cut(
            [4] * 8, 4, 1, 32, 1,
            pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2,
        )  # fmt: skip
        assert cuts == [[0, 2], [2, 4], [4, 6], [6, 8]]

    def test_rows_that_would_lose_tokens_are_refused(self) -> None:
        data = rollouts([3, 4], 4)
        data.batch["attention_mask"] = data.batch["attention_mask"].flip(1)
        with pytest.raises(InputError, match="padding_side is 'right', but row 0"):
            dynamic_batching_shard(data, 1, 8, 1)
        with pytest.raises(InputError, match=r"12 wide.*rows have 10 columns"):
            cut([10, 2], 10, 1, 20, 4)

    def test_no_rows_have_no_micro_batches(self) -> None:
        assert cut([], 4, 2, 8, 2) == ([], [], [])
