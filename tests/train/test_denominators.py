"""Losses of several denominators, none of them known before the step."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Packed, Step
from evenstep.errors import ConfigError
from evenstep.tensors import cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Collective, Loss, Runner
from tests.examples import examples
from tests.internals import Mode
from tests.train.on_ranks import Small, run_fed
from tests.train.running import Plan, expected, plans, run_plan, samples_of, steps_of, worlds
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

MODES: list[Mode | None] = [None, "counted", "deferred"]


def losses_of(names: list[str]) -> dict[str, Loss]:
    """A loss for each normalization, of weights 1, 0.5, 0.25..."""
    return {
        name: Loss(function=cross_entropy(), normalization=NORMALIZATIONS[name], weight=2.0**-at)
        for at, name in enumerate(names)
    }


def by_definition(names: list[str], model: Any, work: Work, steps: Any) -> tuple[float, Gradient]:
    parts = [expected(name, model, work, steps) for name in names]
    loss = sum(2.0**-at * part[0] for at, part in enumerate(parts))
    gradient = sum(2.0**-at * part[1] for at, part in enumerate(parts))
    assert isinstance(gradient, Gradient)
    return loss, gradient


@pytest.mark.parametrize("mode", MODES)
@examples(8)
@given(
    plan=plans(),
    work=worlds(),
    names=st.lists(st.sampled_from(list(NORMALIZATIONS)), min_size=2, max_size=4, unique=True),
)
def test_any_number_of_denominators_is_exact_in_any_plan(
    mode: Mode | None, plan: Plan, work: Work, names: list[str]
) -> None:
    model, steps = model_of(), steps_of(plan, work)
    loss, gradient = by_definition(names, model, work, steps)
    for each in run_plan(plan, steps, model, losses_of(names), mode=mode):
        assert distance(each.gradient, gradient) < 1e-12
        assert each.result.loss == pytest.approx(loss, rel=1e-12, abs=1e-15)
        assert each.result.grad_norm == pytest.approx(gradient.norm(), rel=1e-9, abs=1e-15)


@examples(6)
@given(work=worlds(), most=st.integers(LIMIT, 2 * LIMIT), mode=st.sampled_from(MODES))
def test_micro_batches_may_be_split_on_the_way(work: Work, most: int, mode: Mode | None) -> None:
    names = ["token mean", "sequence mean"]
    steps = steps_of(Plan("planned", Packed(max_tokens=3 * LIMIT), dp=2), work)
    model = model_of()
    _, gradient = by_definition(names, model, work, steps)

    def rank(ranks: Collective) -> Tensor:
        own = Small(copy.deepcopy(model), most, "backward")
        runner = Runner(
            model=own, loss=losses_of(names), collective=ranks, collate=COLLATOR,
            on_memory="split", mode=mode,
        )  # fmt: skip
        runner.run(steps[ranks.rank])
        return gradient_of(own)

    for found in run_ranks(2, rank):
        assert distance(found, gradient) < 1e-12


def test_a_fed_step_has_one_backward_per_denominator() -> None:
    names = ["token mean", "sequence mean", "constant"]
    work, model = samples_of([8, 7, 1, 3, 8, 2]), model_of()
    plan = Plan("planned", Packed(max_tokens=LIMIT), dp=2)
    _, gradient = by_definition(names, model, work, steps_of(plan, work))

    def rank(ranks: Collective) -> tuple[Tensor, int]:
        own, backwards = copy.deepcopy(model), []
        own.head.weight.register_hook(lambda grad: backwards.append(1))
        share = [[0, 1, 2, 3, 4], [5]][ranks.rank]
        result = run_fed(own, ranks, work, share, loss=losses_of(names))
        assert len(backwards) == 3 * result.num_micro_batches
        return gradient_of(own), result.num_micro_batches

    for found, _ in run_ranks(2, rank):
        assert distance(found, gradient) < 1e-12
    with pytest.raises(ConfigError, match="mode='counted' needs all micro-batches"):
        run_ranks(1, lambda ranks: run_fed(model, ranks, work, [0], mode="counted"))


def test_samples_may_be_skipped_when_the_rest_is_counted() -> None:
    work = samples_of([8, 3, 5], masked=0.0)
    (step,) = steps_of(Plan("planned", Packed(max_tokens=LIMIT)), work)
    assert isinstance(step, Step)
    samples: dict[int, Any] = dict(enumerate(work.samples))
    samples[1] = None
    runner = Runner(model=model_of(), loss=cross_entropy(), collate=COLLATOR, mode="counted")
    result = runner.run(replace(step, samples=samples))
    assert result.numbers is not None
    assert result.numbers.denominators == {"loss_tokens": 11.0}
