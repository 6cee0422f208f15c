"""Blocks of sorted units: levels, waves and moves, each against a plain version."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.internals import (
    SortedUnits,
    block_cost,
    block_costs,
    block_start,
    deal_blocks,
    even_blocks,
    feasible_starts,
    fewest_cuts,
    levels_of,
    levels_to_try,
    lower_levels,
    offsets_of,
    slowest_lowered,
    step_time,
    wave_cuts,
    wave_table,
    whole_prices,
)

BUDGET = 120


def sorted_units(items: list[tuple[int, int, int]]) -> SortedUnits:
    """Units of (width, rows, patches), at most 20 patches and `BUDGET` slots in a block."""
    width, rows, patches = np.array(sorted(items)).T
    price = width + 0.1 * width**2
    extra = patches[:, None].astype(np.float64)
    starts = feasible_starts(rows, np.maximum(BUDGET // width, 1), extra, np.array([20.0]))
    whole = whole_prices(price)
    return SortedUnits(rows, offsets_of(rows), width, price, whole, starts, 1.1)


def some_units(most: int) -> st.SearchStrategy[SortedUnits]:
    several = st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(0, 9))
    single = st.tuples(st.integers(1, 40), st.just(1), st.just(0))
    lists = st.lists(several, min_size=1, max_size=most) | st.lists(
        single, min_size=1, max_size=most
    )
    return st.builds(sorted_units, lists)


def assert_within_limits(units: SortedUnits, ends: np.ndarray) -> None:
    begins = np.concatenate(([0], ends[:-1]))
    assert (ends > begins).all()
    assert ends[-1] == len(units.price)
    assert (units.starts[ends] <= begins).all()


@given(some_units(12), st.floats(0.5, 2000))
def test_a_block_starts_as_early_as_its_level_and_the_limits_allow(
    units: SortedUnits, level: float
) -> None:
    for end in range(1, len(units.price) + 1):
        fitting = [
            start
            for start in range(units.starts[end], end)
            if block_cost(units, start, end) <= level
        ]
        assert block_start(units, end, level) == (fitting[0] if fitting else end)


@examples(60)
@given(some_units(8), st.integers(1, 4))
def test_even_blocks_have_the_least_dearest_block_of_all_cuts(
    units: SortedUnits, most: int
) -> None:
    n = len(units.price)
    best = np.inf
    for count in range(min(most, n)):
        for cuts in combinations(range(1, n), count):
            ends = np.array([*cuts, n])
            if (units.starts[ends] <= np.array([0, *cuts])).all():
                best = min(best, block_costs(units, ends).max())
    found = even_blocks(units, 0, n, most)
    if best == np.inf:
        assert len(found) == 0
    else:
        assert_within_limits(units, found)
        assert block_costs(units, found).max() == pytest.approx(best, rel=1e-8)


@given(some_units(30), st.integers(1, 9))
def test_the_table_of_waves_is_one_block_after_another(units: SortedUnits, ranks: int) -> None:
    levels = levels_to_try(units, ranks, 1)
    reach, most = wave_table(units, levels, ranks)
    for at, level in enumerate(levels):
        for end in range(1, len(units.price) + 1):
            j, dearest = end, 0.0
            for _ in range(ranks):
                i = block_start(units, j, level) if j > 0 else 0
                dearest = max(dearest, block_cost(units, i, j) if i < j else 0.0)
                j = i
            assert (reach[at, end], most[at, end]) == (j, dearest)


@examples(60)
@given(some_units(30), st.integers(2, 4), st.integers(0, 2), st.booleans())
def test_waves_fit_and_lowering_their_levels_never_makes_them_slower(
    units: SortedUnits, ranks: int, more: int, relative: bool
) -> None:
    fewest = -(-fewest_cuts(units.starts) // ranks)
    waves = min(fewest + more, len(units.price))
    ends = wave_cuts(units, ranks, fewest, max(waves, fewest))[-1]
    waves = max(waves, fewest)
    assert_within_limits(units, ends)
    assert len(ends) <= waves * ranks
    lowered = lower_levels(units, ends, ranks, waves, relative, 20_000)
    assert_within_limits(units, lowered)
    assert len(lowered) <= waves * ranks
    before, after = (levels_of(units, cut, ranks, waves).sum() for cut in (ends, lowered))
    assert after <= before * (1 + 1e-12)


@examples(60)
@given(some_units(30), st.integers(2, 4), st.integers(0, 2))
def test_moves_keep_the_limits_and_never_make_the_slowest_rank_slower(
    units: SortedUnits, ranks: int, more: int
) -> None:
    waves = -(-fewest_cuts(units.starts) // ranks) + more
    ends = even_blocks(units, 0, len(units.price), ranks * waves)
    dealt = deal_blocks(units, ends, ranks, waves, "stride")
    before = np.bincount(dealt, block_costs(units, ends) - units.empty, ranks).max()
    ends, dealt, time = slowest_lowered(units, ends, dealt, ranks, waves, 20_000)
    assert_within_limits(units, ends)
    assert np.bincount(dealt, minlength=ranks).max() <= waves
    load = np.bincount(dealt, block_costs(units, ends) - units.empty, ranks)
    assert load.max() == pytest.approx(time)
    assert time <= before * (1 + 1e-12)


def test_the_time_of_a_step_counts_waves_or_ranks_and_empty_micro_batches() -> None:
    units = sorted_units([(10, 1, 0), (10, 2, 0), (20, 1, 0)])  # rows cost 20, 20 and 60
    address = np.array([0, 0, 3])  # wave 0: 3 rows on rank 0; wave 1: 1 row on rank 1
    assert step_time(units, address, 2, 2, True)[0] == pytest.approx(60 + 60)
    time, total = step_time(units, address, 2, 2, False)
    assert time == pytest.approx(61.1)
    assert total == pytest.approx(60 + 60 + 2 * 1.1)
