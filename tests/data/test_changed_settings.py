"""Pooled streams resume with another budget, overflow policy or pool, each token once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import (
    Cursor,
    Packed,
    Padded,
    PlannedStream,
    PooledStream,
    Recipe,
    Step,
    Steps,
    Topology,
    World,
)
from evenstep.data import (
    InMemory,
    Iterated,
    Jsonl,
    Lengths,
    Mapped,
    MeasuredMapped,
    Pool,
    merge_cursors,
)
from evenstep.errors import ConfigError, CursorError, SampleError
from tests.internals import spread

Settings = dict[str, Any]
ALL = {"budget", "overflow", "pool", "steps"}

settings_of_a_run = st.fixed_dictionaries(
    {
        "layout": st.one_of(
            st.integers(4, 12).map(lambda n: Packed(max_tokens=n)),
            st.integers(4, 12).map(lambda n: Padded(max_tokens=n)),
            st.just(Padded(samples=2)),
        ),
        "overflow": st.sampled_from(["split", "alone"]),
        "steps": st.sampled_from([Steps(), Steps(micro_batches=2)]),
        "pool": st.integers(1, 5).map(lambda n: Pool(samples=n, tokens=0)),
        "shape": st.tuples(st.integers(1, 3), st.integers(1, 2)),
    }
)


def stream_of(source: Any, given: Settings, rank: int = 0) -> PooledStream:
    ranks = given["shape"][0]
    recipe = Recipe(
        layout=given["layout"],
        overflow=given["overflow"],
        steps=given["steps"],
        topology=Topology(dp=ranks),
    )
    return PooledStream(source, recipe, world=World(rank, ranks), pool=given["pool"])


def in_turn(stream: PooledStream, workers: int) -> Iterator[Step]:
    walks = [stream.walk(worker, workers) for worker in range(workers)]
    return (step for group in zip_longest(*walks) for step in group if step is not None)


def run(
    source: Any, given: Settings, state: Any, most: int | None
) -> tuple[Counter[tuple[int, int]], Any]:
    """(how often each token ran, the merged state): `most` steps on each rank, or all."""
    ranks, workers = given["shape"]
    tokens: Counter[tuple[int, int]] = Counter()
    cursors: list[Cursor] = []
    for rank in range(ranks):
        stream = stream_of(source, given, rank)
        if state is not None:
            stream.load_state_dict(json.loads(json.dumps(state)), allow=ALL)
        mine = [stream.start(workers)]
        for step in islice(in_turn(stream, workers), most):
            mine.append(step.cursor)
            for micro in step.micro_batches:
                found = micro.segments
                for sample, start, length in zip(
                    found.sample.tolist(), found.start.tolist(), found.length.tolist(), strict=True
                ):
                    tokens.update((sample, token) for token in range(start, start + length))
        cursors += [Cursor(identity=c.identity, step=9, position=c.position) for c in mine]
    return tokens, merge_cursors(cursors).to_dict()


@pytest.mark.parametrize("kind", [InMemory, Iterated])
@given(
    lengths=st.lists(st.integers(1, 30), max_size=20),
    runs=st.lists(st.tuples(settings_of_a_run, st.integers(0, 4)), min_size=1, max_size=3),
    last=settings_of_a_run,
)
def test_every_token_runs_once_after_any_changes(
    kind: Any, lengths: list[int], runs: list[tuple[Settings, int]], last: Settings
) -> None:
    data = [{"input_ids": [0] * n} for n in lengths]
    source = InMemory(data) if kind is InMemory else Iterated(data, fingerprint="x")
    seen: Counter[tuple[int, int]] = Counter()
    state = None
    for given_now, most in runs:
        tokens, state = run(source, given_now, state, most)
        seen += tokens
    seen += run(source, last, state, None)[0]
    assert seen == Counter((i, t) for i, n in enumerate(lengths) for t in range(n))


SMALL = Pool(samples=3, tokens=0)
DATA = [{"input_ids": [0] * n} for n in (5, 23, 7, 41, 3, 3, 12)]


def simple(overflow: Any = "split", budget: int = 10, **more: Any) -> PooledStream:
    recipe = Recipe(layout=Packed(max_tokens=budget), overflow=overflow)
    return PooledStream(InMemory(DATA), recipe, **{"pool": SMALL, "shuffle": False, **more})


def test_waiting_segments_follow_the_new_policy() -> None:
    before = simple("alone")
    state = next(iter(before)).cursor.to_dict()  # sample 1 of 23 tokens is among those waiting
    for overflow, lost in (("truncate", {"truncated": 3}), ("drop", {"dropped": 3})):
        stream = simple(overflow)
        stream.load_state_dict(state, allow={"overflow"})
        found: Counter[str] = Counter()
        for step in stream:
            found.update(step.lost)
            assert all(micro.tokens <= 10 for micro in step.micro_batches)
        assert found == lost
    strict = simple("error", budget=30, on_error="skip")
    strict.load_state_dict(state, allow={"overflow", "budget"})
    assert sum(sum(step.lost.values()) for step in strict) == 1  # 41 tokens


def test_differences_are_reported_in_words() -> None:
    state = next(iter(simple())).cursor.to_dict()
    other = simple("truncate", budget=20, pool=Pool(samples=4, tokens=0))
    report = [
        "layout.max_tokens was 10 and is 20",
        "overflow was split and is truncate",
        "pool.samples was 3 and is 4",
    ]
    assert other.differences(state) == report
    with pytest.raises(CursorError, match=r"; ".join(report) + r".*allow=\{'budget', 'overflow'"):
        other.load_state_dict(state)
    with pytest.raises(CursorError, match=r"pool.samples was 3 and is 4.*allow=\{'pool'\}"):
        other.load_state_dict(state, allow={"budget", "overflow"})
    other.load_state_dict(state, allow={"budget", "overflow", "pool"})
    assert other.differences(other.state_dict()) == []


def test_data_and_order_cannot_change() -> None:
    state = next(iter(simple())).cursor.to_dict()
    with pytest.raises(CursorError, match="order was as stored and is shuffled by seed 0"):
        simple(shuffle=True).load_state_dict(state, allow=ALL)
    recipe = Recipe(layout=Packed(max_tokens=10), overflow="split")
    other = PooledStream(InMemory(DATA[:-1]), recipe, pool=SMALL, shuffle=False)
    with pytest.raises(CursorError, match=r"data was 7 items.* Restore the stream as it was"):
        other.load_state_dict(state, allow=ALL)
    with pytest.raises(ConfigError, match="unknown change 'data'; expected"):
        simple().load_state_dict(state, allow={"data"})
    with pytest.raises(ConfigError, match="unknown change 'data'"):
        simple().load_state_dict(state, allow="data")


def test_a_fingerprint_may_be_given() -> None:
    state = next(iter(simple(fingerprint="my data, version 3"))).cursor.to_dict()
    recipe = Recipe(layout=Packed(max_tokens=10), overflow="split")
    moved = PooledStream(
        Mapped(DATA), recipe, pool=SMALL, shuffle=False, fingerprint="my data, version 3"
    )
    moved.load_state_dict(state)
    assert len(list(moved)) > 0
    with pytest.raises(CursorError, match="data was 7 items, my data, version 3 and is 7 items"):
        simple(fingerprint="version 4").load_state_dict(state)


def test_a_planned_stream_takes_the_same_argument() -> None:
    source = Lengths(np.array([5, 3, 4, 2]))
    first = PlannedStream(source, Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=2)))
    state = next(iter(first)).cursor.to_dict()
    larger = PlannedStream(source, Recipe(layout=Packed(max_tokens=16), steps=Steps(samples=2)))
    larger.load_state_dict(state, allow={"budget"})  # between steps the layout may always change
    assert [step.number for step in larger] == [1]


@pytest.mark.parametrize(
    ("lengths", "fault"),
    [([3, 0, 4], "sample 1 has length 0"), ([3, 4, 30, 40], "sample 2 has 30 tokens.*1 more")],
)
def test_lengths_that_are_known_are_checked_when_the_stream_is_made(
    lengths: list[int], fault: str
) -> None:
    data = [{"input_ids": [0] * n} for n in lengths]
    recipe = Recipe(layout=Packed(max_tokens=10))
    with pytest.raises(SampleError, match=fault):
        PooledStream(InMemory(data), recipe)
    assert len(list(PooledStream(InMemory(data), recipe, on_error="skip"))) == 1
    PooledStream(Mapped(data), recipe)  # its lengths are unknown
    PooledStream(InMemory(data), recipe, length_of=lambda sample: 3)


def test_changed_lengths_are_noticed() -> None:
    """The fingerprint covers 64 of 500 samples; the lengths cover all."""
    data = [{"input_ids": [k] * (3 + k % 4)} for k in range(500)]
    edited = [*data[:101], {"input_ids": [101] * 9}, *data[102:]]
    assert InMemory(data).fingerprint == InMemory(edited).fingerprint
    layout = Packed(max_tokens=10)
    streams: list[Any] = [
        lambda source: PooledStream(source, Recipe(layout=layout), pool=SMALL),
        lambda source: PlannedStream(source, Recipe(layout=layout, steps=Steps(samples=9))),
    ]
    for make in streams:
        state = next(iter(make(data))).cursor.to_dict()
        make(list(data)).load_state_dict(state)
        with pytest.raises(CursorError, match=r"lengths was .* and is "):
            make(edited).load_state_dict(state)


def before_release(state: dict[str, Any], *names: str) -> dict[str, Any]:
    """The state as earlier releases wrote it, which did not compare these."""
    cursor = Cursor.from_dict(state)
    kept = {name: value for name, value in cursor.identity.items() if name not in names}
    return replace(cursor, identity=kept).to_dict()


@pytest.mark.parametrize("kind", ["planned", "pooled", "pooled by a transform"])
def test_an_edit_of_a_file_is_noticed_behind_a_wrapper(tmp_path: Path, kind: str) -> None:
    """A wrapper's own fingerprint covers 16 of 400 samples; that of a small file covers all."""
    rows = [{"input_ids": [k % 50] * (3 + k % 4)} for k in range(400)]

    def make() -> Any:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        steps = Steps(samples=9) if kind == "planned" else Steps()
        recipe, source = Recipe(layout=Packed(max_tokens=10), steps=steps), Jsonl(path)
        if kind == "planned":
            return PlannedStream(source, recipe)  # wraps it: its lengths are counted
        if kind == "pooled":
            return PooledStream(MeasuredMapped(Mapped(source)), recipe, pool=SMALL)
        return PooledStream(Mapped(source, transform=dict), recipe, pool=SMALL)

    state = next(iter(make())).cursor.to_dict()
    assert make().load_state_dict(state) is None
    rows[101]["input_ids"][0] += 1
    edited = make()
    with pytest.raises(CursorError, match=r"wrapped data was \w+(,\w+)* and is \w+"):
        edited.load_state_dict(state)
    old = before_release(state, "wrapped data")
    edited.load_state_dict(old)
    if kind != "planned":
        assert edited.differences(old) == []


