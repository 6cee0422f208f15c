"""`Runner.evaluate`: the loss of held-out samples, the same for any ranks and layout."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import (
    Packed,
    Padded,
    PlannedStream,
    Recipe,
    Steps,
    Topology,
    World,
    find_prefixes,
)
from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import InputError
from evenstep.tensors import Collator, Extra, cross_entropy, dpo
from evenstep.testing import run_ranks
from evenstep.train import (
    Alone,
    Constant,
    Custom,
    Distributed,
    FixedLength,
    GroupMean,
    Runner,
    SequenceMean,
    TokenMean,
)
from tests.internals import Layout
from tests.rank_threads import RankThreads
from tests.train.on_ranks import wrapped
from tests.train.processes import results_of
from tests.train.running import Context

LAYOUTS = [
    Packed(max_tokens=300),
    Packed(rows=2, pad_to=160),
    Padded(max_tokens=400),
    Padded(samples=3),
]
RANDOM = np.random.default_rng(0)
SAMPLES = [
    {"input_ids": RANDOM.integers(0, 64, n), "loss_mask": (np.arange(n) > 3).astype(int)}
    for n in RANDOM.integers(5, 150, 37).tolist()
]
SOURCES = np.arange(len(SAMPLES)) % 3
NORMALIZATIONS = [TokenMean(), SequenceMean(), FixedLength(50.0), Constant(700.0)]


class Thread:
    """A rank that is a thread."""

    def __init__(self, threads: RankThreads, rank: int) -> None:
        self.threads, self.rank, self.size = threads, rank, threads.size

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all threads."""
        return torch.stack(self.threads.gather(self.rank, tensor)).sum(0)


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderShape(vocab=64))


