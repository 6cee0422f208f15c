"""Steps in which samples share prefixes have the gradients of one sample at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from transformers import LlamaConfig, LlamaForCausalLM

from evenstep import (
    Cost,
    MicroBatch,
    Packed,
    PlannedStream,
    Recipe,
    Steps,
    Topology,
    World,
    find_prefixes,
    make_plan,
)
from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import ConfigError
from evenstep.integrations.hf_attention import use_attention
from evenstep.integrations.huggingface import hf_kwargs
from evenstep.tensors import (
    Batch,
    Collator,
    Extra,
    Head,
    PerSequence,
    cross_entropy,
    load_balancing,
    policy_gradient,
    restore_sequences,
    restore_tokens,
)
from evenstep.train import (
    AllTokens,
    Distributed,
    GroupMean,
    Loss,
    RolloutBatch,
    Runner,
    SequenceMean,
    TokenMean,
    compute_log_probs,
    expert_frequencies,
)
from tests.forests import VOCABULARY, divided, forest, micro_of
from tests.internals import Block, attend, errors_of_parameters, hf_boundaries
from tests.train.on_ranks import Small, wrapped
from tests.train.processes import run_processes

SHAPE = DecoderShape(vocab=VOCABULARY, hidden=8, layers=2, heads=2, kv_heads=1, ffn=8)
COLLATE = Collator(
    extras={
        "group_tokens": Extra(aligned="sequence", dtype=torch.float64),
        "old_log_probs": Extra(aligned="token", dtype=torch.float64),
        "advantages": Extra(aligned="token", dtype=torch.float64),
    }
)
LOSSES: dict[str, Callable[[], Any]] = {
    "cross_entropy": lambda: cross_entropy(z_loss=0.01, label_smoothing=0.1),
    "policy_gradient": lambda: policy_gradient(entropy_weight=0.1),
    "sequence ratio": lambda: policy_gradient(ratio="sequence"),
    "looped": lambda: cross_entropy().looped(),
    "own": lambda: PerSequence(lambda x, view: x.square().mean(-1) * view.loss_weights),
    "plain": lambda: lambda x, batch: (x.square().mean(-1) * batch.loss_weights).sum(),
}
NORMALIZATIONS = [TokenMean(), SequenceMean(), GroupMean()]


def samples_of(rng: np.random.Generator, ids: list[list[int]]) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = [
        {
            "input_ids": tokens,
            "loss_mask": rng.random(len(tokens)) < 0.7,
            "old_log_probs": rng.normal(-2.4, 0.3, len(tokens)),
            "advantages": rng.normal(0, 1, len(tokens)),
        }
        for tokens in ids
    ]
    samples.append({**samples[0], "input_ids": [1, 2], "loss_mask": [0, 1]})
    for name in ("old_log_probs", "advantages"):
        samples[-1][name] = [0.5, 0.5]
    counts = [int(np.asarray(sample["loss_mask"])[1:].sum()) for sample in samples]
    group = rng.integers(0, 3, len(samples))
    for number, sample in enumerate(samples):
        mates = np.flatnonzero(group == group[number])
        sample["group_tokens"] = float(sum(counts[mate] for mate in mates))
    return samples


def decoder(
    dtype: torch.dtype = torch.float64, window: int | None = None, backend: str | None = None
) -> Decoder:
    torch.manual_seed(0)
    model: Decoder = Decoder(replace(SHAPE, window=window), backend).to(dtype)
    return model


def llama(dtype: torch.dtype = torch.float64, name: str = "evenstep") -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)).to(dtype)
    for layer in model.model.layers:  # its own norms compute in float32
        for norm in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, norm, nn.RMSNorm(16, eps=1e-6, dtype=dtype))
    model.model.norm = nn.RMSNorm(16, eps=1e-6, dtype=dtype)
    return use_attention(model) if name == "evenstep" else model


def alone(ids: list[list[int]]) -> list[MicroBatch]:
    return [micro_of(ids, [sample]) for sample in range(len(ids))]


def gradient(model: Any, micros: list[MicroBatch], samples: Any, loss: Any, **options: Any) -> Any:
    model = copy.deepcopy(model)
    batches: list[Batch] = [COLLATE(micro, samples) for micro in micros]
    ran = Runner(model=model, loss=loss, mode="deferred", **options).run(batches)
    return ran, {name: each.grad for name, each in model.named_parameters()}


def check(
    seed: int, model: Any, loss: str, normalization: Any, tolerance: float, count: int = 8
) -> None:
    rng = np.random.default_rng(seed)
    ids = forest(rng, count)
    samples = samples_of(rng, ids)
    ids.append([1, 2])
    options = {"normalization": normalization}
    of_trees = LOSSES[loss]()
    if seed % 2 and isinstance(of_trees, PerSequence) and of_trees.takes_hidden:
        of_trees = replace(of_trees, head="model")
    ran, ours = gradient(model, divided(rng, ids), samples, of_trees, **options)
    # Always in float64: rounding of two float32 gradients adds up to more than 1e-6.
    exact = copy.deepcopy(model).double()
    single, theirs = gradient(exact, alone(ids), samples, LOSSES[loss](), **options)
    assert ran.loss == pytest.approx(single.loss, rel=tolerance, abs=tolerance)  # signs cancel
    assert ran.metrics == pytest.approx(single.metrics, rel=10 * tolerance, abs=10 * tolerance)
    assert max(errors_of_parameters(ours, theirs).values()) <= tolerance


@given(
    st.integers(0, 10**6),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(NORMALIZATIONS),
    st.sampled_from([None, "segments"]),
)
def test_gradients_of_trees_are_those_of_single_samples(
    seed: int, loss: str, norm: Any, backend: str | None
) -> None:
    check(seed, decoder(backend=backend), loss, norm, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_two_thousand_forests(dtype: torch.dtype) -> None:
    model, windowed, hf = decoder(dtype), decoder(dtype, window=3), llama(dtype)
    models = (model, decoder(dtype, backend="segments"), windowed, hf)
    for seed in range(2000):
        chosen = models[seed % 4]
        loss, count = sorted(LOSSES)[seed % len(LOSSES)], 4 + seed % 11
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        check(seed, chosen, loss, NORMALIZATIONS[seed // 7 % 3], tolerance, count)


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3]))
def test_windows_count_the_shared_prefix(seed: int, window: int) -> None:
    check(seed, decoder(window=window), "cross_entropy", TokenMean(), 1e-12)


def test_trees_in_float32_and_in_a_llama() -> None:
    for seed in range(10):
        check(seed, decoder(torch.float32), "policy_gradient", SequenceMean(), 1e-6)
        check(seed, llama(), "policy_gradient", GroupMean(), 1e-12)
    check(0, llama(torch.float32), "cross_entropy", TokenMean(), 1e-6)


class Experts(nn.Module):  # type: ignore[misc]
    """A decoder and a router, whose logits are returned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = decoder()
        self.router = nn.Linear(VOCABULARY, 3, dtype=torch.float64)

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        logits = self.decoder(batch)
        return {"logits": logits, "router_logits": self.router(logits).unsqueeze(2)}


