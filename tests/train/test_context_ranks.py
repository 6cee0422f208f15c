"""Context-parallel ranks each run two parts of every sample: gradients are those of one sample at a
time, without a mask or a copy of all keys per layer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GptOssConfig, GptOssForCausalLM

from evenstep import Packed, Padded, PlannedStream, PooledStream, Recipe, Steps, Topology, World
from evenstep.data import Feed, InMemory
from evenstep.errors import EvenstepError
from evenstep.integrations.hf_attention import use_attention
from evenstep.tensors import cross_entropy, load_balancing, policy_gradient
from evenstep.testing import run_ranks
from evenstep.train import (
    Alone,
    Distributed,
    GroupMean,
    RolloutBatch,
    Runner,
    SequenceMean,
    TokenMean,
    compute_log_probs,
)
from tests.forests import VOCABULARY
from tests.internals import errors_of_parameters
from tests.train.on_ranks import wrapped
from tests.train.processes import run_processes
from tests.train.steps import gradient_of
from tests.train.test_shared_samples import LOSSES, BothWays, Forgetful
from tests.train.test_trees import COLLATE, Experts, alone, decoder, gradient, llama, samples_of

NORMALIZATIONS = [TokenMean(), SequenceMean(), GroupMean()]
LAYOUTS = [
    Packed(max_tokens=48),
    Packed(max_tokens=48, pad_to=48),
    Packed(rows=2, pad_to=24),
    Padded(max_tokens=96),
    Padded(samples=3, pad_to=24),
]


def random_ids(rng: np.random.Generator, longest: int = 24) -> list[list[int]]:
    lengths = rng.integers(1, longest + 1, int(rng.integers(1, 9))).tolist()
    return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


def steps_of(samples: Any, dp: int, cp: int, layout: Any = LAYOUTS[0], **options: Any) -> list[Any]:
    """The step of all samples, for each data-parallel rank."""
    recipe = Recipe(layout=layout, topology=Topology(dp=dp, cp=cp), **options)
    streams = (PlannedStream(InMemory(samples), recipe, world=World(d, dp)) for d in range(dp))
    return [next(iter(stream)) for stream in streams]


def on_threads(model: Any, steps: list[Any], cp: int, loss: Any, **options: Any) -> list[Any]:
    """(result, gradients) of each rank."""

    def run(ranks: Any) -> Any:
        mine = copy.deepcopy(model)
        runner = Runner(model=mine, loss=loss(), collective=ranks, collate=COLLATE, **options)
        ran = runner.run(steps[ranks.rank // cp]).reduce(ranks)
        return ran, {name: each.grad for name, each in mine.named_parameters()}

    return run_ranks(len(steps) * cp, run)


def check(
    seed: int, model: Any, loss: str, norm: Any, tolerance: float, dp: int, cp: int,
    layout: Any = LAYOUTS[0], **options: Any,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    ids = random_ids(rng)
    samples = samples_of(rng, ids)
    ids.append([1, 2])
    steps = steps_of(samples, dp, cp, layout)
    found = on_threads(model, steps, cp, LOSSES[loss], normalization=norm, **options)
    # Always in float64: rounding of two float32 gradients adds up to more than 1e-6.
    exact = copy.deepcopy(model).double()
    single, expected = gradient(exact, alone(ids), samples, LOSSES[loss](), normalization=norm)
    for result, ours in found:
        assert result.loss == pytest.approx(single.loss, rel=tolerance, abs=tolerance)
        close = pytest.approx(single.metrics, rel=10 * tolerance, abs=10 * tolerance)
        assert result.metrics == close
        assert max(errors_of_parameters(ours, expected).values()) <= tolerance


CASES = (
    st.integers(0, 10**6),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(NORMALIZATIONS),
    st.sampled_from([(1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (3, 2)]),
    st.sampled_from(LAYOUTS),
    st.sampled_from(["deferred", "counted"]),
)


@settings(max_examples=25)
@given(*CASES)
def test_gradients_of_divided_samples_are_those_of_single_samples(
    seed: int, loss: str, norm: Any, ranks: tuple[int, int], layout: Any, mode: Any
) -> None:
    check(seed, decoder(), loss, norm, 1e-12, *ranks, layout, mode=mode)


@pytest.mark.slow
@settings(max_examples=400)
@given(*CASES, st.sampled_from(["decoder", "windowed", "llama", "float32"]))
def test_gradients_of_many_steps(
    seed: int, loss: str, norm: Any, ranks: tuple[int, int], layout: Any, mode: Any, kind: str
) -> None:
    kinds: dict[str, Callable[[], Any]] = {
        "decoder": decoder, "windowed": lambda: decoder(window=3), "llama": llama,
        "float32": lambda: decoder(torch.float32),
    }  # fmt: skip
    tolerance = 1e-6 if kind == "float32" else 1e-12
    check(seed, kinds[kind](), loss, norm, tolerance, *ranks, layout, mode=mode)


def test_windows_float32_and_a_llama_run_parts() -> None:
    for seed in range(3):
        check(seed, decoder(window=2), "cross_entropy", TokenMean(), 1e-12, 1, 3)
        check(seed, decoder(torch.float32), "policy_gradient", SequenceMean(), 1e-6, 2, 2)
        check(seed, llama(), "sequence ratio", GroupMean(), 1e-12, 1, 2)
    check(3, llama(), "policy_gradient", TokenMean(), 1e-12, 1, 4, LAYOUTS[3])


def test_the_last_layer_computes_losses_of_parts() -> None:
    rng = np.random.default_rng(4)
    ids = random_ids(rng)
    samples = samples_of(rng, ids)
    ids.append([1, 2])
    for loss in (policy_gradient(ratio="sequence"), cross_entropy(z_loss=0.1)):
        _, expected = gradient(decoder(), alone(ids), samples, loss)
        made = partial(replace, loss, head="model")
        for _, ours in on_threads(decoder(), steps_of(samples, 2, 2), 2, made):
            assert max(errors_of_parameters(ours, expected).values()) <= 1e-12


def test_experts_of_a_sequence_are_counted_on_all_its_ranks() -> None:
    rng = np.random.default_rng(5)
    ids = random_ids(rng)
    samples = samples_of(rng, ids)
    ids.append([1, 2])
    loss, model = partial(load_balancing, top_k=2, over="sequence"), Experts()
    _, expected = gradient(model, alone(ids), samples, loss(), normalization=SequenceMean())
    steps = steps_of(samples, 1, 3)
    for _, ours in on_threads(model, steps, 3, loss, normalization=SequenceMean()):
        assert max(errors_of_parameters(ours, expected).values()) <= 1e-12


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_llama_with_windows_and_sinks_runs_parts(reentrant: bool) -> None:
    rng = np.random.default_rng(6)
    ids = random_ids(rng)
    samples = samples_of(rng, ids)
    ids.append([1, 2])
    model = gpt_oss()
    _, expected = gradient(model, alone(ids), samples, cross_entropy())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _, ours in on_threads(model, steps_of(samples, 1, 3), 3, cross_entropy):
        assert max(errors_of_parameters(ours, expected).values()) <= 1e-12


def gpt_oss() -> Any:
    """Layers with a window of 3 and without one in turn, and with sinks."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 3}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(vocab_size=VOCABULARY, **sizes, **heads, **experts)
    config._experts_implementation = "eager"
    model = GptOssForCausalLM(config).double()
    for layer in model.model.layers:  # its own norms compute in float32
        nn.init.normal_(layer.self_attn.sinks)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, norm, nn.RMSNorm(16, eps=1e-6, dtype=torch.float64))
    model.model.norm = nn.RMSNorm(16, eps=1e-6, dtype=torch.float64)
    return use_attention(model)


