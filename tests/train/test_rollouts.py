"""RolloutBatch: rollouts in any batching are those of one giant padded batch."""

from __future__ import annotations

import copy
import pickle
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Cost, Limits, Packed, Padded, Recipe, Steps, Topology, World
from evenstep.errors import ConfigError, InputError, SampleError
from evenstep.tensors import Collator, Extra, policy_gradient, restore_ragged, restore_sequences
from evenstep.testing import run_ranks
from evenstep.train import Collective, RolloutBatch, Runner, compute_log_probs
from tests.examples import examples
from tests.train.rollouts import (
    LONGEST,
    MASKS,
    WAYS,
    WIDTH,
    Rollouts,
    make_rollouts,
    recipe_of,
    rollouts,
)
from tests.train.steps import Gradient, distance, gradient_of, model_of

ways = st.sampled_from(sorted(WAYS))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@examples(30)
@given(data=rollouts(), way=ways, size=st.integers(1, 4), steps=st.none() | st.integers(3, 9))
def test_log_probs_of_ranks_are_those_of_one_padded_batch(
    data: Rollouts, way: str, size: int, steps: int | None
) -> None:
    model, batch = model_of(), data.batch
    plan = batch.plan(recipe_of(way, dp=size, samples=steps), shuffle=steps is not None)
    rows, values = [], []
    for rank in range(size):
        # What a controller sends to a rank, and what the rank sends back.
        sent, mine = pickle.loads(pickle.dumps((plan, batch.select(plan.rows_of(rank)))))
        for step in sent.steps(mine, World(rank, size)):
            rows.append(step.own_sample_ids)
            values += compute_log_probs(model, step)
    found = batch.restore_tokens(values, np.concatenate(rows))
    close(found, data.log_probs(model))


@examples(15)
@given(data=rollouts(), way=ways, size=st.integers(1, 3))
def test_log_probs_of_a_batch_as_samples(data: Rollouts, way: str, size: int) -> None:
    model, batch, recipe = model_of(), data.batch, recipe_of(way, dp=size)

    def rank(ranks: Collective) -> Tensor:
        own = copy.deepcopy(model)
        return batch.restore_tokens(compute_log_probs(own, batch, recipe, collective=ranks))

    for found in run_ranks(size, rank):
        close(found, data.log_probs(model))


@examples(30)
@given(
    data=rollouts(),
    way=ways,
    size=st.integers(1, 4),
    samples=st.integers(3, 6),
    seed=st.integers(0, 99),
)
def test_losses_and_gradients_of_steps_are_those_of_one_padded_batch(
    data: Rollouts, way: str, size: int, samples: int, seed: int
) -> None:
    batch = data.batch
    recipe = recipe_of(way, dp=size, samples=samples)
    plan, first = batch.plan(recipe, epochs=2, seed=seed), model_of()

    def rank(ranks: Collective) -> list[tuple[float, Gradient] | str]:
        model = copy.deepcopy(first)
        found: list[tuple[float, Gradient] | str] = []
        mine = batch.select(plan.rows_of(ranks.rank))
        loss = policy_gradient()
        runner = Runner(model=model, loss=loss, collective=ranks, collate=mine.collator())
        for step in plan.steps(mine, World(ranks.rank, size)):
            model.zero_grad()
            try:
                result = runner.run(step).reduce(ranks)
            except InputError as error:
                found.append(str(error))
            else:
                found.append((result.loss, gradient_of(model)))
        return found

    found = run_ranks(size, rank)
    mini_batches = [rows for epoch in range(2) for rows in plan.mini_batches(epoch)]
    for of_rank in found:
        assert len(of_rank) == len(mini_batches)
        for each, rows in zip(of_rank, mini_batches, strict=True):
            if data.is_without_loss(rows.tolist()):
                assert isinstance(each, str)
                assert "counts in the loss, on any rank" in each
                continue
            assert not isinstance(each, str), each
            (loss, gradient), model = each, model_of()
            expected = data.loss(model, rows.tolist())
            assert loss == pytest.approx(expected.item(), rel=1e-11, abs=1e-12)
            if expected.requires_grad:
                expected.backward()
            assert distance(gradient, gradient_of(model)) < 1e-11


