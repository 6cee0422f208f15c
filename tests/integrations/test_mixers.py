"""Layers that carry state run on rows of one segment each."""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from evenstep.errors import ConfigError
from evenstep.integrations.hf_attention import use_attention
from evenstep.integrations.huggingface import (
    hf_forward,
    hf_kwargs,
    register_mixer,
    supports_packing,
)
from evenstep.tensors import Collator
from evenstep.testing import assert_no_leaks
from evenstep.train import compute_log_probs
from tests.forests import micro_of
from tests.integrations.hybrids import (
    FAMILIES,
    alone,
    errors,
    hybrid,
    packed,
    rounding,
    samples_of,
    together,
)
from tests.internals import mixers, row_groups
from tests.slow.kinds import kind_of
from tests.slow.measure import error_of
from tests.slow.tiny_configs import tiny_config
from tests.tensors.batches import RECIPES, batches_of

torch.set_num_threads(1)

LENGTHS = (5, 23, 12, 1, 9)
LIMIT = 2e-6
"""Some layers compute in single precision in a model of double precision."""


@st.composite
def lengths(draw: Any) -> list[int]:
    """Few or many segments, of one token and around the chunks of linear attention, 8 and 64."""
    sizes = st.one_of(st.sampled_from([1, 2, 7, 8, 9, 63, 64, 65]), st.integers(1, 30))
    if draw(st.booleans()):
        return list(draw(st.lists(sizes, min_size=2, max_size=5)))
    return list(draw(st.lists(st.integers(1, 9), min_size=40, max_size=40)))


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_segments_have_the_gradient_of_samples_alone(name: str) -> None:
    model = hybrid(name)

    @settings(max_examples=6, deadline=None)
    @given(lengths(), st.sampled_from([0, 1, 17]), st.integers(0, 99))
    def holds(sizes: list[int], tail: int, seed: int) -> None:
        samples = samples_of(sizes, seed)
        if max(sizes) > 1:
            limit = max(LIMIT, 4 * rounding(model, samples))
            assert errors(model, samples, packed(samples, tail)) <= limit

    holds()


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_layer_has_the_boundaries_of_its_own_forward(
    name: str, reentrant: bool
) -> None:
    model = hybrid(name)
    first, second = samples_of((5, 23, 12)), samples_of((20, 3, 17), seed=1)
    expected = alone(model, first + second)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()

    gradient = together(model, packed(first), packed(second))

    assert error_of(gradient, expected) <= LIMIT


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_packed_and_a_padded_forward_share_a_backward(reentrant: bool) -> None:
    model = hybrid("nemotron_h")
    first, second = samples_of((5, 23, 12)), samples_of((40,), seed=1)
    expected = alone(model, first + second)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()

    assert error_of(together(model, packed(first), packed(second)), expected) <= LIMIT


def test_a_recomputed_layer_whose_forward_is_not_known_is_refused() -> None:
    model = hybrid("nemotron_h").train()
    batch = packed(samples_of((5, 23, 12)))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    logits = hf_forward(model)(model, batch)
    mixers._CALLS.clear()

    with pytest.raises(ConfigError, match="recomputed in the backward"):
        logits.sum().backward()


def test_a_copy_runs_on_rows_with_its_own_weights() -> None:
    model = hybrid("nemotron_h")
    samples = samples_of(LENGTHS)
    assert errors(model, samples, packed(samples)) <= LIMIT
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    logits = twin(**hf_kwargs(packed(samples), twin)).logits

    assert float(logits.detach().abs().max()) > 0  # of its own weights
    assert errors(twin, samples, packed(samples)) <= LIMIT


def test_a_model_with_adapters_is_exact() -> None:
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(target_modules=["in_proj", "q_proj"], init_lora_weights=False)
    model = get_peft_model(hybrid("nemotron_h"), adapter).double()
    samples = samples_of(LENGTHS)

    assert errors(model, samples, packed(samples, 3)) <= LIMIT


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_exact() -> None:
    model = hybrid("qwen3_next")
    assert supports_packing(model).safe
    samples = samples_of(LENGTHS)
    expected = alone(model, samples)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    batch = packed(samples)
    forward = hf_forward(compiled)
    loss = nn.functional.cross_entropy(
        forward(compiled, batch).flatten(0, 1), batch.labels.flatten(), reduction="sum"
    )
    model.zero_grad()
    loss.backward()

    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}

    assert error_of(gradient, expected) <= LIMIT


