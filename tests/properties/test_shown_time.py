"""The time that is shown is the time that was planned for, second work included."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenstep import (
    Cost,
    Packed,
    Plan,
    PlannedStream,
    Recipe,
    SecondWork,
    Steps,
    Topology,
    World,
    make_plan,
)
from evenstep.cli import main
from evenstep.data import Lengths
from evenstep.errors import ConfigError, EvenstepError
from evenstep.report import Entry, advice
from evenstep.testing import Case, cases
from tests.examples import examples
from tests.internals import IntArray, Problem, step_module, step_times, timelines


@st.composite
def cases_with_second_work(draw: st.DrawFn) -> Case:
    """Random cases; those that can have second work have it."""
    case = draw(cases())
    second = SecondWork(
        column="patches",
        cost=draw(st.sampled_from([None, Cost(per_token=30, per_pair=2)])),
        same_waves=draw(st.booleans()),
    )
    for work in (second, replace(second, same_waves=False)):
        try:
            return replace(case, recipe=replace(case.recipe, second_work=work))
        except ConfigError:
            continue
    return case


def defined_times(plan: Plan) -> list[float]:
    """The time of each step, one micro-batch after the other, from the definition."""
    recipe = plan.recipe
    works = [work.tolist() for work in (plan.costs, second_work(plan))]
    times = []
    for step in range(plan.num_steps):
        total = 0.0
        for work in works:
            cells = plan.cell_offsets[step * plan.num_ranks : (step + 1) * plan.num_ranks + 1]
            ranks = [work[a:b] for a, b in pairwise(cells)]
            if recipe.sync_every == "step":
                total += max(sum(rank) for rank in ranks)
            else:
                total += sum(max(wave) for wave in zip(*ranks, strict=True))
        times.append(total)
    return times


def second_work(plan: Plan) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The second work of each micro-batch; without a cost, as large in each step as the first."""
    total, second = np.zeros(plan.num_micro_batches), plan.recipe.second_work
    if second is None:
        return total
    unit = Cost() if second.cost is None else second.cost
    for step in range(plan.num_steps):
        tokens = 0.0
        micros = range(
            int(plan.cell_offsets[step * plan.num_ranks]),
            int(plan.cell_offsets[(step + 1) * plan.num_ranks]),
        )
        for micro in micros:
            for segment in range(plan.segment_offsets[micro], plan.segment_offsets[micro + 1]):
                patches = plan.columns[second.column][plan.segments.sample[segment]]
                total[micro] += float(unit.of_lengths(np.array([patches]))[0]) if patches else 0.0
                aligned = plan.aligned_lengths[segment : segment + 1]
                tokens += float(plan.recipe.cost.of_lengths(aligned)[0])
        own = total[micros.start : micros.stop]
        if second.cost is None and own.sum():
            own *= tokens / own.sum()
    return total


def planned(case: Case) -> tuple[Plan, list[float] | None]:
    """The plan, and the time that the planner minimised in each step; None if it minimised none."""
    times: list[float] = []

    def recorded(
        decide: Callable[..., tuple[IntArray, int]], problem_of: Callable[..., Problem | None]
    ) -> Callable[..., tuple[IntArray, int]]:
        def decided(*given: Any, **options: Any) -> tuple[IntArray, int]:
            address, waves = decide(*given, **options)
            problem = problem_of(*given)
            if problem is not None:
                times.append(problem.time(problem.works(address, waves)))
            return address, waves

        return decided

    def of_ranks(problem: Problem, *_: Any) -> Problem:
        return problem

    def of_step(problem: Problem, *_: Any) -> Problem | None:
        one_rank = problem.cut and problem.recipe.equal_sizes  # `of_ranks` has the whole step
        return None if one_rank else problem

    ways: dict[str, Any] = {"search_packs": of_step, "cut_rows": of_step, "_cut_by_rank": of_ranks}
    with pytest.MonkeyPatch.context() as patch:
        for name, problem_of in ways.items():
            patch.setattr(step_module, name, recorded(getattr(step_module, name), problem_of))
        plan = case.plan()
    return plan, times if len(times) == plan.num_steps else None


@examples(800)
@given(cases_with_second_work())
def test_what_is_shown_is_what_was_planned_for(case: Case) -> None:
    try:
        plan, minimised = planned(case)
    except EvenstepError:
        return
    times = defined_times(plan)
    mean = (plan.costs.sum() + second_work(plan).sum()) / plan.num_ranks
    assume(mean > 0)
    if minimised is not None:
        assert minimised == pytest.approx(times)
    assert step_times(plan).tolist() == pytest.approx(times)
    assert [line.end for line in timelines(plan)] == pytest.approx(times)
    assert np.mean([line.mean for line in timelines(plan)]) == pytest.approx(mean / len(times))
    entry = Entry("plan", plan)
    assert entry.modelled_time == pytest.approx(sum(times))
    imbalance = sum(times) / mean
    assert entry.stats[f"imbalance_cost_{plan.recipe.sync_every}"] == pytest.approx(imbalance)
    assert float(repr(plan).rpartition("imbalance ")[2][:-1]) == pytest.approx(imbalance, abs=6e-4)
    for shown, line in zip(plan.step_stats(), timelines(plan), strict=True):
        each = shown[f"imbalance_cost_{plan.recipe.sync_every}"]
        assert each == pytest.approx(line.end / line.mean if line.mean else 1.0)


