"""The kernels that search the packs of a step, called directly, with every kind of limit."""

from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.internals import FloatArray, IntArray, Shape, exchange, search_all, sum_by

SPANS = ((1, 6), (1, 4), (1, 3), (0, 2))  # units, ranks, waves, limits


class Columns(NamedTuple):
    """Units as `exchange` takes them; padded ones are numbered from narrow to wide.

    `width` says how many rows of a padded pack fit, with a unit as its widest.
    """

    size: IntArray
    cost: FloatArray
    second: FloatArray
    segments: IntArray
    extra: FloatArray
    width: IntArray

    def most(self, budget: int, padded: bool) -> IntArray:
        """What a pack holds with each unit as its widest; `budget` slots in all."""
        return budget // self.width if padded else np.full(len(self.size), budget)


def works_of(units: Columns, shape: Shape, pack_of: IntArray) -> list[FloatArray]:
    """Both works of each micro-batch, by the definition."""
    micro, micros = pack_of // shape.rows, shape.waves * shape.ranks
    if not shape.padded:
        return [sum_by(micro, work, micros) for work in (units.cost, units.second)]
    work = np.full(micros, shape.empty)
    for pack in np.unique(pack_of):
        members = np.flatnonzero(pack_of == pack)
        work[pack] = units.size[members].sum() * units.cost[members].max()
    return [work]


def time_of(units: Columns, shape: Shape, pack_of: IntArray) -> float:
    """The heaviest load of each group, of both works, by the definition."""
    total = 0.0
    for work in works_of(units, shape, pack_of):
        load = work.reshape(-1, shape.ranks)
        total += load.sum(axis=0).max() if shape.by_rank else load.max(axis=1).sum()
    return float(total)


def taken(units: Columns, shape: Shape, pack_of: IntArray) -> NDArray[np.float64]:
    """What the units of each pack take: slots, and each further limit."""
    sums = np.zeros((shape.ranks * shape.rows * shape.waves, 1 + units.extra.shape[1]))
    np.add.at(sums, pack_of, np.column_stack((units.size, units.extra)))
    if shape.padded:  # rows at the width of the widest
        widest = np.zeros(len(sums))
        np.maximum.at(widest, pack_of, units.width)
        sums[:, 0] *= widest
    return sums


def random_units(rng: np.random.Generator, n: int, limits: int, *, both: bool) -> Columns:
    size = rng.integers(1, 60, n)
    cost = np.where(rng.random() < 0.5, size * 24, rng.integers(1, 1500, n)).astype(np.float64)
    share = rng.choice([0.15, 0.5])
    most = rng.choice([3, 500])
    second = np.where(rng.random(n) < share, rng.integers(1, most, n), 0).astype(float) * both
    extra = rng.integers(0, 20, (n, limits)).astype(float)
    return Columns(size, cost, second, rng.integers(1, 3, n), extra, np.ones(n, np.int64))


def random_rows(rng: np.random.Generator, n: int, limits: int) -> Columns:
    """Units of padded rows: those of one width often cost the same."""
    width = np.sort(rng.integers(1, rng.choice([4, 60]), n))
    cost = width * 24.0 + width**2 * rng.choice([0.0, 1.0])
    size = rng.integers(1, rng.choice([2, 4]), n)
    extra = rng.integers(0, 20, (n, limits)).astype(float)
    return Columns(size, cost, np.zeros(n), size, extra, width)


