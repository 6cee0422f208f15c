"""The attention that is registered with transformers, compared with eager, one sample at a time."""

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from evenstep.errors import ConfigError
from evenstep.integrations.hf_attention import (
    register_attention,
    use_attention,
)
from evenstep.integrations.huggingface import hf_kwargs
from evenstep.tensors import Batch
from evenstep.testing import find_leaks
from tests.integrations.attended import (
    LENGTHS,
    MODELS,
    errors,
    make,
    one_at_a_time,
    together,
    weights_of,
)
from tests.integrations.models import SHAPE, build
from tests.internals import hf_boundaries
from tests.tensors.batches import VOCAB, batch_of, distance

torch.set_num_threads(1)

LAYOUTS = ["packed", "packed with a tail", "packed static", "padded", "dynamic"]


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_every_layout_is_exact(kind: str) -> None:
    model = make(kind)
    for layout in LAYOUTS:
        batch = batch_of(LENGTHS, layout)
        expected = one_at_a_time(model, batch)
        use_attention(model)
        found = together(model, batch, **hf_kwargs(batch))
        assert found[0].isfinite().all()
        assert max(errors(batch, found, expected)) < 1e-5, layout


def to_the_left(batch: Batch, values: Tensor, fill: Any = 0) -> Tensor:
    """Right-padded rows as left-padded rows."""
    rows = [torch.cat((row[~m].new_full(((~m).sum(),), fill), row[m])) for row, m in zip(
        values, batch.token_mask, strict=True)]  # fmt: skip
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Gemma3Text", "GptOss", "GPT2", "DeepseekV3"])
def test_padding_on_the_left_is_exact(kind: str) -> None:
    model = use_attention(make(kind))
    batch = batch_of(LENGTHS, "padded")
    expected = model(**hf_kwargs(batch)).logits
    (expected * weights_of(batch)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    mask = to_the_left(batch, batch.token_mask, False)
    mask[~mask.any(1)] = True
    positions = to_the_left(batch, batch.position_ids)
    found = model(
        input_ids=to_the_left(batch, batch.tokens),
        position_ids=positions,
        attention_mask=mask.long(),
        use_cache=False,
    ).logits
    assert found.isfinite().all()
    mask = to_the_left(batch, batch.token_mask, False)
    assert distance(found[mask].detach(), expected[batch.token_mask].detach()) < 1e-6
    (found[mask] * weights_of(batch)[batch.token_mask]).sum().backward()
    mine = [p.grad for p in model.parameters() if p.grad is not None]
    assert max(map(distance, mine, gradients)) < 1e-5


def forward(model: Any, change: Callable[[Batch], dict[str, Any]]) -> Callable[[Batch], Tensor]:
    return lambda batch: model(**change(batch)).logits


WAYS: dict[str, Callable[[Batch], dict[str, Any]]] = {
    "boundaries and positions": hf_kwargs,
    "a cache": lambda batch: hf_kwargs(batch) | {"use_cache": True},
    "a mask": lambda batch: hf_kwargs(batch) | {"attention_mask": batch.token_mask.long()},
    "positions alone": lambda batch: {
        "input_ids": batch.tokens,
        "position_ids": batch.position_ids,
    },
    "positions and a mask": lambda batch: {
        "input_ids": batch.tokens,
        "position_ids": batch.position_ids,
        "attention_mask": batch.token_mask,
    },
}


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text", "GptOss"])
def test_nothing_leaks_however_the_boundaries_are_given(kind: str, way: str) -> None:
    """With sdpa and eager, all but the first leak."""
    model = use_attention(make(kind))
    for layout in ("packed", "packed static", "padded"):
        if layout == "padded" and way == "positions alone":
            continue
        batch = batch_of([5, 3, 1, 4], layout)
        assert find_leaks(forward(model, WAYS[way]), batch, module=model) == []


def test_a_leak_would_be_found() -> None:
    model = use_attention(make("Llama"))
    leaks = find_leaks(
        forward(model, lambda batch: {"input_ids": batch.tokens}),
        batch_of([5, 3], "packed"),
        module=model,
    )
    assert leaks[0].layer_type == "LlamaAttention"


def test_training_with_gradient_checkpointing_is_the_same() -> None:
    for kind in ("Llama", "Gemma3Text", "GptOss"):
        model = use_attention(make(kind)).train()
        batch = batch_of(LENGTHS, "packed")
        expected = together(model, batch, **hf_kwargs(batch))
        model.gradient_checkpointing_enable()
        found = together(model, batch, **hf_kwargs(batch))
        assert max(errors(batch, found, expected)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text", "GptOss", "Gemma2"])
def test_a_compiled_model_is_one_graph_and_exact(kind: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = use_attention(make(kind))
    if kind == "GptOss":
        model.set_experts_implementation("batched_mm")
    for layout in ("packed", "padded"):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        batch = batch_of(LENGTHS, layout)
        expected = together(model, batch, **hf_kwargs(batch))
        found = together(compiled, batch, **hf_kwargs(batch))
        assert counter.frame_count == 1
        assert max(errors(batch, found, expected)) < 1e-5
    torch._dynamo.reset()


def test_autocast_gives_all_three_one_dtype() -> None:
    model = use_attention(make("Llama"))
    batch = batch_of(LENGTHS, "packed")
    expected = model(**hf_kwargs(batch)).logits
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**hf_kwargs(batch)).logits
    assert distance(found.float().detach(), expected.detach()) < 5e-2


def test_dropout_acts_in_training_only() -> None:
    model = use_attention(make("GPT2", attn_pdrop=0.5, resid_pdrop=0.0, embd_pdrop=0.0))
    batch = batch_of(LENGTHS, "packed")
    once, again = (model(**hf_kwargs(batch)).logits for _ in range(2))
    assert torch.equal(once, again)
    model.train()
    assert not torch.equal(once, model(**hf_kwargs(batch)).logits)


# Encoders and vision -------------------------------------------------------------------------

ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": SHAPE,
    "ModernBert": SHAPE
    | {"pad_token_id": 0, "local_attention": 6, "global_attn_every_n_layers": 2}
    | {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
}


@pytest.mark.parametrize("kind", sorted(ENCODERS))
def test_encoders_see_both_ways_and_no_padding(kind: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**ENCODERS[kind])
    model = getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation="eager")
    model.eval()
    batch = batch_of(LENGTHS, "padded")
    given = {"input_ids": batch.tokens, "attention_mask": batch.token_mask.long()}
    given["attention_mask"][~batch.token_mask.any(1)] = 1
    expected = model(**given).last_hidden_state
    model.set_attn_implementation("evenstep")
    found = model(**given).last_hidden_state
    assert found.isfinite().all()
    assert distance(found[batch.token_mask].detach(), expected[batch.token_mask].detach()) < 1e-5


def qwen_vl() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(
        text_config=SHAPE | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
            "out_hidden_size": 32, "patch_size": 2, "window_size": 8, "fullatt_block_indexes": [1],
        },
        image_token_id=50, video_token_id=51, vision_start_token_id=52, vision_end_token_id=53,
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()


def test_a_vision_language_model_is_exact_by_boundaries_and_by_planes() -> None:
    model = qwen_vl()
    random = torch.Generator().manual_seed(0)
    samples, planes = [], []
    for before, after in ((3, 2), (1, 4)):
        text = torch.randint(3, 40, (before + after,), generator=random)
        tokens = torch.cat(
            (text[:before], torch.tensor([52, *[50] * 4, 53]), text[before:])
        )[None]  # fmt: skip
        pixels = torch.randn(16, 3 * 2 * 2 * 2, generator=random)
        grid = torch.tensor([[1, 4, 4]])
        kinds = (tokens == 50).int()
        at, _ = model.model.get_rope_index(tokens, kinds, image_grid_thw=grid)
        planes.append(torch.cat((torch.arange(tokens.shape[1]).view(1, 1, -1), at)))
        samples.append(
            {"input_ids": tokens, "pixel_values": pixels, "image_grid_thw": grid}
            | {"mm_token_type_ids": kinds}
        )
    alone = [
        model(**sample, position_ids=at, use_cache=False).logits
        for sample, at in zip(samples, planes, strict=True)
    ]
    expected = torch.cat(alone, 1)
    joined = {
        name: torch.cat([s[name] for s in samples], 1 if samples[0][name].shape[0] == 1 and
        name != "image_grid_thw" else 0)
        for name in samples[0]
    }  # fmt: skip
    sizes = [sample["input_ids"].shape[1] for sample in samples]
    ends = torch.tensor([0, sizes[0], sum(sizes)], dtype=torch.int32)
    bounds = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(sizes)}
    model.set_attn_implementation("evenstep")
    at = torch.cat(planes, 2)
    for given in (
        {"position_ids": at},
        {"position_ids": at, **bounds},
        {"position_ids": at[1:], **bounds},
    ):
        found = model(**joined, **given, use_cache=False).logits
        assert distance(found.detach(), expected.detach()) < 1e-5
    (model(**joined, position_ids=at, use_cache=False).logits.sum()).backward()


