"""The report: numbers of bounded size, savings, advice, times of runs."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost, Packed, Padded, Plan, Recipe, Sharing, Steps, Topology, make_plan
from evenstep.errors import InputError
from evenstep.report import Entry, Report, RunLog, advice, fit_cost, report_page
from tests.examples import examples
from tests.internals import Bins, Thinned, histogram, step_times, typical_error
from tests.internals import line_chart as lines

COST = Cost.named("llama-3-8b")


def plan_of(layout: Any, samples: int = 256, each: int = 64, **options: Any) -> Plan:
    lengths = np.clip(np.random.default_rng(3).lognormal(6.6, 1.1, samples), 8, 8000).astype(int)
    steps = Steps(samples=each)
    recipe = Recipe(layout=layout, topology=Topology(dp=4), steps=steps, cost=COST, **options)
    return make_plan(lengths, recipe)


PACKED = plan_of(Packed(max_tokens=8192))
TODAY = plan_of(Padded(samples=8), balance="none")


def records(plan: Plan, speed: Any = 1.0, seconds: float = 2.0) -> list[dict[str, Any]]:
    """A run whose micro-batches take 1e-14 seconds per cost, times `speed` of their rank."""
    found = []
    for step in range(plan.num_steps):
        cells = plan.cell_offsets[4 * step], plan.cell_offsets[4 * step + 4]
        costs = plan.costs[slice(*cells)].reshape(4, -1)
        busy = 1e-14 * costs * np.broadcast_to(speed, 4)[:, None]
        found.append(
            {
                "step": step,
                "loss": 3.0 - step,
                "tokens_per_second": 1000.0,
                "seconds/total": seconds,
                "seconds/wait": 0.1,
                "micro_batches/cost": costs.tolist(),
                "micro_batches/busy": busy.tolist(),
                "micro_batches/work": [
                    [
                        (each.length.sum(), (each.length**2).sum(), len(each.length))
                        for each in (micro.segments for micro in plan[step, rank])
                    ]
                    for rank in range(4)
                ],
            }
        )
    return found


def data_of(page: str) -> Any:
    return json.loads(re.findall(r'id="evenstep-data">(.*?)</script>', page)[0])


def test_the_page_holds_the_numbers_of_the_report() -> None:
    entries = [
        Entry("today", TODAY),
        Entry("your settings", PACKED),
        Entry("no", fault="<script>"),
    ]
    runs = {"your settings": RunLog.of(records(PACKED))}
    report = Report(title="</script><b>", plan=PACKED, entries=entries, runs=runs)
    page = report_page(report)
    data = data_of(page)
    assert data == json.loads(json.dumps(report.numbers()))
    assert page.count("</script>") == 2
    assert not re.search(r"""(src|href)=|url\(["']?http|@import""", page)
    assert data["plan"] == json.loads(json.dumps(PACKED.stats()))
    assert data["strategies"][2] == {"name": "no", "fault": "<script>"}


def test_a_saving_is_time_slots_and_gpu_hours() -> None:
    entries = [Entry("today", TODAY), Entry("your settings", PACKED)]
    runs = {"your settings": RunLog.of(records(PACKED, seconds=900.0))}
    saving = Report(title="t", plan=PACKED, entries=entries, runs=runs).saving
    assert saving is not None
    ratio = step_times(TODAY).sum() / step_times(PACKED).sum()
    assert saving.times_less_time == pytest.approx(ratio)
    assert saving.slots == int(TODAY.slots.sum() - PACKED.slots.sum())
    assert saving.gpu_hours == pytest.approx(4 * 4 * 900 / 3600 * (ratio - 1))
    assert Report(title="t", plan=PACKED).saving is None


@examples(40)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=300))
def test_bins_hold_every_sample_and_token_once(lengths: list[int]) -> None:
    bins = Bins.of(np.array(lengths))
    assert bins.samples.sum() == len(lengths)
    assert bins.tokens.sum() == sum(lengths)
    assert (np.diff(bins.edges) > 0).all()
    assert bins.edges[0] <= min(lengths) <= max(lengths) < bins.edges[-1]
    assert len(bins.samples) <= 40
    for at, n in enumerate(bins.samples):
        assert n == sum(bins.edges[at] <= length < bins.edges[at + 1] for length in lengths)
    assert histogram("Lengths", bins).count("<rect") == len(bins.samples)


@examples(40)
@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), max_size=400),
    st.integers(1, 50),
)
def test_a_thinned_line_keeps_extremes_and_the_mean(values: list[float], most: int) -> None:
    array = np.array(values, np.float64)
    line = Thinned.of(np.arange(len(array), dtype=float), array, most)
    real = array[np.isfinite(array)]
    assert len(line.at) == min(most, len(real))
    if len(real):
        assert line.least.min() == real.min()
        assert line.most.max() == real.max()
        assert (line.least <= line.mean + 1e-6).all()
        assert (line.mean <= line.most + 1e-6).all()
        assert "<svg" in lines("t", {"a": line}, "x")
    else:
        assert lines("t", {"a": line}, "x") == ""


def test_a_page_of_many_steps_and_samples_stays_small() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 8_000)
    plan = make_plan(lengths, Recipe(layout=Packed(max_tokens=64), steps=Steps(samples=8)))
    assert plan.num_steps == 1000
    assert len(report_page(Report(title="t", plan=plan))) < 300_000


