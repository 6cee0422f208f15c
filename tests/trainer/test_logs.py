"""Trackers: what one `log:` line writes, and what is missing."""

from __future__ import annotations

import io
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from evenstep.errors import ConfigError, FileError
from evenstep.trainer import train
from tests.internals import Log
from tests.trainer.runs import logged, settings, texts


class Recorder:
    """A tracker of accelerate that keeps what it gets."""

    requires_logging_directory = True
    runs: list[Recorder]

    def __init__(self, run_name: str, logging_dir: str) -> None:
        self.run_name, self.logging_dir = run_name, logging_dir
        self.started = self.finished = False
        self.values: list[tuple[int, dict[str, Any]]] = []
        self.runs.append(self)

    def start(self) -> None:
        self.started = True

    def log(self, values: dict[str, Any], step: int) -> None:
        self.values.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_trackers_get_every_number_of_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import tracking

    monkeypatch.setattr(Recorder, "runs", [], raising=False)
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    data, out = texts(tmp_path), tmp_path / "run"
    train(settings(out, data, stream={"max_num_steps": 3}, trainer={"log": "recorder"}))

    (run,) = Recorder.runs
    assert (run.run_name, run.logging_dir) == ("run", str(out))
    assert run.started
    assert run.finished
    assert [step for step, _ in run.values] == [0, 1, 2]
    assert [each["loss"] for _, each in run.values] == [each["loss"] for each in logged(out)]
    assert not any(isinstance(value, list) for _, each in run.values for value in each.values())


def test_tensorboard_gets_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    events = import_module("tensorboard.backend.event_processing.event_accumulator")
    data, out = texts(tmp_path), tmp_path / "run"
    constant = {"schedule": "constant"}
    for steps in (4, 6):
        run = settings(
            out, data, stream={"max_num_steps": steps}, trainer={"log": "tensorboard"},
            optimizer=constant,
        )  # fmt: skip
        train(run)

    board = events.EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    scalars = board.Scalars("loss")
    assert [each.step for each in scalars] == list(range(6))
    expected = [each["loss"] for each in logged(out)]
    assert [each.value for each in scalars] == pytest.approx(expected, rel=1e-6)


def test_wandb_logs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    data, out = texts(tmp_path), tmp_path / "run"
    train(settings(out, data, stream={"max_num_steps": 2}, trainer={"log": ["wandb"]}))

    assert [*(out / "wandb").glob("offline-run-*/*.wandb")]


def test_a_tracker_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import tracking

    class Missing(Recorder):
        def __init__(self, run_name: str, **_: Any) -> None:
            pass

        def start(self) -> None:
            raise ImportError("no such package")

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Missing)
    run = settings(tmp_path / "run", texts(tmp_path), trainer={"tensorboard": True})
    with pytest.raises(ConfigError, match="tensorboard is not installed"):
        train(run)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl", 0)
    log.close()
    log._file = Path("/dev/full").open("w")  # noqa: SIM115
    with pytest.raises(FileError, match=r"log.jsonl cannot be written \(No space left"):
        log.write({"step": 0, "loss": 1.0})
    log.close()


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_line_of_tokenizing_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    train(settings(tmp_path / "run", texts(tmp_path), stream={"max_num_steps": 1}))
    before, _, after = stderr.getvalue().rpartition("\x1b[2K")
    assert "tokenizing" in before
    assert after.startswith("\rstep 1/1  loss")
