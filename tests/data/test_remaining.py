"""Remaining epochs: any number of readers can share what others have left, each sample once."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.data.streams.remaining import ReaderState, RemainingEpoch, merged

Element = tuple[int, int] | int


def elements(remaining: RemainingEpoch, reader: int = 0, readers: int = 1) -> list[Element]:
    found: list[Element] = []
    index = reader
    while (element := remaining[index]) is not None:
        found.append(element)
        index += readers
    return found


epochs = st.builds(
    RemainingEpoch,
    st.just(0),
    st.lists(st.tuples(st.integers(100, 200), st.just(0)), max_size=5, unique=True).map(tuple),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 7)), max_size=4).map(
        tuple
    ),
)


@given(epochs, st.integers(1, 5))
def test_readers_share_an_epoch_without_overlap(remaining: RemainingEpoch, readers: int) -> None:
    whole = elements(remaining)
    shares = [elements(remaining, reader, readers) for reader in range(readers)]
    interleaved = [shares[i % readers][i // readers] for i in range(len(whole))]
    assert interleaved == whole
    assert RemainingEpoch.from_list(json.loads(json.dumps(remaining.to_list()))) == remaining


@given(epochs, st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=5))
@settings(max_examples=300)
def test_rest_is_what_no_reader_has_read(remaining: RemainingEpoch, read: list[int | None]) -> None:
    readers = len(read)
    expected: list[Element] = []
    for reader, count in enumerate(read):
        mine = elements(remaining, reader, readers)
        expected += mine[len(mine) if count is None else count :]
    rest = elements(remaining.rest(read))
    assert sorted(map(str, rest)) == sorted(map(str, expected))


@given(st.integers(0, 40), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_every_position_is_read_once_after_any_changes_of_reader_count(
    count: int, sizes: list[int], data: st.DataObject
) -> None:
    left_over: tuple[RemainingEpoch, ...] = (RemainingEpoch.whole(0, count),)
    seen: list[int] = []
    for readers in sizes:
        states = []
        for reader in range(readers):
            mine = [e for remaining in left_over for e in elements(remaining, reader, readers)]
            read = data.draw(st.integers(0, len(mine)))
            held = data.draw(st.integers(0, read))  # the last of these are in the pool
            sample_ids = [e if isinstance(e, int) else e[0] for e in mine[:read]]
            seen += sample_ids[: read - held]
            states.append(
                ReaderState(
                    reader=reader, readers=readers, epochs=left_over, read=read,
                    waiting=tuple((0, i, 0) for i in sample_ids[read - held :]),
                )
            )  # fmt: skip
            state = states[-1]
            copy = ReaderState.from_dict(json.loads(json.dumps(state.to_dict())), reader, readers)
            assert copy == state
        left_over = merged(states, count)
        assert len(left_over) == 1
    rest = [e if isinstance(e, int) else e[0] for e in elements(left_over[0])]
    assert sorted(seen + rest) == list(range(count))


def test_readers_in_different_epochs_leave_a_remainder_of_each() -> None:
    ahead = ReaderState(reader=0, readers=2, epochs=(RemainingEpoch.whole(1, 6),), read=1)
    behind = ReaderState(
        reader=1, readers=2, epochs=(RemainingEpoch.whole(0, 6),), read=1, waiting=((0, 1, 0),)
    )
    first, second = merged([behind, ahead], 6)
    assert (first.epoch, elements(first)) == (0, [(1, 0), 3, 5])
    assert (second.epoch, sorted(map(str, elements(second)))) == (1, ["1", "2", "3", "4", "5"])


def test_a_finished_epoch_is_not_read_again() -> None:
    behind = (
        RemainingEpoch(3, ((1, 0),)),
        RemainingEpoch(5, ((2, 0),)),
        RemainingEpoch.whole(6, 4),
    )
    states = [
        ReaderState(reader=0, readers=2, epochs=behind),
        ReaderState(reader=1, readers=2, epochs=(RemainingEpoch.whole(8, 4),)),
    ]
    left = {remaining.epoch: elements(remaining) for remaining in merged(states, 4)}
    # Reader 0 has not read its half of epochs 6 and 7, and has nothing left of epoch 4.
    half = [0, 2]
    assert left == {3: [(1, 0)], 4: [], 5: [(2, 0)], 6: half, 7: half, 8: [0, 1, 2, 3]}


def test_an_epoch_of_unknown_length_leaves_an_unbounded_tail() -> None:
    states = [
        ReaderState(reader=s, readers=2, epochs=(RemainingEpoch.whole(0, None),), read=read)
        for s, read in enumerate((3, 1))
    ]
    (remaining,) = merged(states, None)
    assert remaining.spans == ((3, 2, 2), (6, 1, None))


def test_unbounded_spans_are_interleaved_in_order_of_position() -> None:
    whole = RemainingEpoch.whole(0, None)
    rest = whole.rest([None, 2, 4])  # reader 0 of 3 is at the end
    assert rest.spans == ((7, 3, 2), (13, 3, None), (14, 3, None))
    assert [rest[index] for index in range(8)] == [7, 10, 13, 14, 16, 17, 19, 20]


@given(
    st.lists(
        st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 3),
)
def test_no_position_before_an_unknown_end_is_lost_when_reader_counts_change(
    changes: list[list[int | None]], readers: int
) -> None:
    """Readers read in order up to an unknown end; `expected` is a plain list of positions."""
    far = 300  # well past the positions that are compared
    remaining, expected = RemainingEpoch.whole(0, None), list(range(far))
    for read in changes:
        size = len(read)
        expected = sorted(
            position
            for reader, count in enumerate(read)
            if count is not None
            for position in _all(remaining, far)[reader::size][count:]
        )
        remaining = remaining.rest(read)
    found = [p for reader in range(readers) for p in _all(remaining, far)[reader::readers]]
    assert sorted(p for p in found if p < 60) == [p for p in expected if p < 60]
    unbounded = [remaining[i] for i in range(far) if remaining.span_end(i) is None]
    assert [p for p in unbounded if p is not None] == sorted(p for p in unbounded if p is not None)


def _all(remaining: RemainingEpoch, far: int) -> list[int]:
    found = (remaining[index] for index in range(far))
    return [position for position in found if isinstance(position, int)]
