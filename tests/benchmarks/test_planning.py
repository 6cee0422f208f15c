"""The benchmark itself: it runs without peers, files what it found, and measures what it says."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import joint, lengths, planning, runner
from benchmarks.peers import plain_best_fit
from benchmarks.tables import Target, markdown_table, target_table
from benchmarks.timing import interleave
from evenstep.planning import make_plan, pack


def test_a_quick_run_files_its_tables_without_naming_the_machine(
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
    filed = json.loads((out / "planning.json").read_text())
    assert list(filed["sections"]) == ["optimal", "plans"]
    assert filed["lengths"] == ["small"]
    assert str(tmp_path) not in (out / "planning.md").read_text()


def test_quick_and_partial_runs_are_not_filed_unless_asked() -> None:
    for arguments, filed in ((["--quick"], False), (["--only", "joint"], False), ([], True)):
        options = runner._options("title", planning.SECTIONS, arguments)
        assert (options.out is not None) == filed


def test_generated_lengths_are_seeded_and_of_five_kinds() -> None:
    once, again = lengths.generate(), lengths.generate()

    assert len(once) == 5
    for name, corpus in once.items():
        assert corpus.min() >= 1
        assert (corpus == again[name]).all()


def test_plain_best_fit_and_ours_need_the_same_bins() -> None:
    drawn = lengths.draw(next(iter(lengths.generate().values())), 300, 8192)

    assert len(plain_best_fit(drawn.tolist(), 8192)) == len(pack(drawn, 8192))


def test_no_plan_beats_the_floor_of_lock_step() -> None:
    drawn = lengths.log_normal(joint.SAMPLES, 0.6, seed=3)  # one sequence fills the budget

    outcome = joint.measure(drawn, *joint._of_plan(make_plan(drawn, joint.RECIPE)))

    assert 1 < joint.lock_step_floor(drawn) <= outcome.lock_step
    assert outcome.over_budget == 0


def test_every_call_is_timed_in_turn_and_even_a_slow_one_once() -> None:
    seen: list[str] = []
    timed = interleave(
        {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, repeats=2, patience=0.0
    )

    assert seen == ["a", "b", "a", "b"]  # once to warm up, once for the time
    assert {name: run.runs for name, run in timed.items()} == {"a": 1, "b": 1}


def test_a_missed_target_stands_out_in_markdown() -> None:
    table = markdown_table(target_table([Target("fast", "9 ms", False)]))

    assert table.splitlines()[-1] == "| fast | 9 ms | **missed** |"
