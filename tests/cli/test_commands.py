"""The commands, run as a user runs them."""

import csv
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep import Packed, Padded, Plan, Recipe, Steps, Topology
from evenstep.cli import main
from tests.handmade import handmade
from tests.internals import CHECKS, Job, Samples, strategies

LENGTHS = [5, 3, 8, 2, 7, 1, 4, 6]
PROMPTS = ["a", "b", "a", "b", "c", "c", "d", "d"]
BUDGET = ["--set", "layout.max_tokens=16", "--set", "topology.dp=2"]


def run(*arguments: object, code: int = 0) -> None:
    assert main([str(argument) for argument in arguments]) == code


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npy"
    np.save(path, np.array(LENGTHS, np.int32))
    return path


def write_table(path: Path) -> Path:
    """Write the same samples in the format of the suffix, with columns n, prompt and images."""
    table = {"n": LENGTHS, "prompt": PROMPTS, "images": [1] * len(LENGTHS)}
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(table), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    else:
        with path.open("w", newline="") as file:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            writer = csv.DictWriter(file, list(table), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    return path


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "content", ["5 3 8 2 7 1 4 6", "5\n3\n8\n2\n7\n1\n4\n6\n", "5 3 8\n2 7 1 4\n6"]
)
def test_text_holds_one_or_more_lengths_per_line(
    content: str, tmp_path: Path, lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    run("plan", path, *BUDGET, "--json")
    from_text = printed(capsys)
    run("plan", lengths, *BUDGET, "--json")
    assert printed(capsys)["fingerprint"] == from_text["fingerprint"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_tables_bring_lengths_groups_and_limit_columns(suffix: str, tmp_path: Path) -> None:
    path, out = write_table(tmp_path / f"table{suffix}"), tmp_path / "a.evenstep"
    limit = ["--set", "limits.columns.images=3"]
    run("plan", path, *BUDGET, *limit, "--column", "n", "--groups", "prompt", "--out", out)
    plan = Plan.load(out)
    assert plan.lengths.tolist() == LENGTHS
    assert plan.groups is not None
    assert plan.groups.tolist() == [0, 1, 0, 1, 2, 2, 3, 3]
    assert plan.columns["images"].tolist() == [1] * 8
    assert max(len(micro.segments) for rank in (0, 1) for micro in plan[0, rank]) <= 3
    run("check", out)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_lists_of_tokens_count_as_their_lengths(suffix: str, tmp_path: Path) -> None:
    path, out = tmp_path / f"tokens{suffix}", tmp_path / "a.evenstep"
    tokens = [list(range(n)) for n in LENGTHS]
    if suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"input_ids": tokens}), path)
    else:
        path.write_text("\n".join(json.dumps({"input_ids": each}) for each in tokens))
    run("plan", path, *BUDGET, "--column", "input_ids", "--out", out)
    assert Plan.load(out).lengths.tolist() == LENGTHS


def test_integer_groups_keep_their_numbers(tmp_path: Path) -> None:
    path, out = tmp_path / "a.csv", tmp_path / "a.evenstep"
    path.write_text("length,prompt\n3,70\n4,-2\n5,70\n")
    run("plan", path, *BUDGET, "--groups", "prompt", "--out", out)
    groups = Plan.load(out).groups
    assert groups is not None
    assert groups.tolist() == [70, -2, 70]


