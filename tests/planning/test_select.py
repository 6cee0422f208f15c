"""Choosing from a pool: replays of cosmos-rl and VeOmni, every strategy against plain Python."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ConfigError
from tests.examples import examples
from tests.internals import (
    PADDED,
    STRATEGIES,
    IntArray,
    best_set,
    fill_window,
    search,
    select,
)
from tests.internals import PoolRoom as Room

LENGTHS = np.array([7, 6, 8, 5, 1, 3, 8, 6])
DRAWN = [4, 1, 5, 2, 0, 3, 7, 6]

pools = st.lists(st.integers(1, 30), min_size=1, max_size=9)
names = st.sampled_from(sorted(STRATEGIES))


@st.composite
def cases(draw: st.DrawFn) -> tuple[IntArray, Room, IntArray]:
    """A pool, what a micro-batch may hold, and a column that may be counted."""
    sizes = draw(pools)
    counted = [draw(st.integers(0, size)) for size in sizes]
    room = Room(
        capacity=draw(st.integers(1, 90)),
        unit=draw(st.sampled_from([1, 1, 4, 7])),
        counted=draw(st.none() | st.integers(1, 60)),
        most=draw(st.none() | st.integers(1, 6)),
    )
    return np.array(sizes), room, np.array(counted)


def slots_of(strategy: str, sizes: IntArray, chosen: list[int], unit: int) -> int:
    if strategy not in PADDED:
        return int(sizes[chosen].sum())
    return -(-int(sizes[chosen].max()) // unit) * unit * len(chosen)


def fits(strategy: str, sizes: IntArray, counted: IntArray, room: Room, chosen: list[int]) -> bool:
    return (
        slots_of(strategy, sizes, chosen, room.unit) <= room.capacity
        and (room.counted is None or int(counted[chosen].sum()) <= room.counted)
        and (room.most is None or len(chosen) <= room.most)
    )


def choices(strategy: str, sizes: IntArray, counted: IntArray, room: Room) -> Iterator[list[int]]:
    """Every set with the oldest that fits, and the oldest alone."""
    yield [0]
    for count in range(1, len(sizes)):
        for others in combinations(range(1, len(sizes)), count):
            if fits(strategy, sizes, counted, room, [0, *others]):
                yield [0, *others]


def replay(
    strategy: str, lengths: IntArray, drawn: list[int], room: Room, pool: int
) -> list[list[int]]:
    """Refill, choose, remove, until nothing is left."""
    waiting: list[int] = []
    coming = list(drawn)
    batches = []
    while waiting or coming:
        while coming and len(waiting) < pool:
            waiting.append(coming.pop(0))
        indices = select(strategy, lengths[waiting], room).tolist()
        batches.append([waiting[index] for index in indices])
        waiting = [sample for index, sample in enumerate(waiting) if index not in indices]
    return batches


@pytest.mark.parametrize(
    ("strategy", "pool", "expected"),
    [
        ("prefer_closest", 8, [[4, 5, 3], [1, 7], [2, 6], [0]]),
        ("prefer_first", 8, [[4, 5, 3], [1, 7], [2, 0], [6]]),
        ("greedy", 8, [[4, 1, 5, 3], [2, 0], [7, 6]]),
        ("greedy", 3, [[4, 1, 5], [2, 0], [3, 7], [6]]),
    ],
)
def test_the_replays_of_cosmos_rl_come_out_as_there(
    strategy: str, pool: int, expected: list[list[int]]
) -> None:
    assert replay(strategy, LENGTHS, DRAWN, Room(capacity=16), pool) == expected


def test_the_replay_of_veomni_comes_out_as_there() -> None:
    lengths = np.arange(1, 41)
    batches = replay("greedy", lengths, list(range(40)), Room(capacity=32), 10)
    expected = [range(1, 8), range(8, 11), range(11, 13), range(13, 15), range(15, 17)]
    assert [lengths[batch].tolist() for batch in batches[:5]] == [list(each) for each in expected]


def test_subset_sum_and_fullest_need_no_more_micro_batches_in_the_replay() -> None:
    # 44 tokens need three micro-batches of 16 packed, and took four padded.
    assert len(replay("subset_sum", LENGTHS, DRAWN, Room(capacity=16), 8)) == 3
    assert len(replay("fullest", LENGTHS, DRAWN, Room(capacity=16), 8)) <= 4


@examples(400)
@given(cases(), names)
def test_the_oldest_comes_first_nothing_comes_twice_and_every_limit_holds(
    case: tuple[IntArray, Room, IntArray], strategy: str
) -> None:
    sizes, room, counted = case
    chosen = select(strategy, sizes, room, counted).tolist()
    assert chosen[0] == 0
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(range(len(sizes)))
    assert chosen == [0] or fits(strategy, sizes, counted, room, chosen)


@given(pools, st.integers(1, 30), names)
def test_an_oldest_sample_at_or_over_the_capacity_goes_alone(
    sizes: list[int], capacity: int, strategy: str
) -> None:
    sizes[0] = max(sizes[0], capacity)
    assert select(strategy, np.array(sizes), Room(capacity=capacity)).tolist() == [0]


@examples(300)
@given(cases())
def test_greedy_takes_in_order_whatever_still_fits(
    case: tuple[IntArray, Room, IntArray],
) -> None:
    sizes, room, counted = case
    taken = [0]
    for index in range(1, len(sizes)):
        if fits("greedy", sizes, counted, room, [*taken, index]):
            taken.append(index)
    assert select("greedy", sizes, room, counted).tolist() == taken


@examples(400)
@given(cases())
def test_subset_sum_holds_the_most_that_any_choice_holds(
    case: tuple[IntArray, Room, IntArray],
) -> None:
    sizes, room, counted = case
    limit = 2**62 if room.counted is None else room.counted
    chosen = select("subset_sum", sizes, room, counted)
    every = list(choices("subset_sum", sizes, counted, room))
    slots, counts = sizes.sum() / room.capacity, counted.sum() / limit
    shares = sizes / room.capacity + counted / limit
    filled = shares if max(slots, counts) < 1.4 * min(slots, counts) else sizes
    filled = counted if counts >= 1.4 * slots else filled
    assert filled[chosen].sum() >= max(filled[each].sum() for each in every) - 1e-6
    # Nothing that fits stays behind.
    spare = np.setdiff1d(np.arange(len(sizes)), chosen).tolist()
    held = chosen.tolist()
    assert not any(fits("subset_sum", sizes, counted, room, [*held, each]) for each in spare)


@pytest.mark.parametrize("scarce", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("corpus", ["short", "long"])
def test_where_a_column_binds_a_pool_takes_no_more_micro_batches_than_greedily(
    scarce: float, corpus: str
) -> None:
    rng = np.random.default_rng(0)
    for columns in ("any", "few have one", "the shorter the more"):
        sizes = np.minimum(rng.lognormal(5 if corpus == "short" else 7, 1, 1000), 8192).astype(int)
        counted = {
            "any": rng.integers(0, sizes + 1),
            "few have one": np.where(rng.random(1000) < 0.2, rng.integers(1, 30, 1000), 0),
            "the shorter the more": 1 + (8192 - sizes) // 16,
        }[columns]
        share = int(counted.sum() * 8192 / (sizes.sum() * scarce))
        room = Room(capacity=8192, counted=max(share, int(counted.max())))
        ours, plain = (drained(name, sizes, counted, room) for name in ("subset_sum", "greedy"))
        assert ours <= plain * 1.01
        assert ours <= plain or scarce == 1.0


def drained(strategy: str, sizes: IntArray, counted: IntArray, room: Room) -> int:
    """The micro-batches until a pool of 64 samples or more is empty."""
    waiting, read, count = np.empty(0, np.int64), 0, 0
    while read < len(sizes) or len(waiting):
        short = 64 - len(waiting)
        waiting = np.concatenate((waiting, np.arange(read, min(read + short, len(sizes)))))
        read = max(read, min(read + short, len(sizes)))
        chosen = select(strategy, sizes[waiting], room, counted[waiting])
        waiting, count = np.delete(waiting, chosen), count + 1
    return count


@given(pools, st.integers(1, 90))
def test_of_equal_sums_subset_sum_takes_the_one_whose_youngest_is_oldest(
    lengths: list[int], capacity: int
) -> None:
    sizes, room = np.array(lengths), Room(capacity=capacity)
    every = list(choices("subset_sum", sizes, sizes, room))
    most = max(sizes[each].sum() for each in every)
    best = min((each for each in every if sizes[each].sum() == most), key=lambda each: each[::-1])
    assert select("subset_sum", sizes, room).tolist() == best


@examples(200)
@given(st.data(), st.integers(1, 200), st.integers(1, 3000), st.sampled_from([1, 6]))
def test_a_space_is_filled_as_by_a_table_of_first_makers(
    data: st.DataObject, longest: int, space: int, unit: int
) -> None:
    units = st.integers(1, longest).map(lambda length: length * unit)
    sizes = np.array(data.draw(st.lists(units, min_size=1, max_size=90)))
    indices = np.flatnonzero(sizes <= space)
    expected = indices.tolist()
    if sizes[indices].sum() > space:
        expected = indices[first_made(sizes[indices].tolist(), space)].tolist()
        made = fill_window(sizes[indices], space, int(sizes.sum()))
        assert indices[made].tolist() == expected
    assert best_set(sizes, space).tolist() == expected


def first_made(sizes: list[int], space: int) -> list[int]:
    """The fullest set by the item that first makes each sum."""
    made_by = {0: -1}
    for item, size in enumerate(sizes):
        for before in sorted(made_by):
            if before + size <= space:
                made_by.setdefault(before + size, item)
    reached, taken = max(made_by), []
    while reached:
        taken.append(made_by[reached])
        reached -= sizes[taken[-1]]
    return taken[::-1]


def test_a_search_that_ends_early_holds_no_less_than_taking_in_order() -> None:
    rng = np.random.default_rng(0)
    for _ in range(3):
        sizes = rng.integers(100, 2000, 120) * 2
        counted = rng.integers(1, sizes)
        room = Room(capacity=40_001, counted=20_000, most=18)
        ours = select("subset_sum", sizes, room, counted)
        assert fits("subset_sum", sizes, counted, room, ours.tolist())
        assert counted[ours].sum() >= counted[select("greedy", sizes, room, counted)].sum()
        # Even sizes never fill an odd space, so the search runs into its bound.
        taken = search(sizes, sizes, counted, 40_001, 2**40, 60, 40_001)
        assert 39_000 <= sizes[taken].sum() <= 40_000


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=120),
    st.integers(1, 4000),
    st.none() | st.integers(1, 40),
)
def test_subset_sum_never_holds_less_than_greedy(
    lengths: list[int], capacity: int, most: int | None
) -> None:
    sizes, room = np.array(lengths), Room(capacity=capacity, most=most)
    ours = sizes[select("subset_sum", sizes, room)].sum()
    assert ours >= sizes[select("greedy", sizes, room)].sum()


@pytest.mark.parametrize("unit", [1, 16, 48])
@pytest.mark.parametrize("capacity", [8192, 131_072, 1_048_576])
def test_large_pools_fill_micro_batches_completely(capacity: int, unit: int) -> None:
    sizes = np.random.default_rng(unit).integers(1, capacity // (8 * unit), 64) * unit
    chosen = select("subset_sum", sizes, Room(capacity=capacity))
    assert sizes[chosen].sum() == capacity - capacity % unit


@examples(300)
@given(cases(), st.sampled_from(["prefer_closest", "prefer_first"]))
def test_growing_by_the_fewest_slots_is_that_of_cosmos_rl(
    case: tuple[IntArray, Room, IntArray], strategy: str
) -> None:
    sizes, room, counted = case
    chosen, waiting = [0], list(range(1, len(sizes)))
    while True:
        fitting = [
            index for index in waiting if fits(strategy, sizes, counted, room, [*chosen, index])
        ]
        if not fitting:
            break
        longest = max(int(sizes[index]) for index in chosen)

        def score(
            index: int, chosen: list[int] = chosen, longest: int = longest
        ) -> tuple[int, int, int]:
            slots = slots_of(strategy, sizes, [*chosen, index], room.unit)
            away = abs(int(sizes[index]) - longest)
            return slots, away if strategy == "prefer_closest" else 0, index

        chosen = [*chosen, min(fitting, key=score)]
        waiting.remove(chosen[-1])
    assert select(strategy, sizes, room, counted).tolist() == chosen


@examples(400)
@given(cases())
def test_fullest_holds_the_most_tokens_then_the_fewest_slots_then_the_oldest(
    case: tuple[IntArray, Room, IntArray],
) -> None:
    sizes, room, _ = case
    room = Room(capacity=room.capacity, unit=room.unit, most=room.most)

    def rank(chosen: list[int]) -> tuple[int, int, int]:
        slots = slots_of("fullest", sizes, chosen, room.unit)
        return -int(sizes[chosen].sum()), slots, max(chosen)

    chosen = select("fullest", sizes, room).tolist()
    assert rank(chosen) == min(map(rank, choices("fullest", sizes, sizes, room)))


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown strategy 'best'; .*: subset_sum, greedy, fullest"
    ):
        select("best", np.array([1]), Room(capacity=4))


@pytest.mark.parametrize("limit", ["capacity", "unit", "counted", "most"])
def test_a_micro_batch_that_could_hold_nothing_is_refused(limit: str) -> None:
    with pytest.raises(ConfigError, match=f"{limit} of a micro-batch must be 1 or more, got 0"):
        Room(**{"capacity": 4, limit: 0})


def test_kernels_choose_the_same_without_their_compiler() -> None:
    program = (
        "import numpy as np\n"
        f"from {Room.__module__} import STRATEGIES, Room, select\n"
        f"from {fill_window.__module__} import fill_window\n"
        "rng = np.random.default_rng(0)\n"
        "for capacity in (40, 300, 2000):\n"
        "    for limits in ({}, {'most': 6}, {'counted': 60}, {'counted': 60, 'most': 5}):\n"
        "        sizes = rng.integers(1, 60, 40)\n"
        "        counted = rng.integers(0, sizes)\n"
        "        for name in STRATEGIES:\n"
        "            room = Room(capacity=capacity, unit=4, **limits)\n"
        "            print(select(name, sizes, room, counted).tolist())\n"
        "        print(fill_window(sizes, capacity, sizes.sum()).tolist())\n"
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
    assert len(outputs[0].splitlines()) == 72
    assert outputs[0] == outputs[1]
