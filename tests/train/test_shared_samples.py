"""Steps that share samples between ranks have the gradients of one sample at a time."""

from __future__ import annotations

import copy
import os
import re
import signal
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from evenstep import (
    Cost,
    Packed,
    Plan,
    PlannedStream,
    PooledStream,
    Recipe,
    Sharing,
    Steps,
    Topology,
    World,
    find_prefixes,
    make_plan,
)
from evenstep.data import Feed, InMemory
from evenstep.errors import ConfigError, EvenstepError, InputError, PlanError
from evenstep.tensors import (
    Batch,
    Collator,
    Extra,
    PerSequence,
    attention,
    cross_entropy,
    dpo,
    load_balancing,
    policy_gradient,
    restore_tokens,
    reward_model,
    shard_sequence,
)
from evenstep.testing import run_ranks
from evenstep.train import (
    Distributed,
    GroupMean,
    RolloutBatch,
    RolloutPlan,
    Runner,
    SequenceMean,
    TokenMean,
    Watch,
    compile_layers,
    compute_log_probs,
)
from tests.forests import VOCABULARY, forest
from tests.internals import ELSEWHERE, Block, StreamPosition, errors_of_parameters, model_head
from tests.shared_plans import plan_of_cells, share_samples
from tests.train.on_ranks import wrapped
from tests.train.processes import run_processes
from tests.train.steps import gradient_of
from tests.train.test_trees import COLLATE, Experts, alone, decoder, gradient, llama, samples_of

LOSSES: dict[str, Callable[[], Any]] = {
    "cross_entropy": lambda: cross_entropy(z_loss=0.01, label_smoothing=0.1),
    "policy_gradient": lambda: policy_gradient(entropy_weight=0.1),
    "sequence ratio": lambda: policy_gradient(ratio="sequence"),
    "own": lambda: PerSequence(
        lambda x, view: x.square().mean(-1) * view.loss_weights, vectorised=True
    ),
    "plain": lambda: lambda x, batch: (x.square().mean(-1) * batch.loss_weights).sum(),
}
NORMALIZATIONS = [TokenMean(), SequenceMean(), GroupMean()]


def shared_plan(rng: np.random.Generator, ids: list[list[int]], ranks: int, trees: bool) -> Plan:
    recipe = Recipe(layout=Packed(max_tokens=24), topology=Topology(dp=ranks))
    prefixes = find_prefixes(ids) if trees else None
    return share_samples(rng, make_plan([len(each) for each in ids], recipe, prefixes=prefixes))


def on_threads(model: Any, plan: Plan, samples: Any, loss: Any, **options: Any) -> list[Any]:
    """(result, gradients) of each rank."""

    def run(ranks: Any) -> Any:
        mine = copy.deepcopy(model)
        batches = [COLLATE(micro, samples) for micro in plan[0, ranks.rank]]
        options.setdefault("mode", "deferred")
        runner = Runner(model=mine, loss=loss(), collective=ranks, **options)
        result = runner.run(batches)
        return result.reduce(ranks), {n: p.grad for n, p in mine.named_parameters()}

    return run_ranks(plan.num_ranks, run)


