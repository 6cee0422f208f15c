"""Padded plans have the least modelled time: against other ways to cut and every possible cut."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost, Limits, Padded, Plan, Recipe, Steps, Topology, make_plan
from evenstep.testing import assert_valid_plan
from tests.examples import examples
from tests.internals import Segments, SyncEvery, cut_rows, problem_of, step_times, units_of

COSTS = [
    Cost(),
    Cost(per_token=24576, per_pair=1),
    Cost(per_token=4096, per_pair=1),
    Cost(per_micro_batch=100),
    Cost(per_token=24576, per_pair=1, per_micro_batch=5e6),
]
SYNC: list[SyncEvery] = ["micro_batch", "step"]
KINDS = ["uniform", "narrow", "log-normal 0.6", "log-normal 1.0", "log-normal 1.5", "bimodal"]


def generated(kind: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        lengths = rng.uniform(1, 4096, count)
    elif kind == "narrow":
        lengths = rng.normal(1000, 50, count)
    elif kind == "bimodal":
        long = rng.random(count) < 0.2
        lengths = np.where(long, rng.normal(3000, 200, count), rng.normal(200, 40, count))
    else:
        lengths = rng.lognormal(np.log(600), float(kind.split()[1]), count)
    return np.clip(lengths, 1, 8192).astype(np.int64)


def time_of(plan: Plan) -> float:
    """The modelled time of a plan of one step."""
    costs = plan.costs.reshape(plan.num_ranks, -1)
    if plan.recipe.sync_every == "micro_batch":
        return float(costs.max(axis=0).sum())
    return float(costs.sum(axis=1).max())


def others(recipe: Recipe) -> list[Recipe]:
    """The same recipe with every other way to cut and to deal."""
    assert isinstance(recipe.layout, Padded)
    greedy = replace(recipe, layout=replace(recipe.layout, cut="greedy"))
    return [
        greedy,
        replace(recipe, balance="lpt"),
        replace(recipe, balance="karmarkar_karp"),
        replace(recipe, balance="stride"),
        replace(recipe, balance="none"),
    ]


def cut_into(lengths: np.ndarray, recipe: Recipe, wanted: int | None) -> tuple[np.ndarray, int]:
    """(address of each row, waves)."""
    assert isinstance(recipe.layout, Padded)
    count = len(lengths)
    segments = Segments(np.arange(count), np.zeros(count, np.int64), lengths)
    units = units_of(segments, recipe, {}, None)
    problem = problem_of(units, recipe, recipe.layout, lengths)
    address, waves = cut_rows(problem, recipe.layout, wanted)
    return address[problem.units.of_segment], waves


@pytest.mark.parametrize("sync_every", SYNC)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "ranks"), [(64, 8), (512, 8), (256, 64)])
def test_generated_lengths_are_never_slower_than_other_cuts(
    kind: str, count: int, ranks: int, sync_every: SyncEvery
) -> None:
    lengths = generated(kind, count, seed=count + ranks)
    for cost in COSTS:
        for layout in (Padded(max_tokens=16384), Padded(samples=4)):
            recipe = Recipe(
                layout=layout, topology=Topology(dp=ranks), cost=cost, sync_every=sync_every
            )
            plan = make_plan(lengths, recipe)
            assert_valid_plan(plan)
            for other in others(recipe):
                assert time_of(plan) <= time_of(make_plan(lengths, other)) * (1 + 1e-9), other


@examples(150)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    ranks=st.sampled_from([1, 2, 3, 8]),
    layout=st.sampled_from(
        [
            Padded(max_tokens=64),
            Padded(max_tokens=100, round_to=8),
            Padded(samples=3),
            Padded(samples=3, max_tokens=128),
            Padded(max_tokens=256, pad_to=64),
            Padded(samples=3, pad_to=64),
        ]
    ),
    cost=st.sampled_from([*COSTS, Cost(per_pair=0.1, per_segment=3)]),
    sync_every=st.sampled_from(SYNC),
    limited=st.booleans(),
    seed=st.none() | st.integers(0, 100),
)
def test_no_other_cut_is_faster(
    lengths: list[int],
    ranks: int,
    layout: Padded,
    cost: Cost,
    sync_every: SyncEvery,
    limited: bool,
    seed: int | None,
) -> None:
    rng = np.random.default_rng(seed)
    columns = {"patches": rng.integers(0, 10, len(lengths))} if limited else None
    groups = None if seed is None else rng.permutation(np.arange(len(lengths)) // 2)
    if layout.samples is None and seed is not None:
        layout = replace(layout, max_tokens=256)  # two rows of 64 must fit
    recipe = Recipe(
        layout=layout,
        topology=Topology(dp=ranks),
        cost=cost,
        sync_every=sync_every,
        limits=Limits(columns={"patches": 20}) if limited else Limits(),
    )
    plan = make_plan(lengths, recipe, groups=groups, columns=columns)
    assert_valid_plan(plan)
    for other in others(recipe)[:4]:
        slower = make_plan(lengths, other, groups=groups, columns=columns)
        assert time_of(plan) <= time_of(slower) * (1 + 1e-9), other


def test_equal_rows_give_equal_micro_batches() -> None:
    recipe = Recipe(layout=Padded(max_tokens=65536), topology=Topology(dp=8))
    for sync_every in SYNC:
        plan = make_plan([2048] * 64, replace(recipe, sync_every=sync_every))
        assert plan.rows.tolist() == [8] * 8


def test_wide_and_narrow_rows_run_in_waves_of_their_own() -> None:
    recipe = Recipe(layout=Padded(max_tokens=4096), topology=Topology(dp=8))
    plan = make_plan([512] * 8 + [16] * 56, recipe)
    assert plan.costs.reshape(8, -1).tolist() == [[512, 7 * 16]] * 8
    plan = make_plan([512] * 8 + [16] * 56, replace(recipe, sync_every="step"))
    assert plan.costs.reshape(8, -1).sum(axis=1).tolist() == [512 + 7 * 16] * 8


def test_a_wave_with_one_wide_row_is_filled_with_narrow_rows() -> None:
    # Levels 80 and 50: the narrow rows fill what the row of 80 leaves, not the rows of 50.
    lengths = [80, 50, 50, 50, *[2] * 80]
    recipe = Recipe(layout=Padded(max_tokens=160), topology=Topology(dp=4))
    plan = make_plan(lengths, recipe)
    assert time_of(plan) <= 80 + 50


def least_of_all_cuts(
    widths: np.ndarray, recipe: Recipe, ranks: int, waves: int, most: np.ndarray
) -> float:
    """The least time of any contiguous cut, dealt in every way that can be best."""
    price, n = recipe.cost.of_lengths(widths), len(widths)
    empty = float(recipe.cost.of_lengths(np.array([1]))[0])
    best = np.inf
    for count in range(min(n, ranks * waves)):
        for cuts in combinations(range(1, n), count):
            bounds = np.array([0, *cuts, n])
            rows, widest = np.diff(bounds), bounds[1:] - 1
            if (rows > most[widest]).any():
                continue
            costs = np.full(ranks * waves, empty)
            costs[: count + 1] = rows * price[widest]
            costs = np.sort(costs)[::-1]
            if recipe.sync_every == "micro_batch":
                best = min(best, float(costs[::ranks].sum()))
            else:
                best = min(best, least_makespan(costs.tolist(), ranks, waves))
    return best


def least_makespan(costs: list[float], ranks: int, each: int) -> float:
    """The least of the largest sums of `each` costs per rank, over all deals."""
    states = {((0.0, 0),) * ranks}
    for cost in costs:
        states = {
            tuple(sorted([*state[:r], (state[r][0] + cost, state[r][1] + 1), *state[r + 1 :]]))
            for state in states
            for r in range(ranks)
            if state[r][1] < each
        }
    return min(max(load for load, _ in state) for state in states)


@pytest.mark.parametrize("sync_every", SYNC)
def test_small_plans_are_close_to_the_best_of_all_cuts(sync_every: SyncEvery) -> None:
    over = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        lengths = generated(KINDS[seed % len(KINDS)], int(rng.integers(2, 8)), seed) // 16 + 1
        ranks, budget = int(rng.integers(1, 4)), int(lengths.max() * rng.uniform(1, 4))
        layout, topology = Padded(max_tokens=budget), Topology(dp=ranks)
        recipe = Recipe(
            layout=layout, topology=topology, cost=COSTS[seed % 3], sync_every=sync_every
        )
        widths = np.sort(lengths)
        _, fewest = cut_into(lengths, recipe, 1)
        for waves in (fewest, fewest + 1):
            address, found = cut_into(lengths, recipe, waves)
            assert found == waves
            rows = np.bincount(address, minlength=ranks * waves)
            widest = np.ones(ranks * waves, np.int64)
            np.maximum.at(widest, address, lengths)
            costs = (np.maximum(rows, 1) * recipe.cost.of_lengths(widest)).reshape(waves, ranks)
            lock_step = sync_every == "micro_batch"
            time = costs.max(axis=1).sum() if lock_step else costs.sum(axis=0).max()
            best = least_of_all_cuts(widths, recipe, ranks, waves, budget // widths)
            assert time >= best * (1 - 1e-9)
            if waves == 1:
                assert time <= best * (1 + 1e-9)
            over.append(time / best - 1)
    assert np.mean(over) < 0.004
    assert np.mean(np.array(over) < 1e-9) > 0.9


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(SYNC),
    st.sampled_from([0.0, 0.01, 0.1, 0.9]),
)
def test_further_micro_batches_save_the_asked_share(
    lengths: list[int], ranks: int, sync_every: SyncEvery, share: float
) -> None:
    layout = Padded(max_tokens=128)
    recipe = Recipe(
        layout=layout, topology=Topology(dp=ranks), sync_every=sync_every, min_saving=share
    )

    def time(wanted: int | None) -> tuple[float, int]:
        address, waves = cut_into(np.array(lengths), recipe, wanted)
        rows, widest = np.bincount(address, minlength=ranks * waves), np.ones(ranks * waves)
        np.maximum.at(widest, address, lengths)
        costs = (np.maximum(rows, 1) * widest).reshape(waves, ranks)
        lock_step = sync_every == "micro_batch"
        return float(costs.max(axis=1).sum() if lock_step else costs.sum(axis=0).max()), waves

    fewest_time, fewest = time(1)
    found_time, found = time(None)
    greedy = make_plan(lengths, replace(recipe, layout=Padded(max_tokens=128, cut="greedy")))
    assert found_time <= time_of(greedy)
    if found != len(greedy.costs) // ranks:
        assert fewest <= found <= fewest + 4
        if found > fewest:
            assert found_time <= fewest_time * (1 - share) * (1 + 1e-9)


def test_micro_batches_of_a_cost_are_only_added_where_they_pay() -> None:
    lengths = [512] * 8 + [16] * 56
    recipe = Recipe(layout=Padded(max_tokens=4096), topology=Topology(dp=8))
    counts = [
        len(make_plan(lengths, replace(recipe, cost=Cost(per_micro_batch=fixed))).costs) // 8
        for fixed in (0, 100, 1000)
    ]
    assert counts == [2, 2, 1]


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=80),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(SYNC),
)
def test_steps_of_micro_batches_keep_their_number(
    lengths: list[int], wanted: int, sync_every: SyncEvery
) -> None:
    recipe = Recipe(
        layout=Padded(max_tokens=64),
        topology=Topology(dp=2, pp=2, vpp=2, variable_seq_lengths=True),
        steps=Steps(micro_batches=2 * wanted),
        sync_every=sync_every,
    )
    assert_valid_plan(make_plan(lengths, recipe))


@pytest.mark.parametrize(("ranks", "time"), [(2, 1786), (3, 1227)])
def test_waves_of_two_kinds_of_lengths_are_apart(ranks: int, time: float) -> None:
    long = [425, 453, 466, 468, 479, 586]
    short = [6, 7, 12, 18, 18, 20, 21, 22, 23, 23, 24, 24, 26, 26, 29, 31, 33, 35]
    plan = make_plan(
        long + short, Recipe(layout=Padded(max_tokens=6000), topology=Topology(dp=ranks))
    )
    assert float(step_times(plan)[0]) <= time


def test_empty_micro_batches_take_a_unit_of_their_wave() -> None:
    lengths = [153, 44, 36, 233, 275, 146, 14, 265, 164, 196]
    lengths += [112, 74, 156, 151, 150, 164, 22, 164, 260, 186]
    patches = [5, 14, 21, 9, 19, 29, 0, 0, 15, 24, 2, 11, 0, 0, 0, 0, 1, 18, 1, 0]
    recipe = Recipe(
        layout=Padded(samples=3),
        topology=Topology(dp=5),
        limits=Limits(columns={"patches": 30}),
        cost=Cost(per_pair=0.001),
    )
    plan = make_plan(lengths, recipe, columns={"patches": patches})
    held = np.diff(plan.segment_offsets).reshape(5, -1)
    waves = held[:, (held == 0).any(axis=0)]
    assert waves.max(initial=0) <= 1  # else one of two units could move to the empty micro-batch


def test_the_last_step_may_have_as_many_micro_batches_as_others_but_no_more() -> None:
    for asked, slots in ((1, [24]), (2, [8, 2]), (3, [8, 2])):
        recipe = Recipe(layout=Padded(max_tokens=24), steps=Steps(micro_batches=asked))
        plan = make_plan([8, 1, 1], recipe)
        assert_valid_plan(plan)
        assert plan.slots.tolist() == slots


@pytest.mark.parametrize(("sync_every", "most"), [("micro_batch", 1.08), ("step", 1.015)])
def test_equal_sizes_cost_little(sync_every: SyncEvery, most: float) -> None:
    ratios = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(6, 1, int(rng.integers(24, 128))), 1, 4096).astype(np.int64)
        recipe = Recipe(
            layout=Padded(max_tokens=4096), topology=Topology(dp=4), sync_every=sync_every
        )
        equal = make_plan(lengths, replace(recipe, equal_sizes=True))
        assert_valid_plan(equal)
        ratios.append(time_of(equal) / time_of(make_plan(lengths, recipe)))
    assert np.mean(ratios) <= most
