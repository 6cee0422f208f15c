"""Packing with large capacities and many bins: the same bins as the plain definitions."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Ragged, pack
from tests.examples import examples
from tests.internals import (
    PACKER_NAMES,
    IntArray,
    best_fit,
    best_fit_few,
    divide_bins,
    even_bins,
    fill_exactly,
    pack_bound,
)


@examples(300)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(60, 300))
def test_few_items_are_packed_as_with_a_table(lengths: list[int], capacity: int) -> None:
    array = np.array(lengths)
    table, few = best_fit(array, capacity), best_fit_few(array, capacity)
    assert np.array_equal(table.values, few.values)
    assert np.array_equal(table.offsets, few.offsets)


@pytest.mark.parametrize("packer", PACKER_NAMES)
@pytest.mark.parametrize("factor", [2**7, 2**15, 2**25])
def test_bins_do_not_depend_on_the_unit_of_length(packer: str, factor: int) -> None:
    """Lengths and capacity times a factor pack the same way, also beyond any table."""
    lengths = np.clip(np.random.default_rng(0).lognormal(8, 0.8, 300), 1, 32768).astype(np.int64)
    small = pack(lengths, 32768, packer)
    large = pack(lengths * factor, 32768 * factor, packer)
    if packer == "optimal":  # its tolerances are in tokens
        assert len(large) <= len(pack(lengths * factor, 32768 * factor))
        assert len(large) >= pack_bound(lengths, 32768)
    else:
        assert large.tolist() == small.tolist()
    assert sorted(large.values.tolist()) == list(range(300))
    assert large.sums(lengths * factor).max() <= 32768 * factor


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.integers(0, 4))
def test_without_looks_for_partners_bins_take_the_longest_length_that_fits(
    lengths: list[int], shift: int
) -> None:
    order = np.argsort(lengths, kind="stable")
    bin_of, bins, _ = fill_exactly(np.array(lengths)[order], order, 200, shift, 0, 0, 0)
    left, filled = sorted(lengths), []
    while left:
        row: list[int] = []
        while fitting := [length for length in left if sum(row) + length <= 200]:
            row.append(fitting[-1])
            left.remove(fitting[-1])
        filled.append(sorted(row))
    found = [sorted(lengths[i] for i in np.flatnonzero(bin_of == b)) for b in range(bins)]
    assert found == filled


def divided(sizes: IntArray, bins: list[list[int]], target: int) -> list[list[int]]:
    """As defined: the largest bin in two halves, longest first, each item to the smaller half."""
    rows = [list(row) for row in bins]
    heap = [(-int(sizes[row].sum()), at) for at, row in enumerate(rows) if len(row) > 1]
    heapq.heapify(heap)
    while len(rows) < target and heap:
        _, at = heapq.heappop(heap)
        halves: tuple[list[int], list[int]] = ([], [])
        for item in sorted(rows[at], key=lambda i: -sizes[i]):
            first, second = (int(sizes[half].sum()) for half in halves)
            halves[second < first].append(item)
        rows[at] = halves[0]
        rows.append(halves[1])
        for index in (at, len(rows) - 1):
            if len(rows[index]) > 1:
                heapq.heappush(heap, (-int(sizes[rows[index]].sum()), index))
    return rows


@examples(200)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 10), st.integers(1, 40)
)
def test_bins_are_divided_as_defined(lengths: list[int], count: int, target: int) -> None:
    sizes = np.array(lengths)
    rows = [[*range(first, len(sizes), count)] for first in range(min(count, len(sizes)))]
    assert divide_bins(sizes, Ragged.of(rows), target).tolist() == divided(sizes, rows, target)


def test_many_bins_are_divided_and_evened_out() -> None:
    sizes = np.clip(np.random.default_rng(0).lognormal(7, 0.8, 60_000), 1, 8192).astype(np.int64)
    bins = pack(sizes, 8192)
    for more in (divide_bins(sizes, bins, 30_000), even_bins(sizes, bins, 8192, 30_000)):
        assert len(more) == 30_000
        assert sorted(more.values.tolist()) == list(range(len(sizes)))
        assert 0 < more.sums(sizes).min() <= more.sums(sizes).max() <= 8192
