"""Stats name the sequence or the constraint that keeps a plan over its ideal time."""

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

TWO = Topology(dp=2)
CALLS = Cost(per_micro_batch=100)


@pytest.mark.parametrize(
    ("lengths", "recipe", "named"),
    [
        ([100, 1, 1, 1], Recipe(layout=Packed(max_tokens=100), topology=TWO), "sample 0 with 100"),
        # Nine packs of one long item each on two ranks; short ones cannot fill the tenth.
        (
            [60] * 8 + [90] + [1] * 9,
            Recipe(layout=Packed(max_tokens=100), topology=TWO, cost=Cost(per_pair=1)),
            "Long sequences cannot share a micro-batch, so all ranks wait",
        ),
        (
            [60] * 8,
            Recipe(layout=Packed(max_tokens=100), topology=TWO, cost=CALLS),
            "Long sequences cannot share a micro-batch: a step needs 4 micro-batches per rank",
        ),
        (
            [8] * 8,
            Recipe(layout=Packed(max_tokens=64, samples=2), topology=TWO, cost=CALLS),
            "layout.samples needs 2 micro-batches per rank where its slots fill 1",
        ),
        (
            [8] * 8,
            Recipe(
                layout=Packed(max_tokens=64),
                topology=TWO,
                cost=CALLS,
                limits=Limits(columns={"patches": 20}),
            ),
            "limits.columns.patches needs 2 micro-batches per rank",
        ),
        (
            [8] * 16,
            Recipe(layout=Packed(max_tokens=64), topology=Topology(dp=2, pp=4, vpp=2), cost=CALLS),
            "This pipeline runs a multiple of 4 micro-batches per rank",
        ),
        (
            [8] * 20,
            Recipe(
                layout=Packed(max_tokens=64),
                topology=TWO,
                cost=CALLS,
                steps=Steps(micro_batches=1),
            ),
            "",
        ),
        (
            [40, 10, 10, 40, 40],
            Recipe(layout=Packed(max_tokens=64), topology=Topology(pp=2)),
            "This pipeline needs one width",
        ),
        (
            [40] * 4,
            Recipe(layout=Packed(pad_to=64), topology=TWO),
            "Every micro-batch has 64 slots (layout.pad_to=64)",
        ),
        ([30] * 3, Recipe(layout=Packed(max_tokens=64), topology=TWO), "3 sequences on 2 ranks"),
        (
            [5, 40, 5, 40] * 4,
            Recipe(layout=Padded(samples=2), topology=TWO, balance="none"),
            "44 % of the slots are padding",
        ),
        (
            [30, 10] * 8,
            Recipe(layout=Packed(max_tokens=40), topology=TWO, balance="none"),
            "",
        ),
        (
            [30, 10, 30, 1] * 8,
            Recipe(layout=Packed(max_tokens=40), topology=TWO, balance="none"),
            "balance='none' leaves ranks uneven",
        ),
        ([8] * 64, Recipe(layout=Packed(max_tokens=64), topology=TWO), ""),
        ([8] * 63, Recipe(layout=Packed(max_tokens=64)), ""),
    ],
)
def test_the_bottleneck_is_named(lengths: list[int], recipe: Recipe, named: str) -> None:
    columns = dict.fromkeys(recipe.columns, [10] * len(lengths))
    plan = make_plan(lengths, recipe, columns=columns)
    found = plan.stats()["bottleneck"]
    assert found.startswith(named)
    assert bool(found) == bool(named)


def test_second_work_that_cannot_be_even_is_named() -> None:
    recipe = Recipe(
        layout=Packed(max_tokens=64), topology=TWO, second_work=SecondWork(column="patches")
    )
    uneven = make_plan([8] * 16, recipe, columns={"patches": [90] + [1] * 15}).stats()
    assert "patches" in uneven["bottleneck"]
    # First work: 64 on each rank. Second: 105 patches are as much as 128, so 90 are 109.7.
    assert uneven["time_over_floor"] >= 1 - 1e-9
    even = make_plan([8] * 16, recipe, columns={"patches": [10] * 16}).stats()
    assert even["bottleneck"] == ""


def test_the_floor_of_two_works_is_the_sum_of_their_floors() -> None:
    second = SecondWork(column="patches", cost=Cost(per_token=2))
    recipe = Recipe(layout=Packed(max_tokens=64), topology=TWO, second_work=second)
    plan = make_plan([8] * 16, recipe, columns={"patches": [30] + [1] * 15})
    without = make_plan([8] * 16, Recipe(layout=Packed(max_tokens=64), topology=TWO))
    assert without.stats()["balance_optimal"]
    by_micro = plan.sum_by_micro_batch(plan.columns["patches"][plan.segments.sample])
    largest = by_micro.reshape(2, -1).max(axis=0).sum()
    # One rank runs 64 tokens; one sample has 30 patches at 2 each.
    assert plan.stats()["time_over_floor"] == pytest.approx((64 + 2 * largest) / (64 + 60))


def test_progress_counts_the_steps_that_are_measured() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 400)
    recipes: list[Any] = [Packed(max_tokens=64), Padded(max_tokens=64)]
    for layout in recipes:
        plan = make_plan(lengths, Recipe(layout=layout, topology=TWO, steps=Steps(samples=40)))
        seen: list[tuple[int, int]] = []
        measured = plan.stats(progress=lambda done, total: seen.append((done, total)))  # noqa: B023
        assert measured == plan.stats()
        assert seen[-1] == (10, 10)
        assert seen == sorted(seen)


def test_measures_of_all_steps_agree_with_those_of_each() -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 500)
    for layout in (Packed(max_tokens=64), Padded(max_tokens=128)):
        recipe = Recipe(
            layout=layout, topology=TWO, steps=Steps(tokens=900), cost=Cost(per_pair=0.1)
        )
        plan = make_plan(lengths, recipe)
        total, steps = plan.stats(), plan.step_stats()
        for name in ("num_samples", "num_segments", "tokens", "slots", "num_packs_bound"):
            assert total[name] == sum(step[name] for step in steps)
        assert total["balance_optimal"] == all(step["balance_optimal"] for step in steps)
