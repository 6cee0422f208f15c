"""Loss values of a step by sample and by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Packed
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import PerSequence, cross_entropy
from evenstep.train import Loss, Runner, SequenceMean, run_step
from tests.examples import examples
from tests.train.running import Plan, plans, run_plan, samples_of, scores_alone, steps_of, worlds
from tests.train.steps import COLLATOR, LIMIT, Work, model_of


def nll_alone(model: Any, sample: Any) -> Tensor:
    """The value of each token of a sample that runs alone, 0 where it does not count."""
    counts = torch.as_tensor(sample["loss_mask"]).double()
    counts[0] = 0
    return -scores_alone(model, sample["input_ids"]) * counts


@examples(25)
@given(plan=plans(), work=worlds(), looped=st.booleans())
def test_values_are_those_of_each_sample_alone(plan: Plan, work: Work, looped: bool) -> None:
    plan, model = replace(plan, cp=1), model_of()
    loss = cross_entropy().looped() if looped else cross_entropy()
    ran = run_plan(plan, steps_of(plan, work), model, loss, keep="tokens")
    seen = []
    for each in ran:
        kept = each.result.kept
        assert kept is not None
        assert np.array_equal(kept.sample_ids, np.unique(kept.sample_ids))
        seen += kept.sample_ids.tolist()
        for at, number in enumerate(kept.sample_ids.tolist()):
            alone = nll_alone(model, work.samples[number])
            torch.testing.assert_close(kept.tokens["loss"][at], alone, rtol=1e-12, atol=1e-12)
            assert float(kept.samples["loss"][at]) == pytest.approx(float(alone.sum()), rel=1e-9)
    assert sorted(seen) == list(range(len(work.samples)))


@examples(15)
@given(plan=plans(split=True), work=worlds(longest=2 * LIMIT + 3))
def test_segments_of_split_samples_add_up_over_ranks(plan: Plan, work: Work) -> None:
    plan = replace(plan, cp=1, split=True)
    losses = {
        "nll": Loss(function=cross_entropy()),
        "even": Loss(function=cross_entropy(), normalization=SequenceMean()),
    }
    ran = run_plan(plan, steps_of(plan, work), loss=losses, keep="tokens")
    numbers = ran[0].result.numbers
    assert numbers is not None
    for name, normalization in (("nll", "loss_tokens"), ("even", "sequences")):
        over = numbers.denominators[normalization]
        kept = [each.result.kept for each in ran]
        total = sum(float(each.samples[name].sum()) for each in kept if each is not None)
        assert total == pytest.approx(numbers.losses[name] * over, rel=1e-9, abs=1e-12)
        tokens = [float(t.sum()) for each in kept if each is not None for t in each.tokens[name]]
        assert sum(tokens) == pytest.approx(total, rel=1e-9, abs=1e-12)


def test_values_per_sample_need_no_values_per_token() -> None:
    work = samples_of([8, 3, 5], masked=0.0)
    batches: Any = steps_of(Plan("batches", Packed(max_tokens=LIMIT)), work)[0]
    whole = PerSequence(lambda outputs, view: outputs.sum())
    result = run_step(batches, model_of(), whole, keep="samples")
    assert result.kept is not None
    assert result.kept.sample_ids.tolist() == [0, 1, 2]
    assert result.kept.tokens == {}
    with pytest.raises(InputError, match="keep='tokens' needs one value per token"):
        run_step(batches, model_of(), whole, keep="tokens")
    with pytest.raises(InputError, match="the loss 'loss' returned a scalar"):
        run_step(batches, model_of(), lambda outputs, batch: outputs.sum(), keep="samples")
    with pytest.raises(ConfigError, match="unknown keep 'all'"):
        Runner(model=model_of(), loss=whole, keep="all", collate=COLLATOR)  # type: ignore[arg-type]


def test_a_rank_without_samples_keeps_nothing() -> None:
    result = run_step([], model_of(), cross_entropy(), keep="tokens")
    assert result.kept is not None
    assert len(result.kept.sample_ids) == 0
    assert result.kept.samples["loss"].tolist() == []
    assert result.kept.tokens["loss"] == []
