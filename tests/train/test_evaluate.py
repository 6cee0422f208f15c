"""`Runner.evaluate`: the loss of held-out samples, the same for any ranks and layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import Packed, Padded, PlannedStream, Recipe, Steps, Topology, World
from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import InputError
from evenstep.tensors import Collator, Extra, cross_entropy, dpo
from evenstep.train import GroupMean, Runner, SequenceMean, TokenMean
from tests.internals import Layout
from tests.rank_threads import RankThreads

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
        each = 1.0 if isinstance(normalization, TokenMean) else 1 / float(mask.sum())
        total += float((loss * mask).sum()) * each
        weight += float(mask.sum()) * each
    return total / weight


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("normalization", [TokenMean(), SequenceMean()], ids=repr)
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


def test_nothing_to_evaluate_is_an_error() -> None:
    runner = Runner(model=decoder(), loss=cross_entropy())
    with pytest.raises(InputError, match="no step to evaluate"):
        runner.evaluate([])
    silent = [{**sample, "loss_mask": np.zeros_like(sample["loss_mask"])} for sample in SAMPLES]
    with pytest.raises(InputError, match="no token of these samples counts"):
        runner.evaluate(PlannedStream(silent, Recipe(layout=Packed(max_tokens=300))))
