"""Bounds on packs and time never exceed what the best of all plans reaches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost, Packed, Padded, Recipe, Steps, Topology, make_plan
from tests.core.exhaustive import (
    fewest_packs,
    least_lock_step,
    least_makespan,
    least_padded_step,
    least_step,
)
from tests.examples import examples
from tests.internals import (
    FloatArray,
    Floors,
    IntArray,
    StepFloor,
    SyncEvery,
    cut_times,
    lock_steps,
    makespans,
    measures_module,
    pack_bound,
    pack_bounds,
    packs_of_first,
)

MORE = 1 + 1e-9
COSTS = [(1, 0, 0), (1, 1, 0), (1, 0.05, 0), (0, 1, 0), (1, 0.1, 3), (0, 0, 1), (1, 0, 5)]

Items = tuple[IntArray, FloatArray, int]


def lock_step_bound(sizes: IntArray, costs: FloatArray, capacity: int, ranks: int) -> float:
    """The bound of one step."""
    return float(lock_steps(sizes[None], costs[None] * 1.0, capacity, ranks)[0])


@st.composite
def items(draw: st.DrawFn, most: int = 7) -> Items:
    """(sizes, costs, capacity); costs by a model, or with what a group adds."""
    capacity = draw(st.sampled_from([8, 10, 12, 17, 30, 100]))
    bounds = st.integers(1, capacity + 2) if draw(st.booleans()) else st.integers(1, capacity // 2)
    sizes = np.array(draw(st.lists(bounds, min_size=1, max_size=most)))
    token, pair, segment = draw(st.sampled_from(COSTS))
    costs = token * sizes + pair * sizes**2.0 + segment
    if draw(st.booleans()):
        added = st.lists(st.integers(0, 20), min_size=len(sizes), max_size=len(sizes))
        costs = costs + np.array(draw(added))
    return sizes, costs, capacity


@examples(300)
@given(items(), st.integers(2, 4))
def test_no_plan_is_faster_than_the_lock_step_bound(drawn: Items, ranks: int) -> None:
    sizes, costs, capacity = drawn
    best = least_lock_step(sizes, costs, capacity, ranks)
    assert lock_step_bound(sizes, costs, capacity, ranks) <= best * MORE


def random_items(rng: np.random.Generator) -> Items:
    """Like `items`, up to 9, without shrinking."""
    capacity = int(rng.choice([8, 10, 12, 17, 30, 100]))
    count = int(rng.integers(1, 9)) if rng.random() < 0.9 else 9
    spread = np.clip(rng.lognormal(np.log(capacity / 4), 1, count), 1, capacity + 3)
    near = rng.choice([capacity // 2, capacity // 2 + 1, capacity // 3, capacity], count)
    sizes = [rng.integers(1, capacity + 1, count), spread.astype(np.int64), near][rng.integers(3)]
    token, pair, segment = COSTS[rng.integers(len(COSTS))]
    costs = token * sizes + pair * sizes**2.0 + segment
    return sizes, costs + rng.integers(0, 20, count) * (rng.random() < 0.2), capacity


def test_bounds_hold_for_a_thousand_small_instances() -> None:
    rng = np.random.default_rng(0)
    for _ in range(1000):
        sizes, costs, capacity = random_items(rng)
        ranks = int(rng.integers(2, 4))
        wanted = least_lock_step(sizes, costs, capacity, ranks)
        assert lock_step_bound(sizes, costs, capacity, ranks) <= wanted * MORE
        assert makespans(costs[None], ranks)[0] <= least_makespan(costs, ranks) * MORE
        order = np.argsort(-costs, kind="stable")
        held = np.minimum(sizes, capacity)[order]
        packs = packs_of_first(held[None] * 1.0, np.array([[capacity * 1.0]]))[0]
        for count in range(1, min(len(sizes), 7) + 1):
            assert packs[count - 1] <= fewest_packs(held[:count], capacity)


@given(st.lists(items(), min_size=1, max_size=4), st.integers(2, 4))
def test_steps_measured_together_have_the_bounds_of_each(drawn: list[Items], ranks: int) -> None:
    capacity = drawn[0][2]
    longest = max(len(sizes) for sizes, _, _ in drawn)
    sizes, costs = np.zeros((len(drawn), longest), np.int64), np.zeros((len(drawn), longest))
    for row, (size, cost, _) in enumerate(drawn):
        sizes[row, : len(size)], costs[row, : len(size)] = size, cost
    together = lock_steps(sizes, costs, capacity, ranks)
    slowest = makespans(costs, ranks)
    for row, (size, cost, _) in enumerate(drawn):
        # Prices are chosen by position, so a bound may differ; it holds either way.
        assert together[row] <= least_lock_step(size, cost, capacity, ranks) * MORE
        assert slowest[row] <= least_makespan(cost, ranks) * MORE
        assert together[row] * MORE >= cost.sum() / ranks


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=4))
def test_packs_of_several_steps_are_at_least_as_many_as_volume(drawn: list[list[int]]) -> None:
    rows = np.zeros((len(drawn), max(map(len, drawn))), np.int64)
    for row, sizes in enumerate(drawn):
        rows[row, : len(sizes)] = sorted(sizes, reverse=True)
    for sizes, bound in zip(drawn, pack_bounds(rows, 32).tolist(), strict=True):
        held = np.minimum(sizes, 32)
        assert -(-int(held.sum()) // 32) <= bound
        assert bound >= pack_bound(held, 32)
        if len(sizes) <= 7:
            assert bound <= fewest_packs(np.array(sizes), 32)


def test_a_step_of_many_equal_samples_needs_no_more_packs_than_they_fill() -> None:
    # Tenths of a pack do not add up in floats: 100,000 of them are more than 10,000.
    sizes = np.full(100_000, 1024)
    assert pack_bound(sizes, 10_240) == pack_bounds(sizes[None], 10_240)[0] == 10_000


@pytest.mark.parametrize(
    ("sizes", "costs", "capacity", "ranks", "time"),
    [
        # Each of two long items has its own wave partner; short ones fill 10 slots at most.
        ([10, 1, 1, 1], [100, 1, 1, 1], 10, 2, 100),
        # Three items over half: the third starts a second wave.
        ([6, 6, 6], [6, 6, 6], 10, 2, 12),
        # 5 shares a pack with no item over half, so it starts the second wave.
        ([6, 6, 5], [36, 36, 25], 10, 2, 61),
        # A full pack of ones costs 10: the first wave wastes 90, the second holds what is left.
        ([10] + [1] * 30, [100] + [1] * 30, 10, 2, 110),
        # Even without waste.
        ([5, 5, 5, 5], [5, 5, 5, 5], 10, 2, 10),
    ],
)
def test_lock_step_bounds_that_can_be_checked_by_hand(
    sizes: list[int], costs: list[float], capacity: int, ranks: int, time: float
) -> None:
    assert lock_step_bound(np.array(sizes), np.array(costs), capacity, ranks) == time


def test_two_of_five_large_items_share_a_rank_with_a_small_one() -> None:
    # No rank of three can hold at most 9: {5, 5}, {5, 4}, {4, 4} are 10, 9, 8, and 3 is left over.
    assert makespans(np.array([[5.0, 5, 5, 4, 4, 3]]), 3)[0] >= 9


OPTIONS: list[dict[str, Any]] = [
    {},
    {"topology": Topology(dp=3)},
    {"topology": Topology(dp=2, pp=2)},
    {"topology": Topology(dp=2, pp=2, vpp=2)},
    {"topology": Topology(dp=2, pp=2, vpp=2, variable_seq_lengths=True)},
    {"equal_tokens": True},
]
MODELS = [
    Cost(),
    Cost(per_pair=1),
    Cost(per_pair=0.1, per_segment=3, per_micro_batch=7),
    Cost(per_token=0, per_pair=1, per_micro_batch=5),
]


@examples(200)
@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=2), min_size=1, max_size=4),
    st.sampled_from(OPTIONS),
    st.sampled_from(MODELS),
    st.sampled_from([1, 4]),
    st.booleans(),
)
def test_no_plan_with_groups_one_width_or_second_work_is_below_the_floor(
    groups: list[list[int]], options: dict[str, Any], cost: Cost, round_to: int, twice: bool
) -> None:
    recipe = Recipe(
        layout=Packed(max_tokens=24, round_to=round_to),
        cost=cost,
        **{"topology": Topology(dp=2), **options},
    )
    second = [float(7 * (sum(held) % 3)) for held in groups] if twice else None
    best = least_step(recipe, groups, second)
    aligned = np.concatenate(groups)
    unit_of = np.repeat(np.arange(len(groups)), [len(held) for held in groups])
    extra = None if second is None else np.array(second)
    choices: tuple[SyncEvery, ...] = ("micro_batch", "step")
    for sync_every in choices:
        # A step's slowest rank takes no longer than its waves together.
        changed = replace(recipe, sync_every=sync_every)
        floor = StepFloor(changed, aligned, unit_of, extra)
        assert floor.times(np.array([recipe.topology.multiple]))[0][0] <= best * MORE


PADDED_COSTS = [
    Cost(),
    Cost(per_pair=0.1),
    Cost(per_micro_batch=3),
    Cost(per_pair=0.2, per_segment=2, per_micro_batch=20),
    Cost(per_micro_batch=200),
]


def test_no_padded_plan_of_a_thousand_small_steps_is_below_the_floor() -> None:
    rng, reached = np.random.default_rng(0), 0
    for _ in range(1000):
        budget = int(rng.choice([16, 24, 40]))
        bounds: dict[str, Any] = [{}, {"samples": 3}, {"round_to": 4}][rng.integers(3)]
        recipe = Recipe(
            layout=Padded(max_tokens=budget, **bounds),
            topology=Topology(dp=int(rng.integers(1, 5))),
            cost=PADDED_COSTS[rng.integers(len(PADDED_COSTS))],
        )
        lengths = np.clip(rng.lognormal(2, 1, rng.integers(1, 8)), 1, 16).astype(np.int64)
        best = least_padded_step(recipe, lengths)
        floor = StepFloor(recipe, lengths).times(np.array([1]))[0][0]
        assert floor <= best * MORE
        reached += floor * MORE >= best
        once = StepFloor(replace(recipe, sync_every="step"), lengths).times(np.array([1]))[0][0]
        assert once <= best * MORE  # its slowest rank takes no longer than its waves together
    assert reached > 600


def test_padded_steps_measured_together_have_the_floor_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(1)
    recipe = Recipe(
        layout=Padded(max_tokens=64),
        topology=Topology(dp=2),
        steps=Steps(samples=12),
        cost=Cost(per_micro_batch=9),
    )
    floors = Floors(make_plan(rng.integers(1, 30, 40), recipe))
    together = floors.of_steps()
    assert [floor.binds for floor in together] == ["cuts"] * 4
    monkeypatch.setattr(measures_module, "_TOGETHER", 1)  # segments: one step at a time
    assert together == floors.of_steps()


@pytest.mark.parametrize(
    ("rows", "fits", "ranks", "price", "time"),
    [
        # Two micro-batches of 8 8 and 3 3; 8 alone and 8 3 3 would be wider.
        ([8, 8, 3, 3], [2, 2, 5, 5], 1, 4, 2 * 8 + 2 * 3 + 2 * 4),
        # At a low price every row is alone.
        ([8, 5, 3], [4, 4, 4], 1, 0.5, 16 + 3 * 0.5),
        # One wave: 9 alone, and 5 4 on the other rank.
        ([9, 5, 4], [3, 3, 3], 2, 100, 10 + 100),
    ],
)
def test_cuts_of_padded_rows_that_can_be_checked_by_hand(
    rows: list[float], fits: list[int], ranks: int, price: float, time: float
) -> None:
    bound = cut_times(np.array([rows]) * 1.0, np.array([fits]), ranks, price, np.array([1]), 1)
    assert bound[0] == pytest.approx(time, rel=1e-4)
    assert bound[0] <= time