def test_the_name_of_wrapped_data_stands_for_all_of_it() -> None:
    recipe = Recipe(layout=Packed(max_tokens=50))
    stream = PooledStream(Mapped(InMemory(DATA)), recipe, fingerprint="mine")
    assert "wrapped data" not in next(iter(stream)).cursor.identity


def test_one_changed_group_of_many_samples_is_noticed() -> None:
    count = 10_000
    groups = np.arange(count) // 4
    recipe = Recipe(layout=Packed(max_tokens=50), steps=Steps(samples=40))

    def make(groups: Any) -> PlannedStream:
        return PlannedStream(Lengths(np.full(count, 5)), recipe, groups=groups)

    state = next(iter(make(groups))).cursor.to_dict()
    make(groups).load_state_dict(state)
    edited = groups.copy()
    first, second = np.setdiff1d(np.arange(count), spread(count, 4096))[[100, 2000]]
    edited[[first, second]] = edited[[second, first]]
    with pytest.raises(CursorError, match="all groups was"):
        make(edited).load_state_dict(state)
    make(edited).load_state_dict(before_release(state, "all groups"))


def test_a_cursor_of_few_items_that_were_shuffled_in_another_way_is_refused() -> None:
    stream = PooledStream(InMemory(DATA), Recipe(layout=Packed(max_tokens=50)))
    cursor = next(iter(stream)).cursor
    assert cursor.identity["order"] == "shuffled by seed 0 as a list"
    before = replace(cursor, identity={**cursor.identity, "order": "shuffled by seed 0"})
    with pytest.raises(CursorError, match=r"order was shuffled by seed 0 and is .* as a list"):
        stream.load_state_dict(before.to_dict())


