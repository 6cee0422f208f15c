"""Runs in several processes, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep import Packed, Recipe, Steps
from evenstep.errors import FileError
from evenstep.trainer import train
from tests.internals import complete, read_place, run_module
from tests.trainer.runs import break_on, finish, logged, losses, settings, start, texts

KILLS = 10


def test_two_processes_give_the_losses_of_one_and_skip_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = texts(tmp_path, start="z")
    trainer = {"on_nonfinite": "skip"}
    options: dict[str, Any] = {"stream": {"max_num_steps": 4}, "trainer": trainer}
    monkeypatch.setattr(
        run_module, "forward_for", vars(run_module)["forward_for"]
    )  # restored at the end
    break_on("z")
    train(settings(tmp_path / "one", data, **options))

    finish(start(tmp_path / "two", data, ranks=2, **options, break_on="z"))

    one, two = (np.array(losses(tmp_path / name), float) for name in ("one", "two"))
    assert np.isnan(one).sum() == 1
    assert np.allclose(two, one, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("every", ["micro_batch", None])
def test_gradients_that_are_scattered_by_micro_batches_give_the_losses_of_one_process(
    tmp_path: Path, every: str | None
) -> None:
    data = texts(tmp_path)
    options: dict[str, Any] = {"stream": {"max_num_steps": 3}, "model": {"layers": 3}}
    steps = Recipe(layout=Packed(max_tokens=256), steps=Steps(samples=24))
    train(settings(tmp_path / "one", data, recipe=steps, **options))

    trainer = {"parallel": "fsdp2", "reduce_every": every}
    finish(start(tmp_path / "two", data, ranks=2, samples=24, trainer=trainer, **options))

    first, *_ = logged(tmp_path / "two")
    assert [len(costs) for costs in first["micro_batches/cost"]] == [2, 2]
    assert np.allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-5)
    (started,) = (tmp_path / "two" / "starts.jsonl").read_text().splitlines()
    assert json.loads(started)["reduce_every"] == (every or "step")  # on a CPU, unless asked


def test_a_folder_belongs_to_one_run_until_that_is_killed(tmp_path: Path) -> None:
    data, out = texts(tmp_path), tmp_path / "run"
    process = start(out, data, stream={"max_num_steps": 100_000})
    while not complete(out / "checkpoints"):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    other = settings(out, data, stream={"max_num_steps": 100_000}, trainer={"keep": 1})

    with pytest.raises(FileError, match=f"is in use by process {process.pid} on "):
        train(other)

    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = read_place(complete(out / "checkpoints")[-1]).step
    train(settings(out, data, stream={"max_num_steps": done + 2}))
    assert [record["step"] for record in logged(out)] == list(range(done + 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel"), [(1, "ddp"), (2, "ddp"), (2, "fsdp2"), (3, "ddp"), (3, "fsdp2")]
)
def test_killed_processes_continue_the_same_losses(
    tmp_path: Path, ranks: int, parallel: str
) -> None:
    """Ten kills: of all processes at random moments, while a checkpoint is written, and of one
    rank."""
    data, steps = texts(tmp_path), 400
    options = {
        "stream": {"max_num_steps": steps},
        "trainer": {"parallel": parallel, "save_every": 2},
    }
    finish(start(tmp_path / "whole", data, ranks, **options))
    out, random = tmp_path / "killed", np.random.default_rng(ranks)
    for kill in range(KILLS):
        process = start(out, data, ranks, **options)
        _wait_for_steps(out, process, int(random.integers(1, 12)))
        time.sleep(random.uniform(0, 0.2))
        if kill % 3 == 1:
            _wait_for_a_checkpoint_in_the_making(out)
        assert process.poll() is None, process.communicate()[0]
        if kill % 3 == 2 and ranks > 1:
            victim = random.choice([each for each in _processes(out) if each != process.pid])
            os.kill(int(victim), signal.SIGKILL)
            process.communicate(timeout=300)  # the launcher ends the others
            assert process.returncode != 0
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        assert _processes(out) == []
    finish(start(out, data, ranks, **options))

    assert [record["step"] for record in logged(out)] == list(range(steps))
    assert np.abs(np.subtract(losses(out), losses(tmp_path / "whole"))).max() < 1e-6
    assert [path.name for path in (out / "checkpoints").iterdir() if path.name[0] == "."] == []
    assert _processes(out) == []


def _processes(out: Path) -> list[int]:
    """The processes that work on a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            state = path.with_name("stat").read_text().rpartition(")")[2].split()[0]
            if str(out) in path.read_text() and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def _wait_for_a_checkpoint_in_the_making(out: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not [*(out / "checkpoints").glob(".step-*")]:
        time.sleep(0.0005)


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_a_checkpoint(tmp_path: Path) -> None:
    data, out = texts(tmp_path), tmp_path / "run"
    options = {"stream": {"max_num_steps": 60}, "trainer": {"save_every": 1000}}
    process = start(out, data, 2, **options)
    _wait_for_steps(out, process, 3)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=600)

    assert len(complete(out / "checkpoints")) == 1
    finish(start(out, data, 1, **options))
    train(settings(tmp_path / "whole", data, **options))
    assert np.allclose(losses(out), losses(tmp_path / "whole"), atol=1e-4)


@pytest.mark.slow
def test_two_processes_agree_on_checkpoints_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    data, out = texts(tmp_path), tmp_path / "run"
    train(settings(tmp_path / "whole", data, stream={"max_num_steps": 9}))
    train(settings(out, data, stream={"max_num_steps": 9}))  # leaves the checkpoints of 6 and 9
    ten: dict[str, Any] = {"stream": {"max_num_steps": 10}}
    process = start(out, data, 2, **ten, file_limit=50_000)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "step-000010 cannot be written (" in printed
    assert "The run can continue from step-000009." in printed
    checkpoints = out / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000006", "step-000009"]

    shard = max((checkpoints / "step-000009").iterdir(), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1])
    process = start(out, data, 2, **ten)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "step-000009 is damaged" in printed
    nine = {"stream": {"max_num_steps": 9}, "trainer": {"fall_back": True}}
    finish(start(out, data, 2, **nine))
    assert np.allclose(losses(out), losses(tmp_path / "whole"), atol=1e-5)


def _wait_for_steps(out: Path, process: object, more: int) -> None:
    """Until the log has `more` steps than now, or the process has ended."""
    log = out / "log.jsonl"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    deadline = time.monotonic() + 600
    first: int | None = None
    while time.monotonic() < deadline and process.poll() is None:  # type: ignore[attr-defined]
        now = len(log.read_text().splitlines()) if log.exists() else 0
        first = now if first is None or now < first else first
        if now >= (first if before else 0) + more:
            return
        time.sleep(0.02)
