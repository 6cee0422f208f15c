"""Partitions of many and of few items: near-linear kernels and near-optimal parts."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import partition
from tests.examples import examples
from tests.internals import FloatArray, makespans, sum_by, swap_kernel

costs_lists = st.lists(st.integers(0, 60) | st.floats(0, 60), min_size=1, max_size=30)


def heaviest(costs: FloatArray, parts: int, algorithm: str, equal_sizes: bool = False) -> float:
    part_of = partition(costs, parts, algorithm, equal_sizes=equal_sizes)
    return float(sum_by(part_of, costs, parts).max())


def modelled(count: int, sigma: float, per_token: float, seed: int) -> FloatArray:
    """Costs of log-normal lengths, linear and quadratic."""
    lengths = np.random.default_rng(seed).lognormal(np.log(3000), sigma, count)
    lengths = np.clip(lengths, 1, 131072).astype(np.int64)
    return per_token * lengths + lengths.astype(np.float64) ** 2


@examples(300)
@given(costs_lists, st.integers(1, 9), st.booleans())
def test_no_other_algorithm_is_better_by_more_than_a_hundredth_of_a_percent(
    costs: list[float], parts: int, equal_sizes: bool
) -> None:
    array = np.array(costs, float)
    best = heaviest(array, parts, "refined", equal_sizes)
    for name in ("lpt", "karmarkar_karp", "stride"):
        assert best <= heaviest(array, parts, name, equal_sizes) * (1 + 1e-4) + 1e-9
    assert best <= heaviest(array, parts, "lpt", equal_sizes) * (1 + 1e-12)


@examples(60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(2, 3), st.booleans())
def test_few_items_are_close_to_the_very_best(
    costs: list[int], parts: int, equal_sizes: bool
) -> None:
    array = np.array(costs, float)
    best = np.inf
    for choice in product(range(parts), repeat=len(costs)):
        sizes = np.bincount(choice, minlength=parts)
        if not equal_sizes or np.ptp(sizes) <= 1:
            best = min(best, sum_by(np.array(choice), array, parts).max())
    found = heaviest(array, parts, "refined", equal_sizes)
    bound = makespans(array[None], parts, equal_sizes=equal_sizes)[0]
    assert bound <= best * (1 + 1e-12) <= found + 1e-9
    assert found <= best * 1.1 + 1e-9


@pytest.mark.parametrize("sigma", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("per_token", [24576.0, 4096.0])
def test_modelled_costs_reach_the_makespan_bound(sigma: float, per_token: float) -> None:
    over = []
    for count, parts in ((64, 8), (256, 16), (512, 64), (1024, 256), (2048, 128), (8192, 64)):
        costs = modelled(count, sigma, per_token, count)
        over.append(heaviest(costs, parts, "refined") / makespans(costs[None], parts)[0] - 1)
    assert np.mean(over) <= 1e-3
    assert max(over) <= 5e-3


@pytest.mark.parametrize("equal_sizes", [False, True])
def test_very_many_parts_are_even(equal_sizes: bool) -> None:
    costs = np.random.default_rng(0).uniform(1, 10, 65_536)
    assert heaviest(costs, 4096, "refined", equal_sizes) <= costs.sum() / 4096 * 1.0002
    assert heaviest(costs, 4096, "refined", equal_sizes) <= heaviest(
        costs, 4096, "lpt", equal_sizes
    ) * (1 + 1e-12)


@given(costs_lists, st.integers(1, 8), st.integers(0, 99))
def test_swaps_keep_the_number_of_items_and_never_raise_the_heaviest(
    costs: list[float], parts: int, seed: int
) -> None:
    ordered = -np.sort(-np.array(costs, float))
    before = np.random.default_rng(seed).integers(0, parts, len(ordered))
    for shakes in (0, 200):
        after = swap_kernel(ordered, before, parts, 0.0, shakes)
        assert np.array_equal(
            np.bincount(before, minlength=parts), np.bincount(after, minlength=parts)
        )
        most = sum_by(before, ordered, parts).max()
        assert sum_by(after, ordered, parts).max() <= most * (1 + 1e-9)


def test_a_stuck_heaviest_part_is_lowered_after_swaps_between_others() -> None:
    costs = -np.sort(-np.random.default_rng(7).integers(10, 100, 96).astype(float))
    start = np.arange(96) % 32
    stuck, shaken = (
        sum_by(swap_kernel(costs, start, 32, 0.0, shakes), costs, 32).max() for shakes in (0, 2000)
    )
    assert np.ceil(costs.sum() / 32) <= shaken < stuck