@examples(60)
@given(
    data=rollouts(least=0),
    samples=st.integers(3, 6),
    seed=st.integers(0, 99),
    others=st.lists(st.tuples(ways, st.integers(1, 5)), min_size=1, max_size=3),
)
def test_mini_batches_hold_the_same_rows_in_every_batching(
    data: Rollouts, samples: int, seed: int, others: list[tuple[str, int]]
) -> None:
    batch = data.batch

    def mini_batches(way: str, dp: int) -> list[list[list[int]]]:
        plan = batch.plan(recipe_of(way, dp=dp, samples=samples), epochs=3, seed=seed)
        return [[rows.tolist() for rows in plan.mini_batches(e)] for e in range(3)]

    expected = mini_batches("padded", 1)
    for epoch in expected:
        assert sorted(row for rows in epoch for row in rows) == list(range(len(batch)))
        assert all(len(rows) <= samples for rows in epoch)
        if data.groups is None:
            assert [len(rows) for rows in epoch[:-1]] == [samples] * (len(epoch) - 1)
        else:
            members = [{data.groups[row] for row in rows} for rows in epoch]
            assert sum(map(len, members)) == len(set(data.groups))
    for way, dp in others:
        assert mini_batches(way, dp) == expected


def test_epochs_and_seeds_have_their_own_order() -> None:
    batch = make_rollouts([3] * 40, "left").batch
    recipe = recipe_of("packed", samples=10)
    orders = {
        (seed, epoch): tuple(
            map(tuple, batch.plan(recipe, epochs=2, seed=seed).mini_batches(epoch))
        )
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4
    stored = batch.plan(recipe, epochs=2, shuffle=False)
    assert [rows[0] for rows in stored.mini_batches(1)] == [0, 10, 20, 30]


@examples(40)
@given(data=rollouts(), way=ways, size=st.integers(1, 6), seed=st.integers(0, 9))
def test_each_row_belongs_to_one_rank_per_epoch_and_ranks_have_equal_counts(
    data: Rollouts, way: str, size: int, seed: int
) -> None:
    batch = data.batch
    plan = batch.plan(recipe_of(way, dp=size), seed=seed)
    owned = [plan.rows_of(rank).tolist() for rank in range(size)]
    assert sorted(row for rows in owned for row in rows) == list(range(len(batch)))
    counts = set()
    for rank in range(size):
        (step,) = plan.steps(batch.select(owned[rank]), World(rank, size))
        assert step.own_sample_ids.tolist() == owned[rank]
        counts.add(len(step))
    assert len(counts) == 1


@examples(60)
@given(data=rollouts(), order=st.randoms(use_true_random=False))
def test_results_return_to_their_row_column_and_side(data: Rollouts, order: Random) -> None:
    batch, ids = data.batch, data.tensors["input_ids"]
    rows = list(range(len(batch)))
    order.shuffle(rows)
    values = [torch.stack((batch[row]["input_ids"], -batch[row]["input_ids"]), -1) for row in rows]
    found = batch.restore_tokens(values, rows, pad=-5)
    inside = data.tensors["attention_mask"] == 1
    assert torch.equal(found[..., 0], torch.where(inside, ids, -5))
    assert torch.equal(found[..., 1], torch.where(inside, -ids, -5))
    advantages = data.tensors["advantages"]
    again = batch.restore_sequences(advantages[rows], rows, pad=9)
    real = torch.as_tensor(data.lengths) > 0
    assert torch.equal(again, torch.where(real, advantages, 9.0))


def test_results_of_micro_batches_are_restored_from_the_steps_of_ranks() -> None:
    data = make_rollouts([3, 0, 7, 5, 1, 6, 2], "left")
    batch, size = data.batch, 2
    plan = batch.plan(recipe_of("packed", dp=size))
    rows, tokens, sums = [], [], []
    for rank in range(size):
        mine, collate = batch.select(plan.rows_of(rank)), batch.collator()
        for step in plan.steps(mine, World(rank, size)):
            held = [collate(micro, samples) for micro, samples in step]
            ragged = restore_ragged(step, [each.tokens for each in held])
            rows.append(step.own_sample_ids)
            tokens += list(ragged.values.split(torch.diff(ragged.offsets).tolist()))
            sums.append(restore_sequences(step, [each.extras["advantages"] for each in held]))
    joined = np.concatenate(rows)
    expected = data.tensors["input_ids"] * data.tensors["attention_mask"]
    assert torch.equal(batch.restore_tokens(tokens, joined), expected)
    found = batch.restore_sequences(torch.cat(sums), joined)
    assert torch.equal(found, torch.where(batch_is_real(batch), data.tensors["advantages"], 0.0))


def batch_is_real(batch: RolloutBatch) -> Tensor:
    return torch.from_numpy(batch.lengths > 0)


def test_only_empty_rows_are_a_step_without_loss() -> None:
    data = make_rollouts([0, 0, 0], "right")
    batch = data.batch
    plan = batch.plan(recipe_of("packed", samples=2))
    model = model_of()
    runner = Runner(model=model, loss=policy_gradient(), collate=batch.collator())
    for step in plan.steps(batch):
        result = runner.run(step)
        assert result.empty
        assert result.loss == 0
        assert float(gradient_of(model).flat.abs().max()) == 0
    (step, *_) = plan.steps(batch)
    found = batch.restore_tokens(compute_log_probs(model, batch, recipe_of("packed")))
    assert torch.equal(found, torch.zeros((3, WIDTH), dtype=torch.float64))
    assert plan.metrics()["tokens"] == 0


def test_no_rows_have_no_steps() -> None:
    batch = make_rollouts([], "right").batch
    plan = batch.plan(recipe_of("packed", dp=2), epochs=2)
    assert [*plan.steps(batch, World(0, 2))] == []
    assert plan.rows_of(1).tolist() == []
    assert plan.metrics()["removed_padding_ratio"] == 0


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_rows_without_tokens_are_scored_and_restored(lengths: list[int]) -> None:
    batch = make_rollouts(lengths, "right").batch
    scores = compute_log_probs(model_of(), batch, recipe_of("packed"))
    assert batch.restore_tokens(scores).shape == (len(lengths), WIDTH)
    assert batch.restore_sequences(torch.zeros(len(lengths))).shape == (len(lengths),)


def test_padding_and_imbalance_are_in_the_metrics() -> None:
    ids = torch.ones((4, 10), dtype=torch.int64)
    batch = RolloutBatch({"input_ids": ids}, lengths=[4, 2, 0, 3], padding_side="left")
    layout = Padded(samples=2)
    recipe = Recipe(layout=layout, balance="none", topology=Topology(dp=2))
    metrics = batch.plan(recipe, epochs=2, shuffle=False).metrics()
    # Rows of 4 and 2 on rank 0, of 1 (empty) and 3 on rank 1: 8 + 6 slots in each epoch.
    assert metrics == {
        "num_steps": 2,
        "num_micro_batches": 4,
        "num_empty_rows": 1,
        "tokens": 18,
        "slots_before": 80,
        "slots": 28,
        "removed_padding": 52,
        "removed_padding_ratio": 0.65,
        "padding_ratio": pytest.approx(10 / 28),
        "imbalance_step": pytest.approx(8 / 7),
        "imbalance_micro_batch": pytest.approx(8 / 7),
    }


def test_training_and_log_probs_have_their_own_budget_and_rounding() -> None:
    batch = make_rollouts([5, 5, 5, 5], "right").batch
    train = Recipe(layout=Padded(max_tokens=12, round_to=4), steps=Steps(samples=2))
    score = Recipe(layout=Packed(max_tokens=20))
    widths = [s.micro_batches[0].width for s in batch.plan(train).steps(batch)]
    assert widths == [8, 8]
    (step,) = batch.plan(score, shuffle=False).steps(batch)
    assert [(micro.rows, micro.width) for micro in step.micro_batches] == [(1, 20)]


def test_a_pipeline_gets_a_multiple_of_its_stages() -> None:
    batch = make_rollouts([5, 3, 1, 7, 2], "right").batch
    topology = Topology(dp=2, pp=2, vpp=2, variable_seq_lengths=True)
    plan = batch.plan(Recipe(layout=Packed(max_tokens=LONGEST), topology=topology))
    assert all(len(step) % 2 == 0 for step in plan.steps(batch, World(0, 2)))


def test_ranks_are_even_by_the_cost_of_the_recipe() -> None:
    lengths = [8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    ids = torch.ones((12, 8), dtype=torch.int64)
    batch = RolloutBatch({"input_ids": ids}, lengths=lengths, padding_side="right")

    def rows(cost: Cost) -> int:
        layout = Packed(max_tokens=48)
        recipe = Recipe(layout=layout, topology=Topology(dp=2), cost=cost, sync_every="step")
        return sorted(len(batch.plan(recipe).rows_of(rank)) for rank in range(2))[0]

    assert rows(Cost()) == 6
    # 8 and 8 cost as much as eight rows of 4, if only pairs count: 2 * 64 and 10 * 16
    assert batch.plan(
        Recipe(
            layout=Packed(max_tokens=48),
            topology=Topology(dp=2),
            cost=Cost(per_token=0, per_pair=1),
            sync_every="step",
        )
    ).metrics()["imbalance_step"] == pytest.approx(1.0)


def test_columns_that_a_recipe_limits_are_tensors_of_the_batch() -> None:
    ids = torch.ones((4, 3), dtype=torch.int64)
    tensors = {"input_ids": ids, "patches": torch.tensor([3, 3, 1, 1])}
    batch = RolloutBatch(tensors, lengths=[3] * 4, padding_side="right")
    recipe = Recipe(layout=Packed(max_tokens=12), limits=Limits(columns={"patches": 4}))
    (step,) = batch.plan(recipe).steps(batch)
    held = [tensors["patches"].numpy()[micro.segments.sample].sum() for micro in step.micro_batches]
    assert max(held) <= 4
    with pytest.raises(InputError, match="no tensor 'images'"):
        batch.plan(Recipe(layout=Packed(max_tokens=12), limits=Limits(columns={"images": 4})))


class TestTensors:
    def test_last_columns_vectors_and_rows_of_any_shape_travel_with_their_tokens(self) -> None:
        ids = torch.arange(12).view(2, 6)
        batch = RolloutBatch(
            {
                "input_ids": ids,
                "hidden": torch.arange(24).view(2, 6, 2),
                "responses": torch.arange(6).view(2, 3),
                "embedding": torch.arange(8).view(2, 4),
                "reward": torch.tensor([1.0, 2.0]),
            },
            lengths=[5, 2],
            padding_side="left",
            aligned={"responses": "last", "embedding": "sequence"},
        )
        first, second = batch[0], batch[1]
        assert first["input_ids"].tolist() == [1, 2, 3, 4, 5]
        assert first["responses"].tolist() == [0, 0, 0, 1, 2]
        assert second["responses"].tolist() == [4, 5]
        assert second["hidden"].tolist() == [[20, 21], [22, 23]]
        assert second["embedding"].tolist() == [4, 5, 6, 7]
        (step,) = batch.plan(Recipe(layout=Packed(max_tokens=8)), shuffle=False).steps(batch)
        ((micro, samples),) = step
        found = batch.collator()(micro, samples)
        assert found.extras["hidden"].shape == (1, 7, 2)  # type: ignore[union-attr]
        assert found.extras["embedding"].shape == (2, 4)  # type: ignore[union-attr]
        assert found.extras["reward"].tolist() == [1.0, 2.0]  # type: ignore[union-attr]

    def test_labels_of_the_last_columns_hide_the_tokens_before_them(self) -> None:
        ids = torch.arange(12).view(2, 6)
        tensors = {"input_ids": ids, "labels": ids[:, 3:]}
        batch = RolloutBatch(
            tensors, lengths=[6, 2], padding_side="left", aligned={"labels": "last"}
        )
        assert batch[0]["labels"].tolist() == [-100, -100, -100, 3, 4, 5]
        assert batch[1]["labels"].tolist() == [10, 11]

    def test_samples_are_views_and_inputs_are_not_changed(self) -> None:
        data = make_rollouts([4, 6], "left")
        before = {name: tensor.clone() for name, tensor in data.tensors.items()}
        batch = data.batch
        assert batch[1]["input_ids"].untyped_storage().data_ptr() == (
            data.tensors["input_ids"].untyped_storage().data_ptr()
        )
        more = batch.with_tensors({"values": torch.zeros((2, WIDTH))})
        assert "values" not in batch.tensors
        assert more[0]["values"].shape == (4,)
        assert all(torch.equal(before[name], data.tensors[name]) for name in before)

    def test_a_shape_that_does_not_say_what_it_holds_is_refused(self) -> None:
        ids = torch.ones((2, 6), dtype=torch.int64)

        def made(**tensors: Tensor) -> RolloutBatch:
            return RolloutBatch({"input_ids": ids, **tensors}, lengths=[6, 6], padding_side="right")

        with pytest.raises(InputError, match=r"'log_probs' has shape \(2, 5\).*'last'"):
            made(log_probs=torch.zeros((2, 5)))
        with pytest.raises(InputError, match="there are 2 rows"):
            made(reward=torch.zeros(3))
        with pytest.raises(InputError, match="one number per token"):
            made(loss_mask=torch.zeros(2))
        with pytest.raises(InputError, match="cannot be aligned as 'last'"):
            made().with_tensors({"x": torch.zeros((2, 9))}, aligned={"x": "last"})
        with pytest.raises(ConfigError, match="aligned names 'y'"):
            made().with_tensors({"x": torch.zeros(2)}, aligned={"y": "last"})
        with pytest.raises(ConfigError, match="attention_mask cannot change"):
            made().with_tensors({"attention_mask": ids})


class TestMasks:
    @examples(100)
    @given(data=rollouts(least=0))
    def test_the_tokens_of_a_row_are_its_ones(self, data: Rollouts) -> None:
        batch = data.batch
        assert batch.lengths.tolist() == data.lengths
        for row, length in enumerate(data.lengths):
            expected = data.tensors["input_ids"][row][data.span(row)]
            found = batch[row]["input_ids"]
            assert torch.equal(found, expected) if length else found.tolist() == [0]

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
    def test_masks_of_any_dtype(self, dtype: torch.dtype) -> None:
        ids = torch.tensor([[0, 5, 6]])
        mask = torch.tensor([[0, 1, 1]]).to(dtype)
        batch = RolloutBatch({"input_ids": ids, "attention_mask": mask})
        assert batch[0]["input_ids"].tolist() == [5, 6]

    @pytest.mark.parametrize("name", ["prompt_mask", "value_mask", "env_mask", "teacher_mask"])
    def test_a_mask_that_nothing_reads_is_refused(self, name: str) -> None:
        ids = torch.ones((2, 3), dtype=torch.int64)
        tensors = {"input_ids": ids, "attention_mask": ids, name: ids}
        fault = f"'{name}' looks like a mask, but nothing reads it.*response_mask.*Rename it"
        with pytest.raises(InputError, match=fault):
            RolloutBatch(tensors)
        with pytest.raises(InputError, match=fault):
            RolloutBatch({"input_ids": ids, "attention_mask": ids}).with_tensors({name: ids})
        batch = RolloutBatch(tensors, aligned={name: "token"})  # a loss of the caller reads it
        assert name in batch.collator().extras

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("reponse_mask", "response_mask"),
            ("response_masks", "response_mask"),
            ("ResponseMask", "response_mask"),
            ("loss_masks", "loss_mask"),
            ("assistant_mask", "assistant_masks"),
        ],
    )
    def test_a_misspelt_mask_is_refused_though_it_is_named(self, name: str, meant: str) -> None:
        ids, mask = torch.ones((2, 3), dtype=torch.int64), torch.ones((2, 2))
        fault = f"'{name}' is almost the loss mask '{meant}'.*Correct its name"
        tensors = {"input_ids": ids, "attention_mask": ids}
        with pytest.raises(InputError, match=fault):
            RolloutBatch({**tensors, name: mask}, aligned={name: "last"})
        with pytest.raises(InputError, match=fault):
            RolloutBatch(tensors).with_tensors({name: mask}, aligned={name: "last"})
        with pytest.raises(InputError, match=fault):
            Collator(extras={name: Extra(aligned="token")})

    @pytest.mark.parametrize("system", MASKS)
    def test_loss_masks_of_other_systems_are_no_extras_and_hide_the_prompt(
        self, system: str
    ) -> None:
        data = make_rollouts([7, 7, 5, 6], "mixed", system=system)
        batch = data.batch
        assert set(batch.collator().extras) == {"advantages", "old_log_probs"}
        (step,) = batch.plan(recipe_of("packed"), shuffle=False).steps(batch)
        counted = 0
        for micro, samples in step:
            counted += int(batch.collator()(micro, samples).loss_tokens.sum())
        spans = [slice(a + 1, b) for a, b in zip(data.starts, data.ends, strict=True)]
        assert counted == sum(int(data.trained[r][span].sum()) for r, span in enumerate(spans))

    def test_a_mask_per_row_has_one_number_per_row(self) -> None:
        ids = torch.ones((2, 3), dtype=torch.int64)
        with pytest.raises(InputError, match="'sample_mask' has shape"):
            RolloutBatch(
                {"input_ids": ids, "attention_mask": ids, "sample_mask": torch.ones((2, 3, 1))}
            )
        batch = RolloutBatch(
            {"input_ids": ids, "attention_mask": ids, "sample_mask": torch.tensor([1, 0])}
        )
        assert batch[1]["sample_mask"].item() == 0

    def test_what_is_not_a_mask_of_padding_is_refused(self) -> None:
        ids = torch.ones((2, 3), dtype=torch.int64)

        def made(rows: list[list[int]], **options: str) -> RolloutBatch:
            tensors = {"input_ids": ids, "attention_mask": torch.tensor(rows)}
            return RolloutBatch(tensors, **options)  # type: ignore[arg-type]

        with pytest.raises(InputError, match="row 1 has zeros between ones"):
            made([[1, 1, 1], [1, 0, 1]])
        with pytest.raises(InputError, match="holds 2; expected 0 or 1"):
            made([[1, 1, 2], [1, 1, 1]])
        with pytest.raises(InputError, match="row 1 has its tokens in columns 0 to 1 of 3"):
            made([[0, 1, 1], [1, 1, 0]], padding_side="left")
        with pytest.raises(ConfigError, match="unknown padding_side 'middle'"):
            made([[0, 1, 1], [1, 1, 0]], padding_side="middle")
        with pytest.raises(InputError, match="attention_mask has shape"):
            made([[1, 1], [1, 1]])

    def test_lengths_need_a_side_and_exclude_a_mask(self) -> None:
        ids = torch.ones((2, 3), dtype=torch.int64)
        with pytest.raises(ConfigError, match="on which side"):
            RolloutBatch({"input_ids": ids}, lengths=[1, 2])
        with pytest.raises(ConfigError, match="got neither"):
            RolloutBatch({"input_ids": ids})
        with pytest.raises(ConfigError, match="got both"):
            RolloutBatch({"input_ids": ids, "attention_mask": ids}, lengths=[1, 2])
        with pytest.raises(InputError, match="row 1 has length 4; expected 0 to 3"):
            RolloutBatch({"input_ids": ids}, lengths=[1, 4], padding_side="left")
        with pytest.raises(InputError, match="must be 2 integers"):
            RolloutBatch({"input_ids": ids}, lengths=[1.5, 2.0], padding_side="left")
        found = RolloutBatch({"input_ids": ids}, lengths=torch.tensor([1, 2]), padding_side="left")
        assert found.lengths.tolist() == [1, 2]