def planned_forest(rng: np.random.Generator, ids: list[list[int]], ranks: int, trees: bool) -> Plan:
    """What `make_plan` makes of a forest, in which ranks share the long samples."""
    longest = max(map(len, ids))
    options: dict[str, Any] = {
        "layout": Packed(max_tokens=int(rng.integers(longest // 2 + 1, longest + 8))),
        "topology": Topology(dp=ranks),
        "cost": Cost(per_token=1, per_pair=float(rng.choice([0, 1])), per_moved=0, per_exchange=0),
        "sharing": Sharing(),
    }
    prefixes = find_prefixes(ids) if trees else None
    return make_plan([len(each) for each in ids], Recipe(**options), prefixes=prefixes)


def lengthened(rng: np.random.Generator, ids: list[list[int]]) -> None:
    """Some samples go on for several times as many tokens as others have."""
    for at in rng.choice(len(ids), 2, replace=False):
        ids[at] = ids[at] + rng.integers(0, VOCABULARY, int(rng.integers(8, 26))).tolist()


def check(
    seed: int, model: Any, loss: str, normalization: Any, tolerance: float, ranks: int = 3,
    trees: bool = False, planned: bool = False, **options: Any,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    ids = forest(rng, 14 if planned else 8)
    if planned:
        lengthened(rng, ids)
    samples = samples_of(rng, ids)
    ids.append([1, 2])
    plan = (planned_forest if planned else shared_plan)(rng, ids, ranks, trees)
    found = on_threads(model, plan, samples, LOSSES[loss], normalization=normalization, **options)
    single, expected = gradient(
        model, alone(ids), samples, LOSSES[loss](), normalization=normalization
    )
    for result, ours in found:
        assert result.loss == pytest.approx(single.loss, rel=tolerance, abs=tolerance)
        close = pytest.approx(single.metrics, rel=10 * tolerance, abs=10 * tolerance)
        assert result.metrics == close
        assert max(errors_of_parameters(ours, expected).values()) <= tolerance


CASES = (
    st.integers(0, 10**6),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(NORMALIZATIONS),
    st.integers(2, 4),
    st.booleans(),
    st.sampled_from(["deferred", "counted"]),
)


@settings(max_examples=25)
@given(*CASES)
def test_gradients_of_shared_samples_are_those_of_single_samples(
    seed: int, loss: str, norm: Any, ranks: int, trees: bool, mode: str
) -> None:
    check(seed, decoder(), loss, norm, 1e-12, ranks, trees, mode=mode)


@settings(max_examples=25)
@given(*CASES[:4], CASES[5])
def test_gradients_of_planned_forests_are_those_of_single_samples(
    seed: int, loss: str, norm: Any, ranks: int, mode: str
) -> None:
    check(seed, decoder(), loss, norm, 1e-12, ranks, trees=True, planned=True, mode=mode)


@pytest.mark.slow
@settings(max_examples=600)
@given(*CASES, st.sampled_from(["decoder", "windowed", "llama", "float32"]), st.booleans())
def test_gradients_of_many_plans(
    seed: int, loss: str, norm: Any, ranks: int, trees: bool, mode: str, kind: str, planned: bool
) -> None:
    kinds: dict[str, Callable[[], Any]] = {
        "decoder": decoder, "windowed": lambda: decoder(window=3), "llama": llama,
        "float32": lambda: decoder(torch.float32),
    }  # fmt: skip
    check(
        seed,
        kinds[kind](),
        loss,
        norm,
        1e-6 if kind == "float32" else 1e-12,
        ranks,
        trees,
        planned,
        mode=mode,
    )


def test_windows_float32_and_a_llama_share_samples() -> None:
    for seed in range(3):
        check(seed, decoder(window=2), "cross_entropy", TokenMean(), 1e-12)
        check(seed, decoder(torch.float32), "policy_gradient", SequenceMean(), 1e-6)
        check(seed, llama(), "sequence ratio", GroupMean(), 1e-12, trees=seed > 1)


def three_ranks() -> tuple[Plan, list[dict[str, Any]], list[list[int]]]:
    """Two waves of three ranks: the first shares sample 0, on ranks 2 and 0; rank 1 is empty."""
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, VOCABULARY, n).tolist() for n in (9, 4, 6, 3, 2)]
    samples = samples_of(rng, ids)[:5]
    plan = make_plan([len(each) for each in ids], Recipe(
        layout=Packed(max_tokens=9), topology=Topology(dp=3)
    ))  # fmt: skip
    first = [[(1, 0, 4, -1), (0, 5, 4, -2)], [], [(0, 0, 5, -1)]]
    second = [[(2, 0, 6, -1)], [(3, 0, 3, -1)], [(4, 0, 2, -1)]]
    cells = [[one, two] for one, two in zip(first, second, strict=True)]
    return plan_of_cells(plan, cells), samples, ids


def test_a_wave_exchanges_once_per_layer_and_others_not_at_all() -> None:
    plan, samples, ids = three_ranks()
    same = decoder()
    _, expected = gradient(same, alone(ids), samples, cross_entropy())

    def run(ranks: Any) -> Any:
        calls: list[tuple[int, int]] = []
        real = type(ranks).all_to_all
        model = copy.deepcopy(same)
        counting: Any = Counting(ranks, calls, real)
        batches = [COLLATE(micro, samples) for micro in plan[0, ranks.rank]]
        assert [batch.exchange is not None for batch in batches] == [True, False]
        Runner(model=model, loss=cross_entropy(), collective=counting).run(batches)
        return calls, {name: each.grad for name, each in model.named_parameters()}

    for rank, (calls, ours) in enumerate(run_ranks(3, run)):
        # Two layers, forwards and backwards; sample 0 goes from rank 2 to rank 0.
        sent, received = (5 if rank == 2 else 0), (5 if rank == 0 else 0)
        assert calls == [(sent, received)] * 2 + [(received, sent)] * 2
        assert max(errors_of_parameters(ours, expected).values()) <= 1e-12


class Counting:
    """A rank that notes what it exchanges."""

    def __init__(self, ranks: Any, calls: list[tuple[int, int]], real: Any) -> None:
        self.ranks, self.calls, self.real = ranks, calls, real
        self.rank, self.size, self.all_reduce_sum = ranks.rank, ranks.size, ranks.all_reduce_sum

    def all_to_all(self, values: torch.Tensor, sent: list[int], received: list[int]) -> Any:
        self.calls.append((sum(sent), sum(received)))
        return self.real(self.ranks, values, sent, received)


@pytest.mark.parametrize("kind", ["decoder", "llama", "llama, reentrant"])
def test_checkpointed_models_exchange_again(kind: str) -> None:
    plan, samples, ids = three_ranks()
    model = decoder() if kind == "decoder" else llama()
    _, expected = gradient(model, alone(ids), samples, cross_entropy())
    if kind == "decoder":
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Block))
    else:
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in kind})
    for _, ours in on_threads(model, plan, samples, cross_entropy):
        ours = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in ours.items()}
        assert max(errors_of_parameters(ours, expected).values()) <= 1e-12


