"""What the commands say about prompts that samples share."""

import json
from pathlib import Path
from typing import Any

import pytest

from evenstep import Plan
from evenstep.cli import main

BUDGET = ["--max-tokens", "1000", "--ranks", "2", "--column", "n", "--groups", "prompt"]
SHARING = [*BUDGET, "--prompts", "prompt_tokens"]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Four prompts of 100 tokens with four answers each."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{110 + 7 * (i % 4)},{'abcd'[i // 4]},100" for i in range(16)]
    Path("samples.csv").write_text("\n".join(["n,prompt,prompt_tokens", *rows]))
    return "samples.csv"


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_compare_shows_what_sharing_prompts_saves(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", table, *SHARING, "--json"]) == 0
    entries = {entry["strategy"]: entry for entry in printed(capsys)}
    shared, apart = entries["prompts shared"], entries["your settings"]
    assert shared["stats"]["shared_tokens_saved"] == 4 * 3 * 99
    assert shared["stats"]["tokens"] == apart["stats"]["tokens"] - 4 * 3 * 99
    assert shared["modelled_time"] < apart["modelled_time"] / 2
    assert "shared_tokens_saved" not in apart["stats"]
    assert main(["compare", table, *BUDGET, "--json"]) == 0
    assert "prompts shared" not in {entry["strategy"] for entry in printed(capsys)}


def test_a_plan_with_shared_prompts_is_saved_and_reported(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", table, *SHARING, "--out", "steps.evenstep", "--picture", "p.svg"]) == 0
    assert "tokens saved by sharing" in capsys.readouterr().out
    assert "shared prefix" in Path("p.svg").read_text()
    plan = Plan.load("steps.evenstep")
    assert plan.segments.parent is not None
    assert plan.prefixes is not None
    assert main(["report", "steps.evenstep"]) == 0
    assert "100" in capsys.readouterr().out
    assert main(["check", "steps.evenstep"]) == 0
    assert "in preorder" in capsys.readouterr().out
    assert main(["report", "steps.evenstep", "--out", "page.html"]) == 0
    assert "prompts shared" in Path("page.html").read_text()
    capsys.readouterr()
    # A saved plan brings its prefixes, in the order of a stream too.
    assert main(["plan", "steps.evenstep", "--json"]) == 0
    assert printed(capsys)["fingerprint"] == plan.fingerprint
    assert main(["plan", table, *SHARING, "--seed", "3", "--json"]) == 0
    assert printed(capsys)["stats"]["shared_tokens_saved"] == 4 * 3 * 99


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--column", "n", "--prompts", "prompt_tokens"], "Name the column of the prompts' ids"),
        ([*BUDGET[4:], "--prompts", "n"], "are of one group, but their prompts have"),
        ([*BUDGET[4:], "--prompts", "missing"], "missing"),
    ],
)
def test_wrong_prompts_are_one_error(
    options: list[str], message: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", table, "--max-tokens", "1000", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_prompt_longer_than_its_sample_is_one_error(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(table).write_text("n,prompt,prompt_tokens\n9,a,12\n20,a,12\n")
    assert main(["plan", table, *SHARING]) == 2
    assert "cannot share 12 tokens" in capsys.readouterr().err


# Sequences that ranks share -----------------------------------------------------------------------


@pytest.fixture
def long_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One sample costs more than a rank's part of the step."""
    monkeypatch.chdir(tmp_path)
    Path("lengths.txt").write_text("\n".join(map(str, [900, *range(10, 60)])))
    return ["lengths.txt", "--max-tokens", "1000", "--ranks", "4"]


def test_compare_shows_what_sharing_sequences_saves(
    long_sample: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    free = ["--set", "cost.per_moved=0", "--set", "cost.per_exchange=0"]
    assert main(["compare", *long_sample, *free, "--json"]) == 0
    entries = {entry["strategy"]: entry for entry in printed(capsys)}
    shared, whole = entries["sequences shared"], entries["your settings"]
    assert shared["stats"]["num_shared"] == 1
    assert "num_shared" not in whole["stats"]
    assert shared["modelled_time"] < 0.8 * whole["modelled_time"]
    assert main(["compare", "lengths.txt", "--max-tokens", "1000", "--json"]) == 0  # one rank
    assert "sequences shared" not in {entry["strategy"] for entry in printed(capsys)}
    Path("even.txt").write_text("\n".join(["10"] * 40))
    assert main(["compare", "even.txt", *long_sample[1:], "--json"]) == 0
    assert "sequences shared" not in {entry["strategy"] for entry in printed(capsys)}


def test_a_plan_with_shared_sequences_is_saved_reported_and_simulated(
    long_sample: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("r.yaml").write_text("sharing:\n  most_ranks: 3\nlayout: {max_tokens: 500}\n")
    config = ["lengths.txt", "--config", "r.yaml", "--ranks", "4"]
    free = ["--set", "cost.per_moved=0", "--set", "cost.per_exchange=0"]
    assert main(["plan", *config, *free, "--out", "steps.evenstep"]) == 0
    assert "shared sequences" in capsys.readouterr().out
    for command in (["report"], ["check"]):
        assert main([*command, "steps.evenstep"]) == 0
    capsys.readouterr()
    speed = ["--model", "llama-3-8b", "--gpu", "h200", "--only", "your settings"]
    assert main(["simulate", "lengths.txt", *config[1:], *speed, "--json"]) == 0


def test_prompts_and_sequences_are_shared_in_one_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ["n,prompt,prompt_tokens", "900,x,10"]
    rows += [f"{40 + 3 * (at % 7)},{at // 8},{25}" for at in range(48)]
    Path("table.csv").write_text("\n".join(rows))
    columns = ["table.csv", "--column", "n", "--groups", "prompt", "--prompts", "prompt_tokens"]
    options = ["--max-tokens", "1000", "--ranks", "4", "--set", "groups=step"]
    for name in ("most_ranks=null",):
        options += ["--set", f"sharing.{name}"]
    for name in ("per_moved", "per_exchange"):
        options += ["--set", f"cost.{name}=0"]
    assert main(["plan", *columns, *options, "--out", "s.evenstep", "--picture", "p.svg"]) == 0
    said = capsys.readouterr().out
    assert "tokens saved by sharing" in said
    assert "shared sequences" in said
    assert "shared prefix" in Path("p.svg").read_text()
    plan = Plan.load("s.evenstep")
    assert plan.segments.shares_slots
    assert plan.segments.is_shared.any()
    for command in (["check"], ["report"], ["report", "--out", "page.html"]):
        assert main([command[0], "s.evenstep", *command[1:]]) == 0
    capsys.readouterr()
    assert main(["compare", *columns, *options, "--json"]) == 0
    entries = {entry["strategy"]: entry for entry in printed(capsys)}
    assert entries["prompts shared"]["modelled_time"] < entries["your settings"]["modelled_time"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("sharing.most_ranks=9", "sharing.most_ranks must be at most topology.dp, 4, got 9."),
        ("sharing.max_received=0", "sharing.max_received must be an integer in"),
        ("sharing.ranks=2", "sharing.ranks is not a known key"),
        ("sharing=true", "sharing must hold keys, got True"),
    ],
)
def test_wrong_sharing_is_one_error(
    option: str, message: str, long_sample: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *long_sample, "--set", option]) == 2
    assert message in capsys.readouterr().err
