"""Hugging Face models in `Runner`, scoring and own loops, without a forward of one's own."""

import warnings
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from evenstep import MicroBatch, Packed, Padded, Recipe
from evenstep.errors import ConfigError, InputError
from evenstep.integrations.hf_attention import use_attention
from evenstep.integrations.huggingface import hf_forward, hf_head, hf_kwargs, supports_packing
from evenstep.tensors import Collator, cross_entropy, shard_context
from evenstep.train import Runner, compute_log_probs, register_forward, run_step
from tests.integrations.hf_steps import batches_for, furthest, gradient_alone, step_gradient
from tests.integrations.models import SHAPE, build, llama
from tests.internals import call, forward_of
from tests.tensors.batches import VOCAB, batch_of, by_sample, distance, samples_of

torch.set_num_threads(1)

LENGTHS = [5, 3, 1, 4, 9, 2]
PACKED = Recipe(layout=Packed(max_tokens=16))
TAILS = Recipe(layout=Packed(max_tokens=24, pad_to=24))
PADDED = Recipe(layout=Padded(max_tokens=32))
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
OPT = SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}


# Runner and scoring ------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [PACKED, TAILS, PADDED])
def test_a_runner_needs_no_forward(recipe: Recipe) -> None:
    model = llama("sdpa")
    found = step_gradient(model, batches_for(LENGTHS, recipe))
    assert furthest(found, gradient_alone(model, LENGTHS)) <= 1e-6


def test_a_forward_that_returns_a_model_output_works() -> None:
    model = llama("sdpa")
    batches = batches_for(LENGTHS, PACKED)
    found = step_gradient(model, batches, forward=lambda m, b: m(**hf_kwargs(b)))
    assert furthest(found, gradient_alone(model, LENGTHS)) <= 1e-6


def test_scoring_needs_no_forward() -> None:
    model, samples = llama("sdpa"), samples_of(LENGTHS)
    found = compute_log_probs(model, samples, PACKED)
    with torch.no_grad():
        for sample, scores in zip(samples, found, strict=True):
            tokens = sample["input_ids"]
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
            expected = logits[:-1].gather(1, tokens[1:, None])[:, 0]
            assert distance(scores[1:], expected, 1.0) <= 1e-5


def test_other_models_are_called_with_the_batch() -> None:
    assert forward_of(nn.Linear(2, 2)) is call
    assert forward_of(llama("sdpa")) is not call
    register_forward("torch_models_of_a_test", lambda model: call)