@pytest.mark.parametrize("loss", [dpo(reference=False), reward_model()])
def test_losses_of_pairs_are_refused_on_all_ranks(loss: Any) -> None:
    """Also where each rank has a part of both sequences: the last token of a part is not that of
    the sequence."""
    both = {"group": Extra(aligned="sequence"), "chosen": Extra(aligned="sequence")}
    samples = [{"input_ids": [1 + n] * 8, "group": 0, "chosen": n} for n in range(2)]
    recipe = Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2))
    first = [(0, 0, 4, -1), (1, 0, 4, -1)]
    second = [(0, 4, 4, ELSEWHERE), (1, 4, 4, ELSEWHERE)]
    plan = plan_of_cells(make_plan([8, 8], recipe), [[first], [second]])

    def run(ranks: Any) -> str:
        batches = [Collator(extras=both)(micro, samples) for micro in plan[0, ranks.rank]]
        options: Any = {"normalization": SequenceMean(), "collective": ranks}
        with pytest.raises(InputError, match="a loss of pairs cannot run"):
            Runner(model=decoder(), loss=loss, **options).run(batches)
        return "refused"

    assert run_ranks(2, run) == ["refused"] * 2


def test_autocast_shares_samples() -> None:
    plan, samples, ids = three_ranks()
    model = decoder(torch.float32)
    _, exact = gradient(model, alone(ids), samples, cross_entropy())

    def run(ranks: Any) -> Any:
        mine = copy.deepcopy(model)
        batches = [COLLATE(micro, samples) for micro in plan[0, ranks.rank]]
        runner = Runner(model=mine, loss=cross_entropy(), collective=ranks)
        with torch.autocast("cpu", torch.bfloat16):
            runner.run(batches)
        return {name: each.grad for name, each in mine.named_parameters()}

    with torch.autocast("cpu", torch.bfloat16):
        _, rounded = gradient(model, alone(ids), samples, cross_entropy())
    usual = max(errors_of_parameters(rounded, exact).values())
    for ours in run_ranks(3, run):
        assert max(errors_of_parameters(ours, exact).values()) <= 2 * usual


def test_experts_of_a_sequence_are_counted_on_all_its_ranks() -> None:
    plan, samples, ids = three_ranks()
    loss, model = partial(load_balancing, top_k=2, over="sequence"), Experts()
    _, expected = gradient(model, alone(ids), samples, loss(), normalization=SequenceMean())
    for _, ours in on_threads(model, plan, samples, loss, normalization=SequenceMean()):
        worst = errors_of_parameters(ours, expected)
        assert max(worst.values()) <= 1e-12


# Results ------------------------------------------------------------------------------------------


