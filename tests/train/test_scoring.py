"""compute_log_probs: every sample as if it were alone, in the caller's order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Packed, Recipe, Topology
from evenstep.core.layout import Layout
from evenstep.errors import ConfigError
from evenstep.testing.ranks import run_ranks
from evenstep.train.collectives import Collective
from evenstep.train.scoring import compute_log_probs
from tests.train.running import LAYOUTS, samples_of, scores_alone, worlds
from tests.train.steps import COLLATOR, LIMIT, Work, model_of
from tests.train.test_lazy import prefetching


@settings(max_examples=25)
@given(
    work=worlds(),
    layout=st.sampled_from(LAYOUTS),
    size=st.integers(1, 3),
    prefetch=st.integers(0, 2),
)
def test_scores_are_those_of_each_sample_alone(
    work: Work, layout: Layout, size: int, prefetch: int
) -> None:
    model = model_of()
    recipe = Recipe(layout=layout, topology=Topology(dp=size))

    def rank(ranks: Collective) -> list[Tensor]:
        own = copy.deepcopy(model)
        return compute_log_probs(
            own, work.samples, recipe, collective=ranks, collate=COLLATOR, prefetch=prefetch
        )

    expected = [scores_alone(model, sample["input_ids"]) for sample in work.samples]
    for found in run_ranks(size, rank):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert not prefetching()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_split_samples_are_whole_again(size: int) -> None:
    work = samples_of([2 * LIMIT + 3, 4, LIMIT + 1])
    recipe = Recipe(layout=Packed(max_tokens=LIMIT), topology=Topology(dp=size), overflow="split")
    model = model_of()

    def rank(ranks: Collective) -> list[Tensor]:
        own = copy.deepcopy(model)
        return compute_log_probs(own, work.samples, recipe, collective=ranks, collate=COLLATOR)

    for found in run_ranks(size, rank):
        assert [len(one) for one in found] == [2 * LIMIT + 3, 4, LIMIT + 1]
        for one, sample in zip(found, work.samples, strict=True):
            ids = torch.as_tensor(sample["input_ids"])
            assert int((one == 0).sum()) == 1
            # The first segment is the same as alone, split or not.
            first = scores_alone(model, ids[: LIMIT + 1])
            torch.testing.assert_close(one[: len(first)], first, rtol=1e-12, atol=1e-12)


def test_a_forward_has_a_budget_of_its_own() -> None:
    work = samples_of([LIMIT] * 6)
    shapes: list[tuple[int, int]] = []

    def forward(model: Any, batch: Any) -> Tensor:
        assert not torch.is_grad_enabled()
        shapes.append((batch.rows, batch.width))
        return model(batch)

    recipe = Recipe(layout=Packed(max_tokens=3 * LIMIT))
    compute_log_probs(model_of(), work.samples, recipe, collate=COLLATOR, forward=forward)
    assert shapes == [(1, 3 * LIMIT)] * 2


def test_no_samples_have_no_scores_and_ranks_must_match_the_recipe() -> None:
    recipe = Recipe(layout=Packed(max_tokens=LIMIT))
    assert compute_log_probs(model_of(), [], recipe) == []
    with pytest.raises(ConfigError, match="plans for 2 ranks, but the collective has 1"):
        compute_log_probs(
            model_of(), samples_of([3]).samples,
            Recipe(layout=Packed(max_tokens=LIMIT), topology=Topology(dp=2)),
        )  # fmt: skip


def test_a_forward_that_fails_leaves_no_thread_and_gradients_on() -> None:
    def forward(model: Any, batch: Any) -> Tensor:
        raise ValueError("what is this")

    samples = [{"input_ids": [1, 2, 3]}] * 4
    with pytest.raises(ValueError, match="what is this") as caught:
        compute_log_probs(model_of(), samples, Recipe(layout=Packed(max_tokens=3)), forward=forward)
    assert caught.value.__traceback__ is not None  # its frames keep objects alive
    assert not prefetching()
    assert torch.is_grad_enabled()
