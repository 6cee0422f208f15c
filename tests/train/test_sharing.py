"""At first use, ranks check that a model computes the same where samples share a prefix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evenstep import Packed, PlannedStream, Recipe, Topology, World, find_prefixes
from evenstep.data import InMemory
from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import ConfigError, EvenstepError
from evenstep.tensors import Batch, cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Collective, Runner, compute_log_probs

SHAPE = DecoderShape(vocab=16, hidden=8, layers=2, heads=2, kv_heads=1, ffn=8)
IDS = [[1, 2, 3, 4, 5, 6, i % 5, j, 3, 1] for i in range(5) for j in range(4)]
SAMPLES = [{"input_ids": row} for row in IDS]
ONE_RANK = Recipe(layout=Packed(max_tokens=400))


def decoder(dtype: torch.dtype = torch.float64, hidden: int = 8) -> Decoder:
    torch.manual_seed(0)
    model: Decoder = Decoder(replace(SHAPE, hidden=hidden)).to(dtype)
    return model


def stream(recipe: Recipe, rank: int = 0) -> PlannedStream:
    world = World(rank, recipe.topology.dp)
    return PlannedStream(InMemory(SAMPLES), recipe, world=world, prefixes=find_prefixes(IDS))


class Returns(nn.Module):  # type: ignore[misc]
    """A decoder whose logits are returned in some form, with or without looking at the tree."""

    def __init__(self, inner: Decoder, form: Callable[[Any], Any], forgets: bool = True) -> None:
        super().__init__()
        self.inner, self.form, self.forgets = inner, form, forgets

    def forward(self, batch: Batch) -> Any:
        return self.form(
            self.inner(replace(batch, tree=None, keys=None) if self.forgets else batch)
        )


def test_a_check_made_alone_is_made_again_with_other_ranks() -> None:
    recipe = Recipe(layout=Packed(max_tokens=64), topology=Topology(dp=2))
    exchanges: list[list[tuple[int, ...]]] = [[], []]

    class Noted:
        def __init__(self, ranks: Collective) -> None:
            self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.size

        def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
            exchanges[self.rank].append(tuple(tensor.shape))
            return self.ranks.all_reduce_sum(tensor)

    def run(ranks: Collective) -> float:
        model = copy.deepcopy(decoder())
        step = next(iter(stream(recipe, ranks.rank)))
        if ranks.rank == 0:
            compute_log_probs(model, step)
        runner = Runner(model=model, loss=cross_entropy(), collective=Noted(ranks))
        first = runner.run(step).reduce(ranks)
        runner.run(step)
        return float(first.loss)

    losses = run_ranks(2, run)
    assert losses[0] == losses[1]
    assert exchanges[0] == exchanges[1]
    assert exchanges[0].count((2,)) == 1  # the check, once


class Unreadable:
    """Pairs of samples that share a prefix; the first sample cannot be read."""

    ids = tuple([first] * 9 + [last] for first in (1, 3) for last in (1, 2))
    fingerprint = "unreadable"

    def __len__(self) -> int:
        return len(self.ids)

    def lengths_of(self, numbers: Any) -> Any:
        return np.array([len(row) for row in self.ids])[np.asarray(numbers)]

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 0:
            raise OSError("unreadable")
        return {"input_ids": self.ids[number]}


@pytest.mark.filterwarnings("ignore:skipping unreadable samples")
@pytest.mark.parametrize("forgets", [False, True])
def test_a_sample_whose_mate_is_skipped_needs_no_check(forgets: bool) -> None:
    recipe = Recipe(layout=Packed(max_tokens=14), topology=Topology(dp=2))
    prefixes = find_prefixes(Unreadable.ids)

    def run(ranks: Collective) -> str:
        world = World(ranks.rank, 2)
        steps = PlannedStream(
            Unreadable(), recipe, world=world, prefixes=prefixes, on_error="skip", shuffle=False
        )
        model = Returns(decoder(), lambda logits: logits, forgets)
        try:
            Runner(model=model, loss=cross_entropy(), collective=ranks).run(next(iter(steps)))
        except ConfigError as error:  # of both ranks, though one of them compares nothing
            return str(error)
        return "ran"

    said = run_ranks(2, run)
    if forgets:
        assert sorted("on another rank" in each for each in said) == [False, True]
    else:
        assert said == ["ran", "ran"]


def test_ranks_raise_together_if_one_cannot_read_its_samples() -> None:
    recipe = Recipe(layout=Packed(max_tokens=14), topology=Topology(dp=2))
    prefixes = find_prefixes(Unreadable.ids)

    def run(ranks: Collective) -> str:
        world = World(ranks.rank, 2)
        steps = PlannedStream(Unreadable(), recipe, world=world, prefixes=prefixes, shuffle=False)
        step = next(iter(steps))
        try:
            Runner(model=decoder(), loss=cross_entropy(), collective=ranks).run(step)
        except (EvenstepError, OSError) as error:
            return str(error)
        return "ran"

    said = run_ranks(2, run)
    assert sum("on another rank" in each for each in said) == 1
    assert sum("unreadable" in each for each in said) == 1


@pytest.mark.parametrize(
    "form",
    [
        lambda logits: logits,
        lambda logits: {"logits": logits},
        lambda logits: SimpleNamespace(logits=logits),
        lambda logits: (logits,),
    ],
    ids=["tensor", "mapping", "object", "tuple"],
)
def test_outputs_of_every_form_are_compared(form: Callable[[Any], Any]) -> None:
    (step,) = stream(ONE_RANK)
    with pytest.raises(ConfigError, match="Returns computes other outputs"):
        Runner(model=Returns(decoder(), form), loss=cross_entropy()).run(step)


def test_outputs_that_cannot_be_compared_are_an_error() -> None:
    (step,) = stream(ONE_RANK)
    model = Returns(decoder(), lambda logits: {"logits": logits.flatten(0, 1)}, forgets=False)
    with pytest.raises(ConfigError, match=r"no tensor .*check_prefixes=False"):
        Runner(model=model, loss=cross_entropy()).run(step)


@pytest.mark.parametrize("hidden", [8, 64])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_fresh_model_in_bfloat16_that_forgets_prefixes_is_refused(
    hidden: int, autocast: bool
) -> None:
    (step,) = stream(ONE_RANK)
    inner = decoder(torch.float32 if autocast else torch.bfloat16, hidden)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        compute_log_probs(inner, step)
        with pytest.raises(ConfigError, match="Returns computes other outputs"):
            compute_log_probs(Returns(inner, lambda logits: logits), step)


def test_models_without_weak_references_are_checked_every_time() -> None:
    class Slots:
        __slots__ = ("calls", "inner")

        def __init__(self) -> None:
            self.inner, self.calls = decoder(), 0

        def __call__(self, batch: Batch) -> Any:
            self.calls += 1
            return self.inner(batch)

    model = Slots()
    for _ in range(2):
        scores = compute_log_probs(model, SAMPLES, ONE_RANK, share_prefixes=True)
        assert len(scores) == len(SAMPLES)
    assert model.calls == 2 * (3 + 1)
