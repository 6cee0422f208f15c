"""What `supports_packing` refuses: gradients that would differ, and what it says of costs."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from evenstep import Packed, Padded, PlannedStream, Recipe
from evenstep.data import InMemory, separate_lengths
from evenstep.errors import ConfigError, InputError
from evenstep.integrations.huggingface import (
    RopeLimit,
    choose_layout,
    hf_forward,
    rope_limit,
    supports_packing,
)
from evenstep.tensors import Batch, cross_entropy
from evenstep.testing import find_leaks
from evenstep.train import Runner
from tests.integrations.hf_steps import (
    batches_for,
    furthest,
    gradient_alone,
    gradients_of,
    step_gradient,
)
from tests.integrations.models import SHAPE, build, llama
from tests.tensors.batches import VOCAB, batch_of, samples_of

torch.set_num_threads(1)

LENGTHS = [5, 3, 12, 4, 9, 2]
PACKED = Recipe(layout=Packed(max_tokens=24))
HALF = SHAPE["head_dim"] // 2
LONG = {
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 8,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0] * HALF,
        "long_factor": [4.0] * HALF,
    },
    "initializer_range": 0.3,
}
DYNAMIC = {
    "max_position_embeddings": 8,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    "initializer_range": 0.3,
}


def longrope() -> Any:
    torch.manual_seed(0)
    return build("Phi3", "sdpa", **SHAPE | LONG).double()


def dynamic() -> Any:
    torch.manual_seed(0)
    return build("Llama", "sdpa", **SHAPE | DYNAMIC).double()


# RoPE --------------------------------------------------------------------------------------------


def plain(model: Any) -> Any:
    """Without the checks of `hf_forward`."""

    def run(batch: Batch) -> Tensor:
        return model(
            input_ids=batch.tokens, position_ids=batch.position_ids, use_cache=False
        ).logits

    return run


@pytest.mark.parametrize("make", [longrope, dynamic])
def test_rope_that_depends_on_neighbours_is_found_by_their_lengths(make: Any) -> None:
    model = make()
    batch = batch_of([5, 3, 4], "packed")  # twice 5 is above the limit
    assert find_leaks(plain(model), batch, module=model, lengths=False) == []
    leaks = find_leaks(plain(model), batch, module=model)
    assert {leak.change for leak in leaks} == {"length"}


@pytest.mark.parametrize(("make", "kind"), [(longrope, "longrope"), (dynamic, "dynamic")])
def test_rope_that_depends_on_neighbours_is_not_safe_beyond_its_limit(make: Any, kind: str) -> None:
    model = make()
    assert rope_limit(model) == RopeLimit(kind, 8)  # type: ignore[arg-type]
    assert not supports_packing(model).safe
    assert kind in supports_packing(model).why
    assert supports_packing(model, longest=7).safe
    assert not supports_packing(model, longest=9).safe
    assert rope_limit(llama("sdpa")) is None


@pytest.mark.parametrize("layout", [Packed(max_tokens=24), Padded(max_tokens=48)])
@pytest.mark.parametrize("make", [longrope, dynamic])
def test_lengths_that_cannot_share_a_micro_batch_are_refused(make: Any, layout: Any) -> None:
    model = make()
    (mixed,) = batches_for([5, 9], Recipe(layout=layout, balance="none"))
    with pytest.raises(InputError, match="a micro-batch holds segments of 5 to 9 tokens"):
        hf_forward(model)(model, mixed)


def test_dynamic_rope_is_exact_below_its_limit() -> None:
    model, lengths = dynamic(), [5, 3, 7, 2]
    found = step_gradient(model, batches_for(lengths, PACKED))
    assert furthest(found, gradient_alone(model, lengths)) <= 1e-6


@pytest.mark.parametrize("layout", [Packed(max_tokens=24), Padded(max_tokens=48)])
def test_longrope_is_exact_with_short_and_long_samples_apart(layout: Any) -> None:
    model, samples = longrope(), samples_of(LENGTHS)
    limit = rope_limit(model)
    assert limit is not None
    (step,) = PlannedStream(InMemory(samples), Recipe(layout=layout, balance="none"))
    separated = separate_lengths(step, limit.tokens)
    assert len(separated) > len(step)
    Runner(model=model, loss=cross_entropy()).run(separated)
    assert furthest(gradients_of(model), gradient_alone(model, LENGTHS)) <= 1e-6


def test_padding_does_not_lengthen_what_longrope_sees() -> None:
    model, lengths = longrope(), [5, 3]
    tail = Recipe(layout=Packed(max_tokens=32, pad_to=32))
    found = step_gradient(model, batches_for(lengths, tail))
    assert furthest(found, gradient_alone(model, lengths)) <= 1e-6


def test_a_layout_is_kept_where_padding_would_not_help() -> None:
    layout = Packed(max_tokens=24)
    with pytest.warns(UserWarning, match="longrope"):
        assert choose_layout(longrope(), layout) is layout
    assert choose_layout(longrope(), layout, longest=8) is layout  # warnings are errors


# Adapters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_virtual_tokens_of_peft_are_refused(kind: str) -> None:
    import peft

    adapter = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(llama("sdpa"), adapter)
    support = supports_packing(model)
    assert not support.safe
    assert "virtual tokens" in support.why


def test_lora_is_supported() -> None:
    import peft

    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"])
    assert supports_packing(peft.get_peft_model(llama("sdpa"), adapter)).safe


# Images that see both ways -----------------------------------------------------------------------


def multimodal(kind: str) -> Any:
    torch.manual_seed(0)
    text = SHAPE | {"model_type": "gemma3_text" if kind == "Gemma3" else "gemma"}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "model_type": "siglip_vision_model",
    }
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, image_token_index=57, mm_tokens_per_image=4
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")
    return model._from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("kind", ["PaliGemma", "Gemma3"])
def test_images_or_prompts_that_see_both_ways_are_refused(kind: str) -> None:
    support = supports_packing(multimodal(kind))
    assert not support.safe
    # Without types of tokens, PaliGemma sees both ways alone, and backwards only when packed.
    assert {"PaliGemma": "each sample alone", "Gemma3": "both ways"}[kind] in support.why


# Costs -------------------------------------------------------------------------------------------


def test_dense_masks_have_a_cost_and_long_layouts_warn() -> None:
    model = llama("sdpa")
    assert "dense mask of width x width" in supports_packing(model).cost
    choose_layout(model, Packed(max_tokens=4096))  # warnings are errors
    with pytest.warns(UserWarning, match="dense mask"):
        choose_layout(model, Packed(max_tokens=8192))
    model.config._attn_implementation_internal = "flash_attention_2"
    assert supports_packing(model).cost == ""


def test_a_model_without_weights_is_judged_by_its_code() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    assert supports_packing(model).safe


def test_what_the_code_does_not_show_is_found_by_running(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama("sdpa")
    assert supports_packing(model).safe
    forward = type(model.model.layers[0]).forward

    def leaky(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return forward(self, hidden_states, *args, **kwargs) + hidden_states.mean(1, keepdim=True)

    monkeypatch.setattr(type(model.model.layers[0]), "forward", leaky)
    support = supports_packing(model)
    assert not support.safe
    assert "affect each other" in support.why


def test_a_model_is_judged_again_when_it_gets_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    assert supports_packing(model).safe
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    monkeypatch.setattr(
        attention,
        "forward",
        lambda *args, **kwargs: (forward(*args, **kwargs)[0].cumsum(1), None),
    )
    model.to_empty(device="cpu").load_state_dict(llama("sdpa").state_dict())

    with pytest.raises(ConfigError, match="packed segments affect each other"):
        hf_forward(model)(model, batch_of([3, 2], "packed"))


def test_a_model_that_is_made_to_see_both_ways_is_judged_again() -> None:
    model = llama("sdpa")
    batch = batch_of([5, 3, 4], "packed")
    hf_forward(model)(model, batch)
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False

    with pytest.raises(ConfigError, match="bidirectional"):
        hf_forward(model)(model, batch)


def test_other_implementations_are_judged_by_running() -> None:
    """As `attn_implementation="evenstep"` is."""
    from torch.nn.functional import scaled_dot_product_attention
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def by_segment(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any,
                   **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
        cu = kwargs.get("cu_seq_lens_q")
        sizes = [query.shape[2]] if cu is None else cu.diff().tolist()
        parts = zip(*(t.split(sizes, 2) for t in (query, key, value)), strict=True)
        found = [
            scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True, scale=kwargs.get("scaling")
            )
            for q, k, v in parts
        ]
        return torch.cat(found, 2).transpose(1, 2), None

    def whole(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return by_segment(module, *args, **kwargs | {"cu_seq_lens_q": None})

    for name, function, safe in (("by_segment", by_segment, True), ("whole", whole, False)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, lambda **kwargs: None)
        assert supports_packing(llama(name)).safe == safe
    assert not supports_packing(build("Bloom", vocab_size=VOCAB, hidden_size=32, n_head=4)).safe