def test_scores_and_the_leak_detector_take_hybrid_models() -> None:
    model = hybrid("lfm2").float()
    samples = samples_of((5, 3, 1, 4))
    one_by_one = compute_log_probs(model, samples, RECIPES["one by one"])

    scores = compute_log_probs(model, samples, RECIPES["packed"])

    for score, expected in zip(scores, one_by_one, strict=True):
        assert score.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    forward = hf_forward(model)
    assert_no_leaks(
        lambda batch: forward(model, batch), packed(samples, 2), module=model, tolerance=1e-5
    )


def test_our_attention_runs_beside_layers_on_rows() -> None:
    samples = samples_of(LENGTHS)
    for name in ("qwen3_next", "mamba"):
        model = hybrid(name, "evenstep")
        assert errors(model, samples, packed(samples, 3)) <= LIMIT


def test_samples_cannot_share_prefixes_in_a_model_that_carries_state() -> None:
    model, ids = hybrid("qwen3_next", "evenstep"), [[3, 4, 5, 6], [3, 4, 5, 7]]
    shared = Collator()(micro_of(ids, range(2)), [{"input_ids": each} for each in ids])

    with pytest.raises(ConfigError, match="layers that carry state from token to token"):
        hf_forward(model)(model, shared)


def test_the_loss_of_the_model_itself_is_that_of_samples_alone() -> None:
    model = hybrid("nemotron_h").float()
    assert supports_packing(model).safe
    samples = samples_of(LENGTHS)
    expected = alone(model, samples)

    model.zero_grad()
    model(**hf_kwargs(packed(samples, 3), model, labels=True)).loss.backward()

    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert error_of(gradient, expected) <= LIMIT


def test_modules_that_select_run_on_rows_of_equal_length() -> None:
    model = hybrid("glm_moe_dsa")
    samples = samples_of((5, 23, 12, 5, 23))

    padded = batches_of(samples, RECIPES["padded"])
    assert errors(model, samples, packed(samples, 4)) <= LIMIT
    assert errors(model, samples, *padded) <= LIMIT
    assert all(each._evenstep_mixer.equal for each in mixers.mixers_of(model).values())


def test_router_logits_of_layers_on_rows_are_refused() -> None:
    model = hybrid("deepseek_v4", "eager")

    with pytest.raises(ConfigError, match="router logits inside of layers that run on rows"):
        hf_forward(model, outputs="router_logits")(model, packed(samples_of((5, 23, 12))))


def test_a_model_whose_state_is_not_in_a_layer_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = hybrid("lfm2")
    monkeypatch.setattr(model.model, "forward", _leaking(model.model.forward))

    safe, why, _ = supports_packing(model)

    assert not safe
    assert "Lfm2Model (model) carries state" in why
    assert not mixers.mixers_of(model)


def _leaking(forward: Callable[..., Any]) -> Callable[..., Any]:
    def leaks(*args: Any, **kwargs: Any) -> Any:
        results = forward(*args, **kwargs)
        results.last_hidden_state = results.last_hidden_state.cumsum(1)
        return results

    return leaks


def test_a_registered_class_runs_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "_REGISTERED", {})
    register_mixer("LlamaAttention")
    model = hybrid("llama")
    samples = samples_of(LENGTHS)

    assert errors(model, samples, packed(samples, 2)) <= LIMIT
    assert {type(each).__name__ for each in mixers.mixers_of(model).values()} == {"LlamaAttention"}


def test_a_padded_batch_and_generation_run_as_before() -> None:
    model = hybrid("nemotron_h")
    tokens = samples_of((7,))[0]["input_ids"][None]
    expected = model(input_ids=tokens).logits
    assert supports_packing(model).safe

    assert torch.equal(model(input_ids=tokens).logits, expected)