@pytest.mark.parametrize("sync_every", ["step", "micro_batch"])
def test_a_stream_shows_the_imbalance_of_both_works(sync_every: Any) -> None:
    rng = np.random.default_rng(0)
    lengths, patches = rng.integers(10, 500, 64), rng.integers(0, 900, 64)
    recipe = Recipe(
        layout=Packed(max_tokens=1000),
        topology=Topology(dp=2),
        steps=Steps(samples=32),
        second_work=SecondWork(column="patches", cost=Cost(per_token=3, per_pair=0.1)),
        sync_every=sync_every,
    )
    columns = {"patches": patches}
    streams = [
        PlannedStream(Lengths(lengths), recipe, columns=columns, world=World(rank, 2))
        for rank in range(2)
    ]
    for step, other in zip(*streams, strict=True):
        assert step.plan is not None
        (time,) = step_times(step.plan)
        both = step.plan.costs + second_work(step.plan)
        assert [*step.costs, *other.costs] == pytest.approx(both.tolist())
        assert step.totals[f"imbalance_{sync_every}"] == pytest.approx(2 * time / both.sum())


@pytest.mark.parametrize("sync_every", ["step", "micro_batch"])
def test_every_strategy_is_compared_with_the_second_work(
    sync_every: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Padded plans and those of a packer cannot even out images, but they run them as well."""
    rng = np.random.default_rng(0)
    rows = [
        {"length": int(n), "patches": int(p)}
        for n, p in zip(rng.integers(10, 500, 64), rng.integers(0, 900, 64), strict=True)
    ]
    path, picture = tmp_path / "lengths.jsonl", tmp_path / "compared.svg"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["second_work.column=patches", f"sync_every={sync_every}", "topology.dp=2"]
    command = ["compare", str(path), "--column", "length", "--max-tokens", "1000", "--json"]
    main([*command, *(f"--set={each}" for each in settings), "--picture", str(picture)])
    entries = json.loads(capsys.readouterr().out)
    assert not [entry for entry in entries if "fault" in entry]
    total = float(sum(row["length"] for row in rows))  # of the first work, and so of the second
    even = entries[-1]
    for entry in entries:
        assert entry["parts"]["work"] == pytest.approx(2 * total / 2)
        assert entry["modelled_time"] >= even["modelled_time"] * (1 - 1e-9)
    assert "second work (patches)" in picture.read_text()


@pytest.mark.parametrize("sync_every", ["step", "micro_batch"])
def test_a_report_shows_every_strategy_with_the_second_work(
    sync_every: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table, headline and bars have the times that `compare` shows."""
    rng = np.random.default_rng(0)
    lengths, patches = rng.integers(10, 500, 64), rng.integers(0, 900, 64)
    data, page = tmp_path / "lengths.jsonl", tmp_path / "report.html"
    rows = zip(lengths.tolist(), patches.tolist(), strict=True)
    data.write_text("".join(json.dumps({"length": n, "patches": p}) + "\n" for n, p in rows))
    settings = ["second_work.column=patches", f"sync_every={sync_every}", "topology.dp=2"]
    options = [
        "--column",
        "length",
        "--max-tokens",
        "1000",
        *(f"--set={each}" for each in settings),
    ]
    main(["compare", str(data), *options, "--json"])
    compared = {each["strategy"]: each for each in json.loads(capsys.readouterr().out)}
    main(["plan", str(data), *options, "--out", str(tmp_path / "plan.npz")])
    main(["report", str(tmp_path / "plan.npz"), "--out", str(page)])
    shown = json.loads(re.findall(r'id="evenstep-data">(.*?)</script>', page.read_text())[0])
    for each in shown["strategies"]:
        expected = compared[each["name"]]
        assert each["modelled_time"] == pytest.approx(expected["modelled_time"])
        parts = {name: each[name] for name in expected["parts"]}
        assert parts == pytest.approx(expected["parts"])
    today, own = (each["modelled_time"] for each in shown["strategies"][:2])
    assert shown["saving"]["times_less_time"] == pytest.approx(today / own)


def test_advice_is_planned_with_second_work() -> None:
    rng = np.random.default_rng(1)
    lengths, patches = rng.integers(10, 500, 64), rng.integers(0, 900, 64)
    recipe = Recipe(
        layout=Packed(max_tokens=600),
        topology=Topology(dp=4),
        steps=Steps(samples=8),
        second_work=SecondWork(column="patches", cost=Cost(per_token=3, per_pair=0.1)),
    )
    plan = make_plan(lengths, recipe, columns={"patches": patches})
    wider = replace(recipe, layout=Packed(max_tokens=1200))
    other = make_plan(lengths, wider, columns={"patches": patches})
    chosen = [0, 2, 4, int(step_times(plan).argmax())]
    before, after = (step_times(each)[sorted(set(chosen))].sum() for each in (plan, other))
    (budget,) = [each for each in advice(plan, make_plan) if "Twice the budget" in each.text]
    assert budget.saving == pytest.approx(1 - after / before)