def test_shuffling_a_sequential_source_is_refused_if_it_is_asked_for() -> None:
    recipe = Recipe(layout=Packed(max_tokens=50))
    source = Iterated(DATA, fingerprint="x")
    with pytest.raises(ConfigError, match=r"shuffle=True has no effect on Iterated.* omit shuffle"):
        PooledStream(source, recipe, shuffle=True)
    for stream in (PooledStream(source, recipe), PooledStream(source, recipe, shuffle=False)):
        assert not stream.shuffle
        assert next(iter(stream)).cursor.identity["order"] == "as stored"
    assert PooledStream(InMemory(DATA), recipe).shuffle
    assert not PooledStream(InMemory(DATA), recipe, shuffle=False).shuffle


def test_a_planned_stream_takes_a_fingerprint_and_compares_lengths_anyway() -> None:
    recipe = Recipe(layout=Packed(max_tokens=50), steps=Steps(samples=2))
    first = PlannedStream(DATA, recipe, fingerprint="mine")
    state = next(iter(first)).cursor.to_dict()
    moved = Lengths(np.array([len(sample["input_ids"]) for sample in DATA]))
    with pytest.raises(CursorError, match="data was 7 samples, mine and is 7 samples, "):
        PlannedStream(moved, recipe).load_state_dict(state)
    PlannedStream(moved, recipe, fingerprint="mine").load_state_dict(state)
    with pytest.raises(CursorError, match="lengths was"):
        PlannedStream(DATA[::-1], recipe, fingerprint="mine").load_state_dict(state)
