"""Steps whose loss or gradient is not finite: named, or skipped on all ranks."""

from __future__ import annotations

import copy
import math
import re
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Packed, Step
from evenstep.errors import ConfigError, MicroBatchError
from evenstep.tensors import cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Collective, Runner
from tests.examples import examples
from tests.train.running import Plan, expected, samples_of, steps_of
from tests.train.steps import COLLATOR, LIMIT, Work, distance, gradient_of, model_of

Place = Literal["loss", "outputs", "parameters"]
WORDS = {
    "loss": "the loss",
    "outputs": "the gradient of the model's outputs",
    "parameters": "the gradient of the parameters",
}


class _NaN(torch.autograd.Function):  # type: ignore[misc]
    """The identity; the gradient of marked rows is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marked: Tensor) -> Tensor:
        ctx.save_for_backward(marked)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (marked,) = ctx.saved_tensors
        return torch.where(marked, math.nan, grad), None


class Poison:
    """Makes one sample not finite in the chosen place."""

    def __init__(self, place: Place | None, sample: int) -> None:
        self.place, self.sample = place, sample

    def forward(self, model: Any, batch: Any) -> Tensor:
        ids = batch.sample_ids[batch.segment_ids]
        marked = ((ids == self.sample) & batch.token_mask).unsqueeze(-1)
        handles = []
        if self.place == "parameters":
            hook = model.embed.register_forward_hook(lambda *args: _NaN.apply(args[-1], marked))
            handles.append(hook)
        outputs = model(batch)
        for handle in handles:
            handle.remove()
        if self.place == "loss":
            outputs = outputs.masked_fill(marked, math.inf)
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        if self.place == "outputs":
            ids = batch.sample_ids[batch.segment_ids]
            outputs = _NaN.apply(outputs, (ids == self.sample).unsqueeze(-1))
        return cross_entropy()(outputs, batch)


def run(
    poison: Poison, work: Work, on_nonfinite: Any, dp: int, known: bool
) -> list[tuple[str, Any, Tensor]]:
    """(error, result, gradient) of each rank; gradients start at 0.5."""
    steps = steps_of(Plan("planned", Packed(max_tokens=LIMIT), dp=dp), work, known)
    model = model_of()

    def rank(ranks: Collective) -> tuple[str, Any, Tensor]:
        own = copy.deepcopy(model)
        for parameter in own.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        runner = Runner(
            model=own, loss=poison.loss, forward=poison.forward, collective=ranks,
            collate=COLLATOR, on_nonfinite=on_nonfinite,
        )  # fmt: skip
        try:
            return "", runner.run(steps[ranks.rank]), gradient_of(own)
        except MicroBatchError as error:
            return str(error), None, gradient_of(own)

    return run_ranks(dp, rank)


@pytest.mark.parametrize("place", ["loss", "outputs", "parameters"])
@examples(8)
@given(dp=st.integers(1, 3), sample=st.integers(0, 6), known=st.booleans())
def test_the_error_names_micro_batch_rank_and_sample_on_every_rank(
    place: Place, dp: int, sample: int, known: bool
) -> None:
    work = samples_of([8, 7, 5, 3, 8, 2, 5], masked=0.0)
    steps = steps_of(Plan("planned", Packed(max_tokens=LIMIT), dp=dp), work, known)
    where = {
        number: (rank, at, sorted(micro.segments.sample.tolist()))
        for rank, step in enumerate(steps)
        if isinstance(step, Step)
        for at, micro in enumerate(step.micro_batches)
        for number in micro.segments.sample.tolist()
    }
    rank, at, held = where[sample]
    found = run(Poison(place, sample), work, "raise", dp, known)
    assert len({error for error, _, _ in found}) == 1
    assert f"{WORDS[place]} of micro-batch {at} of {len(steps[0])} on rank {rank}" in found[0][0]
    named = re.findall(r"\(samples? ([\d, ]+)\)", found[0][0])[0].split(", ")
    # Inside the model, a gradient does not tell the sample.
    assert sorted(map(int, named)) == (held if place == "parameters" else [sample])
    assert all(bool((gradient.flat == 0.5).all()) for _, _, gradient in found)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("place", ["loss", "outputs"])
def test_a_skipped_step_leaves_gradients_as_they_were_on_all_ranks(
    place: Place, known: bool
) -> None:
    work = samples_of([8, 7, 5, 3, 8, 2, 5], masked=0.0)
    for dp in (1, 2):
        for _, result, gradient in run(Poison(place, 3), work, "skip", dp, known):
            assert result.skipped
            assert result.reduced
            assert not result.finite
            assert bool((gradient.flat == 0.5).all())


@pytest.mark.parametrize("on_nonfinite", [None, "raise", "skip"])
@pytest.mark.parametrize("known", [False, True])
def test_finite_steps_are_the_same_with_every_choice(on_nonfinite: Any, known: bool) -> None:
    work = samples_of([8, 7, 5, 3, 8, 2, 5])
    steps = steps_of(Plan("planned", Packed(max_tokens=LIMIT), dp=2), work, known)
    _, exact = expected("token mean", model_of(), work, steps)
    for error, result, gradient in run(Poison(None, 0), work, on_nonfinite, 2, known):
        assert not error
        assert not result.skipped
        assert distance(gradient, exact + 0.5) < 1e-12
        assert result.reduced == (not known or on_nonfinite is not None)
        if result.reduced:
            assert result.finite
            assert result.grad_norm == pytest.approx(exact.norm(), rel=1e-9)
            assert result.to_dict()["grad_norm"] == result.grad_norm


def test_without_a_choice_the_result_tells() -> None:
    work = samples_of([8, 7, 5], masked=0.0)
    for error, result, gradient in run(Poison("outputs", 1), work, None, 2, False):
        assert not error
        assert not result.finite
        assert not bool(gradient.flat.isfinite().all())


def test_a_step_with_nothing_to_predict_has_a_norm_of_0() -> None:
    work = samples_of([1, 1, 1])
    for _, result, _ in run(Poison(None, 0), work, "raise", 2, False):
        assert result.grad_norm == 0.0
        assert result.finite


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown on_nonfinite 'ignore'"):
        Runner(model=model_of(), loss=cross_entropy(), on_nonfinite="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown mode 'later'; expected one of"):
        Runner(model=model_of(), loss=cross_entropy(), mode="later")  # type: ignore[arg-type]
