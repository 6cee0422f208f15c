"""Blocks of sorted units: levels, waves and moves, each against a plain version."""

from itertools import combinations, combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost, Padded, Recipe, Topology
from tests.examples import examples
from tests.internals import (
    Rows,
    Segments,
    SyncEvery,
    block_cost,
    block_costs,
    block_start,
    deal_blocks,
    even_blocks,
    even_waves,
    feasible_starts,
    fewest_cuts,
    levels_of,
    lower_levels,
    offsets_of,
    optimal_cuts,
    problem_of,
    slowest_lowered,
    units_of,
    whole_prices,
)

BUDGET = 120


def sorted_units(items: list[tuple[int, int, int]]) -> Rows:
    """Units of (width, rows, patches), at most 20 patches and `BUDGET` slots in a block."""
    width, rows, patches = np.array(sorted(items)).T
    price = width + 0.1 * width**2
    extra = patches[:, None].astype(np.float64)
    starts = feasible_starts(rows, np.maximum(BUDGET // width, 1), extra, np.array([20.0]))
    whole = whole_prices(price)
    return Rows(rows, offsets_of(rows), price, whole, starts, 1.1)


def some_units(most: int) -> st.SearchStrategy[Rows]:
    several = st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(0, 9))
    single = st.tuples(st.integers(1, 40), st.just(1), st.just(0))
    lists = st.lists(several, min_size=1, max_size=most) | st.lists(
        single, min_size=1, max_size=most
    )
    return st.builds(sorted_units, lists)


def assert_within_limits(units: Rows, ends: np.ndarray) -> None:
    begins = np.concatenate(([0], ends[:-1]))
    assert (ends > begins).all()
    assert ends[-1] == len(units.price)
    assert (units.starts[ends] <= begins).all()


@given(some_units(12), st.floats(0.5, 2000))
def test_a_block_starts_as_early_as_its_level_and_the_limits_allow(
    units: Rows, level: float
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
def test_even_blocks_have_the_least_dearest_block_of_all_cuts(units: Rows, most: int) -> None:
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


def cheapest_cuts(units: Rows, ranks: int, waves: int) -> np.ndarray:
    blocks = min(ranks * waves, len(units.price))
    return optimal_cuts(units.scaled, units.rows, units.starts, blocks)


def starts_of(ends: np.ndarray, ranks: int, waves: int) -> np.ndarray:
    """Where each wave of `ranks` blocks begins, and the number of units."""
    bounds = np.append(0, ends)
    return bounds[np.maximum(len(ends) - np.arange(waves, -1, -1) * ranks, 0)]


@examples(60)
@given(some_units(30), st.integers(1, 4), st.integers(0, 2))
def test_even_waves_fit_and_are_no_slower_than_the_cuts_they_start_from(
    units: Rows, ranks: int, more: int
) -> None:
    waves = -(-fewest_cuts(units.starts) // ranks) + more
    ends = cheapest_cuts(units, ranks, waves)
    even = even_waves(units, starts_of(ends, ranks, waves), ranks)
    assert_within_limits(units, even)
    assert len(even) <= waves * ranks
    costs = np.full(waves * ranks, units.empty)
    costs[waves * ranks - len(ends) :] = block_costs(units, ends)
    before = costs.reshape(waves, ranks).max(axis=1).sum()  # the narrowest blocks share a wave
    assert levels_of(units, even, ranks, waves).sum() <= before * 1.001 + 1e-9


def even_level(units: Rows, start: int, end: int, ranks: int) -> float:
    """The cost of a wave of these units, cut as evenly as possible; infinite if they do not fit."""
    ends = even_blocks(units, start, end, ranks)
    if not len(ends):
        return units.empty if start == end else np.inf
    return float(block_costs(units, np.append(start, ends))[1:].max())


def test_waves_are_close_to_the_most_even_contiguous_ones() -> None:
    over = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        units = sorted_units([(int(width), 1, 0) for width in rng.integers(1, 40, 12)])
        ranks, n = int(rng.integers(2, 4)), 12
        waves = max(-(-fewest_cuts(units.starts) // ranks), 2)
        least = min(
            sum(even_level(units, *bound, ranks) for bound in pairwise([0, *bounds, n]))
            for bounds in combinations_with_replacement(range(n + 1), waves - 1)
        )
        found = even_waves(
            units, starts_of(cheapest_cuts(units, ranks, waves), ranks, waves), ranks
        )
        over.append(levels_of(units, found, ranks, waves).sum() / least - 1)
    assert np.mean(over) < 0.02
    assert np.median(over) < 1e-9


@examples(60)
@given(some_units(30), st.integers(2, 4), st.integers(0, 2), st.booleans())
def test_lowering_the_levels_of_waves_never_makes_them_slower(
    units: Rows, ranks: int, more: int, by_share: bool
) -> None:
    waves = -(-fewest_cuts(units.starts) // ranks) + more
    ends = even_waves(units, starts_of(cheapest_cuts(units, ranks, waves), ranks, waves), ranks)
    lowered = lower_levels(units, ends, ranks, waves, 20_000, by_share)
    assert_within_limits(units, lowered)
    assert len(lowered) <= waves * ranks
    before, after = (levels_of(units, cut, ranks, waves).sum() for cut in (ends, lowered))
    assert after <= before * (1 + 1e-12)


@examples(60)
@given(some_units(30), st.integers(2, 4), st.integers(0, 2))
def test_moves_keep_the_limits_and_never_make_the_slowest_rank_slower(
    units: Rows, ranks: int, more: int
) -> None:
    waves = -(-fewest_cuts(units.starts) // ranks) + more
    ends = even_blocks(units, 0, len(units.price), ranks * waves)
    dealt = deal_blocks(units, ends, ranks, waves, "stride")
    before = np.bincount(dealt, block_costs(units, ends) - units.empty, ranks).max()
    ends, dealt = slowest_lowered(units, ends, dealt, ranks, waves, 20_000)
    assert_within_limits(units, ends)
    assert np.bincount(dealt, minlength=ranks).max() <= waves
    after = np.bincount(dealt, block_costs(units, ends) - units.empty, ranks).max()
    assert after <= before * (1 + 1e-12)


@pytest.mark.parametrize(("sync_every", "time"), [("micro_batch", 60 + 60), ("step", 61.1)])
def test_the_time_of_a_step_counts_waves_or_ranks_and_empty_micro_batches(
    sync_every: SyncEvery, time: float
) -> None:
    layout = Padded(max_tokens=100)
    recipe = Recipe(
        layout=layout, topology=Topology(dp=2), cost=Cost(per_pair=0.1), sync_every=sync_every
    )
    lengths, groups = np.array([20, 10, 10, 10]), np.array([7, 8, 8, 9])
    segments = Segments(np.arange(4), np.zeros(4, np.int64), lengths)
    problem = problem_of(units_of(segments, recipe, {}, groups), recipe, layout, lengths)
    assert problem.units.cost.tolist() == pytest.approx([20, 20, 60])  # of one row, narrow to wide
    assert problem.units.size.tolist() == [1, 2, 1]
    assert problem.units.of_segment.tolist() == [2, 1, 1, 0]
    address = np.array([0, 0, 3])  # wave 0: 3 rows on rank 0; wave 1: 1 row on rank 1
    assert problem.time(problem.works(address, 2)) == pytest.approx(time)
    assert problem.works(address, 2)[0].tolist() == pytest.approx(np.array([[60, 1.1], [1.1, 60]]))
