"""Plans of single steps, joined: the plan of all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Packed, Plan, PlannedStream, Recipe, Steps, Topology, World, make_plan
from evenstep.data import Lengths
from evenstep.errors import InputError
from evenstep.testing import assert_valid_plan
from tests.data.test_planned import LAYOUTS, STEPS
from tests.examples import examples
from tests.internals import Layout, join_plans


def joined(stream: PlannedStream) -> Plan:
    plans, ids = [], []
    for step in stream:
        assert step.plan is not None
        assert step.sample_ids is not None
        plans.append(step.plan)
        ids.append(step.sample_ids)
    return join_plans(plans, ids)


@examples(60)
@given(
    layout=st.sampled_from(LAYOUTS),
    steps=st.sampled_from(STEPS),
    ranks=st.integers(1, 3),
    grouped=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_steps_of_a_stream_in_order_make_the_plan_of_all_samples(
    layout: Layout, steps: Steps, ranks: int, grouped: bool, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 10, 25)
    groups = np.arange(25) // 2 if grouped else None
    recipe = Recipe(layout=layout, topology=Topology(dp=ranks), steps=steps)
    stream = PlannedStream(
        Lengths(lengths), recipe, world=World(0, ranks), shuffle=False, groups=groups
    )
    assert joined(stream) == make_plan(lengths, recipe, groups=groups)


@examples(30)
@given(layout=st.sampled_from(LAYOUTS), ranks=st.integers(1, 3), seed=st.integers(0, 99))
def test_shuffled_steps_keep_what_they_run(layout: Layout, ranks: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 30, 25)
    recipe = Recipe(
        layout=layout, topology=Topology(dp=ranks), steps=Steps(samples=6), overflow="drop"
    )
    streams = [
        PlannedStream(Lengths(lengths), recipe, world=World(rank, ranks), seed=seed)
        for rank in range(ranks)
    ]
    plan = joined(streams[0])
    assert plan.lengths.tolist() == lengths.tolist()
    for rank, stream in enumerate(streams):
        for number, step in enumerate(stream):
            ran = [micro.segments.sample.tolist() for micro in step.micro_batches]
            assert ran == [micro.segments.sample.tolist() for micro in plan[number, rank]]


def test_a_joined_plan_is_valid() -> None:
    recipe = Recipe(layout=Packed(max_tokens=40), topology=Topology(dp=2), steps=Steps(samples=6))
    lengths = np.arange(1, 25)
    stream = PlannedStream(Lengths(lengths), recipe, world=World(0, 2), shuffle=False)
    assert_valid_plan(joined(stream))


def test_what_cannot_be_joined_is_refused() -> None:
    plan = make_plan([3, 4], Recipe(layout=Packed(max_tokens=8)))
    with pytest.raises(InputError, match="expected at least one plan"):
        join_plans([], [])
    other = replace(plan, recipe=replace(plan.recipe, min_saving=0.5))
    with pytest.raises(InputError, match="different recipes"):
        join_plans([plan, other], [np.array([0, 1]), np.array([2, 3])])
    with pytest.raises(InputError, match="not 0 to 3, each once"):
        join_plans([plan, plan], [np.array([0, 1]), np.array([1, 2])])