def test_log_probs_and_kept_values_are_of_whole_sequences() -> None:
    plan, _, ids = three_ranks()
    source = InMemory([{"input_ids": each} for each in ids])
    model = decoder()
    expected = compute_log_probs(
        model, [source[i] for i in range(5)], Recipe(layout=Packed(max_tokens=9))
    )

    def run(ranks: Any) -> Any:
        mine = copy.deepcopy(model)
        stream = PlannedStream.from_plan(source, plan, world=World(ranks.rank, 3))
        (step,) = stream
        scores = compute_log_probs(mine, step, collective=ranks)
        runner = Runner(model=mine, loss=cross_entropy(), collective=ranks, keep="tokens")
        return step.own_sample_ids.tolist(), scores, runner.run(step).kept

    ran = run_ranks(3, run)
    kept_on = {}
    for rank, (own, scores, kept) in enumerate(ran):
        for number, values in zip(own, scores, strict=True):
            assert torch.allclose(values, expected[number], rtol=0, atol=1e-12)
        for at, number in enumerate(kept.sample_ids.tolist()):
            assert number not in kept_on
            kept_on[number] = rank
            tokens = kept.tokens["loss"][at].double()
            assert torch.allclose(-tokens, expected[number].double(), rtol=0, atol=1e-6)
            assert float(kept.samples["loss"][at]) == pytest.approx(float(tokens.sum()))
    assert kept_on == {0: 2, 1: 0, 2: 0, 3: 1, 4: 2}


def test_restored_tokens_of_all_ranks_are_whole() -> None:
    plan, samples, ids = three_ranks()
    micros = [micro for rank in range(3) for micro in plan[0, rank]]
    restored = restore_tokens(plan, [COLLATE(micro, samples).tokens for micro in micros], pad=-1)
    assert [[t for t in row if t >= 0] for row in restored.tolist()] == ids
    ahead = [COLLATE(micro, samples).next_tokens for micro in micros]
    shifted = restore_tokens(plan, ahead, shifted=True, pad=-1).tolist()
    assert [[t for t in row if t >= 0][1:] for row in shifted] == [each[1:] for each in ids]


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from(["cross_entropy", "sequence ratio", "own"]),
       st.sampled_from(NORMALIZATIONS), st.booleans(), st.booleans())  # fmt: skip
def test_evaluations_and_log_probs_of_shared_samples_are_those_of_whole_ones(
    seed: int, loss: str, norm: Any, trees: bool, in_head: bool
) -> None:
    rng = np.random.default_rng(seed)
    ids = forest(rng)
    samples = samples_of(rng, ids)[:-1]
    plan, numbers, model = shared_plan(rng, ids, 3, trees), rng.integers(0, 3, len(ids)), decoder()
    source, function = InMemory(samples), LOSSES[loss]()
    if in_head and function.takes_hidden:
        function = replace(function, head="model")
    head = "model" if in_head else None

    def run(ranks: Any) -> Any:
        mine = copy.deepcopy(model)
        stream = PlannedStream.from_plan(source, plan, world=World(ranks.rank, 3))
        runner = Runner(
            model=mine, loss=function, normalization=norm, collective=ranks, collate=COLLATE
        )
        evaluation = runner.evaluate(stream, numbers)
        (step,) = stream
        ranks_if_shared = ranks if plan.segments.is_shared.any() else None
        scores = compute_log_probs(
            mine, step, collective=ranks_if_shared, entropy=True, head=head, collate=COLLATE
        )
        return evaluation, dict(zip(step.own_sample_ids.tolist(), scores, strict=True))

    whole = PlannedStream(source, Recipe(layout=Packed(max_tokens=400)), shuffle=False)
    runner = Runner(model=model, loss=LOSSES[loss](), normalization=norm, collate=COLLATE)
    expected = runner.evaluate(whole, numbers)
    (step,) = whole
    scored = compute_log_probs(model, step, entropy=True, collate=COLLATE)
    for evaluation, scores in run_ranks(3, run):
        assert evaluation.loss == pytest.approx(expected.loss, rel=1e-12, abs=1e-12)
        assert evaluation.sources == pytest.approx(expected.sources, rel=1e-11, nan_ok=True)
        assert evaluation.metrics == pytest.approx(expected.metrics, rel=1e-11, abs=1e-11)
        for number, values in scores.items():
            assert torch.allclose(values, scored[number], rtol=0, atol=1e-12)


