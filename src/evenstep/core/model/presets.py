"""Shapes of well-known models by name, in the fields of their configurations."""

from __future__ import annotations

from typing import Any

_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
_TIED = {"tie_word_embeddings": True}
_QWEN2 = {"model_type": "qwen2", "use_sliding_window": False, "vocab_size": 152064}
_QWEN3 = {
    "model_type": "qwen3",
    "use_sliding_window": False,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}
_QWEN3_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
}


def _dense(base: dict[str, Any], hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        **base,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _dense(_LLAMA | _TIED, 2048, 16, 32, 8192),
    "llama-3.2-3b": _dense(_LLAMA | _TIED, 3072, 28, 24, 8192),
    "llama-3-8b": _dense(_LLAMA, 4096, 32, 32, 14336),
    "llama-3-70b": _dense(_LLAMA, 8192, 80, 64, 28672),
    "qwen2.5-1.5b": _dense(
        {**_QWEN2, **_TIED, "num_key_value_heads": 2, "vocab_size": 151936}, 1536, 28, 12, 8960
    ),
    "qwen2.5-7b": _dense({**_QWEN2, "num_key_value_heads": 4}, 3584, 28, 28, 18944),
    "qwen2.5-32b": _dense({**_QWEN2, "num_key_value_heads": 8}, 5120, 64, 40, 27648),
    "qwen2.5-72b": _dense({**_QWEN2, "num_key_value_heads": 8}, 8192, 80, 64, 29568),
    "qwen3-0.6b": _dense(_QWEN3 | _TIED, 1024, 28, 16, 3072),
    "qwen3-4b": _dense(_QWEN3 | _TIED, 2560, 36, 32, 9728),
    "qwen3-8b": _dense(_QWEN3, 4096, 36, 32, 12288),
    "qwen3-32b": _dense(_QWEN3, 5120, 64, 64, 25600),
    "qwen3-30b-a3b": {**_dense(_QWEN3_MOE, 2048, 48, 32, 6144), "moe_intermediate_size": 768},
    "qwen3-235b-a22b": {**_dense(_QWEN3_MOE, 4096, 94, 64, 12288), "moe_intermediate_size": 1536},
    "gemma-3-4b": {
        **_dense(_GEMMA3, 2560, 34, 8, 10240),
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "gemma-3-27b": {
        **_dense(_GEMMA3, 5376, 62, 32, 21504),
        "num_key_value_heads": 16,
        "head_dim": 128,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "mixtral-8x7b": {
        **_dense({"model_type": "mixtral"}, 4096, 32, 32, 14336),
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
    "deepseek-v3": {
        **_dense({"model_type": "deepseek_v3"}, 7168, 61, 128, 18432),
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "vocab_size": 129280,
    },
}
