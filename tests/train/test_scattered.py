"""Gradients that stay sharded: the same per parameter, in less memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from evenstep import Topology
from evenstep.errors import ConfigError
from evenstep.tensors import cross_entropy
from evenstep.train import Runner
from tests.internals import ModelSize, memory_of
from tests.train import scattering
from tests.train.processes import results_of
from tests.train.running import samples_of
from tests.train.steps import distance

WORK = samples_of([8, 7, 1, 3, 8, 2, 5, 4, 6, 3, 2, 7], seed=3, masked=0.0)


def check_gradients(tmp_path: Path, wraps: list[str]) -> None:
    for found in results_of(2, scattering.gradients, tmp_path, WORK.samples, wraps):
        assert len(found) == 48 * len(wraps)
        for key, (summed, scattered) in found.items():
            assert bool(summed.flat.any())
            tolerance = 1e-5 if "autocast True" in key else 1e-12
            assert distance(scattered, summed) < tolerance, key


def test_gradients_are_those_of_one_reduction_per_step(tmp_path: Path) -> None:
    check_gradients(tmp_path, ["fsdp"])


@pytest.mark.slow
def test_gradients_are_the_same_in_every_wrapper(tmp_path: Path) -> None:
    check_gradients(tmp_path, ["fsdp+hybrid", "fsdp+kept", "fsdp+flat"])


def test_the_peak_falls_by_what_tune_predicts(tmp_path: Path) -> None:
    for weights, peaks in results_of(2, scattering.peaks, tmp_path):
        names = ("parameters", "hidden", "layers", "vocab", "outside")
        sizes = {"parameters": weights, "layers": scattering.SHAPE.layers}
        size = SimpleNamespace(**{**dict.fromkeys(names, 1), **sizes}, work=SimpleNamespace(kept=1))
        predicted = [
            memory_of(
                cast(ModelSize, size), Topology(dp=2), slots=1, micro_batches=3, scattered=each
            ).summed_gradients
            for each in (False, True)
        ]
        fall = peaks["step"] - peaks["micro_batch"]
        assert fall == pytest.approx(predicted[0] - predicted[1], rel=0.1)


def test_models_that_are_not_sharded_are_refused() -> None:
    options: dict[str, Any] = {"model": torch.nn.Linear(2, 2), "loss": cross_entropy()}
    with pytest.raises(ConfigError, match="not wrapped by it"):
        Runner(**options, reduce_every="micro_batch")
    with pytest.raises(ConfigError, match="reduce_every"):
        Runner(**options, reduce_every=cast(Any, "often"))