@pytest.mark.parametrize(("name", "attention"), [("lfm2", "sdpa"), ("llama", "evenstep")])
def test_threads_that_run_a_model_first_judge_it_once(name: str, attention: str) -> None:
    model, samples = hybrid(name, attention).train(), samples_of((5, 23, 12))
    batch, start, found = packed(samples), threading.Barrier(4), list[Any]()

    def run() -> None:
        start.wait()
        found.append(hf_forward(model)(model, batch).detach())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(module.training for module in model.modules())
    alone = [model(input_ids=s["input_ids"][None], use_cache=False).logits for s in samples]
    for logits in found:
        assert torch.allclose(logits, torch.cat(alone, 1), rtol=0, atol=1e-6)
    assert len(found) == 4


# What hides a mixer, or undoes its wrapping -------------------------------------------------------


def test_a_mixer_behind_weights_of_zero_is_found() -> None:
    model = hybrid("lfm2")
    samples = samples_of(LENGTHS)
    weights = [layer.conv.out_proj.weight for layer in model.model.layers if hasattr(layer, "conv")]
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
    versions = [parameter._version for parameter in model.parameters()]

    assert supports_packing(model).safe

    assert len(mixers.mixers_of(model)) == len(weights) > 0
    assert all(not weight.any() for weight in weights)
    assert [parameter._version for parameter in model.parameters()] == versions
    assert errors(model, samples, packed(samples)) <= LIMIT


def test_a_model_with_its_first_weights_is_exact() -> None:
    kind = kind_of("qwen4_exp_text").model_class
    torch.manual_seed(0)
    model = kind._from_config(
        tiny_config(kind.config_class), attn_implementation="sdpa", experts_implementation="eager"
    )
    model.eval().double()
    samples = samples_of(LENGTHS)

    assert errors(model, samples, packed(samples)) <= LIMIT


def test_an_interrupted_forward_leaves_no_boundaries_behind() -> None:
    model = hybrid("nemotron_h")
    tokens = samples_of((40,))[0]["input_ids"][None]
    expected = model.model(input_ids=tokens).last_hidden_state
    batch = packed(samples_of((5, 23, 12)))
    hf_forward(model)(model, batch)

    last = model.model.layers[-1].register_forward_pre_hook(_interrupted)
    with pytest.raises(KeyboardInterrupt):
        hf_forward(model)(model, batch)
    last.remove()

    assert torch.equal(model.model(input_ids=tokens).last_hidden_state, expected)
    assert errors(model, samples_of((20, 20)), packed(samples_of((20, 20)))) <= LIMIT
    assert mixers._FRAME.get() is None


def test_zeros_are_restored_when_a_small_forward_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = hybrid("lfm2")
    with torch.no_grad():
        model.model.embedding_norm.weight.zero_()
        model.model.embedding_norm.weight[0] = -0.0
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with monkeypatch.context() as patch:
        patch.setattr(model.model, "forward", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            supports_packing(model)

    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.int64), before[name].view(torch.int64))


