"""`evenstep lengths`: from files to lengths that the other commands read."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from evenstep.cli import main
from tests.data import corpora
from tests.data.corpora import COUNTS, chat_of, tokens_of

FULL = [count for count in COUNTS if count]


def lengths(*arguments: object, code: int = 0) -> None:
    assert main(["lengths", *map(str, arguments)]) == code


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (corpora.texts, ()),
        (lambda folder: corpora.jsonl(folder, "text", str), ()),
        (lambda folder: corpora.jsonl(folder, "ids", tokens_of), ("--field", "ids")),
        (lambda folder: corpora.parquet(folder, "text", str), ("--workers", "1")),
        (lambda folder: corpora.parquet(folder, "ids", tokens_of), ("--field", "ids")),
        (lambda folder: corpora.dataset(folder, "text", str), ("--format", "dataset")),
        (lambda folder: corpora.dataset(folder, "ids", tokens_of), ("--field", "ids")),
        (corpora.token_file, ()),
        (corpora.megatron, ()),
        (corpora.megatron, ("--format", "megatron")),
    ],
)
def test_every_format_gives_lengths_without_empty_samples(
    make: Callable[[Path], Path], options: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "lengths.npy"
    lengths(make(tmp_path), *options, "--out", out)
    assert np.load(out).tolist() == FULL
    assert main(["plan", str(out), "--max-tokens", "64"]) == 0


def test_standard_input_is_counted_in_the_format_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = corpora.jsonl(tmp_path, "text", str), tmp_path / "lengths.npy"
    command = [sys.executable, "-m", "evenstep", "lengths", "-", "--format", "jsonl"]
    subprocess.run(
        [*command, "--out", str(out)], input=path.read_bytes(), check=True, capture_output=True
    )
    assert np.load(out).tolist() == FULL
    for arguments in (("-",), ("-", path, "--format", "jsonl"), ("-", "--format", "parquet")):
        lengths(*arguments, "--out", tmp_path / "none.npy", code=2)
        assert "Set --format to one of: text, jsonl, chat" in capsys.readouterr().err
    assert not (tmp_path / "none.npy").exists()


def test_chats_are_counted_with_their_roles(tmp_path: Path) -> None:
    path, out = corpora.jsonl(tmp_path, "messages", chat_of), tmp_path / "lengths.npy"
    lengths(path, "--format", "chat", "--out", out)
    marks = len("<user>\n</user>\n<assistant>\n</assistant>\n")
    assert np.load(out).tolist() == [marks + 2 * count for count in COUNTS]


def test_several_files_follow_each_other_and_json_sums_them_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("a", "xx"), ("b", "y"), ("c", "")):
        (tmp_path / f"{name}.txt").write_text(text)
    names = [tmp_path / f"{name}.txt" for name in ("b", "a", "c")]
    lengths(*names, "--out", tmp_path / "out.npy", "--json")
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert np.load(tmp_path / "out.npy").tolist() == [1, 2]
    assert (found["samples"], found["tokens"], found["left_out_empty"]) == (2, 3, 1)
    assert (found["shortest"], found["mean"], found["longest"]) == (1, 1.5, 2)
    assert err == f"wrote {tmp_path / 'out.npy'}\n"
    lengths(*names, "--out", tmp_path / "out.npy")
    assert "left out empty" in capsys.readouterr().out


@dataclass(frozen=True)
class Fault:
    says: str
    make: Callable[[Path], object] = lambda path: path.write_text('{"text": "a"}\n')
    options: tuple[str, ...] = ("--out", "out.npy")


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


OUT = ("--out", "out.npy")
FAULTS = {
    "a missing file": Fault("DATA: a.jsonl has no files.", lambda path: None),
    "an empty folder": Fault("DATA: a.jsonl has no files.", lambda path: path.mkdir()),
    "no output": Fault("Missing option '--out'", options=()),
    "an output of another kind": Fault("expected .npy", options=("--out", "out.txt")),
    "an output over the input": Fault(
        "named twice", options=("--out", "a.npy", "a.npy"), make=text("x")
    ),
    "a missing folder": Fault("not a writable folder", options=("--out", "absent/out.npy")),
    "no tokens": Fault("a.jsonl: no sample has a token.", text('{"text": ""}\n')),
    "no rows": Fault("a.jsonl: no sample has a token.", text("")),
    "no JSON": Fault("a.jsonl, line 2: not JSON", text('{"text": "a"}\n{\n')),
    "no field": Fault(
        "a.jsonl, line 1: no field 'text'; the row has 'body'. Set --field to one of them.",
        text('{"body": "a"}'),
    ),
    "chats as rows": Fault(
        "a.jsonl, line 1: no field 'text'; the row has 'messages'. This looks like chat data: add "
        "--format chat.",
        text('{"messages": [{"role": "user", "content": "a"}]}'),
    ),
    "a URL": Fault("s3:// paths are not supported yet. Download", options=(*OUT, "s3://b/a.jsonl")),
    "a compressed file": Fault(
        "a.jsonl.gz: .gz files are not supported yet. Decompress it", options=(*OUT, "a.jsonl.gz")
    ),
    "no chat": Fault(
        "a.jsonl, line 1: a chat must have a field 'messages' with its messages. Set --field.",
        options=(*OUT, "--format", "chat"),
    ),
    "a number": Fault("field 'text' must be a str, got int. Correct", text('{"text": 3}')),
    "an unknown format": Fault("unknown --format 'csv'", options=(*OUT, "--format", "csv")),
    "an unknown engine": Fault("unknown engine 'spark'", options=(*OUT, "--engine", "spark")),
    "no workers": Fault("--workers", options=(*OUT, "--workers", "0")),
    "a missing tokenizer": Fault(
        "--tokenizer: absent is not a folder.", options=(*OUT, "--tokenizer", "absent")
    ),
    "a field of text": Fault(
        "--field has no effect on text files.", options=(*OUT, "--format", "text", "--field", "a")
    ),
    "a template without chats": Fault(
        "--template is for chats.", options=(*OUT, "--template", "a.jinja")
    ),
    "mixed formats": Fault("DATA mix formats: ", options=(*OUT, "b.txt")),
}


@pytest.mark.parametrize("case", FAULTS)
def test_bad_input_gives_one_line_and_no_file(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fault = FAULTS[case]
    monkeypatch.chdir(tmp_path)
    fault.make(Path("a.jsonl"))
    Path("b.txt").write_text("b")
    Path("a.jsonl.gz").write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    lengths("a.jsonl", *fault.options, code=2)
    out, err = capfd.readouterr()
    assert out == ""
    assert fault.says in err
    assert (err.startswith("error: "), err.count("\n"), "Traceback" in err) == (True, 1, False)
    assert sorted(tmp_path.rglob("*")) == before


def test_two_processes_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * (n % 7)}) + "\n" for n in range(64)))
    contents = []
    for workers in ("1", "2"):
        out = tmp_path / f"{workers}.npy"
        command = [sys.executable, "-m", "evenstep", "lengths", str(path), "--out", str(out)]
        done = subprocess.run([*command, "--workers", workers], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, f"wrote {out}\n")
        contents.append(out.read_bytes())
    assert contents[0] == contents[1]
