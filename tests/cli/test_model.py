"""`--model` and the line that names the cost, run as a user runs them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep import Cost, Plan
from evenstep.cli import main
from tests.internals import PRESETS

BUDGET = ["--set", "layout.max_tokens=4096", "--set", "topology.dp=2"]


def run(*arguments: object, code: int = 0) -> None:
    assert main([str(argument) for argument in arguments]) == code


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npy"
    np.save(path, np.array([4000, 10, 2000, 2000, 300, 700, 3000], np.int32))
    return path


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_a_model_gives_the_cost_of_a_plan(
    command: str, lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(command, lengths, *BUDGET, "--model", "llama-3-8b", "--json")
    data = printed(capsys)
    for entry in data if command == "compare" else [data]:
        cost = Cost(**entry["recipe"]["cost"])
        assert cost == Cost.named("llama-3-8b")
        assert entry["stats"]["cost"] == cost.description


def test_a_model_may_be_a_folder(lengths: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["gemma-3-4b"]))
    out = tmp_path / "a.evenstep"
    run("plan", lengths, *BUDGET, "--model", tmp_path, "--out", out)
    assert Plan.load(out).recipe.cost == Cost.named("gemma-3-4b")
    run("plan", out, "--model", "qwen3-8b", "--out", tmp_path / "b.evenstep")
    assert Plan.load(tmp_path / "b.evenstep").recipe.cost == Cost.named("qwen3-8b")


def test_tables_say_that_only_tokens_are_counted(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("plan", lengths, *BUDGET)
    said = capsys.readouterr().out
    assert "tokens only  attention is not counted; name a model to count it" in said
    run("compare", lengths, *BUDGET)
    assert "cost: tokens only" in capsys.readouterr().out
    run("compare", lengths, *BUDGET, "--model", "llama-3-8b")
    assert "cost: 57256·L + L²" in capsys.readouterr().out


def test_pictures_and_pages_name_the_cost(lengths: Path, tmp_path: Path) -> None:
    for command in ("plan", "compare"):
        for suffix in ("svg", "html"):
            path = tmp_path / f"{command}.{suffix}"
            run(command, lengths, *BUDGET, "--model", "llama-3-8b", "--picture", path)
            assert "cost: 57256·L + L²" in path.read_text("utf-8")


@pytest.mark.parametrize("command", ["plan", "compare"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-9"], "'llama-9' is not a known name, and the working directory"),
        (["--model", "absent/config.json"], "and absent has no such file"),
        (["--model", "lengths.npy"], "cost.model: lengths.npy is not JSON"),
        (["--model", "qwen3-8b", "--set", "cost.per_pair=1"], "--model and --set cost.per_pair"),
        (["--model", "qwen3-8b", "--config", "r.yaml"], "--model and cost in r.yaml both set"),
        (["--config", "both.yaml"], "cost.per_pair cannot stand beside cost.model"),
        (["--config", "typo.yaml"], "typo.yaml: cost.model 'qwen-8' is not a known name"),
    ],
)
def test_faults_are_one_line(
    command: str,
    arguments: list[str],
    message: str,
    lengths: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(lengths.parent)
    Path("r.yaml").write_text("cost: {per_token: 2}")
    Path("both.yaml").write_text("cost: {model: qwen3-8b, per_pair: 2}")
    Path("typo.yaml").write_text("cost: {model: qwen-8}")
    run(command, lengths, *BUDGET, *arguments, code=2)
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_an_output_never_replaces_the_configuration(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PRESETS["qwen3-4b"]))
    for model in (path, tmp_path):
        run("plan", lengths, *BUDGET, "--model", model, "--out", path, code=2)
        assert "is named twice" in capsys.readouterr().err
    assert json.loads(path.read_text())["model_type"] == "qwen3"
