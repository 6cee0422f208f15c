"""Models for the registered attention, and their results one sample at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenstep.tensors import Batch
from tests.integrations.models import SHAPE, build
from tests.internals import errors_of_parameters
from tests.tensors.batches import VOCAB, distance

LENGTHS = [5, 9, 1, 7]
WINDOW = {"sliding_window": 3}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

MODELS: dict[str, dict[str, Any]] = {
    "Llama": SHAPE,
    "Qwen2": SHAPE,
    "Qwen3": SHAPE,
    "Mistral": SHAPE | WINDOW,
    "Gemma2": SHAPE | WINDOW | {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 1},
    "Gemma3Text": SHAPE | WINDOW,
    "GptOss": SHAPE | WINDOW | MOE | {"rope_parameters": {"rope_type": "default"}},
    "Mixtral": SHAPE | MOE,
    "DeepseekV3": SHAPE | MLA,
    "GPT2": GPT2,
    # Drops cu_seq_lens and passes position_ids.
    "StableLm": {key: value for key, value in SHAPE.items() if key != "head_dim"},
    # Has a window in its mask only.
    "Qwen2Moe": SHAPE
    | WINDOW
    | {"use_sliding_window": True, "max_window_layers": 0, "num_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    | {"shared_expert_intermediate_size": 16},
}


def make(kind: str, implementation: str = "eager", **options: Any) -> Any:
    """A model whose attention matters: larger weights than random ones usually have."""
    torch.manual_seed(0)
    model = build(kind, implementation, **MODELS[kind] | options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif parameter.ndim > 1 and ("q_" in name or "k_" in name or "attn" in name):
                parameter.mul_(3)
    return model


def weights_of(batch: Batch) -> Tensor:
    """(rows, width, vocabulary) random, 0 at padding."""
    random = torch.Generator().manual_seed(5)
    drawn = torch.randn(batch.rows, batch.width, VOCAB, generator=random)
    return drawn * batch.token_mask[..., None]


def gradients(model: Any) -> dict[str, Tensor]:
    """By parameter."""
    return {
        name.removeprefix("_orig_mod."): parameter.grad.clone()  # of a compiled model
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def one_at_a_time(model: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of every slot (0 at padding) and gradients, from eager attention."""
    model.set_attn_implementation("eager")
    weights = weights_of(batch).flatten(0, 1)
    flat = batch.tokens.flatten()
    logits = torch.zeros(batch.rows * batch.width, VOCAB)
    model.zero_grad()
    for begin, size in zip(batch.cu_seqlens.tolist(), batch.seqlens.tolist(), strict=False):
        if size:
            slots = slice(begin, begin + size)
            out = model(input_ids=flat[slots][None], use_cache=False).logits[0]
            (out * weights[slots]).sum().backward()
            logits[slots] = out.detach()
    return logits.view(batch.rows, batch.width, VOCAB), gradients(model)


def together(model: Any, batch: Batch, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The same from one call of the model."""
    model.zero_grad()
    logits = model(**arguments).logits
    (logits * weights_of(batch)).sum().backward()
    return logits.detach(), gradients(model)


def errors(
    batch: Batch,
    found: tuple[Tensor, dict[str, Tensor]],
    expected: tuple[Tensor, dict[str, Tensor]],
) -> tuple[float, float]:
    """The largest error of real logits, and of the gradient of a parameter."""
    real = batch.token_mask
    assert found[1].keys() == expected[1].keys()
    off = max(errors_of_parameters(found[1], expected[1]).values())
    return distance(found[0][real], expected[0][real]), off