def test_wrappers_are_looked_through_and_called() -> None:
    from peft import LoraConfig, get_peft_model

    expected = gradient_alone(llama("sdpa"), LENGTHS)
    batches = batches_for(LENGTHS, PACKED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.compile, of torch
        compiled = torch.compile(llama("sdpa"), backend="eager")
        found = step_gradient(compiled, batches)
    assert furthest({k.removeprefix("_orig_mod."): g for k, g in found.items()}, expected) <= 1e-6
    adapted = get_peft_model(llama("sdpa"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    adapted.eval()
    found = step_gradient(adapted, batches)
    assert found
    assert furthest(found, gradient_alone(adapted, LENGTHS)) <= 1e-6


# Packing -----------------------------------------------------------------------------------------


def test_a_model_that_leaks_is_refused_with_the_remedies() -> None:
    model = build("OPT", "sdpa", **OPT)
    (batch,) = batches_for([5, 3], PACKED)
    with pytest.raises(ConfigError, match=r"without position_ids.*choose_layout.*'pad'"):
        hf_forward(model)(model, batch)
    alone = batches_for([5], PACKED)[0]
    assert hf_forward(model)(model, alone).shape == (1, 5, VOCAB)


def test_padding_inside_the_forward_is_exact_and_warns_once() -> None:
    model = build("OPT", "sdpa", **OPT)
    forward = hf_forward(model, unsupported="pad")
    with pytest.warns(UserWarning, match="Running each segment in a row of its own"):
        found = step_gradient(model, batches_for(LENGTHS, TAILS), forward=forward)
    assert furthest(found, gradient_alone(model, LENGTHS)) <= 1e-6
    forward(model, batch_of(LENGTHS, "packed static"))  # warnings are errors


def test_the_check_leaves_the_model_and_random_numbers_as_they_were() -> None:
    model = llama("sdpa").train()
    model.model.layers[0].eval()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    hf_forward(model)(model, batch_of(LENGTHS, "packed"))
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert not model.model.layers[0].self_attn.training
    assert model.model.layers[1].self_attn.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_long_packed_rows_warn_once_where_the_mask_is_dense() -> None:
    model = build("Llama", "sdpa", **SHAPE | {"num_hidden_layers": 1, "max_position_embeddings": 8})
    forward = hf_forward(model)
    wide = batch_of([5, 3], Recipe(layout=Packed(max_tokens=4100, pad_to=4100)))
    with torch.no_grad(), pytest.warns(UserWarning, match="dense mask of width x width"):
        forward(model, wide)
    with torch.no_grad():
        forward(model, wide)  # warnings are errors


def test_a_shard_is_refused() -> None:
    model, batch = llama("sdpa"), batch_of([8, 8], "packed and aligned")
    shard = shard_context(batch, 0, 2)
    for run in (hf_kwargs, lambda shard: hf_forward(model)(model, shard)):
        with pytest.raises(InputError, match="cannot run a batch shard"):
            run(shard)  # type: ignore[arg-type]


# Outputs -----------------------------------------------------------------------------------------


def test_temperature_divides_logits() -> None:
    model, batch = llama("sdpa"), batch_of(LENGTHS, "packed")
    with torch.no_grad():
        warm, plain = (
            hf_forward(model, temperature=2.0)(model, batch),
            hf_forward(model)(model, batch),
        )
    assert torch.equal(warm, plain / 2)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", SHAPE),
        ("Gemma2", SHAPE | {"final_logit_softcapping": 0.5}),
        ("Cohere", SHAPE | {"logit_scale": 3.0}),
        ("Granite", SHAPE | {"logits_scaling": 4.0}),
    ],
)
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_the_head_turns_hidden_states_into_logits(kind: str, options: dict[str, Any]) -> None:
    model = build(kind, "eager", **options)
    for recipe in ("packed with a tail", "padded"):
        batch = batch_of(LENGTHS, recipe)
        hidden = hf_forward(model, outputs="hidden")(model, batch)
        assert hidden.shape == (batch.rows, batch.width, 32)
        found = hf_head(model)(hidden)[batch.token_mask]
        assert distance(found, hf_forward(model)(model, batch)[batch.token_mask]) <= 1e-6


def test_losses_take_the_head_of_a_model_with_its_soft_cap() -> None:
    model = build("Gemma2", "eager", **SHAPE, final_logit_softcapping=0.5)
    batches = batches_for(LENGTHS, PACKED)
    run_step(batches, model, cross_entropy())
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    forward = hf_forward(model, outputs="hidden")
    run_step(batches, model, cross_entropy(head=hf_head(model)), forward=forward)
    assert furthest({name: p.grad for name, p in model.named_parameters()}, expected) <= 1e-6


def test_autocast_does_not_make_a_model_unsafe() -> None:
    model = llama("sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        assert supports_packing(model).safe


def test_models_of_two_sequences_are_refused() -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(vocab_size=VOCAB, **sizes)
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(ConfigError, match="has an encoder and a decoder"):
        hf_forward(model)(model, batch_of([3, 2], "padded"))


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_virtual_tokens_in_padded_rows_are_refused() -> None:
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(llama("sdpa"), settings)
    with pytest.raises(ConfigError, match="virtual tokens of prompt tuning"):
        hf_forward(model)(model, batch_of([3, 2], "padded"))


def test_a_head_that_does_more_is_refused() -> None:
    model = build("Llama", "sdpa", **SHAPE)
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.relu())
    with pytest.raises(ConfigError, match="changes logits by more than a scale and a soft cap"):
        hf_head(model)


def test_options_that_make_no_sense_are_refused() -> None:
    model = llama("sdpa")
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        hf_forward(model, temperature=0.0)
    with pytest.raises(ConfigError, match="temperature divides logits"):
        hf_forward(model, outputs="hidden", temperature=2.0)
    with pytest.raises(ConfigError, match="outputs"):
        hf_forward(model, outputs="scores")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="returns no logits"):
        hf_forward(model.model)(model.model, batch_of([3], "packed"))


# The model's own loss ----------------------------------------------------------------------------


