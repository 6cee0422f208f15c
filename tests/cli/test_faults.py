"""Bad input gives one clear line, exit code 2, no traceback and no file."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from evenstep.cli import main

BUDGET = ("--set", "layout.max_tokens=100")


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def raw(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def npy(*values: object, **options: object) -> Callable[[Path], object]:
    return lambda path: np.save(path, np.array(values, **options))  # type: ignore[call-overload]


def nothing(path: Path) -> None:
    """Leaves the file missing."""


def table(*names: str) -> Callable[[Path], object]:
    """A Parquet file of one line under these names."""

    def make(path: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        columns = [pyarrow.array([3]) for _ in names]
        parquet.write_table(pyarrow.Table.from_arrays(columns, names=list(names)), path)

    return make


GOOD = text("3 4 5\n")


@dataclass(frozen=True)
class Fault:
    says: str
    name: str = "lengths.txt"
    make: Callable[[Path], object] = GOOD
    options: tuple[str, ...] = BUDGET


def sets(*pairs: str) -> tuple[str, ...]:
    return tuple(word for pair in pairs for word in ("--set", pair))


FAULTS = {
    "a missing file": Fault("No such file", make=nothing),
    "a folder": Fault("directory", make=lambda path: path.mkdir()),
    "an empty text file": Fault("holds no lengths", make=text("")),
    "an empty npy file": Fault("not a readable .npy", "a.npy", raw(b"")),
    "an npy file without values": Fault("holds no lengths", "a.npy", npy(dtype=np.int64)),
    "an empty csv file": Fault("holds no lengths", "a.csv", text("")),
    "a csv file with a header alone": Fault("holds no lengths", "a.csv", text("length\n")),
    "an empty jsonl file": Fault("holds no lengths", "a.jsonl", text("")),
    "an empty parquet file": Fault("not readable Parquet", "a.parquet", raw(b"")),
    "binary junk as text": Fault("neither text", make=raw(bytes(range(256)) * 9)),
    "zero bytes as text": Fault("binary", make=raw(bytes(64))),
    "binary junk as npy": Fault("not a readable .npy", "a.npy", raw(bytes(range(256)))),
    "binary junk as csv": Fault("neither text", "a.csv", raw(bytes(range(128, 256)))),
    "binary junk as jsonl": Fault("neither text", "a.jsonl", raw(b"\xff\xfe\x00junk")),
    "binary junk as parquet": Fault("not readable Parquet", "a.parquet", raw(b"PAR1 junk PAR1")),
    "a damaged plan": Fault("damaged", make=raw(b"EVENSTEP PLAN 2\n" + bytes(99))),
    "a zip in an npy file": Fault("not a readable .npy", "a.npy", raw(b"PK\x03\x04x")),
    "an npy header that is not Python": Fault(
        "not a readable .npy", "a.npy", raw(b"\x93NUMPY\x01\x00\x06\x00{'a':(")
    ),
    "an npy header of an impossible size": Fault(
        "not a readable .npy",
        "a.npy",
        raw(
            b"\x93NUMPY\x01\x00\x60\x00"
            + b"{'descr':'<i8','fortran_order':False,'shape':(1152921504606846975,)}".ljust(96)
        ),
    ),
    "two parquet columns of one name": Fault(
        "2 columns named 'length'", "a.parquet", table("length", "length")
    ),
    "two csv columns of one name": Fault(
        "2 columns named 'length'", "a.csv", text("length,length\n1,2\n")
    ),
    "a pickle in an npy file": Fault("not a readable", "a.npy", npy({}, dtype=object)),
    "a table in an npy file": Fault("shape (2, 2)", "a.npy", npy([1, 2], [3, 4])),
    "words in an npy file": Fault("expected one integer per sample", "a.npy", npy("a", "b")),
    "a negative length": Fault("sample 1 ", make=text("3 -4 5")),
    "a zero length": Fault("sample 2 ", make=text("3 4 0")),
    "a fraction in text": Fault("line 2: '4.5' is not an integer", make=text("3\n4.5\n")),
    "a fraction in an npy file": Fault("sample 1 ", "a.npy", npy(3.0, 4.5)),
    "no number in an npy file": Fault("sample 1 ", "a.npy", npy(3.0, float("nan"))),
    "a fraction in csv": Fault("sample 0 has '4.5' as length", "a.csv", text("length\n4.5\n")),
    "a fraction in jsonl": Fault("sample 0 has 4.5", "a.jsonl", text('{"length": 4.5}\n')),
    "null in jsonl": Fault("sample 0 has None", "a.jsonl", text('{"length": null}\n')),
    "true in jsonl": Fault("sample 0 has True", "a.jsonl", text('{"length": true}\n')),
    "a list without tokens in jsonl": Fault(
        "sample 1 has length 0", "a.jsonl", text('{"length": [7, 8]}\n{"length": []}\n')
    ),
    "a word in a list in jsonl": Fault(
        "sample 1 has 'b' in its length", "a.jsonl", text('{"length": [7]}\n{"length": [1, "b"]}\n')
    ),
    "a boolean in a list in jsonl": Fault(
        "sample 0 has True in its length", "a.jsonl", text('{"length": [true]}\n')
    ),
    "a list in a list in jsonl": Fault(
        "sample 0 has [1, 2] in its length", "a.jsonl", text('{"length": [[1, 2]]}\n')
    ),
    "a number after a list in jsonl": Fault(
        "sample 1 has 5 as length, but sample 0 has a list",
        "a.jsonl",
        text('{"length": [7]}\n{"length": 5}\n'),
    ),
    "a list after a number in jsonl": Fault(
        "sample 0 has 5 as length, but sample 1 has a list",
        "a.jsonl",
        text('{"length": 5}\n{"length": [7]}\n'),
    ),
    "null after a list in jsonl": Fault(
        "sample 1 has None as length", "a.jsonl", text('{"length": [7]}\n{"length": null}\n')
    ),
    "a length of more than 64 bits": Fault(
        "line 2: '99999999999999999999' has more than 64 bits", make=text("3\n" + 20 * "9")
    ),
    "a length of many digits": Fault("has more than 64 bits", make=text("9" * 5000)),
    "a length that no sum can hold": Fault(
        "sample 1 ",
        make=text(f"3 {2**62} {2**62}"),
        options=sets("layout.samples=2"),
    ),
    "words for lengths": Fault("line 1: 'many'", make=text("many words")),
    "a csv file without the column": Fault("it has 'a', 'b'", "a.csv", text("a,b\n1,2\n")),
    "a jsonl file without the column": Fault("it has 'n'", "a.jsonl", text('{"n": 1}\n')),
    "a short line in csv": Fault("line 3", "a.csv", text("a,length\n1,2\n3\n")),
    "lines that are not JSON": Fault("line 2: not JSON", "a.jsonl", text('{"length": 1}\n{\n')),
    "JSON that is no object": Fault("expected an object", "a.jsonl", text("[1]\n")),
    "a column of text": Fault("has no columns", options=(*BUDGET, "--column", "n")),
    "groups of text": Fault("has no columns", options=(*BUDGET, "--groups", "n")),
    "a limit column of text": Fault(
        "has no columns", options=(*BUDGET, *sets("limits.columns.images=3"))
    ),
    "an empty group": Fault(
        "expected a group id",
        "a.csv",
        text("length,prompt\n3,\n"),
        (*BUDGET, "--groups", "prompt"),
    ),
    "no budget": Fault("layout.max_tokens is missing", options=()),
    "an unknown packer": Fault("'best'", options=(*BUDGET, *sets("layout.packer=best"))),
    "an unknown balance": Fault(
        "expected one of: refined", options=(*BUDGET, *sets("balance=magic"))
    ),
    "an unknown layout": Fault("expected one of: padded", options=sets("layout.kind=ragged")),
    "an unknown key": Fault(
        "Did you mean max_tokens?", options=(*BUDGET, *sets("layout.max_token=1"))
    ),
    "an invalid timestamp": Fault("seed", options=(*BUDGET, *sets("seed=!!timestamp abc"))),
    "an invalid boolean": Fault("seed", options=(*BUDGET, *sets("seed=!!bool maybe"))),
    "an invalid integer": Fault("seed", options=(*BUDGET, *sets('seed=!!int ""'))),
    "a number of many digits": Fault(
        "5002 digits", options=(*BUDGET, *sets("seed=0x" + 5000 * "f"))
    ),
    "a word for a number": Fault(
        "steps.samples must be an integer, got 'yes'.",
        options=(*BUDGET, *sets("steps.samples=yes")),
    ),
    "a word for a boolean": Fault(
        "equal_sizes must be true or false, got 'no'. Write false.",
        options=(*BUDGET, *sets("equal_sizes=no")),
    ),
    "a number that may be octal": Fault(
        "Write 10000 or 0o10000.", options=sets("layout.max_tokens=010000")
    ),
    "a seed of 64 bits": Fault(
        "seed must be in [0, 2**63)", options=(*BUDGET, *sets(f"seed={2**63}"))
    ),
    "an override without a value": Fault("key=value", options=sets("layout.max_tokens")),
    "a budget of more than 64 bits": Fault(
        "must be an integer in [1, ", options=sets(f"layout.max_tokens={2**70}")
    ),
    "an over-long sample": Fault("sample 1 has 400 tokens", make=text("3 400")),
    "no ranks": Fault("topology.dp must be", options=(*BUDGET, *sets("topology.dp=0"))),
    "virtual stages without a pipeline": Fault(
        "topology.vpp", options=(*BUDGET, *sets("topology.vpp=2"))
    ),
    "an alignment beyond the budget": Fault(
        "multiples of 256", options=(*BUDGET, *sets("topology.cp=16", "topology.tp=8"))
    ),
    "a missing config file": Fault("No such file", options=("--config", "absent.yaml")),
    "a picture of an unknown kind": Fault("'.gif'", options=(*BUDGET, "--picture", "a.gif")),
    "a picture without a suffix": Fault("the suffix ''", options=(*BUDGET, "--picture", "a")),
    "an output folder that is missing": Fault(
        "not a writable folder", options=(*BUDGET, "--out", "absent/a.evenstep")
    ),
    "an output that is a folder": Fault("is a folder", options=(*BUDGET, "--out", ".")),
    "an output over the input": Fault("named twice", options=(*BUDGET, "--out", "lengths.txt")),
    "one output twice": Fault(
        "named twice", options=(*BUDGET, "--out", "a.svg", "--picture", "a.svg")
    ),
    "an output over the recipe": Fault(
        "named twice", "a.yaml", GOOD, (*BUDGET, "--config", "a.yaml", "--out", "./a.yaml")
    ),
    "an output with too long a name": Fault(
        "xxx cannot be written (File name too long)", options=(*BUDGET, "--out", "x" * 300)
    ),
    "a picture with too long a name": Fault(
        "xxx.svg cannot be written (File name too long)",
        options=(*BUDGET, "--picture", f"{'x' * 300}.svg"),
    ),
    "an unknown option": Fault("No such option", options=("--max-token", "3")),
    "a budget in two ways": Fault(
        "--max-tokens and --set layout.max_tokens both set layout.max_tokens.",
        options=(*BUDGET, "--max-tokens", "100"),
    ),
    "ranks in two ways": Fault(
        "--ranks and --set topology both set topology.dp.",
        options=(*BUDGET, *sets("topology={dp: 2}"), "--ranks", "2"),
    ),
    "samples per step in two ways": Fault(
        "--samples-per-step and --set steps.samples both set",
        options=(*BUDGET, *sets("steps.samples=2"), "--samples-per-step", "2"),
    ),
    "a budget that is no number": Fault(
        "--max-tokens must be a whole number such as 16384 or 16k, got '16kb'.",
        options=("--max-tokens", "16kb"),
    ),
    "a budget below 0": Fault("--max-tokens must be", options=("--max-tokens=-1",)),
    "ranks with a fraction": Fault("--ranks must be", options=(*BUDGET, "--ranks", "1.5k")),
    "no ranks as an option": Fault("topology.dp must be", options=(*BUDGET, "--ranks", "0")),
    "a unit in a unit": Fault("got '1kk'", options=sets("layout.max_tokens=1kk")),
    "an output to standard output": Fault("regular file", options=(*BUDGET, "--out", "-")),
    "an argument too many": Fault("unexpected", options=("another",)),
}


@pytest.mark.parametrize("command", ["plan", "compare"])
@pytest.mark.parametrize("case", FAULTS)
def test_bad_input_gives_one_line_and_no_file(
    command: str,
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fault = FAULTS[case]
    options = list(fault.options)
    if command == "compare" and "--out" in options:
        pytest.skip("compare saves no plan")
    monkeypatch.chdir(tmp_path)
    fault.make(tmp_path / fault.name)
    before = sorted(tmp_path.rglob("*"))
    if command == "plan" and "--out" not in options:
        options += ["--out", "out.evenstep"]
    if "--picture" not in options:
        options += ["--picture", "out.html"]
    code = main([command, fault.name, *options])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert fault.says in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ["report", "check"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"", "truncated"),
        (b"3 4 5\n", "not an Evenstep plan"),
        (b"EVENSTEP PLAN 2\n", "damaged or truncated"),
        (b"EVENSTEP PLAN 2\n" + bytes(500), "damaged or truncated"),
        (b"EVENSTEP PLAN 1\n" + bytes(500), "of version 1; this release reads version 2"),
    ],
)
def test_a_file_that_is_not_a_plan_is_refused(
    command: str,
    content: bytes | None,
    says: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a.evenstep"
    if content is not None:
        path.write_bytes(content)
    assert main([command, str(path)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_truncated_plan_is_refused(
    kept: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("3 4 5")
    path = tmp_path / "a.evenstep"
    assert main(["plan", str(tmp_path / "a.txt"), *BUDGET, "--out", str(path)]) == 0
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    capfd.readouterr()
    for command in (["check"], ["report"], ["plan", *BUDGET], ["compare"]):
        assert main([command[0], str(path), *command[1:]]) == 2
        assert capfd.readouterr().err.count("\n") == 1


def test_columns_for_a_saved_plan_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("3 4 5")
    path = str(tmp_path / "a.evenstep")
    assert main(["plan", str(tmp_path / "a.txt"), *BUDGET, "--out", path]) == 0
    capfd.readouterr()
    assert main(["plan", path, "--groups", "prompt"]) == 2
    assert "with its own lengths" in capfd.readouterr().err


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert main(["plan", str(tmp_path / "a.parquet"), *BUDGET]) == 2
    assert "pip install 'evenstep[parquet]'" in capfd.readouterr().err


def test_all_faults_of_a_config_file_are_named_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("3 4 5")
    (tmp_path / "a.yaml").write_text(
        json.dumps({"layout": {"max_tokens": 0}, "topology": {"dp": "x"}, "seeds": 3})
    )
    assert main(["plan", str(tmp_path / "a.txt"), "--config", str(tmp_path / "a.yaml")]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 4  # a line that counts the faults, and one for each
    assert all(says in err for says in ("3 faults", "layout.max_tokens", "topology.dp", "seeds"))


@pytest.mark.parametrize("output", ["", "--json", "--picture c.svg", "--picture c.html"])
@pytest.mark.parametrize("budget", ["3", "6"])
def test_strategies_that_drop_every_sample_can_be_compared(
    output: str, budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", np.array([5, 6, 7]))
    settings = ["--set", f"layout.max_tokens={budget}", "--set", "overflow=drop"]
    assert main(["compare", "lengths.npy", *settings, *output.split()]) == 0


def test_a_quote_that_is_never_closed_is_not_one_long_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "q.csv").write_text('length,text\n5,"abc\n6,foo\n7,bar\n')
    assert main(["plan", str(tmp_path / "q.csv"), "--set", "layout.max_tokens=100"]) == 2
    assert "not CSV" in capsys.readouterr().err


def test_groups_of_different_names_stay_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "g.csv").write_text("length,g\n4,01\n4,1\n4,01\n4,1\n")
    recipe = ["--set", "layout.max_tokens=8", "--groups", "g", "--json"]
    assert main(["plan", str(tmp_path / "g.csv"), *recipe]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["num_micro_batches"] == 2


def test_without_the_command_lines_libraries_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['typer'] = None\n"
        "from evenstep.cli import main; sys.exit(main(['plan']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert ".[cli]" in done.stderr
    assert "Traceback" not in done.stderr
