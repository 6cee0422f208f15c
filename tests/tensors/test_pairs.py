"""Losses of pairs: what they read, measure and refuse."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Batch, Head, dpo, reward_model, shard_context, value_loss
from tests.tensors.scored import close, collator_of, flat_logits, samples_with

COLLATE = collator_of(("reference_log_probs",), ("group", "chosen"))


def batch_of(lengths: list[int], cp: int = 1) -> Batch:
    samples = samples_with(lengths, ("reference_log_probs",), masked=0.2)
    for number, sample in enumerate(samples):
        sample |= {"group": number // 2, "chosen": float(number % 2)}
    recipe = Recipe(layout=Packed(max_tokens=64, pad_to=64), topology=Topology(cp=cp))
    groups = [sample["group"] for sample in samples]
    return COLLATE(make_plan(lengths, recipe, groups=groups)[0, 0][0], samples)


def test_the_reference_may_be_one_number_per_sequence() -> None:
    batch = batch_of([4, 5, 3, 2])
    logits = flat_logits(batch).double()
    ahead = torch.where(batch.labels != -100, batch.ahead("reference_log_probs"), 0.0)
    per_tile = torch.zeros(len(batch.seqlens)).double()
    per_tile.index_add_(0, batch.segment_ids.flatten(), ahead.flatten())
    sums = {"reference_log_probs": per_tile[batch.sample_ids >= 0]}
    aligned: dict[str, Any] = {**batch.aligned, "reference_log_probs": "sequence"}
    one = replace(batch, extras={**batch.extras, **sums}, aligned=aligned)
    close(dpo()(logits, one).loss, dpo()(logits, batch).loss)


def test_accuracy_margin_and_rewards_are_metrics() -> None:
    batch = batch_of([3, 3, 3, 3])
    scores = torch.zeros(1, 64, 1).double()
    ends = (batch.cu_seqlens[:-1] + batch.seqlens - 1)[batch.sample_ids >= 0].tolist()
    by_sample = dict(zip(batch.sample_ids[batch.sample_ids >= 0].tolist(), ends, strict=True))
    for sample, value in {0: 1.0, 1: 4.0, 2: 2.0, 3: 0.0}.items():
        scores[0, by_sample[sample]] = value
    sums = reward_model()(scores, batch)
    found = {name: float(metric.value) for name, metric in sums.metrics.items()}
    assert found == {"chosen_score": 2.0, "rejected_score": 1.5, "accuracy": 0.5, "margin": 0.5}
    metrics = dpo()(flat_logits(batch).double(), batch).metrics
    gap = float(metrics["chosen_reward"].value) - float(metrics["rejected_reward"].value)
    assert float(metrics["margin"].value) == pytest.approx(gap)


def test_a_head_gives_the_loss_of_its_logits() -> None:
    batch = batch_of([4, 5, 3, 2])
    torch.manual_seed(0)
    linear = nn.Linear(5, 7, dtype=torch.float64)
    hidden = flat_logits(batch, size=5).double()
    found = dpo(head=Head(linear, chunk=2))(hidden, batch).loss
    close(found, dpo()(linear(hidden), batch).loss)


def test_every_slot_of_a_pair_holds_its_value() -> None:
    batch = batch_of([6, 7, 8, 6])
    sums = dpo()(flat_logits(batch).double(), batch)
    counts = torch.zeros(len(batch.seqlens)).index_add_(
        0, batch.segment_ids.flatten(), batch.loss_weights.flatten()
    )
    each = (sums.by_sequence / counts[batch.sample_ids >= 0]).tolist()
    value = dict(zip(batch.sample_ids[batch.sample_ids >= 0].tolist(), each, strict=True))
    assert value[0] == pytest.approx(value[1])
    assert value[2] == pytest.approx(value[3])


def test_an_empty_micro_batch_has_a_loss_of_zero_and_a_backward() -> None:
    recipe = Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2))
    batch = COLLATE(make_plan([3], recipe)[0, 1][0], {})
    assert batch.is_empty
    for loss, size in ((dpo(), 7), (reward_model(), 1)):
        outputs = flat_logits(batch, size=size).requires_grad_()
        total = loss(outputs, batch).loss
        total.backward()
        assert total.item() == 0.0
        assert not outputs.grad.any()


def test_faults_say_what_to_do() -> None:
    batch = batch_of([4, 5], cp=2)
    logits = flat_logits(batch)
    for options, message in (
        ({"beta": 0.0}, "beta must be positive"),
        ({"loss": "dpo"}, "unknown loss 'dpo'"),
        ({"label_smoothing": 0.5}, r"label_smoothing must be in \[0, 0\.5\)"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing has no meaning for loss='ipo'"),
        ({"loss": "apo_zero", "margin": 0.1}, "margin has no meaning for loss='apo_zero'"),
    ):
        with pytest.raises(ConfigError, match=message):
            dpo(**options)
    with pytest.raises(InputError, match="cannot run on one sequence at a time"):
        dpo().looped()(logits, batch)
    shard = shard_context(batch, 0, 2)
    with pytest.raises(InputError, match="needs whole sequences, but this is a batch shard"):
        dpo()(shard.take(logits), shard)
    bare = replace(batch, extras={"group": batch.extras["group"]}, aligned={"group": "sequence"})
    with pytest.raises(InputError, match="no extra 'chosen'"):
        reward_model()(logits[..., :1], bare)
    kept: dict[str, Any] = {name: batch.extras[name] for name in ("group", "chosen")}
    without = replace(batch, extras=kept, aligned=dict.fromkeys(kept, "sequence"))
    with pytest.raises(InputError, match="or set reference=False"):
        dpo()(logits, without)
    with pytest.raises(InputError, match=r"\(7,\) numbers per token; expected one"):
        value_loss()(logits, batch)
