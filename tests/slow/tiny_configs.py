"""Tiny configs of transformers: every kind of layer, windows and chunks shorter than the samples.

A config is made of its class. Fields that give a size get the value of `SIZES` with their name.
Layers are those of the default config, one of each kind. `EXCEPTIONS` has what this rule gets wrong.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from tests.slow.exceptions import EXCEPTIONS

VOCAB = 128
TOKENS = range(3, 90)
"""Ordinary tokens; special ones are below, and those of images and sounds above."""
WINDOW = 8

SIZES: dict[str, Any] = {
    # tokens and positions
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], VOCAB),
    **dict.fromkeys(
        ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"], 64
    ),
    "floor_scale": 8,
    # width
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "emb_dim", "backbone_hidden_size"], 32),
    **dict.fromkeys(
        "intermediate_size ffn_dim ffn_hidden_size dim_ff dff d_ff d_inner decoder_ffn_dim n_inner "
        "encoder_ffn_dim moe_intermediate_size shared_expert_intermediate_size feed_forward_size "
        "shared_intermediate_size intermediate_size_mlp dense_intermediate_size mlp_dim "
        "expert_ffn_hidden_size share_expert_dim prefix_dense_intermediate_size moe_hidden_size "
        "moe_shared_expert_intermediate_size projector_hidden_size vision_hidden_size "
        "alignment_intermediate_size projection_intermediate_size".split(),
        48,
    ),
    **dict.fromkeys(
        "out_hidden_size embed_dim projection_dim output_dim text_hidden_size input_embedding_size "
        "output_embedding_size embedding_size encoder_hidden_size vision_output_dim "
        "projector_input_dim projector_output_dim projection_hidden_size mm_embed_dim "
        "output_proj_dims image_text_hidden_size word_embed_proj_dim hidden_size_global".split(),
        32,
    ),
    "hidden_size_per_layer_input": 8,
    # heads
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "swa_num_attention_heads linear_num_value_heads linear_num_heads resampler_n_heads".split(),
        4,
    ),
    **dict.fromkeys(
        "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads "
        "index_n_heads num_global_key_value_heads".split(),
        2,
    ),
    **dict.fromkeys(
        "head_dim dim_head kv_channels swa_head_dim global_head_dim linear_head_dim d_kv "
        "linear_key_head_dim linear_value_head_dim attention_head_size resampler_head_dim".split(),
        8,
    ),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim"], 8),
    "v_head_dim": 12,
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "o_lora_rank"], 16),
    **dict.fromkeys(["rotary_dim", "query_pre_attn_scalar"], 8),
    # layers
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers depth decoder_layers encoder_layers layers "
        "num_decoder_layers num_encoder_layers num_blocks resampler_depth".split(),
        2,
    ),
    "use_sliding_window": True,
    "max_window_layers": 1,
    # experts
    **dict.fromkeys(
        ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4
    ),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"], 2),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"], 1),
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers", "topk_group"], 1),
    "n_group": 2,
    # states
    **dict.fromkeys(["mamba_d_state", "state_size", "ssm_state_size"], 4),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads", "n_mamba_heads"], 8),
    **dict.fromkeys(["mamba_head_dim", "mamba_chunk_size", "chunk_size"], 8),
    **dict.fromkeys(["n_groups", "mamba_n_groups", "mamba_ngroups"], 1),
    "mamba_d_ssm": 64,
    # images
    "image_size": 16,
    "patch_size": 4,
    **dict.fromkeys(["num_position_embeddings", "num_patches", "position_embedding_size"], 16),
    "image_seq_length": 16,
    # Heads that predict further tokens are not part of the logits.
    **dict.fromkeys(["num_mtp_layers", "num_nextn_predict_layers"], 0),
    "is_decoder": True,
}
WINDOWS = (
    "sliding_window sliding_window_size window_size local_attention attention_chunk_size "
    "attention_window_size keep_window_size index_topk"
).split()
"""How many keys a token sees, or how long a chunk is."""
OFF = ("dropout", "drop_path", "layerdrop", "_pdrop", "jitter")
"""What is random in training: fields with these parts in their names are set to 0."""


def tiny_config(config_class: type, window: int = WINDOW) -> Any:
    """A tiny config of this class, with windows and chunks of this size."""
    special = iter(range(TOKENS.stop, VOCAB))
    return config_class(**_arguments(config_class, window, special))


def _arguments(
    config_class: Any, window: int, special: Iterator[int], /, **defaults: Any
) -> dict[str, Any]:
    """Arguments of a config; each special token takes the next number."""
    given = EXCEPTIONS.get(config_class.model_type, {})
    if "layer_types" in given:
        given = {"num_hidden_layers": len(given["layer_types"])} | given
    subs = getattr(config_class, "sub_configs_defaults", None) or {}
    made: dict[str, Any] = dict(defaults)
    for field in dataclasses.fields(config_class):
        if field.name not in subs and field.name not in given:
            made |= _sized(field, window, special)
    for name, spec in subs.items():
        made[name] = _sub_config(spec, window, special) if name not in given else None
    if "kv_lora_rank" in made and "num_key_value_heads" in made:
        made["num_key_value_heads"] = made["num_attention_heads"]
    return made | _layers(config_class, made | given) | given


def _sized(field: dataclasses.Field[Any], window: int, special: Iterator[int]) -> dict[str, Any]:
    """The field with its size, if it has one."""
    name, value = field.name, field.default
    if name in SIZES or name in WINDOWS:
        kinds = re.sub(r"(list|tuple)\[[^]]*\]", "", str(field.type))
        size = SIZES.get(name, window)
        return {name: size} if re.search(r"\b(int|float|bool)\b", kinds) else {}
    if isinstance(value, float) and any(part in name for part in OFF):
        return {name: 0.0}
    if _is_token(name) and isinstance(value, int) and value >= TOKENS.start:
        return {name: next(special)}
    return {}


def _is_token(name: str) -> bool:
    return name.endswith(("token_id", "token_index", "_start_id", "_end_id", "newline_id"))


def _sub_config(spec: Any, window: int, special: Iterator[int]) -> dict[str, Any]:
    found = spec.config_class
    if not dataclasses.is_dataclass(found):  # AutoConfig
        found = spec.get_config_class(spec.model_type)
    kept = {name: value for name, value in spec.init_kwargs.items() if name not in {*SIZES, *WINDOWS}}
    return {"model_type": spec.model_type, **_arguments(found, window, special, **kept)}


def _layers(config_class: Any, made: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind: the lists of the default config, at the first layer of each kind."""
    names = {field.name for field in dataclasses.fields(config_class)}
    if "num_hidden_layers" not in names or not names & {"layer_types", "mlp_layer_types"}:
        return {}
    switches = {"use_sliding_window", "sliding_window", "max_window_layers", "first_k_dense_replace"}
    few = {name: made[name] for name in switches & made.keys()}
    default = config_class(**few)
    lists = {
        name: list(value)
        for name in ("layer_types", "mlp_layer_types")
        if name in names and (value := getattr(default, name, None))
    }
    if not lists:
        return {}
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=False)))
    kinds = kinds * 2 if len(kinds) == 1 else kinds
    chosen = {name: [kind[i] for kind in kinds] for i, name in enumerate(lists)}
    return {"num_hidden_layers": len(kinds), **chosen}