class TestFaults:
    def test_a_row_without_a_result_or_with_two_is_named(self) -> None:
        batch = make_rollouts([2, 0, 3], "left").batch
        two, three = torch.ones(2), torch.ones(3)
        assert batch.restore_tokens([three, two], [2, 0]).shape == (3, WIDTH)  # row 1 is empty
        with pytest.raises(InputError, match="row 2 has no result"):
            batch.restore_tokens([two], [0])
        with pytest.raises(InputError, match="row 0 is given twice"):
            batch.restore_tokens([two, two, three], [0, 0, 2])
        with pytest.raises(InputError, match="row 2 has 3 tokens, but its result has 2"):
            batch.restore_tokens([two, two], [0, 2])
        with pytest.raises(InputError, match="got 1 results for 2 rows"):
            batch.restore_tokens([two], [0, 2])
        with pytest.raises(InputError, match="got 1 values for 2 rows"):
            batch.restore_sequences(torch.ones(1), [0, 2])
        with pytest.raises(InputError, match="row 3 is not among the 3 rows"):
            batch.restore_tokens([two, three], [0, 3])

    def test_rows_of_another_rank_or_batch_are_refused(self) -> None:
        batch = make_rollouts([2, 4, 3, 5], "left").batch
        plan = batch.plan(recipe_of("packed", dp=2))
        mine, size = batch.select(plan.rows_of(0)), 2
        (step,) = plan.steps(mine, World(1, size))
        with pytest.raises(SampleError, match="is not among the 2 rows of this batch"):
            list(step)
        with pytest.raises(InputError, match="Plan the whole batch"):
            mine.plan(recipe_of("packed"))
        with pytest.raises(InputError, match="row 9 is not among"):
            batch.select([9])
        other = make_rollouts([2, 4, 3, 6], "left").batch
        with pytest.raises(InputError, match="Pass the batch that was planned"):
            list(plan.steps(other, World(0, size)))
        with pytest.raises(InputError, match="rank 2 is out of range"):
            plan.rows_of(2)

    @examples(40)
    @given(data=rollouts(), size=st.integers(1, 3), seed=st.integers(0, 99), copied=st.booleans())
    def test_a_batch_with_other_tokens_is_refused_by_row(
        self, data: Rollouts, size: int, seed: int, copied: bool
    ) -> None:
        real = [row for row, length in enumerate(data.lengths) if length]
        batch = data.batch
        plan = batch.plan(recipe_of("packed", dp=size))
        for rank in range(size):
            list(plan.steps(batch.select(plan.rows_of(rank)), World(rank, size)))
        if not real:
            return
        row = real[seed % len(real)]
        ids = data.tensors["input_ids"].clone()
        ids[row, data.starts[row] + seed % data.lengths[row]] += 1
        other = batch.with_tensors({"input_ids": ids})
        if copied:
            other = RolloutBatch(
                {"input_ids": ids, "attention_mask": data.tensors["attention_mask"]}
            )
        (rank,) = (n for n in range(size) if row in plan.rows_of(n))
        for held in (other, other.select(plan.rows_of(rank))):
            with pytest.raises(InputError, match=f"row {row} has other tokens than the row"):
                next(plan.steps(held, World(rank, size)))

    def test_ranks_with_other_rollouts_have_other_fingerprints(self) -> None:
        one, other = (make_rollouts([2, 4, 3, 5], "left", seed=seed).batch for seed in (0, 1))
        recipe = recipe_of("packed")
        (first,), (second,) = (batch.plan(recipe).steps(batch) for batch in (one, other))
        (again,) = one.plan(recipe).steps(one.select([0, 1, 2, 3]))
        assert first.fingerprint != second.fingerprint
        assert first.fingerprint == again.fingerprint

    def test_log_probs_of_a_step_need_no_recipe(self) -> None:
        batch = make_rollouts([2, 4], "left").batch
        recipe = recipe_of("packed")
        (step,) = batch.plan(recipe).steps(batch)
        with pytest.raises(ConfigError, match="have no effect"):
            compute_log_probs(model_of(), step, recipe)
        with pytest.raises(ConfigError, match="recipe is missing"):
            compute_log_probs(model_of(), [{"input_ids": [1, 2]}])
        collated = step.collated(batch.collator())
        for one, other in zip(
            compute_log_probs(model_of(), step),
            compute_log_probs(model_of(), collated),
            strict=True,
        ):
            assert torch.equal(one, other)


