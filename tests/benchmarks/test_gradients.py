"""Benchmarks judge gradients per parameter: a norm of all hides a small one that is wrong."""

import pytest
import torch

from benchmarks import gpu_steps

GRADIENT = {"embed.weight": torch.full((100, 100), 10.0), "norm.weight": torch.ones(10)}


@pytest.mark.parametrize("factor", [1.0, 1 - 1e-4])
def test_a_wrong_gradient_of_a_small_parameter_misses_the_target(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradient(source, layout, *others):  # type: ignore[no-untyped-def]
        wrong = layout == gpu_steps.layouts(512, 256)["packed"]
        off = {"norm.weight": factor * GRADIENT["norm.weight"]} if wrong else {}
        return {**GRADIENT, **off}

    monkeypatch.setattr(gpu_steps, "_gradient", gradient)
    section = gpu_steps.gradients("cpu", quick=True)

    assert [target.met for target in section.targets] == [factor == 1.0]
    assert "judged by itself" in section.notes[0]
