"""Fields of tiny configs that the rules of `tiny_configs` get wrong, by `model_type`.

`None` for a sub-config leaves it out.
"""

from __future__ import annotations

from typing import Any

SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
CONV_AND_FULL = ["conv", "full_attention"]
STATE_AND_FULL = ["linear_attention", "full_attention"]


def _mrope(section: list[int], **options: Any) -> dict[str, Any]:
    """RoPE of three planes over two heads of 16."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return heads | {"rope_parameters": rope | options}


_HALF_MROPE = _mrope([2, 1, 1], partial_rotary_factor=0.5)
# Four layers, of which the last two take keys and values of the first two.
_SHARED = {
    "num_hidden_layers": 4,
    "layer_types": SLIDING_AND_FULL * 2,
    "num_kv_shared_layers": 2,
}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 8},
    "bailing_hybrid": {"layer_types": STATE_AND_FULL, "mlp_layer_types": ["dense", "sparse"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "blt_local_encoder": {"hidden_size_global": 32},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "chameleon_vqgan": {"base_channels": 32, "num_embeddings": 16, "channel_multiplier": [1, 1]},
    "cohere2_moe": {"layer_types": SLIDING_AND_FULL, "mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": {
        "head_dim": 16,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
            for kind in SLIDING_AND_FULL
        },
    },
    "cosmos3_edge_text": _mrope([2, 3, 3]),
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "doge": {"is_moe": True, "num_experts": 16},
    "emu3": {"vocabulary_map": {"<image>": 90}},
    "emu3_vqgan": {"base_channels": 32, "codebook_size": 16, "channel_multiplier": [1, 1]},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [48, 48],
        "mlp_layer_types": ["dense", "sparse"],
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "evolla": {
        "protein_encoder_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
        },
        "aligner_num_add_layers": 1,
        "resampler_num_latents": 4,
        "resampler_dim_head": 8,
        "resampler_heads": 4,
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {
        **_SHARED,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        **_SHARED,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
    },
    "gemma4_unified_text": {**_SHARED, "global_head_dim": 16},
    "glm46v_text": _HALF_MROPE,
    "glm4v_text": _HALF_MROPE,
    "glm4v_moe_text": _HALF_MROPE,
    "glm_ocr_text": _HALF_MROPE,
    "glm5_next_text": {"num_key_value_heads": 4, "index_kpool": 2, "qk_rope_head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": STATE_AND_FULL, "mamba_d_head": 8},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "2/4"},
    "falcon_h1": {"mamba_d_head": 8},
    "hunyuan_vl_vision": {"min_image_size": 8, "max_image_size": 16},
    "hunyuan_vl_text": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 2, 2, 2],
        },
    },
    "janus_vqgan": {"base_channels": 32, "num_embeddings": 16, "channel_multiplier": [1, 1]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": STATE_AND_FULL, "mlp_layer_types": ["dense", "sparse"]},
    "laguna": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "lfm2": {"layer_types": CONV_AND_FULL},
    "lfm2_moe": {"layer_types": CONV_AND_FULL},
    "llama4_text": {"moe_layers": [1], "attn_temperature_tuning": True},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": SLIDING_AND_FULL, "mlp_layer_types": ["dense", "sparse"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": {"layer_types": SLIDING_AND_FULL},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "paddleocr_vl_text": _mrope([2, 3, 3]),
    "qwen2_5_omni_thinker": {"vision_start_token_id": 120, "vision_end_token_id": 121},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 120, "vision_end_token_id": 121},
    "qwen2_5_omni_text": _mrope([2, 3, 3]),
    "qwen2_5_vl_text": _mrope([2, 3, 3]),
    "qwen2_vl_text": _mrope([2, 3, 3]),
    "qwen2_moe": {"num_hidden_layers": 2, "decoder_sparse_step": 2},
    "qwen3_moe": {"num_hidden_layers": 2, "decoder_sparse_step": 2},
    "qwen3_omni_moe_text": {"decoder_sparse_step": 2},
    "qwen3_vl_moe_text": {"decoder_sparse_step": 2},
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"]},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "muse_spark_text": {"mlp_layer_types": ["dense", "sparse"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "heads_per_ngram": 2,
        "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 8,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "eos_token_id": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [8, 24],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
    },
    "roc_bert": {"shape_vocab_size": 16, "pronunciation_vocab_size": 16},
    "step3p5": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "molmo2_adapter": {"vision_feature_layer": [0, 1]},
    "molmo2_vision": {"image_size": [16, 16]},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [16] * 4},
    "nemotron_h_omni": {"audio_config": None},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"]},
}
