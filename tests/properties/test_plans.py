"""For any lengths and recipe, a plan is valid or planning raises an error with the reason."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Limits, Packed, Plan, Recipe, Steps, Topology, make_plan
from evenstep.errors import EvenstepError
from evenstep.testing import Case, assert_valid_plan, cases
from tests.examples import examples
from tests.internals import IntArray


@examples(1500)
@given(cases())
def test_every_plan_is_valid(case: Case) -> None:
    try:
        plan = case.plan()
    except EvenstepError:
        return
    assert_valid_plan(plan)
    stats = plan.stats()
    kept = plan.step_of >= 0
    assert stats["tokens"] + stats["tokens_truncated"] == plan.lengths[kept].sum()
    assert stats["slots"] >= stats["tokens"]
    assert stats["num_packs"] >= stats["num_packs_bound"]
    assert stats["imbalance_cost_step"] >= 1 - 1e-9
    assert stats["imbalance_cost_micro_batch"] >= stats["imbalance_cost_step"] - 1e-9


@examples(200)
@given(cases())
def test_restore_is_the_inverse_of_the_order(case: Case) -> None:
    try:
        plan = case.plan()
    except EvenstepError:
        return
    assert sorted(plan.order) == list(range(len(plan.segments)))
    assert (plan.restore(plan.order) == np.arange(len(plan.segments))).all()
    assert (np.diff(plan.restore(plan.segments.sample)) >= 0).all()


@examples(200)
@given(cases())
def test_the_same_arguments_give_the_same_plan(case: Case) -> None:
    try:
        first, second = case.plan(), case.plan()
    except EvenstepError:
        return
    assert first.fingerprint == second.fingerprint


@examples(200)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=60),
    st.integers(1, 20),
    cases(),
    cases(),
)
def test_the_samples_of_a_step_do_not_depend_on_how_it_is_cut(
    lengths: list[int], samples: int, one: Case, other: Case
) -> None:
    """Layout, packer, balance and topology may all differ; the steps may not."""
    steps: list[IntArray] = []
    for case in (one, other):
        recipe = replace(
            case.recipe, steps=Steps(samples=samples), overflow="split", limits=Limits()
        )
        try:
            plan = make_plan(lengths, recipe)
        except EvenstepError:
            return
        steps.append(plan.step_of)
    assert (steps[0] == steps[1]).all()
    assert (steps[0] == np.arange(len(lengths)) // samples).all()


@examples(100)
@given(cases())
def test_a_saved_plan_comes_back_equal(case: Case) -> None:
    try:
        plan = case.plan()
    except EvenstepError:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan"
        plan.save(path)
        again = Plan.load(path)
    assert again.fingerprint == plan.fingerprint
    assert again.recipe == plan.recipe
    assert again.stats() == plan.stats()


@examples(20)
@given(st.integers(1, 3000), st.integers(0, 2**32))
def test_a_thousand_ranks_are_planned_like_eight(count: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 2000, count)
    recipe = Recipe(
        layout=Packed(max_tokens=4096), topology=Topology(dp=1024), steps=Steps(samples=2048)
    )
    assert_valid_plan(make_plan(lengths, recipe))


@examples(500)
@given(cases())
def test_nothing_is_refused_without_a_limit_that_forces_it(case: Case) -> None:
    """Over-long samples may be handled, nothing is grouped or limited: then a plan must exist."""
    recipe = replace(case.recipe, limits=Limits(), steps=Steps(), second_work=None)
    if recipe.overflow == "error":
        recipe = replace(recipe, overflow="drop")
    assert_valid_plan(make_plan(case.lengths, recipe))
