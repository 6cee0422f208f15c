"""The leak detector finds and names leaks, and reports none in a correct model."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Batch, Collator
from evenstep.testing import LeakError, assert_no_leaks, find_leaks
from tests.forests import micro_of
from tests.tensors.batches import RECIPES, VOCAB, batch_of

torch.set_num_threads(1)

LENGTHS = [5, 1, 9, 2]


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("backend", [None, "segments", "mask"])
def test_our_decoder_does_not_leak(recipe: str, backend: str | None) -> None:
    model = Decoder(DecoderShape(vocab=VOCAB), backend)
    assert_no_leaks(model, batch_of(LENGTHS, recipe))


def test_an_impossible_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"seed must be in \[0, 2\*\*63\), got -1"):
        find_leaks(Decoder(DecoderShape(vocab=VOCAB)), batch_of(LENGTHS, "packed"), seed=-1)


class Plain(nn.Module):  # type: ignore[misc]
    """Attention that ignores segment boundaries."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]


class Average(nn.Module):  # type: ignore[misc]
    """Mixes all slots, padding included."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


class Shift(nn.Module):  # type: ignore[misc]
    """A convolution over two tokens, in channels-first order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2))[..., :-1].transpose(1, 2)


class Stack(nn.Module):  # type: ignore[misc]
    """Embedding, layers, head."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.Sequential(nn.Linear(16, 16), *layers, nn.Linear(16, 16))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.layers(self.embed(batch.tokens)))


@pytest.mark.parametrize("layer", [Plain, Average, Shift])
def test_the_layer_that_leaks_is_named(layer: type[nn.Module]) -> None:
    leaks = find_leaks(Stack(layer()), batch_of(LENGTHS, "packed with a tail"))
    assert leaks
    assert {(leak.layer, leak.layer_type) for leak in leaks} == {("layers.1", layer.__name__)}
    assert {leak.what for leak in leaks} == {"outputs"}


def test_affected_segments_are_named() -> None:
    # Pieces lie in the order in which they were packed; a causal leak reaches only later ones.
    batch = batch_of(LENGTHS, "packed")
    leaks = find_leaks(Stack(Plain()), batch)
    assert [(leak.changed, leak.moved) for leak in leaks] == [
        (0, (1, 2, 3)), (1, (2, 3)), (2, (3,)),
    ]  # fmt: skip
    assert "changing segment 1 moved the outputs of 2, 3 by " in str(leaks[1])
    assert str(leaks[1]).endswith("first in layers.1 (Plain)")


def test_an_effect_of_padding_is_a_leak() -> None:
    batch = batch_of([4], "packed with a tail")
    leaks = find_leaks(Stack(Average()), batch)
    assert [leak.changed for leak in leaks] == [-1]
    assert str(leaks[0]).startswith("changing padding moved the outputs of 0")
    assert find_leaks(Stack(Plain()), batch) == []


class Backwards(torch.autograd.Function):  # type: ignore[misc]
    """Correct in the forward pass; mixes all gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + grad.mean(1, keepdim=True) * ctx.saved_tensors[0]