def test_three_planes_restart_where_all_of_them_are_zero() -> None:
    planes = torch.tensor([
        [0, 1, 1, 1, 1, 3, 0, 0, 0, 0, 0, 1],
        [0, 1, 1, 2, 2, 3, 0, 0, 0, 1, 1, 2],
        [0, 1, 2, 1, 2, 3, 0, 0, 1, 0, 1, 2],
    ])[:, None]  # fmt: skip
    hints = hf_boundaries.Hints(1, 12, torch.device("cpu"), positions=planes)
    assert hints.boundaries().cu_seqlens.tolist() == [0, 6, 7, 12]
    four = torch.cat((torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 1, 2, 3, 4]).view(1, 1, -1), planes))
    hints = hf_boundaries.Hints(1, 12, torch.device("cpu"), positions=four)
    assert hints.boundaries().cu_seqlens.tolist() == [0, 6, 7, 12]


# Choosing it ---------------------------------------------------------------------------------


def test_it_can_be_chosen_at_construction_and_survives_a_copy() -> None:
    register_attention()
    model = copy.deepcopy(make("Llama", "evenstep"))
    batch = batch_of([5, 3], "packed")
    assert find_leaks(forward(model, WAYS["a cache"]), batch, module=model) == []


def test_a_peft_model_is_switched_and_stays_exact() -> None:
    model = make("Llama")
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert use_attention(lora) is lora
    assert model.config._attn_implementation == "evenstep"
    batch = batch_of(LENGTHS, "packed")
    assert find_leaks(forward(lora, hf_kwargs), batch, module=model) == []


