"""Pooled streams: full micro-batches, bounded delay, exact and elastic resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from evenstep import Limits, Packed, Padded, PooledStream, Recipe, Step, Steps, Topology, World
from evenstep.data import InMemory, Iterated, Mapped, Pool, merge_cursors
from evenstep.errors import ConfigError, CursorError, InputError, SampleError
from tests.data.datasets import MapStyle
from tests.internals import Layout

LAYOUTS: tuple[Layout, ...] = (
    Packed(max_tokens=40),
    Packed(max_tokens=40, pad_to=40),
    Padded(max_tokens=40, round_to=2),
    Packed(rows=2, pad_to=20),
    Packed(samples=3, max_tokens=60),
)


def samples_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"input_ids": np.full(n, i)} for i, n in enumerate(lengths)]


def key(step: Step) -> Any:
    return [
        (
            micro.segments.sample.tolist(),
            micro.segments.start.tolist(),
            micro.segments.length.tolist(),
            micro.row_offsets.tolist(),
            micro.width,
        )
        for micro in step.micro_batches
    ]


def numbers(steps: list[Step]) -> list[int]:
    return [n for step in steps for m in step.micro_batches for n in m.segments.sample.tolist()]


def in_turn(stream: PooledStream, workers: int) -> Iterator[Step]:
    """The steps of a loader with this number of workers: one of each worker in turn."""
    walks = [stream.walk(worker, workers) for worker in range(workers)]
    alive = list(range(workers))
    while alive:
        for worker in list(alive):
            step = next(walks[worker], None)
            if step is None:
                alive.remove(worker)
            else:
                yield step


def roundtrip(cursor: Any) -> Any:
    return json.loads(json.dumps(cursor.to_dict()))


@st.composite
def settings_of(draw: DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(1, 20), min_size=0, max_size=40))
    layout = draw(st.sampled_from(LAYOUTS))
    recipe = Recipe(layout=layout, steps=Steps(micro_batches=draw(st.integers(1, 3))))
    sequential = draw(st.booleans())
    data = samples_of(lengths)
    return {
        "source": Iterated(data, fingerprint="fixed") if sequential else InMemory(data),
        "recipe": recipe,
        "pool": Pool(samples=draw(st.sampled_from([1, 3, 8])), tokens=draw(st.integers(0, 30))),
        "seed": draw(st.integers(0, 3)),
        "shuffle": None if sequential else draw(st.booleans()),
    }  # fmt: skip


def ranks_of(settings: dict[str, Any], size: int) -> list[PooledStream]:
    recipe = replace(settings["recipe"], topology=Topology(dp=size))
    return [
        PooledStream(**{**settings, "recipe": recipe}, world=World(rank, size))
        for rank in range(size)
    ]


def count_of(settings: dict[str, Any]) -> int:
    source = settings["source"]
    return len(list(source.open(0, 0))) if isinstance(source, Iterated) else len(source)


@given(settings_of(), st.integers(1, 3), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_every_sample_runs_once_per_epoch_and_no_budget_is_exceeded(
    given: dict[str, Any], size: int, workers: int
) -> None:
    steps = [step for stream in ranks_of(given, size) for step in in_turn(stream, workers)]
    assert sorted(numbers(steps)) == list(range(count_of(given)))
    budget = given["recipe"].layout.budget
    for step in steps:
        assert len(step) == given["recipe"].steps.micro_batches
        for micro, samples in step:
            assert micro.slots <= budget
            for number, length in zip(
                micro.segments.sample.tolist(), micro.segments.length.tolist(), strict=True
            ):
                assert samples[number]["input_ids"].tolist() == [number] * length


@given(settings_of(), st.integers(1, 3), st.booleans())
@settings(deadline=None, max_examples=60)
def test_resuming_after_any_step_gives_the_same_steps(
    given: dict[str, Any], workers: int, endless: bool
) -> None:
    if endless and count_of(given) < 2 * workers:
        return
    changes = {**given, "infinite_loop": endless, "max_num_steps": 25 if endless else None}
    stream = ranks_of(changes, 2)[1]
    expected, latest = [], {0: stream.start(workers)}
    states = []
    for step in in_turn(stream, workers):
        expected.append(key(step))
        latest[step.number % workers + 1] = step.cursor
        states.append(roundtrip(merge_cursors(list(latest.values()))))
    for done, state in enumerate(states, 1):
        resumed = ranks_of(changes, 2)[1]
        resumed.load_state_dict(state)
        again = list(in_turn(resumed, workers))
        assert [key(step) for step in again] == expected[done:]
        if again:
            assert again[0].number == done


@given(
    settings_of(),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=2, max_size=4),
    st.data(),
)
@settings(deadline=None, max_examples=60)
def test_any_change_of_ranks_and_workers_runs_every_sample_once(
    given: dict[str, Any], shapes: list[tuple[int, int]], data: st.DataObject
) -> None:
    state: Any = None
    seen: list[int] = []
    for at, (size, workers) in enumerate(shapes):
        last = at == len(shapes) - 1
        stop = None if last else data.draw(st.integers(0, 3))
        cursors = []
        for stream in ranks_of(given, size):
            if state is not None:
                stream.load_state_dict(state)
            cursors.append(stream.start(workers))
            for taken, step in enumerate(in_turn(stream, workers)):
                if taken == stop:
                    break
                seen += numbers([step])
                cursors.append(step.cursor)
        state = roundtrip(merge_cursors(cursors))
    assert sorted(seen) == list(range(count_of(given)))


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=60), st.sampled_from(["subset_sum", "greedy"])
)
@settings(deadline=None, max_examples=60)
def test_no_sample_waits_for_more_micro_batches_than_the_pool_has_samples(
    lengths: list[int], strategy: Any
) -> None:
    pool = Pool(samples=5, tokens=0, strategy=strategy)
    recipe = Recipe(layout=Packed(max_tokens=40))
    stream = PooledStream(InMemory(samples_of(lengths)), recipe, pool=pool, shuffle=False)
    read = 0
    for emitted, step in enumerate(stream):
        (state,) = step.cursor.position["readers"].values()
        assert len(state["waiting"]) <= pool.samples
        taken = numbers([step])
        # A sample is read when fewer than 5 are in the pool, and the oldest is always taken.
        for number in taken:
            assert emitted <= number  # each micro-batch takes one sample or more
        read += len(taken)
    assert read == len(lengths)


def test_documented_examples_are_reproduced() -> None:
    lengths, drawn = [7, 6, 8, 5, 1, 3, 8, 6], [4, 1, 5, 2, 0, 3, 7, 6]
    source = InMemory([{"input_ids": [0] * lengths[i]} for i in drawn])

    def replay(layout: Layout, pool: Pool, accumulate: int = 1) -> list[list[list[int]]]:
        recipe = Recipe(layout=layout, steps=Steps(micro_batches=accumulate))
        stream = PooledStream(source, recipe, pool=pool, shuffle=False)
        return [
            [[drawn[n] for n in m.segments.sample] for m in step.micro_batches] for step in stream
        ]

    padded, packed = Padded(max_tokens=16), Packed(max_tokens=16)
    closest = replay(padded, Pool(samples=8, strategy="prefer_closest"))
    assert closest == [[[4, 5, 3]], [[1, 7]], [[2, 6]], [[0]]]
    first = replay(padded, Pool(samples=8, strategy="prefer_first"))
    assert first == [[[4, 5, 3]], [[1, 7]], [[2, 0]], [[6]]]
    greedy = replay(packed, Pool(samples=8, strategy="greedy"))
    assert greedy == [[[4, 1, 5, 3]], [[2, 0]], [[7, 6]]]
    two = replay(packed, Pool(samples=3, strategy="greedy"), accumulate=2)
    assert two == [[[4, 1, 5], [2, 0]], [[3, 7], [6]]]


def test_the_pool_fills_to_its_samples_and_tokens() -> None:
    source = InMemory([{"input_ids": [0] * (i + 1)} for i in range(16)])
    pool = Pool(samples=10, tokens=32, strategy="greedy")
    stream = PooledStream(source, Recipe(layout=Packed(max_tokens=32)), pool=pool, shuffle=False)
    batches = [(m.segments.length.tolist()) for step in stream for m in step.micro_batches]
    assert batches[:5] == [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11, 12], [13, 14], [15, 16]]


def test_the_budget_grows_during_warmup() -> None:
    source = InMemory(samples_of([4] * 200))
    pool = Pool(samples=32, warmup_steps=4, warmup_tokens=8)
    stream = PooledStream(source, Recipe(layout=Packed(max_tokens=40)), pool=pool, max_num_steps=6)
    assert [step.micro_batches[0].tokens for step in stream] == [8, 16, 24, 32, 40, 40]
    with pytest.raises(ConfigError, match="no effect without each other"):
        Pool(warmup_steps=3)


def test_loss_tokens_limit_a_micro_batch() -> None:
    data = [{"input_ids": [1] * 10, "labels": [-100] * 8 + [1] * 2} for _ in range(40)]
    for loss_tokens, expected in ((8, 4), (100, 6)):
        limits = Limits(columns={"loss_tokens": loss_tokens})
        stream = PooledStream(InMemory(data), Recipe(layout=Packed(max_tokens=60), limits=limits))
        counts = [len(m.segments) for step in stream for m in step.micro_batches]
        assert counts[:-1] == [expected] * (len(counts) - 1)


def test_one_item_may_give_several_samples() -> None:
    data = [[{"input_ids": [i] * n} for n in (2, 3, 1)] for i in range(9)]
    stream = PooledStream(InMemory(data), Recipe(layout=Packed(max_tokens=7)), pool=Pool(samples=4))
    steps = list(stream)
    found = numbers(steps)
    assert len(found) == len(set(found)) == 27
    for done, step in enumerate(steps, 1):
        resumed = PooledStream(
            InMemory(data), Recipe(layout=Packed(max_tokens=7)), pool=Pool(samples=4)
        )
        resumed.load_state_dict(roundtrip(step.cursor))
        assert [key(s) for s in resumed] == [key(s) for s in steps[done:]]


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop", "alone", "error"])
def test_over_long_samples_follow_the_policy(overflow: Any) -> None:
    lengths = [5, 23, 7, 41, 3, 3]
    recipe = Recipe(layout=Packed(max_tokens=10), overflow=overflow)
    if overflow == "error":
        stream = PooledStream(Mapped(samples_of(lengths)), recipe, shuffle=False)
        with pytest.raises(SampleError, match="sample 1 has 23 tokens but a micro-batch holds 10"):
            list(stream)
        return
    stream = PooledStream(InMemory(samples_of(lengths)), recipe, shuffle=False)
    steps = list(stream)
    tokens = sum(m.tokens for step in steps for m in step.micro_batches)
    expected = {"split": 82, "truncate": 38, "drop": 18, "alone": 82}
    assert tokens == expected[overflow]
    lost: dict[str, int] = {}
    for step in steps:
        for reason, count in step.lost.items():
            lost[reason] = lost.get(reason, 0) + count
    assert lost == {"drop": {"dropped": 2}, "truncate": {"truncated": 2}}.get(overflow, {})
    for done, step in enumerate(steps, 1):
        resumed = PooledStream(InMemory(samples_of(lengths)), recipe, shuffle=False)
        resumed.load_state_dict(roundtrip(step.cursor))
        assert [key(s) for s in resumed] == [key(s) for s in steps[done:]]


class Faulty:
    """Sample 3 raises StopIteration, 5 an OSError, 6 is empty."""

    fingerprint = "faulty"

    def __len__(self) -> int:
        return 8

    def __getitem__(self, item: int) -> Any:
        if item == 3:
            raise StopIteration
        if item == 5:
            raise OSError("disk on fire")
        return {"input_ids": [] if item == 6 else [item, item]}


def test_an_unreadable_sample_is_named_or_skipped_and_counted() -> None:
    recipe = Recipe(layout=Packed(max_tokens=4))
    with pytest.raises(SampleError, match="sample 3 cannot be read"):
        list(PooledStream(Faulty(), recipe, shuffle=False))
    steps = list(PooledStream(Faulty(), recipe, shuffle=False, on_error="skip"))
    assert sorted(numbers(steps)) == [0, 1, 2, 4, 7]
    assert sum(step.lost.get("skipped", 0) for step in steps) == 3


def test_an_iterable_that_raises_is_not_treated_as_finished() -> None:
    def broken() -> Iterator[Any]:
        yield {"input_ids": [1]}
        yield {"input_ids": [2]}
        raise KeyError("lost")

    recipe = Recipe(layout=Packed(max_tokens=4))
    for stream in (
        PooledStream(Iterated(broken), recipe),
        PooledStream(Iterated(broken), recipe, on_error="skip"),
    ):
        with pytest.raises(SampleError, match=r"item 2|sample 2"):
            list(stream)


def test_every_epoch_of_an_endless_stream_has_its_own_order() -> None:
    stream = PooledStream(
        InMemory(samples_of([5] * 12)),
        Recipe(layout=Packed(max_tokens=10)),
        pool=Pool(samples=2, tokens=0),
        infinite_loop=True,
        max_num_steps=18,
    )
    steps = list(stream)
    assert len(steps) == 18 == len(stream)
    found = numbers(steps)
    orders = [tuple(found[k : k + 12]) for k in (0, 12, 24)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len(set(orders)) == 3


def test_set_epoch_and_skip_batches_set_the_start() -> None:
    def make() -> PooledStream:
        return PooledStream(InMemory(samples_of([3] * 20)), Recipe(layout=Packed(max_tokens=9)))

    first, second = make(), make()
    second.set_epoch(1)
    assert numbers(list(first)) != numbers(list(second))
    expected = [key(step) for step in make()]
    skipped = make()
    skipped.skip_batches(3)
    steps = list(skipped)
    assert [key(step) for step in steps] == expected[3:]
    assert steps[0].number == 3
    assert steps[0].budget == 9


@pytest.mark.parametrize("skip", [0, 2])
def test_set_epoch_keeps_a_position_that_was_loaded_within_it(skip: int) -> None:
    def make() -> PooledStream:
        return PooledStream(InMemory(samples_of([3] * 20)), Recipe(layout=Packed(max_tokens=9)))

    whole, expected, states = make(), [], []
    for epoch in range(3):
        whole.set_epoch(epoch)
        for step in whole:
            expected.append((step.number, step.epoch, key(step)))
            states.append(roundtrip(step.cursor))
    for done, state in enumerate(states, 1):
        resumed, found = make(), []
        resumed.load_state_dict(state)
        if 0 < done % 7 < 5:  # an epoch has 7 steps
            resumed.skip_batches(skip)
        begins = resumed.done
        for epoch in range((done - 1) // 7, 3):
            resumed.set_epoch(epoch)
            found += [(step.number, step.epoch, key(step)) for step in resumed]
        assert found == expected[begins:]
    # After iterating, and in another epoch, the stream starts at the beginning.
    resumed.load_state_dict(states[2])
    assert len(list(resumed)) == 4
    resumed.set_epoch(0)
    assert [key(step) for step in resumed] == [held for _, _, held in expected[:7]]
    resumed.load_state_dict(states[2])
    resumed.set_epoch(0, done=0)
    assert [step.number for step in resumed] == list(range(7))


def test_skipped_steps_do_not_count_in_the_length() -> None:
    stream = PooledStream(
        InMemory(samples_of([3] * 20)),
        Recipe(layout=Packed(max_tokens=9)),
        max_num_steps=9,
        infinite_loop=True,
    )
    stream.skip_batches(4)
    assert len(stream) == len(list(stream)) == 5


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_skipping_is_the_same_for_any_number_of_workers(workers: int) -> None:
    def make() -> PooledStream:
        recipe = Recipe(layout=Packed(max_tokens=9))
        return PooledStream(InMemory(samples_of([3] * 60)), recipe, pool=Pool(samples=2, tokens=0))

    expected = [key(step) for step in in_turn(make(), workers)]
    for skip in range(7):
        stream = make()
        stream.skip_batches(skip)
        steps = list(in_turn(stream, workers))
        assert [key(step) for step in steps] == expected[skip:]
        assert [step.number for step in steps[:3]] == [skip, skip + 1, skip + 2]


@pytest.mark.parametrize("kind", [InMemory, Iterated])
@pytest.mark.parametrize("workers", [2, 3])
def test_skipping_passes_over_workers_that_have_ended(workers: int, kind: Any) -> None:
    lengths = np.random.default_rng(103).choice([1, 40], 40, p=[0.6, 0.4]).tolist()

    def make() -> PooledStream:
        pool = Pool(samples=2, tokens=0)
        return PooledStream(kind(samples_of(lengths)), Recipe(layout=LAYOUTS[0]), pool=pool)

    whole = list(in_turn(make(), workers))
    ends = [len(list(make().walk(worker, workers))) for worker in range(workers)]
    assert max(ends) - min(ends) > 2
    for skip in range(len(whole) + 2):
        stream, resumed = make(), make()
        stream.skip_batches(skip)
        resumed.load_state_dict(roundtrip(stream.start(workers)))
        for skipped in (stream, resumed):
            assert [key(step) for step in in_turn(skipped, workers)] == list(map(key, whole[skip:]))
    loaded = make()
    loaded.load_state_dict(roundtrip(merge_cursors([step.cursor for step in whole[:-3]])))
    loaded.skip_batches(2)
    assert [key(step) for step in in_turn(loaded, workers)] == [key(whole[-1])]


def test_a_cursor_of_another_stream_is_refused_with_the_reason() -> None:
    data, recipe = samples_of([3] * 20), Recipe(layout=Packed(max_tokens=9))
    state = next(iter(PooledStream(InMemory(data), recipe))).cursor.to_dict()
    others = {
        "data was": PooledStream(InMemory(data[:-1]), recipe),
        "seed 0 as a list and is shuffled by seed 1": PooledStream(InMemory(data), recipe, seed=1),
        "layout.max_tokens was 9 and is 10": PooledStream(
            InMemory(data), Recipe(layout=Packed(max_tokens=10))
        ),
        "pool.samples was not given and is 3": PooledStream(
            InMemory(data), recipe, pool=Pool(samples=3)
        ),
    }
    for reason, stream in others.items():
        with pytest.raises(CursorError, match=reason):
            stream.load_state_dict(state)
    with pytest.raises(CursorError, match="damaged"):
        PooledStream(InMemory(data), recipe).load_state_dict({**state, "step": 9})


def test_a_cursor_of_one_rank_does_not_resume_on_another_number_of_ranks() -> None:
    given = {
        "source": InMemory(samples_of([3] * 20)),
        "recipe": Recipe(layout=Packed(max_tokens=9)),
    }
    steps = [next(iter(stream)) for stream in ranks_of(given, 2)]
    alone = ranks_of(given, 1)[0]
    alone.load_state_dict(steps[0].cursor.to_dict())
    with pytest.raises(CursorError, match="merge_cursors"):
        list(alone)
    alone.load_state_dict(merge_cursors([step.cursor for step in steps]).to_dict())
    assert sorted(numbers(steps) + numbers(list(alone))) == list(range(20))


def test_a_pool_holds_two_budgets_by_default() -> None:
    def waiting(pool: Pool) -> int:
        recipe = Recipe(layout=Packed(max_tokens=100))
        stream = PooledStream(InMemory(samples_of([2] * 500)), recipe, pool=pool)
        (state,) = next(iter(stream)).cursor.position["readers"].values()
        return len(state["waiting"])

    assert waiting(Pool(samples=4)) == 50  # 100 samples of 2 tokens, less one budget
    assert waiting(Pool(samples=4, tokens=150)) == 25
    assert waiting(Pool(samples=4, strategy="greedy")) == 0


def test_an_endless_reader_without_samples_raises() -> None:
    given = {
        "source": InMemory(samples_of([3])),
        "recipe": Recipe(layout=Packed(max_tokens=9)),
        "infinite_loop": True,
    }
    with pytest.raises(InputError, match="reader 1 of 2 has no samples"):
        next(iter(ranks_of(given, 2)[1]))


def test_options_that_a_pool_does_not_support_are_refused() -> None:
    source = InMemory(samples_of([3]))
    packed = Packed(max_tokens=9)
    for recipe, match in [
        (Recipe(layout=packed, steps=Steps(samples=4)), "cannot be used with a pool"),
        (Recipe(layout=packed, limits=Limits(columns={"images": 3})), "images needs the values"),
        (Recipe(layout=packed, balance="lpt"), "balance='lpt' has no effect"),
        (Recipe(layout=packed, balance="none"), "balance='none' has no effect"),
        (Recipe(layout=packed, groups="step"), "groups='step' has no effect"),
        (Recipe(layout=packed, equal_sizes=True), "equal_sizes=True has no effect"),
        (Recipe(layout=Packed(max_tokens=9, packer="optimal")), "layout.packer='optimal'"),
        (Recipe(layout=Padded(max_tokens=9, cut="optimal")), "layout.cut='optimal'"),
        (Recipe(layout=packed, topology=Topology(pp=2)), "equal shape"),
    ]:
        with pytest.raises(ConfigError, match=match):
            PooledStream(source, recipe)
    with pytest.raises(ConfigError, match="prefer_closest"):
        PooledStream(source, Recipe(layout=packed), pool=Pool(strategy="prefer_closest"))


def test_the_length_is_an_estimate() -> None:
    recipe = Recipe(layout=Packed(max_tokens=9))
    known = PooledStream(InMemory(samples_of([3] * 30)), recipe)
    assert str(known.steps_per_epoch) == "about 10"
    unknown = PooledStream(Mapped(samples_of([3] * 30)), recipe)
    assert len(unknown) == 30  # an upper bound
    assert len(list(unknown)) == 10
    assert len(unknown) == 10
    with pytest.raises(TypeError, match="no length"):
        len(PooledStream(Iterated([1]), Recipe(layout=Packed(max_tokens=9))))


def test_the_size_of_the_state_is_bounded_by_the_pool() -> None:
    stream = PooledStream(
        InMemory(samples_of([1 + i % 7 for i in range(3000)])),
        Recipe(layout=Packed(max_tokens=16)),
        pool=Pool(samples=16),
    )
    sizes = [len(json.dumps(step.cursor.to_dict())) for step in stream]
    assert max(sizes) < 900


def test_after_a_change_of_reader_count_a_state_holds_only_its_own_share() -> None:
    given = {
        "source": InMemory(samples_of([3] * 4000)),
        "recipe": Recipe(layout=Packed(max_tokens=9)),
        "pool": Pool(samples=16, tokens=0),
    }
    cursors = [next(in_turn(stream, 2)).cursor for stream in ranks_of(given, 4)]
    cursors += [stream.start(2) for stream in ranks_of(given, 4)]
    state = roundtrip(merge_cursors(cursors))
    waiting = sum(len(reader["waiting"]) for reader in state["place"]["readers"].values())
    for stream in ranks_of(given, 3):
        stream.load_state_dict(state)
        for reader in stream.start(3).position["readers"].values():
            assert len(reader["waiting"]) <= -(-waiting // 9)
            ((_, _, changes, *_),) = reader["epochs"]
            assert sum(map(len, changes)) <= 8  # one number for each reader before


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ([5, 3], r"expected a source, got list.* InMemory\(.* \(from evenstep\.data"),
        (["a.jsonl", "b.jsonl"], r"expected a source, got list.* Mapped\(texts.* Jsonl\("),
        (range(3).__iter__, r"expected a source.* Iterated\(.* \(from evenstep\.data"),
        ({1, 2}, r"expected a source, got set.* Iterated\("),
        ({"train": MapStyle()}, "expected a source, got dict.* one of its values"),
        ("data.jsonl", "expected a source, got str.* Jsonl"),
        (None, "expected a source, got NoneType.* a list of samples"),
    ],
)
def test_anything_but_a_source_is_refused_with_the_wrapper_to_use(source: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        PooledStream(source, Recipe(layout=Packed(max_tokens=16)))


def test_the_named_wrapper_is_accepted() -> None:
    recipe = Recipe(layout=Packed(max_tokens=16))
    data = samples_of([3, 2])
    for source in (InMemory(data), Mapped(data), Iterated(data)):
        assert sorted(numbers(list(PooledStream(source, recipe)))) == [0, 1]
