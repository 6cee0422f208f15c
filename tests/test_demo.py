"""The functions of the demo and a short run; `make demo` takes minutes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from evenstep import Plan, make_plan
from evenstep.config import settings_from
from evenstep.report import Entry
from tests.internals import print_grid, read_run
from tests.internals import run as demo


def test_the_corpus_is_the_functions_and_classes_of_the_standard_library() -> None:
    found = demo.samples(40)
    assert len(found) == 40
    assert [s["input_ids"].tolist() for s in found] == [
        s["input_ids"].tolist() for s in demo.samples(40)
    ]
    for sample in found:
        text = sample["input_ids"].tobytes()
        assert 1 < len(text) <= demo.LONGEST
        assert text.split(maxsplit=1)[0] in (b"def", b"class")


def test_a_module_that_is_no_python_has_no_definitions(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_bytes(b"def f(:\n")
    assert list(demo.definitions(path)) == []
    assert list(demo.definitions(tmp_path / "missing.py")) == []


def plans() -> dict[str, Plan]:
    settings = {name: settings_from(demo.settings_of(name)) for name in demo.LAYOUTS}
    return {name: make_plan([9, 5], each.recipe) for name, each in settings.items()}


def test_only_the_layout_differs_between_the_runs() -> None:
    runs = [demo.settings_of(name) for name in demo.LAYOUTS]
    for run in runs:
        assert run.pop("layout") in demo.LAYOUTS.values()
        assert run.pop("trainer")["save_every"] == demo.STEPS
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_has_every_figure_of_each_layout_at_any_width(width: int) -> None:
    record = {
        "losses": [5.5, 4.25], "tokens_per_second": 123456.0, "micro_batches": 7, "planned": 1.01,
        "measured": 1.02, "waiting": 0.0, "planning": 0.0123,
    }  # fmt: skip
    screen = Console(file=io.StringIO(), width=width)
    entries = [Entry(name, plan, 0.1) for name, plan in plans().items()]
    print_grid(
        screen,
        ["", *demo.LAYOUTS],
        demo.rows(dict.fromkeys(demo.LAYOUTS, record), entries),
    )
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    heads = [line for line in shown.splitlines() if all(name in line for name in demo.LAYOUTS)]
    assert width < 80 or heads  # on one line
    assert "loss of step 1" in shown
    for figure in ("123,456 (1.00×)", "4.250000", "12.3 ms"):
        assert shown.count(figure) == len(demo.LAYOUTS)
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize(("packed", "says"), [(90.0, True), (100.0, True), (101.0, False)])
def test_the_demo_says_why_packed_is_not_faster(packed: float, says: bool) -> None:
    speeds = {"padded": 50.0, "dynamic": 100.0, "packed": packed}
    records = {name: {"tokens_per_second": speed} for name, speed in speeds.items()}
    entries = [Entry(name, plan) for name, plan in plans().items()]
    note = demo.slower_note(records, entries)
    assert bool(note) == says
    assert not says or f"{entries[1].stats['padding_ratio']:.1%} of padding" in note


@pytest.mark.slow
def test_a_short_demo_trains_three_times_to_the_same_losses(tmp_path: Path) -> None:
    short = "from evenstep.demo.run import main; main(steps=2, each=6)"
    done = subprocess.run(
        [sys.executable, "-c", short], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "dynamic: batches of similar length" in done.stdout
    spread = re.search(r"differ by at most ([0-9.e+-]+):", done.stdout)
    assert spread is not None
    assert float(spread[1]) < 1e-5
    runs = [read_run(tmp_path / "build" / f"demo-{name}") for name in demo.LAYOUTS]
    assert [(run.plan.num_steps, len(run.plan.lengths)) for run in runs] == [(2, 12)] * 3
    ids = [run.plan.sample_ids.tolist() for run in runs if run.plan.sample_ids is not None]
    assert ids == [list(range(12))] * 3  # the same samples in every step
    page = (tmp_path / "build" / "demo.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert f"{tmp_path}/build/demo.html" in done.stdout
    data = json.loads(re.findall(r'id="evenstep-data">(.*?)</script>', page)[0])
    assert list(data["runs"]) == list(demo.LAYOUTS)
    for run in data["runs"].values():
        assert run["steps"] == 2
        assert len(run["over_steps"]["loss"]["mean"]) == 2
        assert run["tokens_per_second"] > 0
        assert run["time_error"] is not None
    assert [each["name"] for each in data["strategies"]] == list(demo.LAYOUTS)