# Results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 3)])
def test_log_probs_kept_values_and_evaluations_are_those_of_whole_samples(dp: int, cp: int) -> None:
    rng = np.random.default_rng(dp)
    samples = [{"input_ids": each} for each in [*random_ids(rng), [3], [4, 5]]]
    model, numbers = llama(), rng.integers(0, 2, len(samples))
    recipe = Recipe(layout=Packed(max_tokens=48), topology=Topology(dp=dp, cp=cp))
    alone = Recipe(layout=Packed(max_tokens=480))
    expected = compute_log_probs(model, samples, alone, entropy=True)
    stream = PlannedStream(InMemory(samples), alone, shuffle=False)
    whole = Runner(model=model, loss=cross_entropy()).evaluate(stream, numbers)

    def run(ranks: Any) -> Any:
        mine, world = copy.deepcopy(model), World(ranks.rank // cp, dp)
        stream = PlannedStream(InMemory(samples), recipe, world=world, shuffle=False)
        (step,) = stream
        planned = compute_log_probs(mine, samples, recipe, collective=ranks, entropy=True)
        own = compute_log_probs(mine, step, collective=ranks, entropy=True)
        runner = Runner(model=mine, loss=cross_entropy(), collective=ranks, keep="tokens")
        kept = runner.run(step).kept
        of_step = dict(zip(step.own_sample_ids.tolist(), own, strict=True))
        return planned, of_step, kept, runner.evaluate(stream, numbers)

    kept_on: dict[int, int] = {}
    for rank, (planned, own, kept, evaluation) in enumerate(run_ranks(dp * cp, run)):
        assert len(planned) == len(samples)
        for number, values in [*enumerate(planned), *own.items()]:
            assert torch.allclose(values, expected[number], rtol=0, atol=1e-12)
        for at, number in enumerate(kept.sample_ids.tolist()):
            assert number not in kept_on
            kept_on[number] = rank
            tokens = kept.tokens["loss"][at].double()
            assert torch.allclose(-tokens, expected[number][:, 0], rtol=0, atol=1e-6)
        assert evaluation.loss == pytest.approx(whole.loss, rel=1e-12)
        assert evaluation.sources == pytest.approx(whole.sources, rel=1e-11)
    assert sorted(kept_on) == list(range(len(samples)))


def test_rollouts_train_on_context_ranks() -> None:
    rng = np.random.default_rng(8)
    lengths = rng.integers(2, 20, 6)
    width = int(lengths.max())
    mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
    ids = rng.integers(0, VOCABULARY, (6, width)) * mask
    columns = {"input_ids": ids, "attention_mask": mask, "advantages": rng.normal(0, 1, ids.shape)}
    batch = RolloutBatch({name: torch.from_numpy(each) for name, each in columns.items()})
    loss = partial(policy_gradient, ratio="sequence")
    model = decoder()
    old = compute_log_probs(model, batch, Recipe(layout=Packed(max_tokens=64)))

    def gradients(topology: Topology, ranks: Any, world: World) -> Any:
        mine = copy.deepcopy(model)
        recipe = Recipe(layout=Packed(max_tokens=64), topology=topology)
        same = compute_log_probs(mine, batch, recipe, collective=ranks)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(same, old, strict=True))
        filled = batch.with_tensors({"old_log_probs": batch.restore_tokens(same)})
        runner = Runner(model=mine, loss=loss(), collective=ranks, collate=filled.collator())
        for step in filled.plan(recipe).steps(filled, world):
            runner.run(step)
        return {name: each.grad for name, each in mine.named_parameters()}

    expected = gradients(Topology(), Alone(), World())
    cut = Topology(dp=2, cp=2)
    for ours in run_ranks(4, lambda ranks: gradients(cut, ranks, World(ranks.rank // 2, 2))):
        assert max(errors_of_parameters(ours, expected).values()) <= 1e-12


# What is refused ----------------------------------------------------------------------------------


def run_badly(model: Any, ranks: Any, samples: Any, how: str) -> None:
    overflow: Any = "split" if how == "split" else "error"
    most = 8 if how == "split" else 48
    recipe = Recipe(layout=Packed(max_tokens=most), topology=Topology(cp=2), overflow=overflow)
    (step,) = PlannedStream(InMemory(samples), recipe)
    step = step.collated(COLLATE) if how == "collated" else step
    options: dict[str, Any] = {"on_memory": "split"} if how == "memory" else {}
    loss = cross_entropy().looped() if how == "looped" else cross_entropy()
    Runner(model=model(), loss=loss, collective=ranks, collate=COLLATE, **options).run(step)


@pytest.mark.parametrize(
    ("model", "how", "said"),
    [
        (decoder, "looped", "Set vectorised=True"),
        (decoder, "memory", "on_memory='split' divides"),
        (decoder, "split", "has split ones"),
        (decoder, "collated", "Pass a step with samples"),
        (Forgetful, "", "Forgetful"),
        (lambda: llama(name="sdpa"), "", r"use_attention\(model\)"),
        (lambda: decoder(backend="mask"), "", "'mask' supports no keys of other"),
        (BothWays, "", "this layer is not causal"),
    ],
)
def test_what_cannot_run_in_parts_is_refused_on_all_ranks(model: Any, how: str, said: str) -> None:
    samples = samples_of(np.random.default_rng(0), [[1] * 20, [2] * 9])

    def run(ranks: Any) -> str:
        try:
            run_badly(model, ranks, samples, how)
        except EvenstepError as error:
            return str(error)
        return ""

    for error in run_ranks(2, run):
        assert re.search(said, error), error


def step_without_plan(kind: str, samples: Any) -> Any:
    """What holds whole samples for the ranks of a context: cp=2, of two data-parallel ranks."""
    dp = 1 if kind == "of fewer ranks" else 2
    steps = Steps(micro_batches=1) if kind in ("pooled", "feed") else Steps(samples=4)
    recipe = Recipe(layout=Packed(max_tokens=48), topology=Topology(dp=dp, cp=2), steps=steps)
    if kind == "feed":
        feed = Feed(recipe)
        for sample in samples:
            feed.put(sample)
        feed.close()
        return feed
    stream = PooledStream if kind == "pooled" else PlannedStream
    step = next(iter(stream(InMemory(samples), recipe, world=World(0, dp))))
    whole = kind != "resumed within"
    return step if whole else replace(step, plan=None, sample_ids=None, costs=())


@pytest.mark.parametrize("kind", ["pooled", "feed", "resumed within", "of fewer ranks"])
def test_samples_that_no_plan_divides_are_refused_where_each_context_rank_would_run_them(
    kind: str,
) -> None:
    samples = samples_of(np.random.default_rng(0), [[1] * 20, [2] * 9, [3] * 7, [4] * 5])

    def run(ranks: Any) -> list[str]:
        runner = Runner(model=decoder(), loss=cross_entropy(), collective=ranks, collate=COLLATE)
        calls: list[Any] = [runner.run, lambda step: runner.evaluate([step])]
        errors = []
        for call in [runner.run_fed] if kind == "feed" else calls:
            try:
                call(step_without_plan(kind, samples))
            except EvenstepError as error:
                errors.append(str(error))
        return errors

    for errors in run_ranks(4, run):
        assert len(errors) == (1 if kind == "feed" else 2)
        for error in errors:
            assert re.search(r"every sample would run 2 times.*Runner\(shard=", error), error
    # Without context-parallel ranks in the collective, nothing is divided.
    assert run_ranks(2, run) == [[], []]
    assert run(Alone()) == []


# Memory -------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):  # type: ignore[misc]
    """The most entries of a tensor that is computed."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        self.entries = max([self.entries, *sizes])
        return out


def test_no_mask_of_queries_and_keys_is_computed() -> None:
    def largest(length: int) -> int:
        samples = [{"input_ids": np.arange(length) % VOCABULARY}]
        recipe = Recipe(layout=Packed(max_tokens=length), topology=Topology(cp=4))

        def run(ranks: Any) -> Any:
            (step,) = PlannedStream(InMemory(samples), recipe)
            runner = Runner(model=decoder(torch.float32), loss=cross_entropy(), collective=ranks)
            with Largest() as mode:
                runner.run(step)
            return mode.entries

        return int(max(run_ranks(4, run)))

    one, two = largest(4096), largest(8192)
    # Queries of a rank times keys, twice as many of both: four times.
    assert two < 2048 * 8192 / 4
    assert two < 2.1 * one


# Processes ----------------------------------------------------------------------------------------


def run_parts(rank: int, size: int, how: str, cp: int) -> Any:
    """Two steps of the same samples; the gradient of the second, and log-probs."""
    rng = np.random.default_rng(9)
    samples = samples_of(rng, random_ids(rng))
    step = steps_of(samples, size // cp, cp)[rank // cp]
    graph = llama() if "llama" in how else decoder()
    model, _ = wrapped(graph, how.replace("aot", ""), size)
    if "aot" in how:
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    ranks = Distributed()
    runner = Runner(
        model=model, loss=policy_gradient(ratio="sequence"), normalization=SequenceMean(),
        collective=ranks, collate=COLLATE,
    )  # fmt: skip
    for _ in range(2):
        model.zero_grad()
        runner.run(step)
    ours = gradient_of(model)
    return ours, compute_log_probs(model, step, collective=ranks, collate=COLLATE)


HOWS = [
    "plain",
    "ddp",
    "fsdp",
    "plain checkpoint",
    "ddp checkpoint",
    "fsdp checkpoint",
    "plain aot",
    "fsdp llama",
]
FAST = {("ddp checkpoint", 2, 2), ("fsdp llama", 2, 2)}


@pytest.mark.parametrize(
    ("how", "size", "cp"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in ((how, *ranks) for how in HOWS for ranks in ((2, 2), (4, 2), (4, 4)))
    ],
)
def test_processes_run_parts(how: str, size: int, cp: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    ids = random_ids(rng)
    samples = samples_of(rng, ids)
    ids.append([1, 2])
    loss = policy_gradient(ratio="sequence")
    model = llama() if "llama" in how else decoder()
    _, expected = gradient(model, alone(ids), samples, loss, normalization=SequenceMean())
    expected = {name.replace("model.", ""): each for name, each in expected.items()}
    for rank, ended in enumerate(run_processes(size, run_parts, tmp_path, how, cp)):
        assert ended.status == 0, ended.output
        ours, scores = ended.result
        assert max(errors_of_parameters(ours, expected).values()) <= 1e-12
        step = steps_of(samples, size // cp, cp)[rank // cp]
        whole = compute_log_probs(model, step, collate=COLLATE)
        assert len(scores) == len(whole)
        for mine, theirs in zip(scores, whole, strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)