def test_models_that_hold_others_are_switched_and_those_without_weights_refused() -> None:
    model = use_attention(qwen_vl())
    assert model.config.vision_config._attn_implementation == "evenstep"
    assert model.config.text_config._attn_implementation == "evenstep"
    with torch.device("meta"):
        empty = build("Llama", "sdpa", **SHAPE)
    with pytest.raises(ConfigError, match="parameters on the meta device"):
        use_attention(empty)
    assert empty.config._attn_implementation == "sdpa"


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = make("Llama").train()
    model.model.layers[0].eval()
    before = {name: part.training for name, part in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    use_attention(model)
    assert {name: part.training for name, part in model.named_modules()} == before
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(not part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("Bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "interface"),
        ("GPTJ", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4},
         "interface"),
    ],
)  # fmt: skip
def test_models_that_do_not_call_it_are_refused_and_restored(
    kind: str, options: dict[str, Any], why: str
) -> None:
    model = build(kind, "eager", **options)
    with pytest.raises(ConfigError, match=f"does not run with .*{why}"):
        use_attention(model)
    assert model.config._attn_implementation == "eager"


def test_other_modules_are_refused() -> None:
    with pytest.raises(ConfigError, match="Linear holds no transformers model"):
        use_attention(nn.Linear(2, 2))


# Boundaries ----------------------------------------------------------------------------------


def test_boundaries_are_read_once_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = [], hf_boundaries._read

    def count(hints: Any) -> Any:
        read.append(hints)
        return original(hints)

    monkeypatch.setattr(hf_boundaries, "_read", count)
    kinds = ["sliding_attention", "full_attention"] * 2
    model = use_attention(make("Gemma3Text", num_hidden_layers=4, layer_types=kinds))
    for way, times in (("boundaries and positions", 1), ("positions alone", 1), ("a mask", 2)):
        read.clear()
        model(**WAYS[way](batch_of([5, 3], "packed")))
        assert len(read) == times, way  # a mask is copied for each kind of layer


def test_boundaries_follow_tensors_that_change_in_place() -> None:
    positions = torch.tensor([[0, 1, 2, 3]])
    hints = hf_boundaries.Hints(1, 4, torch.device("cpu"), positions=positions)
    first = hints.boundaries()
    assert hints.boundaries() is first
    positions[0, 2:] -= 2
    assert hints.boundaries().cu_seqlens.tolist() == [0, 2, 4]


def test_positions_of_another_shape_are_refused() -> None:
    for shape in ((1, 5), (2, 4), (5, 1, 4), (4,)):
        hints = hf_boundaries.Hints(1, 4, torch.device("cpu"), positions=torch.zeros(shape))
        with pytest.raises(ConfigError, match="position_ids has shape"):
            hints.boundaries()
