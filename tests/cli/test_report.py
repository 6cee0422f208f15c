"""`evenstep report --out`: of a saved plan, and of a training run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from evenstep import Plan
from evenstep.cli import main
from evenstep.trainer import train
from tests.internals import of_run, read_run
from tests.trainer.runs import PER_STEP, settings, texts


def data_of(page: Path) -> Any:
    return json.loads(re.findall(r'id="evenstep-data">(.*?)</script>', page.read_text("utf-8"))[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps, continued to 6: one epoch and a half."""
    folder = tmp_path_factory.mktemp("run")
    data = texts(folder)
    for steps in (4, 6):
        train(settings(folder / "out", data, stream={"max_num_steps": steps}))
    return folder / "out"


def test_a_run_has_a_report_of_what_ran(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(page)]) == 0
    data = data_of(page)
    (measured,) = data["runs"].values()
    assert measured["steps"] == 6
    logged = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert measured["last_loss"] == logged[-1]["loss"]
    assert measured["over_steps"]["loss"]["mean"] == pytest.approx(
        [record["loss"] for record in logged], rel=1e-5
    )
    assert [each["name"] for each in data["strategies"]][:2] == [
        "padded batches of 8",
        "your settings",
    ]
    assert data["saving"]["gpu_hours"] is not None
    assert any("steps 4 to 5 of 6" in note for note in data["notes"])


def test_the_plan_of_a_run_is_the_one_that_ran(run: Path) -> None:
    found = read_run(run)
    assert found.first == 4
    assert found.plan.num_steps == 2
    assert len(found.plan.lengths) == 2 * PER_STEP
    for number, costs in enumerate(found.log.costs[4:]):
        micro = found.plan.cell_offsets[number : number + 2]
        assert costs.ravel().tolist() == found.plan.costs[slice(*micro)].tolist()


@pytest.mark.parametrize("samples", [20, 25])
def test_the_strategies_of_a_run_have_its_steps(tmp_path: Path, samples: int) -> None:
    data = texts(tmp_path, samples)  # the last step of an epoch is smaller
    train(settings(tmp_path / "out", data, stream={"max_num_steps": 11}))

    report = of_run(tmp_path / "out")

    entries = {entry.name: entry.stats for entry in report.entries}
    assert entries["your settings"] == report.stats
    assert report.stats["num_steps"] == 11
    for stats in entries.values():
        assert stats["num_steps"] == 11
        assert stats["num_samples"] == report.stats["num_samples"]


def test_a_saved_plan_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, plan, page = (tmp_path / name for name in ("lengths.txt", "a.evenstep", "a.html"))
    lengths.write_text(" ".join(str(3 + 7 * n % 90) for n in range(64)))
    options = ["--set", "layout.max_tokens=100", "--set", "steps.samples=16"]
    assert main(["plan", str(lengths), *options, "--out", str(plan)]) == 0
    capsys.readouterr()
    assert main(["report", str(plan), "--out", str(page), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == f"wrote {page}\n"
    assert json.loads(out) == data_of(page)
    assert data_of(page)["plan"]["num_samples"] == 64
    assert main(["report", str(plan), "--out", str(page)]) == 0
    assert "less time than padded batches of 8" in capsys.readouterr().out
    assert Plan.load(plan).num_steps == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}"], "Name the page to write: --out report.html"),
        (["{run}", "--picture", "a.svg"], "Use --out"),
        (["{run}", "--out", "a.pdf"], "expected .html"),
        (["{folder}", "--out", "a.html"], "Name the folder of a run of `evenstep train`"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    arguments: list[str],
    said: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    named = [each.format(run=run, folder=tmp_path) for each in arguments]
    assert main(["report", *named]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["log.jsonl", "starts.jsonl"])
@pytest.mark.parametrize("line", ["{}", "3", '{"step": 0}'])
def test_logs_of_another_program_are_refused(
    name: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for other in ("log.jsonl", "starts.jsonl"):
        (tmp_path / other).write_text('{"step": 0}\n')
    (tmp_path / name).write_text(line + "\n")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "a.html")]) == 2
    err = capsys.readouterr().err
    assert ".jsonl, line 1: not what `evenstep train` writes" in err
    assert err.count("\n") == 1