# Streams ------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_streams_of_shared_plans_run_and_resume_within_a_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, VOCABULARY, int(n)).tolist() for n in rng.integers(1, 9, 12)]
    recipe = Recipe(layout=Packed(max_tokens=10), topology=Topology(dp=3), steps=Steps(samples=6))
    plan = share_samples(rng, make_plan([len(each) for each in ids], recipe))
    source = InMemory([{"input_ids": each} for each in ids])
    streams = [PlannedStream.from_plan(source, plan, world=World(rank, 3)) for rank in range(3)]
    whole = [list(stream) for stream in streams]
    for steps in whole:
        assert [step.plan is not None for step in steps] == [True, True]
    for number in range(2):
        for micros in zip(*(steps[number].micro_batches for steps in whole), strict=True):
            digests = {micro.exchange and micro.exchange.digest for micro in micros}
            assert len(digests) == 1
    if plan.segments.is_shared.any():
        with pytest.raises(PlanError, match="shares samples between its 3 ranks"):
            PlannedStream.from_plan(source, plan, world=World(0, 1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("trees", [False, True])
def test_a_step_that_shares_samples_resumes_within_it_on_any_ranks(ranks: int, trees: bool) -> None:
    rng = np.random.default_rng(5)
    lengths = [40, 34, *rng.integers(1, 9, 30).tolist()]
    ids = [rng.integers(0, 9, n).tolist() for n in lengths]
    if trees:
        ids[2:] = [[1, 2, 3, 4, 5, *tokens] for tokens in ids[2:]]
    lengths, source = [len(tokens) for tokens in ids], InMemory([{"input_ids": t} for t in ids])
    prefixes = find_prefixes(ids) if trees else None

    def streams(size: int) -> list[PlannedStream]:
        recipe = Recipe(layout=Packed(max_tokens=24), topology=Topology(dp=size), sharing=Sharing())
        worlds = [World(rank, size) for rank in range(size)]
        return [PlannedStream(source, recipe, world=at, prefixes=prefixes) for at in worlds]

    (whole,) = zip(*streams(4), strict=True)
    plan = whole[0].plan
    assert plan is not None
    assert plan.segments.is_shared.any()
    assert plan.segments.shares_slots == trees
    done = {(i, t) for step in whole for i, t in tokens_of(step.micro_batches[:1])}
    state = streams(4)[0].cursor(StreamPosition().within(4, 1)).to_dict()
    rests = streams(ranks)
    for stream in rests:
        stream.load_state_dict(state)
    (rest,) = zip(*rests, strict=True)
    assert len({len(step) for step in rest}) == 1
    left = [pair for step in rest for pair in tokens_of(step.micro_batches)]
    assert len(left) == len(set(left))
    assert done.isdisjoint(left)
    assert len(done) + len(left) == sum(lengths)
    for micros in zip(*(step.micro_batches for step in rest), strict=True):
        assert len({micro.exchange and micro.exchange.digest for micro in micros}) == 1


def test_a_planned_step_that_shares_has_the_gradient_of_single_samples() -> None:
    rng = np.random.default_rng(7)
    ids = [rng.integers(0, VOCABULARY, n).tolist() for n in (40, 30, 5, 4, 3, 6, 2)]
    samples = samples_of(rng, ids)[:-1]
    recipe = Recipe(layout=Packed(max_tokens=24), topology=Topology(dp=3), sharing=Sharing())
    plan = make_plan([len(each) for each in ids], recipe)
    assert plan.segments.is_shared.any()
    _, expected = gradient(decoder(), alone(ids), samples, cross_entropy())
    for _, ours in on_threads(decoder(), plan, samples, cross_entropy):
        assert max(errors_of_parameters(ours, expected).values()) <= 1e-12


def run_rollouts(ranks: Any, model: Any, plan: RolloutPlan, batch: RolloutBatch) -> Any:
    """What a rank computes of the rows that a controller sends it: log-probs and a gradient."""
    mine, model = batch.select(plan.rows_of(ranks.rank)), copy.deepcopy(model)
    scores, rows = [], []
    for step in plan.steps(mine, World(ranks.rank, ranks.size)):
        collective = ranks if ranks.size > 1 else None
        scores += compute_log_probs(model, step, collective=collective)
        rows.append(step.own_sample_ids)
    runner = Runner(model=model, loss=policy_gradient(), collective=ranks, collate=mine.collator())
    for step in plan.steps(mine, World(ranks.rank, ranks.size)):
        runner.run(step)
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return scores, np.concatenate(rows), gradients


@pytest.mark.parametrize("prefixes", [False, True])
def test_rollouts_that_ranks_share_have_the_gradient_of_single_rows(prefixes: bool) -> None:
    torch.manual_seed(0)
    lengths = [40, 34, *(9 + at % 4 for at in range(14))]
    ids = torch.randint(0, VOCABULARY, (16, 40))
    ids[2:, :7] = torch.arange(7)  # one prompt
    extras = {"old_log_probs": torch.randn(16, 40).double(), "advantages": torch.randn(16).double()}
    batch = RolloutBatch({"input_ids": ids, **extras}, lengths=lengths, padding_side="right")
    free = Cost(per_token=1, per_pair=1, per_moved=0, per_exchange=0)
    layout, topology = Packed(max_tokens=36), Topology(dp=3)
    recipe = Recipe(layout=layout, topology=topology, cost=free, sharing=Sharing())
    plan = batch.plan(recipe, share_prefixes=prefixes)
    assert plan.epochs[0].segments.is_shared.any()
    assert plan.epochs[0].segments.shares_slots == prefixes
    alone = batch.plan(Recipe(layout=Packed(max_tokens=40)))
    model = decoder()
    (one,) = run_ranks(1, lambda ranks: run_rollouts(ranks, model, alone, batch))
    ran = run_ranks(3, lambda ranks: run_rollouts(ranks, model, plan, batch))
    # Ranks that share a row have its results alike: one of them is kept.
    scores, rows = (
        [each for ours, _, _ in ran for each in ours],
        np.concatenate([r[1] for r in ran]),
    )
    assert len(rows) > len(batch)
    rows, first = np.unique(rows, return_index=True)
    restored = batch.restore_tokens([scores[at] for at in first], rows)
    expected = batch.restore_tokens(one[0], one[1])
    assert torch.allclose(restored, expected, rtol=0, atol=1e-12)
    for _, _, gradients in ran:
        assert max(errors_of_parameters(gradients, one[2]).values()) <= 1e-12


def tokens_of(micros: Any) -> list[tuple[int, int]]:
    """(sample, token) of all slots; those of a shared prefix once per sample."""
    pairs = []
    for micro in micros:
        segments, own = micro.segments, micro.own
        behind = np.zeros(len(own)) if segments.parent is None else segments.parent >= 0
        first = np.where(behind > 0, 0, segments.start)
        end = segments.start + segments.length
        for at in np.flatnonzero(own).tolist():
            pairs += [(int(segments.sample[at]), t) for t in range(first[at], end[at])]
    return pairs


# Refused ------------------------------------------------------------------------------------------


class Forgetful(nn.Module):  # type: ignore[misc]
    """A model that does not see what other ranks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = decoder()

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.decoder(replace(batch, keys=None, exchange=None, tree=None))


class BothWays(nn.Module):  # type: ignore[misc]
    """A model whose tokens see those after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, VOCABULARY, dtype=torch.float64)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.embed(batch.tokens).unsqueeze(1)
        return attention(x, x, x, batch, causal=False).squeeze(1)


def errors_on_ranks(model: Any, loss: Any, **options: Any) -> list[str]:
    """The error of each rank."""
    plan, samples, _ = three_ranks()

    def run(ranks: Any) -> str:
        batches = [COLLATE(micro, samples) for micro in plan[0, ranks.rank]]
        try:
            given = {"collective": ranks, **options}
            Runner(model=copy.deepcopy(model), loss=loss, **given).run(batches)
        except EvenstepError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_ranks(3, run)


@pytest.mark.parametrize(
    ("model", "loss", "options", "said"),
    [
        (decoder, cross_entropy().looped(), {}, "Set vectorised=True"),
        (Forgetful, cross_entropy(), {}, "Forgetful does not see the tokens that other ranks"),
        (lambda: llama(name="sdpa"), cross_entropy(), {}, r"use_attention\(model\)"),
        (decoder, cross_entropy(), {"on_memory": "split"}, "on_memory='split'"),
        (lambda: decoder(backend="mask"), cross_entropy(), {}, "'mask' supports no keys of other"),
        (lambda: decoder(backend="causal"), cross_entropy(), {}, "'causal' supports no keys of"),
        (BothWays, cross_entropy(), {}, "this layer is not causal"),
    ],
)
def test_what_cannot_share_samples_is_refused_on_all_ranks(
    model: Any, loss: Any, options: dict[str, Any], said: str
) -> None:
    if options.get("on_memory"):
        plan, samples, _ = three_ranks()
        stream = PlannedStream.from_plan(InMemory(samples), plan, world=World(0, 3))
        (step,) = stream
        with pytest.raises(ConfigError, match=said):
            Runner(model=model(), loss=loss, collate=COLLATE, **options).run(step)
        return
    for error in errors_on_ranks(model(), loss, **options):
        assert re.search(said, error), error


def test_a_model_that_forgets_is_refused_before_the_first_step() -> None:
    plan, _, ids = three_ranks()
    source = InMemory([{"input_ids": each} for each in ids])

    def run(ranks: Any) -> str:
        (step,) = PlannedStream.from_plan(source, plan, world=World(ranks.rank, 3))
        try:
            Runner(model=Forgetful(), loss=cross_entropy(), collective=ranks).run(step)
        except ConfigError as error:
            return str(error)
        return ""

    errors = run_ranks(3, run)
    assert all("check" in error and "Forgetful" in error for error in errors), errors


def test_one_process_cannot_run_the_ranks_in_turn() -> None:
    plan, samples, _ = three_ranks()
    batches = [COLLATE(micro, samples) for micro in plan[0, 0]]
    with pytest.raises(ConfigError, match="between 3 ranks, but the collective has 1"):
        Runner(model=decoder(), loss=cross_entropy()).run(batches)
    with pytest.raises(InputError, match="shared with other ranks"):
        decoder()(batches[0])
    with pytest.raises(InputError, match="cannot be divided between further ranks"):
        shard_sequence(batches[0], 0, 2)
    (step,) = PlannedStream.from_plan(InMemory(samples), plan, world=World(0, 3))
    with pytest.raises(ConfigError, match="Pass collective=Distributed"):
        compute_log_probs(decoder(), step)


def test_feeds_and_pools_refuse_sharing() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2), sharing=Sharing())
    source = InMemory([{"input_ids": [1, 2]}])
    with pytest.raises(ConfigError, match="Use a PlannedStream, or leave sharing out"):
        Feed(recipe)
    with pytest.raises(ConfigError, match="Use a PlannedStream, or leave sharing out"):
        PooledStream(source, recipe)
    with pytest.raises(ConfigError, match="on_error='skip'"):
        PlannedStream(source, recipe, on_error="skip", world=World(0, 2))


