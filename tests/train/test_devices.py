"""Batches run where the model is."""

from contextlib import suppress

import torch

from evenstep import Packed, PlannedStream, Recipe
from evenstep.demo import Decoder, DecoderShape
from evenstep.tensors import cross_entropy
from evenstep.train import Runner
from tests.internals import device_of


def test_the_device_of_a_model_is_that_of_its_first_parameter() -> None:
    assert device_of(torch.nn.Linear(2, 2)) == torch.device("cpu")
    assert device_of(torch.nn.ReLU()) is None
    assert device_of(torch.nn.Linear(2, 2, device="meta")) is None
    assert device_of(lambda batch: batch) is None


def test_a_given_device_comes_before_that_of_the_model() -> None:
    """On `meta`, batches have no values, so that only their device is seen."""
    seen = []

    def forward(model: Decoder, batch: object) -> torch.Tensor:
        seen.append(batch.device.type)  # type: ignore[attr-defined]
        raise ZeroDivisionError

    step = next(
        iter(PlannedStream([{"input_ids": [1, 2, 3]}], Recipe(layout=Packed(max_tokens=8))))
    )
    model = Decoder(DecoderShape(vocab=9))
    for device in (None, "meta"):
        with suppress(ZeroDivisionError):
            Runner(model=model, loss=cross_entropy(), forward=forward, device=device).run(step)
    assert seen == ["cpu", "meta"]
