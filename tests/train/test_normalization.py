"""Weights and amounts of each normalization, by hand and by definition, without NaN."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Batch, Collator, Extra, shard_context
from evenstep.train import (
    Constant,
    Custom,
    FixedLength,
    GroupMean,
    Normalization,
    SampleWeights,
    SequenceMean,
    TokenMean,
)
from tests.examples import examples
from tests.internals import weighted
from tests.train import steps
from tests.train.steps import COLLATOR, LIMIT, Work, make_work, works

EXTRAS = {"group": Extra(aligned="sequence"), "weight": Extra(aligned="sequence")}


def batch_of(*masks: list[int], **columns: list[Any]) -> Batch:
    """Samples with these loss masks end to end; the first token of each is never predicted."""
    samples: list[dict[str, Any]] = [
        {"input_ids": range(len(mask)), "loss_mask": mask, "group": 0, "weight": 1.0}
        for mask in masks
    ]
    for name, values in columns.items():
        for sample, value in zip(samples, values, strict=True):
            sample[name] = value
    declared = {**EXTRAS, **{name: Extra(aligned="sequence") for name in columns}}
    recipe = Recipe(layout=Packed(max_tokens=64, packer="concatenative"))
    plan = make_plan([len(mask) for mask in masks], recipe)
    batch = Collator(extras=declared)(plan[0, 0][0], samples)
    assert batch.sample_ids.tolist() == list(range(len(masks)))
    return batch


def both(normalization: Normalization, batch: Batch) -> tuple[list[float], float]:
    weights, amount = normalization.weights(batch), normalization.amount(batch)
    assert amount.dtype == torch.float64
    assert amount.shape == ()
    return weights.flatten().tolist(), amount.item()


# By hand ----------------------------------------------------------------------------------------

THREE = [1, 1, 1], [1, 0, 1, 1, 1], [1, 0]  # 2, 3 and 0 loss tokens


def test_the_token_mean_weighs_loss_tokens_alike() -> None:
    weights, amount = both(TokenMean(), batch_of(*THREE))
    assert weights == [1, 1, 0, 0, 1, 1, 1, 0, 0, 0]
    assert amount == 5


def test_the_sequence_mean_weighs_sequences_alike_and_leaves_empty_ones_out() -> None:
    weights, amount = both(SequenceMean(), batch_of(*THREE))
    assert weights == [1 / 2, 1 / 2, 0, 0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0]
    assert amount == 2


def test_the_group_mean_counts_every_group_as_one() -> None:
    batch = batch_of(*THREE, [1, 1], group=[5, 5, 5, 2])
    weights, amount = both(GroupMean(), batch)
    assert weights == [1 / 5, 1 / 5, 0, 0, 1 / 5, 1 / 5, 1 / 5, 0, 0, 0, 1, 0]
    assert amount == pytest.approx(2, rel=1e-15)
    given_ = batch_of(*THREE, [1, 1], group_tokens=[10, 10, 10, 1])
    weights, amount = both(GroupMean(), given_)  # half of the first group is in another batch
    assert weights[:2] == [1 / 10, 1 / 10]
    assert amount == pytest.approx(1.5)


def test_constants_and_lengths_weigh_as_the_token_mean_does() -> None:
    batch = batch_of(*THREE)
    for normalization, amount in ((Constant(8.0), 0.0), (FixedLength(10.0), 30.0)):
        assert both(normalization, batch) == (both(TokenMean(), batch)[0], amount)
    assert Constant(8.0).known({}) == 8.0


def test_sample_weights_weigh_the_tokens_of_a_sample() -> None:
    batch = batch_of(*THREE, weight=[0.5, 2.0, 9.0])
    weights, amount = both(SampleWeights(), batch)
    assert weights == [0.5, 0.5, 0, 0, 2, 2, 2, 0, 0, 0]
    assert amount == 7
    assert both(SampleWeights("group"), batch_of([1, 1], group=[3.0])) == ([3, 0], 3)


def test_a_custom_normalization_is_zero_where_labels_are_ignored() -> None:
    def later(batch: Batch) -> Tensor:
        return batch.position_ids + 1.0

    weights, amount = both(Custom("later", later), batch_of(*THREE))
    assert weights == [1, 2, 0, 0, 2, 3, 4, 0, 0, 0]
    assert amount == 12
    own = Custom("later", later, lambda batch: torch.tensor(4))
    assert both(own, batch_of(*THREE))[1] == 4.0


def test_weights_of_further_labels_count_at_the_end_of_a_prompt() -> None:
    # targets [-100, -100, -100, 13, 14]: two ahead, slots 1 and 2 have a label; one ahead, 2 and 3
    batch = batch_of([0, 0, 0, 1, 1])
    assert batch.labels_at(2).ne(-100).tolist() == [[False, True, True, False, False]]
    second = Custom("second", lambda batch: torch.ones(batch.labels.shape), distance=2)
    assert both(second, batch) == ([0, 1, 1, 0, 0], 2)
    first = Custom("first", lambda batch: torch.ones(batch.labels.shape))
    assert both(first, batch) == ([0, 0, 1, 1, 0], 2)
    with pytest.raises(ConfigError, match="distance must be an integer in"):
        Custom("odd", lambda batch: batch.loss_weights, distance=-1)


def test_weights_multiply_what_tokens_weighed_before() -> None:
    batch = batch_of(*THREE)
    halved = replace(batch, loss_weights=batch.loss_weights / 2)
    assert both(SequenceMean(), halved)[0][:2] == [0.25, 0.25]
    assert both(TokenMean(), halved)[1] == 2.5


def test_totals_of_the_plan_give_denominators() -> None:
    totals = {"loss_tokens": 12.0, "sequences": 3.0, "groups": 2.0, "samples": 4.0}
    known = [n.known(totals) for n in (TokenMean(), SequenceMean(), GroupMean(), FixedLength(5.0))]
    assert known == [12.0, 3.0, 2.0, 20.0]
    for normalization in (*steps.NORMALIZATIONS.values(),):
        if not isinstance(normalization, Constant):
            assert normalization.known({}) is None


# Properties --------------------------------------------------------------------------------------


@examples(40)
@given(works())
def test_amounts_of_all_micro_batches_are_the_totals_of_the_step(work: Work) -> None:
    batches = [batch for rank in range(work.plan.num_ranks) for batch in work.batches(rank)]
    for normalization in steps.NORMALIZATIONS.values():
        if isinstance(normalization, Constant):
            continue
        amount = sum(float(normalization.amount(batch)) for batch in batches)
        assert amount == pytest.approx(normalization.known(work.totals), rel=1e-13)


@examples(40)
@given(works())
def test_weights_are_finite_and_zero_where_labels_are_ignored(work: Work) -> None:
    for rank in range(work.plan.num_ranks):
        for batch in work.batches(rank):
            for normalization in steps.NORMALIZATIONS.values():
                weights = normalization.weights(batch)
                assert weights.shape == batch.labels.shape
                assert weights.isfinite().all()
                assert not weights[batch.labels == -100].any()
                assert math.isfinite(float(normalization.amount(batch)))


def test_whole_groups_need_no_group_tokens() -> None:
    work = make_work([5, 3, 8, 2], Recipe(layout=Packed(max_tokens=64)), groups=2)
    (batch,) = work.batches(0)
    alone = replace(batch, aligned={n: a for n, a in batch.aligned.items() if n != "group_tokens"})
    assert torch.equal(GroupMean().weights(alone), GroupMean().weights(batch))
    assert torch.equal(GroupMean().amount(alone), GroupMean().amount(batch))


def test_a_weighted_batch_is_sharded_for_context_parallel_ranks() -> None:
    recipe = Recipe(layout=Packed(max_tokens=64), topology=Topology(cp=2))
    (batch,) = make_work([5, 11, 2], recipe).batches(0)
    for normalization in steps.NORMALIZATIONS.values():
        ready = weighted(batch, normalization)
        shards = [shard_context(ready, rank, 2) for rank in range(2)]
        total = sum(float(shard.loss_weights.double().sum()) for shard in shards)
        assert total == pytest.approx(float(ready.loss_weights.double().sum()), rel=1e-14)
        for shard in shards:
            wrong: Any = shard
            for function in (normalization.weights, normalization.amount):
                with pytest.raises(InputError, match="Weight the batch before"):
                    function(wrong)


@examples(25)
@given(works(), st.integers(0, 3))
def test_a_loss_on_further_labels_does_not_depend_on_the_plan(work: Work, distance: int) -> None:
    every = Custom("every", lambda b: torch.ones(b.labels.shape), distance=distance)
    collator = replace(COLLATOR, lookahead=max(distance, 1))
    found = counted = 0.0
    for rank in range(work.plan.num_ranks):
        for micro in work.plan[0, rank]:
            batch = collator(micro, work.samples)
            labels = batch.labels_at(distance).masked_fill(every.weights(batch) == 0, 0)
            found += float((labels * every.weights(batch)).sum())
            counted += float(every.amount(batch))
    labels = [s["input_ids"][distance:][s["loss_mask"][distance:]] for s in work.samples]
    assert counted == sum(map(len, labels))
    assert found == sum(int(each.sum()) for each in labels)


# Errors -----------------------------------------------------------------------------------------


def test_a_group_that_spans_micro_batches_is_refused() -> None:
    recipe = Recipe(layout=Packed(max_tokens=LIMIT), overflow="split")
    work = make_work([LIMIT + 4], recipe, masked=0.0)
    for batch in work.batches(0):
        alone = replace(batch, aligned={"group": "sequence"})
        with pytest.raises(InputError, match=r"sample 0 was split .* 'group_tokens'"):
            GroupMean().weights(alone)


def test_what_is_missing_is_named() -> None:
    batch = replace(batch_of([1, 1]), extras={}, aligned={})
    for normalization, extra in ((GroupMean(), "group"), (SampleWeights("w"), "w")):
        with pytest.raises(InputError, match=f"an extra '{extra}' with one number per sequence"):
            normalization.weights(batch)
    with pytest.raises(
        InputError, match=r"'odd' have shape \(3,\), but the batch has shape \(1, 2\)"
    ):
        Custom("odd", lambda batch: torch.ones(3)).weights(batch)
    for value in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="value must be positive"):
            Constant(value)
        with pytest.raises(ConfigError, match="length must be positive"):
            FixedLength(value)


def test_large_group_ids_need_an_integer_dtype() -> None:
    numbers = [2**60, 2**60 + 1]
    batch = batch_of([0, 1, 1], [0, 1, 1], group=numbers)
    with pytest.raises(
        InputError, match=r"ids of 16777216 or more in torch.float32.*dtype=torch.int64"
    ):
        GroupMean().amount(batch)
    batch = replace(batch, extras={**batch.extras, "group": torch.tensor(numbers)})
    assert GroupMean().amount(batch).item() == 2.0


@pytest.mark.parametrize("name", ["tokens", "loss_tokens", "samples"])
def test_a_custom_normalization_may_not_have_the_name_of_a_total(name: str) -> None:
    with pytest.raises(ConfigError, match="has the name of a total"):
        Custom(name, lambda batch: batch.loss_weights)
