"""compute_log_probs: every sample as if it were alone, in the caller's order."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Collator, Head, cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Collective, Runner, compute_log_probs, sum_log_probs
from tests.examples import examples
from tests.internals import Layout
from tests.train.running import LAYOUTS, samples_of, scores_alone, worlds
from tests.train.steps import COLLATOR, LIMIT, Work, gradient_of, model_of
from tests.train.test_lazy import prefetching


@examples(25)
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


def test_one_autocast_scores_weights_as_they_are_after_an_update() -> None:
    work, model = samples_of([LIMIT] * 6), model_of().float()
    recipe = Recipe(layout=Packed(max_tokens=LIMIT))
    batches = [COLLATOR(micro, work.samples) for micro in make_plan([LIMIT] * 6, recipe)[0, 0]]
    seen: list[Tensor] = []

    def preprocess(batch: Any) -> Any:
        seen.append(model(batch))
        return batch

    runner = Runner(model=model, loss=cross_entropy(), preprocess=preprocess)
    found = []
    for cached in (True, False):
        seen.clear()
        own = []
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            for factor in (2.0, 0.5):
                own += compute_log_probs(model, work.samples, recipe, collate=COLLATOR)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(factor)
                model.zero_grad()
                runner.run(batches)
        found.append(
            torch.cat([*(each.flatten() for each in (*own, *seen)), gradient_of(model).flat])
        )
    assert torch.equal(*found)


def test_a_forward_that_fails_leaves_no_thread_and_gradients_on() -> None:
    def forward(model: Any, batch: Any) -> Tensor:
        raise ValueError("what is this")

    samples = [{"input_ids": [1, 2, 3]}] * 4
    with pytest.raises(ValueError, match="what is this") as caught:
        compute_log_probs(model_of(), samples, Recipe(layout=Packed(max_tokens=3)), forward=forward)
    assert caught.value.__traceback__ is not None  # its frames keep objects alive
    assert not prefetching()
    assert torch.is_grad_enabled()


def test_dropped_samples_have_zeros_even_if_all_are_dropped() -> None:
    recipe = Recipe(layout=Packed(max_tokens=4), overflow="drop")
    samples = [{"input_ids": [1, 2, 3, 4, 5]}, {"input_ids": [1] * 6}]
    found = compute_log_probs(model_of(), samples, recipe)
    assert [one.tolist() for one in found] == [[0.0] * 5, [0.0] * 6]


def test_keys_that_are_not_needed_are_allowed() -> None:
    recipe = Recipe(layout=Packed(max_tokens=LIMIT))
    plain = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    more: list[dict[str, Any]] = [
        {**sample, "reward": 1.0, "text": "abc", "loss_mask": None, "labels": [0]}
        for sample in plain
    ]
    expected = compute_log_probs(model_of(), plain, recipe)
    for one, other in zip(compute_log_probs(model_of(), more, recipe), expected, strict=True):
        assert torch.equal(one, other)


def test_dropout_is_off_while_scoring_and_modes_are_restored() -> None:
    model = torch.nn.Sequential(
        torch.nn.Embedding(9, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 9)
    )
    model[0].eval()  # frozen by its owner

    def forward(module: Any, batch: Any) -> Tensor:
        return module(batch.tokens)

    samples, recipe = [{"input_ids": [1, 2, 3, 4]}], Recipe(layout=Packed(max_tokens=LIMIT))
    first, second = (compute_log_probs(model, samples, recipe, forward=forward) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert [module.training for module in model] == [False, True, True]
    assert model.training

    def failing(module: Any, batch: Any) -> Tensor:
        raise ValueError("what is this")

    with pytest.raises(ValueError, match="what is this"):
        compute_log_probs(model, samples, recipe, forward=failing)
    assert model.training


def test_a_model_output_is_read_by_name() -> None:
    model, samples = model_of(), [{"input_ids": [1, 2, 3]}]
    recipe = Recipe(layout=Packed(max_tokens=LIMIT))

    def forward(module: Any, batch: Any) -> Any:
        return SimpleNamespace(logits=module(batch))

    found = compute_log_probs(model, samples, recipe, forward=forward)
    assert torch.equal(found[0], compute_log_probs(model, samples, recipe)[0])


@examples(10)
@given(work=worlds(), layout=st.sampled_from(LAYOUTS), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_temperature_and_entropy_are_those_of_each_sample_alone(
    work: Work, layout: Layout, temperature: float
) -> None:
    model = model_of()
    found = compute_log_probs(
        model, work.samples, Recipe(layout=layout), temperature=temperature, entropy=True
    )
    for one, sample in zip(found, work.samples, strict=True):
        ids = torch.as_tensor(sample["input_ids"])
        micro = make_plan([len(ids)], Recipe(layout=Packed(samples=1)))[0, 0][0]
        with torch.no_grad():
            logits = model(Collator()(micro, [{"input_ids": ids}]))[0] / temperature
        log_probs = logits.log_softmax(-1)[:-1]
        expected = torch.zeros(len(ids), 2).double()
        expected[1:, 0] = log_probs.gather(1, ids[1:, None])[:, 0]
        expected[1:, 1] = -(log_probs.exp() * log_probs).sum(-1)
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


def test_hidden_states_and_a_head_score_as_logits_do() -> None:
    model, work = model_of(), samples_of([5, 3, 8, 1])
    recipe = Recipe(layout=Packed(max_tokens=LIMIT))

    def hidden(module: Any, batch: Any) -> Tensor:
        head, module.head = module.head, torch.nn.Identity()
        try:
            return module(batch)
        finally:
            module.head = head

    options: Any = {"entropy": True, "temperature": 0.7}
    expected = compute_log_probs(model, work.samples, recipe, **options)
    head = Head(model.head, chunk=3)
    found = compute_log_probs(model, work.samples, recipe, forward=hidden, head=head, **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_hidden_padding_mask_is_still_refused() -> None:
    samples = [{"input_ids": [1, 2], "attention_mask": [1, 0]}]
    with pytest.raises(InputError, match="0 in its 'attention_mask'"):
        compute_log_probs(model_of(), samples, Recipe(layout=Packed(max_tokens=LIMIT)))


def test_sums_are_those_of_the_tokens_that_a_collator_counts() -> None:
    columns: list[dict[str, Any]] = [
        {"loss_mask": [0, 0, 1, 1]},
        {"completion_mask": [0, 0, 1, 1]},
        {"labels": [-100, -100, 3, 4]},
        {"loss_masking_spans": [(0, 2)]},
        {"loss_mask": 1, "response_mask": [1, 0, 1, 1]},
    ]
    samples = [{"input_ids": [1, 2, 3, 4], **each} for each in columns]
    model, recipe = model_of(), Recipe(layout=Packed(max_tokens=LIMIT))
    expected = scores_alone(model, [1, 2, 3, 4])[2:].sum().expand(len(samples))
    torch.testing.assert_close(sum_log_probs(model, samples, recipe), expected)
    with pytest.raises(InputError, match="sample 0 has labels that are not its tokens"):
        sum_log_probs(model, [{"input_ids": [1, 2, 3], "labels": [-100, 5, 3]}], recipe)
