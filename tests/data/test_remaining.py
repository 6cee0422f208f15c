"""Remaining epochs: any number of readers can share what others have left, each sample once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.errors import CursorError
from tests.internals import ReaderState, RemainingEpoch, Unread, share_anew, shares_of

FAR = 60  # more turns than are compared


def positions(remaining: RemainingEpoch, reader: int = 0, readers: int = 1) -> list[int]:
    found: list[int] = remaining.positions(reader, readers, 0, FAR).tolist()
    return found


# Deals -----------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 5))
def test_readers_take_every_block_one_element_each(readers: int, size: int, key: int) -> None:
    taken = []
    for reader in range(readers):
        others = tuple(0 if other == reader else None for other in range(readers))
        turns = Unread(others, key, size).size
        assert turns is not None
        taken.append(shares_of(reader, readers, key, np.arange(turns)))
    assert sorted(np.concatenate(taken).tolist()) == list(range(size))
    for mine in taken:
        assert (mine // readers).tolist() == list(range(len(mine)))


@given(st.integers(1, 64), st.integers(0, 5), st.data())
def test_a_reader_visits_every_place_as_often_as_any_other(
    readers: int, key: int, data: st.DataObject
) -> None:
    reader = data.draw(st.integers(0, readers - 1))
    places = shares_of(reader, readers, key, np.arange(3 * readers)) % readers
    for begin in range(0, 3 * readers, readers):
        assert sorted(places[begin : begin + readers].tolist()) == list(range(readers))


@pytest.mark.parametrize("readers", [1, 2, 3, 5, 8, 16, 32, 96])
@pytest.mark.parametrize("period", [2, 3, 4, 5, 7, 13, 16, 64])
def test_a_reader_sees_every_kind_of_periodic_data_equally_often(readers: int, period: int) -> None:
    turns, reader = 40_000, readers // 2
    kinds = shares_of(reader, readers, 0, np.arange(turns)) % period
    shares = np.bincount(kinds, minlength=period) / turns
    assert np.abs(shares * period - 1).max() < 0.15  # 0.1 is five standard deviations at most


# What remains ----------------------------------------------------------------------------------

Change = list[int | None]


def plainly(count: int, epoch: int, changes: Sequence[Change]) -> list[int]:
    """What remains, by lists."""
    left = list(range(count))
    for change in changes:
        gone = set()
        for reader, read in enumerate(change):
            mine = shares_of(reader, len(change), epoch, np.arange(FAR))
            gone |= set(mine[: FAR if read is None else read].tolist())
        left = [element for index, element in enumerate(left) if index not in gone]
    return left


changes = st.lists(
    st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=5), max_size=4
)


@given(st.integers(0, 40), st.integers(0, 3), changes, st.integers(1, 5))
@settings(max_examples=200)
def test_what_remains_is_what_no_reader_has_read(
    count: int, epoch: int, changes: list[Change], readers: int
) -> None:
    remaining = RemainingEpoch(epoch, count)
    for change in changes:
        remaining = remaining.rest(change)
    expected = plainly(count, epoch, changes)
    assert remaining.size == len(expected)
    assert positions(remaining) == expected
    shares = [positions(remaining, reader, readers) for reader in range(readers)]
    assert sorted(p for share in shares for p in share) == expected
    assert all(share == sorted(share) for share in shares)
    assert RemainingEpoch.from_list(json.loads(json.dumps(remaining.to_list()))) == remaining


def test_a_cursor_of_readers_that_shared_by_length_is_refused() -> None:
    whole = ReaderState(reader=0, readers=2, epochs=(RemainingEpoch(0, 9),)).to_dict()
    by_length = {**whole, "epochs": [[*left, 1] for left in whole["epochs"]]}
    with pytest.raises(CursorError, match="shared samples by length"):
        ReaderState.from_dict(by_length, 0, 2)


@given(changes, st.integers(1, 3))
def test_no_position_before_an_unknown_end_is_lost(changes: list[Change], readers: int) -> None:
    remaining = RemainingEpoch(0, None)
    for change in changes:
        remaining = remaining.rest(change)
    expected = [p for p in plainly(400, 0, changes) if p < 30]
    shares = [positions(remaining, reader, readers) for reader in range(readers)]
    assert sorted(p for share in shares for p in share if p < 30) == expected
    assert all(share == sorted(share) for share in shares)


def test_changes_that_have_been_read_past_are_forgotten() -> None:
    remaining = RemainingEpoch(0, 10_000)
    for change in ([9, 7, 8, 5], [30, 31], [20, 20, 21], [50]):
        remaining = remaining.rest(change)
    assert len(remaining.changes) == 1
    assert remaining.size == 10_000 - 9 - 7 - 8 - 5 - 61 - 61 - 50
    again = remaining.rest([1] * 8)
    assert again.size is not None
    assert again.changes == ((10_000 - again.size,),)


# States of readers -----------------------------------------------------------------------------


@given(st.integers(0, 40), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_every_position_is_read_once_after_any_changes_of_reader_count(
    count: int, sizes: list[int], data: st.DataObject
) -> None:
    states = [ReaderState(reader=0, readers=1, epochs=(RemainingEpoch(0, count),))]
    seen: list[int] = []
    for readers in sizes:
        shared = share_anew(states, readers, count, range(readers))
        states = []
        for reader, state in enumerate(shared):
            (left,) = state.epochs
            pool = [sample for _, sample, _ in state.waiting] + positions(left, reader, readers)
            read = data.draw(st.integers(len(state.waiting), len(pool)))
            held = data.draw(st.integers(0, read))  # the last of these are in the pool
            seen += pool[: read - held]
            states.append(
                ReaderState(
                    reader=reader, readers=readers, epochs=(left,), read=read - len(state.waiting),
                    waiting=tuple([0, i, 0] for i in pool[read - held : read]),
                )
            )  # fmt: skip
            now = states[-1]
            copy = ReaderState.from_dict(json.loads(json.dumps(now.to_dict())), reader, readers)
            assert copy == now
    (alone,) = share_anew(states, 1, count, [0])
    (left,) = alone.epochs
    waiting = [sample for _, sample, _ in alone.waiting]
    assert sorted(seen + waiting + positions(left)) == list(range(count))


def test_readers_in_different_epochs_leave_a_remainder_of_each() -> None:
    ahead = ReaderState(reader=0, readers=2, epochs=(RemainingEpoch(1, 6),), read=1)
    behind = ReaderState(
        reader=1, readers=2, epochs=(RemainingEpoch(0, 6),), read=1, waiting=([0, 1, 0],)
    )
    mine = positions(RemainingEpoch(0, 6), 1, 2)
    (alone,) = share_anew([behind, ahead], 1, 6, [0])
    first, second = alone.epochs
    assert (first.epoch, positions(first)) == (0, mine[1:])
    gone = positions(RemainingEpoch(1, 6), 0, 2)[0]
    assert (second.epoch, positions(second)) == (1, [p for p in range(6) if p != gone])


def test_a_finished_epoch_is_not_read_again() -> None:
    one = RemainingEpoch(3, 4).rest([3])
    behind = (one, RemainingEpoch(5, 4).rest([2]), RemainingEpoch(6, 4))
    states = [
        ReaderState(reader=0, readers=2, epochs=behind),
        ReaderState(reader=1, readers=2, epochs=(RemainingEpoch(8, 4),)),
    ]
    (alone,) = share_anew(states, 1, 4, [0])
    left = {remaining.epoch: positions(remaining) for remaining in alone.epochs}
    # Reader 0 has not read its half of epochs 6 and 7, and has nothing left of epoch 4.
    halves = {epoch: positions(RemainingEpoch(epoch, 4), 0, 2) for epoch in (6, 7)}
    mine = {3: positions(one, 0, 2), 5: positions(behind[1], 0, 2)}
    expected = {**mine, **halves, 8: [0, 1, 2, 3]}
    assert left == {epoch: found for epoch, found in expected.items() if found}


def test_an_epoch_of_unknown_length_is_left_in_order() -> None:
    rest = RemainingEpoch(0, None).rest([None, 2, 4])  # reader 0 of 3 is at the end
    found = positions(rest)
    assert all(one < other for one, other in pairwise(found))
    others = [positions(RemainingEpoch(0, None), reader, 3) for reader in (1, 2)]
    expected = sorted(others[0][2:] + others[1][4:])
    assert found[:30] == expected[:30]
