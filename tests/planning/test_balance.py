"""Dealing costs to parts: never worse than the simple ways, near the best possible."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import partition
from evenstep.errors import ConfigError, InputError
from tests.internals import DEALS, FloatArray, IntArray, deal_packs, makespans, sum_by

costs_lists = st.lists(st.floats(0.1, 100), min_size=1, max_size=40)


def test_costs_too_small_to_be_scaled_are_dealt() -> None:
    part_of = partition([5e-324] * 5, 2)
    assert sorted(np.bincount(part_of).tolist()) == [2, 3]


def loads(costs: FloatArray, part_of: IntArray, parts: int) -> FloatArray:
    return sum_by(part_of, costs, parts)


@given(costs_lists, st.integers(1, 12), st.sampled_from(sorted(DEALS)), st.booleans())
def test_every_item_gets_one_part_and_equal_sizes_hold(
    costs: list[float], parts: int, algorithm: str, equal_sizes: bool
) -> None:
    part_of = partition(costs, parts, algorithm, equal_sizes=equal_sizes)
    assert len(part_of) == len(costs)
    assert 0 <= part_of.min() <= part_of.max() < parts
    count = np.bincount(part_of, minlength=parts)
    if equal_sizes:
        assert count.max() - count.min() <= 1


@given(costs_lists, st.integers(1, 12), st.booleans())
def test_refining_is_never_worse_than_lpt_nor_better_than_the_bound(
    costs: list[float], parts: int, equal_sizes: bool
) -> None:
    array = np.array(costs)
    heaviest = {
        name: loads(array, partition(array, parts, name, equal_sizes=equal_sizes), parts).max()
        for name in ("refined", "lpt")
    }
    assert heaviest["refined"] <= heaviest["lpt"] * (1 + 1e-12)
    assert heaviest["refined"] >= makespans(array[None], parts)[0] * (1 - 1e-12)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7))
def test_two_parts_of_few_items_are_close_to_the_very_best(costs: list[int]) -> None:
    array = np.array(costs, float)
    best = min(
        loads(array, np.array(choice), 2).max() for choice in product(range(2), repeat=len(costs))
    )
    # LPT is within 7/6 of the best on two parts.
    assert loads(array, partition(array, 2), 2).max() <= best * 7 / 6 + 1e-9


@pytest.mark.parametrize(("n", "parts"), [(512, 64), (1024, 64), (8192, 64), (4096, 512)])
@pytest.mark.parametrize("equal_sizes", [False, True])
def test_many_items_balance_to_a_thousandth(n: int, parts: int, equal_sizes: bool) -> None:
    costs = np.random.default_rng(n).uniform(1, 10, n)
    load = loads(costs, partition(costs, parts, equal_sizes=equal_sizes), parts)
    assert load.max() / load.mean() <= 1.001


def test_refining_is_within_a_thousandth_of_karmarkar_karp() -> None:
    for seed in range(10):
        costs = np.random.default_rng(seed).lognormal(8, 0.8, 1024)
        refined, differenced = (
            loads(costs, partition(costs, 32, name), 32).max()
            for name in ("refined", "karmarkar_karp")
        )
        assert refined <= differenced * 1.001


def test_unknown_algorithms_and_impossible_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match="refined, lpt, karmarkar_karp, stride"):
        partition([1.0], 1, "magic")
    with pytest.raises(ConfigError, match=r"parts must be an integer in \[1, 1048576\], got 0"):
        partition([1.0], 0)
    with pytest.raises(InputError):
        partition([float("nan")], 1)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 99), st.sampled_from(sorted(DEALS)))
def test_each_address_gets_one_pack(ranks: int, waves: int, seed: int, balance: str) -> None:
    costs = np.random.default_rng(seed).uniform(0, 9, ranks * waves)
    for often in ("micro_batch", "step"):
        address = deal_packs(costs, ranks, balance, often)
        assert sorted(address) == list(range(ranks * waves))


@pytest.mark.parametrize("seed", range(100))
def test_no_swap_within_a_wave_makes_the_sums_of_ranks_more_even(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, waves = int(rng.integers(2, 7)), int(rng.integers(1, 7))
    costs = rng.lognormal(3, 1, ranks * waves)
    by_address = np.empty(ranks * waves)
    by_address[deal_packs(costs, ranks, "refined", "micro_batch")] = costs
    by_wave = by_address.reshape(waves, ranks)
    load = by_wave.sum(axis=0)
    heavy = load.argmax()
    gain = by_wave[:, heavy, None] - by_wave
    reached = np.maximum(load[heavy] - gain, load + gain)
    assert (np.delete(reached, heavy, axis=1) >= load[heavy] * (1 - 1e-8)).all()


def test_each_way_to_synchronise_minimises_what_it_measures() -> None:
    """Either way the ranks sum to 9+1 and 8+1, but only waves pair 9 with 8."""
    costs = np.array([9.0, 1, 8, 1])
    lock_step = deal_packs(costs, 2, "refined", "micro_batch") // 2
    assert lock_step.tolist() == [0, 1, 0, 1]
    rank = deal_packs(costs, 2, "refined", "step") % 2
    assert sorted(loads(costs, rank, 2)) == [9, 10]


@pytest.mark.parametrize("equal_sizes", [False, True])
@given(st.lists(st.integers(1, 100), min_size=1, max_size=24), st.integers(2, 6))
def test_refined_is_never_far_behind_karmarkar_karp(
    equal_sizes: bool, costs: list[int], parts: int
) -> None:
    items = np.array(costs, float)
    loads = {
        name: sum_by(partition(items, parts, name, equal_sizes=equal_sizes), items, parts).max()
        for name in ("refined", "karmarkar_karp")
    }
    assert loads["refined"] <= 1.001 * loads["karmarkar_karp"]