def _interrupted(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def _failed(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("none left")


def _fail_to_use_our_attention(model: Any) -> None:
    with pytest.raises(ConfigError, match="does not run with"):
        use_attention(model)


def _switch_attention_twice(model: Any) -> None:
    model.set_attn_implementation("evenstep")
    assert not supports_packing(model).safe
    model.set_attn_implementation("sdpa")


def _interrupt_a_decision(model: Any) -> None:
    model.base_model.forward = _interrupted
    with pytest.raises(KeyboardInterrupt):
        supports_packing(model)
    del model.base_model.forward
    assert not mixers.mixers_of(model)


def _replace_a_layer(model: Any) -> None:
    model.model.layers[0] = copy.deepcopy(hybrid(model.config.model_type).model.layers[0])


def _release(model: Any) -> None:
    mixers.release(model)


def _replace_forwards(model: Any) -> None:
    for mixer in mixers.mixers_of(model).values():
        mixer.forward = types.MethodType(type(mixer).forward, mixer)


def _put_forwards_around(model: Any) -> None:
    for mixer in mixers.mixers_of(model).values():
        mixer.forward = partial(mixer.forward)
    assert supports_packing(model).safe
    for mixer in mixers.mixers_of(model).values():
        mixer.forward = partial(mixer.forward)


@pytest.mark.parametrize(
    "disturb",
    [
        _fail_to_use_our_attention,
        _switch_attention_twice,
        _interrupt_a_decision,
        _replace_a_layer,
        _release,
        _replace_forwards,
        _put_forwards_around,
    ],
)
def test_an_answer_holds_only_as_long_as_its_mixers(disturb: Callable[[Any], None]) -> None:
    model = hybrid("deepseek_v32")
    samples = samples_of((5, 23, 12))
    batch = packed(samples)
    assert errors(model, samples, batch) <= LIMIT

    disturb(model)

    assert errors(model, samples, batch) <= LIMIT


def test_a_model_whose_second_decision_failed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("nemotron_h")
    batch = packed(samples_of(LENGTHS))
    hf_forward(model)(model, batch)
    with monkeypatch.context() as patch:
        patch.setattr(model.base_model, "forward", _failed)
        assert not supports_packing(model).safe

    with pytest.raises(ConfigError, match="does not support packed batches"):
        hf_forward(model)(model, batch)


def test_a_class_registered_after_the_first_batch_runs_on_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mixers, "_REGISTERED", {})
    model = hybrid("llama")
    batch = packed(samples_of(LENGTHS))
    hf_forward(model)(model, batch)
    register_mixer("LlamaAttention")

    hf_forward(model)(model, batch)

    assert mixers.mixers_of(model)


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_class_has_its_registered_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "_REGISTERED", {})
    register_mixer("LlamaDecoderLayer", equal_lengths=True)
    model = hybrid("llama")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)

    safe, why, _ = supports_packing(model)

    assert safe
    assert why.startswith("LlamaDecoderLayer run on rows")
    assert all(each._evenstep_mixer.equal for each in mixers.mixers_of(model).values())


@pytest.mark.usefixtures("one_rank")
def test_noise_does_not_stay_in_gathered_parameters() -> None:
    model = hybrid("lfm2")
    with torch.no_grad():
        model.model.embedding_norm.weight.zero_()
        for layer in model.model.layers:
            if hasattr(layer, "conv"):
                layer.conv.out_proj.weight.zero_()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    tokens = samples_of((7,))[0]["input_ids"][None]
    assert not model(input_ids=tokens).logits.any()  # leaves the root gathered

    assert supports_packing(model).safe

    assert mixers.mixers_of(model)
    assert not model(input_ids=tokens).logits.any()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_models_that_fully_shard_casts_are_not_refused_for_rounding(name: str) -> None:
    model = hybrid(name).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=policy)

    assert supports_packing(model).safe


@pytest.mark.usefixtures("one_rank")
def test_sharded_parts_of_a_module_that_selects_are_refused() -> None:
    model = hybrid("glm_moe_dsa")
    batch = packed(samples_of((5, 23, 12)))
    assert supports_packing(model).safe
    for mixer in mixers.mixers_of(model).values():
        fully_shard(next(iter(mixer.children())))

    with pytest.raises(ConfigError, match="fully_shard must be called on whole layers"):
        model(**hf_kwargs(batch, model))
    safe, why, _ = supports_packing(model)
    assert not safe
    assert why.startswith("fully_shard must be called on whole layers")


def test_boundaries_reach_a_mixer_whose_call_has_no_segments() -> None:
    model = hybrid("bamba")
    tokens = samples_of((7,))[0]["input_ids"][None]
    assert supports_packing(model).safe
    seen: list[Any] = []
    for mixer in mixers.mixers_of(model).values():
        mixer.forward = _recorded(mixer.forward, seen)

    model(input_ids=tokens, seq_idx=torch.zeros_like(tokens).int(), use_cache=False)

    assert seen
    assert all(index is not None for index in seen)


