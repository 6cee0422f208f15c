"""Reading configurations: where they come from, what they must say, and how layers are counted."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost
from evenstep.errors import ConfigError, FileError
from tests.internals import (
    KINDS,
    PRESETS,
    ModelConfig,
    ModelSize,
    mixing_of,
    sparse_layers,
    text_work,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
sizes = st.integers(1, 64)


@given(layers=sizes, ffn=sizes, heads=sizes, groups=sizes, dim=sizes, vocab=sizes)
def test_a_dense_decoder_costs_what_its_shape_says(
    layers: int, ffn: int, heads: int, groups: int, dim: int, vocab: int
) -> None:
    hidden = heads * dim
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
    }
    shape = Cost.of_model(
        layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=groups, vocab=vocab
    )
    assert Cost.of_config(config) == shape


@dataclass(frozen=True, slots=True)
class Slotted:
    model_type: str = "llama"
    hidden_size: int = 64
    intermediate_size: int = 160
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    vocab_size: int = 100


def test_a_path_a_folder_a_mapping_and_objects_give_the_same_cost(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    converted = SimpleNamespace(to_dict=lambda: LLAMA)
    given = [path, str(path), tmp_path, LLAMA, SimpleNamespace(**LLAMA), converted, Slotted()]
    assert {Cost.of_config(config) for config in given} == {Cost.of_config(LLAMA)}


def test_the_head_counts_whether_or_not_it_is_tied() -> None:
    costs = {Cost.of_config({**LLAMA, "tie_word_embeddings": tied}) for tied in (True, False)}
    assert len(costs) == 1


@pytest.mark.parametrize("field", [name for name in LLAMA if name != "num_key_value_heads"])
def test_a_missing_field_is_named(field: str) -> None:
    rest = {name: value for name, value in LLAMA.items() if name != field}
    with pytest.raises(ConfigError, match=rf"has no {field}\. Add it, or pass the loaded"):
        Cost.of_config(rest)


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        ("qwen3", "head_dim"),
        ("mistral", "num_key_value_heads"),
        ("mixtral", "num_local_experts"),
        ("deepseek_v3", "first_k_dense_replace"),
        ("kimi_k2", "first_k_dense_replace"),
        ("qwen3_next", "full_attention_interval"),
        ("jamba", "attn_layer_offset"),
    ],
)
def test_a_field_that_a_type_needs_is_named(model_type: str, field: str) -> None:
    rest = {**LLAMA, "model_type": model_type, "attn_layer_period": 2}
    if model_type != "jamba":
        del rest["attn_layer_period"]
    if field == "num_key_value_heads":
        del rest[field]
    with pytest.raises(ConfigError, match=f"has no {field}"):
        Cost.of_config(rest)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, "hidden_size in the configuration must be an integer in"),
        ({"hidden_size": "64"}, "hidden_size in the configuration must be an integer in"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers in the configuration must be"),
        ({"num_attention_heads": 65}, "more heads than hidden_size"),
        ({"model_type": "llamma"}, "model_type 'llamma' are not known. Did you mean llama?"),
        ({"model_type": "t5"}, "Give the shape to Cost.of_model, or measured times to Cost.fit"),
        ({"model_type": "qwen2", "use_sliding_window": "no"}, "must be true or false"),
        ({"layer_types": ["full_attention"]}, "has 1 entries, but there are 2 layers"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types in the configuration has 3 entries"),
        ({"layer_types": "full"}, "layer_types in the configuration must be a list"),
        ({"layer_types": ["full_attention", "mamba"]}, "has 'mamba', which is not known in llama"),
        ({"layer_types": ["full_attention", "mlp"]}, "has 'mlp', which is not known in llama"),
        ({"layer_types": ["hybrid"] * 2}, "has 'hybrid', which is not known in llama"),
        ({"layer_types": ["chunked_attention"] * 2}, "has 'chunked_attention', which is not known"),
        ({"layer_types": ["full_attention", 3]}, "has 3, which is not known in llama"),
    ],
)
def test_a_wrong_field_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Cost.of_config({**LLAMA, **fields})
    assert message in str(caught.value)


@pytest.mark.parametrize("config", [3, None, [LLAMA], dict])
def test_something_else_is_refused(config: object) -> None:
    with pytest.raises(ConfigError, match="must be a path, a mapping or a configuration object"):
        Cost.of_config(config)


def test_a_part_is_text_or_vision() -> None:
    with pytest.raises(ConfigError, match="unknown part 'audio'; expected one of: text, vision"):
        Cost.of_config(LLAMA, part="audio")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"has no vision_config\. Use part='text'"):
        Cost.of_config(LLAMA, part="vision")
    with pytest.raises(ConfigError, match="vision tower of model_type 'swin' is not known"):
        Cost.of_config({**LLAMA, "vision_config": {"model_type": "swin"}}, part="vision")
    with pytest.raises(ConfigError, match="vision_config in the configuration must be a path"):
        Cost.of_config({**LLAMA, "vision_config": 3}, part="vision")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"config\.json cannot be read \(No such file"):
        Cost.of_config(tmp_path)
    with pytest.raises(FileError, match="nothing cannot be read"):
        Cost.of_config(tmp_path / "nothing")
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff{")
    with pytest.raises(FileError, match="is not JSON"):
        Cost.of_config(path)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"holds \[1\], expected the fields of a model"):
        Cost.of_config(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json has no model_type"):
        Cost.of_config(path)


def mixing(model_type: str, layers: int, **fields: Any) -> str:
    """F: all tokens, W: a window, M: a mixer, B: all tokens and a mixer, N: nothing."""
    config = ModelConfig({"model_type": model_type, **fields}, "here")
    return "".join(name[0] for name in mixing_of(config, KINDS[model_type], layers)).upper()


def test_windows_are_where_the_model_has_them() -> None:
    assert mixing("llama", 3, sliding_window=64) == "FFF"
    assert mixing("mistral", 3) == mixing("mistral", 3, sliding_window=None) == "FFF"
    assert mixing("mistral", 3, sliding_window=64) == "WWW"
    assert mixing("mistral", 3, sliding_window=64, max_position_embeddings=64) == "FFF"
    assert mixing("gemma2", 4, sliding_window=64) == "WFWF"
    assert mixing("gemma3_text", 7, sliding_window=64) == "WWWWWFW"
    assert mixing("gemma3_text", 4, sliding_window=64, sliding_window_pattern=2) == "WFWF"
    upper = {"sliding_window": 64, "max_window_layers": 1}
    assert mixing("qwen2", 3, **upper) == "FWW"
    assert mixing("qwen2", 3, use_sliding_window=False, **upper) == "FFF"


def test_hybrid_models_attend_in_some_layers() -> None:
    assert mixing("falcon_h1", 2) == mixing("falcon_h1", 2, layer_types=["hybrid"] * 2) == "BB"
    assert mixing("nemotron_h", 4, hybrid_override_pattern="M-*E") == "MNFN"
    types = ["linear_attention", "mlp", "full_attention", "moe"]
    assert mixing("nemotron_h", 4, layers_block_type=types) == "MNFN"
    assert mixing("kimi_linear", 4, linear_attn_config={"full_attn_layers": [4]}) == "MMMF"
    assert mixing("qwen3_next", 5, full_attention_interval=4) == "MMMFM"
    assert mixing("jamba", 5, attn_layer_period=4, attn_layer_offset=1) == "MFMMM"
    assert mixing("bamba", 3, attn_layer_indices=[2]) == "MMF"
    assert mixing("lfm2", 3, layer_types=["conv", "full_attention", "conv"]) == "MFM"
    assert mixing("mamba2", 2) == "MM"


def sparse(model_type: str, layers: int, **fields: Any) -> set[int]:
    return sparse_layers(ModelConfig(fields, "here"), KINDS[model_type], layers)


def test_experts_are_where_the_model_has_them() -> None:
    assert sparse("llama", 3) == set()
    assert sparse("mixtral", 3) == {0, 1, 2}
    assert sparse("deepseek_v3", 5, first_k_dense_replace=1, moe_layer_freq=2) == {2, 4}
    assert sparse("deepseek_v3", 3, moe_layer_freq=[0, 1, 1]) == {1, 2}
    assert sparse("qwen3_moe", 6, decoder_sparse_step=2, mlp_only_layers=[3]) == {1, 5}
    assert sparse("jamba", 5, expert_layer_period=2, expert_layer_offset=1) == {1, 3}
    bounds = {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 2}
    assert sparse("ernie4_5_moe", 6, **bounds) == {1, 3, 5}
    assert sparse("nemotron_h", 4, hybrid_override_pattern="M-*E") == {3}
    assert sparse("glm4_moe_lite", 2, mlp_layer_types=["dense", "sparse"]) == {1}


@given(window=st.integers(1, 500), lengths=st.lists(st.integers(1, 2000), min_size=1))
def test_a_window_costs_at_most_its_width_too_much(window: int, lengths: list[int]) -> None:
    """Exact attention of a layer: L²/2 up to the window, then window·L minus a constant."""
    config = {**LLAMA, "model_type": "mistral", "sliding_window": window}
    full, slides = Cost.of_config({**config, "sliding_window": None}), Cost.of_config(config)
    length = np.array(lengths, np.float64)
    pairs = np.where(length <= window, length**2 / 2, window * length - window**2 / 2)
    pair = 2 * full.per_pair
    exact = full.per_token * length + pair * pairs
    modelled = slides.of_lengths(np.array(lengths))
    assert slides.per_pair == 0
    assert (modelled >= exact * (1 - 1e-12)).all()
    assert (modelled - exact <= pair * window * np.minimum(length, window)).all()


def test_attention_in_both_directions_counts_all_pairs() -> None:
    both = Cost.of_config({**LLAMA, "use_bidirectional_attention": True})
    assert both.per_pair == 2 * Cost.of_config(LLAMA).per_pair


def test_windows_of_a_vision_tower_hold_square_regions() -> None:
    tower = {
        "model_type": "qwen2_5_vl",
        "depth": 4,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "out_hidden_size": 8,
    }
    windows = {"window_size": 112, "fullatt_block_indexes": [3]}
    plain = Cost.of_config({**LLAMA, "vision_config": tower}, part="vision")
    local = Cost.of_config({**LLAMA, "vision_config": {**tower, **windows}}, part="vision")
    assert plain.per_pair == 6 * 4 * 16
    assert local.per_pair == 6 * 16
    assert local.per_token - plain.per_token == 6 * 3 * 16 * 64


# Published sizes in billions: all weights of a dense model, those of one token with experts.
SIZES = {
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-7b": 7.62,
    "qwen2.5-32b": 32.8,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.6,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 3.35,
    "qwen3-235b-a22b": 22.2,
    "gemma-3-4b": 3.88,
    "gemma-3-27b": 27.0,
    "gpt-oss-20b": 3.6,
    "gpt-oss-120b": 5.1,
    "mixtral-8x7b": 12.9,
    "deepseek-v3": 37.6,
}
# All weights in billions, experts included, as announced: names round them.
HYBRIDS = {
    "qwen3-next-80b-a3b": 80,
    "qwen3.5-9b": 9,
    "qwen3.5-35b-a3b": 35,
    "nemotron-h-8b": 8,
    "nemotron-3-nano-30b-a3b": 30,
    "kimi-linear-48b-a3b": 48,
    "falcon-h1-7b": 7.5,
    "granite-4.0-h-micro": 3,
    "granite-4.0-h-tiny": 7,
    "granite-4.0-h-small": 32,
}
TIED = ("llama-3.2", "qwen2.5-1.5b", "qwen3-0.6b", "qwen3-4b", "gemma", "gpt-oss")  # or left out


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_model_has_its_announced_size_and_is_linear_where_it_has_no_attention(
    name: str,
) -> None:
    config = ModelConfig(PRESETS[name], name)
    assert ModelSize.of(config).parameters / 1e9 == pytest.approx(HYBRIDS[name], rel=0.07)
    layers = mixing_of(config, KINDS[config.model_type], PRESETS[name]["num_hidden_layers"])
    attending = sum(layer in ("full", "both") for layer in layers)
    assert attending > 0
    work = text_work(config)
    without = dict.fromkeys(("layer_types", "attn_layer_indices", "hybrid_override_pattern"))
    plain = {**PRESETS[name], **without, "layer_types": ["full_attention"] * len(layers)}
    assert text_work(ModelConfig(plain, name)).pairs / len(layers) == work.pairs / attending


@pytest.mark.parametrize("name", SIZES)
def test_a_named_model_has_its_published_size(name: str) -> None:
    preset = PRESETS[name]
    weights = text_work(ModelConfig(preset, name)).weights / 1e9
    if not name.startswith(TIED):
        weights += preset["hidden_size"] * preset["vocab_size"] / 1e9  # the embedding
    assert weights == pytest.approx(SIZES[name], rel=0.015)


def test_all_named_models_have_a_published_size() -> None:
    assert set(PRESETS) == {*SIZES, *HYBRIDS}


def test_a_wrong_name_lists_the_names() -> None:
    with pytest.raises(ConfigError, match="unknown model 'llama-9'; expected one of: llama"):
        Cost.named("llama-9")
    for wrong in (3, None, ["llama-3-8b"]):
        with pytest.raises(ConfigError, match="unknown model"):
            Cost.named(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cost", "text"),
    [
        (Cost(), "tokens only"),
        (Cost(per_token=3), "tokens only"),
        (Cost(per_token=24576, per_pair=1), "24576·L + L²"),
        (Cost(per_token=1, per_pair=0.05), "20·L + L²"),
        (Cost(per_token=0, per_pair=2), "L²"),
        (Cost(per_token=2, per_segment=8), "L + 4"),
        (Cost(per_token=0, per_segment=8), "1"),
        (Cost(per_micro_batch=500), "L, and 500 per micro-batch"),
        (Cost.named("llama-3-8b"), "57256·L + L²"),
    ],
)
def test_a_cost_is_described_in_a_few_words(cost: Cost, text: str) -> None:
    assert cost.description == text


@given(unit=st.floats(1e-3, 1e12))
def test_the_unit_of_a_cost_does_not_change_its_description(unit: float) -> None:
    cost = Cost(per_token=24576 * unit, per_pair=unit)
    assert cost.description == "24576·L + L²"
