"""The planning benchmark runs without peers, writes its results and measures correctly."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import joint, lengths, planning, runner
from benchmarks.peers import plain_best_fit
from benchmarks.problem import Problem, deal_of_plan
from benchmarks.tables import Target, markdown_table, target_table
from benchmarks.timing import interleave
from evenstep import make_plan, pack


def test_a_quick_run_writes_its_tables_without_machine_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "lengths"
    source.mkdir()
    np.save(source / "small.npy", np.arange(1, 500, dtype=np.int32))
    out = tmp_path / "out"
    arguments = ["--quick", "--only", "optimal", "--only", "plans"]

    code = planning.main([*arguments, "--lengths", str(source), "--out", str(out)])

    assert code == 0
    assert "under 10 ms" in capsys.readouterr().out
    written = json.loads((out / "planning.json").read_text())
    assert list(written["sections"]) == ["optimal", "plans"]
    assert written["lengths"] == ["small"]
    assert str(tmp_path) not in (out / "planning.md").read_text()


def test_quick_and_partial_runs_are_written_only_on_request() -> None:
    for arguments, written in ((["--quick"], False), (["--only", "joint"], False), ([], True)):
        options = runner._options("title", planning.SECTIONS, arguments)
        assert (options.out is not None) == written


def test_generated_lengths_are_five_seeded_corpora() -> None:
    once, again = lengths.generate(), lengths.generate()

    assert len(once) == 5
    for name, corpus in once.items():
        assert corpus.min() >= 1
        assert (corpus == again[name]).all()


def test_plain_best_fit_and_ours_use_the_same_number_of_bins() -> None:
    drawn = lengths.draw(next(iter(lengths.generate().values())), 300, 8192)

    assert len(plain_best_fit(drawn.tolist(), 8192)) == len(pack(drawn, 8192))


def test_no_plan_beats_the_floor_of_lock_step() -> None:
    drawn = lengths.log_normal(joint.SAMPLES, 0.6, seed=3)  # one sequence fills the budget

    problem = Problem(drawn, joint.BUDGET, joint.RANKS, joint.COST)
    outcome = problem.measure(*deal_of_plan(make_plan(drawn, joint.RECIPE)))

    assert 1 < problem.lock_step_floor <= outcome.lock_step
    assert outcome.over_budget == 0


def test_calls_take_turns_and_a_slow_one_is_timed_once() -> None:
    seen: list[str] = []
    timed = interleave(
        {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, repeats=2, patience=0.0
    )

    assert seen == ["a", "b", "a", "b"]  # one warm-up, one timed run
    assert {name: run.runs for name, run in timed.items()} == {"a": 1, "b": 1}


def test_a_missed_target_is_bold_in_markdown() -> None:
    table = markdown_table(target_table([Target("fast", "9 ms", False)]))

    assert table.splitlines()[-1] == "| fast | 9 ms | **missed** |"
