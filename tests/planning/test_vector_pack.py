"""Packing under several limits: valid, no worse than the usual best fits, near the bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Ragged
from tests.examples import examples
from tests.internals import (
    FloatArray,
    IntArray,
    LimitedPacker,
    bins_bound,
    spread_over,
)
from tests.internals import vector_packing as module


def vector_pack(
    sizes: IntArray, extra: FloatArray, capacity: int, caps: FloatArray, enough: int = 0
) -> Ragged:
    return LimitedPacker(sizes, extra, capacity, caps).bins(enough)


SCORES = {
    "dot": lambda item, left: -(item * left).sum(axis=1),
    "l2": lambda item, left: ((left - item) ** 2).sum(axis=1),
    "max": lambda item, left: (left - item).max(axis=1),
    "sum": lambda item, left: (left - item).sum(axis=1),
}


def best_fit_bins(taken: FloatArray, caps: FloatArray, order: IntArray, score: str) -> int:
    """Best fit as defined: the bin with room and the lowest score, or a new one."""
    room = np.empty((0, len(caps)))
    for item in order:
        fits = (room >= taken[item]).all(axis=1)
        if fits.any():
            values = np.where(fits, SCORES[score](taken[item] / caps, room / caps), np.inf)
            chosen = int(np.argmin(values))
        else:
            chosen = len(room)
            room = np.vstack((room, caps))
        room[chosen] -= taken[item]
    return len(room)


def usual_best_fits(taken: FloatArray, caps: FloatArray) -> int:
    """The fewest bins of all orders and scores."""
    shares = taken / caps
    total = shares.sum(axis=1)
    keys = [shares.max(axis=1), total, *shares.T]
    orders = [np.lexsort((-total, -key)) for key in keys]
    return min(best_fit_bins(taken, caps, order, score) for order in orders for score in SCORES)


def fewest_bins(taken: FloatArray, caps: FloatArray) -> int:
    """Exact, by trying every way to pack the items."""
    best = len(taken)

    def put(at: int, rooms: list[FloatArray]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if at == len(taken):
            best = len(rooms)
            return
        for number, room in enumerate(rooms):
            if (room >= taken[at]).all():
                put(at + 1, [*rooms[:number], room - taken[at], *rooms[number + 1 :]])
        put(at + 1, [*rooms, caps - taken[at]])

    put(0, [])
    return best


def assert_packed(
    bins: Ragged, sizes: IntArray, extra: FloatArray, capacity: int, caps: FloatArray
) -> None:
    assert sorted(bins.values.tolist()) == list(range(len(sizes)))
    assert bins.lengths.min(initial=1) >= 1
    for row in bins:
        within = sizes[row].sum() <= capacity and (extra[row].sum(axis=0) <= caps).all()
        assert within or len(row) == 1, "what exceeds a limit by itself is alone"


def mix(
    count: int, seed: int, share: float, with_cost: bool = False
) -> tuple[IntArray, FloatArray, int, FloatArray]:
    """Log-normal lengths; a share of the samples has 500 to 4,000 patches."""
    rng = np.random.default_rng(seed)
    sizes = np.clip(rng.lognormal(np.log(700), 0.9, count), 16, 8192).astype(np.int64)
    patches = np.where(rng.random(count) < share, rng.integers(500, 4001, count), 0)
    extra, caps = [patches.astype(float)], [4096.0]
    if with_cost:
        extra.append(4096.0 * sizes + sizes.astype(float) ** 2)
        caps.append(4096.0 * 8192 + 8192.0**2)
    return sizes, np.column_stack(extra), 8192, np.array(caps)


limited = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=40
)


@examples(300)
@given(limited, st.integers(10, 40), st.integers(0, 12), st.integers(4, 9))
def test_every_item_is_packed_once_within_all_limits(
    items: list[tuple[int, int, int]], capacity: int, first: int, second: int
) -> None:
    sizes, extra = np.array(items)[:, 0], np.array(items, float)[:, 1:]
    caps = np.array([first, second], float)
    bins = vector_pack(sizes, extra, capacity, caps)
    assert_packed(bins, sizes, extra, capacity, caps)
    taken = np.column_stack((sizes, extra)).astype(float)
    assert len(bins) >= bins_bound(taken, np.append(float(capacity), caps))


@examples(100)
@given(limited, st.integers(30, 60), st.integers(9, 20), st.integers(5, 12))
def test_no_usual_best_fit_needs_fewer_bins(
    items: list[tuple[int, int, int]], capacity: int, first: int, second: int
) -> None:
    sizes, extra = np.array(items)[:, 0], np.array(items, float)[:, 1:]
    taken, caps = np.column_stack((sizes, extra)), np.array([capacity, first, second], float)
    found = vector_pack(sizes, extra, capacity, caps[1:])
    assert len(found) <= usual_best_fits(taken, caps)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("with_cost", [False, True])
def test_no_usual_best_fit_needs_fewer_bins_for_images_in_text(
    share: float, seed: int, with_cost: bool
) -> None:
    sizes, extra, capacity, caps = mix(500, seed, share, with_cost)
    taken = np.column_stack((sizes.astype(float), extra))
    bins = vector_pack(sizes, extra, capacity, caps)
    assert_packed(bins, sizes, extra, capacity, caps)
    assert len(bins) <= usual_best_fits(taken, np.append(float(capacity), caps))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("count", "seed"), [(4000, 0), (4000, 1), (20_000, 0)])
@pytest.mark.parametrize("with_cost", [False, True])
def test_bins_are_within_a_few_percent_of_the_bound(
    share: float, count: int, seed: int, with_cost: bool
) -> None:
    sizes, extra, capacity, caps = mix(count, seed, share, with_cost)
    taken = np.column_stack((sizes.astype(float), extra))
    bins = vector_pack(sizes, extra, capacity, caps)
    assert_packed(bins, sizes, extra, capacity, caps)
    assert len(bins) <= 1.005 * bins_bound(taken, np.append(float(capacity), caps)) + 1


def test_the_search_ends_when_there_are_few_enough_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = mix(500, 0, 0.5)
    fewest = len(vector_pack(*arguments))
    assert len(vector_pack(*arguments, fewest)) == fewest

    def fail(*_: object) -> None:
        raise AssertionError("searched on")

    monkeypatch.setattr(module, "spread_over", fail)
    assert len(LimitedPacker(*arguments).bins(500)) <= 500


def test_nothing_packs_into_nothing_and_no_limit_means_one_bin() -> None:
    nothing = np.empty(0, np.int64)
    assert vector_pack(nothing, np.empty((0, 1)), 5, np.array([1.0])).tolist() == []
    assert vector_pack(np.array([1, 2]), np.ones((2, 1)), 5, np.array([1e30])).tolist() == [[0, 1]]


@examples(200)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(9, 14),
    st.integers(9, 14),
)
def test_the_bound_never_exceeds_the_fewest_bins(
    items: list[tuple[int, int]], first: int, second: int
) -> None:
    taken, caps = np.array(items, float), np.array([first, second], float)
    fewest = fewest_bins(taken, caps)
    assert bins_bound(taken, caps) <= fewest
    found = vector_pack(np.array(items)[:, 0], taken[:, 1:], first, caps[1:])
    assert len(found) <= fewest + 1


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(1, 10),
    st.integers(0, 30),
)
def test_the_fewest_packs_to_spread_over_are_found(
    items: list[tuple[int, int]], least: int, span: int
) -> None:
    sizes, taken = (np.array(column) for column in zip(*items, strict=True))
    extra, caps = taken.astype(float)[:, None], np.array([12.0])
    packer = LimitedPacker(sizes, extra, 40, caps)
    both = np.column_stack((sizes.astype(float), extra))
    pack_of, packs = spread_over(both, np.array([40.0, 12.0]), least, least + span)
    works = [count for count in range(least, least + span + 1) if packer.spread(count) is not None]
    if packs < 0:
        assert least + span not in works
        return
    assert packs in works
    assert pack_of.max() < packs
    # Where all larger numbers work, the fewest are found.
    if works == list(range(works[0], least + span + 1)):
        assert packs == works[0]


def test_spreading_tries_few_numbers_of_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.internals import vector_packing as spread

    tried: list[int] = []
    kernel = spread.spread_kernel

    def noted(taken: FloatArray, order: IntArray, caps: FloatArray, packs: int) -> IntArray:
        tried.append(packs)
        return kernel(taken, order, caps, packs)

    monkeypatch.setattr(spread, "spread_kernel", noted)
    sizes, extra, capacity, caps = mix(2000, 0, 0.5)
    taken, caps = np.column_stack((sizes.astype(float), extra)), np.append(float(capacity), caps)
    _, packs = spread_over(taken, caps, 1, 2000)
    assert packs > 500
    assert len(tried) < 30


@examples(100)
@given(limited, st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_an_answer_does_not_depend_on_what_was_asked_before(
    items: list[tuple[int, int, int]], numbers: list[int]
) -> None:
    sizes, extra = np.array(items)[:, 0], np.array(items, float)[:, 1:]
    arguments = (sizes, extra, 30, np.array([9.0, 5.0]))
    packer = LimitedPacker(*arguments)
    for enough in numbers:
        alone = LimitedPacker(*arguments).bins(enough)
        assert packer.bins(enough).tolist() == alone.tolist()


def test_items_are_packed_once_for_all_numbers_of_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, extra, capacity, caps = mix(300, 0, 0.5)
    packer = LimitedPacker(sizes, extra, capacity, caps)
    fewest = packer.bins()

    def fail(*_: object) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr(module, "fit_parts", fail)
    monkeypatch.setattr(module, "spread_over", fail)
    assert packer.bins().tolist() == fewest.tolist()
    assert len(packer.bins(300)) <= 300
    with pytest.raises(AssertionError, match="packed again"):
        vector_pack(sizes, extra, capacity, caps)


@pytest.mark.parametrize("part", [1, 7, 64])
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_items_packed_in_parts_keep_every_limit(
    part: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, extra, capacity, caps = mix(500, 0, share)
    whole = vector_pack(sizes, extra, capacity, caps)
    monkeypatch.setattr(module, "_PART", part)
    bins = LimitedPacker(sizes, extra, capacity, caps).bins()
    assert_packed(bins, sizes, extra, capacity, caps)
    if part == 64:
        assert len(bins) <= 1.02 * len(whole)
