"""Which Hugging Face models support packed batches, tested by running them."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Packed, Padded
from evenstep.integrations.huggingface import choose_layout, hf_kwargs, supports_packing
from evenstep.tensors import Batch
from evenstep.testing import find_leaks
from tests.integrations.loops import tiny_model
from tests.integrations.models import SHAPE, build
from tests.internals import Layout
from tests.tensors.batches import VOCAB, batch_of

torch.set_num_threads(1)

LENGTHS = [5, 3, 1, 4]
PACKED = ["packed", "packed with a tail", "packed static"]
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

# Name, options: decoders that build their masks from position_ids.
SAFE: list[tuple[str, dict[str, Any]]] = [
    ("Llama", SHAPE),
    ("Qwen2", SHAPE),
    ("Qwen3", SHAPE),
    ("Mistral", SHAPE | {"sliding_window": 3}),
    ("Gemma3Text", SHAPE | {"sliding_window": 3}),
]
# Name, options, the layer that leaks, the reason given.
UNSAFE: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "OPT",
        SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "OPTAttention",
        "OPTDecoder builds",
    ),
    ("Falcon", SMALL, "FalconAttention", "FalconModel builds"),
    ("Bloom", SMALL, "BloomAttention", "not take position_ids"),
]
# Common arguments that hide the boundaries of packed batches.
SPOILED: dict[str, Callable[[Batch], dict[str, Any]]] = {
    "a cache": lambda batch: hf_kwargs(batch) | {"use_cache": True},
    "a mask": lambda batch: hf_kwargs(batch) | {"attention_mask": batch.token_mask.long()},
    "no positions": lambda batch: {"input_ids": batch.tokens, "use_cache": False},
    "tokens alone": lambda batch: {"input_ids": batch.tokens},
}


@pytest.fixture
def plain_flex() -> Iterator[None]:
    """Replace the compilation of FlexAttention, which transformers requests and takes a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.compile, of torch
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        with torch.compiler.set_stance("force_eager"):
            yield


def forward(
    model: Any, arguments: Callable[[Batch], dict[str, Any]] = hf_kwargs
) -> Callable[[Batch], Tensor]:
    return lambda batch: model(**arguments(batch)).logits


@pytest.mark.parametrize("recipe", [*PACKED, "packed and aligned", "padded", "dynamic"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("kind", "options"), SAFE, ids=[kind for kind, _ in SAFE])
def test_these_models_do_not_leak(
    kind: str, options: dict[str, Any], implementation: str, recipe: str
) -> None:
    model = build(kind, implementation, **options)
    assert supports_packing(model).safe
    assert find_leaks(forward(model), batch_of(LENGTHS, recipe), module=model) == []


@pytest.mark.usefixtures("plain_flex")
@pytest.mark.parametrize(("kind", "options"), SAFE[:3], ids=[kind for kind, _ in SAFE[:3]])
def test_flex_attention_does_not_leak(kind: str, options: dict[str, Any]) -> None:
    model = build(kind, "flex_attention", **options)
    assert supports_packing(model).safe
    for recipe in PACKED:
        batch = batch_of(LENGTHS, recipe)
        assert find_leaks(forward(model), batch, module=model, gradients=False) == []
    batch = batch_of(LENGTHS, "packed")
    leaks = find_leaks(forward(model, SPOILED["a cache"]), batch, module=model, gradients=False)
    assert leaks[0].layer_type == f"{kind}Attention"


@pytest.mark.parametrize("spoiled", sorted(SPOILED))
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("kind", "options"), SAFE[:3], ids=[kind for kind, _ in SAFE[:3]])
def test_these_models_leak_with_a_cache_a_mask_or_no_positions(
    kind: str, options: dict[str, Any], implementation: str, spoiled: str
) -> None:
    model = build(kind, implementation, **options)
    leaks = find_leaks(forward(model, SPOILED[spoiled]), batch_of(LENGTHS, "packed"), module=model)
    assert [leak.moved for leak in leaks] == [(1, 2, 3), (2, 3), (3,)]
    assert leaks[0].layer == "model.layers.0.self_attn"
    assert leaks[0].layer_type == f"{kind}Attention"


