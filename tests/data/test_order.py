"""The order of an epoch is a seeded bijection in constant memory."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import InputError
from tests.internals import EpochOrder, IntArray


@given(st.integers(0, 3000), st.integers(0, 2**63), st.integers(0, 1000))
def test_every_sample_has_one_position(count: int, seed: int, epoch: int) -> None:
    order = EpochOrder(count=count, seed=seed, epoch=epoch)
    assert sorted(order.samples(np.arange(count))) == list(range(count))


@given(st.integers(1, 10**12), st.integers(0, 100))
def test_the_sample_at_a_position_does_not_depend_on_the_window(count: int, seed: int) -> None:
    order = EpochOrder(count=count, seed=seed, epoch=3)
    positions = np.unique(np.linspace(0, count - 1, 7).astype(np.int64))
    together = order.samples(positions)
    assert [order.samples(np.array([p]))[0] for p in positions] == together.tolist()
    assert len(np.unique(together)) == len(positions)
    assert ((together >= 0) & (together < count)).all()


def test_different_seeds_and_epochs_give_different_orders() -> None:
    """With seed + epoch as the key, (1000, 0) would be the same as (0, 1000)."""
    orders = [
        tuple(EpochOrder(count=50, seed=seed, epoch=epoch).samples(np.arange(50)))
        for seed, epoch in [
            (0, 0),
            (0, 1),
            (1, 0),
            (1000, 0),
            (0, 1000),
            (999, 1),
            (11, 1),
            (1, 11),
        ]
    ]
    assert len(set(orders)) == len(orders)


def test_the_order_looks_random() -> None:
    """Position and sample id are uncorrelated, and neighbours are separated."""
    order = EpochOrder(count=100_000, seed=5, epoch=0)
    samples = order.samples(np.arange(100_000))
    assert abs(np.corrcoef(samples, np.arange(100_000))[0, 1]) < 0.01
    steps = np.abs(np.diff(samples))
    assert abs(steps.mean() / 100_000 - 1 / 3) < 0.01
    counts = np.bincount(samples[:1000] // 10_000, minlength=10)
    assert ((counts > 60) & (counts < 140)).all()


def chance(observed: IntArray) -> float:
    """Chi-square test: how likely equal chances give counts that differ this much or more."""
    expected = observed.sum() / len(observed)
    distance = float(((observed - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(observed) - 1) / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("over", ["epochs", "seeds"])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_items_are_equally_likely(count: int, over: str) -> None:
    number = {order: n for n, order in enumerate(permutations(range(count)))}
    observed = np.zeros(math.factorial(count), np.int64)
    for n in range(max(2000, 20 * len(observed))):
        seed, epoch = (1, n) if over == "epochs" else (n, 0)
        order = EpochOrder(count=count, seed=seed, epoch=epoch).samples(np.arange(count))
        observed[number[tuple(order.tolist())]] += 1
    assert chance(observed) > 0.001


@pytest.mark.parametrize("count", [7, 16, 17, 63, 64, 65, 200])
def test_every_distance_between_neighbours_is_equally_likely(count: int) -> None:
    """Feistel rounds fail this up to 64 items."""
    orders = [
        EpochOrder(count=count, seed=3, epoch=n).samples(np.arange(count)) for n in range(10_000)
    ]
    distances = np.mod(np.diff(np.stack(orders)), count)
    assert chance(np.bincount(distances.ravel(), minlength=count)[1:]) > 0.001


@pytest.mark.parametrize("count", [64, 65])
def test_the_order_of_a_seed_and_epoch_is_fixed(count: int) -> None:
    """Saved cursors rely on it."""
    order = EpochOrder(count=count, seed=3, epoch=1).samples(np.arange(6))
    assert order.tolist() == {64: [22, 45, 34, 61, 37, 57], 65: [57, 16, 63, 45, 7, 34]}[count]


def test_without_shuffling_samples_keep_their_stored_order() -> None:
    order = EpochOrder(count=4, seed=1, epoch=2, shuffle=False)
    assert order.samples(np.arange(4)).tolist() == [0, 1, 2, 3]


def test_positions_outside_the_epoch_are_refused() -> None:
    with pytest.raises(InputError, match=r"positions must be in \[0, 3\)"):
        EpochOrder(count=3, seed=0, epoch=0).samples(np.array([1, 3]))