@pytest.mark.parametrize("seed", range(1000))
def test_exchanges_keep_every_limit_and_never_make_a_step_slower(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, rows, waves = (int(rng.integers(1, most)) for most in (6, 4, 5))
    by_rank, equal = rng.random(2) < 0.5
    shape = Shape(ranks, rows, waves, bool(by_rank), bool(equal), -1, False, 0.0)
    n, limits = int(rng.integers(1, 41)), int(rng.integers(0, 3))
    second, loose = rng.choice(["none", "anywhere", "apart"]), rng.choice([0.0, 0.02, 0.3])
    units = random_units(rng, n, limits, both=second != "none")
    packs = shape.ranks * shape.rows * shape.waves
    pack_of = rng.permutation(n) % packs
    special = np.flatnonzero(units.second)
    first = int(rng.integers(1, shape.waves + 1))
    enough = len(special) >= first * shape.ranks  # one in each of these micro-batches
    if second == "apart" and enough:
        pack_of[special] = np.arange(len(special)) % (first * shape.ranks) * shape.rows
        shape = shape._replace(special=first)

    found = assert_exchanged(units, shape, pack_of, rng, float(loose))
    rank, before = (at // shape.rows % shape.ranks for at in (found, pack_of))
    if shape.equal:
        segments = [np.bincount(at, units.segments, shape.ranks) for at in (rank, before)]
        assert (segments[0] == segments[1]).all()
    if shape.special >= 0:
        held = np.bincount(found // shape.rows, units.second > 0, shape.waves * shape.ranks)
        edge = shape.special * shape.ranks
        assert (held[:edge] >= 1).all()
        assert (held[edge:] == 0).all()


@pytest.mark.parametrize("seed", range(1000))
def test_exchanges_of_padded_rows_keep_limits_and_leave_no_pack_empty(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, waves = (int(rng.integers(1, most)) for most in (6, 5))
    n, limits = int(rng.integers(1, 41)), int(rng.integers(0, 3))
    units, by_rank = random_rows(rng, n, limits), bool(rng.random() < 0.5)
    shape = Shape(ranks, 1, waves, by_rank, False, -1, True, float(rng.choice([1.0, 24.0])))
    pack_of = rng.permutation(n) % (ranks * waves)
    found = assert_exchanged(units, shape, pack_of, rng, float(rng.choice([0.0, 0.02, 0.3])))
    assert set(np.unique(found)) >= set(np.unique(pack_of))


def assert_exchanged(
    units: Columns, shape: Shape, pack_of: IntArray, rng: np.random.Generator, loose: float
) -> IntArray:
    """Exchange units from `pack_of` on, within what these packs take, or a fifth more."""
    most = taken(units, shape, pack_of).max(axis=0) * rng.choice([1.0, 1.2])
    holds, columns = units.most(int(most[0]), shape.padded), units[:5]
    found, time = exchange(*columns, holds, most[1:], shape, pack_of, 2_000, 5, loose, 0.0, 0)
    assert np.isclose(time, time_of(units, shape, found), rtol=1e-9)
    assert time <= time_of(units, shape, pack_of) * (1 + 1e-9)
    assert (taken(units, shape, found).max(axis=0) <= most).all()
    return found


def test_exchanges_of_padded_rows_gather_equal_widths() -> None:
    width = np.array([1, 1, 8, 8])
    ones, none, extra = np.ones(4, np.int64), np.zeros(4), np.zeros((4, 0))
    columns = ones, width.astype(float), none, ones, extra, np.full(4, 4), np.zeros(0)
    pack_of = np.array([0, 2, 1, 3])
    shape = Shape(2, 1, 2, False, False, -1, True, 1.0)
    found, time = exchange(*columns, shape, pack_of, 2_000, 5, 0.02, 0.0, 0)
    assert time == 9.0, "waves of 1, 1 and 8, 8; two of 1, 8 take 16"
    assert found[0] // 2 == found[1] // 2 != found[2] // 2 == found[3] // 2


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("seed", range(200))
def test_a_search_of_all_assignments_finds_the_fastest(
    seed: int, by_rank: bool, padded: bool
) -> None:
    rng = np.random.default_rng(seed)
    n, ranks, waves, limits = (int(rng.integers(*span)) for span in SPANS)
    units = random_rows(rng, n, limits) if padded else random_units(rng, n, limits, both=False)
    shape = Shape(ranks, 1, waves, by_rank, False, -1, padded, 0.0)
    packs, alone = ranks * waves, units.size * units.width
    full = alone.sum() / packs * rng.choice([1.0, 1.3, 2.0])
    budget, caps = int(max(alone.max(), full)), np.full(limits, 25.0)

    def fits(pack_of: IntArray) -> bool:
        """Whether each pack keeps its limits, or has one unit."""
        over = (taken(units, shape, pack_of) > [budget, *caps]).any(axis=1)
        return not (over & (np.bincount(pack_of, minlength=packs) > 1)).any()

    every = [np.array(pack_of) for pack_of in product(range(packs), repeat=n)]
    times = [time_of(units, shape, pack_of) for pack_of in every if fits(pack_of)]
    order = np.arange(n)[::-1].copy() if padded else np.lexsort((-units.size, -units.cost))
    holds = units.most(budget, padded)
    further = units.extra, holds, caps, shape, order
    found, proved = search_all(units.size, units.cost, *further, np.inf, 0.0, 10**6)
    assert proved
    if not times:
        assert len(found) == 0
        return
    assert fits(found)
    assert np.isclose(time_of(units, shape, found), min(times), rtol=1e-9)
    # Nor is it missed where another time is known that is hardly slower.
    nearly, _ = search_all(units.size, units.cost, *further, min(times) * 1.0001, 0.0, 10**6)
    assert np.isclose(time_of(units, shape, nearly), min(times), rtol=1e-9)
    # Nothing is found below the best, and few tries prove nothing.
    assert len(search_all(units.size, units.cost, *further, min(times), 0.0, 10**6)[0]) == 0
    assert not search_all(units.size, units.cost, *further, np.inf, 0.0, n)[1] or n == 1


def test_a_pack_that_the_smallest_unit_would_fill_is_not_full() -> None:
    size, cost = np.array([5, 9, 1]), np.array([10.0, 5.0, 5.0])
    shape, none = Shape(2, 1, 1, False, False, -1, False, 0.0), np.zeros((3, 0))
    columns = size, cost, none, np.full(3, 10), np.zeros(0), shape, np.arange(3)
    found, proved = search_all(*columns, 11.0, 0.0, 1000)
    assert proved
    assert found.tolist() == [0, 1, 1], "10 beside 5 + 5, where the last unit fills its pack"