@pytest.mark.parametrize("over", ["step", "sequence"])
def test_experts_count_a_slot_for_each_of_its_samples(over: Any) -> None:
    rng, model = np.random.default_rng(4), Experts()
    ids = forest(rng)
    samples = samples_of(rng, ids)[:-1]
    found = []
    for micros in (divided(rng, ids), alone(ids)):
        batches = [COLLATE(micro, samples) for micro in micros]
        shares = expert_frequencies(model, batches, top_k=2, forward=lambda m, batch: m(batch))
        balance = load_balancing(top_k=2, over=over, frequencies=shares if over == "step" else None)
        losses = {
            "nll": Loss(function=cross_entropy()),
            "balance": Loss(function=balance, normalization=AllTokens(), weight=0.5),
        }
        found.append((shares, gradient(model, micros, samples, losses)[1]))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert max(errors_of_parameters(found[0][1], found[1][1]).values()) <= 1e-12


TINY = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_all_layers_of_a_llama_use_the_same_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block masks are kept there; slots that see no prefix have others."""
    rng = np.random.default_rng(1)
    ids = forest(rng)
    batch = COLLATE(micro_of(ids, range(len(ids))), samples_of(rng, ids))
    model, used = llama(), []

    def recorded(call: Any) -> Any:
        used.append(call.bounds)
        return attend(call)

    monkeypatch.setattr(hf_boundaries, "attend", recorded)
    for each in (batch, replace(batch, tree=None, keys=None), batch):
        model(**hf_kwargs(each, model))
    assert [bounds.index is None for bounds in used] == [False, False, True, True, False, False]
    assert all(used[layer] is used[layer + 1] for layer in (0, 2, 4))
    assert used[0].kept is not used[2].kept


@pytest.mark.parametrize("kind", ["GptOss", "Gemma2"])
def test_windows_sinks_and_soft_caps_of_transformers_count_the_prefix(kind: str) -> None:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1} if kind == "GptOss" else {}
    config = getattr(transformers, f"{kind}Config")(
        **TINY, head_dim=16, sliding_window=3, attention_dropout=0.0, **experts
    )
    torch.manual_seed(0)
    model = use_attention(getattr(transformers, f"{kind}ForCausalLM")(config))
    rng = np.random.default_rng(0)
    ids = forest(rng)
    samples = samples_of(rng, ids)[:-1]
    _, ours = gradient(model, [micro_of(ids, range(len(ids)))], samples, cross_entropy())
    _, theirs = gradient(model, alone(ids), samples, cross_entropy())
    assert max(errors_of_parameters(ours, theirs).values()) <= 1e-6


def test_recurrent_layers_are_refused() -> None:
    config = transformers.Lfm2Config(**TINY, full_attn_idxs=[1])
    model = use_attention(transformers.Lfm2ForCausalLM(config))
    ids = forest(np.random.default_rng(1))
    batch = Collator()(micro_of(ids, range(len(ids))), [{"input_ids": each} for each in ids])
    with pytest.raises(ConfigError, match=r"layers that carry state .*Plan without prefixes"):
        Runner(model=model, loss=cross_entropy()).run([batch])


@pytest.mark.parametrize("names", [("key_slots",), ("key_slots", "cu_seq_lens_k")])
def test_layers_that_do_not_pass_on_the_slots_of_keys_are_refused(names: tuple[str, ...]) -> None:
    model = llama()
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def without(*args: Any, **keywords: Any) -> Any:
        return forward(*args, **{k: each for k, each in keywords.items() if k not in names})

    attention.forward = without
    ids = forest(np.random.default_rng(1))
    batch = Collator()(micro_of(ids, range(len(ids))), [{"input_ids": each} for each in ids])
    with pytest.raises(ConfigError, match=r"LlamaAttention does not receive .*without prefixes"):
        Runner(model=model, loss=cross_entropy()).run([batch])


def test_a_head_scores_each_slot_once() -> None:
    rng = np.random.default_rng(1)
    ids = forest(rng)
    samples, model = samples_of(rng, ids), decoder()
    micro = micro_of(ids, range(len(ids)))
    assert micro.width < sum(map(len, ids))
    batch = COLLATE(micro, samples)
    hidden = torch.randn(1, batch.width, 8, dtype=torch.float64)
    by_head = cross_entropy(head=Head(model.head))(hidden, batch)
    torch.testing.assert_close(by_head.loss, cross_entropy()(model.head(hidden), batch).loss)


def test_results_are_restored_to_samples() -> None:
    rng = np.random.default_rng(2)
    ids = forest(rng, 10)
    micros = divided(rng, ids)
    batches = [Collator()(micro, [{"input_ids": each} for each in ids]) for micro in micros]
    tokens = restore_tokens(micros, [batch.tokens for batch in batches], pad=-1)
    assert [[t for t in row if t >= 0] for row in tokens.tolist()] == ids
    after = restore_tokens(micros, [batch.next_tokens for batch in batches], pad=-1, shifted=True)
    for row, each in zip(after.tolist(), ids, strict=True):
        assert row[: len(each)] == [0, *each[1:]]
    names = [batch.unshared.sample_ids for batch in batches]
    assert restore_sequences(micros, names).tolist() == list(range(len(ids)))


def test_kept_values_are_those_of_samples() -> None:
    rng = np.random.default_rng(3)
    ids = forest(rng)
    samples = samples_of(rng, ids)
    ids.append([1, 2])
    ours, _ = gradient(decoder(), divided(rng, ids), samples, cross_entropy(), keep="tokens")
    theirs, _ = gradient(decoder(), alone(ids), samples, cross_entropy(), keep="tokens")
    assert ours.kept.sample_ids.tolist() == theirs.kept.sample_ids.tolist()
    torch.testing.assert_close(ours.kept.tokens, theirs.kept.tokens)
    torch.testing.assert_close(ours.kept.samples, theirs.kept.samples)
    assert ours.tokens < theirs.tokens


def test_what_cannot_share_prefixes_is_refused_with_the_remedy() -> None:
    rng = np.random.default_rng(1)
    ids = forest(rng)
    samples = samples_of(rng, ids)
    micros = [micro_of(ids, range(len(ids)))]
    with pytest.raises(ConfigError, match=r"use_attention\(model\).*or plan without prefixes"):
        gradient(llama(name="sdpa"), micros, samples, cross_entropy())
    with pytest.raises(ConfigError, match=r"preprocess gets the slots.*or plan without prefixes"):
        gradient(decoder(), micros, samples, cross_entropy(), preprocess=lambda batch: batch)


def test_parts_of_a_split_sample_beside_a_tree_stay_in_the_loss() -> None:
    ids = [[at * 7 % 9 for at in range(90)]]
    ids += [[1, 2, 3, 4, 5, at] for at in range(3)] + [[6, 7, 8, 9, at] for at in range(3)]
    recipe = Recipe(
        layout=Packed(max_tokens=70), overflow="split", cost=Cost(per_token=0.01, per_pair=1.0)
    )
    samples, results = [{"input_ids": each} for each in ids], []
    for prefixes in (None, find_prefixes(ids)):
        stream = PlannedStream(samples, recipe, prefixes=prefixes, shuffle=False)
        model, tokens = decoder(), []
        for step in stream:
            ran = Runner(model=model, loss=cross_entropy()).run(step)
            batches = [Collator()(micro, samples) for micro in step.micro_batches]
            restored = restore_tokens(step, [batch.tokens for batch in batches], pad=-1)
            tokens += [[token for token in row if token >= 0] for row in restored.tolist()]
        assert tokens == ids
        gradients = {name: each.grad for name, each in model.named_parameters()}
        assert ran.numbers is not None
        results.append((ran.numbers.denominators, gradients))
        whole = [micro.segments.parent is None for micro in step.micro_batches]
        assert all(whole) is (prefixes is None)
    assert results[0][0] == results[1][0]
    assert max(errors_of_parameters(results[1][1], results[0][1]).values()) <= 1e-12


def test_a_plan_of_prefixes_runs_and_is_restored() -> None:
    prompts = [list(range(6)), list(range(10, 3, -1))]
    ids = [[*prompt, at % 9, at % 4, 3] for prompt in prompts for at in range(6)]
    recipe = Recipe(layout=Packed(max_tokens=64))
    plan = make_plan([len(each) for each in ids], recipe, prefixes=find_prefixes(ids))
    assert plan.segments.parent is not None
    rng, model = np.random.default_rng(0), decoder()
    samples = samples_of(rng, ids)[:-1]
    _, ours = gradient(model, plan[0, 0], samples, cross_entropy())
    _, theirs = gradient(model, alone(ids), samples, cross_entropy())
    assert max(errors_of_parameters(ours, theirs).values()) <= 1e-12
    batches = [COLLATE(micro, samples) for micro in plan[0, 0]]
    tokens = restore_tokens(plan, [batch.tokens for batch in batches], pad=-1)
    assert [[token for token in row if token >= 0] for row in tokens.tolist()] == ids
    plain = compute_log_probs(model, samples, recipe, entropy=True)
    shared = compute_log_probs(model, samples, recipe, entropy=True, share_prefixes=True)
    torch.testing.assert_close(shared, plain)


def test_rollouts_share_prompts_and_come_back_in_order() -> None:
    prompt = torch.arange(8).expand(8, -1) % VOCABULARY
    torch.manual_seed(0)
    ids = torch.cat((prompt, torch.randint(0, VOCABULARY, (8, 4))), 1)
    ids[3] = ids[2]
    extras = {"response_mask": torch.ones(8, 4), "old_log_probs": torch.randn(8, 12).double()}
    extras["advantages"] = torch.randn(8).double()
    batch = RolloutBatch({"input_ids": ids, **extras}, lengths=[12] * 8, padding_side="right")
    recipe = Recipe(layout=Packed(max_tokens=64), steps=Steps(samples=4))
    gradients, tokens, log_probs = [], [], []
    for shared in (False, True):
        model = decoder()
        runner = Runner(
            model=model, loss=policy_gradient(), collate=batch.collator(), keep="tokens"
        )
        plan = batch.plan(recipe, epochs=2, share_prefixes=shared)
        results = [runner.run(step) for step in plan.steps(batch)]
        gradients.append({name: each.grad for name, each in model.named_parameters()})
        tokens.append(sum(result.tokens for result in results))
        steps = list(plan.steps(batch))[:2]
        values = [each for step in steps for each in compute_log_probs(model, step)]
        rows = np.concatenate([step.own_sample_ids for step in steps])
        log_probs.append(batch.restore_tokens(values, rows))
    assert max(errors_of_parameters(*gradients).values()) <= 1e-12
    torch.testing.assert_close(*log_probs)
    assert tokens[0] == 2 * 8 * 12
    assert tokens[1] < 0.6 * tokens[0]


class Forgetful(nn.Module):  # type: ignore[misc]
    """A model that takes the boundaries of a batch and never looks at its tree."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.dropout = decoder(), nn.Dropout(0.5)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.decoder(replace(batch, tree=None, keys=None))


