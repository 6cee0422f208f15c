"""What a runner refuses before anything runs."""

import pytest
import torch

from evenstep import Packed, PlannedStream, Recipe
from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import ConfigError
from evenstep.tensors import cross_entropy
from evenstep.train import Loss, Runner, TokenMean

MODEL = Decoder(DecoderShape(vocab=9))


def alone(logits: torch.Tensor) -> torch.Tensor:
    return logits.sum()


def test_a_loss_that_was_not_called_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"such as cross_entropy\(\).*got cross_entropy"):
        Runner(model=MODEL, loss=cross_entropy)  # type: ignore[arg-type]
    losses = {
        "first": Loss(function=cross_entropy(), normalization=TokenMean()),
        "second": Loss(function=alone, normalization=TokenMean()),  # type: ignore[arg-type]
    }
    with pytest.raises(ConfigError, match="the loss 'second' does not take"):
        Runner(model=MODEL, loss=losses)


def test_a_step_without_gradients_is_refused() -> None:
    step = next(iter(PlannedStream([{"input_ids": [1, 2]}], Recipe(layout=Packed(max_tokens=4)))))
    runner = Runner(model=MODEL, loss=cross_entropy())
    with torch.no_grad(), pytest.raises(ConfigError, match="use compute_log_probs for values"):
        runner.run(step)
    with torch.inference_mode(), pytest.raises(ConfigError, match="inference_mode is on"):
        runner.run(step)
    assert runner.run(step).finite
