"""Every section of the planning and rollout benchmarks runs and measures what it says."""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import (
    compat,
    limits,
    padded,
    pipelines,
    quality,
    rollout_plans,
    rollout_rows,
    scaling,
    simulation,
    systems,
)
from benchmarks.approaches import (
    differencing_twice,
    heaviest_first,
    packs_then_ranks,
    ranks_then_packs,
)
from benchmarks.bench import Bench
from benchmarks.instances import instances
from benchmarks.lengths import log_normal
from benchmarks.problem import Problem, RanksAndWaves, deal_of_plan, time_of
from benchmarks.tables import Section, markdown
from evenstep import Cost, Packed, Recipe, Topology, make_plan
from tests.internals import SyncEvery

QUADRATIC = Cost(per_token=20, per_pair=1, per_micro_batch=7)


def tiny() -> tuple[Bench, list[str]]:
    """A quick run over one corpus of short samples, and the lines of progress that it shows."""
    said: list[str] = []
    corpora = {"tiny": np.arange(1, 400, dtype=np.int64)}
    return Bench(corpora=corpora, quick=True, say=said.append), said


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(quality.quality, marks=pytest.mark.slow),
        padded.padded,
        pipelines.pipelines,
        limits.limits,
        systems.systems,
        compat.functions,
        rollout_plans.planning,
        rollout_rows.selecting,
        pytest.param(scaling.scaling, marks=pytest.mark.slow),
        simulation.speed,
        pytest.param(simulation.validation, marks=pytest.mark.slow),
    ],
)
def test_a_section_has_tables_targets_and_progress(section: Callable[[Bench], Section]) -> None:
    bench, said = tiny()

    found = section(bench)

    assert found.targets
    assert said
    assert all(table.rows for table in found.tables)
    assert found.title in markdown(found)


def test_a_full_run_has_at_least_280_steps_of_every_size() -> None:
    bench, _ = tiny()
    full = Bench(corpora=dict.fromkeys("abcde", bench.corpora["tiny"]), quick=False, say=print)

    found = list(instances(full))

    assert len(found) // 2 >= 280  # each without and with a cost per micro-batch
    sizes, ranks = {len(i.lengths) for i in found}, {i.recipe.topology.dp for i in found}
    assert (min(sizes), max(sizes), min(ranks), max(ranks)) == (64, 8192, 8, 256)
    assert {i.recipe.overflow for i in found} == {"truncate", "split"}


@pytest.mark.parametrize("sync_every", ["step", "micro_batch"])
def test_a_plan_and_its_deal_take_the_same_time(sync_every: SyncEvery) -> None:
    lengths = log_normal(100, 1.0)
    recipe = Recipe(
        layout=Packed(max_tokens=32768),
        topology=Topology(dp=8),
        cost=QUADRATIC,
        sync_every=sync_every,
    )
    plan = make_plan(lengths, recipe)
    problem = Problem.of_plan(plan)

    outcome = problem.measure(*deal_of_plan(plan))

    assert (problem.lengths == lengths).all()
    assert outcome.time(sync_every) == pytest.approx(time_of(plan))
    assert time_of(plan) >= problem.slowest_rank


def test_the_measure_of_a_deal_can_be_checked_by_hand() -> None:
    problem = Problem(np.array([6, 4, 5, 1]), 8, 2, Cost(per_micro_batch=3))

    # rank 0: [6], []; rank 1: [4, 5], [1]
    outcome = problem.measure(np.array([0, 1, 1, 1]), np.array([0, 0, 0, 1]))

    assert (outcome.over_budget, outcome.micro_batches) == (1, 2)
    assert outcome.largest == 9 / 8
    assert (outcome.lock_step, outcome.rank_sum) == ((9 + 1) / 8, 10 / 8)
    assert outcome.time_by_wave == 9 + 1 + 2 * 3
    assert outcome.time_by_step == 10 + 2 * 3


@pytest.mark.parametrize(
    "rule",
    [
        ranks_then_packs,
        packs_then_ranks,
        differencing_twice,
        systems.verl,
        systems.slime,
        systems.areal_ffd,
        systems.areal_kk,
        systems.trl,
    ],
)
@pytest.mark.parametrize("count", [5, 8, 61])
def test_every_rule_deals_every_sample_once(
    rule: Callable[[Problem], RanksAndWaves], count: int
) -> None:
    problem = Problem(log_normal(count, 0.8, seed=count), 32768, 4, QUADRATIC)

    rank, wave = rule(problem)
    outcome = problem.measure(rank, wave)

    assert rank.max() < problem.ranks
    soft = rule in (systems.verl, differencing_twice)  # their budget is not a hard limit
    assert soft or outcome.over_budget == 0
    assert outcome.lock_step >= outcome.rank_sum - 1e-12


def test_verl_exceeds_the_budget_where_three_large_samples_share_two_micro_batches() -> None:
    problem = Problem(np.array([2500, 2500, 2500]), 4096, 1, QUADRATIC)

    outcome = problem.measure(*systems.verl(problem))

    assert outcome.micro_batches == 2
    assert outcome.largest == 5000 / 4096


def test_the_heaviest_pack_of_every_rank_is_in_the_first_wave() -> None:
    wave = heaviest_first(np.array([1.0, 5.0, 3.0]), np.array([0, 0, 1]))

    assert wave.tolist() == [1, 0, 0]


def test_two_dimensional_best_fit_keeps_both_limits() -> None:
    share = np.array([[0.9, 0.1], [0.1, 0.9], [0.6, 0.6]])

    assert {limits.best_fit(share, score) for score in limits.SCORES.values()} == {2}


def test_waiting_and_mixed_waves_of_a_column() -> None:
    recipe = Recipe(layout=Packed(max_tokens=4), topology=Topology(dp=2), balance="none")
    plan = make_plan([4, 4, 4, 4], recipe)  # ranks hold samples [0, 2] and [1, 3]
    patches = np.array([6, 2, 0, 4])

    assert limits.waiting(plan, patches, "micro_batch") == (6 + 4) / 6
    assert limits.waiting(plan, patches, "step") == 1.0
    assert limits.mixed_waves(plan, patches) == 1


def test_a_series_stops_before_a_size_that_would_take_too_long() -> None:
    bench, said = tiny()
    series = scaling.Series("sizes", (1, 10, 100), lambda size: lambda: size)
    series.seconds = {1: 1.0, 10: 100.0}  # an exponent of 2

    assert series.exponent == pytest.approx(2)
    assert series._predicted(100) == pytest.approx(10_000)

    series.sizes = (100,)
    series.run(bench)

    assert said == []
    assert not series.complete