def _recorded(forward: Callable[..., Any], seen: list[Any]) -> Callable[..., Any]:
    def record(*args: Any, seq_idx: Any = None, **kwargs: Any) -> Any:
        seen.append(seq_idx)
        return forward(*args, **kwargs)

    return record


def test_a_base_model_called_by_itself_runs_on_rows() -> None:
    model = hybrid("nemotron_h")
    samples = samples_of((5, 23, 12))
    assert supports_packing(model).safe
    one_by_one = [
        model.base_model(input_ids=sample["input_ids"][None], use_cache=False).last_hidden_state
        for sample in samples
    ]

    states = model.base_model(**hf_kwargs(packed(samples), model)).last_hidden_state

    assert torch.allclose(states, torch.cat(one_by_one, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("parts", [("base", "whole"), ("whole", "base"), ("whole",)])
def test_a_model_and_its_base_model_run_on_rows_side_by_side(parts: tuple[str, ...]) -> None:
    """Neither forward of Mamba takes boundaries as keyword arguments."""
    model = hybrid("mamba", None)
    samples = samples_of((5, 23, 12))
    tokens = [sample["input_ids"][None] for sample in samples]
    logits = torch.cat([model(input_ids=each, use_cache=False).logits for each in tokens], 1)
    states = [model.base_model(input_ids=each, use_cache=False)[0] for each in tokens]
    for part in parts:
        assert supports_packing(model if part == "whole" else model.base_model).safe
    batch = packed(samples, 3)

    together = model(**hf_kwargs(batch, model)).logits[:, :40]
    base = model.base_model(**hf_kwargs(batch, model.base_model))[0][:, :40]

    assert torch.allclose(together, logits, rtol=0, atol=1e-6)
    assert torch.allclose(base, torch.cat(states, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_base_model_trains_by_itself_with_checkpoints(name: str, reentrant: bool) -> None:
    model = hybrid(name).train()
    tokens = samples_of((70,))[0]["input_ids"][None]
    model.enable_input_require_grads()

    def gradient() -> Tensor:
        states = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        model.zero_grad()
        states.square().sum().backward()
        weight: Tensor = model.get_input_embeddings().weight.grad
        return weight.clone()

    expected = gradient()
    assert supports_packing(model).safe
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    assert torch.allclose(gradient(), expected, rtol=1e-5)


def test_a_forward_in_a_backward_has_its_own_boundaries() -> None:
    model = hybrid("nemotron_h")
    first, second = samples_of((5, 23, 12)), samples_of((20, 3, 17))
    assert supports_packing(model).safe
    states = model.get_input_embeddings()(packed(first).tokens).detach()

    def logits_of(samples: list[dict[str, Tensor]], states: Tensor) -> Tensor:
        kwargs = hf_kwargs(packed(samples), model)
        del kwargs["input_ids"]
        logits: Tensor = model(inputs_embeds=states, **kwargs).logits.detach()
        return logits

    expected = logits_of(second, states.clone())
    logits_of(first, states)
    seen = []
    root = torch.ones((), requires_grad=True)
    root.register_hook(lambda _: seen.append(logits_of(second, states)))
    root.square().backward()

    assert torch.equal(seen[0], expected)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.booleans())
def test_groups_of_rows_have_every_segment_once(sizes: list[int], equal: bool) -> None:
    most = sum(sizes)

    groups = row_groups(sizes, most, equal=equal)

    assert sorted(k for group in groups for k in group) == list(range(len(sizes)))
    for group in groups:
        widths = [sizes[k] for k in group]
        assert not equal or min(widths) == max(widths)
        assert equal or len(group) * max(widths) <= most


def test_few_groups_hold_lognormal_lengths_with_little_padding() -> None:
    sizes = np.random.default_rng(0).lognormal(6, 1, 80).astype(int).clip(1).tolist()

    groups = row_groups(sizes, sum(sizes))

    slots = sum(len(group) * max(sizes[k] for k in group) for group in groups)
    steps = sum(max(sizes[k] for k in group) for group in groups)
    assert slots <= 1.4 * sum(sizes)
    assert steps <= 3 * max(sizes)
