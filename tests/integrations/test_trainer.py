"""Real trainers on planned steps: every sample once per epoch, exact length, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TrainingArguments

from evenstep import Packed, Recipe, Steps
from evenstep.errors import ConfigError
from tests.integrations.loops import (
    EPOCHS,
    LENGTHS,
    PlannedTrainer,
    Samples,
    arguments_of,
    chained,
    run_accelerate,
    run_trainer,
    tiny_model,
)


@pytest.mark.parametrize("run", [run_trainer, run_accelerate])
def test_one_process_resumes_exactly(tmp_path: Path, run: Any) -> None:
    (tmp_path / "stopped").mkdir()
    whole = run(tmp_path / "whole", "packed", epochs=2, save_steps=100)
    run(tmp_path / "stopped", "packed", stop=18, epochs=2, save_steps=17)
    resumed = run(tmp_path / "stopped", "packed", resume=True, epochs=2, save_steps=100)
    assert [sorted(epoch) for epoch in whole["reads"]] == [list(range(len(LENGTHS)))] * 2
    assert whole["reads"][0] != whole["reads"][1]
    check_tail(whole["reads"], resumed["reads"])
    assert resumed["losses"] == whole["losses"]
    assert resumed["parameters"] == whole["parameters"]
    # Epochs of 14 and 13 steps. The Trainer needs equal ones: its last step changes nothing.
    if run is run_trainer:
        assert (whole["steps"], whole["fillers"]) == (28, [27])
        sums = whole["sums"]
        assert [n for n in range(1, 28) if sums[n] == sums[n - 1]] == [27]
    else:
        assert (whole["lengths"], whole["steps"]) == ([28, 26], 27)


def check_tail(whole: list[list[int]], resumed: list[list[int]]) -> None:
    """The resumed run reads what is left of its first epoch, and then whole epochs."""
    rest = whole[-len(resumed) :]
    assert 0 < len(resumed[0]) < len(rest[0])
    assert rest[0][-len(resumed[0]) :] == resumed[0]
    assert resumed[1:] == rest[1:]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("run", ["trainer", "accelerate", "sft"])
def test_two_processes_resume_exactly_in_later_epochs(
    tmp_path: Path, run: str, layout: str
) -> None:
    found = chained(tmp_path, run, layout)
    for epoch in range(EPOCHS):
        reads = [item for each in found for item in each["whole"]["reads"][epoch]]
        assert sorted(reads) == list(range(len(LENGTHS)))
    for each in found:
        whole, (_, second, third) = each["whole"], each["parts"]
        assert whole["reads"][0] != whole["reads"][1]
        check_tail(whole["reads"], third["reads"])
        assert whole["reads"][1][-len(second["reads"][0]) :] == second["reads"][0]
        assert third["losses"] == whole["losses"]
        assert third["parameters"] == whole["parameters"]
    assert found[0]["whole"]["parameters"] == found[1]["whole"]["parameters"]


def test_a_step_has_the_same_gradient_in_any_layout(tmp_path: Path) -> None:
    changes: Any = {"steps": Steps(samples=7), "gradient_accumulation_steps": 5, "optim": "sgd"}
    changes["epochs"] = 1
    runs = [run_trainer(tmp_path / name, name, **changes) for name in ("packed", "padded")]
    assert runs[0]["steps"] == 12
    assert runs[0]["fillers"] == []
    np.testing.assert_allclose(runs[0]["losses"], runs[1]["losses"], atol=1e-4)
    for mine, other in zip(runs[0]["parameters"], runs[1]["parameters"], strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)
