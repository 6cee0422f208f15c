"""Tiny Hugging Face models with random weights, shaped like the real ones."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.tensors.batches import VOCAB

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def build(kind: str, implementation: str | None = None, **options: Any) -> Any:
    """A causal language model of transformers, ready to evaluate."""
    config = getattr(transformers, f"{kind}Config")(**options)
    names = (f"{kind.removesuffix('Text')}ForCausalLM", f"{kind}LMHeadModel")
    model = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    made = model._from_config(config, attn_implementation=implementation)
    return made.eval()


def llama(implementation: str) -> Any:
    torch.manual_seed(0)
    return build("Llama", implementation, **SHAPE)


def qwen(implementation: str) -> Any:
    torch.manual_seed(0)
    return build("Qwen3", implementation, **SHAPE)
