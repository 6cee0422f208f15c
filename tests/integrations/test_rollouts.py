"""Rollouts through a Hugging Face model are those of one padded batch with its attention mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from evenstep import Recipe
from evenstep.tensors import cross_entropy
from evenstep.train import RolloutBatch, Runner, compute_log_probs
from tests.train.rollouts import WAYS, Rollouts, make_rollouts
from tests.train.steps import VOCABULARY

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}


def model_of() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=2, **SIZES)
    return LlamaForCausalLM(config).double()


def padded_log_probs(model: LlamaForCausalLM, data: Rollouts) -> Tensor:
    """Of all rows in one forward pass, (rows, width), 0 for first tokens and padding."""
    ids, mask = data.tensors["input_ids"], data.tensors["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    own = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    predicted = mask[:, 1:] * mask[:, :-1]
    return torch.nn.functional.pad(torch.where(predicted == 1, own, 0.0), (1, 0))


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("side", ["left", "right"])
def test_log_probs_loss_and_gradient_are_those_of_one_padded_batch(way: str, side: str) -> None:
    data = make_rollouts([5, 1, 7, 3, 6, 2], side, seed=3)
    names = ("input_ids", "attention_mask")
    batch = RolloutBatch({name: data.tensors[name] for name in names})
    recipe = Recipe(**WAYS[way])

    model = model_of()
    found = batch.restore_tokens(compute_log_probs(model, batch, recipe))
    reference = model_of()
    expected = padded_log_probs(reference, data)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)

    (step,) = batch.plan(recipe).steps(batch)
    result = Runner(model=model, loss=cross_entropy(), collate=batch.collator()).run(step)
    loss = -expected.sum() / sum(length - 1 for length in data.lengths)
    assert result.loss == pytest.approx(loss.item(), rel=1e-9)
    loss.backward()
    # The norms of Llama compute in float32.
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)
