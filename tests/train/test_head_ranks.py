"""A loss of hidden states has the gradient of one process, however the model is wrapped."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.tensors import cross_entropy
from evenstep.train import run_step
from tests.train.head_on_ranks import headless, run_headless
from tests.train.on_ranks import decoder
from tests.train.processes import results_of
from tests.train.running import steps_of
from tests.train.steps import distance, gradient_of
from tests.train.test_distributed import GIANT, WORK


@pytest.mark.slow
def test_the_head_of_a_wrapped_model_is_exact_or_refused(tmp_path: Path) -> None:
    model = headless()
    plain = decoder(next(model.parameters()).dtype)
    expected = run_step(steps_of(GIANT, WORK)[0], plain, cross_entropy())
    for outcomes in results_of(2, run_headless, tmp_path, WORK.samples):
        refused = outcomes.pop("sharded head")
        assert "the weight of the head is sharded when the loss runs" in refused
        for how, (loss, gradient) in outcomes.items():
            assert loss == pytest.approx(expected.loss, rel=1e-12), how
            assert distance(gradient, gradient_of(plain)) < 1e-12, how
