"""Sizes of models, and the terms of the memory that training takes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Topology
from evenstep.errors import ConfigError
from tests.examples import examples
from tests.internals import (
    GPUS,
    PRESETS,
    Gpu,
    Memory,
    ModelConfig,
    ModelSize,
    cluster_of,
    memory_of,
    named_config,
)

# Parameters in billions, as published.
PUBLISHED = {
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-7b": 7.62,
    "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.5,
    "mixtral-8x7b": 46.7,
    "deepseek-v3": 671,
}
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SIZE = ModelSize.of(named_config("llama-3.2-1b"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_models_have_their_published_number_of_parameters(name: str) -> None:
    found = ModelSize.of(named_config(name)).parameters / 1e9
    assert found == pytest.approx(PUBLISHED[name], rel=0.005)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "mixtral", "olmo2", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_sizes_count_the_parameters_of_the_real_model(kind: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    fields = TINY | {"tie_word_embeddings": tied, "num_local_experts": 4}
    if kind == "gpt2":
        fields |= {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 8}
    config = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(each.numel() for each in model.parameters())
    given = {**config.to_dict(), "tie_word_embeddings": tied}
    found = ModelSize.of(ModelConfig(given, "a config")).parameters
    assert found == pytest.approx(count, rel=0.06)  # biases and further norms are small


HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 16},
}


@pytest.mark.parametrize("kind", HYBRID)
def test_sizes_count_the_parameters_of_hybrid_models(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    tied = {"tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(kind, **TINY | HYBRID[kind] | tied)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(each.numel() for each in model.parameters())
    size = ModelSize.of(ModelConfig({**HYBRID[kind], **config.to_dict()}, "a config"))
    assert size.parameters == pytest.approx(count, rel=0.06)
    attending = {"qwen3_5_text": 1, "falcon_h1": 3, "nemotron_h": 1, "mamba2": 0}[kind]
    assert size.work.keys == 2 * 16 * attending


def test_a_layer_that_carries_state_keeps_what_autograd_keeps() -> None:
    """Of a mixer of Qwen3-Next in bfloat16, with our kernels."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from evenstep.integrations.huggingface import hf_forward, supports_packing
    from tests.integrations.hybrids import packed, samples_of
    from tests.internals import mixers

    sizes = HYBRID["qwen3_5_text"] | {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    config = transformers.Qwen3_5TextConfig(**TINY | sizes)
    model = transformers.Qwen3_5ForCausalLM(config).bfloat16()
    assert supports_packing(model).safe
    module = next(iter(mixers.mixers_of(model).values()))
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, Any] = {}
    inside: list[bool] = []

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    module.register_forward_pre_hook(lambda *_: inside.append(True))
    module.register_forward_hook(lambda *_: inside.clear())
    batch = packed(samples_of((100, 60, 96)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = hf_forward(model)(model, batch)
    measured = sum(storage.nbytes() for storage in kept.values()) / 256
    assert outputs.requires_grad
    convolved, inner = 2 * 64 + 128, 128
    assert 4 * convolved + 30 * inner == pytest.approx(measured, rel=0.1)
    fields = {**config.to_dict(), "layer_types": ["linear_attention"] * 3}
    size = ModelSize.of(ModelConfig(fields, "a config"))
    assert size.work.kept == 3 * (16 * 32 + 8 * 48 + 4 * convolved + 30 * inner)


def test_a_missing_model_is_one_sentence_with_the_names() -> None:
    with pytest.raises(ConfigError, match="'llama-9' is not a known name"):
        named_config("llama-9")


def test_the_terms_of_one_device_are_those_of_the_formula() -> None:
    found = memory_of(SIZE, Topology(), slots=10_000, micro_batches=3)
    weights = SIZE.parameters
    assert found.weights == found.gradients == found.update == 4 * weights
    assert found.optimizer == 8 * weights
    assert found.summed_gradients == 4 * weights
    assert found.gathered == 2 * 128256 * 2048
    layer = 16 * 2048 + 4 * 2048 + 4 * 512 + 8 * 8192
    assert found.activations == 16 * layer * 10_000
    assert found.logits == 6e8 + 6 * 2048 * (128256 + 10_000)
    terms = ("weights", "optimizer", "summed_gradients", "gathered", "activations", "logits")
    assert found.peak == sum(getattr(found, name) for name in terms)


def test_few_logits_are_computed_at_once() -> None:
    logits = [memory_of(SIZE, Topology(), slots=n, micro_batches=1).logits for n in (130, 131)]
    assert logits == [14 * 128256 * 130, 2 * 128256 * 131 + 6 * 2048 * (128256 + 131)]
    shared = memory_of(SIZE, Topology(tp=2), slots=10_000, micro_batches=1)
    assert shared.logits == 6e8 + 6 * 2048 * (128256 / 2 + 5_000)


def test_one_micro_batch_holds_no_summed_gradients() -> None:
    several = memory_of(SIZE, Topology(dp=8), slots=4096, micro_batches=2)
    one = memory_of(SIZE, Topology(dp=8), slots=4096, micro_batches=1)
    assert one.summed_gradients == 0
    assert several.peak - one.peak == 4 * SIZE.parameters


def test_a_tiny_micro_batch_peaks_in_the_update() -> None:
    found = memory_of(SIZE, Topology(), slots=16, micro_batches=1)
    assert found.peak == pytest.approx(20 * SIZE.parameters)


def test_checkpointing_keeps_the_inputs_of_layers() -> None:
    found = memory_of(SIZE, Topology(), slots=100, micro_batches=1, checkpointing=True)
    assert found.activations == 2 * 2048 * 16 * 100
    assert found.recomputed == SIZE.work.kept / 16 * 100


@given(
    st.sampled_from(sorted(PRESETS)),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(1, 1 << 20),
    st.integers(1, 8),
)
@examples(100)
def test_sharding_and_recomputing_never_take_more_memory(
    name: str, dp: int, cp: int, tp: int, slots: int, waves: int
) -> None:
    size = ModelSize.of(named_config(name))

    def peak(topology: Topology, checkpointing: bool = False) -> Memory:
        return memory_of(
            size, topology, slots=slots, micro_batches=waves, checkpointing=checkpointing
        )

    topology = Topology(dp=dp, cp=cp, tp=tp)
    plain = peak(topology)
    assert plain.peak <= peak(Topology(dp=dp)).peak + 1
    assert peak(topology, True).peak <= plain.peak + 1
    assert peak(Topology(dp=2 * dp, cp=cp, tp=tp)).peak <= plain.peak + 1
    assert plain.to_dict()["peak"] == plain.peak


def test_bytes_of_a_token_follow_the_table_of_model_size() -> None:
    # 48 layers: hidden 2048, queries 4096, keys 512 (both normed), 8 experts of width 768.
    size = ModelSize.of(named_config("qwen3-30b-a3b"))
    hidden, heads, width, experts = 2048, 4096 + 512, 8 * 768, 8
    assert size.work.kept == 48 * (16 * hidden + (4 + 6) * heads + 8 * width + 6 * hidden * experts)
    moved = 250 * hidden + (70 + 108) * heads + 30 * width + 18 * hidden * experts
    assert size.work.moved == 48 * moved


@given(st.sampled_from(sorted(PRESETS)), st.sampled_from(sorted(GPUS)), st.integers(1, 3))
@examples(60)
def test_more_devices_share_the_time_of_a_micro_batch(name: str, gpu: str, power: int) -> None:
    size, device = ModelSize.of(named_config(name)), Gpu.named(gpu)
    one = cluster_of(size, device, Topology())
    split = cluster_of(size, device, Topology(cp=2**power))
    again = cluster_of(size, device, Topology(), checkpointing=True)
    assert one.cost.per_token / 2**power < split.cost.per_token  # they exchange keys
    assert split.cost.per_pair == pytest.approx(one.cost.per_pair / 2**power)
    assert one.cost.per_token < again.cost.per_token < 4 / 3 * one.cost.per_token


def test_an_unknown_gpu_is_one_sentence_with_the_names() -> None:
    with pytest.raises(ConfigError, match="unknown GPU 'tpu'; expected one of: b200, h200"):
        Gpu.named("tpu")
    assert Gpu.named("H200") is GPUS["h200"]