def rollouts() -> tuple[RolloutBatch, Recipe]:
    torch.manual_seed(0)
    ids = torch.cat((torch.arange(8).expand(8, -1), torch.randint(0, VOCABULARY, (8, 4))), 1)
    batch = RolloutBatch({"input_ids": ids}, lengths=[12] * 8, padding_side="right")
    return batch, Recipe(layout=Packed(max_tokens=64))


def test_a_model_that_ignores_shared_prefixes_is_refused_at_first_use() -> None:
    batch, recipe = rollouts()
    (step,) = batch.plan(recipe, share_prefixes=True).steps(batch)
    model, said = Forgetful(), r"Forgetful computes other outputs .*check_prefixes=False"
    with pytest.raises(ConfigError, match=said):
        Runner(model=model, loss=cross_entropy()).run(step)
    with pytest.raises(ConfigError, match=said):
        compute_log_probs(model, step)
    with pytest.raises(ConfigError, match=said):
        compute_log_probs(model, batch, recipe, share_prefixes=True)
    with pytest.raises(ConfigError, match=said):
        Runner(model=model, loss=cross_entropy()).evaluate([step])
    Runner(model=model, loss=cross_entropy(), check_prefixes=False).run(step)
    compute_log_probs(model, step, check_prefixes=False)