@pytest.mark.parametrize("how", ["run", "evaluate", "log probs", "planned log probs"])
def test_plans_that_differ_are_an_error_on_all_ranks_before_the_first_exchange(how: str) -> None:
    plan, samples, _ = three_ranks()
    rows = [[(1, 0, 4, -1), (0, 4, 5, -2)], [], [(0, 0, 4, -1)]]
    second = [[(2, 0, 6, -1)], [(3, 0, 3, -1)], [(4, 0, 2, -1)]]
    other = plan_of_cells(plan, [[one, two] for one, two in zip(rows, second, strict=True)])

    def run(ranks: Any) -> str:
        mine = other if ranks.rank == 0 else plan
        calls: list[tuple[int, int]] = []
        counting: Any = Counting(ranks, calls, type(ranks).all_to_all)
        batches = [COLLATE(micro, samples) for micro in mine[0, ranks.rank]]
        stream = PlannedStream.from_plan(InMemory(samples), mine, world=World(ranks.rank, 3))
        runner = Runner(model=decoder(), loss=cross_entropy(), collective=counting, collate=COLLATE)
        long = [{"input_ids": [1] * (40 - (ranks.rank == 0))}, *samples]
        recipe = Recipe(layout=Packed(max_tokens=24), topology=Topology(dp=3), sharing=Sharing())
        ways: dict[str, Callable[[], Any]] = {
            "run": lambda: runner.run(batches),
            "evaluate": lambda: runner.evaluate(stream),
            "log probs": lambda: compute_log_probs(
                decoder(), next(iter(stream)), collective=counting
            ),
            "planned log probs": lambda: compute_log_probs(
                decoder(), long, recipe, collective=counting
            ),
        }
        try:
            ways[how]()
        except InputError as error:
            assert not calls
            return str(error)
        return ""

    for error in run_ranks(3, run):
        assert "runs another step" in error


