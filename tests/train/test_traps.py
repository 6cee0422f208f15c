"""Losses checked by hand: sums of 6 over 3 labels and 4 over 1 label make 2.5."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evenstep import Packed, PlannedStream, Recipe, Step, Topology, World, make_plan
from evenstep.data import InMemory
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Batch, Collator
from evenstep.testing import run_ranks
from evenstep.train import Collective, Constant, Loss, Runner, TokenMean, run_step
from tests.internals import IGNORE_INDEX, Mode


class Scalar(nn.Module):  # type: ignore[misc]
    """One parameter of value 1, so that gradients equal the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, batch: Batch) -> Tensor:
        return self.x


def fixed_sum(x: Tensor, batch: Batch) -> Tensor:
    """6 for the micro-batch of 3 labels, 4 for that of 1."""
    labels = int((batch.labels != IGNORE_INDEX).sum())
    return x * {3: 6.0, 1: 4.0, 0: 0.0}[labels]


def two_batches() -> list[Batch]:
    plan = make_plan([4, 2], Recipe(layout=Packed(max_tokens=4)))
    samples = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [5, 6]}]
    return [Collator()(micro, samples) for micro in plan[0, 0]]


@pytest.mark.parametrize("mode", ["deferred", "known", None])
def test_sums_of_6_and_4_over_3_and_1_labels_make_2_and_a_half(mode: Mode | None) -> None:
    model, batches = Scalar(), two_batches()
    step: Any = batches
    if mode == "known":
        step = as_step(batches, {"loss_tokens": 4})
    result = run_step(step, model, fixed_sum, mode=mode)
    assert (result.loss, result.deviation, model.x.grad.item()) == (2.5, 0.0, 2.5)


def as_step(batches: list[Batch], totals: dict[str, float]) -> Step:
    micros: Any = [None] * len(batches)
    nowhere: Any = None
    return Step(
        number=0,
        epoch=0,
        micro_batches=tuple(micros),
        samples={},
        cursor=nowhere,
        totals=totals,
        batches=tuple(batches),
    )


def test_per_micro_batch_makes_3_of_them_and_reports_the_deviation() -> None:
    model = Scalar()
    result = run_step(two_batches(), model, fixed_sum, mode="per_micro_batch")
    assert (result.loss, result.deviation, model.x.grad.item()) == (2.5, 0.5, 3.0)


def test_a_mean_of_means_is_wrong_over_micro_batches_and_over_ranks() -> None:
    """The common mistake: each divides by its own labels, and the means are averaged."""

    def mean(x: Tensor, batch: Batch) -> Tensor:
        return fixed_sum(x, batch) / (batch.labels != IGNORE_INDEX).sum()

    model = Scalar()
    run_step(two_batches(), model, mean, normalization=Constant(2.0))
    assert model.x.grad.item() == 3.0  # not 2.5

    def rank(ranks: Collective) -> tuple[float, float]:
        mine, exact = Scalar(), Scalar()
        batch = [two_batches()[ranks.rank]]
        run_step(batch, mine, mean, normalization=Constant(2.0), collective=ranks)
        run_step(batch, exact, fixed_sum, collective=ranks)
        return mine.x.grad.item(), exact.x.grad.item()

    assert run_ranks(2, rank) == [(3.0, 2.5)] * 2


def test_totals_that_are_not_the_steps_own_are_an_error() -> None:
    with pytest.raises(
        InputError, match="the totals give 5 for 'loss_tokens', but the micro-batches had"
    ):
        run_step(as_step(two_batches(), {"loss_tokens": 5}), Scalar(), fixed_sum)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sample_with_other_loss_tokens_than_the_stream_gives_is_named(ahead: bool) -> None:
    samples = [{"input_ids": [7] * n} for n in (5, 3, 4, 2)]
    counts = np.array([4, 2, 4, 1])  # sample 2 of four tokens has three labels

    def labels(x: Tensor, batch: Batch) -> Tensor:
        return x * (batch.labels != IGNORE_INDEX).sum()

    def rank(ranks: Collective) -> None:
        stream = PlannedStream(
            InMemory(samples),
            Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2)),
            world=World(ranks.rank, 2),
            loss_tokens=counts,
        )
        step = next(iter(stream))
        assert step.loss_tokens == {
            n: counts[n] for micro in step.micro_batches for n in micro.segments.sample.tolist()
        }
        if ahead:
            step = step.collated(Collator())
        assert run_step(step, Scalar(), labels, collective=ranks, mode="deferred").loss == 1
        run_step(step, Scalar(), labels, collective=ranks)

    with pytest.raises(InputError, match=r"sample 2 has 3 loss tokens, but .* give 4"):
        run_ranks(2, rank)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prefetch": -1}, "prefetch"),
        ({"on_memory": "ignore"}, "on_memory"),
        ({"mode": "eager"}, "mode"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run_step(two_batches(), Scalar(), fixed_sum, **options)


def test_normalizations_are_by_default_the_mean_of_tokens() -> None:
    assert Loss(function=fixed_sum).normalization == TokenMean()
    assert Runner(model=Scalar(), loss=fixed_sum).losses["loss"].normalization == TokenMean()