def test_the_check_of_shared_prefixes_runs_once_and_leaves_nothing_behind() -> None:
    batch, recipe = rollouts()
    (step,) = batch.plan(recipe, share_prefixes=True).steps(batch)
    model = decoder()
    model.blocks[0].eval()
    slots: list[int] = []

    def forward(model: Any, batch: Batch) -> torch.Tensor:
        slots.append(batch.width)
        torch.rand(1)
        return model(batch)

    runner = Runner(model=model, loss=cross_entropy(), forward=forward)
    torch.manual_seed(7)
    runner.run(step)
    # A prompt of 7 and twice 5; whole samples; the former without the prompt; then the step.
    assert slots[:3] == [17, 24, 17]
    assert len(slots) == 3 + len(step)
    after = torch.rand(1)
    torch.manual_seed(7)
    torch.rand(len(step))
    assert torch.equal(torch.rand(1), after)
    assert model.training
    assert not model.blocks[0].training
    runner.run(step)
    assert len(slots) == 3 + 2 * len(step)


def test_micro_batches_that_are_too_large_are_divided_inside_a_tree() -> None:
    batch, recipe = rollouts()
    (step,) = batch.plan(recipe, share_prefixes=True).steps(batch)
    (micro,) = step.micro_batches
    whole = decoder()
    Runner(model=whole, loss=cross_entropy()).run(step)
    small = Small(decoder(), micro.width - 1, "forward")
    ran = Runner(model=small, loss=cross_entropy(), on_memory="split").run(step)
    assert ran.num_micro_batches == 2
    none = micro.without(list(range(8)))  # as other ranks may have it, which divide theirs as well
    assert none.halves()[0].is_empty
    expected = {f"model.{name}": each.grad for name, each in whole.named_parameters()}
    ours = {name: each.grad for name, each in small.named_parameters()}
    assert max(errors_of_parameters(ours, expected).values()) <= 1e-12


