"""Sizes of tiny configs, by the name of the field."""

from __future__ import annotations

from typing import Any

VOCAB = 128
WINDOW = 8

_NAMES: list[tuple[Any, str]] = [
    (VOCAB, "vocab_size vocab_size_per_layer_input"),
    (64, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
    (8, "floor_scale"),
    # width
    (32, "hidden_size n_embd d_model emb_dim backbone_hidden_size"),
    (48, "intermediate_size ffn_dim ffn_hidden_size dim_ff dff d_ff d_inner decoder_ffn_dim"),
    (48, "encoder_ffn_dim moe_intermediate_size shared_expert_intermediate_size n_inner"),
    (48, "shared_intermediate_size intermediate_size_mlp dense_intermediate_size mlp_dim"),
    (48, "expert_ffn_hidden_size share_expert_dim prefix_dense_intermediate_size"),
    (48, "moe_hidden_size moe_shared_expert_intermediate_size feed_forward_size"),
    (48, "projector_hidden_size vision_hidden_size alignment_intermediate_size"),
    (48, "projection_intermediate_size"),
    (32, "out_hidden_size embed_dim projection_dim output_dim text_hidden_size embedding_size"),
    (32, "input_embedding_size output_embedding_size encoder_hidden_size vision_output_dim"),
    (32, "projector_input_dim projector_output_dim projection_hidden_size mm_embed_dim"),
    (32, "output_proj_dims image_text_hidden_size word_embed_proj_dim hidden_size_global"),
    (8, "hidden_size_per_layer_input"),
    # heads
    (4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
    (4, "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads"),
    (4, "swa_num_attention_heads linear_num_value_heads linear_num_heads resampler_n_heads"),
    (2, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads"),
    (2, "linear_num_key_heads index_n_heads num_global_key_value_heads"),
    (8, "head_dim dim_head kv_channels swa_head_dim global_head_dim linear_head_dim d_kv"),
    (8, "linear_key_head_dim linear_value_head_dim attention_head_size resampler_head_dim"),
    (8, "qk_nope_head_dim qk_rope_head_dim index_head_dim rotary_dim query_pre_attn_scalar"),
    (12, "v_head_dim"),
    (16, "q_lora_rank kv_lora_rank o_lora_rank"),
    # layers
    (2, "num_hidden_layers n_layer n_layers num_layers depth decoder_layers encoder_layers"),
    (2, "layers num_decoder_layers num_encoder_layers num_blocks resampler_depth"),
    (True, "use_sliding_window is_decoder"),
    (1, "max_window_layers"),
    (2, "no_rope_layer_interval"),
    # Heads that predict further tokens are not part of the logits.
    (0, "num_mtp_layers num_nextn_predict_layers"),
    # experts
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_k moe_topk moe_top_k top_k_experts n_group"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts topk_group"),
    (1, "first_k_dense_replace num_dense_layers"),
    # states
    (4, "mamba_d_state state_size ssm_state_size"),
    (8, "mamba_n_heads mamba_num_heads n_mamba_heads mamba_head_dim mamba_chunk_size chunk_size"),
    (1, "n_groups mamba_n_groups mamba_ngroups"),
    (64, "mamba_d_ssm"),
    # images
    (16, "image_size num_position_embeddings num_patches position_embedding_size"),
    (16, "image_seq_length"),
    (4, "patch_size"),
]
SIZES: dict[str, Any] = {name: size for size, names in _NAMES for name in names.split()}

WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "window_size",
    "local_attention",
    "attention_chunk_size",
    "attention_window_size",
    "keep_window_size",
    "index_topk",
)
"""How many keys a token sees, or how long a chunk is."""
OFF = ("dropout", "drop_path", "layerdrop", "_pdrop", "jitter")
"""What is random in training: fields with these parts in their names are set to 0."""
