"""Losses of Hugging Face models, computed in their last layer by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from evenstep import Packed, Padded, Recipe
from evenstep.errors import ConfigError
from evenstep.integrations.huggingface import hf_forward
from evenstep.tensors import cross_entropy, load_balancing
from evenstep.train import Loss, Runner, SequenceMean, run_step
from tests.integrations.hf_on_ranks import gradients_in_head
from tests.integrations.hf_steps import batches_for, furthest, gradients_of
from tests.integrations.models import SHAPE, build, llama
from tests.internals import model_head
from tests.tensors.batches import VOCAB
from tests.train.processes import results_of

torch.set_num_threads(1)

LENGTHS = [5, 3, 1, 4, 9, 2, 7]
PACKED = Recipe(layout=Packed(max_tokens=12))
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", SHAPE),
    "tied": ("Llama", SHAPE | {"tie_word_embeddings": True}),
    "soft cap": ("Gemma2", SHAPE | {"final_logit_softcapping": 0.5}),
    "scale": ("Cohere", SHAPE | {"logit_scale": 3.0}),
    "divisor": ("Granite", SHAPE | {"logits_scaling": 4.0}),
    "bias": ("Phi", SHAPE),
    "GPT-2": ("GPT2", GPT2),
    "Qwen": ("Qwen3", SHAPE),
}


def gradients(
    model: Any, head: Any, recipe: Recipe = PACKED, **options: Any
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    batches = batches_for(LENGTHS, recipe)
    assert len(batches) >= 3
    result = run_step(batches, model, cross_entropy(head=head), **options)
    return result.loss, gradients_of(model)


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_the_logits(name: str) -> None:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    model = build(kind, "eager" if kind == "Gemma2" else "sdpa", **sizes).double()
    for recipe in (PACKED, Recipe(layout=Padded(max_tokens=14))):
        loss, expected = gradients(model, None, recipe)
        own, found = gradients(model, "model", recipe)
        # Some models compute norms or logits in float32.
        assert own == pytest.approx(loss, rel=1e-6)
        assert furthest(found, expected) <= 1e-6


def test_the_default_makes_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths = llama("sdpa"), []
    _, expected = gradients(model, None)
    monkeypatch.setitem(model_head.SMALL, "cpu", 0)
    model.train()
    model.register_forward_hook(lambda m, _, outputs: widths.append(outputs.logits.shape[-1]))
    _, found = gradients(model, None)
    assert widths[:2] == [VOCAB] * 2  # of the small forwards, training and not
    assert widths[2:] == [1] * (len(widths) - 2)
    assert len(widths) > 2
    assert furthest(found, expected) <= 1e-6
    widths.clear()
    gradients(model, None)
    assert VOCAB not in widths  # once per model


def test_adapters_of_the_layers_train_alone() -> None:
    settings = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama("sdpa"), settings)
    loss, expected = gradients(model, None)
    own, found = gradients(model, "model")
    assert own == pytest.approx(loss, rel=1e-6)
    assert found
    assert all("lora" in name for name in found)
    assert furthest(found, expected) <= 1e-6


def test_an_adapter_of_the_head_keeps_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(llama("sdpa"), settings)
    _, expected = gradients(model, None)
    with pytest.raises(ConfigError, match="not a plain"):
        gradients(model, "model")
    monkeypatch.setitem(model_head.SMALL, "cpu", 0)
    with pytest.warns(UserWarning, match="takes the memory of all logits"):
        _, found = gradients(model, None)
    assert furthest(found, expected) == 0.0


def test_gradient_checkpointing_and_autocast() -> None:
    model = llama("sdpa").train()
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = gradients(model, None)
        model.gradient_checkpointing_enable()
        own, found = gradients(model, "model")
    assert own == pytest.approx(loss, rel=1e-2)
    assert furthest(found, expected) <= 0.05


def test_temperature_of_the_forward_is_a_scale() -> None:
    model = llama("sdpa")
    forward = hf_forward(model, temperature=1.7)
    loss, expected = gradients(model, None, forward=forward)
    own, found = gradients(model, "model", forward=forward)
    assert own == pytest.approx(loss, rel=1e-6)
    assert furthest(found, expected) <= 1e-6


@pytest.mark.filterwarnings("ignore:.*does not support packed batches")
def test_segments_in_rows_of_their_own_keep_the_logits() -> None:
    model = build("Bloom", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    forward = hf_forward(model, unsupported="pad")
    loss, expected = gradients(model, None, forward=forward)
    own, found = gradients(model, "model", forward=forward)
    assert own == pytest.approx(loss, rel=1e-6)
    assert furthest(found, expected) <= 1e-6


def test_router_logits_are_read_beside_it() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    found = []
    for head in (None, "model"):
        torch.manual_seed(0)
        model = build("Mixtral", "sdpa", **SHAPE, **experts)
        losses = {
            "nll": Loss(function=cross_entropy(head=head)),
            "aux": Loss(
                function=load_balancing(top_k=2, over="sequence"), normalization=SequenceMean()
            ),
        }
        runner = Runner(
            model=model, loss=losses, forward=hf_forward(model, outputs="router_logits")
        )
        found.append((runner.run(batches_for(LENGTHS, PACKED)).loss, gradients_of(model)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert furthest(found[1][1], found[0][1]) <= 1e-5


@pytest.mark.slow
def test_wrapped_models_are_exact(tmp_path: Path) -> None:
    model = llama("sdpa").double()
    _, expected = gradients(model, None)
    for outcomes in results_of(2, gradients_in_head, tmp_path, LENGTHS):
        assert set(outcomes) == {"plain", "ddp", "fsdp"}
        for name, found in outcomes.items():
            assert furthest(found, expected) <= 1e-6, name  # norms are in float32