def test_the_models_own_loss_is_a_sum_and_zero_without_labels() -> None:
    model = llama("sdpa")

    def own(model: Any, batch: Any) -> Tensor:
        return model(**hf_kwargs(batch, model, labels=True)).loss

    single = batches_for([1], PACKED)[0]
    assert float(own(model, single).detach()) == 0.0
    batches = [*batches_for(LENGTHS, PACKED), single]
    model.zero_grad()
    Runner(model=model, loss=lambda loss, batch: loss, forward=own).run(batches)
    found = {name: p.grad for name, p in model.named_parameters()}
    assert furthest(found, gradient_alone(model, LENGTHS)) <= 1e-6


def test_a_loss_that_stays_a_mean_is_refused() -> None:
    model = llama("sdpa")
    model.accepts_loss_kwargs = False
    with pytest.raises(ConfigError, match=r"computes a mean.*cross_entropy\(\)"):
        hf_kwargs(batch_of([3], "packed"), model, labels=True)


# Encoders ----------------------------------------------------------------------------------------

ENCODERS = ["Bert", "Roberta", "XLMRoberta", "Camembert", "MPNet", "ModernBert"]


@pytest.mark.parametrize("kind", ENCODERS)
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_hidden_states_of_an_encoder_are_those_of_each_sample_alone(kind: str) -> None:
    torch.manual_seed(0)
    options = SMALL | {"intermediate_size": 48, "initializer_range": 0.3, "pad_token_id": 1}
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    forward = hf_forward(model, outputs="hidden")
    samples = samples_of(LENGTHS)
    one_row = Recipe(layout=Packed(max_tokens=24, pad_to=24, samples=1))
    for recipe in (PADDED, one_row):
        for batch in batches_for(LENGTHS, recipe):
            for sample, found in by_sample(batch, forward(model, batch)).items():
                alone = model(input_ids=samples[sample]["input_ids"][None]).last_hidden_state[0]
                assert distance(found, alone) <= 1e-5, recipe


@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta"])
def test_a_decoder_that_counts_positions_from_its_padding_token_is_exact(kind: str) -> None:
    options = SMALL | {"intermediate_size": 48, "initializer_range": 0.2, "pad_token_id": 1}
    model = build(kind, "sdpa", **options, is_decoder=True)
    found = step_gradient(model, batches_for(LENGTHS, PADDED))
    assert furthest(found, gradient_alone(model, LENGTHS)) <= 1e-5


# Padding -----------------------------------------------------------------------------------------


def gemma3n() -> Any:
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    options = {
        "vocab_size": VOCAB + 3,
        "vocab_size_per_layer_input": VOCAB + 3,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.5] * 2,
        "layer_types": layers,
        "sliding_window": 4,
    }
    config = transformers.Gemma3nTextConfig(**SHAPE | options)
    return transformers.Gemma3nForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def test_gradients_are_finite_where_padding_attends_to_itself() -> None:
    model = gemma3n()
    # Its random weights include the padding token's; a trained model has zeros there.
    assert not model.model.embed_tokens.weight[0].any()
    empty = Collator()(MicroBatch.one_row([]), {})
    found = step_gradient(model, [*batches_for(LENGTHS, TAILS), empty])
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())


def test_positions_of_padding_stay_below_the_longest_segment() -> None:
    torch.manual_seed(0)
    model = build("GPT2", "eager", vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=12)
    batch = batch_of([5, 3], Recipe(layout=Packed(max_tokens=64, pad_to=64)))
    assert hf_kwargs(batch)["position_ids"].max() == 4
    assert hf_kwargs(batch)["cu_seq_lens_q"].tolist() == [0, 5, 8, 64]
    model(**hf_kwargs(batch))


def test_positions_of_packed_rows_are_not_read_where_boundaries_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers would wait for the device to read them."""
    model, (batch, *_) = use_attention(llama("sdpa")), batches_for(LENGTHS, PACKED)
    forward = hf_forward(model)
    expected = forward(model, batch)
    read: list[Tensor] = []
    masking = transformers.masking_utils
    tracing = masking.is_tracing
    monkeypatch.setattr(
        masking, "is_tracing", lambda *values: [*map(read.append, values)] and False
    )
    torch.testing.assert_close(forward(model, batch), expected)
    assert not read
    monkeypatch.setattr(masking, "is_tracing", tracing)
    kwargs = hf_kwargs(batch, model)
    torch.testing.assert_close(model(**kwargs).logits, expected)
    plain = llama("sdpa")
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(hf_forward(plain)(plain, batch), expected)
