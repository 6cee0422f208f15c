"""Streams stop anywhere and continue on other ranks, each sample once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from evenstep import Packed, Padded, PlannedStream, Recipe, SecondWork, Steps, Topology, World
from evenstep.data import Lengths
from evenstep.errors import PlanError
from evenstep.testing import Case
from tests.examples import examples
from tests.internals import Layout, StreamPosition
from tests.pooled_cases import PooledCase, pooled_cases
from tests.resume_cases import PlannedCase, Stage, planned_cases

CHANGES = ((1, 2), (2, 1), (2, 4), (3, 2), (4, 1), (4, 4))
"""Ranks before and after."""


@given(planned_cases())
@examples(100)
def test_a_run_that_stops_anywhere_runs_every_sample_once(case: PlannedCase) -> None:
    case.check()


@given(planned_cases())
@examples(1000)
@pytest.mark.slow
def test_a_thousand_runs_that_stop_anywhere(case: PlannedCase) -> None:
    case.check()


@given(pooled_cases())
@examples(100)
def test_a_pooled_run_that_stops_anywhere_runs_every_token_once(case: PooledCase) -> None:
    case.check()


@given(pooled_cases(known=True))
@examples(100)
def test_a_pool_of_known_lengths_runs_every_token_once_on_any_readers(case: PooledCase) -> None:
    case.check()


@given(pooled_cases(known=True, in_loader=True))
@examples(40)
def test_loaders_of_known_lengths_run_every_token_once_on_any_ranks(case: PooledCase) -> None:
    case.check()


@given(pooled_cases())
@examples(1000)
@pytest.mark.slow
def test_a_thousand_pooled_runs_that_stop_anywhere(case: PooledCase) -> None:
    case.check()


def case_of(
    recipe: Recipe, stages: tuple[Stage, ...], plan_ranks: int | None = None
) -> PlannedCase:
    lengths = np.random.default_rng(0).integers(1, 20, 60)
    return PlannedCase(Case(lengths, recipe, None, {}), 0, True, 0, stages, plan_ranks)


@pytest.mark.parametrize(("before", "done", "after"), [(1, 3, 2), (2, 2, 1)])
def test_a_step_of_micro_batches_ends_where_the_first_ranks_would_end_it(
    before: int, done: int, after: int
) -> None:
    """The end of a step that was begun on 1 rank was once sought for 2."""
    recipe = Recipe(layout=Packed(max_tokens=20), steps=Steps(micro_batches=4))
    assert case_of(recipe, (Stage(before, 1, done), Stage(after, 1, None))).check()


@pytest.mark.parametrize("layout", [Packed(max_tokens=20), Padded(max_tokens=40)])
@pytest.mark.parametrize(
    "steps", [Steps(), Steps(samples=17), Steps(tokens=150), Steps(micro_batches=3)]
)
@pytest.mark.parametrize("change", CHANGES)
def test_every_kind_of_step_continues_on_other_ranks(
    layout: Layout, steps: Steps, change: tuple[int, int]
) -> None:
    recipe, (before, after) = Recipe(layout=layout, steps=steps, balance="stride"), change
    for done in (1, 2):
        stages = (Stage(before, 1, done), Stage(after, 2, 1), Stage(before, 1, None))
        assert case_of(recipe, stages).check()


@pytest.mark.parametrize("change", [(1, 2), (2, 1), (4, 2), (1, 4)])
def test_a_saved_plan_continues_on_divisors_of_its_ranks(change: tuple[int, int]) -> None:
    recipe, (before, after) = Recipe(layout=Packed(max_tokens=20), balance="stride"), change
    for done in (1, 3):
        stages = (Stage(before, 2, done), Stage(after, 1, 1), Stage(before, 1, None))
        assert case_of(recipe, stages, plan_ranks=4).check()


def test_the_rest_of_a_step_need_not_have_equal_sizes() -> None:
    """Two ranks share groups of 3 and 2, but cannot share the 2 that one rank has left."""
    recipe = Recipe(layout=Packed(samples=3), equal_sizes=True, balance="lpt")
    given = Case(np.ones(5, np.int64), recipe, np.array([1, 1, 1, 0, 0]), {})
    assert PlannedCase(given, 0, False, 0, (Stage(1, 1, 1), Stage(2, 1, None))).check()


def test_a_rest_that_ranks_cannot_share_is_refused_with_the_ranks_to_resume_on() -> None:
    recipe = Recipe(
        layout=Packed(max_tokens=16),
        steps=Steps(samples=8),
        topology=Topology(dp=2),
        second_work=SecondWork(column="patches", same_waves=True),
    )
    given: Any = {"columns": {"patches": np.full(8, 3)}, "shuffle": False}
    lengths = Lengths(np.full(8, 8))
    stream = PlannedStream(lengths, recipe, world=World(0, 2), **given)
    begun = stream.cursor(StreamPosition().within(2, 1)).to_dict()
    more = PlannedStream(
        lengths, replace(recipe, topology=Topology(dp=8)), world=World(0, 8), **given
    )
    more.load_state_dict(begun)
    with pytest.raises(PlanError, match=r"2 ranks have begun cannot be .* on 2 ranks"):
        next(iter(more))