@pytest.mark.parametrize(
    ("kind", "options", "layer", "why"), UNSAFE, ids=[kind for kind, *_ in UNSAFE]
)
def test_these_models_always_leak(kind: str, options: dict[str, Any], layer: str, why: str) -> None:
    model = build(kind, **options)
    support = supports_packing(model)
    assert not support.safe
    assert why in support.why
    leaks = find_leaks(forward(model), batch_of(LENGTHS, "packed"), module=model)
    assert leaks[0].layer_type == layer
    assert find_leaks(forward(model), batch_of(LENGTHS, "padded"), module=model) == []


def test_flash_attention_is_safe_and_the_unknown_is_not() -> None:
    model = build("Llama", "eager", **SHAPE)
    for name, safe in (
        ("flash_attention_2", True),
        ("flash_attention_3", True),
        ("kernels-community/flash-attn", True),
        ("paged|flash_attention_2", False),
        ("my_own", False),
    ):
        model.config._attn_implementation_internal = name
        assert supports_packing(model).safe == safe, name
    falcon = build("Falcon", **SMALL)
    falcon.config._attn_implementation_internal = "flash_attention_2"
    assert "does not pass cu_seq_lens on" in supports_packing(falcon).why


def test_bidirectional_attention_is_not_safe() -> None:
    options = SMALL | {"intermediate_size": 48}
    assert "bidirectional" in supports_packing(build("Bert", "sdpa", **options)).why
    model = build("Llama", "sdpa", **SHAPE)
    model.config.is_causal = False
    assert "bidirectional" in supports_packing(model).why


def test_a_model_without_a_config_is_not_safe() -> None:
    support = supports_packing(nn.Linear(2, 2))
    assert not support.safe
    assert "find_leaks" in support.why


# Arguments -----------------------------------------------------------------------------------


def test_packed_rows_have_boundaries_and_no_mask() -> None:
    batch = batch_of([3, 2], "packed with a tail")
    kwargs = hf_kwargs(batch)
    assert kwargs["cu_seq_lens_q"].tolist() == [0, 3, 5, 64]
    assert kwargs["cu_seq_lens_k"].dtype == torch.int32
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == 59
    assert kwargs["position_ids"][0, :6].tolist() == [0, 1, 2, 0, 1, 0]
    assert kwargs["use_cache"] is False
    assert "attention_mask" not in kwargs
    assert "labels" not in kwargs


def test_padded_rows_have_a_mask_and_no_boundaries() -> None:
    batch = batch_of([3, 2], "dynamic")
    kwargs = hf_kwargs(batch, tiny_model(), labels=True)
    assert kwargs["attention_mask"].sum(1).tolist() == batch.seqlens[batch.seqlens > 0].tolist()
    assert "cu_seq_lens_q" not in kwargs
    assert torch.equal(kwargs["labels"], batch.unshifted_labels)


# Layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Packed(max_tokens=64, round_to=8), Padded(max_tokens=64, round_to=8)),
        (Packed(rows=2, pad_to=32), Padded(max_tokens=64, pad_to=32)),
        (Packed(samples=2, max_tokens=64), Padded(samples=2, max_tokens=64)),
        (Packed(samples=2), Padded(samples=2)),
    ],
)
def test_a_model_that_cannot_pack_gets_a_padded_layout_with_the_same_budget(
    layout: Layout, expected: Layout
) -> None:
    model = build("OPT", **UNSAFE[0][1])
    with pytest.warns(
        UserWarning, match=r"OPTForCausalLM does not support packed.*without position_ids"
    ):
        assert choose_layout(model, layout) == expected
    able = build("Llama", "sdpa", **SHAPE)
    assert choose_layout(able, layout) is layout
    assert choose_layout(model, expected) is expected
