"""Runner: the same gradient for every plan of the same samples."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Packed, Padded, Step
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Collator, Metric, Sums, cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Collective, Constant, FixedLength, GroupMean, Loss, Runner, SequenceMean
from tests.examples import examples
from tests.internals import Mode
from tests.train.running import (
    LAYOUTS,
    Plan,
    Ran,
    expected,
    is_without_loss,
    parameters_of,
    plans,
    run_plan,
    samples_of,
    steps_of,
    worlds,
)
from tests.train.steps import (
    COLLATOR,
    LIMIT,
    NORMALIZATIONS,
    Gradient,
    Work,
    distance,
    gradient_of,
    model_of,
)


def check(name: str, plan: Plan, work: Work, mode: Mode | None, known: bool = False) -> list[Ran]:
    """Every rank has the loss and the gradient of the definition. No loss tokens are an error."""
    model = model_of()
    steps = steps_of(plan, work, known)
    if is_without_loss(work):
        with pytest.raises(InputError, match=r"no token of .* counts in the loss, on any rank"):
            run_plan(plan, steps, model, normalization=NORMALIZATIONS[name], mode=mode)
        return []
    loss, gradient = expected(name, model, work, steps)
    ran = run_plan(plan, steps, model, normalization=NORMALIZATIONS[name], mode=mode)
    for each in ran:
        assert each.result.loss == pytest.approx(loss, rel=1e-12, abs=1e-15)
        assert each.result.deviation == 0.0
        assert distance(each.gradient, gradient) < 1e-12
    if name == "token mean":
        loss_tokens = work.totals["loss_tokens"]
        assert all(each.result.empty == (loss_tokens == 0) for each in ran)
    return ran


@pytest.mark.parametrize("name", NORMALIZATIONS)
@examples(10)
@given(plan=plans(), work=worlds(without_loss=True), known=st.booleans())
def test_any_plan_of_the_same_samples_has_the_gradient_of_the_definition(
    name: str, plan: Plan, work: Work, known: bool
) -> None:
    # The definition does not depend on the plan, so any two plans agree.
    check(name, plan, work, None, known)


@pytest.mark.parametrize("name", NORMALIZATIONS)
@examples(6)
@given(plan=plans(split=True), work=worlds(longest=2 * LIMIT + 3), known=st.booleans())
def test_split_samples_count_as_whole_samples(
    name: str, plan: Plan, work: Work, known: bool
) -> None:
    check(name, replace(plan, split=True), work, None, known)


@examples(12)
@given(first=plans(), second=plans(), work=worlds(), known=st.booleans())
def test_two_plans_agree_in_single_precision(
    first: Plan, second: Plan, work: Work, known: bool
) -> None:
    model = model_of().float()
    one, other = (
        run_plan(plan, steps_of(plan, work, known), model)[0].gradient for plan in (first, second)
    )
    assert one.flat.dtype == torch.float32
    assert distance(one, other) < 1e-6


@pytest.mark.parametrize("way", ["batches", "planned"])
@pytest.mark.parametrize("count", range(1, 9))
def test_one_to_eight_micro_batches_on_one_to_four_ranks_agree(way: Any, count: int) -> None:
    for dp in range(1, 5):
        work = samples_of([3, 5, 2, 8, 7, 1, 4, 6] * 4, seed=count)
        kept = replace(work, samples=work.samples[: dp * count])
        plan = Plan(way, Packed(samples=1), dp=dp)
        kept = samples_of([len(s["input_ids"]) for s in kept.samples], seed=count)
        ran = check("token mean", plan, kept, "deferred")
        assert [each.result.num_micro_batches for each in ran] == [count] * dp


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("known", [True, False])
def test_context_parallel_ranks_share_sequences(layout: Any, known: bool) -> None:
    work = samples_of([8, 7, 1, 3, 8, 2, 5], seed=3)
    for name in ("token mean", "sequence mean", "sample weights"):
        check(name, Plan("planned", layout, dp=2, cp=2), work, None, known)


def test_shuffling_deals_samples_to_other_ranks_and_the_gradient_stays() -> None:
    work = samples_of([8, 7, 1, 3, 8, 2, 5, 5], seed=4)
    seen = set()
    for seed in range(4):
        plan = Plan("planned", Packed(max_tokens=LIMIT), dp=2, seed=seed)
        first = steps_of(plan, work)[0]
        assert isinstance(first, Step)
        seen.add(tuple(tuple(micro.segments.sample.tolist()) for micro in first.micro_batches))
        check("sequence mean", plan, work, None)
    assert len(seen) > 1


# No loss tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_a_step_without_loss_tokens_is_an_error_that_leaves_gradients(
    name: str, known: bool
) -> None:
    work = samples_of([8, 3, 5], masked=1.0)
    for dp in (1, 4):  # four ranks have at least one empty micro-batch
        plan = Plan("planned", Packed(max_tokens=LIMIT), dp=dp)
        assert check(name, plan, work, None, known) == []
    model = model_of()
    before = [torch.full_like(each, 2.0) for each in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient.clone()
    runner = Runner(
        model=model,
        loss=cross_entropy(),
        normalization=NORMALIZATIONS[name],
        collate=COLLATOR,
    )
    (step,) = steps_of(Plan("planned", Packed(max_tokens=LIMIT)), work, known)
    with pytest.raises(InputError, match=r"'loss_mask' is 0 for every token|Labels are -100"):
        runner.run(step)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("known", [True, False])
def test_samples_of_one_token_have_nothing_to_predict(known: bool) -> None:
    work = samples_of([1, 1, 1])
    for each in check("token mean", Plan("planned", Packed(max_tokens=2)), work, None, known):
        assert each.result.empty
        assert not each.gradient.flat.any()


def test_micro_batches_and_ranks_without_labels_take_part() -> None:
    work = samples_of([8, 8, 8, 8], masked=0.0)
    for number in (0, 1, 3):
        work.samples[number]["loss_mask"][:] = False
    for sample in work.samples:
        sample["group"], sample["group_tokens"] = 0, 7
    for name in NORMALIZATIONS:
        for dp in (1, 2, 4):
            for known in (True, False):
                plan = Plan("planned", Packed(max_tokens=LIMIT), dp=dp)
                ran = check(name, plan, work, None, known)
                assert not ran[0].result.empty


@pytest.mark.parametrize("way", ["batches", "list on one rank alone"])
def test_a_rank_or_a_step_without_any_micro_batch_runs_an_empty_one(way: str) -> None:
    work = samples_of([5, 3], masked=0.0)
    plan = Plan("batches", Padded(max_tokens=LIMIT), dp=2)
    full = steps_of(replace(plan, dp=1), work)[0]
    steps: list[Any] = [full, []] if way != "batches" else [[], []]
    ran = run_plan(plan, steps)
    assert [each.result.empty for each in ran] == [way == "batches"] * 2
    if way != "batches":
        assert distance(ran[1].gradient, expected("token mean", model_of(), work, [full])[1]) < 1e-9


def test_ranks_with_different_budgets_are_an_error() -> None:
    work = samples_of([5, 3], masked=0.0)
    plan = Plan("planned", Packed(max_tokens=LIMIT), dp=2)
    steps = steps_of(plan, work)
    with pytest.raises(InputError, match="constants, from 1 to 8"):
        run_plan(plan, [steps[0], []])


# Several losses -------------------------------------------------------------------------------


def entropy(outputs: Tensor, batch: Any) -> Tensor:
    """The sum of the entropies of the predictions, a loss that does not use labels."""
    log_probs = outputs.log_softmax(-1)
    return ((log_probs.exp() * log_probs).sum(-1) * batch.loss_weights).sum()


@examples(12)
@given(plan=plans(), work=worlds(), known=st.booleans())
def test_several_losses_share_one_denominator_and_one_bundle(
    plan: Plan, work: Work, known: bool
) -> None:
    losses = {
        "nll": Loss(function=cross_entropy()),
        "entropy": Loss(function=entropy, weight=0.25),
    }
    model = model_of()
    steps = steps_of(plan, work, known)
    ran = run_plan(plan, steps, model, losses)
    alone = {name: run_plan(plan, steps, model, loss.function)[0] for name, loss in losses.items()}
    gradient = alone["nll"].gradient + 0.25 * alone["entropy"].gradient
    for each in ran:
        assert distance(each.gradient, gradient) < 1e-12
        assert each.result.losses == pytest.approx(
            {name: one.result.loss for name, one in alone.items()}, rel=1e-12, abs=1e-15
        )
        total = alone["nll"].result.loss + 0.25 * alone["entropy"].result.loss
        assert each.result.loss == pytest.approx(total, rel=1e-12, abs=1e-15)
    loss, _ = expected("token mean", model, work, steps)
    assert alone["nll"].result.loss == pytest.approx(loss, rel=1e-12, abs=1e-15)


def test_losses_of_their_own_denominators_work_where_all_are_known() -> None:
    work = samples_of([8, 7, 1, 3, 8, 2, 5])
    losses = {
        "nll": Loss(function=cross_entropy()),
        "even": Loss(function=cross_entropy(), normalization=SequenceMean(), weight=0.5),
        "z": Loss(function=cross_entropy(), normalization=Constant(7.0), weight=2.0),
    }
    names = {"nll": "token mean", "even": "sequence mean", "z": "constant"}
    plan = Plan("planned", Packed(max_tokens=LIMIT), dp=2)
    steps, model = steps_of(plan, work, known=True), model_of()
    parts = {name: expected(names[name], model, work, steps) for name in losses}
    for each in run_plan(plan, steps, model, losses):
        gradient = sum(losses[name].weight * part[1] for name, part in parts.items())
        assert isinstance(gradient, Gradient)
        assert distance(each.gradient, gradient) < 1e-12


# All-reduces ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("dp", [2, 3])
def test_deferred_steps_need_one_all_reduce_besides_gradients_and_known_ones_none(
    dp: int, cp: int
) -> None:
    work = samples_of([8, 7, 3, 8, 8, 5, 2, 8])
    plan = Plan("planned", Packed(max_tokens=LIMIT), dp=dp, cp=cp)
    model = model_of()
    # One more entry per parameter: whether any rank used it.
    gradients = parameters_of(model) + len(list(model.parameters()))
    for known, mode, more in [
        (False, None, 1),
        (True, "deferred", 1),
        (True, None, 0),
        (True, "known", 0),
        (False, "per_micro_batch", None),
    ]:
        for each in run_plan(plan, steps_of(plan, work, known), model, mode=mode):
            compared, *calls = each.calls  # the fingerprints of a runner's first step
            assert compared == dp * cp
            others = [size for size in calls if size != gradients]
            assert len(calls) - len(others) == 1
            count = each.result.num_micro_batches + 1 if more is None else more
            assert each.result.num_micro_batches > 1
            assert len(others) == count


@pytest.mark.parametrize("name", ["constant", "fixed length"])
def test_constant_steps_reduce_their_numbers_if_the_plan_knows_no_loss_tokens(name: str) -> None:
    work = samples_of([8, 7, 3, 8, 8, 5, 2, 8], masked=0.0)
    plan, model = Plan("planned", Packed(max_tokens=LIMIT), dp=2), model_of()
    gradients = parameters_of(model) + len(list(model.parameters()))
    for known in (True, False):  # the plan knows loss tokens, or it does not
        steps: list[Any] = list(steps_of(plan, work, known))
        steps = [replace(step, totals={**step.totals, "samples": 8}) for step in steps]
        for each in run_plan(plan, steps, model, normalization=NORMALIZATIONS[name]):
            compared, summed, *numbers = each.calls
            assert (compared, summed) == (plan.dp, gradients)
            assert len(numbers) == (0 if known else 1)


def test_known_steps_have_the_values_of_all_ranks_after_reduce() -> None:
    work = samples_of([8, 7, 3, 8])
    plan = Plan("planned", Packed(max_tokens=LIMIT), dp=2)
    steps, model = steps_of(plan, work, known=True), model_of()

    def rank(ranks: Collective) -> float:
        own = copy.deepcopy(model)
        runner = Runner(model=own, loss=cross_entropy(), collective=ranks, collate=COLLATOR)
        result = runner.run(steps[ranks.rank])
        assert not result.reduced
        for name in ("loss", "losses", "empty", "metrics", "padding", "mfu", "tokens_per_second"):
            with pytest.raises(InputError, match=r"Call result.reduce\(collective\)"):
                getattr(result, name)
        with pytest.raises(InputError, match="not reduced over ranks"):
            result.to_dict()
        reduced = result.reduce(ranks)
        assert reduced.reduce(ranks) is reduced  # without another all-reduce
        return reduced.loss

    loss, _ = expected("token mean", model, work, steps)
    assert run_ranks(2, rank) == pytest.approx([loss, loss], rel=1e-12)


# What stays unchanged -------------------------------------------------------------------------


def test_frozen_parameters_stay_without_gradients_on_ranks_too() -> None:
    work = samples_of([8, 7, 3, 8])
    plan = Plan("batches", Packed(max_tokens=LIMIT), dp=2)
    model = model_of()
    model.embed.weight.requires_grad_(False)
    steps = steps_of(plan, work)

    def rank(ranks: Collective) -> bool:
        own = copy.deepcopy(model)
        Runner(model=own, loss=cross_entropy(), collective=ranks).run(steps[ranks.rank])
        return own.embed.weight.grad is None

    assert run_ranks(2, rank) == [True, True]


def test_metrics_of_losses_are_those_of_all_ranks() -> None:
    work = samples_of([8, 7, 3, 8, 1])
    plan = Plan("batches", Packed(max_tokens=LIMIT), dp=2)
    ran = run_plan(plan, steps_of(plan, work))
    for each in ran:
        metrics = each.result.metrics
        assert metrics["loss_tokens"] == work.totals["loss_tokens"]
        assert metrics["nll"] == pytest.approx(each.result.loss, rel=1e-12)
    named = {name: Loss(function=cross_entropy()) for name in ("a", "b")}
    metrics = run_plan(plan, steps_of(plan, work), loss=named)[0].result.metrics
    assert set(metrics) == {f"{n}/{m}" for n in "ab" for m in ("nll", "loss_tokens")}


def test_the_same_runner_runs_step_after_step() -> None:
    work = samples_of([8, 7, 3, 8, 1, 2, 8, 8])
    model = model_of()
    runner = Runner(model=model, loss=cross_entropy(), collate=COLLATOR)
    plan = Plan("planned", Packed(max_tokens=LIMIT))
    for _ in range(2):
        model.zero_grad()
        runner.run(steps_of(plan, work)[0])
        gradient = gradient_of(model)
        assert (
            distance(gradient, expected("token mean", model_of(), work, steps_of(plan, work))[1])
            < 1e-12
        )


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dp", [1, 2])
def test_gradients_of_earlier_steps_are_added_to_and_nothing_else(dp: int, known: bool) -> None:
    work, model = samples_of([8, 3, 5, 4, 7, 2]), model_of()
    steps = steps_of(Plan("planned", Packed(max_tokens=LIMIT), dp=dp), work, known)
    _, gradient = expected("token mean", model, work, steps)

    def rank(ranks: Collective) -> tuple[Gradient, bool]:
        own = copy.deepcopy(model)
        runner = Runner(model=own, loss=cross_entropy(), collective=ranks, collate=COLLATOR)
        for parameter in own.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        tensors = [parameter.grad for parameter in own.parameters()]
        runner.run(steps[ranks.rank])
        runner.run(steps[ranks.rank])
        same = all(p.grad is held for p, held in zip(own.parameters(), tensors, strict=True))
        return gradient_of(own), same

    for found, same in run_ranks(dp, rank):
        assert distance(found, 2 * gradient + 0.5) < 1e-12
        assert same


def test_a_step_that_fails_leaves_the_gradients_that_were_there() -> None:
    (step,) = steps_of(Plan("planned", Packed(max_tokens=LIMIT)), samples_of([8, 3, 5]))
    calls = iter(range(9))

    def forward(model: Any, batch: Any) -> Tensor:
        if next(calls):
            raise ValueError("what is this")
        return model(batch)

    for before in (None, 0.5):
        model, calls = model_of(), iter(range(9))
        for parameter in model.parameters():
            parameter.grad = None if before is None else torch.full_like(parameter, before)
        runner = Runner(model=model, loss=cross_entropy(), collate=COLLATOR, forward=forward)
        with pytest.raises(ValueError, match="what is this"):
            runner.run(step)
        for parameter in model.parameters():
            assert (parameter.grad is None) == (before is None)
            assert before is None or bool((parameter.grad == before).all())


@pytest.mark.parametrize("options", [{"mode": "per_micro_batch"}, {"on_memory": "split"}], ids=str)
def test_ranks_that_synchronise_at_every_micro_batch_need_as_many(options: dict[str, Any]) -> None:
    steps = steps_of(Plan("planned", Packed(max_tokens=LIMIT), dp=2), samples_of([8, 7, 8, 8]))
    first = steps[0]
    assert isinstance(first, Step)
    assert len(first) == 2

    def rank(ranks: Collective) -> None:
        step = replace(first, micro_batches=first.micro_batches[: ranks.rank + 1])
        runner = Runner(
            model=model_of(), loss=cross_entropy(), collective=ranks, collate=COLLATOR, **options
        )
        with pytest.raises(
            InputError, match="ranks have from 1 to 2 micro-batches, but synchronise"
        ):
            runner.run(step)

    run_ranks(2, rank)


def test_a_group_that_is_counted_in_two_micro_batches_is_refused() -> None:
    work = samples_of([8, 8, 8], masked=0.0)
    for number, sample in enumerate(work.samples):
        sample["group"] = number // 2
        del sample["group_tokens"], sample["weight"], sample["token_weight"]
    collate = Collator(extras={"group": COLLATOR.extras["group"]})
    (step,) = steps_of(Plan("planned", Packed(max_tokens=LIMIT)), work)
    runner = Runner(
        model=model_of(), loss=cross_entropy(), collate=collate, normalization=GroupMean()
    )
    with pytest.raises(InputError, match="group 0 is in two micro-batches of this rank"):
        runner.run(step)
    with pytest.raises(ConfigError, match="'split' may divide a group between two micro-batches"):
        replace(runner, on_memory="split").run(step)


def test_a_metric_called_loss_does_not_hide_the_loss() -> None:
    (step,) = steps_of(Plan("planned", Packed(max_tokens=LIMIT)), samples_of([8, 3, 5]))

    def loss(outputs: Tensor, batch: Any) -> Sums:
        return replace(
            cross_entropy()(outputs, batch), metrics={"loss": Metric.sum(torch.tensor(99.0))}
        )

    result = Runner(model=model_of(), loss=loss, collate=COLLATOR).run(step)
    assert result.to_dict()["loss"] == result.loss != 99.0


def test_a_skipped_sample_is_told_where_it_was_counted_before_the_step() -> None:
    work = samples_of([8, 3, 5], masked=0.0)
    (step,) = steps_of(Plan("planned", Packed(max_tokens=LIMIT)), work, known=True)
    assert isinstance(step, Step)
    samples: dict[int, Any] = dict(enumerate(work.samples))
    samples[1] = None  # a skipped sample
    step = replace(step, samples=samples)
    runner = Runner(
        model=model_of(), loss=cross_entropy(), collate=COLLATOR, normalization=FixedLength(5.0)
    )
    with pytest.raises(InputError, match="sample 1 was skipped, but the denominator 'fixed_length"):
        runner.run(step)
    result = replace(runner, mode="deferred").run(step)
    assert result.numbers is not None
    assert result.numbers.denominators == {"fixed_length(5.0)": 10.0}
    assert replace(runner, normalization=Constant(7.0)).run(step).tokens == 13