def test_planned_time_is_measured_time_if_costs_are_right() -> None:
    log = RunLog.of(records(PACKED))
    planned, measured = log.step_times("micro_batch")
    assert planned == pytest.approx(measured)
    assert measured == pytest.approx(1e-14 * step_times(PACKED))
    assert typical_error(*log.micro_batches()) == pytest.approx(0, abs=1e-9)
    assert log.per_second() == pytest.approx(1000.0)
    assert log.waiting_share() == pytest.approx(0.05)
    fitted = fit_cost(log)
    assert fitted.error == pytest.approx(0, abs=1e-3)
    assert fitted.num_micro_batches == sum(busy.size for busy in log.busy[1:])
    lengths = np.array([7, 19])
    planned = 1e-14 * PACKED.recipe.cost.of_lengths(lengths)
    assert fitted.cost.of_lengths(lengths) == pytest.approx(planned, rel=1e-3)


def test_too_few_micro_batches_are_refused() -> None:
    with pytest.raises(InputError, match="at least 16 timed micro-batches"):
        fit_cost(records(PACKED)[:2])


def test_a_log_without_times_has_none() -> None:
    log = RunLog.of([{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}])
    assert np.isnan([log.per_second(), log.waiting_share(), log.seconds_per_cost()]).all()
    assert len(log.micro_batches()[0]) == 0
    entries = [Entry("today", TODAY), Entry("your settings", PACKED)]
    runs = {"your settings": log}
    data = data_of(report_page(Report(title="t", plan=PACKED, entries=entries, runs=runs)))
    assert data["saving"]["gpu_hours"] is None
    assert data["runs"]["your settings"]["last_loss"] == 0.5
    assert data["runs"]["your settings"]["tokens_per_second"] is None


def test_a_slow_rank_is_found() -> None:
    from tests.internals import of_ranks

    log = RunLog.of(records(PACKED, speed=[1.0, 1.0, 1.5, 1.0]))
    (found,) = of_ranks(log.rank_speeds())
    assert found.text.startswith("Rank 2 takes 50 % longer")
    assert of_ranks(RunLog.of(records(PACKED)).rank_speeds()) == []


def test_the_sample_that_sets_the_pace_is_named_with_what_would_help() -> None:
    lengths = np.full(64, 500)
    lengths[17] = 60_000
    topology = Topology(dp=4)
    recipe = Recipe(layout=Packed(max_tokens=65536), topology=topology, cost=COST)
    plan = make_plan(lengths, recipe)
    first = advice(plan, make_plan)[0]
    shared = make_plan(lengths, replace(recipe, sharing=Sharing()))
    saved = 1 - step_times(shared).sum() / step_times(plan).sum()
    assert first.saving == pytest.approx(saved)
    assert first.text.startswith(
        f"Sample 17 with 60,000 tokens sets the pace of step 0: sharing=Sharing() would cut the "
        f"step by {100 * saved:.0f} %."
    )
    assert not any("sets the pace" in each.text for each in advice(shared, make_plan))


def test_where_ranks_cannot_share_context_parallelism_is_advised() -> None:
    lengths = np.full(64, 500)
    lengths[17] = 60_000
    dear = replace(COST, per_exchange=1e30)
    recipe = Recipe(layout=Packed(max_tokens=65536), topology=Topology(dp=4), cost=dear)
    plan = make_plan(lengths, recipe)
    first = advice(plan, make_plan)[0]
    ranks = int(re.findall(r"step 0: context parallelism (\d)", first.text)[0])
    shared = Topology(dp=4 // ranks, cp=ranks)
    layout = Packed(max_tokens=65536 * ranks)
    other = make_plan(lengths, Recipe(layout=layout, topology=shared, cost=COST))
    saved = 1 - step_times(other).sum() / ranks / step_times(plan).sum()
    assert first.saving == pytest.approx(saved)
    assert f"by {100 * saved:.0f} %" in first.text


def test_advice_is_planned_and_sorted_by_what_it_saves() -> None:
    found = advice(TODAY, make_plan)
    assert found[0].text.startswith("A packed layout would cut the time by ")
    savings = [each.saving for each in found if each.saving is not None]
    assert savings == sorted(savings, reverse=True)
    assert all(saving >= 0.02 for saving in savings)
    assert any("balance='refined'" in each.text for each in advice(uneven(), make_plan))


def uneven() -> Plan:
    return plan_of(Packed(max_tokens=8192), balance="none")


def test_advice_on_larger_steps_says_what_happens_to_updates() -> None:
    lengths = np.tile([4000, *[100] * 15], 8)
    recipe = Recipe(
        layout=Packed(max_tokens=4000), topology=Topology(dp=4), steps=Steps(samples=16)
    )
    said = [each.text for each in advice(make_plan(lengths, recipe), make_plan)]
    (text,) = [each for each in said if "32 samples per step instead of 16" in each]
    assert text.endswith("and halve the number of updates.")


def test_a_plan_that_cannot_be_better_says_so() -> None:
    plan = make_plan([100] * 8, Recipe(layout=Packed(max_tokens=800), cost=COST))
    assert [each.text for each in advice(plan, make_plan)] == [
        "No change that was tried saves more than 2 % of the time."
    ]
