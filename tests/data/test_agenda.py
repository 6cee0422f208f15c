"""The agenda: whatever the shards read, the rest is dealt anew without loss or repetition."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.data.streams.remaining import ReaderState, RemainingEpoch, merged

Element = tuple[int, int] | int


def elements(chapter: RemainingEpoch, shard: int = 0, shards: int = 1) -> list[Element]:
    found: list[Element] = []
    index = shard
    while (element := chapter[index]) is not None:
        found.append(element)
        index += shards
    return found


chapters = st.builds(
    RemainingEpoch,
    st.just(0),
    st.lists(st.tuples(st.integers(100, 200), st.just(0)), max_size=5, unique=True).map(tuple),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 7)), max_size=4).map(
        tuple
    ),
)


@given(chapters, st.integers(1, 5))
def test_shards_share_a_chapter_without_overlap(chapter: RemainingEpoch, shards: int) -> None:
    whole = elements(chapter)
    dealt = [elements(chapter, shard, shards) for shard in range(shards)]
    interleaved = [dealt[i % shards][i // shards] for i in range(len(whole))]
    assert interleaved == whole
    assert RemainingEpoch.from_list(json.loads(json.dumps(chapter.to_list()))) == chapter


@given(chapters, st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=5))
@settings(max_examples=300)
def test_the_rest_is_what_no_shard_has_read(
    chapter: RemainingEpoch, read: list[int | None]
) -> None:
    shards = len(read)
    expected: list[Element] = []
    for shard, count in enumerate(read):
        mine = elements(chapter, shard, shards)
        expected += mine[len(mine) if count is None else count :]
    rest = elements(chapter.rest(read))
    assert sorted(map(str, rest)) == sorted(map(str, expected))


@given(st.integers(0, 40), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_any_number_of_changes_of_shards_reads_every_position_once(
    count: int, sizes: list[int], data: st.DataObject
) -> None:
    agenda: tuple[RemainingEpoch, ...] = (RemainingEpoch.whole(0, count),)
    seen: list[int] = []
    for shards in sizes:
        states = []
        for shard in range(shards):
            mine = [e for chapter in agenda for e in elements(chapter, shard, shards)]
            read = data.draw(st.integers(0, len(mine)))
            held = data.draw(st.integers(0, read))  # of these, the last few wait in the pool
            numbers = [e if isinstance(e, int) else e[0] for e in mine[:read]]
            seen += numbers[: read - held]
            states.append(
                ReaderState(
                    shard=shard, shards=shards, chapters=agenda, read=read,
                    waiting=tuple((0, n, 0) for n in numbers[read - held :]),
                )
            )  # fmt: skip
            state = states[-1]
            copy = ReaderState.from_dict(json.loads(json.dumps(state.to_dict())), shard, shards)
            assert copy == state
        agenda = merged(states, count)
        assert len(agenda) == 1
    rest = [e if isinstance(e, int) else e[0] for e in elements(agenda[0])]
    assert sorted(seen + rest) == list(range(count))


def test_shards_in_different_epochs_leave_parts_of_both() -> None:
    ahead = ReaderState(shard=0, shards=2, chapters=(RemainingEpoch.whole(1, 6),), read=1)
    behind = ReaderState(
        shard=1, shards=2, chapters=(RemainingEpoch.whole(0, 6),), read=1, waiting=((0, 1, 0),)
    )
    first, second = merged([behind, ahead], 6)
    assert (first.epoch, elements(first)) == (0, [(1, 0), 3, 5])
    assert (second.epoch, sorted(map(str, elements(second)))) == (1, ["1", "2", "3", "4", "5"])


def test_an_epoch_of_which_nothing_was_left_is_not_begun_again() -> None:
    behind = (
        RemainingEpoch(3, ((1, 0),)),
        RemainingEpoch(5, ((2, 0),)),
        RemainingEpoch.whole(6, 4),
    )
    states = [
        ReaderState(shard=0, shards=2, chapters=behind),
        ReaderState(shard=1, shards=2, chapters=(RemainingEpoch.whole(8, 4),)),
    ]
    left = {chapter.epoch: elements(chapter) for chapter in merged(states, 4)}
    # PoolReader 0 has its half of epochs 6 and 7 before it, and nothing of epoch 4.
    half = [0, 2]
    assert left == {3: [(1, 0)], 4: [], 5: [(2, 0)], 6: half, 7: half, 8: [0, 1, 2, 3]}


def test_an_epoch_without_a_known_end_leaves_a_tail_without_one() -> None:
    states = [
        ReaderState(shard=s, shards=2, chapters=(RemainingEpoch.whole(0, None),), read=read)
        for s, read in enumerate((3, 1))
    ]
    (chapter,) = merged(states, None)
    assert chapter.spans == ((3, 2, 2), (6, 1, None))


def test_spans_without_end_take_turns_so_that_positions_only_grow() -> None:
    whole = RemainingEpoch.whole(0, None)
    rest = whole.rest([None, 2, 4])  # shard 0 of 3 has found the end
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
def test_no_change_of_shards_loses_what_lies_before_an_unknown_end(
    changes: list[list[int | None]], shards: int
) -> None:
    """Shards read in order up to an end that only reading finds; `expected` is a plain list."""
    far = 300  # what is compared lies well before it
    chapter, expected = RemainingEpoch.whole(0, None), list(range(far))
    for read in changes:
        size = len(read)
        expected = sorted(
            position
            for shard, count in enumerate(read)
            if count is not None
            for position in _all(chapter, far)[shard::size][count:]
        )
        chapter = chapter.rest(read)
    found = [p for shard in range(shards) for p in _all(chapter, far)[shard::shards]]
    assert sorted(p for p in found if p < 60) == [p for p in expected if p < 60]
    endless = [chapter[i] for i in range(far) if chapter.span_end(i) is None]
    assert [p for p in endless if p is not None] == sorted(p for p in endless if p is not None)


def _all(chapter: RemainingEpoch, far: int) -> list[int]:
    found = (chapter[index] for index in range(far))
    return [position for position in found if isinstance(position, int)]
