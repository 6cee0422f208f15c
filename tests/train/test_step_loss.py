"""StepLoss: known and deferred give the exact gradient; per_micro_batch reports its deviation."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Packed, Padded, Recipe, Topology
from evenstep.train import Collective, Constant, FixedLength, SequenceMean, TokenMean
from tests.examples import examples
from tests.internals import Bundle, Gradients, LossValues, Mode, StepLoss
from tests.train.running import Counting
from tests.train.steps import (
    LIMIT,
    NORMALIZATIONS,
    Work,
    by_definition,
    distance,
    gradient_of,
    make_work,
    model_of,
    run_step,
    works,
)

TOKENS = {"nll": (TokenMean(), 1.0)}


def check(name: str, work: Work, mode: Mode, **options: Any) -> None:
    model = model_of()
    loss = by_definition(name, model, work)
    loss.backward()
    expected = gradient_of(model)
    model.zero_grad()
    step_loss = StepLoss(
        losses={"nll": (NORMALIZATIONS[name], 1.0)},
        mode=mode,
        averaged_over=work.plan.num_ranks,
        totals=work.totals,
        **options,
    )
    for result, gradient in run_step(step_loss, model, work):
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-12, abs=1e-15)
        assert result.reported == result.loss
        assert distance(gradient, expected) < 1e-12
        if name != "constant":
            assert result.empty == (not result.denominators.popitem()[1])


@pytest.mark.parametrize("name", NORMALIZATIONS)
@examples(25)
@given(work=works(), constant=st.sampled_from([1.0, 8.0, 24.0]))
def test_any_plan_has_the_gradient_of_the_definition(
    name: str, work: Work, constant: float
) -> None:
    check(name, work, "known")
    check(name, work, "deferred", constant=constant)


def test_a_split_sample_counts_once_on_ranks_that_each_hold_a_segment() -> None:
    recipe = Recipe(layout=Packed(max_tokens=LIMIT), topology=Topology(dp=3), overflow="split")
    work = make_work([3 * LIMIT - 1], recipe, masked=0.0)
    assert [len(work.plan[0, rank][0].segments) for rank in range(3)] == [1, 1, 1]
    for name in NORMALIZATIONS:
        check(name, work, "deferred")
        check(name, work, "known")


# By hand ----------------------------------------------------------------------------------------


def run_by_hand(
    mode: Mode, parts: list[tuple[float, float]], **options: Any
) -> tuple[LossValues, float]:
    """Micro-batches given as (sum of losses, labels); the parameter is 1, so gradients are sums."""
    totals = {"loss_tokens": sum(labels for _, labels in parts)}
    step_loss = StepLoss(losses=TOKENS, mode=mode, totals=totals, **options)
    x = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    gradients, bundles = Gradients([x]), []
    for value, labels in parts:
        sums, amounts = {"nll": value * x}, {"loss_tokens": torch.tensor(labels)}
        scales = step_loss.scales(reduced=amounts, micro_batches=len(parts))
        gradients.backward(step_loss.objectives(sums, scales))
        bundles.append(step_loss.bundle(sums, amounts, scales))
    result = step_loss.finish(Bundle.merge(bundles))
    gradients.combine(result.factors)
    return result, float(x.grad)


@pytest.mark.parametrize("mode", ["known", "deferred"])
def test_sums_of_6_and_4_over_3_and_1_labels_make_2_and_a_half(mode: Mode) -> None:
    result, gradient = run_by_hand(mode, [(6.0, 3.0), (4.0, 1.0)])
    assert (result.loss, result.reported, gradient) == (2.5, 2.5, 2.5)


def test_per_micro_batch_makes_3_of_them_and_reports_it() -> None:
    result, gradient = run_by_hand("per_micro_batch", [(6.0, 3.0), (4.0, 1.0)])
    assert (result.loss, result.reported, gradient) == (2.5, 3.0, 3.0)


def test_per_micro_batch_is_exact_where_all_have_as_many_labels() -> None:
    result, gradient = run_by_hand("per_micro_batch", [(6.0, 2.0), (4.0, 2.0)])
    assert (result.loss, result.reported, gradient) == (2.5, 2.5, 2.5)


def test_divisors_that_differ_between_micro_batches_cannot_be_undone_at_the_end() -> None:
    # Deferred with each micro-batch's own size for c: sizes 4 and 2, 4 labels in all.
    local = (6.0 / 4 + 4.0 / 2) * (4 + 2) / 4
    assert local == 5.25
    assert run_by_hand("deferred", [(6.0, 3.0), (4.0, 1.0)], constant=6.0)[0].loss == 2.5


@pytest.mark.parametrize("mode", ["known", "deferred", "per_micro_batch"])
def test_micro_batches_without_labels_add_nothing(mode: Mode) -> None:
    result, gradient = run_by_hand(mode, [(0.0, 0.0), (5.0, 2.0), (0.0, 0.0)])
    assert result.loss == 2.5
    assert not result.empty
    if mode != "per_micro_batch":
        assert gradient == 2.5


@pytest.mark.parametrize("mode", ["known", "deferred", "per_micro_batch"])
def test_a_step_without_loss_tokens_is_empty_and_has_exact_zeros(mode: Mode) -> None:
    result, gradient = run_by_hand(mode, [(0.0, 0.0), (0.0, 0.0)])
    assert (result.loss, result.reported, result.empty, gradient) == (0.0, 0.0, True, 0.0)


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_ranks_without_labels_or_samples_take_part(name: str) -> None:
    recipe = Recipe(layout=Padded(max_tokens=LIMIT), topology=Topology(dp=4))
    check(name, make_work([5, 3], recipe, masked=0.0), "deferred")
    check(name, make_work([5, 3], recipe, masked=0.0), "known")
    nothing = make_work([5, 3], recipe, masked=1.0)
    for mode in ("known", "deferred"):
        check(name, nothing, mode)


def test_per_micro_batch_on_ranks_differs_by_what_it_reports() -> None:
    recipe = Recipe(layout=Packed(max_tokens=LIMIT), topology=Topology(dp=2))
    work = make_work([8, 7, 3, 2, 2, 8, 1, 1], recipe, masked=0.2)
    model = model_of()
    step_loss = StepLoss(losses=TOKENS, mode="per_micro_batch", averaged_over=2)
    first, second = run_step(step_loss, model, work)
    exact = by_definition("token mean", model, work)
    assert first[0].loss == pytest.approx(float(exact.detach()), rel=1e-12)
    assert first[0].reported == second[0].reported != first[0].loss
    # The gradient is that of the reported loss: a mean over positions of their means.
    positions = list(zip(work.batches(0), work.batches(1), strict=True))
    means = []
    for pair in positions:
        logits = [model(batch).flatten(0, 1) for batch in pair]
        labels = [batch.labels.flatten() for batch in pair]
        loss = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels))
        means.append(loss)
    reported = torch.stack(means).mean()
    assert first[0].reported == pytest.approx(float(reported.detach()), rel=1e-12)
    reported.backward()
    assert distance(first[1], gradient_of(model)) < 1e-12


# Several losses ---------------------------------------------------------------------------------

TWO = {"nll": (TokenMean(), 1.0), "even": (SequenceMean(), 0.25), "same": (TokenMean(), 0.5)}
WITH_CONSTANT = {"nll": (TokenMean(), 1.0), "aux": (Constant(7.0), 2.0)}


@pytest.mark.parametrize("losses", [TWO, WITH_CONSTANT])
@pytest.mark.parametrize("mode", ["known", "separate"])
@examples(10)
@given(work=works())
def test_losses_of_several_denominators_add_up(losses: Any, mode: str, work: Work) -> None:
    names = {"nll": "token mean", "same": "token mean", "even": "sequence mean", "aux": "constant"}
    model = model_of()
    parts = {name: by_definition(names[name], model, work) for name in losses}
    total = sum((weight * parts[name] for name, (_, weight) in losses.items()), torch.zeros(()))
    total.backward()
    expected = gradient_of(model)
    model.zero_grad()
    separate = mode == "separate"
    step_loss = StepLoss(
        losses=losses,
        mode="deferred" if separate else "known",
        averaged_over=work.plan.num_ranks,
        constant=4.0 if separate else 1.0,
        totals=work.totals,
    )
    for result, gradient in run_step(step_loss, model, work):
        assert distance(gradient, expected) < 1e-12
        assert result.loss == pytest.approx(float(total.detach()), rel=1e-12, abs=1e-15)
        for name, part in parts.items():
            assert result.losses[name] == pytest.approx(float(part.detach()), rel=1e-12, abs=1e-15)


def test_losses_of_one_normalization_share_a_denominator() -> None:
    step_loss = StepLoss(losses={"a": (TokenMean(), 1.0), "b": (TokenMean(), 3.0)})
    assert list(step_loss.denominators) == ["loss_tokens"]


@pytest.mark.parametrize("other", [SequenceMean(), Constant(7.0), FixedLength(4.0)])
def test_only_several_denominators_in_deferred_mode_are_separate(other: Any) -> None:
    losses = {"nll": (TokenMean(), 1.0), "aux": (other, 0.1)}
    assert StepLoss(losses=losses).separate
    totals = {"loss_tokens": 9, "sequences": 3, "samples": 4}
    assert not StepLoss(losses=losses, mode="known", totals=totals).separate
    assert not StepLoss(losses=TOKENS).separate


@pytest.mark.parametrize("mode", ["known", "deferred"])
def test_a_step_needs_one_all_reduce_whatever_it_reduces(mode: Mode) -> None:
    recipe = Recipe(layout=Packed(max_tokens=LIMIT), topology=Topology(dp=2))
    work = make_work([8, 7, 3, 8, 8, 5], recipe)
    met: list[Counting] = []

    def counting(ranks: Collective) -> Collective:
        met.append(Counting(ranks))
        return met[-1]

    step_loss = StepLoss(losses=TOKENS, mode=mode, averaged_over=2, totals=work.totals)
    (result, _), _ = run_step(step_loss, model_of(), work, counting)
    assert [each.calls for each in met] == [[64], [64]]
    assert float(result.metrics["nll"].value) == pytest.approx(result.loss, rel=1e-12)