def test_a_plan_is_saved_checked_and_reported(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.evenstep"
    run("plan", lengths, *BUDGET, "--set", "steps.samples=4", "--out", out, "--json")
    planned = printed(capsys)
    run("check", out)
    assert capsys.readouterr().out.count("ok ") == len(CHECKS)
    run("report", out)
    assert "imbalance per micro-batch" in capsys.readouterr().out
    run("report", out, "--json")
    reported = printed(capsys)
    assert len(reported.pop("steps")) == 2
    assert reported == planned


def test_a_saved_plan_brings_its_samples_and_its_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, first, second = (tmp_path / name for name in ("a.csv", "a.evenstep", "b.evenstep"))
    write_table(table)
    run("plan", table, *BUDGET, "--column", "n", "--groups", "prompt", "--out", first)
    run("plan", first, "--set", "topology.dp=1", "--out", second)
    again = Plan.load(second)
    assert again.lengths.tolist() == LENGTHS
    assert again.groups is not None
    assert (again.num_ranks, again.recipe.layout) == (1, Packed(max_tokens=16))
    capsys.readouterr()
    run("plan", first, "--json")
    assert printed(capsys)["fingerprint"] == Plan.load(first).fingerprint


def test_a_config_file_is_read_and_overridden(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "recipe.yaml"
    config.write_text("layout: {kind: padded, max_tokens: 16}\ntopology: {dp: 2}\n")
    run("plan", lengths, "--config", config, "--set", "topology.dp=4", "--json")
    recipe = Recipe.from_dict(printed(capsys)["recipe"])
    assert (recipe.layout, recipe.topology) == (Padded(max_tokens=16), Topology(dp=4))


def test_pictures_are_svg_or_html(lengths: Path, tmp_path: Path) -> None:
    saved = tmp_path / "a.evenstep"
    run("plan", lengths, *BUDGET, "--out", saved)
    for name, arguments in {
        "plan": ("plan", lengths, *BUDGET),
        "report": ("report", saved),
        "compare": ("compare", saved),
    }.items():
        run(*arguments, "--picture", tmp_path / f"{name}.svg")
        ET.fromstring((tmp_path / f"{name}.svg").read_text())
        run(*arguments, "--picture", tmp_path / f"{name}.html")
        assert (tmp_path / f"{name}.html").read_text().startswith("<!doctype html>")


def test_a_bottleneck_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("16 1 1 1")
    run("plan", tmp_path / "a.txt", *BUDGET)
    assert "bottleneck: sample 0 with 16 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_a_violation_gives_exit_code_1(
    json_option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.evenstep"
    recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2))
    handmade([5, 5, 5], [[[[[0, 1]]], [[[2]]]]], recipe).save(path)
    run("check", path, *json_option, code=1)
    out = capsys.readouterr().out
    assert "micro-batch 0 has 10 slots, more than 8" in out
    if json_option:
        assert json.loads(out)["valid"] is False
    else:
        assert out.count("ok ") == len(CHECKS) - 1
        assert out.count("broken ") == 1


def test_an_invalid_plan_is_not_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.evenstep"
    recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2))
    handmade([5, 5], [[[[[0]], [[1]]], [[[]]]]], recipe).save(path)  # two against one
    run("report", path, code=2)
    assert "counts_agree" in capsys.readouterr().err