class Mixed(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return Backwards.apply(x)


def test_a_leak_in_the_backward_pass_is_found_by_gradients() -> None:
    batch, model = batch_of(LENGTHS, "packed"), Stack(Mixed())
    assert find_leaks(model, batch, gradients=False) == []
    leaks = find_leaks(model, batch)
    assert {leak.what for leak in leaks} == {"gradients"}


class Small(torch.autograd.Function):  # type: ignore[misc]
    """Mixes the gradient of a small parameter only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, small: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, 3e-6 * ctx.saved_tensors[0].sum()


class WithSmall(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return Small.apply(x, self.small)


def test_a_leak_in_the_gradient_of_a_small_parameter_is_found() -> None:
    leaks = find_leaks(Stack(WithSmall()), batch_of(LENGTHS, "packed"))
    assert {leak.what for leak in leaks} == {"gradients"}


def test_an_empty_micro_batch_has_no_leak() -> None:
    plan = make_plan([3], Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2)))
    batch = Collator()(plan[0, 1][0], [])
    assert find_leaks(Decoder(DecoderShape(vocab=VOCAB)), batch) == []


def test_segments_that_see_others_are_refused() -> None:
    ids = [[1, 2, 3, 4], [1, 2, 3, 5]]
    batch = Collator()(micro_of(ids, range(2)), [{"input_ids": each} for each in ids])
    with pytest.raises(InputError, match="Plan without prefixes"):
        find_leaks(Decoder(DecoderShape(vocab=16)), batch)


def test_a_plain_callable_is_checked_without_layer_names() -> None:
    batch = batch_of(LENGTHS, "packed")
    leaks = find_leaks(lambda b: b.tokens.cumsum(1).double()[..., None], batch, vocab=VOCAB)
    assert leaks[0].layer is None
    assert find_leaks(lambda b: b.tokens.double()[..., None], batch, vocab=VOCAB) == []


def test_the_error_names_the_layer_and_a_remedy() -> None:
    with pytest.raises(LeakError, match=r"\(Plain\).*or the padded layout") as caught:
        assert_no_leaks(Stack(Plain()), batch_of(LENGTHS, "packed"))
    assert isinstance(caught.value, AssertionError)


def test_models_that_cannot_be_checked_are_refused() -> None:
    batch = batch_of(LENGTHS, "packed")
    with pytest.raises(InputError, match="different outputs for the same batch"):
        find_leaks(lambda b: torch.rand(*b.tokens.shape, 3), batch)
    with pytest.raises(InputError, match="NaN outputs"):
        find_leaks(lambda b: b.tokens.double()[..., None] * torch.nan, batch, vocab=3)
    with pytest.raises(InputError, match="one output per slot"):
        find_leaks(lambda b: b.tokens.double()[0], batch)
    with pytest.raises(InputError, match="vocab must be at least 2"):
        find_leaks(lambda b: b.tokens.double()[..., None], batch)


def test_tests_of_plans_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import evenstep.testing as t; "
        "t.assert_valid_plan; t.cases(); print(sorted(t.__all__) == t.__all__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"


class Longest(nn.Module):  # type: ignore[misc]
    """Scales everything by whether the longest segment has more than `limit` tokens."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.embed = nn.Embedding(VOCAB, 16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, batch: Batch) -> Tensor:
        factor = 2.0 if int(batch.seqlens.max()) > self.limit else 1.0
        return self.head(self.embed(batch.tokens) * factor)


@pytest.mark.parametrize("recipe", ["packed", "padded", "packed static"])
@pytest.mark.parametrize("limit", [8, 12])
def test_an_effect_of_a_neighbours_length_is_a_leak(recipe: str, limit: int) -> None:
    # 8: the longest segment has 9 tokens and is shortened. 12: a segment is lengthened to 18.
    leaks = find_leaks(Longest(limit), batch_of(LENGTHS, recipe))
    assert leaks
    assert {leak.change for leak in leaks} == {"length"}
    assert "changing the length of segment" in str(leaks[0])
    assert find_leaks(Longest(limit), batch_of(LENGTHS, recipe), lengths=False) == []
    assert find_leaks(Longest(100), batch_of(LENGTHS, recipe)) == []


def test_kept_tokens_are_neither_changed_nor_inserted() -> None:
    batch, seen = batch_of(LENGTHS, "packed with a tail"), []

    def model(batch: Batch) -> Tensor:
        seen.append(int(torch.isin(batch.tokens[batch.token_mask], kept).sum()))
        return batch.tokens.double()[..., None]

    kept = torch.tensor(sorted(set(batch.tokens[0, :6].tolist())))
    assert find_leaks(model, batch, vocab=VOCAB, keep_tokens=kept.tolist()) == []
    assert len(set(seen)) == 1
