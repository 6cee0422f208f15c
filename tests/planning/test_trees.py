"""Plans in which samples share their prefixes."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenstep import (
    Cost,
    Limits,
    Packed,
    Padded,
    Plan,
    Prefixes,
    Recipe,
    SecondWork,
    Steps,
    Topology,
    find_prefixes,
    make_plan,
)
from evenstep.errors import EvenstepError
from evenstep.testing import assert_valid_plan
from tests.internals import step_times
from tests.tree_cases import TreeCase, faults_of, random_case


@given(st.integers(0, 2**32))
@example(11)
@example(2008125)  # a group fits by the nodes of all samples, but not by those of its step
@example(3003381)  # the nodes of a sample cost more than the sample
def test_every_sample_runs_once_behind_what_it_shares(seed: int) -> None:
    case = random_case(seed)
    try:
        plan = case.plan()
    except EvenstepError:
        assert case.groups is not None  # a group that is too large
        return
    assert faults_of(case, plan) == []
    assert_valid_plan(plan)
    assert plan.fingerprint == case.plan().fingerprint
    assert Plan.from_bytes(plan.to_bytes()).fingerprint == plan.fingerprint


@given(st.integers(0, 2**32))
def test_sharing_never_makes_a_step_slower(seed: int) -> None:
    case = random_case(seed)
    try:
        shared = case.plan()
        apart = make_plan(
            [len(tokens) for tokens in case.samples],
            case.recipe,
            groups=case.groups,
            columns=case.columns,
        )
    except EvenstepError:
        return
    times = step_times(shared).sum(), step_times(apart).sum()
    assert times[0] <= times[1] * (1 + 1e-9)


def test_a_prompt_with_three_answers_is_one_node_and_three_leaves() -> None:
    samples = [[1, 2, 3, 4, 7, 7], [1, 2, 3, 4, 8], [5, 5], [1, 2, 3, 4, 9, 9, 9]]
    plan = make_plan(
        [len(tokens) for tokens in samples],
        Recipe(layout=Packed(max_tokens=32)),
        prefixes=find_prefixes(samples),
    )
    # Three of the four equal tokens are shared: the fourth predicts 7, 8 or 9.
    (micro,) = plan[0, 0]
    segments = micro.segments
    assert segments.parent is not None
    columns = (segments.sample, segments.start, segments.length, segments.parent)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [
        (0, 0, 3, -1),
        (0, 3, 3, 0),
        (1, 3, 2, 0),
        (3, 3, 4, 0),
        (2, 0, 2, -1),
    ]


def test_a_group_too_large_for_a_rank_is_divided_and_repeats_its_prompt() -> None:
    prompt, answers = 100, np.full(16, 50)
    recipe = Recipe(layout=Packed(max_tokens=1000), topology=Topology(dp=4))
    prefixes = Prefixes.of_groups(np.zeros(16, np.int64), np.full(16, prompt))
    plan = make_plan(prompt + answers, recipe, prefixes=prefixes)
    # Four answers and the prompt on each of four ranks: 99 + 4 * 51 slots.
    assert plan.tokens.tolist() == [99 + 4 * 51] * 4


def test_samples_without_common_tokens_are_planned_as_without_prefixes() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 40)
    recipe = Recipe(layout=Packed(max_tokens=64), topology=Topology(dp=2), steps=Steps(samples=8))
    none = Prefixes(np.arange(40), np.zeros(40, np.int64))
    shared, apart = make_plan(lengths, recipe, prefixes=none), make_plan(lengths, recipe)
    assert shared.segments.parent is None
    assert np.array_equal(shared.segments.sample, apart.segments.sample)
    assert np.array_equal(shared.row_offsets, apart.row_offsets)


def test_a_group_may_need_its_shared_prompt_to_fit() -> None:
    lengths, groups = np.full(8, 110), np.zeros(8, np.int64)
    recipe = Recipe(layout=Packed(max_tokens=200))
    with pytest.raises(EvenstepError, match="group 0"):
        make_plan(lengths, recipe, groups=groups)
    prefixes = Prefixes.of_groups(groups, np.full(8, 100))
    plan = make_plan(lengths, recipe, groups=groups, prefixes=prefixes)
    assert plan.tokens.tolist() == [99 + 8 * 11]


def test_a_node_that_costs_more_than_it_saves_is_not_shared() -> None:
    lengths, prefixes = [13, 13], Prefixes(np.arange(2), np.array([0, 5]))
    cheap = Recipe(layout=Packed(max_tokens=64), cost=Cost(per_token=1, per_segment=3))
    dear = Recipe(layout=Packed(max_tokens=64), cost=Cost(per_token=1, per_segment=5))
    assert make_plan(lengths, cheap, prefixes=prefixes).segments.parent is not None
    assert make_plan(lengths, dear, prefixes=prefixes).segments.parent is None


def test_a_limit_on_gathered_keys_needs_more_micro_batches() -> None:
    lengths, groups = np.full(16, 60), np.zeros(16, np.int64)
    prefixes = Prefixes.of_groups(groups, np.full(16, 50))
    free = make_plan(lengths, Recipe(layout=Packed(max_tokens=256)), prefixes=prefixes)
    tight = Recipe(layout=Packed(max_tokens=256), limits=Limits(gathered=300))
    bound = make_plan(lengths, tight, prefixes=prefixes)
    assert free.num_micro_batches == 1
    assert bound.num_micro_batches == 4  # five answers of 60 tokens in each, at most
    assert_valid_plan(bound)


REFUSED: dict[str, dict[str, Any]] = {
    "padded": {"layout": Padded(max_tokens=64)},
    "pad_to": {"layout": Packed(pad_to=64)},
    "max_tokens": {"layout": Packed(samples=4)},
    "cp": {"topology": Topology(cp=2)},
    "variable_seq_lengths": {"topology": Topology(pp=2)},
    "balance": {"balance": "lpt"},
    "packer": {"layout": Packed(max_tokens=64, packer="first_fit_decreasing")},
    "equal_sizes": {"equal_sizes": True},
    "second_work": {"second_work": SecondWork(column="patches")},
}


@pytest.mark.parametrize("word", REFUSED)
def test_a_recipe_that_cannot_share_is_refused_with_the_remedy(word: str) -> None:
    recipe = Recipe(**{"layout": Packed(max_tokens=64), **REFUSED[word]})
    columns = {"patches": [1, 1]} if word == "second_work" else None
    prefixes = Prefixes(np.arange(2), np.array([0, 3]))
    with pytest.raises(EvenstepError, match=word):
        make_plan([8, 8], recipe, prefixes=prefixes, columns=columns)


def test_a_sample_with_a_prefix_is_not_split() -> None:
    recipe = Recipe(layout=Packed(max_tokens=10), overflow="split")
    prefixes = Prefixes(np.arange(3), np.array([0, 4, 0]))
    with pytest.raises(EvenstepError, match=r"sample 1 shares a prefix .* Raise layout.max_tokens"):
        make_plan([8, 12, 25], recipe, prefixes=prefixes)
    plan = make_plan([8, 9, 25], recipe, prefixes=prefixes)  # the third one shares nothing
    assert_valid_plan(plan)


def test_the_naive_checker_sees_damage() -> None:
    case = random_case(12)
    plan = case.plan()
    segments = plan.segments
    assert segments.parent is not None
    other = TreeCase([[9, *tokens[1:]] for tokens in case.samples], *_rest(case))
    assert faults_of(case, plan) == []
    assert faults_of(other, plan) == []  # all samples begin with another token
    samples = [list(tokens) for tokens in case.samples]
    child = int(np.flatnonzero(segments.parent >= 0)[0])
    samples[int(segments.sample[child + 1])][0] = 99
    assert faults_of(TreeCase(samples, *_rest(case)), plan)


def _rest(case: TreeCase) -> tuple[Any, ...]:
    return case.recipe, case.groups, case.columns, case.prefixes


def test_a_plan_file_carries_the_tree_and_its_prefixes(tmp_path: Path) -> None:
    lengths, prefixes = [8, 9, 7], Prefixes(np.array([2, 0, 1]), np.array([0, 5, 6]))
    recipe = Recipe(layout=Packed(max_tokens=64))
    plan, apart = make_plan(lengths, recipe, prefixes=prefixes), make_plan(lengths, recipe)
    plan.save(tmp_path / "plan")
    again = Plan.load(tmp_path / "plan")
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert again.segments.parent is not None
    assert again.prefixes is not None
    assert again.prefixes.order.tolist() == [2, 0, 1]
    assert pickle.loads(pickle.dumps(plan)) == plan
    # Another parent is another plan; a plan without trees has no columns for them.
    others = replace(plan.segments, parent=np.where(plan.segments.parent == 1, 0, -1))
    assert replace(plan, segments=others) != plan
    assert replace(plan, segments=others).fingerprint != plan.fingerprint
    assert b"parent" not in apart.to_bytes()
    assert b"prefix" not in apart.to_bytes()
    assert "gathered" not in apart.recipe.to_dict()["limits"]


@pytest.mark.parametrize(
    ("lengths", "prefixes", "message"),
    [
        ([8, 8], Prefixes(np.array([0, 0]), np.array([0, 3])), r"each of the samples 0 to 1 once"),
        ([8, 8], Prefixes(np.array([1, 0]), np.array([0, 9])), r"sample 0 cannot share 9 tokens"),
        ([8, 8, 8], Prefixes(np.array([1, 0]), np.array([0, 3])), r"2 samples .* for 3 samples"),
        (
            [80, 90],
            Prefixes(np.array([0, 1]), np.array([0, 70])),
            r"sample 0 has 80 tokens",
        ),
    ],
)
def test_wrong_prefixes_are_one_error(lengths: Any, prefixes: Prefixes, message: str) -> None:
    with pytest.raises(EvenstepError, match=message):
        make_plan(lengths, Recipe(layout=Packed(max_tokens=64)), prefixes=prefixes)


def test_a_last_step_of_micro_batches_has_no_more_than_asked() -> None:
    # Few keys may be gathered, so that trees would need more micro-batches than samples alone.
    lengths, groups = np.full(12, 20), np.repeat(np.arange(6), 2)
    recipe = Recipe(
        layout=Packed(max_tokens=60),
        steps=Steps(micro_batches=4),
        limits=Limits(gathered=40),
    )
    prefixes = Prefixes.of_groups(groups, np.full(12, 10))
    plan = make_plan(lengths, recipe, prefixes=prefixes)
    assert_valid_plan(plan)
    assert np.diff(plan.cell_offsets).max() <= 4


def test_a_group_that_fits_without_sharing_need_not_share() -> None:
    ids = [[1] * 20 + [at] for at in range(4)]
    limits = Limits(gathered=60)
    recipe = Recipe(layout=Packed(max_tokens=100), groups="micro_batch", limits=limits)
    plan = make_plan([21] * 4, recipe, groups=[0] * 4, prefixes=find_prefixes(ids))
    assert_valid_plan(plan)
    assert plan.parents is None
