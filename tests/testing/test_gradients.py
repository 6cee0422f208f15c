"""assert_same_gradient accepts exact trainers and names what is wrong with others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from evenstep import Packed, Padded, Recipe, make_plan
from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import InputError
from evenstep.tensors import Batch, Collator, cross_entropy
from evenstep.testing import GradientError, assert_same_gradient
from evenstep.train import Runner
from tests.internals import errors_of_parameters

torch.set_num_threads(1)

LENGTHS = [4, 9, 2, 7, 5, 3, 8]
SAMPLES = [
    {"input_ids": torch.randint(1, 12, (n,), generator=torch.Generator().manual_seed(n))}
    for n in LENGTHS
]
RECIPES = {
    "alone": Recipe(layout=Padded(samples=1), balance="none"),
    "packed": Recipe(layout=Packed(max_tokens=16)),
}


def batches_of(recipe: Recipe) -> list[Batch]:
    return [Collator()(micro, SAMPLES) for micro in make_plan(LENGTHS, recipe)[0, 0]]


def losses_of(model: Decoder, batch: Batch) -> Tensor:
    """The loss of each token."""
    return torch.nn.functional.cross_entropy(
        model(batch).flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="none"
    )


def loop(
    model: Decoder, divide: Callable[[Tensor, Batch, int], Tensor]
) -> Callable[[Recipe], None]:
    def run(recipe: Recipe) -> None:
        batches = batches_of(recipe)
        for batch in batches:
            divide(losses_of(model, batch).sum(), batch, len(batches)).backward()

    return run


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderShape(vocab=12))


def test_an_exact_trainer_passes_and_leaves_no_gradient(model: Decoder) -> None:
    runner = Runner(model=model, loss=cross_entropy())
    assert_same_gradient(lambda recipe: runner.run(batches_of(recipe)), model)
    assert_same_gradient(lambda recipe: runner.run(batches_of(recipe)), model, RECIPES)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_mean_of_means_is_caught(model: Decoder) -> None:
    def mean(total: Tensor, batch: Batch, count: int) -> Tensor:
        return total / (batch.labels != -100).sum().clamp(min=1) / count

    said = "the gradient of 'padded, 3 samples' differs from that of 'one sample per micro-batch'"
    with pytest.raises(GradientError, match=said):
        assert_same_gradient(loop(model, mean), model)


def test_a_wrong_factor_is_named(model: Decoder) -> None:
    counts = {name: len(batches_of(recipe)) for name, recipe in RECIPES.items()}
    expected = counts["alone"] / counts["packed"]
    assert expected == 7 / 3
    with pytest.raises(GradientError, match=r"of 'packed' is 2\.33 times that of 'alone'"):
        assert_same_gradient(loop(model, lambda total, _, count: total / count), model, RECIPES)


def test_a_small_parameter_is_judged_by_its_own_scale(model: Decoder) -> None:
    runner = Runner(model=model, loss=cross_entropy())

    def run(recipe: Recipe) -> None:
        runner.run(batches_of(recipe))
        norm, head = model.norm.weight.grad, model.head.weight.grad
        head *= 100 * norm.abs().max() / head.abs().max()
        if isinstance(recipe.layout, Packed):
            norm *= 1.005

    with pytest.raises(GradientError, match=r"most in norm\.weight: by .* of its largest entry"):
        assert_same_gradient(run, model)


def test_a_leak_in_attention_is_caught(model: Decoder) -> None:
    def leaky(recipe: Recipe) -> None:
        for batch in batches_of(recipe):
            hidden = model.embed(batch.tokens).cumsum(1)  # over all segments of a row
            labels = batch.labels.flatten()
            torch.nn.functional.cross_entropy(
                model.head(hidden).flatten(0, 1), labels, ignore_index=-100, reduction="sum"
            ).backward()

    with pytest.raises(GradientError, match=r"most in (embed|head)\.weight"):
        assert_same_gradient(leaky, model)


def test_gradients_that_are_not_finite_never_pass(model: Decoder) -> None:
    runner = Runner(model=model, loss=cross_entropy())

    def run(recipe: Recipe, first: bool) -> None:
        runner.run(batches_of(recipe))
        if first or isinstance(recipe.layout, Packed):
            model.norm.weight.grad[0] = math.nan

    with pytest.raises(GradientError, match=r"most in norm\.weight: by inf"):
        assert_same_gradient(lambda recipe: run(recipe, False), model)
    with pytest.raises(InputError, match=r"not finite in norm\.weight"):
        assert_same_gradient(lambda recipe: run(recipe, True), model)
    one = {"a": torch.tensor([math.inf]), "b": torch.tensor([5.0])}
    other = {"a": torch.tensor([math.inf]), "b": torch.tensor([1.0])}
    assert errors_of_parameters(other, one) == {"a": math.inf, "b": 0.8}


def test_what_cannot_be_compared_is_refused(model: Decoder) -> None:
    runner = Runner(model=model, loss=cross_entropy())
    with pytest.raises(InputError, match="run left no gradient"):
        assert_same_gradient(lambda recipe: None, model)
    with pytest.raises(InputError, match="two or more recipes, got 1"):
        assert_same_gradient(lambda _: None, model, {"packed": RECIPES["packed"]})

    def noisy(recipe: Recipe) -> None:
        runner.run(batches_of(recipe))
        for parameter in model.parameters():
            parameter.grad *= torch.rand(())

    with pytest.raises(InputError, match=r"two runs with the same recipe .* differ"):
        assert_same_gradient(noisy, model)
