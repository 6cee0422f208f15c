"""Lengths from a pipe are read completely, in every format."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from evenstep.cli import main

pytestmark = pytest.mark.skipif(os.name == "nt", reason="named pipes are elsewhere there")

COUNT = 5000  # more than one buffer holds
BUDGET = ("--set", "layout.max_tokens=512")
CONTENTS = {
    "a": "7\n" * COUNT,
    "a.txt": "7 " * COUNT,
    "a.csv": "length\n" + "7\n" * COUNT,
    "a.tsv": "n\tlength\n" + "1\t7\n" * COUNT,
    "a.jsonl": '{"length": 7}\n' * COUNT,
}


@contextmanager
def pipe(path: Path, content: bytes) -> Iterator[None]:
    """A named pipe that is written once."""
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=[content], daemon=True)
    writer.start()
    yield
    writer.join(30)
    assert not writer.is_alive()


@pytest.mark.parametrize("name", CONTENTS)
def test_every_sample_of_a_pipe_is_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pipe(tmp_path / name, CONTENTS[name].encode()):
        assert main(["plan", str(tmp_path / name), *BUDGET, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["num_samples"] == COUNT


def test_binary_files_and_plans_can_be_piped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "file.npy", np.full(COUNT, 7))
    saved = tmp_path / "file.plan"
    assert main(["plan", str(tmp_path / "file.npy"), *BUDGET, "--out", str(saved)]) == 0
    for name in ("file.npy", "file.plan"):
        piped = tmp_path / f"piped-{name}"
        capsys.readouterr()
        with pipe(piped, (tmp_path / name).read_bytes()):
            assert main(["plan", str(piped), *BUDGET, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["stats"]["num_samples"] == COUNT


def test_standard_input_is_read_completely() -> None:
    command = [sys.executable, "-m", "evenstep", "plan", "/dev/stdin", *BUDGET, "--json"]
    done = subprocess.run(command, input="7\n" * 20_000, capture_output=True, text=True)
    assert json.loads(done.stdout)["stats"]["num_samples"] == 20_000
