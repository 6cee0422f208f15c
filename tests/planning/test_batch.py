"""Dynamic batching: the optimal cut against every possible cut."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost, Limits, Padded, Recipe, Topology, make_plan
from evenstep.testing import assert_valid_plan
from tests.examples import examples
from tests.internals import divide_cuts, feasible_starts, fewest_cuts, optimal_cuts


@examples(200)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3)), min_size=1, max_size=9),
    st.integers(60, 90),
)
def test_optimal_cuts_have_the_fewest_slots_of_all_cuts(
    units: list[tuple[int, int]], budget: int
) -> None:
    units.sort()
    widths = np.array([width for width, _ in units])
    rows = np.array([count for _, count in units])
    n = len(units)
    starts = feasible_starts(rows, budget // widths, np.zeros((n, 0)), np.zeros(0))

    def slots(ends: tuple[int, ...]) -> float:
        total = 0
        for begin, end in zip((0, *ends), (*ends, n), strict=True):
            if rows[begin:end].sum() * widths[end - 1] > budget and end - begin > 1:
                return np.inf
            total += rows[begin:end].sum() * widths[end - 1]
        return total

    by_count = [min(slots(ends) for ends in combinations(range(1, n), count)) for count in range(n)]
    least = next(count for count in range(n) if by_count[count] < np.inf)
    assert fewest_cuts(starts) == least + 1
    for count in range(least, n):
        ends = optimal_cuts(widths, rows, starts, count + 1)
        assert ends[-1] == n
        assert slots(tuple(ends[:-1])) == by_count[count]


def test_splitting_divides_the_heaviest_as_often_as_needed() -> None:
    widths = np.array([4] * 8)
    assert divide_cuts(np.array([8]), widths, 4).tolist() == [2, 4, 6, 8]
    assert divide_cuts(np.array([1, 2]), widths[:2], 4).tolist() == [1, 2]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 40))
def test_dividing_greedy_cuts_keeps_them_and_adds_as_many_as_asked(
    lengths: list[int], wanted: int
) -> None:
    widths = np.array(sorted(lengths))
    n = len(widths)
    ends = np.array([*range(7, n, 7), n])
    divided = divide_cuts(ends, widths, wanted)
    assert len(divided) == max(len(ends), min(wanted, n))
    assert set(ends.tolist()) <= set(divided.tolist())
    assert (np.diff(divided, prepend=0) > 0).all()


@pytest.mark.parametrize(
    ("lengths", "groups", "recipe"),
    [
        ([1, 1, 17], [0, 0, 1], Recipe(layout=Padded(max_tokens=20, cut="greedy"))),
        (
            [1, 1, 4],
            [2, 2, 1],
            Recipe(
                layout=Padded(max_tokens=60, cut="greedy"),
                cost=Cost(per_token=0, per_pair=1),
                limits=Limits(cost=30),
            ),
        ),
    ],
)
def test_a_long_sample_does_not_widen_a_group_beyond_its_budget(
    lengths: list[int], groups: list[int], recipe: Recipe
) -> None:
    plan = make_plan(lengths, replace(recipe, topology=Topology(dp=2)), groups=groups)
    assert_valid_plan(plan)
    assert [micro.width for rank in range(2) for micro in plan[0, rank]] == [1, max(lengths)]