def test_trees_are_compiled_and_checkpointed() -> None:
    rng = np.random.default_rng(5)
    ids = forest(rng)
    samples, micros = samples_of(rng, ids)[:-1], [micro_of(ids, range(len(ids)))]
    _, expected = gradient(decoder(), alone(ids), samples, cross_entropy())
    checkpointed, compiled = decoder(), decoder()
    apply_activation_checkpointing(checkpointed, check_fn=lambda part: isinstance(part, Block))
    _, by_part = gradient(checkpointed, micros, samples, cross_entropy())
    by_part = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in by_part.items()}
    assert max(errors_of_parameters(by_part, expected).values()) <= 1e-12
    step = [COLLATE(micro, samples) for micro in micros]
    graph = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    Runner(model=graph, loss=cross_entropy()).run(step)
    by_graph = {name: each.grad for name, each in compiled.named_parameters()}
    assert max(errors_of_parameters(by_graph, expected).values()) <= 1e-12


def test_both_kinds_of_checkpointing_compute_shared_prefixes_again() -> None:
    rng = np.random.default_rng(8)
    ids = forest(rng)
    samples, micros = samples_of(rng, ids)[:-1], [micro_of(ids, range(len(ids)))]
    _, expected = gradient(llama(), alone(ids), samples, cross_entropy())
    for reentrant in (False, True):
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        _, ours = gradient(model, micros, samples, cross_entropy())
        assert max(errors_of_parameters(ours, expected).values()) <= 1e-12


