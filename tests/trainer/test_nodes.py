"""The commands of `docs/many-nodes.md`, as printed, on two "nodes" of one machine."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.internals import write_chats
from tests.trainer.runs import ROOT, logged

PAGE = blocks_of((ROOT / "docs" / "many-nodes.md").read_text("utf-8"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A folder with a run, and commands that stand for those of a cluster."""
    write_chats(tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    scripts = {
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        "scontrol": "echo localhost; echo localhost",
        "srun": 'for node in $(seq "$SLURM_NNODES"); do "$@" & pids="$pids $!"; done\n'
        'for pid in $pids; do wait "$pid" || exit 1; done',
    }
    for name, body in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]"}
    return (
        os.environ
        | slurm
        | {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
    )


def check_run(folder: Path) -> None:
    records = logged(folder / "run")
    assert [record["step"] for record in records] == list(range(60))
    assert len(records[0]["micro_batches/busy"]) == 2  # ranks
    assert records[-1]["loss"] < 0.1


@pytest.mark.slow
def test_torchrun_starts_two_nodes(tmp_path: Path, environment: dict[str, str]) -> None:
    command = next(block.text for block in PAGE if block.text.startswith("torchrun"))
    here = command.replace("node-a:29400", f"localhost:{free_port()}")
    here = here.replace("--nproc-per-node 8", "--nproc-per-node 1")
    nodes = [subprocess.Popen(here, shell=True, cwd=tmp_path, env=environment) for _ in range(2)]

    assert [node.wait(600) for node in nodes] == [0, 0]
    check_run(tmp_path)


@pytest.mark.slow
def test_slurm_starts_two_nodes(tmp_path: Path, environment: dict[str, str]) -> None:
    script = next(block.text for block in PAGE if block.file == "train.slurm")
    (tmp_path / "train.slurm").write_text(script.replace("29400", str(free_port())))

    subprocess.run(["bash", "train.slurm"], cwd=tmp_path, env=environment, check=True, timeout=600)

    check_run(tmp_path)


@pytest.mark.slow
def test_ray_train_starts_the_ranks(tmp_path: Path, environment: dict[str, str]) -> None:
    script = next(block.text for block in PAGE if block.file == "ray_train.py")
    (tmp_path / "ray_train.py").write_text(script)
    command = [sys.executable, "ray_train.py", "run.yaml", "2", "cpu"]

    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=600)

    check_run(tmp_path)
