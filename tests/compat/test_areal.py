"""AReaL's allocators: capacity, counts, errors."""

from __future__ import annotations

from typing import Literal, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.compat.areal import (
    balanced_greedy_partition,
    ffd_allocate,
    get_allocate_fn,
    kk_allocate,
)
from tests.compat.attempts import attempt, flat
from tests.examples import examples

Algorithm: TypeAlias = Literal["ffd", "kk"]


@examples(300)
@given(
    values=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    capacity=st.sampled_from([50, 77, 10**12]),
    least=st.sampled_from([None, 1, 4]),
    divisor=st.integers(1, 3),
    algorithm=st.sampled_from(["ffd", "kk"]),
)
def test_groups_keep_capacity_least_number_and_divisor(
    values: list[int], capacity: int, least: int | None, divisor: int, algorithm: Algorithm
) -> None:
    allocate = get_allocate_fn(algorithm)
    groups, fault = attempt(lambda: allocate(values, capacity, least, divisor), RuntimeError)
    if groups is None:
        few = len(values) < max(least or 0, divisor)
        assert few if "smaller than min_groups" in fault else len(values) % divisor
        return
    assert sorted(flat(groups)) == list(range(len(values)))
    assert all(groups)
    assert max(sum(values[i] for i in group) for group in groups) <= capacity
    assert len(groups) >= max(least or 1, divisor)
    assert len(groups) % divisor == 0
    if capacity == 10**12 and divisor == 1:
        assert len(groups) == (least or 1)


@examples(150)
@given(values=st.lists(st.integers(1, 50), min_size=12, max_size=12), k=st.sampled_from([2, 3, 4]))
def test_equal_sizes(values: list[int], k: int) -> None:
    for groups in (
        balanced_greedy_partition(values, k),
        kk_allocate(values, 10**12, k, equal_size=True),
    ):
        assert [len(group) for group in groups] == [12 // k] * k
        assert sorted(flat(groups)) == list(range(12))
        sums = [sum(values[i] for i in group) for group in groups]
        assert max(sums) - min(sums) <= 50


def test_errors_have_the_types_and_words_of_areal() -> None:
    with pytest.raises(RuntimeError, match="larger than capacity"):
        ffd_allocate([100, 600], 500, 1)
    with pytest.raises(RuntimeError, match="smaller than min_groups"):
        kk_allocate([100, 200], 500, 5)
    with pytest.raises(RuntimeError, match="divisible by k"):
        kk_allocate([1, 2, 3], 500, 2, equal_size=True)
    with pytest.raises(RuntimeError, match="no equal groups"):
        kk_allocate([9, 1, 1, 9, 9, 1], 18, 2, n_groups_divisor=2, equal_size=True)
    with pytest.raises(ValueError, match="must be >= K"):
        balanced_greedy_partition([], 4)
    with pytest.raises(ValueError, match="must be divisible by K"):
        balanced_greedy_partition([1, 2, 3], 2)
    with pytest.raises(ValueError, match="unknown packing algorithm"):
        get_allocate_fn("best")  # type: ignore[arg-type]
