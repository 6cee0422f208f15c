"""A run that is killed many times writes the same bytes as an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.crash import STEPS, WORKERS, Order

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="adopting orphans needs Linux"),
]

KILLS = 60
MICRO_BATCHES = 16  # most that a run writes before it is killed
PAUSE = 0.002
PATIENCE = 300.0


class Zygote:
    """A process with all imports done, which forks a run in a few milliseconds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.data.crash import zygote; zygote()"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(self, kind: str, folder: Path, pause: float) -> int:
        """Start a run; return its pid, which is also its process group."""
        assert self._process.stdin is not None
        order: Order = {"kind": kind, "folder": str(folder), "pause": pause}
        self._process.stdin.write(json.dumps(order) + "\n")
        return int(self._line())

    def ends(self) -> list[int]:
        """Wait for all processes of the run, workers included; return their exit codes."""
        return [int(code) for code in self._line().split()]

    def _line(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        assert ready, "the run hangs, or left a worker behind"
        return self._process.stdout.readline()

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    started = Zygote()
    yield started
    started.stop()


@pytest.mark.parametrize("kind", ["planned", "pooled"])
def test_a_run_killed_many_times_gives_the_same_bytes(
    kind: str, zygote: Zygote, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    zygote.start(kind, whole, 0)
    assert zygote.ends() == [0]

    rng = random.Random(kind)
    phases: Counter[str] = Counter()
    for _ in range(KILLS):
        leader = zygote.start(kind, killed, PAUSE)
        wait_for(rng.choice([0, *range(MICRO_BATCHES)]), killed / "log")
        time.sleep(rng.uniform(0, 0.02))
        os.killpg(leader, signal.SIGKILL)
        ends = zygote.ends()
        assert set(ends) == {-signal.SIGKILL}, "it ended before it was killed"
        phases.update(["starting"] if len(ends) <= WORKERS else phases_of(killed))
    assert not (killed / "done").exists()
    zygote.start(kind, killed, 0)
    assert zygote.ends() == [0]

    expected = (whole / "log").read_bytes()
    assert (killed / "log").read_bytes() == expected
    assert expected.count(b"\n") > STEPS
    assert {"starting", "within a step", "steps after a save"} <= phases.keys()


def wait_for(micro_batches: int, log: Path) -> None:
    """Wait until a run has added this number of micro-batches to the log."""
    if not micro_batches:
        return
    begun, deadline = log_lines(log), time.monotonic() + PATIENCE
    while log_lines(log) < begun + micro_batches:
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.001)


def log_lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def phases_of(folder: Path) -> list[str]:
    """What a kill interrupted, judged by what the log has after the saved length."""
    log, saved = folder / "log", folder / "cursor.json"
    saved_bytes = json.loads(saved.read_text())["bytes"] if saved.exists() else 0
    beyond = log.read_bytes()[saved_bytes:].decode() if log.exists() else ""
    if not beyond:
        return ["at a save"]
    found = [tuple(map(int, line.split(" ")[:4])) for line in beyond.splitlines()]
    complete = sum(at + 1 == count for _, _, at, count in found)
    within = found[-1][2] + 1 < found[-1][3]
    return ["within a step"] * within + ["steps after a save"] * (complete > 0)
