"""Streams of saved plans: the plan's own steps, and plans of a stream's epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenstep import (
    Packed,
    Plan,
    PlannedStream,
    Recipe,
    Steps,
    Topology,
    World,
    make_plan,
    violations,
)
from evenstep.data import InMemory, Lengths
from evenstep.errors import ConfigError, CursorError, EvenstepError, InputError
from evenstep.testing import Case, assert_elastic_resume, assert_exact_resume, cases
from tests.data.test_planned import micro_key
from tests.examples import examples
from tests.internals import on_fewer_ranks, samples_by_step, step_plan

LENGTHS = np.random.default_rng(3).integers(1, 16, 70)
RECIPE = Recipe(
    layout=Packed(max_tokens=16), topology=Topology(dp=4), steps=Steps(samples=20), balance="lpt"
)


def stream_of(case: Case, rank: int = 0, **more: Any) -> PlannedStream:
    return PlannedStream(
        Lengths(case.lengths),
        case.recipe,
        world=World(rank, case.recipe.topology.dp),
        groups=case.groups,
        columns=case.columns,
        **more,
    )


def content(stream: PlannedStream) -> list[Any]:
    return [
        (
            step.number,
            None if step.sample_ids is None else step.sample_ids.tolist(),
            [micro_key(micro) for micro in step.micro_batches],
            dict(step.lost),
            {**step.totals, "groups": None},
        )
        for step in stream
    ]


@given(cases(), st.integers(0, 3), st.booleans(), st.integers(0, 2))
@examples(40)
def test_a_stream_of_the_plan_of_an_epoch_runs_the_steps_of_that_epoch(
    case: Case, seed: int, shuffle: bool, epoch: int
) -> None:
    ranks = case.recipe.topology.dp
    stream = stream_of(case, ranks - 1, seed=seed, shuffle=shuffle)
    stream.set_epoch(epoch)
    try:
        expected = content(stream)
    except EvenstepError:
        assume(False)
    plan = Plan.from_bytes(stream.plan_epoch(epoch).to_bytes())
    assert violations(plan) == []
    again = PlannedStream.from_plan(Lengths(case.lengths), plan, world=World(ranks - 1, ranks))
    assert content(again) == expected
    assert again.steps_per_epoch.steps == len(expected)
    assert [step.plan for step in again] == [step.plan for step in stream]


@given(cases())
@examples(40)
def test_steps_on_fewer_ranks_are_valid_and_have_the_same_micro_batches(case: Case) -> None:
    try:
        plan = case.plan()
    except EvenstepError:
        assume(False)
    samples = samples_by_step(plan)
    for number in range(plan.num_steps):
        whole = step_plan(plan, number, samples[number])
        for ranks in (n for n in (1, 2, 3, 4) if plan.num_ranks % n == 0):
            fewer = on_fewer_ranks(whole, ranks)
            last = number == plan.num_steps - 1
            assert [v for v in violations(fewer) if last or "per rank" not in v] == []
            assert sorted(micro_key(m) for rank in fewer[0] for m in rank) == sorted(
                micro_key(m) for rank in whole[0] for m in rank
            )


def planned(world: World, workers: int = 1) -> PlannedStream:
    return PlannedStream.from_plan(Lengths(LENGTHS), make_plan(LENGTHS, RECIPE), world=world)


def test_a_saved_plan_resumes_exactly_and_on_the_divisors_of_its_ranks() -> None:
    assert_exact_resume(lambda: planned(World(1, 2)))
    assert_elastic_resume(planned, [(4, 1), (2, 2), (1, 1)])


def test_a_number_of_ranks_that_does_not_divide_the_plans_is_refused() -> None:
    for ranks in (3, 8):
        with pytest.raises(ConfigError, match=f"{ranks} does not divide them. Use 1 or 2 or 4"):
            planned(World(0, ranks))


def test_a_plan_of_several_ranks_needs_a_world() -> None:
    with pytest.raises(ConfigError, match=r"plans for 4 data-parallel ranks .*World.detect\(\)"):
        PlannedStream.from_plan(Lengths(LENGTHS), make_plan(LENGTHS, RECIPE))


def test_every_epoch_of_a_saved_plan_is_the_same() -> None:
    plan = make_plan(LENGTHS, RECIPE)
    stream = PlannedStream.from_plan(
        Lengths(LENGTHS), plan, world=World(0, 4), infinite_loop=True, max_num_steps=8
    )
    steps = list(stream)
    assert [step.epoch for step in steps] == [0] * 4 + [1] * 4
    keys = [[micro_key(micro) for micro in step.micro_batches] for step in steps]
    assert keys[:4] == keys[4:]
    assert stream.micro_batches_per_epoch(3) == [sum(map(len, keys[:4]))] * 3


def test_a_saved_plan_of_other_samples_is_refused() -> None:
    plan = make_plan(LENGTHS, RECIPE)
    with pytest.raises(InputError, match="the plan has 70 samples but the source has 69"):
        PlannedStream.from_plan(Lengths(LENGTHS[:-1]), plan, world=World(0, 4))
    changed = LENGTHS.copy()
    changed[25] += 1
    stream = PlannedStream.from_plan(Lengths(changed), plan, world=World(0, 4))
    steps = iter(stream)
    next(steps)
    with pytest.raises(InputError, match=f"sample 25 has {changed[25]} tokens, but the plan exp"):
        next(steps)


def test_a_cursor_of_another_plan_is_refused() -> None:
    state = planned(World(0, 4)).state_dict()
    other = make_plan(LENGTHS, Recipe(layout=Packed(max_tokens=32), topology=Topology(dp=4)))
    stream = PlannedStream.from_plan(Lengths(LENGTHS), other, world=World(0, 4))
    with pytest.raises(CursorError, match="plan was"):
        stream.load_state_dict(state)
    with pytest.raises(CursorError, match=r"plan was .* and is not given"):
        PlannedStream(Lengths(LENGTHS), RECIPE, world=World(0, 4)).load_state_dict(state)


def test_samples_of_a_plan_in_another_order_are_read_by_their_ids() -> None:
    source = InMemory([{"input_ids": np.full(n, k)} for k, n in enumerate(LENGTHS.tolist())])
    stream = PlannedStream(source, RECIPE, world=World(0, 4), seed=5)
    plan = stream.plan_epoch(2)
    assert plan.sample_ids is not None
    assert sorted(plan.sample_ids.tolist()) == list(range(70))
    assert plan.lengths.tolist() == LENGTHS[plan.sample_ids].tolist()
    for step in PlannedStream.from_plan(source, plan, world=World(0, 4)):
        for _, found in step:
            assert all(set(sample["input_ids"]) == {k} for k, sample in found.items())


def test_without_shuffling_the_plan_of_an_epoch_is_make_plan() -> None:
    stream = PlannedStream(Lengths(LENGTHS), RECIPE, world=World(0, 4), shuffle=False)
    seen: list[tuple[int, int]] = []
    plan = stream.plan_epoch(7, progress=lambda done, total: seen.append((done, total)))
    assert plan == make_plan(LENGTHS, RECIPE)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