def test_compare_shows_every_strategy(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [
        "--strategy",
        "mine: balance=stride, layout.packer=optimal",
        "--strategy",
        "sync_every=step",
    ]
    run("compare", lengths, *BUDGET, *own)
    table = capsys.readouterr().out
    assert all(name in table for name in ("padded to longest", "packed", "mine", "sync_every=step"))
    run("compare", lengths, *BUDGET, *own, "--json")
    entries = {entry["strategy"]: entry for entry in printed(capsys)}
    assert entries["mine"]["recipe"]["layout"]["packer"] == "optimal"
    assert entries["sync_every=step"]["recipe"]["sync_every"] == "step"
    assert entries["padded to longest"]["stats"]["slots"] >= entries["mine"]["stats"]["slots"]


def test_a_strategy_that_cannot_plan_does_not_stop_the_others(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = ["--strategy", "short: layout.max_tokens=4"]
    run("compare", lengths, *BUDGET, *broken)
    out = capsys.readouterr().out
    assert out.count("no plan") == 1
    assert "short: sample 0 has 5 tokens" in out
    run("compare", lengths, *BUDGET, *broken, "--json")
    assert [entry["strategy"] for entry in printed(capsys) if "fault" in entry] == ["short"]


@pytest.mark.parametrize("change", ["balance=magic", "layout.packer=foo", "topology.vpp=2"])
def test_a_strategy_with_an_invalid_recipe_ends_the_command(
    change: str, lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("compare", lengths, *BUDGET, "--strategy", f"odd: {change}", code=2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --strategy 'odd': ")
    assert f"{change.split('=')[0]} " in err


def test_a_saved_plan_of_no_steps_still_brings_its_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.evenstep"
    handmade([500], [], Recipe(layout=Packed(max_tokens=8), overflow="drop")).save(path)
    run("plan", path, "--json")
    assert printed(capsys)["recipe"]["overflow"] == "drop"


def test_a_title_shows_a_file_name_without_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "[red]x.txt"
    path.write_text("3 4")
    run("plan", path, *BUDGET)
    assert capsys.readouterr().out.startswith(f"Plan of {path.name} ")
    run("compare", path, *BUDGET)
    assert f"Strategies for {path.name}\n" in capsys.readouterr().out


def test_blank_lines_before_a_header_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("\n , \nlength,n\n3,1\n4,2\n")
    run("plan", tmp_path / "a.csv", *BUDGET, "--json")
    assert printed(capsys)["stats"]["tokens"] == 7


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.longdouble])
def test_whole_floats_are_lengths(
    dtype: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "a.npy", np.array(LENGTHS, dtype))
    run("plan", tmp_path / "a.npy", *BUDGET, "--json")  # a warning would fail the test
    assert printed(capsys)["stats"]["tokens"] == sum(LENGTHS)


@pytest.mark.parametrize(
    "layout",
    [
        ["layout.samples=3"],
        ["layout.rows=2", "layout.pad_to=8"],
        ["layout.kind=padded", "layout.max_tokens=16", "layout.cut=greedy"],
        ["layout.max_tokens=16", "layout.pad_to=16", "layout.round_to=8"],
    ],
)
def test_compare_starts_from_any_layout(
    layout: list[str], lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("compare", lengths, *(word for pair in layout for word in ("--set", pair)), "--json")
    assert not [entry for entry in printed(capsys) if "fault" in entry]


@pytest.mark.parametrize("strategy", ["mine: lpt", ": balance=lpt", "packed in order: seed=3"])
def test_a_malformed_or_duplicate_strategy_is_refused(
    strategy: str, lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("compare", lengths, *BUDGET, "--strategy", strategy, code=2)
    assert capsys.readouterr().err.count("\n") == 1


# Real processes ----------------------------------------------------------------------------


def evenstep(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_standard_output_holds_only_json(lengths: Path, tmp_path: Path) -> None:
    done = evenstep("plan", lengths, *BUDGET, "--json", "--out", tmp_path / "a.evenstep")
    assert done.returncode == 0
    assert json.loads(done.stdout)["stats"]["num_samples"] == 8
    assert done.stderr == f"wrote {tmp_path / 'a.evenstep'}\n"


def test_a_fault_ends_the_process_with_2_and_one_line(tmp_path: Path) -> None:
    done = evenstep("plan", "absent.npy", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: absent.npy cannot be read")
    assert done.stderr.count("\n") == 1


def test_help_is_fast_because_it_loads_no_compiler() -> None:
    code = (
        "import sys; from evenstep.cli import main; main(['plan', '--help']); "
        "sys.exit(any(name in sys.modules for name in ('numba', 'torch', 'evenstep.planning')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "LENGTHS" in done.stdout


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    assert "compare" in capsys.readouterr().out
    run("--version")
    assert capsys.readouterr().out.startswith("evenstep 0.")


@pytest.mark.skipif(os.name == "nt", reason="pipes close differently there")
def test_a_closed_pipe_gives_no_traceback(lengths: Path, tmp_path: Path) -> None:
    saved = tmp_path / "a.evenstep"
    run("plan", lengths, *BUDGET, "--out", saved)
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "evenstep", "report", str(saved)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert done.stderr == ""
    assert done.returncode != 0


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read and write anything")
def test_missing_permissions_are_reported(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    run("plan", lengths, *BUDGET, "--out", closed / "a.evenstep", code=2)
    assert "not a writable folder" in capsys.readouterr().err
    lengths.chmod(0)
    run("plan", lengths, *BUDGET, code=2)
    assert "Permission denied" in capsys.readouterr().err


def test_a_plan_in_the_order_of_a_stream_is_what_the_stream_runs(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from evenstep import PlannedStream, Steps, World
    from evenstep.data import Lengths

    out, again = tmp_path / "epoch.plan", tmp_path / "again.plan"
    steps = ["--set", "steps.samples=3"]
    run("plan", lengths, *BUDGET, *steps, "--seed", 3, "--epoch", 1, "--out", out)
    assert "seed 3, epoch 1" in capsys.readouterr().out
    plan, source = Plan.load(out), Lengths(np.array(LENGTHS))
    recipe = Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2), steps=Steps(samples=3))
    stream = PlannedStream(source, recipe, world=World(1, 2), seed=3)
    stream.set_epoch(1)
    saved = PlannedStream.from_plan(source, plan, world=World(1, 2))
    for one, other in zip(stream, saved, strict=True):
        assert one.plan == other.plan
        assert one.own_sample_ids.tolist() == other.own_sample_ids.tolist()
    run("check", out)
    run("plan", out, "--set", "steps.samples=4", "--out", again)  # keeps the order
    assert plan.sample_ids is not None
    assert Plan.load(again).sample_ids is not None
    assert Plan.load(again).lengths.tolist() == plan.lengths.tolist()
    capsys.readouterr()
    run("plan", out, "--seed", 3, code=2)
    assert "already has the order of a stream" in capsys.readouterr().err
    run("plan", lengths, *BUDGET, "--epoch", 2, "--json")
    stream = PlannedStream(source, replace(recipe, steps=Steps()), world=World(0, 2))
    assert printed(capsys)["fingerprint"] == stream.plan_epoch(2).fingerprint


def test_compare_begins_with_what_scripts_do(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("compare", lengths, *BUDGET, "--json")
    out, err = capsys.readouterr()
    first, own, *_ = json.loads(out)
    assert err.startswith("warning: The whole file is one step")
    assert first["strategy"] == "padded batches of 8"
    assert first["recipe"]["layout"]["samples"] == 8
    assert first["recipe"]["layout"]["max_tokens"] is None
    assert first["recipe"]["balance"] == "none"
    assert first["padding_removed"] in (0, None)
    assert own["times_less_time_than_first"] == pytest.approx(
        first["modelled_time"] / own["modelled_time"]
    )
    assert sum(own["parts"].values()) == pytest.approx(own["modelled_time"])


@pytest.mark.parametrize(
    "options",
    [
        ["equal_sizes=true"],
        ["equal_tokens=true"],
        ["min_saving=0.1"],
        ["layout.packer=optimal", "layout.pad_to=16"],
        ["topology.pp=2", "steps.micro_batches=2"],
        ["topology.cp=2", "topology.tp=2", "steps.tokens=300"],
        ["layout.kind=padded", "layout.cut=greedy"],
    ],
)
def test_the_first_strategy_plans_beside_any_recipe(
    options: list[str], lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [part for option in options for part in ("--set", option)]
    run("compare", lengths, *BUDGET, *sets, "--json")
    entries = printed(capsys)
    assert "fault" not in entries[0]


@pytest.mark.parametrize(("overflow", "tokens"), [("truncate", 42), ("split", 505), ("drop", 10)])
def test_all_strategies_run_the_same_tokens_of_long_samples(
    overflow: str, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("5 250 245 5")
    run("compare", path, *BUDGET, "--set", f"overflow={overflow}", "--json")
    found = {entry["strategy"]: entry.get("stats", {}).get("tokens") for entry in printed(capsys)}
    assert found["padded batches of 8"] == found["your settings"] == tokens


def test_a_png_is_a_picture(lengths: Path, tmp_path: Path) -> None:
    run("compare", lengths, *BUDGET, "--picture", tmp_path / "a.png")
    run("plan", lengths, *BUDGET, "--picture", tmp_path / "b.png")
    assert all((tmp_path / name).read_bytes()[1:4] == b"PNG" for name in ("a.png", "b.png"))


def test_a_sample_that_is_too_long_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    path, cache = tmp_path / "lengths.txt", tmp_path / "cache"
    path.write_text("5 3 900 4")
    done = subprocess.run(
        [sys.executable, "-m", "evenstep", "compare", str(path), "--max-tokens", "64"],
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "sample 2 has 900 tokens" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(cache.rglob("*.nb*"))


def test_the_planning_time_of_a_strategy_leaves_compiling_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(strategies, "compile_seconds", lambda: clock[0])
    recipe = Recipe(layout=Packed(max_tokens=64), steps=Steps(samples=2))
    job = Job(Samples(np.array([5, 3, 9, 4])), recipe)

    def compile_for_hours(done: int, total: int) -> None:
        clock[0] += 3600

    entry = strategies.run(job, strategies.Strategy("own", ()), compile_for_hours)
    assert entry.seconds < -3000  # the hours did not pass, but they are subtracted


def test_every_mistake_of_a_configuration_has_its_own_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, config = tmp_path / "lengths.txt", tmp_path / "recipe.yaml"
    path.write_text("5 3")
    config.write_text("layout: {max_tokens: 0, rond_to: 2}\ntopology: {dp: x}\nseed: -1\n")
    run("plan", path, "--config", config, code=2)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == f"error: {config} has {len(lines)} faults:"
    assert len(lines) == 4
    for number, line in enumerate(lines, 1):
        assert line.startswith(f"  ({number}) ")


def test_a_command_that_is_misspelt_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    run("plann", "lengths.txt", code=2)
    said = capsys.readouterr().err
    assert "Did you mean 'plan'? See `evenstep --help`." in said
