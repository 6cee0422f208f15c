"""Lengths from a pipe are read completely, in every format."""

import io
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
    writer.join(300)
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


def piped(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def parquet_of(lengths: list[int]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"length": lengths}), buffer)
    return buffer.getvalue()


def npy_of(lengths: list[int]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(lengths))
    return buffer.getvalue()


@pytest.mark.parametrize("command", ["plan", "compare"])
@pytest.mark.parametrize(
    "content",
    [
        b"5 3 8\n",
        b"\n5\n3\n8",
        b"length\n5\n3\n8\n",
        b"n,length\n1,5\n1,3\n1,8\n",
        b'n\t"length"\n1\t5\n1\t3\n1\t8\n',
        b'\n{"length": 5}\n{"length": 3}\n{"length": 8}\n',
        npy_of([5, 3, 8]),
        parquet_of([5, 3, 8]),
    ],
)
def test_a_dash_reads_standard_input_in_any_format(
    command: str,
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    piped(monkeypatch, content)
    assert main([command, "-", *BUDGET, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    stats = (found if command == "plan" else found[0])["stats"]
    assert (stats["num_samples"], stats["tokens"]) == (3, 16)
    piped(monkeypatch, content)
    assert main([command, "-", *BUDGET]) == 0
    assert "standard input" in capsys.readouterr().out


def test_a_plan_on_standard_input_is_checked_and_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("5 3 8")
    saved = tmp_path / "a.plan"
    assert main(["plan", str(tmp_path / "a.txt"), *BUDGET, "--out", str(saved)]) == 0
    for command in (["check"], ["plan"]):
        capsys.readouterr()
        piped(monkeypatch, saved.read_bytes())
        assert main([*command, "-", "--json"]) == 0
        json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("command", "content", "says"),
    [
        ("plan", b"", "standard input holds no lengths"),
        ("plan", b"5 x", "standard input, line 1: 'x' is not an integer"),
        ("compare", b"many words", "standard input has no column 'length'"),
        ("plan", b"\x93NUMPY junk", "standard input is not a readable .npy file"),
        ("check", b"5 3 8", "standard input is not an Evenstep plan"),
        ("check", b"", "truncated"),
    ],
)
def test_bad_standard_input_gives_one_line(
    command: str,
    content: bytes,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    piped(monkeypatch, content)
    assert main([command, "-", *(BUDGET if command != "check" else ())]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_closed_standard_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["plan", "-", *BUDGET]) == 2
    assert "standard input is closed" in capsys.readouterr().err