# Processes ----------------------------------------------------------------------------------------


def run_shared(rank: int, size: int, how: str, seed: int, trees: bool) -> Any:
    """Two steps of the same plan; the gradient of the second."""
    plan, _, samples = plan_on_processes(how, size, seed, trees)
    batches = [COLLATE(micro, samples) for micro in plan[0, rank]]
    graph = decoder()
    if "layers" in how:
        compile_layers(graph, backend="aot_eager")
    kind = how.replace("aot", "").replace("planned", "").replace("layers", "")
    model, _ = wrapped(graph, kind, size)
    if "aot" in how:
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    runner = Runner(model=model, loss=cross_entropy(), collective=Distributed())
    for _ in range(2):
        model.zero_grad()
        runner.run(batches)
    return any(batch.exchange is not None for batch in batches), gradient_of(model)


def plan_on_processes(how: str, size: int, seed: int, trees: bool) -> tuple[Plan, Any, Any]:
    """(plan, ids, samples) that every process and the test make by themselves."""
    rng = np.random.default_rng(seed)
    ids = forest(rng, 10)
    if "planned" in how:
        lengthened(rng, ids)
    samples = samples_of(rng, ids)[:-1]
    plan = (planned_forest if "planned" in how else shared_plan)(rng, ids, size, trees)
    return plan, ids, samples


