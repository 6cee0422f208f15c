"""Losses, gradients and weights that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.errors import EvenstepError
from evenstep.trainer import train
from tests.internals import State, complete, run_module
from tests.internals import TrainJob as Job
from tests.internals import run_module as run
from tests.trainer.runs import break_on, checkpoint, logged, losses, settings, texts

SAVE_ALL = {"save_every": 1, "keep": 2}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of the letter z are NaN."""
    monkeypatch.setitem(
        vars(run_module), "forward_for", vars(run_module)["forward_for"]
    )  # restored later
    break_on("z")


def assert_finite(out: Path) -> None:
    for path in complete(out / "checkpoints"):
        for name, value in checkpoint(path).items():
            assert value.isfinite().all(), (path, name)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    data, out = texts(tmp_path), tmp_path / "run"
    optimizer = {"lr": 1e30, "clip": None, "warmup_steps": 0}

    with pytest.raises(
        EvenstepError, match=r"step 1 has .* a gradient of norm nan; .* on_nonfinite='skip'"
    ):
        train(settings(out, data, optimizer=optimizer, trainer=SAVE_ALL))

    assert [path.name for path in complete(out / "checkpoints")] == ["step-000001"]
    assert_finite(out)


@pytest.mark.parametrize("part", ["weight", "moment"])
def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = texts(tmp_path), tmp_path / "run"
    one = {"save_every": 1, "keep": 1}
    real_update = run.update
    train(settings(out, data, stream={"max_num_steps": 3}, trainer=one))

    def update(job: Job, state: State, *rest: Any) -> None:
        real_update(job, state, *rest)
        parameter = next(state.model.parameters())
        broken = parameter if part == "weight" else state.optimizer.state[parameter]["exp_avg_sq"]
        broken.data[-1] = torch.inf

    with monkeypatch.context() as patch:
        patch.setattr(run, "update", update)
        says = r"weights are not finite after step 3.*step-000003"
        with pytest.raises(EvenstepError, match=says):
            train(settings(out, data, trainer=one))

    assert [path.name for path in complete(out / "checkpoints")] == ["step-000003"]
    assert_finite(out)


@pytest.mark.usefixtures("broken")
def test_steps_that_are_not_finite_are_skipped_up_to_a_limit(tmp_path: Path) -> None:
    data = texts(tmp_path, start="z")  # in one step of every epoch of four
    skip: dict[str, Any] = {"on_nonfinite": "skip", "max_skipped": 3, "save_every": 4}
    optimizer = {"schedule": "constant"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    ended = train(settings(whole, data, trainer=skip, optimizer=optimizer))

    assert ended.skipped == 3
    assert ended.loss is not None
    skipped = [record["step"] for record in logged(whole) if record.get("skipped")]
    assert [step // 4 for step in skipped] == [0, 1, 2]
    assert [at for at, loss in enumerate(losses(whole)) if loss is None] == skipped
    assert_finite(whole)
    stream = {"max_num_steps": skipped[1] + 1}
    train(settings(parts, data, stream=stream, trainer=skip, optimizer=optimizer))
    stream = {"max_num_steps": 16}  # steps that were skipped before a resume count too
    with pytest.raises(EvenstepError, match=r"4 steps .* trainer.max_skipped=3"):
        train(settings(parts, data, stream=stream, trainer=skip, optimizer=optimizer))
    assert losses(parts)[:12] == losses(whole)


@pytest.mark.usefixtures("broken")
def test_the_samples_of_a_step_that_is_not_finite_are_named(tmp_path: Path) -> None:
    data = texts(tmp_path, start="z")

    with pytest.raises(EvenstepError, match=r"the loss of micro-batch .* \(sample 12\)"):
        train(settings(tmp_path / "run", data))
