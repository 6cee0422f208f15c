"""`evenstep simulate` and `evenstep tune`, run as a user runs them."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep.cli import main

RECIPE = ["--set", "layout.max_tokens=4096", "--set", "topology.dp=4", "--set", "steps.samples=64"]
MODEL = ["--model", "qwen3-0.6b"]
TUNE = [*MODEL, "--gpu", "h200", "--ranks", "4", "--steps", "2"]
ONE = ["--set", "layout.kind=packed", "--set", "layout.max_tokens=8192"]
ONE += ["--set", "steps.samples=32", "--set", "topology.cp=1"]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npy"
    rng = np.random.default_rng(0)
    np.save(path, np.exp(rng.normal(5.5, 0.8, 200)).astype(np.int32).clip(1, 4000))
    return path


def run(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_simulate_gives_every_strategy_of_compare_a_time(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("compare", lengths, *RECIPE, *MODEL, "--json")
    compared = [row["strategy"] for row in printed(capsys)]
    run("simulate", lengths, *RECIPE, *MODEL, "--gpu", "h200", "--json")
    rows = printed(capsys)
    assert sorted(row["strategy"] for row in rows) == sorted(compared)
    for row in rows:
        assert row["step_seconds"] > 0
        assert row["devices"] == 4
        assert row["imbalance"] >= 1
        shares = [value for name, value in row.items() if name.endswith("_share")]
        assert sum(shares) == pytest.approx(1)


def test_a_pipeline_has_a_bubble_and_interleaving_shortens_it(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for vpp in (1, 2):
        axes = ["--set", "topology.pp=2", "--set", f"topology.vpp={vpp}", "--only", "packed, even"]
        run("simulate", lengths, *RECIPE, *MODEL, *axes, "--gpu", "h100", "--json")
        found += printed(capsys)
    assert found[0]["devices"] == 8
    assert found[0]["bubble_share"] > found[1]["bubble_share"] > 0


def test_a_cost_in_seconds_needs_no_model(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = ["--set", "cost.per_token=0.001", "--set", "cost.per_pair=1e-7", "--flops", 1]
    run("simulate", lengths, *RECIPE, *cost, "--only", "packed, even", "--json")
    (row,) = printed(capsys)
    total = np.load(lengths).sum()
    assert row["work_share"] * row["step_seconds"] * row["num_steps"] * 4 >= 0.001 * total
    assert row["exchange_share"] == 0


def test_half_the_speed_takes_twice_the_time(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = []
    for share in (0.5, 0.25):
        speed = ["--flops", "1e12", "--share", share, "--only", "packed, even"]
        run("simulate", lengths, *RECIPE, *MODEL, *speed, "--link", "1e15", "--json")
        times.append(printed(capsys)[0]["step_seconds"])
    assert times[1] == pytest.approx(2 * times[0], rel=1e-3)


def test_the_table_names_the_cluster(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("simulate", lengths, *RECIPE, *MODEL, "--gpu", "h200", "--only", "packed, even")
    said = capsys.readouterr().out
    assert "4 H200s: dp 4, cp 1, tp 1, pp 1, vpp 1" in said
    assert "packed, even" in said
    assert "padded to longest" not in said


FAULTS = {
    "no speed": ([*MODEL], "either --gpu, such as h200, or --flops"),
    "two speeds": ([*MODEL, "--gpu", "h200", "--flops", "1e12"], "either --gpu"),
    "an unknown GPU": ([*MODEL, "--gpu", "h900"], "unknown GPU 'h900'"),
    "a GPU without a model": (["--gpu", "h200"], "--gpu needs the shape of the model"),
    "a share of a GPU": ([*MODEL, "--gpu", "h200", "--share", "0.5"], "--share belongs to --flops"),
    "no speed at all": ([*MODEL, "--flops", "0"], "--flops must be above 0"),
    "more than all": ([*MODEL, "--flops", "1e12", "--share", "1.5"], "at most 1, got 1.5"),
    "a slow link": ([*MODEL, "--gpu", "h200", "--link", "0"], "--link must be above 0"),
    "a cost without time": (["--flops", "1e12"], "the cost counts tokens only"),
    "an unknown strategy": ([*MODEL, "--gpu", "h200", "--only", "x"], "unknown strategy 'x'"),
    "an unknown model": (["--model", "llama-9", "--gpu", "h200"], "is not a known name"),
    "a budget below the longest": (
        [*MODEL, "--gpu", "h200", "--set", "layout.max_tokens=256"],
        "no strategy can plan these lengths: sample",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_simulate_is_one_line(
    name: str, lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, says = FAULTS[name]
    assert main(["simulate", str(lengths), *RECIPE, *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1


def test_tune_prints_settings_and_recommends_one(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "tune.svg"
    run("tune", lengths, *TUNE, "--picture", picture)
    said = capsys.readouterr().out
    assert "Recommended: " in said
    assert "GPU-hours" in said
    assert said.count("→") == 1
    root = ET.fromstring(picture.read_text("utf-8"))
    circles = [each for each in root.iter() if each.tag.endswith("circle")]
    assert sum(each.get("class") == "ring" for each in circles) == 1


def test_tune_as_json_has_every_term(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("tune", lengths, *TUNE, "--json")
    found = printed(capsys)
    rows = found["settings"]
    assert sum(row["recommended"] for row in rows) == 1
    assert {row["layout"] for row in rows} == {"packed", "padded"}
    assert {row["cp"] for row in rows} == {1, 2, 4}
    tokens = int(np.load(lengths).sum())
    for row in rows:
        assert row["dp"] * row["cp"] == 4
        memory = row["memory_bytes"]
        assert memory["peak"] < 143_771 * 2**20
        assert set(memory) > {"weights", "optimizer", "gradients", "activations", "logits"}
        hours = tokens / row["tokens_per_second"] * 4 / 3600
        assert row["gpu_hours"] == pytest.approx(hours)
    best = min(row["gpu_hours"] for row in rows)
    chosen = next(row for row in rows if row["recommended"])
    assert chosen["gpu_hours"] <= 1.02 * best


def test_tune_divides_no_sequence_of_a_model_that_carries_state(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("tune", lengths, *TUNE, "--model", "qwen3.5-9b", "--json")
    assert {row["cp"] for row in printed(capsys)["settings"]} == {1}


def test_set_fixes_a_key_that_is_swept_otherwise(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ["--max-tokens", "8k", "--samples-per-step", 32]
    run("tune", lengths, *TUNE, *plain, *ONE[:2], *ONE[-2:], "--json")
    (row,) = printed(capsys)["settings"]
    assert (row["layout"], row["max_tokens"], row["samples_per_step"]) == ("packed", 8192, 32)
    page = tmp_path / "tune.html"
    run("tune", lengths, *TUNE, *ONE, "--picture", page)
    assert page.read_text("utf-8").startswith("<!doctype html>")


def test_a_tight_memory_recomputes_activations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("26000 26000 24000 25000\n" * 4)
    options = ["--set", "topology.cp=1", "--set", "steps.samples=4"]
    run("tune", path, "--model", "qwen3-4b", "--gpu", "h200", "--ranks", 4, *options, "--json")
    assert all(row["checkpointing"] for row in printed(capsys)["settings"])


TUNE_FAULTS = {
    "an unknown GPU": (["--gpu", "h900"], "unknown GPU 'h900'"),
    "no ranks": (["--ranks", "0"], "--ranks must be an integer"),
    "a cost": (["--set", "cost.per_token=2"], "tune sets cost.per_token itself"),
    "another step": (["--set", "steps.tokens=9"], "tune sets steps.tokens itself"),
    "ranks that do not divide": (["--set", "topology.tp=3"], "4 ranks cannot be divided"),
    "a model that does not fit": (
        ["--model", "llama-3-70b", "--gpu", "a10g"],
        "no setting fits into 22 GiB",
    ),
    "a key that does not exist": (["--set", "topology.xp=3"], "xp"),
    "a picture of another kind": (["--picture", "tune.gif"], ".gif"),
    "an unknown model": (["--model", "llama-9"], "is not a known name"),
}


@pytest.mark.parametrize("name", TUNE_FAULTS)
def test_a_fault_of_tune_is_one_line(
    name: str, lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, says = TUNE_FAULTS[name]
    assert main(["tune", str(lengths), *TUNE, *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("device", [["--gpu", "h200"], ["--flops", "989e12"]], ids=["gpu", "flops"])
@pytest.mark.parametrize("axes", [(16, 1), (8, 2), (4, 4)], ids=["tp16", "tp8cp2", "tp4cp4"])
def test_parallelism_across_nodes_takes_longer_on_a_slow_network(
    lengths: Path, capsys: pytest.CaptureFixture[str], axes: tuple[int, int], device: list[str]
) -> None:
    seconds: dict[str, dict[int, float]] = {}
    for where, (tp, cp) in {"across": axes, "inside": (axes[0] // 2, 1)}.items():
        split = ["--set", f"topology.tp={tp}", "--set", f"topology.cp={cp}"]
        seconds[where] = {}
        for gigabytes in (50, 1):
            command = [*RECIPE, "--set", "topology.dp=1", *MODEL, *split, *device]
            rest = ["--link", f"{gigabytes}e9", "--only", "packed, even", "--json"]
            run("simulate", lengths, *command, *rest)
            (row,) = printed(capsys)
            seconds[where][gigabytes] = row["work_share"] * row["step_seconds"]
    assert seconds["across"][1] > 1.05 * seconds["across"][50]
    assert seconds["inside"][1] == pytest.approx(seconds["inside"][50])


def test_simulate_refuses_second_work_at_once(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lengths.parent / "lengths.jsonl"
    path.write_text('{"length": 9, "patches": 4}\n' * 70)
    arguments = [str(path), "--column", "length", *RECIPE, "--set", "second_work.column=patches"]
    assert main(["simulate", *arguments, "--flops", "1e12", *MODEL]) == 2
    assert "second_work is not simulated" in capsys.readouterr().err


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Long documents: a few hold most of the tokens."""
    path = tmp_path / "documents.npy"
    rng = np.random.default_rng(0)
    np.save(path, np.exp(rng.normal(7.5, 1.2, 200)).astype(np.int32).clip(1, 30_000))
    return path


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_tune_does_not_rank_settings_that_change_the_data_with_others(
    documents: Path, overflow: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = [f"--set=overflow={overflow}", "--set=steps.samples=32", "--set=layout.kind=packed"]
    run("tune", documents, *TUNE, *fixed, "--json")
    found = printed(capsys)
    lengths, rows = np.load(documents), found["settings"]
    for row in rows:
        longest = row["recipe"]["layout"]["max_tokens"]
        over = lengths > longest
        tokens = {
            "split": lengths[over].sum(),
            "truncate": (lengths[over] - longest).sum(),
            "drop": lengths[over].sum(),
        }[overflow]
        assert row["changed_samples_share"] == pytest.approx(over.mean())
        assert row["changed_tokens_share"] == pytest.approx(tokens / lengths.sum())
        kept = 200 - (over.sum() if overflow == "drop" else 0)
        assert row["updates_per_epoch"] == -(-kept // 32)
    shares = [row["changed_tokens_share"] for row in rows]
    assert shares[0] == 0 < shares[-1]
    assert shares == sorted(shares)
    (chosen,) = (row for row in rows if row["recommended"])
    assert chosen["changed_tokens_share"] == 0
    fastest = min(rows, key=lambda row: row["gpu_hours"])
    if fastest["changed_tokens_share"]:
        assert f"that {overflow}s " in found["reason"]


def test_tune_shows_what_a_setting_splits(
    documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ["--set=overflow=split", "--set=steps.samples=32", "--set=topology.cp=1"]
    run("tune", documents, *TUNE, *fixed)
    said = " ".join(capsys.readouterr().out.split())
    assert "Settings that split samples come last" in said
    assert "7 updates per epoch" in said
    run("tune", documents, *TUNE, *fixed, "--max-tokens", "4096", "--set=layout.kind=packed")
    lengths = np.load(documents)
    over = lengths > 4096
    share = 100 * lengths[over].sum() / lengths.sum()
    said = " ".join(capsys.readouterr().out.split())
    assert f"It splits {100 * over.mean():.1f} % of the samples, which hold {share:.1f} %" in said
