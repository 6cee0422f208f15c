"""Rescaled and separate gradients, and settings and totals that `StepLoss` refuses."""

import math
from typing import Any

import pytest
import torch

from evenstep import Packed, Recipe
from evenstep.errors import ConfigError, InputError
from evenstep.testing import run_ranks
from evenstep.train import Collective, Custom, TokenMean
from tests.internals import (
    Bundle,
    Gradients,
    StepLoss,
    power_of_two,
    set_aside,
    sum_gradients,
)
from tests.train.steps import LIMIT, make_work

TOKENS = {"nll": (TokenMean(), 1.0)}


# Numbers ----------------------------------------------------------------------------------------


def test_a_power_of_two_costs_no_rounding_but_that_of_the_end() -> None:
    torch.manual_seed(0)
    values = torch.randn(50, dtype=torch.float32)
    plain = torch.zeros(())
    for value in values:
        plain = plain + value
    for constant in (1.0, power_of_two(5000), power_of_two(1e6)):
        step_loss = StepLoss(losses=TOKENS, constant=constant)
        x = torch.tensor(1.0, requires_grad=True)
        gradients, bundles = Gradients([x]), []
        for value in values:
            sums, scales = {"nll": value * x}, step_loss.scales()
            gradients.backward(step_loss.objectives(sums, scales))
            bundles.append(step_loss.bundle(sums, {"loss_tokens": torch.ones(())}, scales))
        assert float(x.grad) * constant == float(plain)  # bitwise, before rescaling
        gradients.combine(step_loss.finish(Bundle.merge(bundles)).factors)
        assert float(x.grad) == pytest.approx(float(plain) / 50, rel=2**-23)


def test_gradients_are_multiplied_in_place_whatever_their_type() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    parameters = [torch.zeros(3, dtype=dtype, requires_grad=True) for dtype in dtypes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    untouched = torch.zeros(2, requires_grad=True)
    kept = [parameter.grad for parameter in parameters]
    Gradients([*parameters, untouched]).combine({"all": 0.5})
    assert all(grad is p.grad for grad, p in zip(kept, parameters, strict=True))
    assert [grad.tolist() for grad in kept if grad is not None] == [[0.5] * 3] * 3
    assert untouched.grad is None
    parameters[0].grad = torch.tensor([math.nan, math.inf, -1.0])
    Gradients(parameters).combine({"all": 0.0})
    assert parameters[0].grad.tolist() == [0.0] * 3
    Gradients([]).combine({"all": 2.0})


def test_a_sparse_gradient_is_summed_whatever_other_ranks_have() -> None:
    def rank(ranks: Collective) -> tuple[list[list[float]], bool]:
        embedding = torch.nn.Embedding(4, 2, sparse=True)
        weight = embedding.weight
        weight.grad = torch.tensor([[9.0, 9.0], [0, 0], [0, 0], [0, 0]]).to_sparse(1)
        with set_aside([weight]):
            if ranks.rank < 2:  # the third rank has no gradient of this step
                embedding(torch.tensor([[1, 1], [3, 1]][ranks.rank])).sum().backward()
            sum_gradients([weight], ranks)
            sparse = bool(weight.grad.is_sparse)
        return weight.grad.to_dense().tolist(), sparse

    ran = run_ranks(3, rank)
    assert [values for values, _ in ran] == [[[9, 9], [3, 3], [0, 0], [1, 1]]] * 3
    assert [sparse for _, sparse in ran] == [True, True, False]


def test_separate_gradients_support_unused_and_shared_parameters() -> None:
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    separate = Gradients([a, b, c, torch.ones(1)])
    for _ in range(2):
        one = torch.tensor(1.0)  # a and b share a gradient
        separate.backward({"x": [((a + b).sum(), one)], "y": [((3 * b).sum(), one)]})
    separate.combine({"x": 10.0, "y": 1.0})
    assert a.grad.tolist() == [20.0, 20.0]
    assert b.grad.tolist() == [26.0, 26.0]
    assert c.grad is None
    separate.combine({})
    assert a.grad.tolist() == [20.0, 20.0]


# Errors -----------------------------------------------------------------------------------------


def test_settings_that_make_no_sense_are_refused() -> None:
    faults: list[tuple[dict[str, Any], str]] = [
        ({"losses": {}}, "losses is empty"),
        ({"losses": {"nll": (TokenMean(), math.nan)}}, "'nll' must be finite, got nan"),
        (
            {
                "losses": {
                    "a": (Custom("x", lambda b: b.loss_weights), 1.0),
                    "b": (Custom("x", lambda b: b.loss_weights), 1.0),
                }
            },
            "two different normalizations are named 'x'",
        ),
    ]
    for options, message in faults:
        with pytest.raises(ConfigError, match=message):
            StepLoss(**options)


def test_missing_or_wrong_totals_are_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"needs the denominators \['loss_tokens'\], .* only \['samples'\]"
    ):
        StepLoss(losses=TOKENS, mode="known", totals={"samples": 3})
    reduced = Bundle({"sum/nll": torch.tensor(1.0), "amount/loss_tokens": torch.tensor(3.0)})
    with pytest.raises(InputError, match=r"the totals give 4 for 'loss_tokens', but .* had 3.0"):
        StepLoss(losses=TOKENS, mode="known", totals={"loss_tokens": 4}).finish(reduced)
    with pytest.raises(InputError, match="requires `reduced`"):
        StepLoss(losses=TOKENS, mode="per_micro_batch").scales()


@pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf])
def test_a_denominator_without_meaning_is_refused(amount: float) -> None:
    reduced = Bundle({"sum/nll": torch.tensor(1.0), "amount/loss_tokens": torch.tensor(amount)})
    with pytest.raises(InputError, match="the denominator 'loss_tokens' of this step is"):
        StepLoss(losses=TOKENS).finish(reduced)


def test_a_batch_shared_by_context_parallel_ranks_counts_once() -> None:
    work = make_work([5, 3], Recipe(layout=Packed(max_tokens=LIMIT)), masked=0.0)
    step_loss = StepLoss(losses=TOKENS)
    (batch,) = work.batches(0)
    counted = [step_loss.amounts(batch, counted=rank == 0)["loss_tokens"] for rank in range(4)]
    assert [float(amount) for amount in counted] == [6.0, 0.0, 0.0, 0.0]
