"""The kernels that form packs of units, called directly, with limits in addition to slots."""

import numpy as np
import pytest

from tests.internals import IntArray, construct

SEEDS = range(200)


def assert_packed(
    size: IntArray, taken: IntArray, pack_of: IntArray, capacity: int, cap: float
) -> None:
    """Every unit is in a pack, and packs of several units keep both limits."""
    assert (pack_of >= 0).all()
    for pack in np.unique(pack_of):
        here = pack_of == pack
        kept = size[here].sum() <= capacity and taken[here].sum() <= cap
        assert kept or here.sum() == 1


def test_units_stay_on_their_rank_while_one_of_its_packs_has_room() -> None:
    size, rank_of = np.array([5, 5, 3, 3]), np.array([0, 0, 1, 1])
    further = np.zeros((4, 0)), 5, np.zeros(0)
    for strict in (False, True):
        pack_of = construct.fit_ranks(
            np.arange(4), rank_of, size, size.astype(float), *further, 2, 2, strict
        )
        assert pack_of.tolist() == [0, 1, 2, 3]


def test_a_unit_without_room_on_its_rank_goes_to_the_rank_with_the_least_cost() -> None:
    size, rank_of = np.array([4, 4, 3, 2]), np.array([0, 0, 1, 2])
    columns = np.arange(4), rank_of, size, size.astype(float), np.zeros((4, 0)), 6, np.zeros(0)
    assert construct.fit_ranks(*columns, 3, 1, False).tolist() == [0, 2, 1, 2]
    assert len(construct.fit_ranks(*columns, 3, 1, True)) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_packs_inside_ranks_keep_every_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, ranks, packs = (int(rng.integers(1, most)) for most in (30, 4, 8))
    size, taken, rank_of = rng.integers(1, 9, n), rng.integers(0, 5, n), rng.integers(0, ranks, n)
    columns = np.argsort(-size), rank_of, size, size.astype(float), taken[:, None].astype(float)
    for strict in (False, True):
        pack_of = construct.fit_ranks(*columns, 10, np.full(1, 6.0), ranks, packs, strict)
        if len(pack_of):
            assert_packed(size, taken, pack_of, 10, 6.0)
            assert pack_of.max() < ranks * packs
            assert not strict or (pack_of // packs == rank_of).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_lightest_packs_with_room_keep_every_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, packs = int(rng.integers(1, 30)), int(rng.integers(1, 16))
    size, taken = np.sort(rng.integers(1, 9, n))[::-1], rng.integers(0, 5, n)
    work = rng.uniform(1, 100, n)
    columns = size, work, taken[:, None].astype(float), 10, np.full(1, 6.0), packs
    pack_of = construct.fill_waves(*columns, np.full(n, -1), 1, 0, 1.0)
    used, held, load = np.zeros(packs), np.zeros(packs), np.zeros(packs)
    for unit in range(n):  # by the definition
        room = (used + size[unit] <= 10) & (held + taken[unit] <= 6) | (used == 0)
        if not room.any():
            assert len(pack_of) == 0
            return
        pack = np.where(room, load, np.inf).argmin()
        used[pack], held[pack] = used[pack] + size[unit], held[pack] + taken[unit]
        load[pack] += work[unit]
    assert_packed(size, taken, pack_of, 10, 6.0)
    assert np.allclose(np.sort(np.bincount(pack_of, work, packs)), np.sort(load))
