"""The kernels that search the packs of a step, called directly, with every kind of limit."""

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.internals import IntArray, Movable, Room, Shape, improve, search_all

SPANS = ((1, 6), (1, 4), (1, 3), (0, 2))  # units, ranks, waves, limits


def time_of(units: Movable, shape: Shape, pack_of: IntArray) -> float:
    """The heaviest load of each group, of both works, by the definition."""
    micro, total = pack_of // shape.rows, 0.0
    for work in (units.cost, units.second):
        load = np.bincount(micro, work, shape.waves * shape.ranks).reshape(-1, shape.ranks)
        total += load.sum(axis=0).max() if shape.by_rank else load.max(axis=1).sum()
    return float(total)


def random_units(rng: np.random.Generator, n: int, limits: int, *, both: bool) -> Movable:
    size = rng.integers(1, 60, n)
    cost = np.where(rng.random() < 0.5, size * 24, rng.integers(1, 1500, n)).astype(np.float64)
    share = rng.choice([0.15, 0.5])
    most = rng.choice([3, 500])
    second = np.where(rng.random(n) < share, rng.integers(1, most, n), 0).astype(float) * both
    extra = rng.integers(0, 20, (n, limits)).astype(float)
    kind = (second > 0).astype(np.int64)
    return Movable(size, cost, second, extra, rng.integers(1, 3, n), kind)


@pytest.mark.parametrize("seed", range(1000))
def test_exchanges_keep_every_limit_and_never_make_a_step_slower(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, rows, waves = (int(rng.integers(1, most)) for most in (6, 4, 5))
    by_rank, equal = rng.random(2) < 0.5
    shape = Shape(ranks, rows, waves, bool(by_rank), bool(equal), special=-1)
    n, limits = int(rng.integers(1, 41)), int(rng.integers(0, 3))
    second, loose = rng.choice(["none", "anywhere", "apart"]), rng.choice([0.0, 0.02, 0.3])
    units = random_units(rng, n, limits, both=second != "none")
    packs = shape.ranks * shape.rows * shape.waves
    pack_of = rng.permutation(n) % packs
    of_kind = np.flatnonzero(units.kind)
    special = int(rng.integers(1, shape.waves + 1))
    enough = len(of_kind) >= special * shape.ranks  # one in each of these micro-batches
    if second == "apart" and enough:
        pack_of[of_kind] = np.arange(len(of_kind)) % (special * shape.ranks) * shape.rows
        shape = shape._replace(special=special)

    def held(of_unit: IntArray) -> NDArray[np.float64]:
        taken = np.column_stack((units.size, units.extra))
        sums = np.zeros((packs, taken.shape[1]))
        np.add.at(sums, of_unit, taken)
        return sums

    most = held(pack_of).max(axis=0) * rng.choice([1.0, 1.2])
    room = Room(int(most[0]), most[1:])
    found, time = improve(units, room, shape, pack_of, 2_000, 5, float(loose), 0.0, 0)

    assert np.isclose(time, time_of(units, shape, found), rtol=1e-9)
    assert time <= time_of(units, shape, pack_of) * (1 + 1e-9)
    assert (held(found).max(axis=0) <= [room.capacity, *room.caps]).all()
    rank, before = (at // shape.rows % shape.ranks for at in (found, pack_of))
    if shape.equal:
        segments = [np.bincount(at, units.segments, shape.ranks) for at in (rank, before)]
        assert (segments[0] == segments[1]).all()
    if shape.special >= 0:
        of_micro = np.bincount(found // shape.rows, units.kind, shape.waves * shape.ranks)
        edge = shape.special * shape.ranks
        assert (of_micro[:edge] >= 1).all()
        assert (of_micro[edge:] == 0).all()


@pytest.mark.parametrize("seed", range(300))
def test_a_search_of_all_assignments_finds_the_fastest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, ranks, waves, limits = (int(rng.integers(*span)) for span in SPANS)
    units = random_units(rng, n, limits, both=False)
    shape = Shape(ranks, 1, waves, by_rank=False, equal=False, special=-1)
    packs = ranks * waves
    full = units.size.sum() / packs * rng.choice([1.0, 1.3, 2.0])
    room = Room(int(max(units.size.max(), full)), np.full(limits, 25.0))

    def fits(pack_of: IntArray) -> bool:
        """Whether each pack keeps its limits, or has one unit."""
        for pack in range(packs):
            own = pack_of == pack
            over = units.size[own].sum() > room.capacity
            over |= (units.extra[own].sum(axis=0) > room.caps).any()
            if over and own.sum() > 1:
                return False
        return True

    every = [np.array(pack_of) for pack_of in product(range(packs), repeat=n)]
    times = [time_of(units, shape, pack_of) for pack_of in every if fits(pack_of)]
    order = np.lexsort((-units.size, -units.cost))
    found, proved = search_all(units, room, shape, order, np.inf, 0.0, 10**6)
    assert proved
    if not times:
        assert len(found) == 0
        return
    assert fits(found)
    assert np.isclose(time_of(units, shape, found), min(times), rtol=1e-9)
