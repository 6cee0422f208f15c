"""`evenstep config check | show | convert`, and `--from` of other commands."""

import json
import re
from pathlib import Path

import pytest

from evenstep.cli import main
from evenstep.config import load_settings
from tests.config import dialect_files as files
from tests.config.dialect_files import CASES

NATIVE = """\
layout: {max_tokens: 8192}
topology:
  dp: 8
log_probs: {layout: {max_tokens: 16384}}
"""


@pytest.fixture
def native(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(NATIVE)
    return path


def run(*words: object) -> int:
    return main([str(word) for word in words])


def test_a_valid_file_is_ok(native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "check", native) == 0
    assert capsys.readouterr().out == "ok run.yaml\n"
    assert run("config", "check", native, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"valid": True, "faults": [], "notes": []}


def test_a_file_with_faults_lists_them_one_per_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("layout: {max_tokens: 0}\ntopolgy: {}\n")
    assert run("config", "check", path, "--set", "overflow=spilt") == 1
    title, *faults = capsys.readouterr().out.splitlines()
    assert title == "run.yaml has 3 faults:"
    assert faults[0].startswith("  topolgy is not a known key. Did you mean topology?")
    assert faults[1].startswith("  layout.max_tokens must be an integer")
    assert faults[2].startswith("  unknown overflow 'spilt'")
    assert run("config", "check", path, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["valid"]
    assert len(found["faults"]) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("check", "absent.yaml"), "cannot be read"),
        (("check", "broken.yaml"), "not valid YAML at line 2"),
        (("check", "broken.toml"), "not valid TOML"),
        (("check", "nemo-rl.yaml", "--from", "nemorl"), "Did you mean nemo-rl?"),
        (("check", "nemo-rl.yaml", "--from", "nemo-rl", "--set", "x"), "must be of the form"),
        (("convert", "nemo-rl.yaml"), "--from"),
        (("show", "nemo-rl.yaml"), "configuration of NeMo-RL, it seems. Add --from nemo-rl"),
        (("convert", "nemo-rl.yaml", "--from", "roll"), "a file of NeMo-RL: use --from nemo-rl"),
        (("convert", "nemo-rl.yaml", "--from", "nemo-rl", "--out", "nemo-rl.yaml"), "named twice"),
        (("convert", "nemo-rl.yaml", "--from", "nemo-rl", "--out", "no/where"), "not a writable"),
    ],
)
def test_errors_are_one_line_and_faults_of_a_file_a_line_each(
    words: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files.NEMO_DYNAMIC.write(tmp_path)
    (tmp_path / "broken.yaml").write_text("layout: {\n")
    (tmp_path / "broken.toml").write_text("layout = {")
    assert run("config", *words) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    first, *faults = captured.err.splitlines()
    assert first.startswith("error: ")
    assert all(line.startswith(f"  ({at}) ") for at, line in enumerate(faults, 1))
    assert captured.out == ""


def test_show_says_where_values_come_from(native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", native, "--set", "min_saving=0.03") == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()}
    assert lines["topology.dp"] == ["8", "run.yaml:3"]
    assert re.search(r"^  min_saving +0.03 +--set$", out, re.M)
    assert lines["balance"] == ["refined", "default"]
    assert "Log-probabilities\n  layout.max_tokens  16384  run.yaml:4" in out


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_shown_and_converted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    path = case.write(tmp_path)
    assert run("config", "show", path, "--from", case.dialect) == 0
    shown = capsys.readouterr().out
    loaded = case.load(tmp_path)
    for text in (*loaded.notes, *loaded.ignored):
        assert text in shown
    assert run("config", "convert", path, "--from", case.dialect) == 0
    native = tmp_path / "native.yaml"
    native.write_text(capsys.readouterr().out)
    assert load_settings(native) == loaded.settings
    out = tmp_path / "out.yaml"
    assert run("config", "convert", path, "--from", case.dialect, "--out", out) == 0
    assert out.read_text() == native.read_text()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"wrote {out}" in captured.err


def test_programs_get_values_origins_notes_and_ignored_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = files.ROLL_FULL.write(tmp_path)
    assert run("config", "convert", path, "--from", "roll", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["log_probs"]["layout"]["max_tokens"] == 16384
    assert found["native"]["log_probs"]["layout"] == {"max_tokens": 16384}
    assert found["origins"]["topology.dp"] == "derived: 8 GPUs (actor_train.device_mapping)"
    assert "actor_infer" in found["ignored"]


def test_plans_are_made_with_the_file_of_another_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = files.NEMO_DYNAMIC.write(tmp_path)
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100 900 300 4000\n")
    assert run("plan", lengths, "--config", path, "--from", "nemo-rl", "--json") == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert (recipe["layout"]["max_tokens"], recipe["layout"]["round_to"]) == (4096, 64)
    assert run("plan", lengths, "--from", "nemo-rl") == 2
    assert "--from nemo-rl has no effect without --config" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    out, err = capsys.readouterr()
    assert "convert" in out
    assert err == ""