def test_a_sample_mask_of_one_column_is_one_number_per_row() -> None:
    ids = torch.ones((2, 3), dtype=torch.int64)
    tensors = {"input_ids": ids, "attention_mask": ids}
    column = RolloutBatch({**tensors, "sample_mask": torch.tensor([[1], [0]])})
    assert [column[row]["sample_mask"].item() for row in range(2)] == [1, 0]
    with pytest.raises(InputError, match=r"'sample_mask' has shape \(2, 2\)"):
        RolloutBatch({**tensors, "sample_mask": torch.ones((2, 2))})


def test_tokens_that_change_in_place_are_not_those_that_were_planned() -> None:
    ids = torch.arange(12).view(3, 4)
    batch = RolloutBatch({"input_ids": ids}, lengths=[4, 4, 3], padding_side="right")
    plan = batch.plan(recipe_of("packed"))
    ids[2, 3] = 99  # padding
    plan.check(batch)
    before, copied = batch.select([1, 2]), pickle.loads(pickle.dumps(batch))
    ids[1, 2] = 99
    for changed in (batch, batch.select([0, 1]), pickle.loads(pickle.dumps(batch))):
        with pytest.raises(InputError, match="row 1 has other tokens than the row that was"):
            plan.check(changed)
    for same in (before, copied):
        plan.check(same)
    batch.tensors["input_ids"][1, 2] = 6
    plan.check(batch)
    with torch.inference_mode():
        made = RolloutBatch({"input_ids": ids.clone()}, lengths=[4, 4, 3], padding_side="right")
    made.plan(recipe_of("packed")).check(made.select([0, 2]))


def test_masks_of_any_case_are_refused_if_nothing_reads_them() -> None:
    ids = torch.ones((2, 3), dtype=torch.int64)
    with pytest.raises(InputError, match="'LossMask' looks like a mask"):
        RolloutBatch({"input_ids": ids, "attention_mask": ids, "LossMask": ids})


def test_logits_of_a_teacher_are_not_shifted_to_the_last_columns() -> None:
    ids = torch.ones((2, 3), dtype=torch.int64)
    tensors = {"input_ids": ids, "attention_mask": ids, "teacher_logits": torch.ones((2, 2, 5))}
    with pytest.raises(InputError, match=r"predicts token i \+ 1.*all 3 columns"):
        RolloutBatch(tensors, aligned={"teacher_logits": "last"})
    whole = {**tensors, "teacher_logits": torch.ones((2, 3, 5))}
    assert RolloutBatch(whole).aligned["teacher_logits"] == "token"


def test_sequences_of_an_empty_batch_can_be_restored() -> None:
    ids = torch.ones((2, 3), dtype=torch.int64)
    empty = RolloutBatch({"input_ids": ids, "attention_mask": ids}).select([])
    assert empty.restore_sequences([]).shape == (0,)
