"""balance="none": what most training scripts do, as a plan."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from evenstep import Packed, Padded, Plan, Recipe, Steps, Topology, make_plan
from evenstep.errors import ConfigError, EvenstepError, PlanError
from evenstep.testing import Case, assert_valid_plan, cases
from tests.examples import examples
from tests.internals import Layout


def samples_of(plan: Plan) -> list[list[list[list[int]]]]:
    """Step by step and rank by rank, the samples of each micro-batch."""
    return [
        [[micro.segments.sample.tolist() for micro in micros] for micros in step] for step in plan
    ]


def test_eight_samples_in_order_padded_to_the_longest_of_the_eight() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 64)
    recipe = Recipe(
        layout=Padded(samples=8), topology=Topology(dp=2), steps=Steps(samples=32), balance="none"
    )
    plan = make_plan(lengths, recipe)
    assert_valid_plan(plan)
    first = np.arange(64).reshape(2, 4, 8).tolist()  # steps x micro-batches x samples
    assert samples_of(plan) == [[[s[0], s[2]], [s[1], s[3]]] for s in first]
    for step in plan:
        for micro in (micro for micros in step for micro in micros):
            assert (micro.rows, micro.width) == (8, lengths[micro.segments.sample].max())


def test_two_samples_end_to_end_are_veomnis_fixed_batches() -> None:
    plan = make_plan([4, 2, 3, 1, 9], Recipe(layout=Packed(samples=2), balance="none"))
    assert samples_of(plan) == [[[[0, 1], [2, 3], [4]]]]
    assert plan.widths.tolist() == [6, 4, 9]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Packed(max_tokens=10), [[0, 1], [2], [3, 4]]),
        (Packed(max_tokens=10, samples=1), [[0], [1], [2], [3], [4]]),
        (Packed(rows=2, pad_to=10), [[0, 1, 2], [3, 4]]),
        (Padded(max_tokens=14), [[0, 1], [2], [3, 4]]),
        (Padded(max_tokens=14, samples=1), [[0], [1], [2], [3], [4]]),
        (Padded(samples=3, pad_to=16), [[0, 1, 2], [3, 4]]),
    ],
)
def test_a_micro_batch_takes_the_next_samples_while_the_bounds_hold(
    layout: Layout, expected: list[list[int]]
) -> None:
    plan = make_plan([6, 4, 9, 5, 2], Recipe(layout=layout, balance="none"))
    assert_valid_plan(plan)
    assert [samples for (rank,) in samples_of(plan) for samples in rank] == expected


def test_a_group_stands_where_its_first_member_does() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), balance="none")
    plan = make_plan([3, 4, 3, 4, 2], recipe, groups=[7, 5, 7, 6, 5])
    assert samples_of(plan) == [[[[0, 2], [1, 4], [3]]]]


def test_micro_batch_k_runs_on_rank_k_mod_dp_and_the_last_wave_may_be_empty() -> None:
    recipe = Recipe(layout=Packed(samples=1), topology=Topology(dp=3), balance="none")
    assert samples_of(make_plan([1] * 7, recipe)) == [
        [[[0], [3], [6]], [[1], [4], []], [[2], [5], []]]
    ]


def test_a_step_of_micro_batches_is_exactly_full() -> None:
    recipe = Recipe(
        layout=Packed(max_tokens=100),
        topology=Topology(dp=2),
        steps=Steps(micro_batches=3),
        balance="none",
    )
    lengths = np.random.default_rng(1).integers(1, 60, 400)
    together = make_plan(lengths, replace(recipe, steps=Steps()))
    micros = [micro for wave in zip(*samples_of(together)[0], strict=True) for micro in wave]
    by_step = make_plan(lengths, recipe)
    assert_valid_plan(by_step)
    split = [m for step in samples_of(by_step) for wave in zip(*step, strict=True) for m in wave]
    assert [m for m in split if m] == [m for m in micros if m]


@examples(300)
@given(cases())
def test_samples_run_in_order_wave_by_wave(case: Case) -> None:
    try:
        recipe = replace(case.recipe, balance="none", equal_sizes=False)
        plan = replace(case, recipe=recipe, groups=None).plan()
    except EvenstepError:
        return
    assert_valid_plan(plan)
    for step in plan:
        waves = [micro for wave in zip(*step, strict=True) for micro in wave]
        ran = [
            pair for m in waves for pair in zip(m.segments.sample, m.segments.start, strict=True)
        ]
        assert ran == sorted(ran)
        held = [len(m.segments) > 0 for m in waves]
        assert held == sorted(held, reverse=True), "empty micro-batches come last"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layout": Packed(max_tokens=8, packer="optimal")}, "layout.packer has no effect"),
        ({"layout": Padded(max_tokens=8, cut="greedy")}, "layout.cut has no effect"),
        ({"layout": Padded(max_tokens=8, cut="optimal")}, "layout.cut has no effect"),
        ({"layout": Packed(max_tokens=8), "equal_sizes": True}, "equal_sizes has no effect"),
    ],
)
def test_what_the_order_leaves_no_room_for_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Recipe(balance="none", **change)


def test_a_group_that_does_not_fit_at_the_width_of_its_step_is_refused() -> None:
    # One width for all: the group of two rows of 1 would have two rows of 33.
    recipe = Recipe(layout=Padded(max_tokens=64), topology=Topology(pp=2), balance="none")
    with pytest.raises(PlanError, match="a group has 2 segments, but a micro-batch of this step"):
        make_plan([1, 1, 33], recipe, groups=[1, 1, 0])
