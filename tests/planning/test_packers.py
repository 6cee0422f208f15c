"""Packers against plain-Python oracles, and against the bound."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import pack
from evenstep.errors import ConfigError, InputError
from tests.examples import examples
from tests.internals import PACKER_NAMES, PACKERS, pack_bound, uses_seed
from tests.internals import best_fit_module as best_fit

items = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def first_fit(lengths: list[int], order: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for item in order:
        for row in bins:
            if sum(lengths[i] for i in row) + lengths[item] <= capacity:
                row.append(item)
                break
        else:
            bins.append([item])
    return bins


def best_fit_bins(lengths: list[int], capacity: int) -> int:
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        chosen = min(fitting) if fitting else capacity
        if fitting:
            spaces.remove(chosen)
        spaces.append(chosen - length)
    return len(spaces)


def modified_first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The five phases as published, without any data structure."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    large = [i for i in order if 2 * lengths[i] > capacity]
    medium = [i for i in order if capacity < 3 * lengths[i] and 2 * lengths[i] <= capacity]
    small = [i for i in order if capacity < 6 * lengths[i] and 3 * lengths[i] <= capacity]
    tiny = [i for i in order if 6 * lengths[i] <= capacity]
    bins = [[i] for i in large]
    paired = set()

    def room(row: list[int]) -> int:
        return capacity - sum(lengths[i] for i in row)

    for number, row in enumerate(bins):
        for i in medium:
            if lengths[i] <= room(row):
                row.append(i)
                medium.remove(i)
                paired.add(number)
                break
    for number in reversed(range(len(bins))):
        if number in paired or len(small) < 2:
            continue
        row, least, second = bins[number], small[-1], small[-2]
        if lengths[least] + lengths[second] > room(row):
            continue
        row.append(least)
        small.remove(least)
        mate = next(i for i in small if lengths[i] <= room(row))
        row.append(mate)
        small.remove(mate)
    rest = sorted(medium + small + tiny, key=lambda i: (-lengths[i], i))
    for row in bins:
        while True:
            found = next((i for i in rest if lengths[i] <= room(row)), None)
            if found is None:
                break
            row.append(found)
            rest.remove(found)
    return bins + first_fit(lengths, rest, capacity)


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """Exact, by trying every way to pack the items, longest first."""
    ordered = sorted(lengths, reverse=True)
    best = len(ordered)

    def put(at: int, spaces: list[int]) -> None:
        nonlocal best
        if len(spaces) >= best:
            return
        if at == len(ordered):
            best = len(spaces)
            return
        for number in range(len(spaces)):
            if spaces[number] >= ordered[at] and spaces[number] not in spaces[:number]:
                spaces[number] -= ordered[at]
                put(at + 1, spaces)
                spaces[number] += ordered[at]
        put(at + 1, [*spaces, capacity - ordered[at]])

    put(0, [])
    return best


@given(items, st.integers(40, 100), st.sampled_from(PACKER_NAMES), st.integers(0, 3))
def test_every_item_is_packed_once_and_no_bin_overflows(
    lengths: list[int], capacity: int, packer: str, seed: int
) -> None:
    bins = pack(lengths, capacity, packer, seed=seed)
    assert sorted(bins.values) == list(range(len(lengths)))
    assert bins.sums(np.array(lengths)).max() <= capacity
    assert bins.lengths.min() >= 1
    assert len(bins) >= pack_bound(np.array(lengths), capacity)


def test_recipes_know_every_packer_and_which_of_them_use_the_seed() -> None:
    assert tuple(PACKERS) == PACKER_NAMES
    lengths = list(range(1, 60))
    for name in PACKER_NAMES:
        bins = [pack(lengths, 80, name, seed=seed).tolist() for seed in (1, 2)]
        assert (bins[0] != bins[1]) == uses_seed(name)


@given(items, st.integers(40, 100))
def test_first_fit_decreasing_is_that_of_the_definition(lengths: list[int], capacity: int) -> None:
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i), reverse=True)
    assert pack(lengths, capacity, "first_fit_decreasing").tolist() == first_fit(
        lengths, order, capacity
    )


@examples(300)
@given(items, st.integers(40, 120))
def test_modified_first_fit_is_that_of_the_definition(lengths: list[int], capacity: int) -> None:
    ours = pack(lengths, capacity, "modified_first_fit_decreasing").tolist()
    by_length = [sorted(lengths[i] for i in row) for row in ours]
    expected = [sorted(lengths[i] for i in row) for row in modified_first_fit(lengths, capacity)]
    assert by_length == expected


@given(items, st.integers(40, 200))
def test_best_fit_decreasing_is_that_of_the_definition(lengths: list[int], capacity: int) -> None:
    assert len(pack(lengths, capacity)) == best_fit_bins(lengths, capacity)


@pytest.mark.parametrize("capacity", [1, 2, 63, 64, 65, 127, 4095, 4096, 4097, 40_000])
def test_best_fit_holds_at_the_edges_of_its_bitmap(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    lengths = rng.integers(1, capacity + 1, 300)
    assert len(pack(lengths, capacity)) == best_fit_bins(lengths.tolist(), capacity)


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 1000])
def test_best_fit_writes_every_item_once_whatever_is_left_of_the_last_block(count: int) -> None:
    lengths = np.random.default_rng(count).integers(1, 65, count)
    bins = pack(lengths, 64)
    assert sorted(bins.values.tolist()) == list(range(count))
    assert bins.sums(lengths).max() <= 64
    assert all(np.diff(lengths[items]).max(initial=0) <= 0 for items in bins), "longest first"


@pytest.mark.parametrize("packer", ["best_fit_decreasing", "optimal"])
def test_far_more_spaces_than_items_take_no_table(packer: str) -> None:
    lengths = [2**39 + 1, 2**39 + 2, 5, 2**39 - 1]
    bins = pack(lengths, 2**40, packer).tolist()
    assert sorted(map(sorted, bins)) == [[0, 3], [1, 2]]


@given(items, st.integers(40, 100), st.sampled_from(PACKER_NAMES), st.integers(1, 12))
def test_more_bins_than_needed_are_even(
    lengths: list[int], capacity: int, packer: str, multiple: int
) -> None:
    needed = len(pack(lengths, capacity, packer))
    target = -(-needed // multiple) * multiple
    if needed < target <= len(lengths):
        bins = pack(lengths, capacity, packer, bin_count_multiple=multiple)
        loads = bins.sums(np.array(lengths))
        assert len(bins) == target
        assert sorted(bins.values.tolist()) == list(range(len(lengths)))
        assert 0 < loads.min() <= loads.max() <= capacity
        # No part holds more than the mean and one more item: as even as longest-first at least.
        assert loads.max() <= sum(lengths) / target + max(lengths)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"capacity must be an integer in .*, got 8\.5"):
        pack([3], 8.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="item 1 has length 9223372036854775813"):
        pack(np.array([3, 2**63 + 5], np.uint64), 8)


def test_many_small_items_in_more_bins_are_level() -> None:
    assert pack([10] * 12, 120, min_bin_count=3).sums(np.full(12, 10)).tolist() == [40, 40, 40]
    lengths = np.random.default_rng(0).integers(1, 100, 400)
    loads = pack(lengths, 8192, min_bin_count=9).sums(lengths)
    assert loads.max() <= 1.001 * loads.mean()


def test_two_threads_pack_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 5000)
    alone = pack(lengths, 1000)
    monkeypatch.setattr(best_fit, "_TOGETHER", 1)
    together = pack(lengths, 1000)
    assert np.array_equal(alone.values, together.values)
    assert np.array_equal(alone.offsets, together.offsets)


@examples(150)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(30, 50))
def test_the_bound_never_exceeds_the_fewest_bins_and_optimal_often_meets_them(
    lengths: list[int], capacity: int
) -> None:
    fewest = fewest_bins(lengths, capacity)
    assert pack_bound(np.array(lengths), capacity) <= fewest
    assert fewest <= len(pack(lengths, capacity, "optimal")) <= len(pack(lengths, capacity))


def test_optimal_beats_best_fit_where_three_must_fill_a_bin() -> None:
    """Best fit puts 4 beside 6 and has 2 left; two bins need 6+3+3 and 4+4+3."""
    lengths = [6, 4, 4, 3, 3, 3]
    assert len(pack(lengths, 12)) == 3
    assert sorted(pack(lengths, 12, "optimal").sums(np.array(lengths))) == [11, 12]


def test_shuffling_follows_the_seed_and_nothing_else() -> None:
    lengths = list(range(1, 60))
    first = pack(lengths, 80, "first_fit_shuffle", seed=1).tolist()
    np.random.seed(7)  # noqa: NPY002
    assert pack(lengths, 80, "first_fit_shuffle", seed=1).tolist() == first
    assert pack(lengths, 80, "first_fit_shuffle", seed=2).tolist() != first


@given(items, st.integers(1, 6), st.integers(1, 4))
def test_bins_are_raised_to_the_count_and_multiple(
    lengths: list[int], least: int, multiple: int
) -> None:
    from evenstep.errors import InputError

    try:
        bins = pack(lengths, 60, min_bin_count=least, bin_count_multiple=multiple)
    except InputError:
        needed = max(len(pack(lengths, 60)), least)
        assert -(-needed // multiple) * multiple > len(lengths)
        return
    assert len(bins) >= least
    assert len(bins) % multiple == 0
    assert bins.lengths.min() >= 1
    assert sorted(bins.values) == list(range(len(lengths)))


def test_nothing_packs_into_nothing() -> None:
    assert all(pack([], 10, packer).tolist() == [] for packer in PACKER_NAMES)


@pytest.mark.slow
def test_kernels_give_the_same_plan_without_their_compiler() -> None:
    program = (
        "import numpy as np\n"
        "from evenstep import Cost, Packed, Padded, Recipe, Topology, make_plan\n"
        "lengths = np.random.default_rng(0).integers(1, 60, 80)\n"
        "for layout in (Packed(max_tokens=64), Packed(max_tokens=64, samples=3),\n"
        "               Packed(max_tokens=64, packer='optimal'), Packed(samples=2),\n"
        "               Packed(max_tokens=64, packer='modified_first_fit_decreasing'),\n"
        "               Packed(rows=2, pad_to=64), Padded(max_tokens=64),\n"
        "               Padded(max_tokens=64, samples=3), Padded(max_tokens=64, cut='greedy')):\n"
        "    for balance in ('refined', 'lpt', 'karmarkar_karp', 'stride', 'none'):\n"
        "        if layout.options and (balance == 'none' or layout.kind == 'padded'):\n"
        "            balance = 'refined' if layout.kind == 'packed' else 'stride'\n"
        "        recipe = Recipe(layout=layout, topology=Topology(dp=3), balance=balance,\n"
        "                        cost=Cost(per_pair=0.1))\n"
        "        print(make_plan(lengths, recipe).fingerprint)\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            env={**os.environ, "NUMBA_DISABLE_JIT": flag},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for flag in ("0", "1")
    ]
    assert len(outputs[0].splitlines()) == 45
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["Optimal", "BEST_FIT_DECREASING", "best fit decreasing", ""])
def test_packers_have_one_spelling(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown packer '{name}'; expected one of: concat"):
        pack([3, 2], 4, name)
