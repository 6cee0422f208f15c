"""Dividing a micro-batch in two."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from evenstep import MicroBatch, Packed, Padded, Recipe, Topology, make_plan
from evenstep.errors import EvenstepError
from evenstep.testing import Case, cases
from tests.examples import examples
from tests.internals import IntArray, Layout


def keys(micro: MicroBatch) -> list[tuple[int, int, int]]:
    held = micro.segments
    return list(zip(held.sample.tolist(), held.start.tolist(), held.length.tolist(), strict=True))


def assert_fits(half: MicroBatch, whole: MicroBatch) -> None:
    """Every segment is in a row, and the width suits the recipe."""
    assert half.width % half.alignment == 0
    assert half.width % half.width_unit == 0
    assert half.row_offsets[-1] == len(half.segments)
    placed = half.placement
    assert placed.offsets[-1] == half.slots
    assert (placed.slots >= placed.real).all()
    assert len(half.sample_lengths) == len(half.sample_ends) == len(half.segments)
    # At most the rounding of the width is added.
    assert half.slots < whole.slots + half.width_unit


@examples(200)
@given(cases(max_samples=12))
def test_halves_hold_every_segment_once_and_keep_groups_whole(case: Case) -> None:
    try:
        plan = case.plan()
    except EvenstepError:
        return
    kept = plan.groups if plan.recipe.groups == "micro_batch" else None
    for micro in (m for step in plan for rank in step for m in rank):
        first, second = micro.halves()
        assert sorted(keys(first) + keys(second)) == sorted(keys(micro))
        for half in (first, second):
            assert_fits(half, micro)
        of_segment = micro.segments.sample if kept is None else kept[micro.segments.sample]
        can = len(micro.segments) if kept is None else len(np.unique(of_segment))
        assert second.is_empty == (can < 2)
        if kept is not None:
            groups = [set(kept[half.segments.sample].tolist()) for half in (first, second)]
            assert not groups[0] & groups[1]


@examples(100)
@given(cases(max_samples=12))
def test_halving_ends_with_single_groups_or_segments(case: Case) -> None:
    try:
        plan = case.plan()
    except EvenstepError:
        return
    left = [micro for step in plan for rank in step for micro in rank]
    while left:
        micro = left.pop()
        halves = micro.halves()
        if halves[1].is_empty:
            assert micro.groups is not None or len(micro.segments) < 2
            assert micro.groups is None or len(np.unique(micro.groups)) < 2
        else:
            assert max(len(half.segments) for half in halves) < len(micro.segments)
            left += halves


PAIRS = np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (Packed(max_tokens=16), [(1, 6), (1, 6)]),
        (Packed(max_tokens=16, pad_to=16), [(1, 6), (1, 6)]),
        (Packed(max_tokens=16, round_to=8), [(1, 8), (1, 8)]),
        (Padded(max_tokens=16), [(2, 4), (2, 4)]),
        (Padded(samples=5, pad_to=6), [(2, 6), (2, 6)]),
    ],
    ids=repr,
)
def test_a_micro_batch_of_two_pairs_is_divided_between_them(
    layout: Layout, shapes: list[tuple[int, int]]
) -> None:
    (micro,) = make_plan([4, 4, 2, 2], Recipe(layout=layout), groups=PAIRS)[0, 0]
    halves = micro.halves()
    assert [sorted(half.segments.sample.tolist()) for half in halves] == [[0, 2], [1, 3]]
    assert [(half.rows, half.width) for half in halves] == shapes


def test_static_rows_are_divided_between_groups() -> None:
    recipe = Recipe(layout=Packed(rows=2, pad_to=8))
    (micro,) = make_plan([4, 4, 2, 2, 2], recipe, groups=[0, 1, 0, 1, 2])[0, 0]
    first, second = micro.halves()
    names = [set(half.groups.tolist()) for half in (first, second) if half.groups is not None]
    assert len(names) == 2
    assert not names[0] & names[1]
    assert max(first.width, second.width) < 16


def test_groups_of_a_step_may_be_divided() -> None:
    recipe = Recipe(layout=Packed(max_tokens=16), groups="step")
    (micro,) = make_plan([4, 4, 2, 2], recipe, groups=[0, 0, 0, 0])[0, 0]
    assert micro.groups is None
    assert not micro.halves()[1].is_empty


def test_one_group_is_not_divided_and_comes_with_an_empty_half_that_can_be_sharded() -> None:
    recipe = Recipe(layout=Packed(max_tokens=16, round_to=16), topology=Topology(cp=2))
    (micro,) = make_plan([4, 4], recipe, groups=[7, 7])[0, 0]
    whole, empty = micro.halves()
    assert whole is micro
    assert empty.is_empty
    assert empty.slots == 16


def test_the_division_is_as_even_as_whole_groups_allow() -> None:
    def sizes(lengths: list[int], groups: IntArray) -> list[int]:
        (micro,) = make_plan(lengths, Recipe(layout=Packed(max_tokens=99)), groups=groups)[0, 0]
        return sorted(half.tokens for half in micro.halves())

    assert sizes([1, 1, 1, 9], np.array([0, 1, 2, 3])) == [3, 9]
    assert sizes([5, 5, 5, 5], np.array([0, 0, 0, 1])) == [5, 15]


def test_without_and_renumbered_keep_the_groups_of_what_is_left() -> None:
    (micro,) = make_plan([4, 4, 2, 2], Recipe(layout=Packed(max_tokens=16)), groups=PAIRS)[0, 0]
    named = micro.renumbered(np.array([10, 11, 12, 13])).without([12])
    assert named.groups is not None
    found = dict(zip(named.segments.sample.tolist(), named.groups.tolist(), strict=True))
    assert found == {10: 0, 11: 1, 13: 1}