def test_a_compiled_llama_shares_prefixes_in_one_graph() -> None:
    rng = np.random.default_rng(9)
    ids = forest(rng)
    samples, micros = samples_of(rng, ids)[:-1], [micro_of(ids, range(len(ids)))]
    _, expected = gradient(llama(), alone(ids), samples, cross_entropy())
    model = llama()
    step = [COLLATE(micro, samples) for micro in micros]
    assert step[0].tree is not None
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    Runner(model=graph, loss=cross_entropy()).run(step)
    ours = {name: each.grad for name, each in model.named_parameters()}
    assert max(errors_of_parameters(ours, expected).values()) <= 1e-12


@pytest.mark.parametrize("how", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_ranks_check_a_model_together(how: str, tmp_path: Path) -> None:
    for ended in run_processes(2, run_checked, tmp_path, how):
        assert ended.status == 0, ended.output
        assert "check_prefixes=False" in ended.result


def run_checked(rank: int, size: int, how: str) -> str:
    """Only one of two ranks shares prefixes, and the model ignores them."""
    batch, recipe = rollouts()
    alone = {"input_ids": torch.randint(0, VOCABULARY, (1, 40))}
    ids = torch.zeros((9, 40), dtype=torch.int64)
    ids[:8, :12], ids[8] = batch.tensors["input_ids"], alone["input_ids"]
    both = RolloutBatch({"input_ids": ids}, lengths=[12] * 8 + [40], padding_side="right")
    recipe = replace(recipe, topology=Topology(dp=2))
    plan = both.plan(recipe, share_prefixes=True)
    (step,) = plan.steps(both, World(rank, size))
    assert sum(len(rank_step) for rank_step in plan.epochs[0][0]) == 2
    if how == "fsdp":  # its root is gathered when the check begins
        compute_log_probs(wrapped(decoder(), how, size)[0], step)
    model, _ = wrapped(Forgetful(), how, size)
    runner = Runner(model=model, loss=cross_entropy(), collective=Distributed())
    try:
        runner.run(step)
    except ConfigError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    "how",
    [
        "ddp",
        "fsdp",
        pytest.param("ddp, checkpoint", marks=pytest.mark.slow),
        pytest.param("fsdp, checkpoint", marks=pytest.mark.slow),
    ],
)
def test_ranks_share_a_step_of_trees(how: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    ids = forest(rng, 12)
    samples = samples_of(rng, ids)[:-1]
    _, expected = gradient(decoder(), alone(ids), samples, cross_entropy())
    micros = divided(rng, ids)
    assert len(micros) == 2
    for ended in run_processes(2, run_trees, tmp_path, how, micros, samples):
        assert ended.status == 0, ended.output
        assert max(errors_of_parameters(ended.result, expected).values()) <= 1e-12


def run_trees(rank: int, size: int, how: str, micros: Any, samples: Any) -> Any:
    model, _ = wrapped(decoder(), how, size)
    batches = [COLLATE(micros[rank], samples)]
    Runner(model=model, loss=cross_entropy(), collective=Distributed()).run(batches)
    gradients = {}
    for name, each in model.named_parameters():
        whole = each.grad.full_tensor() if "fsdp" in how else each.grad
        name = name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
        gradients[name] = whole
    return gradients
