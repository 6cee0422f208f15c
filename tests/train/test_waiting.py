"""No micro-batch waits for the device: on `meta`, which has no values, reading one is an error."""

from typing import Any

import numpy as np
import pytest
import torch

from evenstep import Packed, Padded, PlannedStream, Recipe, Steps, find_prefixes
from evenstep.demo import Decoder, DecoderShape
from evenstep.tensors import Collator, Extra, cross_entropy, policy_gradient
from evenstep.train import (
    FixedLength,
    GroupMean,
    Loss,
    Runner,
    SampleWeights,
    SequenceMean,
    TokenMean,
)
from tests.internals import Layout, runner_module

VOCAB = 32
LAYOUTS: list[Layout] = [Packed(max_tokens=16), Packed(max_tokens=32), Padded(max_tokens=48)]
EXTRAS = {
    "group": Extra(aligned="sequence", dtype=torch.int64),
    "weight": Extra(aligned="sequence"),
    "advantages": Extra(aligned="token"),
    "old_log_probs": Extra(aligned="token"),
}


class FinishedError(Exception):
    """All micro-batches have run, and the numbers of the step are about to be read."""


def samples_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": np.arange(n) % VOCAB, "group": number, "weight": 1.0 + number,
            "advantages": np.ones(n, np.float32), "old_log_probs": -np.ones(n, np.float32),
        }
        for number, n in enumerate(lengths)
    ]  # fmt: skip


def decoder() -> Any:
    return Decoder(DecoderShape(vocab=VOCAB, hidden=16, layers=2, heads=2, kv_heads=1, ffn=16))


def run_on_meta(
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    layout: Layout,
    loss: Any,
    *,
    share: bool = False,
    **options: Any,
) -> None:
    """Run a step of several micro-batches, up to where its numbers are read."""

    def finish(step_run: Any) -> Any:
        assert step_run.position == step_run.count > 1
        raise FinishedError

    monkeypatch.setattr(runner_module.StepRun, "_finish", finish)
    monkeypatch.setattr(runner_module, "counts_of", lambda ran, cost: {})
    samples = samples_of([5, 9, 16, 3, 7, 12, 16, 2])
    stream = PlannedStream(
        samples,
        Recipe(layout=layout, steps=Steps(samples=8), groups="micro_batch"),
        groups=list(range(8)),
        prefixes=find_prefixes([each["input_ids"] for each in samples]) if share else None,
    )
    runner = Runner(
        model=model.to("meta"), loss=loss, device="meta", collate=Collator(extras=EXTRAS), **options
    )
    with pytest.raises(FinishedError):
        runner.run(next(iter(stream)))


NORMALIZATIONS = [TokenMean(), SequenceMean(), GroupMean(), FixedLength(8), SampleWeights()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("normalization", NORMALIZATIONS, ids=repr)
def test_no_normalization_waits(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, normalization: Any
) -> None:
    run_on_meta(monkeypatch, decoder(), layout, cross_entropy(), normalization=normalization)


@pytest.mark.parametrize(
    "options", [{"keep": "tokens"}, {"on_nonfinite": "skip"}, {"mode": "deferred"}], ids=str
)
def test_no_option_waits(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    run_on_meta(monkeypatch, decoder(), LAYOUTS[0], cross_entropy(), **options)


def test_several_losses_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {
        "nll": Loss(function=cross_entropy(z_loss=0.1)),
        "policy": Loss(function=policy_gradient(kl_weight=0.0), normalization=SequenceMean()),
    }
    run_on_meta(monkeypatch, decoder(), LAYOUTS[0], losses, mode="deferred")


def test_shared_prefixes_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {
        "nll": Loss(function=cross_entropy()),
        "policy": Loss(function=policy_gradient(), normalization=SequenceMean()),
    }
    options = {"mode": "deferred", "check_prefixes": False}
    run_on_meta(monkeypatch, decoder(), Packed(max_tokens=16), losses, share=True, **options)


def test_a_loss_that_waits_is_an_error_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: reading a value on `meta` fails."""

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        assert float(outputs.detach().sum()) > 0
        return outputs.sum()

    with pytest.raises(RuntimeError, match="meta"):
        run_on_meta(monkeypatch, decoder(), LAYOUTS[0], loss)