@cache
def one_at_a_time(normalization: Any, chosen: tuple[int, ...]) -> float:
    """The mean over samples that run alone, in double precision."""
    model = decoder().double().requires_grad_(False)
    total = weight = 0.0
    for at in chosen:
        ids = torch.from_numpy(SAMPLES[at]["input_ids"])
        micro = PlannedStream([SAMPLES[at]], Recipe(layout=Padded(samples=1)), shuffle=False)
        (step,) = micro
        batch = Collator()(step.micro_batches[0], [SAMPLES[at]])
        logits = model(batch)[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        mask = torch.from_numpy(SAMPLES[at]["loss_mask"][1:])
        each = 1 / float(mask.sum()) if isinstance(normalization, SequenceMean) else 1.0
        total += float((loss * mask).sum()) * each
        fixed = isinstance(normalization, FixedLength)
        weight += normalization.length if fixed else float(mask.sum()) * each
    return total / (normalization.value if isinstance(normalization, Constant) else weight)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("normalization", NORMALIZATIONS, ids=repr)
def test_the_loss_is_that_of_one_sample_at_a_time(
    layout: Layout, ranks: int, normalization: Any
) -> None:
    threads = RankThreads(ranks)
    models = [decoder() for _ in range(ranks)]

    def evaluate(rank: int) -> Any:
        recipe = Recipe(layout=layout, steps=Steps(samples=10), topology=Topology(dp=ranks))
        stream = PlannedStream(SAMPLES, recipe, shuffle=False, world=World(rank, ranks))
        model = models[rank]
        runner = Runner(
            model=model,
            loss=cross_entropy(),
            normalization=normalization,
            collective=Thread(threads, rank),
        )
        result = runner.evaluate(stream, SOURCES)
        assert model.training
        assert all(each.grad is None for each in model.parameters())
        return result

    results = threads.run(evaluate)

    every = tuple(range(len(SAMPLES)))
    for result in results:
        assert result.loss == pytest.approx(one_at_a_time(normalization, every), abs=1e-6)
        for number, loss in enumerate(result.sources):
            chosen = tuple(at for at in every if SOURCES[at] == number)
            assert loss == pytest.approx(one_at_a_time(normalization, chosen), abs=1e-6)
    if isinstance(normalization, TokenMean):
        tokens = sum(int(sample["loss_mask"][1:].sum()) for sample in SAMPLES)
        assert results[0].denominators == {"loss_tokens": tokens}


def test_sources_need_a_denominator_that_is_the_sum_of_weights() -> None:
    halves = Custom("halves", lambda batch: batch.loss_weights, lambda batch: batch.loss_tokens / 2)
    stream = PlannedStream(SAMPLES, Recipe(layout=Packed(max_tokens=300)), shuffle=False)
    runner = Runner(model=decoder(), loss=cross_entropy(), normalization=halves)
    assert runner.evaluate(stream).loss > 0
    with pytest.raises(InputError, match=r"is not the sum of its weights.*leave sources out"):
        runner.evaluate(stream, SOURCES)


# Dropout, mixed precision, shared prefixes, fully_shard -------------------------------------------

BEGINNINGS = RANDOM.integers(0, 64, (3, 40))
FAMILY: list[dict[str, Any]] = [
    {"input_ids": np.append(BEGINNINGS[i % 3], RANDOM.integers(0, 64, n))}
    for i, n in enumerate(RANDOM.integers(1, 60, 21).tolist())
]


def dropping() -> Decoder:
    """A decoder whose loss in training mode is another one."""
    model = decoder()
    model.norm = torch.nn.Sequential(model.norm, torch.nn.Dropout(0.5))
    return model


def in_bfloat16(model: Any, batch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch)


def loss_of_family(model: Any, options: dict[str, Any], layout: Layout, shared: bool) -> Any:
    """The evaluation of `FAMILY`, on the ranks of the options' collective."""
    world = World(0, 1)
    if collective := options.get("collective"):
        world = World(collective.rank, collective.size)
    prefixes = find_prefixes([each["input_ids"] for each in FAMILY]) if shared else None
    recipe = Recipe(layout=layout, steps=Steps(samples=10), topology=Topology(dp=world.size))
    stream = PlannedStream(FAMILY, recipe, shuffle=False, world=world, prefixes=prefixes)
    return Runner(model=model, **options).evaluate(stream, np.arange(len(FAMILY)) % 3)


def losses_one_at_a_time(forward: Any) -> list[float]:
    """Of all samples of `FAMILY`, and of each source."""
    model, sums = dropping().eval().requires_grad_(False), np.zeros((3, 2))
    for at, sample in enumerate(FAMILY):
        (step,) = PlannedStream([sample], Recipe(layout=Padded(samples=1)), shuffle=False)
        logits = forward(model, Collator()(step.micro_batches[0], [sample]))[0, :-1].float()
        labels = torch.from_numpy(sample["input_ids"][1:])
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        sums[at % 3] += float(loss), len(labels)
    return [sums[:, 0].sum() / sums[:, 1].sum(), *(sums[:, 0] / sums[:, 1])]


@pytest.mark.parametrize("head", [None, "model"])
@pytest.mark.parametrize(
    ("layout", "shared"),
    [
        (Packed(max_tokens=300), True),
        (Packed(max_tokens=300), False),
        (Packed(rows=2, pad_to=160), False),
        (Padded(samples=3), False),
    ],
)
def test_dropout_shared_prefixes_and_mixed_precision_give_the_plain_loss(
    layout: Layout, shared: bool, head: Any
) -> None:
    options: dict[str, Any] = {"loss": cross_entropy(head=head)}
    result = loss_of_family(dropping(), options, layout, shared)
    expected = losses_one_at_a_time(lambda model, batch: model(batch))
    assert [result.loss, *result.sources] == pytest.approx(expected, abs=1e-6)

    result = loss_of_family(dropping(), {**options, "forward": in_bfloat16}, layout, shared)
    expected = losses_one_at_a_time(in_bfloat16)
    assert [result.loss, *result.sources] == pytest.approx(expected, abs=2e-3)


def evaluate_wrapped(rank: int, size: int) -> dict[str, list[float]]:
    """The losses of `FAMILY`, for each way to wrap and each head."""
    results = {}
    for how in ("ddp", "fsdp"):
        for head in (None, "model"):
            model, _ = wrapped(dropping(), how, size)
            options = {"loss": cross_entropy(head=head), "collective": Distributed()}
            for shared in (False, True):
                result = loss_of_family(model, options, Packed(max_tokens=150), shared)
                results[f"{how} {head} {shared}"] = [result.loss, *result.sources]
            assert model.training
    return results


@pytest.mark.slow
def test_wrapped_models_give_the_plain_loss(tmp_path: Path) -> None:
    expected = losses_one_at_a_time(lambda model, batch: model(batch))
    for results in results_of(2, evaluate_wrapped, tmp_path):
        assert len(results) == 8
        for how, losses in results.items():
            assert losses == pytest.approx(expected, abs=1e-6), how


def test_pairs_are_evaluated_as_a_mean_over_pairs() -> None:
    def collate(micro: Any, samples: Any) -> Any:
        extras = {
            name: Extra(aligned="sequence", dtype=torch.int64) for name in ("group", "chosen")
        }
        extras["reference_log_probs"] = Extra(aligned="sequence")
        whole = {
            i: {**samples[i], "group": i // 2, "chosen": 1 - i % 2, "reference_log_probs": -9.0}
            for i in micro.segments.sample.tolist()
        }
        return Collator(extras=extras)(micro, whole)

    def loss_of(samples: list[Any], layout: Layout) -> float:
        recipe = Recipe(layout=layout, steps=Steps(samples=8), groups="micro_batch")
        stream = PlannedStream(samples, recipe, shuffle=False, groups=np.arange(len(samples)) // 2)
        runner = Runner(model=decoder(), loss=dpo(), normalization=GroupMean(), collate=collate)
        return runner.evaluate(stream).loss

    whole = SAMPLES[:36]
    expected = np.mean([loss_of(whole[i : i + 2], Padded(samples=2)) for i in range(0, 36, 2)])
    assert loss_of(whole, Packed(max_tokens=400)) == pytest.approx(expected, abs=1e-6)


def test_ranks_that_share_batches_count_each_group_once() -> None:
    extras = {"group": Extra(aligned="sequence", dtype=torch.int64)}
    groups = np.arange(6) // 2
    samples = [{**sample, "group": at // 2} for at, sample in enumerate(SAMPLES[:6])]
    recipe = Recipe(layout=Packed(max_tokens=400), groups="micro_batch", topology=Topology(cp=2))
    stream = PlannedStream(samples, recipe, groups=groups, shuffle=False)
    model = decoder()  # not in threads, which share torch's random numbers

    def evaluate(ranks: Any) -> float:
        context = Context(ranks.rank, 2)
        divided: dict[str, Any] = {"shard": context.shard, "forward": context.forward}
        runner = Runner(
            model=copy.deepcopy(model),
            loss=cross_entropy(),
            normalization=GroupMean(),
            collate=Collator(extras=extras),
            collective=ranks,
            **(divided if ranks.size > 1 else {}),
        )
        return runner.evaluate(stream).loss

    assert run_ranks(2, evaluate) == pytest.approx([evaluate(Alone())] * 2, abs=1e-6)


@pytest.mark.parametrize(("budget", "ranks"), [(8, 1), (16, 2)])
def test_a_group_that_is_divided_is_an_error(budget: int, ranks: int) -> None:
    samples = [{"input_ids": [1, 2, 3, 4, 5, 6], "group": 7}] * 2
    collate = Collator(extras={"group": Extra(aligned="sequence", dtype=torch.int64)})
    threads = RankThreads(ranks)

    def evaluate(rank: int) -> str:
        recipe = Recipe(layout=Packed(max_tokens=budget), topology=Topology(dp=ranks))
        stream = PlannedStream(samples, recipe, world=World(rank, ranks))
        options: dict[str, Any] = {"collate": collate, "collective": Thread(threads, rank)}
        runner = Runner(model=decoder(), loss=cross_entropy(), normalization=GroupMean(), **options)
        with pytest.raises(InputError) as caught:
            runner.evaluate(stream)
        return str(caught.value)

    where = "in two micro-batches" if ranks == 1 else "on rank 0 and on rank 1"
    assert all(f"group 7 is {where}" in error for error in threads.run(evaluate))


def test_nothing_to_evaluate_is_an_error() -> None:
    runner = Runner(model=decoder(), loss=cross_entropy())
    with pytest.raises(InputError, match="no step to evaluate"):
        runner.evaluate([])
    silent = [{**sample, "loss_mask": np.zeros_like(sample["loss_mask"])} for sample in SAMPLES]
    with pytest.raises(InputError, match="no token of these samples counts"):
        runner.evaluate(PlannedStream(silent, Recipe(layout=Packed(max_tokens=300))))
