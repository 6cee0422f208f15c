"""The cost of a model compared with the parameters and FLOPs of the model itself."""

from typing import Any

import pytest

from evenstep import Cost
from tests.internals import DEFAULTS, KINDS, Part, read_model_config, text_work, vision_work

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 640,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 640, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 512}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_key_value_heads": 8,
}
DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "head_dim": 32,
}
MAMBA = {"mamba_d_state": 16, "mamba_expand": 2, "mamba_d_conv": 4}
MAMBA2 = {**MAMBA, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2}
LFM2 = {"block_multiple_of": 32, "full_attn_idxs": [1, 3]}
LAYERS = {"layer_types": ["linear_attention", "full_attention"] * 2}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 64, "head_dim": 32},
    "ministral": {"sliding_window": 64, "head_dim": 32},
    "ministral3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 64},
    "gemma3_text": {"head_dim": 32, "sliding_window": 64},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 64},
    "phi": {},
    "phi3": {},
    "granite": {},
    "starcoder2": {"sliding_window": 64},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "smollm3": {},
    "cohere": {},
    "cohere2": {"sliding_window": 64},
    "stablelm": {},
    "exaone4": {"sliding_window": 64},
    "seed_oss": {"head_dim": 32},
    "nemotron": {"head_dim": 32},
    "arcee": {},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 32},
    "ernie4_5": {"head_dim": 32},
    "apertus": {},
    "gpt2": GPT2,
    "gpt_neox": {},
    "gptj": {**GPT2, "rotary_dim": 8},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoeshared": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "sliding_window": 64,
    },
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 2},
    "qwen3_moe": {**EXPERTS, "head_dim": 32, "mlp_only_layers": [0, 2]},
    "glm4_moe": {**DEEPSEEK, "head_dim": 16},
    "dots1": DEEPSEEK,
    "deepseek_v2": {**DEEPSEEK, **LATENT},
    "deepseek_v3": {**DEEPSEEK, **LATENT},
    "glm4_moe_lite": {**DEEPSEEK, **LATENT},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 96,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
    },
    "qwen3_next": {**EXPERTS, **DELTA, **LAYERS, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": {**DELTA, **LAYERS},
    "qwen3_5_moe_text": {**EXPERTS, **DELTA, **LAYERS, "shared_expert_intermediate_size": 64},
    "jamba": {
        **MAMBA,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "bamba": {**MAMBA2, "attn_layer_indices": [1, 2]},
    "granitemoehybrid": {
        **MAMBA2,
        **LAYERS,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "lfm2": LFM2,
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 256, "head_dim": 32},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 64,
        "moe_latent_size": 48,
    },
    "kimi_linear": {
        **{name: value for name, value in LATENT.items() if name != "q_lora_rank"},
        "linear_num_heads": 4,
        "linear_head_dim": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "mamba": {"state_size": 16, "time_step_rank": "auto", "intermediate_size": 256},
    "falcon_mamba": {"state_size": 16, "time_step_rank": 8, "intermediate_size": 256},
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 32, "n_groups": 2},
}
NESTED = {"qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text"}
NESTED |= {"qwen2_5_omni_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "kimi_k2"}


def configuration(name: str) -> Any:
    own = MODELS[name]
    fields = {**own} if "n_embd" in own else {**SMALL, **own}
    return transformers.AutoConfig.for_model(name, **fields)


def active(model: Any, share: float) -> float:
    """The weights that a token passes through, of a model of which `share` of experts is active."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    total = 0.0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        last = name.split(".")[-1]
        if parameter.ndim < 2 or last == "A_log" or last.endswith("_bias"):
            continue
        if id(parameter) in embeddings and "lm_head" not in name:
            continue
        routed = ".experts." in name or name.split(".")[-2] == "experts"
        total += parameter.numel() * (share if routed else 1.0)
    return total


def causal(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_of_a_model_are_counted(name: str) -> None:
    config = configuration(name)
    own = {**MODELS[name], **config.to_dict()}
    experts = own.get("num_local_experts") or own.get("num_experts") or own.get("n_routed_experts")
    experts = experts or own.get("moe_num_experts") or 1
    chosen = own.get("num_experts_per_tok") or own.get("moe_k") or 1
    counted = active(causal(config), chosen / experts if experts > 1 else 1.0)
    section = read_model_config(config).section("text")
    assert text_work(section).weights == pytest.approx(counted, rel=0.01)


def forward_flops(model: Any, tokens: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("llama", {}),
        ("qwen3", {"head_dim": 32}),
        ("gpt2", GPT2),
        ("deepseek_v3", {**DEEPSEEK, **LATENT, "first_k_dense_replace": 4}),
    ],
)
def test_the_flops_of_a_forward_pass_are_counted(name: str, own: dict[str, Any]) -> None:
    fields = own if name == "gpt2" else {**SMALL, **own}
    config = transformers.AutoConfig.for_model(name, **fields, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config)
    cost = Cost.of_config(config)
    for tokens in (64, 256):
        # Eager attention computes all pairs, also those that the causal mask hides.
        expected = (cost.per_token * tokens + 2 * cost.per_pair * tokens**2) / 3
        assert forward_flops(model, tokens) == pytest.approx(expected, rel=0.01)


def test_every_known_type_is_compared_with_a_model() -> None:
    assert set(KINDS) - NESTED == set(MODELS)


TOWER = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 14,
    "image_size": 56,
}
QWEN_TOWER = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_heads": 4,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 128,
}
OLD_QWEN_TOWER = {"depth": 4, "embed_dim": 64, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 4}
TEXTS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **SMALL},
        "vision_config": {"model_type": "clip_vision_model", **TOWER},
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "head_dim": 16, **SMALL},
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **TOWER},
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", "head_dim": 32, **SMALL},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **SMALL},
        "vision_config": {
            "model_type": "internvl_vision",
            **TOWER,
            "patch_size": [14, 14],
            "image_size": [56, 56],
        },
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **SMALL},
        "vision_config": {"model_type": "idefics3_vision", **TOWER},
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **SMALL},
        "vision_config": {"model_type": "smolvlm_vision", **TOWER},
    },
    "qwen2_vl": {"text_config": SMALL, "vision_config": OLD_QWEN_TOWER},
    "qwen2_5_vl": {
        "text_config": SMALL,
        "vision_config": {**QWEN_TOWER, "window_size": 56, "fullatt_block_indexes": [3]},
    },
    "qwen3_vl": {
        "text_config": {**SMALL, "head_dim": 32},
        "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [1, 2]},
    },
    "qwen3_vl_moe": {
        "text_config": {**SMALL, **EXPERTS, "head_dim": 32},
        "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [1]},
    },
    "qwen3_5": {
        "text_config": {**SMALL, **DELTA, **LAYERS},
        "vision_config": QWEN_TOWER,
    },
}


def multimodal(name: str) -> tuple[Any, Any]:
    config = transformers.AutoConfig.for_model(name, **TEXTS[name])
    with torch.device("meta"):
        return config, transformers.AutoModelForImageTextToText.from_config(config)


def tower_weights(model: Any) -> float:
    """The weights that a patch passes through; a merger takes four patches."""
    inner = model.model
    tower = getattr(inner, "visual", None) or getattr(inner, "vision_tower", None)
    tower = tower or inner.vision_model
    total = 0.0
    for name, parameter in tower.named_parameters():
        table = "position" in name or "pos_embed" in name or "cls_token" in name
        if parameter.ndim >= 2 and not table:
            total += parameter.numel() / (4 if "merger" in name else 1)
    return total


@pytest.mark.parametrize("name", TEXTS)
def test_both_parts_of_a_multimodal_model_are_counted(name: str) -> None:
    config, model = multimodal(name)
    read = read_model_config(config)
    experts = 2 / 8 if "moe" in name else 1.0
    inner = model.model
    decoder = getattr(inner, "language_model", None) or inner.text_model
    text = active(decoder, experts)
    head = SMALL["vocab_size"] * SMALL["hidden_size"]
    assert text_work(read.section("text")).weights == pytest.approx(text + head, rel=0.01)
    tower = tower_weights(model)
    assert vision_work(read.section("vision")).weights == pytest.approx(tower, rel=0.01)


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_of_nested_configurations_are_those_of_their_classes(name: str) -> None:
    fields = transformers.AutoConfig.for_model(name).to_dict()
    assert {field: fields[field] for field in DEFAULTS[name]} == DEFAULTS[name]


@pytest.mark.parametrize("name", ["llava", "gemma3", "mistral3"])
def test_nested_fields_that_equal_their_defaults_may_be_left_out(name: str) -> None:
    whole = transformers.AutoConfig.for_model(name, **TEXTS[name]).to_dict()
    short: dict[str, Any] = {"model_type": name}
    for section in ("text_config", "vision_config"):
        fields = whole[section]
        plain = transformers.AutoConfig.for_model(fields["model_type"]).to_dict()
        kept = {key: value for key, value in fields.items() if plain.get(key) != value}
        short[section] = {"model_type": fields["model_type"], **kept}
    assert "num_channels" not in short["vision_config"]
    parts: tuple[Part, ...] = ("text", "vision")
    for part in parts:
        assert Cost.of_config(short, part=part) == Cost.of_config(whole, part=part)
