"""What a plan says of itself beside what any plan could reach: cases to check by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evenstep import (
    Cost,
    Limits,
    Packed,
    Padded,
    Recipe,
    SecondWork,
    Steps,
    Topology,
    make_plan,
)
from tests.internals import Floor, Floors, step_times


def floor(lengths: list[int], recipe: Recipe, **about: Any) -> Floor:
    """The floor of the one step."""
    plan = make_plan(lengths, recipe, **about)
    return Floors(plan).of_steps()[0]


def test_a_greedy_cut_on_one_rank_is_not_proved_the_best() -> None:
    lengths = [2, 8, 4, 16, 28, 32, 2, 32]
    greedy = make_plan(lengths, Recipe(layout=Padded(max_tokens=32, round_to=4, cut="greedy")))
    optimal = make_plan(lengths, Recipe(layout=Padded(max_tokens=32, round_to=4)))
    # Each row at its own width, rounded: 4 + 8 + 4 + 16 + 28 + 32 + 4 + 32.
    assert (greedy.costs.sum(), optimal.costs.sum()) == (140, 128)
    assert greedy.stats()["time_over_floor"] == 140 / 128
    assert not greedy.stats()["balance_optimal"]
    assert optimal.stats()["balance_optimal"]


def test_a_wasteful_packer_is_not_proved_the_best() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 64)
    recipe = Recipe(
        layout=Packed(max_tokens=64, packer="concatenative"),
        balance="stride",
        cost=Cost(per_micro_batch=100),
    )
    wasteful = make_plan(lengths, recipe)
    better = make_plan(lengths, replace(recipe, layout=Packed(max_tokens=64)))
    assert better.costs.sum() < wasteful.costs.sum()
    assert not wasteful.stats()["balance_optimal"]
    assert wasteful.stats()["time_over_floor"] > 1


@pytest.mark.parametrize(
    ("recipe", "time"),
    [
        # What a segment takes by itself: aligned slots, pairs, and once for being a segment.
        (Recipe(layout=Packed(max_tokens=16)), 12),
        (Recipe(layout=Packed(max_tokens=16), topology=Topology(cp=2)), 16),
        (Recipe(layout=Packed(max_tokens=16), cost=Cost(per_pair=1, per_segment=5)), 12 + 74 + 10),
        # Each rank pays for a micro-batch, and an empty one costs one token.
        (Recipe(layout=Packed(max_tokens=16), cost=Cost(per_micro_batch=100)), 112),
        (Recipe(layout=Packed(max_tokens=8), cost=Cost(per_micro_batch=100)), 212),
        (Recipe(layout=Packed(max_tokens=8), topology=Topology(pp=4, vpp=2)), 4 * 7),
        # What the layout fixes has to run.
        (Recipe(layout=Packed(max_tokens=16, pad_to=16)), 16),
        (Recipe(layout=Packed(rows=2, pad_to=16)), 32),
        (Recipe(layout=Padded(max_tokens=64, pad_to=32)), 64),
        # Rows may each be as wide as they need: another cut might do so.
        (Recipe(layout=Padded(max_tokens=64)), 12),
        # One shape for all, where a pipeline needs it.
        (Recipe(layout=Padded(max_tokens=64), topology=Topology(pp=2)), 14),
        # One rank carries the longer one.
        (Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2)), 7),
        (Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2), sync_every="step"), 7),
    ],
)
def test_the_floor_is_what_two_segments_must_run(recipe: Recipe, time: float) -> None:
    assert floor([5, 7], recipe).time == time


def test_a_fixed_width_counts_and_is_part_of_what_is_proved() -> None:
    lengths = [10] * 8 + [100] * 2
    recipe = Recipe(layout=Padded(max_tokens=100), topology=Topology(dp=2))
    fixed = replace(recipe, layout=Padded(max_tokens=100, pad_to=100))
    assert floor(lengths, recipe).time == 140
    assert floor(lengths, fixed).time == 500  # ten rows of 100 on two ranks, whatever the plan
    assert make_plan(lengths, fixed).stats()["balance_optimal"]
    assert make_plan(lengths, recipe).stats()["balance_optimal"]  # with a wave for each width


def test_a_step_of_so_many_micro_batches_is_not_blamed_for_their_number() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(micro_batches=2))
    plan = make_plan([4, 8, 5, 5, 4], recipe)
    assert plan.step_of.tolist() == [0, 0, 1, 1, 2]
    assert all(step["packs_optimal"] for step in plan.step_stats())


@pytest.mark.parametrize(
    ("recipe", "bound"),
    [
        (Recipe(layout=Packed(max_tokens=512)), 1),
        (Recipe(layout=Packed(max_tokens=512), limits=Limits(columns={"patches": 100})), 8),
        (Recipe(layout=Packed(max_tokens=512), limits=Limits(cost=10)), 8),
        (Recipe(layout=Packed(max_tokens=512), limits=Limits(cost=9.5)), 16),
        (Recipe(layout=Packed(max_tokens=512, samples=3)), 6),
        (Recipe(layout=Padded(max_tokens=512), limits=Limits(columns={"patches": 100})), 8),
        (Recipe(layout=Padded(max_tokens=512), limits=Limits(cost=10)), 8),
        (Recipe(layout=Padded(max_tokens=512, samples=3)), 6),
        (Recipe(layout=Packed(samples=4)), 4),
        (Recipe(layout=Packed(samples=4), limits=Limits(columns={"patches": 100})), 8),
        (Recipe(layout=Packed(samples=4, max_tokens=10)), 8),
        (Recipe(layout=Packed(rows=2, pad_to=64)), 1),
        (
            Recipe(layout=Packed(rows=2, pad_to=64), limits=Limits(columns={"patches": 100})),
            8,
        ),
    ],
)
def test_the_bound_on_packs_knows_every_limit(recipe: Recipe, bound: int) -> None:
    stats = make_plan([5] * 16, recipe, columns=dict.fromkeys(recipe.columns, [50] * 16)).stats()
    assert stats["num_packs_bound"] == bound
    assert stats["num_packs"] == bound
    assert stats["packs_optimal"]


def test_groups_count_as_a_whole_in_the_bound_on_packs() -> None:
    recipe = Recipe(layout=Packed(max_tokens=100), limits=Limits(columns={"patches": 100}))
    columns = {"patches": [30] * 8}
    about = {"columns": columns, "groups": [0, 0, 1, 1, 2, 2, 3, 3]}
    assert make_plan([5] * 8, recipe, columns=columns).stats()["num_packs_bound"] == 3
    assert make_plan([5] * 8, recipe, **about).stats()["num_packs_bound"] == 4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "limits"),
    [
        (Packed(max_tokens=32), Limits()),
        (Packed(max_tokens=512), Limits(cost=32)),
        (Packed(max_tokens=512), Limits(columns={"patches": 32})),
        (Padded(max_tokens=32), Limits()),
        (Padded(max_tokens=512), Limits(cost=32)),
        (Padded(max_tokens=512), Limits(columns={"patches": 32})),
        (Packed(samples=2, max_tokens=32), Limits()),
        (Packed(samples=2), Limits(cost=32)),
        (Packed(samples=2), Limits(columns={"patches": 32})),
    ],
)
def test_whatever_it_is_over_a_sample_alone_is_counted(layout: Any, limits: Limits) -> None:
    recipe = Recipe(layout=layout, limits=limits, overflow="alone", topology=Topology(dp=2))
    lengths = [5, 40, 6, 50, 32, 1]
    plan = make_plan(lengths, recipe, columns=dict.fromkeys(recipe.columns, lengths))
    assert plan.stats()["num_alone"] == 2
    assert sum(step["num_alone"] for step in plan.step_stats()) == 2


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_slots_before_are_those_of_padded_batches_of_8_in_order(overflow: Any) -> None:
    lengths = np.random.default_rng(0).integers(1, 120, 300)
    packed = Recipe(
        layout=Packed(max_tokens=100, round_to=4),
        topology=Topology(dp=2),
        steps=Steps(samples=45),
        overflow=overflow,
    )
    plan = make_plan(lengths, packed)
    segments = plan.segments.take(np.lexsort((plan.segments.start, plan.segments.sample)))
    step = plan.step_of[segments.sample]
    for number, stats in enumerate(plan.step_stats()):
        alone = Recipe(layout=Padded(samples=8, round_to=4), balance="none")
        batches = make_plan(segments.length[step == number], alone)
        assert stats["slots_before"] == batches.slots.sum()
    total = sum(stats["slots_before"] for stats in plan.step_stats())
    assert plan.stats()["slots_before"] == total


def test_a_second_work_without_a_cost_is_as_large_as_the_first_in_every_step() -> None:
    recipe = Recipe(
        layout=Packed(max_tokens=8),
        steps=Steps(samples=2),
        second_work=SecondWork(column="patches"),
    )
    plan = make_plan([6, 2, 3, 1], recipe, columns={"patches": [4, 4, 1, 0]})
    assert step_times(plan).tolist() == [8 + 8, 4 + 4]  # patches count 1 each, then 4
    assert [floor.time for floor in Floors(plan).of_steps()] == [16, 8]
