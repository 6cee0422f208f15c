"""When a rank fails, the others name it and stop, even if blocked in a collective."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
from torch import distributed

from evenstep.errors import ConfigError, RankError
from evenstep.train import Watch
from tests.internals import _is_consequence
from tests.train import on_ranks
from tests.train.processes import PATIENCE, Ended, run_processes
from tests.train.running import samples_of

SAMPLES = samples_of([8, 7, 1, 3, 8, 2, 5, 4, 6], seed=3).samples


def ended(size: int, folder: Path, who: int, fate: str, wrap: str = "ddp") -> list[Ended]:
    return run_processes(
        size, on_ranks.watched, folder / "ranks", SAMPLES, who, fate, wrap, store="tcp"
    )


@pytest.mark.parametrize(
    ("size", "who", "wrap"),
    [
        (3, 0, "ddp"),
        (2, 1, "fsdp"),
        pytest.param(2, 1, "ddp", marks=pytest.mark.slow),
        pytest.param(3, 2, "plain", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_raises_is_named_with_its_error(
    size: int, who: int, wrap: str, tmp_path: Path
) -> None:
    for rank, end in enumerate(ended(size, tmp_path, who, "raises", wrap)):
        assert end.status == 1, end.output
        if rank == who:
            assert "ValueError: what is this" in end.output
            assert "in micro-batch" in end.output
        else:
            said = f"rank {who} failed (ValueError: what is this), so rank {rank} stops"
            assert said in end.output, end.output


@pytest.mark.parametrize(("size", "who"), [(3, 0), (3, 1)])
def test_a_rank_that_is_killed_is_named(size: int, who: int, tmp_path: Path) -> None:
    for rank, end in enumerate(ended(size, tmp_path, who, "killed")):
        if rank == who:
            assert end.status == -signal.SIGKILL
            continue
        assert end.status == 1, end.output
        silent = "rank 0, which hosts the store, is gone" if who == 0 else f"rank {who} has sent no"
        assert silent in end.output, end.output
        assert f"so rank {rank} stops" in end.output


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_ranks_blocked_in_a_collective_exit(who: int, tmp_path: Path) -> None:
    found = run_processes(
        3, on_ranks.watched, tmp_path / "ranks", SAMPLES, who, "lingers",
        store="tcp", lingers=who,
    )  # fmt: skip
    for rank, end in enumerate(found):
        if rank == who:
            assert end.status is None  # it sleeps forever
        else:
            assert end.status == 1, end.output
            assert f"rank {who} failed (ValueError: what is this)" in end.output, end.output


def test_ranks_that_end_at_different_times_are_no_failure(tmp_path: Path) -> None:
    # Rank 0 ends first and closes the store.
    for end in ended(2, tmp_path, 0, "done"):
        assert end.status == 0, end.output
        assert "evenstep-watch" not in end.result


# In one process -------------------------------------------------------------------------------


def watching() -> bool:
    return any(thread.name == "evenstep-watch" for thread in threading.enumerate())


def wait_forever() -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        time.sleep(0.001)


def test_a_rank_that_never_enters_is_an_error() -> None:
    store = distributed.HashStore()
    with (
        pytest.raises(RankError, match=r"rank 1 has sent no heartbeat for 0.5 s, so rank 0 stops"),
        Watch(rank=0, size=2, store=store, timeout=0.5),
    ):
        wait_forever()
    assert not watching()


def test_an_error_is_recorded_for_other_ranks_and_stays_unchanged() -> None:
    store = distributed.HashStore()
    with pytest.raises(KeyError, match="here"), Watch(rank=1, size=2, store=store, timeout=1):
        raise KeyError("here")
    with (
        pytest.raises(RankError, match=r"rank 1 failed \(KeyError: 'here'\)"),
        Watch(rank=0, size=2, store=store, timeout=1),
    ):
        wait_forever()
    assert not watching()


def test_an_error_in_a_collective_waits_for_its_cause() -> None:
    store = distributed.HashStore()
    with pytest.raises(ValueError, match="why"), Watch(rank=1, size=2, store=store, timeout=1):
        raise ValueError("why")
    with (
        pytest.raises(RankError, match=r"rank 1 failed \(ValueError: why\)") as caught,
        Watch(rank=0, size=2, store=store, timeout=1),
    ):
        raise RuntimeError("[gloo] Connection closed by peer")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_watches_follow_each_other_and_leave_no_thread() -> None:
    store = distributed.HashStore()
    for _ in range(3):
        with Watch(rank=1, size=2, store=store, timeout=1):
            assert watching()
        with Watch(rank=0, size=2, store=store, timeout=1):
            pass
    assert not watching()
    with Watch(rank=0, size=1, store=distributed.HashStore()):
        pass
    with pytest.raises(SystemExit), Watch(rank=1, size=2, store=store, timeout=1):
        raise SystemExit(0)
    with Watch(rank=0, size=2, store=store, timeout=1):
        time.sleep(1.5)  # rank 1 is done, not failed


def test_errors_of_collectives_are_distinguished_from_others() -> None:
    assert _is_consequence(RuntimeError("[/pytorch/gloo/pair.cc:534] Connection closed by peer"))
    assert _is_consequence(RuntimeError("NCCL communicator was aborted"))
    assert _is_consequence(ConnectionResetError())
    assert _is_consequence(RuntimeError("failed to recv, got 0 bytes from TCPStore"))
    assert not _is_consequence(ValueError("gloo"))
    assert not _is_consequence(RuntimeError("compilation was unsuccessful, restore the checkpoint"))
    assert not _is_consequence(
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")
    )


def test_a_watch_needs_a_group_and_positive_times() -> None:
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialised"):
        Watch()
    with pytest.raises(ConfigError, match="timeout must be positive"):
        Watch(timeout=0)
