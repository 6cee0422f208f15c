"""What a runner refuses before anything runs."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evenstep import Packed, PlannedStream, Recipe, Topology, World
from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Loss, Runner, TokenMean, compute_log_probs

MODEL = Decoder(DecoderShape(vocab=9))


def alone(logits: torch.Tensor) -> torch.Tensor:
    return logits.sum()


def test_a_loss_that_was_not_called_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"such as cross_entropy\(\).*got cross_entropy"):
        Runner(model=MODEL, loss=cross_entropy)  # type: ignore[arg-type]
    losses = {
        "first": Loss(function=cross_entropy(), normalization=TokenMean()),
        "second": Loss(function=alone, normalization=TokenMean()),  # type: ignore[arg-type]
    }
    with pytest.raises(ConfigError, match="the loss 'second' does not take"):
        Runner(model=MODEL, loss=losses)


@pytest.mark.parametrize(("token", "shown"), [(9, 9), (-1, -1), (10**6, 1_000_000)])
def test_a_token_outside_the_vocabulary_is_named_with_its_sample(token: int, shown: int) -> None:
    samples = [{"input_ids": [1, 2, 8]}, {"input_ids": [0, 3]}, {"input_ids": [4, token, 5]}]
    recipe = Recipe(layout=Packed(max_tokens=8))
    step = next(iter(PlannedStream(samples, recipe)))
    said = rf"sample 2 has the token id {shown}, but the model's vocabulary has 9 tokens \(0 to 8\)"
    runner = Runner(model=MODEL, loss=cross_entropy())
    with pytest.raises(InputError, match=said) as caught:
        runner.run(step)
    assert "in micro-batch 0 of 1 of step 0 on rank 0" in caught.value.__notes__[0]
    with pytest.raises(InputError, match=said):
        compute_log_probs(MODEL, samples, recipe)
    with pytest.raises(InputError, match=said):
        runner.evaluate(PlannedStream(samples, recipe))
    small = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2,
        )
    )  # fmt: skip
    with pytest.raises(InputError, match=said):
        Runner(model=small, loss=cross_entropy()).run(step)


@pytest.mark.parametrize("label", [9, -1, 10**6])
def test_a_label_outside_the_vocabulary_is_named_with_its_sample(label: int) -> None:
    samples = [{"input_ids": [1, 2]}, {"input_ids": [4, 5, 6], "labels": [4, label, 6]}]
    samples[0]["labels"] = [1, 2]
    step = next(iter(PlannedStream(samples, Recipe(layout=Packed(max_tokens=8)))))
    said = rf"sample 1 has the label {label}, but the model's vocabulary has 9 tokens \(0 to 8\)"
    with pytest.raises(InputError, match=said):
        Runner(model=MODEL, loss=cross_entropy()).run(step)


def test_tokens_that_a_model_replaces_itself_may_be_outside_its_vocabulary() -> None:
    class Replacing(Decoder):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(replace(batch, tokens=batch.tokens.clamp(max=8)))

    samples = [{"input_ids": [1, 99, 3], "labels": [-100, -100, 3]}]
    step = next(iter(PlannedStream(samples, Recipe(layout=Packed(max_tokens=8)))))
    assert Runner(model=Replacing(MODEL.shape), loss=cross_entropy()).run(step).finite


def test_a_model_without_anything_to_train_is_refused() -> None:
    step = next(iter(PlannedStream([{"input_ids": [1, 2]}], Recipe(layout=Packed(max_tokens=4)))))
    frozen = Decoder(DecoderShape(vocab=9)).requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"all parameters of the model are frozen.*requires_grad_"
    ):
        Runner(model=frozen, loss=cross_entropy()).run(step)
    detached = Runner(
        model=MODEL, loss=cross_entropy(), forward=lambda model, batch: model(batch).detach()
    )
    with pytest.raises(ConfigError, match="Do not detach the outputs"):
        detached.run(step)
    frozen.norm.requires_grad_()
    assert Runner(model=frozen, loss=cross_entropy()).run(step).finite


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_loss_of_parameters_outside_of_the_model_is_refused(wrapped: bool) -> None:
    step = next(iter(PlannedStream([{"input_ids": [1, 2]}], Recipe(layout=Packed(max_tokens=4)))))
    head = torch.nn.Linear(9, 9, bias=False)
    both: Any = torch.nn.ModuleDict({"decoder": MODEL, "head": head})
    options: dict[str, Any] = {"model": MODEL, "loss": cross_entropy()}
    options["forward"] = lambda model, batch: head(model(batch))
    if wrapped:
        options["model"] = both
        options["forward"] = lambda model, batch: model["head"](model["decoder"](batch))
        assert Runner(**options).run(step).finite
        return
    said = r"on a parameter of shape \(9, 9\) that is not in the model.*Make it a part of the model"
    for mode in (None, "deferred"):
        with pytest.raises(ConfigError, match=said):
            Runner(**options, mode=mode).run(step)
    assert Runner(**options, mode="per_micro_batch").run(step).finite  # one rank, and scaled before
    head.requires_grad_(False)
    assert Runner(**options).run(step).finite


def test_a_step_without_gradients_is_refused() -> None:
    step = next(iter(PlannedStream([{"input_ids": [1, 2]}], Recipe(layout=Packed(max_tokens=4)))))
    runner = Runner(model=MODEL, loss=cross_entropy())
    with torch.no_grad(), pytest.raises(ConfigError, match="use compute_log_probs for values"):
        runner.run(step)
    with torch.inference_mode(), pytest.raises(ConfigError, match="inference_mode is on"):
        runner.run(step)
    assert runner.run(step).finite


def test_a_preprocess_that_changes_what_counts_is_refused_where_denominators_are_known() -> None:
    samples = [{"input_ids": [1, 2, 3, 4]} for _ in range(4)]

    def half(batch: Any) -> Any:
        even = (batch.sample_ids % 2 == 0)[batch.segment_ids]
        return replace(batch, loss_weights=batch.loss_weights * even)

    recipe = Recipe(layout=Packed(max_tokens=4), topology=Topology(dp=2))

    def run(ranks: Any) -> float:
        world = World(ranks.rank, 2)
        step = next(iter(PlannedStream(samples, recipe, world=world, loss_tokens=[3] * 4)))
        model, options = copy.deepcopy(MODEL), {"preprocess": half, "collective": ranks}
        with pytest.raises(InputError, match=r"the totals give 12 for 'loss_tokens'.* had 6"):
            Runner(model=model, loss=cross_entropy(), **options).run(step)
        runner = Runner(model=model, loss=cross_entropy(), mode="deferred", **options)
        numbers = runner.run(step).numbers
        assert numbers is not None
        assert numbers.denominators == {"loss_tokens": 6.0}
        return 1.0

    assert run_ranks(2, run) == [1.0, 1.0]
