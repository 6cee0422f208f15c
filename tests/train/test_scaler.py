"""GradScaler: scaled gradients that its `step` and `update` understand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evenstep import Packed
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Collective, Loss, Runner, SequenceMean
from tests.train.running import Plan, expected, samples_of, steps_of
from tests.train.steps import COLLATOR, LIMIT, distance, gradient_of, model_of

WORK = samples_of([8, 7, 5, 3, 8, 2, 5])
TWO = {
    "nll": Loss(function=cross_entropy()),
    "even": Loss(function=cross_entropy(), normalization=SequenceMean(), weight=0.5),
}


def scaler(scale: float = 2.0**10, **options: Any) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def step_of(known: bool) -> Any:
    return steps_of(Plan("planned", Packed(max_tokens=LIMIT)), WORK, known)[0]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("loss", [cross_entropy(), TWO], ids=["one", "two"])
@pytest.mark.parametrize("mode", [None, "deferred"])
def test_unscaled_gradients_and_the_norm_are_exact(known: bool, loss: Any, mode: Any) -> None:
    found = []
    for amp in (None, scaler()):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        runner = Runner(model=model, loss=loss, collate=COLLATOR, scaler=amp, mode=mode)
        result = runner.run(step_of(known))
        if amp is not None:
            amp.unscale_(optimizer)
        found.append((gradient_of(model), result.grad_norm, result.loss))
    (exact, norm, value), (unscaled, same_norm, same_value) = found
    assert distance(unscaled, exact) < 1e-12
    assert same_norm == pytest.approx(norm, rel=1e-12)
    assert norm == pytest.approx(exact.norm(), rel=1e-9)
    assert same_value == value


def test_a_step_that_is_not_finite_is_skipped_by_the_scaler_and_lowers_its_scale() -> None:
    for poisoned in (False, True):
        model, amp = model_of(), scaler()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def forward(model: Any, batch: Any, poisoned: bool = poisoned) -> Any:
            return model(batch) * (math.inf if poisoned else 1.0)

        runner = Runner(
            model=model, loss=cross_entropy(), collate=COLLATOR, scaler=amp, forward=forward
        )
        result = runner.run(step_of(known=False))
        amp.step(optimizer)
        amp.update()
        assert result.finite != poisoned
        assert amp.get_scale() == 2.0 ** (9 if poisoned else 10)
        same = [torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
        assert all(same) == poisoned


def test_a_disabled_scaler_changes_nothing() -> None:
    model, amp = model_of(), scaler(enabled=False)
    options: dict[str, Any] = {"scaler": amp, "on_nonfinite": "raise", "collate": COLLATOR}
    runner = Runner(model=model, loss=cross_entropy(), **options)
    result = runner.run(step_of(known=False))
    _, exact = expected("token mean", model_of(), WORK, [step_of(known=False)])
    assert distance(gradient_of(model), exact) < 1e-12
    assert result.grad_norm == pytest.approx(exact.norm(), rel=1e-9)


def test_ranks_with_different_scales_are_an_error() -> None:
    steps = steps_of(Plan("planned", Packed(max_tokens=LIMIT), dp=2), WORK)

    def rank(ranks: Collective) -> None:
        runner = Runner(
            model=model_of(), loss=cross_entropy(), collate=COLLATOR, collective=ranks,
            scaler=scaler(2.0 ** (ranks.rank + 3)),
        )  # fmt: skip
        with pytest.raises(InputError, match="different scales, from 8 to 16"):
            runner.run(steps[ranks.rank])

    run_ranks(2, rank)


def test_the_scaler_decides_about_steps_that_are_not_finite() -> None:
    with pytest.raises(ConfigError, match="on_nonfinite='skip' and a scaler exclude each other"):
        Runner(model=model_of(), loss=cross_entropy(), scaler=scaler(), on_nonfinite="skip")
