"""Every loss is its definition, however a step is cut into micro-batches and ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from evenstep import Packed, Padded, PlannedStream, Recipe, make_plan
from evenstep.data import InMemory
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Collator, cross_entropy, dpo, load_balancing, reward_model
from evenstep.train import AllTokens, Constant, Loss, Runner, SequenceMean, TokenMean
from tests.examples import examples
from tests.internals import Layout, Mode
from tests.train.loss_cases import (
    CASES,
    Table,
    expected_of,
    narrowed,
    run_case,
    samples_of,
    tokens_of,
)

LAYOUTS: list[Layout] = [
    Packed(max_tokens=64, pad_to=64),
    Packed(max_tokens=12),
    Padded(max_tokens=24, pad_to=6),
    Padded(max_tokens=24),
]


@pytest.mark.parametrize("name", CASES)
@examples(6)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    dp=st.integers(1, 3),
    masked=st.sampled_from([0.0, 0.3, 0.7]),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.bfloat16, torch.float16]),
)
def test_loss_and_gradient_do_not_depend_on_the_cut(
    name: str, lengths: list[int], seed: int, dp: int, masked: float, dtype: torch.dtype
) -> None:
    samples = samples_of([each for n in lengths for each in (n, 7 - n)], seed, masked)
    assume(any(map(tokens_of, samples)))
    case = narrowed(CASES[name], samples, dtype)
    loss, gradient = expected_of(case, samples)
    metrics: dict[str, float] | None = None
    exact = 1e-9 if dtype == torch.float64 else 2e-6
    for layout in LAYOUTS:
        for found, measured, own in run_case(case, samples, layout, dp):
            assert found == pytest.approx(loss, rel=exact, abs=exact / 1000)
            torch.testing.assert_close(own, gradient, rtol=exact, atol=exact / 100)
            metrics = metrics or measured
            assert measured == pytest.approx(metrics, rel=exact, abs=exact / 1000, nan_ok=True)


@pytest.mark.parametrize("name", CASES)
@examples(6)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    dp=st.integers(1, 2),
)
def test_loss_and_gradient_do_not_depend_on_what_samples_share(
    name: str, lengths: list[int], seed: int, dp: int
) -> None:
    samples = samples_of([each for n in lengths for each in (n, 11 - n)], seed)
    for sample in samples:  # few tokens, so that most samples share some
        sample["input_ids"] //= 6
    loss, gradient = expected_of(CASES[name], samples)
    whole, shared = (run_case(CASES[name], samples, LAYOUTS[1], dp, share=s) for s in (False, True))
    for (_, metrics, _), (found, measured, own) in zip(whole, shared, strict=True):
        assert found == pytest.approx(loss, rel=1e-9, abs=1e-12)
        torch.testing.assert_close(own, gradient, rtol=1e-9, atol=1e-11)
        assert measured == pytest.approx(metrics, rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("name", ["value", "forward_kl bucket", "balance of a step"])
def test_losses_of_tokens_have_a_value_for_split_samples(name: str) -> None:
    samples = samples_of([9, 3, 4, 11])
    runs = [
        run
        for layout in (Packed(max_tokens=5), Packed(rows=4, pad_to=5))
        for dp in (1, 2)
        for run in run_case(CASES[name], samples, layout, dp, "split")
    ]
    assert runs[0][0] > 0
    for loss, _, gradient in runs[1:]:
        assert loss == pytest.approx(runs[0][0], rel=1e-9)
        torch.testing.assert_close(gradient, runs[0][2], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["dpo", "reward model", "balance of sequences"])
def test_losses_of_sequences_refuse_split_samples(name: str) -> None:
    samples = samples_of([9, 3])
    with pytest.raises(InputError, match="sample 0 was split"):
        run_case(CASES[name], samples, Packed(max_tokens=6), 1, "split")


# Pairs ------------------------------------------------------------------------------------------


def test_a_pair_loss_with_a_mean_over_tokens_is_refused() -> None:
    for wrong in (TokenMean(), Constant(8.0)):
        with pytest.raises(ConfigError, match=r"Set normalization=GroupMean\(\)"):
            Runner(model=Table(7), loss=dpo(), normalization=wrong)
    with pytest.raises(ConfigError, match="the loss 'score' is of pairs"):
        Runner(model=Table(1), loss={"score": Loss(function=reward_model())})
    Runner(model=Table(7), loss=dpo(), normalization=SequenceMean())
    Runner(model=Table(7), loss=cross_entropy())


def test_a_sequence_without_its_partner_is_refused() -> None:
    samples = samples_of([3, 3, 4, 4])
    samples[1]["group"] = 7
    with pytest.raises(InputError, match=r"expected one of each\. Give each pair its own `group`"):
        run_case(CASES["dpo"], samples, Packed(max_tokens=64), 1)
    samples[1]["group"], samples[1]["chosen"] = 0, samples[0]["chosen"]
    with pytest.raises(InputError, match="group 0 has"):
        run_case(CASES["reward model"], samples, Packed(max_tokens=64), 1)


# Experts ----------------------------------------------------------------------------------------


def test_even_use_of_experts_has_a_loss_of_one_and_its_denominator_is_known() -> None:
    samples = [{"input_ids": sample["input_ids"]} for sample in samples_of([5, 6, 1])]
    even = load_balancing(top_k=2, over="step", frequencies=lambda: torch.full((5,), 0.2))
    step = next(iter(PlannedStream(InMemory(samples), Recipe(layout=Packed(max_tokens=8)))))
    modes: tuple[Mode | None, ...] = (None, "deferred")
    for mode in modes:
        runner = Runner(model=Table(2, 5), loss=even, normalization=AllTokens(), mode=mode)
        result = runner.run(step)
        assert result.loss == pytest.approx(1.0)
        assert result.numbers is not None
        assert result.numbers.denominators == {"tokens": 12.0}
    assert AllTokens().known(step.totals) == 12
    assert AllTokens().known({"tokens": 12}) is None  # samples may be skipped


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 4), r"have shape \(5,\), but the model has 2 layers of 4 experts"),
        ((2, 1), "at least top_k=2 experts"),
        ((9,), r"shape \(9,\) per token; expected \(layers, experts\)"),
    ],
)
def test_router_logits_of_another_shape_are_refused(shape: tuple[int, ...], message: str) -> None:
    loss = load_balancing(top_k=2, over="step", frequencies=torch.full((5,), 0.2))
    samples = [{"input_ids": [1, 2, 3]}]
    batch = Collator()(make_plan([3], Recipe(layout=Packed(max_tokens=8)))[0, 0][0], samples)
    with pytest.raises(InputError, match=message):
        loss(torch.zeros(1, 3, *shape), batch)


def test_a_loss_that_would_depend_on_the_cut_is_not_offered() -> None:
    with pytest.raises(ConfigError, match="a micro-batch does not hold the step"):
        load_balancing(top_k=2, over="step")
    with pytest.raises(ConfigError, match="takes no frequencies"):
        load_balancing(top_k=2, over="sequence", frequencies=torch.ones(5))
