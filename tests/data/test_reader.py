"""Pool readers in edge cases: ends of data and epochs, unreadable items, counts of lost samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import Cursor, Limits, Packed, PooledStream, Recipe, Step, Steps, Topology, World
from evenstep.data import InMemory, Iterated, Mapped, Pool, merge_cursors
from evenstep.errors import ConfigError, CursorError, InputError, SampleError
from tests.internals import RemainingEpoch, sample_number

PACKED = Recipe(layout=Packed(max_tokens=9))
SMALL = Pool(samples=2, tokens=0)


def sample(item: int, length: int) -> dict[str, Any]:
    return {"input_ids": [item] * length}


def stream_of(source: Any, rank: int = 0, ranks: int = 1, **more: Any) -> PooledStream:
    recipe = replace(more.pop("recipe", PACKED), topology=Topology(dp=ranks))
    more = {"pool": SMALL, "shuffle": False, **more}
    return PooledStream(source, recipe, world=World(rank, ranks), **more)


def first_tokens(steps: Any) -> list[int]:
    """The first token of every segment, which identifies its sample."""
    return [
        samples[sample_id]["input_ids"][0]
        for step in steps
        for micro, samples in step
        for sample_id in micro.segments.sample.tolist()
    ]


def reloaded(cursor: Any) -> Any:
    return json.loads(json.dumps(cursor.to_dict()))


# The ends of epochs --------------------------------------------------------------------------


def test_fewer_samples_may_remain_than_there_are_readers() -> None:
    source = InMemory([sample(i, 3) for i in range(10)])
    alone = stream_of(source, recipe=Recipe(layout=Packed(max_tokens=3)), infinite_loop=True)
    last = list(islice(alone, 9))[-1]
    for rank in range(4):
        stream = stream_of(source, rank, 4, recipe=alone.recipe, infinite_loop=True)
        stream.load_state_dict(reloaded(last.cursor))
        assert len(list(islice(stream, 3))) == 3


@pytest.mark.parametrize("shuffle", [False, True])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=12, max_size=24),
    ranks=st.integers(2, 4),
    later=st.integers(1, 3),
    ahead=st.lists(st.integers(0, 9), min_size=4, max_size=4),
)
@settings(deadline=None, max_examples=60)
def test_readers_at_the_end_and_readers_before_it_lose_no_samples(
    shuffle: bool, lengths: list[int], ranks: int, later: int, ahead: list[int]
) -> None:
    later += later >= ranks  # always another number
    data = [sample(i, n) for i, n in enumerate(lengths)]
    sources = {False: Iterated(data, fingerprint="x"), True: InMemory(data)}
    seen: list[int] = []
    cursors = []
    for rank in range(ranks):
        stream = stream_of(sources[shuffle], rank, ranks, shuffle=shuffle, infinite_loop=True)
        steps = list(islice(stream, ahead[rank]))
        seen += first_tokens(steps)
        cursor = steps[-1].cursor if steps else stream.start()
        cursors.append(replace(cursor, step=9))  # as if all had taken 9 steps
    state = reloaded(merge_cursors(cursors))
    # A finite stream runs to the end of the last epoch that any reader has begun.
    for rank in range(later):
        stream = stream_of(sources[shuffle], rank, later, shuffle=shuffle)
        stream.load_state_dict(state)
        seen += first_tokens(stream)
    assert set(seen) == set(range(len(lengths)))
    assert len(set(Counter(seen).values())) == 1


def test_reading_continues_with_the_next_span_when_one_is_past_the_end() -> None:
    data = [sample(i, 9) for i in range(7)]  # reader 0 has items 0 3 6, the others two each
    cursors: list[Cursor] = []
    seen: list[int] = []
    for rank, count in enumerate((3, 1, 1)):
        stream = stream_of(Iterated(data, fingerprint="x"), rank, 3, pool=Pool(samples=1, tokens=0))
        steps = list(islice(stream, count))
        seen += first_tokens(steps)
        cursors.append(steps[-1].cursor)
    alone = stream_of(Iterated(data, fingerprint="x"), pool=Pool(samples=1, tokens=0))
    alone.load_state_dict(reloaded(merge_cursors(cursors)))
    assert sorted(seen + first_tokens(alone)) == list(range(7))


def test_an_endless_stream_without_samples_to_run_raises() -> None:
    source = InMemory([sample(i, 30) for i in range(4)])
    recipe = Recipe(layout=Packed(max_tokens=9), overflow="drop")
    with pytest.raises(InputError, match=r"no sample to run.* 8 dropped"):
        next(iter(stream_of(source, recipe=recipe, infinite_loop=True)))
    with pytest.raises(InputError, match="no sample to run"):
        next(iter(stream_of(InMemory([[], []]), infinite_loop=True)))
    # One of four samples can run. With several readers, each gets it in some epoch.
    source = InMemory([sample(i, 30 if i else 3) for i in range(4)])
    stream = stream_of(source, 0, 2, recipe=recipe, infinite_loop=True, shuffle=True)
    assert len(list(islice(stream, 4))) == 4


def test_samples_of_two_epochs_at_one_position_get_different_ids_in_a_step() -> None:
    def items(epoch: int) -> Iterator[dict[str, Any]]:
        return (sample(10 * epoch + i, 1 + (i + epoch) % 3) for i in range(3))

    recipe = Recipe(layout=Packed(max_tokens=9), steps=Steps(micro_batches=3))
    stream = stream_of(Iterated(items), recipe=recipe, infinite_loop=True)
    for step in islice(stream, 5):
        for micro, samples in step.loaded():
            found = [len(samples[i]["input_ids"]) for i in micro.segments.sample.tolist()]
            assert found == micro.segments.length.tolist()
    seen = first_tokens(islice(stream, 5))
    assert seen[:6] == [0, 1, 2, 10, 11, 12]
    assert len(seen) == len(set(seen))


# Faults and counts ---------------------------------------------------------------------------


def test_skipping_one_sample_of_an_item_keeps_the_others() -> None:
    source = InMemory([[sample(i, 2), sample(i, 0), sample(i, 3)] for i in range(3)])
    steps = list(stream_of(source, on_error="skip"))
    ids = [i for step in steps for m in step.micro_batches for i in m.segments.sample.tolist()]
    assert sorted(ids) == sorted(sample_number(i, part) for i in range(3) for part in (0, 2))
    assert sum(step.lost.get("skipped", 0) for step in steps) == 3
    with pytest.raises(SampleError, match=r"sample 0 \(part 1\) has length 0"):
        list(stream_of(source))


def test_malformed_labels_raise_an_error_that_names_the_sample() -> None:
    source = InMemory([{"input_ids": [1, 2], "labels": [[1], [2, 3]]}])
    recipe = replace(PACKED, limits=Limits(columns={"loss_tokens": 4}))
    with pytest.raises(SampleError, match="sample 0 cannot be read"):
        list(stream_of(source, recipe=recipe))
    with pytest.raises(InputError, match=r"skipped all of the 1 items.* sample 0 cannot be read"):
        list(stream_of(source, recipe=recipe, on_error="skip"))


def test_samples_lost_after_the_last_step_give_a_warning() -> None:
    source = InMemory([sample(0, 9), sample(1, 30), sample(2, 0)])
    recipe = Recipe(layout=Packed(max_tokens=9), overflow="drop")
    stream = stream_of(source, recipe=recipe, pool=Pool(samples=1, tokens=0), on_error="skip")
    with pytest.warns(UserWarning, match="after its last step: 1 dropped, 1 skipped"):
        steps = list(stream)
    assert [dict(step.lost) for step in steps] == [{}]


def test_the_first_skipped_sample_is_named_once() -> None:
    def transform(item: int) -> dict[str, Any]:
        if item % 2 == 0:
            raise KeyError("typo")
        return sample(item, 3)

    source = Transformed(transform)
    with pytest.warns(UserWarning, match=r"The first: sample 0 cannot be read \(KeyError") as seen:
        steps = list(stream_of(source, on_error="skip"))
    assert len(seen) == 1
    assert sum(step.lost.get("skipped", 0) for step in steps) == 20


@pytest.mark.parametrize("endless", [False, True])
def test_skipping_everything_is_an_error_that_names_the_first(endless: bool) -> None:
    def transform(item: int) -> dict[str, Any]:
        raise KeyError("typo")

    for ranks in (1, 2):
        stream = stream_of(Transformed(transform), 0, ranks, on_error="skip", infinite_loop=endless)
        with pytest.raises(InputError, match=r"skipped all of the \d+ items.*KeyError: 'typo'"):
            list(stream)


class Transformed:
    """Forty items, each made by a function."""

    fingerprint = "transformed"

    def __init__(self, transform: Callable[[int], Any]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 40

    def __getitem__(self, item: int) -> Any:
        return self.transform(item)


def test_resuming_reads_an_item_of_several_samples_once() -> None:
    opened: list[int] = []

    def items(start: int = 0) -> Iterator[Any]:
        opened.append(start)
        return iter([[sample(i, 2)] * 3 for i in range(start, 40)])

    def stream() -> PooledStream:
        return stream_of(Iterated(items, fingerprint="x"), pool=Pool(samples=9, tokens=0))

    before = list(islice(stream(), 5))
    opened.clear()
    resumed = stream()
    resumed.load_state_dict(reloaded(before[-1].cursor))
    next(iter(resumed))
    assert len(opened) == 1


class Fading:
    """Six samples, some of which are no longer readable."""

    fingerprint = "fading"

    def __init__(self, gone: tuple[int, ...] = (), length: int = 3) -> None:
        self.gone, self.length = gone, length

    def __len__(self) -> int:
        return 6

    def __getitem__(self, item: int) -> Any:
        if item in self.gone:
            raise OSError("disk on fire")
        return sample(item, self.length)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_unreadable_sample_of_the_pool_is_skipped_on_resume(ranks: int) -> None:
    more: dict[str, Any] = {
        "pool": Pool(samples=4, tokens=0),
        "recipe": Recipe(layout=Packed(max_tokens=3)),
    }
    first = next(iter(stream_of(Fading(), on_error="skip", **more)))
    (state,) = first.cursor.position["readers"].values()
    assert [sample_id for _, sample_id, _ in state["waiting"]] == [1, 2, 3]
    resumed = [stream_of(Fading((2, 4)), r, ranks, on_error="skip", **more) for r in range(ranks)]
    for stream in resumed:
        stream.load_state_dict(reloaded(first.cursor))
    steps = [step for stream in resumed for step in stream]
    assert sorted(first_tokens(steps)) == [1, 3, 5]
    assert sum(step.lost.get("skipped", 0) for step in steps) == 2
    # A second resume after that does not count it again.
    again = stream_of(Fading((2, 4)), 0, ranks, on_error="skip", **more)
    again.load_state_dict(reloaded(next(iter(resumed[0])).cursor))
    assert sum(step.lost.get("skipped", 0) for step in again) == 0
    strict = stream_of(Fading((2, 4)), ranks - 1, ranks, **more)
    strict.load_state_dict(reloaded(first.cursor))
    with pytest.raises(SampleError, match=r"sample [24] cannot be read"):
        next(iter(strict))


def test_an_unreadable_split_sample_is_counted_once() -> None:
    recipe = Recipe(layout=Packed(max_tokens=3), overflow="split")
    first = next(iter(stream_of(Fading(length=9), recipe=recipe, on_error="skip")))
    resumed = stream_of(Fading((0,), length=9), recipe=recipe, on_error="skip")
    resumed.load_state_dict(reloaded(first.cursor))
    steps = list(resumed)
    assert first_tokens(steps) == [item for item in range(1, 6) for _ in range(3)]
    assert [dict(step.lost) for step in steps[:2]] == [{"skipped": 1}, {}]


def test_an_item_with_fewer_samples_than_before_raises() -> None:
    data = [[sample(i, 3)] * 3 for i in range(3)]
    first = next(iter(stream_of(InMemory(data), recipe=Recipe(layout=Packed(max_tokens=3)))))
    source = InMemory([[*parts[:1]] for parts in data])
    less = stream_of(source, recipe=Recipe(layout=Packed(max_tokens=3)), on_error="skip")
    state = {**first.cursor.identity, "data": f"3 items, {source.fingerprint}"}
    less.load_state_dict(reloaded(replace(first.cursor, identity=state)))
    with pytest.raises(
        CursorError, match="item 0 now has 1 samples, but the cursor names sample 1"
    ):
        next(iter(less))


# Limits --------------------------------------------------------------------------------------


def test_rows_of_a_micro_batch_share_its_loss_tokens_and_its_warmup() -> None:
    source = InMemory([sample(i, 5) for i in range(200)])
    recipe = Recipe(layout=Packed(rows=4, pad_to=20))
    limits = Limits(columns={"loss_tokens": 16})
    limited = stream_of(source, recipe=replace(recipe, limits=limits), pool=Pool(samples=16))
    assert {m.tokens for step in limited for m in step.micro_batches} == {20}
    warming = Pool(samples=16, warmup_steps=4, warmup_tokens=20)
    grown = stream_of(source, recipe=recipe, pool=warming)
    assert [step.micro_batches[0].tokens for step in islice(grown, 6)] == [20, 20, 40, 60, 80, 80]


def test_limits_that_rows_cannot_share_are_refused() -> None:
    layout = Packed(rows=4, pad_to=20)
    with pytest.raises(ConfigError, match=r"layout\.samples must be a multiple of layout\.rows, 4"):
        Packed(rows=4, pad_to=20, samples=3)
    with pytest.raises(ConfigError, match=r"loss_tokens must be at least layout\.rows, 4"):
        Recipe(layout=layout, limits=Limits(columns={"loss_tokens": 3}))


# Positions -----------------------------------------------------------------------------------


def test_skipped_steps_add_up_and_are_part_of_the_state() -> None:
    source = InMemory([sample(i, 4) for i in range(30)])
    steps = list(stream_of(source))
    stream = stream_of(source)
    stream.load_state_dict(reloaded(steps[0].cursor))
    stream.skip_batches(2)
    stream.skip_batches(3)
    assert stream.state_dict()["step"] == 6
    resumed = stream_of(source)
    resumed.load_state_dict(stream.state_dict())
    expected = first_tokens(steps[6:])
    assert first_tokens(stream) == first_tokens(resumed) == expected
    stream.skip_batches(0)
    assert stream.state_dict()["step"] == len(steps)


def test_a_growing_budget_resumes_exactly_when_other_workers_have_ended() -> None:
    # The first of three workers has longer samples and ends last, while the budget still grows.
    source = InMemory([sample(i, 1 if i % 3 else 4) for i in range(120)])
    recipe = Recipe(layout=Packed(max_tokens=40))
    pool = Pool(samples=16, tokens=0, warmup_steps=40, warmup_tokens=4)

    def run(state: Any = None) -> list[tuple[Any, Any]]:
        """(sample ids of a step, state after it), as a loader with three workers yields them."""
        stream = stream_of(source, pool=pool, recipe=recipe)
        if state is not None:
            stream.load_state_dict(state)
        now = stream.start(3)
        walks: list[Iterator[Step]] = [stream.walk(worker, 3) for worker in range(3)]
        found = []
        while walks:
            step = next(walks[0], None)
            if step is None:
                del walks[0]
                continue
            walks.append(walks.pop(0))
            now = replace(stream.join([now, step.cursor]), step=now.step + 1)
            found.append(([m.segments.sample.tolist() for m in step.micro_batches], reloaded(now)))
        return found

    whole = run()
    assert len(whole) < pool.warmup_steps
    for done, (_, state) in enumerate(whole, 1):
        assert [held for held, _ in run(state)] == [held for held, _ in whole[done:]]


@pytest.mark.parametrize("pool", [SMALL, Pool(samples=1, tokens=0)])
def test_cursors_of_different_steps_are_not_merged(pool: Pool) -> None:
    source = InMemory([sample(i, 5) for i in range(40)])
    runs = [list(stream_of(source, rank, 2, pool=pool)) for rank in range(2)]
    for one, other in ((3, 5), (5, 3), (2, 1)):
        cursors = [runs[0][one - 1].cursor, runs[1][other - 1].cursor]
        few, many = (0, 1) if one < other else (1, 0)
        with pytest.raises(
            CursorError,
            match=f"rank {few} was taken after {min(one, other)} steps, that of rank {many} "
            f"after {max(one, other)}",
        ):
            merge_cursors(cursors)
    # Of several cursors of a rank, the last counts.
    every = [step.cursor for run in runs for step in run[:4]]
    assert merge_cursors(every) == merge_cursors([run[3].cursor for run in runs])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", [Mapped, Iterated])
def test_cursors_of_ended_ranks_are_merged_with_those_that_go_on(kind: Any, workers: int) -> None:
    # The samples of rank 0 are short, so it ends before rank 1.
    dealt = [RemainingEpoch(0, 40).positions(w, 2 * workers).tolist() for w in range(workers)]
    short = {item for items in dealt for item in items}
    data = [sample(i, 1 if i in short else 9) for i in range(40)]
    cursors: list[Cursor] = []
    seen: list[int] = []
    for rank in range(2):
        stream = stream_of(kind(data), rank, 2)
        cursors.append(stream.start(workers))
        for worker in range(workers):
            steps = list(islice(stream.walk(worker, workers), 12 // workers))
            cursors += [step.cursor for step in steps]
            seen += first_tokens(steps)
    assert max(cursor.step for cursor in cursors if "0" in cursor.position["turns"]) < 12
    alone = stream_of(kind(data))
    alone.load_state_dict(reloaded(merge_cursors(cursors)))
    assert sorted(seen + first_tokens(alone)) == list(range(40))


def test_the_cursor_of_a_planned_stream_needs_no_merging() -> None:
    planned = Cursor(identity={"stream": "planned"}, step=0, position={"epoch": 0, "position": 0})
    with pytest.raises(CursorError, match="needs no merging"):
        merge_cursors([planned])