HOWS = [
    "plain",
    "ddp",
    "fsdp",
    "plain checkpoint",
    "ddp checkpoint",
    "fsdp checkpoint",
    "plain aot",
    "ddp layers",
    "fsdp layers planned",
    "plain planned",
    "ddp planned",
    "fsdp planned",
]
FAST = {("ddp checkpoint", 2), ("fsdp", 2), ("ddp planned", 2)}


def killed_in_an_exchange(rank: int, size: int) -> str:
    """Run steps under `Watch`; rank 1 dies inside the fifth exchange."""
    plan, samples, _ = three_ranks()
    batches = [COLLATE(micro, samples) for micro in plan[0, rank]]
    calls, ranks = iter(range(10**6)), Distributed()

    def dying(self: Any, values: Any, sent: list[int], received: list[int]) -> Any:
        if rank == 1 and next(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchanged(self, values, sent, received)

    exchanged = Distributed.all_to_all
    Distributed.all_to_all = dying  # type: ignore[method-assign]
    runner = Runner(model=decoder(), loss=cross_entropy(), collective=ranks)
    with Watch(timeout=4.0, grace=2.0):
        for _ in range(10**6):
            runner.run(batches)
    return "did not end"


@pytest.mark.slow
def test_a_rank_that_dies_inside_an_exchange_ends_all(tmp_path: Path) -> None:
    for ended in run_processes(3, killed_in_an_exchange, tmp_path, limit=120):
        assert ended.status != 0
        assert ended.result is None


@pytest.mark.parametrize(
    ("how", "size"),
    [
        pytest.param(how, size, marks=() if (how, size) in FAST else pytest.mark.slow)
        for how in HOWS
        for size in (2, 4)
    ],
)
def test_processes_share_samples(how: str, size: int, tmp_path: Path) -> None:
    seed, trees = 6, size == 2 or "planned" in how
    plan, ids, samples = plan_on_processes(how, size, seed, trees)
    if "planned" in how:
        assert plan.segments.is_shared.any()
        assert plan.segments.shares_slots
    _, expected = gradient(decoder(), alone(ids), samples, cross_entropy())
    for ended in run_processes(size, run_shared, tmp_path, how, seed, trees):
        assert ended.status == 0, ended.output
        shares, ours = ended.result
        assert shares
        assert max(errors_of_parameters(ours, expected).values()) <= 1e-12


def test_small_logits_of_shared_samples_use_the_head_too() -> None:
    plan, samples, _ = three_ranks()
    model = decoder()
    forward: Any = Runner(model=model, loss=cross_entropy()).forward
    heads = model_head.Heads.of_losses(model, forward, [cross_entropy()])
    shared, whole = (COLLATE(micro, samples) for micro in plan[0, 0])
    assert heads.at(shared) is not None
    assert heads.at(whole) is None


def run_large_and_small(rank: int, size: int, seed: int) -> Any:
    """Logits of rank 0 are large, those of others are not; the loss sums over ranks."""
    rng = np.random.default_rng(seed)
    ids = forest(rng, 10)
    samples = samples_of(rng, ids)[:-1]
    plan = shared_plan(rng, ids, size, trees=False)
    batches = [COLLATE(micro, samples) for micro in plan[0, rank]]
    model_head.SMALL["cpu"] = 0 if rank == 0 else 2**30
    model, _ = wrapped(decoder(), "fsdp", size)
    runner = Runner(model=model, loss=policy_gradient(ratio="sequence"), collective=Distributed())
    for _ in range(2):
        model.zero_grad()
        runner.run(batches)
    return gradient_of(model)


@pytest.mark.slow
def test_ranks_agree_where_the_loss_is_computed(tmp_path: Path) -> None:
    seed = 6
    rng = np.random.default_rng(seed)
    ids = forest(rng, 10)
    samples = samples_of(rng, ids)[:-1]
    _, expected = gradient(decoder(), alone(ids), samples, policy_gradient(ratio="sequence"))
    for ended in run_processes(2, run_large_and_small, tmp_path, seed, limit=300):
        assert ended.status == 0, ended.output
        assert max(errors_of_parameters(ended.result, expected).values()) <= 1e-12
