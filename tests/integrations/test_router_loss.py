"""load_balancing on a real mixture of experts: Hugging Face's loss, and the gradient of any cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from evenstep import Packed, Padded, Recipe, make_plan
from evenstep.core.layout import Layout
from evenstep.integrations.huggingface import hf_kwargs
from evenstep.tensors import Collator, cross_entropy, load_balancing
from evenstep.train import AllTokens, Loss, Runner, expert_frequencies

torch.set_num_threads(1)
LENGTHS = [5, 3, 9, 4, 7]


def model_of() -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64, router_jitter_noise=0.0,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def forward(model: Any, batch: Any) -> Any:
    return dict(model(**hf_kwargs(batch), output_router_logits=True))


def step_of(model: Any, layout: Layout) -> tuple[float, torch.Tensor]:
    """(loss, gradient) of the load-balancing loss of the whole step."""
    random = torch.Generator().manual_seed(0)
    samples = [{"input_ids": torch.randint(0, 32, (n,), generator=random)} for n in LENGTHS]
    plan = make_plan(LENGTHS, Recipe(layout=layout))
    batches = [Collator()(micro, samples) for micro in plan[0, 0]]
    shares = expert_frequencies(model, batches, top_k=2, forward=forward)
    loss = load_balancing(top_k=2, over="step", frequencies=shares, layers="joint")
    runner = Runner(model=model, loss=loss, normalization=AllTokens(), forward=forward)
    result = runner.run(batches)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return result.loss, gradient


def test_the_loss_of_a_step_is_that_of_hugging_face_for_any_cut() -> None:
    model = model_of()
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 32, (n,), generator=random) for n in LENGTHS]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], True)
    outputs = model(input_ids=padded, attention_mask=mask, output_router_logits=True)
    theirs = load_balancing_loss_func(outputs.router_logits, 4, 2, mask)
    theirs.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for layout in (Packed(max_tokens=64), Packed(max_tokens=10), Padded(max_tokens=18)):
        loss, own = step_of(copy.deepcopy(model_of()), layout)
        # Ours is 1 if experts are used evenly, theirs top_k.
        assert 2 * loss == pytest.approx(float(theirs.detach()), rel=1e-5)
        torch.testing.assert_close(2 * own, gradient, rtol=1e-4, atol=1e-6)


def test_two_losses_read_their_own_outputs() -> None:
    model = model_of()
    samples = [{"input_ids": torch.arange(6)}, {"input_ids": torch.arange(4)}]
    plan = make_plan([6, 4], Recipe(layout=Packed(max_tokens=10)))
    batches = [Collator()(micro, samples) for micro in plan[0, 0]]
    losses = {
        "nll": Loss(function=cross_entropy()),
        "aux": Loss(function=load_balancing(top_k=2, over="sequence"), weight=0.01),
    }
    result = Runner(model=model, loss=losses, forward=forward).run(batches)
    assert result.losses["aux"] >= 0.9
    assert result.loss == pytest.approx(result.losses["nll"] + 0.01 * result.losses["aux"])
