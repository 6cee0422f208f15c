"""Outputs are written completely or not at all, and never over an input."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from evenstep import Plan
from evenstep.cli import main

BUDGET = ("--set", "layout.max_tokens=100")
FULL = Path("/dev/full")
posix = pytest.mark.skipif(os.name == "nt", reason="other files and devices there")


@pytest.fixture
def lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("lengths.txt").write_text("3 4 5")
    return "lengths.txt"


def present() -> set[str]:
    return {path.name for path in Path().iterdir()}


def evenstep(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, **options)


@posix
@pytest.mark.parametrize("command", ["plan", "compare"])
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_an_input_under_another_name_is_not_overwritten(
    command: str, link: Any, lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").write_text("layout: {max_tokens: 100}")
    for name in (lengths, "recipe.yaml"):
        content = Path(name).read_text()
        link(name, f"{name}.svg")
        options = ["--config", "recipe.yaml", "--picture", f"{name}.svg"]
        assert main([command, lengths, *options]) == 2
        assert f"{name}.svg is named twice" in capsys.readouterr().err
        assert Path(name).read_text() == content


# A pipe stands for every special file: as root, a bug here could replace /dev/null.
@posix
def test_a_pipe_stays_a_pipe(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe.svg")
    for option in ("--out", "--picture"):
        assert main(["plan", lengths, *BUDGET, option, "pipe.svg"]) == 2
        assert "pipe.svg is a pipe, a device" in capsys.readouterr().err
    assert Path("pipe.svg").is_fifo()


@posix
def test_the_file_behind_standard_output_is_not_replaced(lengths: str) -> None:
    with Path("shown").open("w") as shown:
        done = evenstep("plan", lengths, *BUDGET, "--out", "shown", stdout=shown)
    assert done.returncode == 2
    assert "standard output" in done.stderr


@posix
def test_a_link_stays_and_what_it_points_to_is_written(lengths: str) -> None:
    Path("folder").mkdir()
    Path("link.plan").symlink_to("folder/real.plan")
    assert main(["plan", lengths, *BUDGET, "--out", "link.plan"]) == 0
    assert Path("link.plan").is_symlink()
    assert Plan.load("folder/real.plan").lengths.tolist() == [3, 4, 5]


def test_a_name_may_have_the_maximum_length(lengths: str) -> None:
    picture = f"{'x' * 245}.svg"
    assert main(["plan", lengths, *BUDGET, "--out", "good.plan", "--picture", picture]) == 0
    assert present() == {"good.plan", lengths, picture}


def test_no_output_is_written_when_a_later_one_cannot_be(
    lengths: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tempfile

    make, made = tempfile.mkstemp, []

    def second_fails(**options: Any) -> tuple[int, str]:
        made.append(1)
        if len(made) == 2:
            raise OSError(28, "No space left on device")
        return make(**options)

    monkeypatch.setattr(tempfile, "mkstemp", second_fails)
    assert main(["plan", lengths, *BUDGET, "--out", "a.plan", "--picture", "b.svg"]) == 2
    assert "b.svg cannot be written (No space left" in capsys.readouterr().err
    assert present() == {lengths}


@posix
def test_a_file_name_that_is_not_text_can_be_planned_and_drawn(lengths: str) -> None:
    name = os.fsdecode(b"\xff\x01.txt")
    Path(name).write_text("3 4 5")
    for picture in ("b.svg", "b.html"):
        done = evenstep("plan", name, *BUDGET, "--picture", picture, stdout=subprocess.DEVNULL)
        assert (done.returncode, done.stderr) == (0, f"wrote {picture}\n")
    assert "Plan of \ufffd\ufffd.txt" in ET.parse("b.svg").getroot().itertext()


@pytest.mark.skipif(not FULL.exists(), reason="there is no full device")
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_full_standard_output_is_distinguished_from_a_file(
    option: list[str], lengths: str
) -> None:
    with FULL.open("w") as full:
        done = evenstep("plan", lengths, *BUDGET, "--out", "a.plan", *option, stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output cannot be written (No space left")
    assert "a.plan was written completely" in done.stderr
    assert done.stderr.count("\n") == 1
    assert Plan.load("a.plan").lengths.tolist() == [3, 4, 5]


@pytest.mark.skipif(not FULL.exists(), reason="there is no full device")
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], []])
def test_help_into_a_full_file_gives_a_one_line_error(arguments: list[str]) -> None:
    with FULL.open("w") as full:
        done = evenstep(*arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_any_encoding_of_standard_output_works(lengths: str) -> None:
    assert main(["plan", lengths, *BUDGET, "--out", "a.plan"]) == 0
    for arguments in (["report", "a.plan"], ["compare", "a.plan"], ["check", "a.plan"]):
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        done = evenstep(*arguments, stdout=subprocess.PIPE, env=environment)
        assert done.returncode == 0
        assert done.stderr == "" or done.stderr.startswith("warning: The whole file is one step")
        assert done.stdout.isascii()


@posix
@pytest.mark.parametrize("arguments", [["plan"], ["plan", "--json"]])
def test_a_reader_that_stops_ends_the_command_quietly(arguments: list[str], lengths: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = evenstep(*arguments, lengths, *BUDGET, "--out=a.plan", stdout=closed)
        assert done.returncode == 141
        assert done.stderr in ("", "wrote a.plan\n")
        command = [sys.executable, "-m", "evenstep", *arguments, lengths, "--max-tokens=1k"]
        both = subprocess.run(command, stdout=closed, stderr=closed)
    assert both.returncode == 141


@posix
def test_closed_standard_error_changes_no_result(lengths: str) -> None:
    command = f"{sys.executable} -m evenstep plan {lengths} --max-tokens=1k --json 2>&-"
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout)["stats"]["tokens"] == 12
    command = f"{sys.executable} -m evenstep plan nowhere --max-tokens=1k --json 2>&-"
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (2, "")
