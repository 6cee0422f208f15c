"""Planned streams: every sample once, the same on every rank, resumed from anywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from evenstep import (
    Limits,
    MicroBatch,
    Packed,
    Padded,
    PlannedStream,
    Recipe,
    Steps,
    Topology,
    World,
    make_plan,
)
from evenstep.data import Iterated, Lengths, Mapped, MeasuredMapped
from evenstep.errors import ConfigError, CursorError, InputError, PlanError, SampleError
from tests.data.datasets import MapStyle
from tests.internals import Layout

LAYOUTS: tuple[Layout, ...] = (
    Packed(max_tokens=40),
    Padded(max_tokens=40, round_to=2),
    Packed(rows=2, pad_to=20),
    Packed(samples=3, max_tokens=60),
)
STEPS = (Steps(samples=6), Steps(tokens=70), Steps(micro_batches=2), Steps())


def micro_key(micro: MicroBatch) -> Any:
    columns = (
        micro.segments.sample,
        micro.segments.start,
        micro.segments.length,
        micro.row_offsets,
    )
    return (*(tuple(column.tolist()) for column in columns), micro.width)


def run(stream: PlannedStream) -> list[Any]:
    return [[micro_key(micro) for micro in step.micro_batches] for step in stream]


def seen(streams: list[PlannedStream]) -> list[tuple[int, int, int]]:
    """Every segment that any rank runs, as (sample, start, length), sorted."""
    found: list[tuple[int, int, int]] = []
    for stream in streams:
        for step in stream:
            for micro in step.micro_batches:
                s = micro.segments
                found += zip(s.sample.tolist(), s.start.tolist(), s.length.tolist(), strict=True)
    return sorted(found)


@st.composite
def settings_of(draw: DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(1, 20), min_size=0, max_size=40))
    layout = draw(st.sampled_from(LAYOUTS))
    steps = draw(st.sampled_from(STEPS))
    recipe = Recipe(layout=layout, steps=steps, topology=Topology(dp=draw(st.integers(1, 4))))
    groups = None
    if draw(st.booleans()) and layout.samples is None:
        groups = np.arange(len(lengths)) // draw(st.integers(1, 3))
        np.random.default_rng(draw(st.integers(0, 9))).shuffle(groups)
        recipe = replace(recipe, groups="step")
    return {
        "source": Lengths(np.array(lengths, np.int64)),
        "recipe": recipe,
        "seed": draw(st.integers(0, 3)),
        "shuffle": draw(st.booleans()),
        "groups": groups,
    }


def ranks_of(settings: dict[str, Any], size: int | None = None) -> list[PlannedStream]:
    recipe = settings["recipe"]
    size = recipe.topology.dp if size is None else size
    recipe = replace(recipe, topology=replace(recipe.topology, dp=size))
    return [
        PlannedStream(**{**settings, "recipe": recipe}, world=World(rank, size))
        for rank in range(size)
    ]


@given(settings_of())
@settings(deadline=None, max_examples=60)
def test_every_sample_runs_exactly_once_over_all_ranks(given: dict[str, Any]) -> None:
    streams = ranks_of(given)
    lengths = given["source"].lengths_of(np.arange(len(given["source"])))
    assert seen(streams) == [(i, 0, n) for i, n in enumerate(lengths.tolist())]
    counts = [[len(step) for step in stream] for stream in streams]
    assert all(each == counts[0] for each in counts)


@given(settings_of(), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_resuming_after_any_step_gives_the_same_steps(given: dict[str, Any], turns: int) -> None:
    whole = ranks_of(given)[-1]
    expected = run(whole)
    cursors = [json.loads(json.dumps(step.cursor.to_dict())) for step in whole]
    for done, state in enumerate(cursors, 1):
        resumed = ranks_of(given)[-1]
        resumed.load_state_dict(state)
        assert run(resumed) == expected[done:]
        assert resumed.state_dict()["step"] == len(expected)
        by_turn = [list(resumed.walk(turn, turns)) for turn in range(turns)]
        dealt = {step.number: step for steps in by_turn for step in steps}
        again = [[micro_key(m) for m in dealt[n].micro_batches] for n in sorted(dealt)]
        assert again == expected[done:]


@given(settings_of(), st.integers(1, 4), st.data())
@settings(deadline=None, max_examples=60)
def test_another_number_of_ranks_runs_exactly_what_is_left(
    given: dict[str, Any], size: int, data: st.DataObject
) -> None:
    before = ranks_of(given)
    steps = [list(stream) for stream in before]
    if not steps[0]:
        return
    done = data.draw(st.integers(0, len(steps[0]) - 1))
    state = steps[0][done].cursor.to_dict()
    first = [
        sample
        for each in steps
        for step in each[: done + 1]
        for micro in step.micro_batches
        for sample in micro.segments.sample.tolist()
    ]
    after = ranks_of(given, size)
    for stream in after:
        stream.load_state_dict(state)
    rest = [sample for sample, _, _ in seen(after)]
    assert sorted(first + rest) == list(range(len(given["source"])))


def stream_of(lengths: list[int], **changes: Any) -> PlannedStream:
    recipe = changes.pop("recipe", Recipe(layout=Packed(max_tokens=16), steps=Steps(samples=4)))
    return PlannedStream(Lengths(np.array(lengths, np.int64)), recipe, **changes)


def test_an_endless_stream_runs_through_different_epochs() -> None:
    stream = stream_of([3] * 10, infinite_loop=True, max_num_steps=9)
    steps = list(stream)
    assert [step.epoch for step in steps] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [step.number for step in steps] == list(range(9))
    orders = [
        [i for step in steps[k : k + 3] for m in step.micro_batches for i in m.segments.sample]
        for k in (0, 3, 6)
    ]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert len(stream) == 9


def test_the_epochs_of_an_endless_stream_are_those_of_set_epoch() -> None:
    endless = run(stream_of([3] * 10, infinite_loop=True, max_num_steps=9))
    finite = stream_of([3] * 10)
    by_epoch = []
    for epoch in range(3):
        finite.set_epoch(epoch)
        by_epoch += run(finite)
    assert by_epoch == endless


def test_set_epoch_keeps_a_position_that_was_loaded_within_it() -> None:
    whole, expected, states = stream_of([3] * 10), [], []
    for epoch in range(3):
        whole.set_epoch(epoch)
        for step in whole:
            expected.append((step.number, step.epoch, [micro_key(m) for m in step.micro_batches]))
            states.append((epoch, step.cursor.to_dict()))
    for done, (begun, state) in enumerate(states, 1):
        resumed, found = stream_of([3] * 10), []
        resumed.load_state_dict(state)
        for epoch in range(begun, 3):
            resumed.set_epoch(epoch)
            for step in resumed:
                micros = [micro_key(m) for m in step.micro_batches]
                found.append((step.number, step.epoch, micros))
        assert found == expected[done:]
    # After iterating, and in another epoch, the stream starts at the beginning.
    resumed.load_state_dict(states[0][1])
    rest = run(resumed)
    resumed.set_epoch(0)
    assert run(resumed)[1:] == rest
    resumed.load_state_dict(states[0][1])
    resumed.set_epoch(0, done=0)
    assert run(resumed)[1:] == rest


@pytest.mark.parametrize("infinite", [False, True])
def test_skipping_steps_is_the_same_as_running_them(infinite: bool) -> None:
    changes: dict[str, Any] = {"infinite_loop": infinite, "max_num_steps": 12}
    expected = run(stream_of(list(range(1, 15)), **changes))
    for skip in range(len(expected) + 1):
        stream = stream_of(list(range(1, 15)), **changes)
        stream.skip_batches(skip)
        assert run(stream) == expected[skip:]


@pytest.mark.parametrize("overflow", ["drop", "truncate", "split"])
@pytest.mark.parametrize("steps", [Steps(samples=3), Steps(tokens=20), Steps(micro_batches=2)])
def test_over_long_samples_follow_the_policy_in_any_window(overflow: Any, steps: Steps) -> None:
    lengths = [30, 5, 18, 3, 40, 40, 2, 9, 17, 33, 1]
    recipe = Recipe(layout=Packed(max_tokens=16), steps=steps, overflow=overflow)
    if overflow == "split" and steps.micro_batches:
        recipe = replace(recipe, steps=Steps(micro_batches=4))
    stream = stream_of(lengths, recipe=recipe, shuffle=False)
    steps_run = list(stream)
    tokens = sum(m.tokens for step in steps_run for m in step.micro_batches)
    expected = {"drop": 20, "truncate": 20 + 6 * 16, "split": sum(lengths)}[overflow]
    assert tokens == expected
    if overflow == "drop":
        # Samples dropped after the last step are not part of any step.
        assert sum(step.lost.get("dropped", 0) for step in steps_run) == 6
    if overflow == "truncate":
        assert sum(step.lost["truncated"] for step in steps_run if step.lost) == 6
    for step in steps_run:
        resumed = stream_of(lengths, recipe=recipe, shuffle=False)
        resumed.load_state_dict(step.cursor.to_dict())
        assert run(resumed) == run(stream)[step.number + 1 :]


def test_known_loss_tokens_are_totalled_over_all_ranks() -> None:
    lengths = np.array([5, 3, 4, 2, 6, 1])
    labels = np.array([4, 0, 3, 1, 5, 0])
    recipe = Recipe(layout=Packed(max_tokens=16), steps=Steps(samples=3), topology=Topology(dp=2))
    streams = [
        PlannedStream(
            Lengths(lengths), recipe, world=World(rank, 2), shuffle=False, loss_tokens=labels,
            groups=np.array([0, 0, 0, 1, 1, 2]),
        )
        for rank in range(2)
    ]  # fmt: skip
    for stream in streams:
        totals = [dict(step.totals) for step in stream]
        for name, expected in {
            "samples": 3, "tokens": 12, "empty": 1, "loss_tokens": 7, "sequences": 2, "groups": 1,
            "imbalance_step": 2 * 12 / 13, "imbalance_micro_batch": 2 * 12 / 13,
        }.items():  # fmt: skip
            assert totals[0][name] == pytest.approx(expected), name
        assert totals[1]["groups"] == 1


def test_a_cursor_of_another_stream_is_refused_with_the_reason() -> None:
    stream = stream_of([3] * 10)
    state = next(iter(stream)).cursor.to_dict()
    for other, reason in [
        (stream_of([3] * 11), "data was 10 samples"),
        (stream_of([3] * 9 + [4]), "data was"),
        (stream_of([3] * 10, seed=1), "shuffled by seed 0 as a list and is shuffled by seed 1"),
        (stream_of([3] * 10, shuffle=False), "as stored"),
        (stream_of([3] * 10, groups=np.zeros(10, np.int64)), "groups was not given"),
    ]:
        with pytest.raises(CursorError, match=reason):
            other.load_state_dict(state)


def test_a_damaged_cursor_is_refused() -> None:
    stream = stream_of([3] * 10)
    state = next(iter(stream)).cursor.to_dict()
    broken: Any
    for broken in (
        {**state, "step": 7},
        {**state, "place": {"epoch": 0, "position": 5}},
        {**state, "digest": "00"},
        {**state, "evenstep_cursor": 2},
        {key: value for key, value in state.items() if key != "belongs"},
        {},
        [],
        {"epoch": 1},
    ):
        with pytest.raises(CursorError):
            stream.load_state_dict(broken)
    stream.load_state_dict(state)


def test_a_cursor_is_small_and_plain() -> None:
    state = next(iter(stream_of([3] * 1000))).cursor.to_dict()
    assert len(json.dumps(state)) < 300


def test_layout_and_balance_may_change_at_a_step_boundary() -> None:
    first = next(iter(stream_of([3] * 10)))
    padded = Recipe(layout=Padded(max_tokens=8), steps=Steps(samples=2))
    stream = stream_of([3] * 10, recipe=padded)
    stream.load_state_dict(first.cursor.to_dict())
    done = {i for micro in first.micro_batches for i in micro.segments.sample.tolist()}
    assert sorted({i for i, _, _ in seen([stream])} | done) == list(range(10))


def test_ranks_that_do_not_match_the_recipe_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"topology\.dp to 2"):
        stream_of([3], world=World(0, 2))


@pytest.mark.parametrize(
    ("topology", "remedy"),
    [
        (Topology(dp=4), r"pass world=World\.detect\(\), or set topology\.dp to 1"),
        (Topology(dp=4, cp=2), r"pass world=World\.detect\(recipe\.topology\), or set"),
    ],
)
@pytest.mark.parametrize("world", [None, World(0, 1)])
def test_a_single_rank_with_a_recipe_for_several_gets_a_hint_to_detect_the_world(
    topology: Topology, remedy: str, world: World | None
) -> None:
    recipe = Recipe(layout=Packed(max_tokens=16), topology=topology)
    with pytest.raises(ConfigError, match=f"4 data-parallel ranks .* 1[.] .*{remedy}"):
        stream_of([3], recipe=recipe, world=world)


def test_columns_of_another_length_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"loss_tokens has 2 entries for 3 samples\. Give one per sample\."
    ):
        stream_of([1, 2, 3], loss_tokens=np.array([1, 2]))


def test_an_over_long_sample_is_named_by_its_id() -> None:
    lengths = np.full(1000, 3)
    lengths[777] = 99
    stream = PlannedStream(
        Lengths(lengths), Recipe(layout=Packed(max_tokens=16), steps=Steps(samples=10))
    )
    with pytest.raises(Exception, match="sample 777 has 99 tokens"):
        list(stream)


def test_an_endless_stream_without_samples_raises() -> None:
    with pytest.raises(InputError, match="has no sample to run"):
        list(stream_of([], infinite_loop=True))
    with pytest.raises(TypeError, match="no length"):
        len(stream_of([1], infinite_loop=True))


def test_the_length_says_whether_it_is_exact() -> None:
    assert str(stream_of([3] * 10).steps_per_epoch) == "3"
    about = stream_of(
        [3] * 100, recipe=Recipe(layout=Packed(max_tokens=16), steps=Steps(tokens=30))
    )
    assert str(about.steps_per_epoch) == "about 10"
    assert len(about) == 10


class Faulty:
    """Samples 3 and 5 raise, one of them StopIteration."""

    fingerprint = "faulty"

    def __len__(self) -> int:
        return 8

    def lengths_of(self, items: Any) -> Any:
        return np.full(len(items), 2, np.int64)

    def __getitem__(self, item: int) -> Any:
        if item == 3:
            raise StopIteration
        if item == 5:
            raise OSError("disk on fire")
        return {"input_ids": [item, item]}


def test_an_unreadable_sample_is_named_or_skipped_and_counted() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=8))
    stream = PlannedStream(Faulty(), recipe, shuffle=False)
    with pytest.raises(SampleError, match="sample 3 cannot be read"):
        next(iter(stream)).loaded()
    stream = PlannedStream(Faulty(), recipe, shuffle=False, on_error="skip")
    step = next(iter(stream)).loaded()
    run_now = [i for micro in step.micro_batches for i in micro.segments.sample.tolist()]
    assert sorted(run_now) == [0, 1, 2, 4, 6, 7]
    assert step.lost == {"skipped": 2}
    for micro, samples in step:
        assert set(micro.segments.sample.tolist()) <= samples.keys()
        assert micro.rows == 1


def test_skipping_all_samples_is_an_error() -> None:
    """A bug in a transform once gave empty steps."""

    def broken(row: Any) -> Any:
        raise KeyError("text")

    source = MeasuredMapped([{"input_ids": [1]}] * 6, lengths=[1] * 6, transform=broken)
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=3))
    first, second = PlannedStream(source, recipe, on_error="skip")
    with pytest.warns(UserWarning, match=r"cannot be read \(KeyError: 'text'\)\.$"):
        first.loaded()
    with pytest.raises(InputError, match=r"all of the first 6 samples .*KeyError: 'text'"):
        second.loaded()


def test_a_skipped_sample_counts_once_though_it_is_read_for_each_of_its_parts() -> None:
    def broken(row: Any) -> Any:
        if len(row["input_ids"]) == 40:
            raise KeyError("text")
        return row

    rows = [{"input_ids": [1] * length} for length in (40, 2, 3)]
    source = MeasuredMapped(rows, lengths=[40, 2, 3], transform=broken)
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=1), overflow="split")
    stream = PlannedStream(source, recipe, shuffle=False, on_error="skip")
    with pytest.warns(UserWarning, match="skipping unreadable samples"):
        found = [step.loaded() for step in stream]
    assert [step.own_sample_ids.tolist() for step in found] == [[], [1], [2]]


def test_the_samples_of_a_planned_step_are_not_iterated_by_number() -> None:
    """Tried one number after another, which had no end with on_error='skip'."""
    step = next(iter(PlannedStream([{"input_ids": [1]}], Recipe(layout=Packed(max_tokens=8)))))
    with pytest.raises(TypeError, match="not iterable"):
        list(step.samples)  # type: ignore[call-overload]


def test_a_stream_that_skips_has_no_totals_of_samples() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=8))
    labels = np.full(8, 1)
    sure = next(iter(PlannedStream(Faulty(), recipe, loss_tokens=labels)))
    unsure = next(iter(PlannedStream(Faulty(), recipe, loss_tokens=labels, on_error="skip")))
    assert {"samples", "loss_tokens", "sequences"} <= sure.totals.keys()
    assert unsure.totals.keys().isdisjoint({"samples", "loss_tokens", "sequences"})


@pytest.mark.parametrize("steps", STEPS)
def test_samples_dropped_at_the_end_of_an_epoch_are_counted_with_its_last_step(
    steps: Steps,
) -> None:
    lengths = np.array([30, 2, 2, *[30] * 200])
    recipe = Recipe(layout=Packed(max_tokens=4), steps=steps, overflow="drop")
    found = list(PlannedStream(Lengths(lengths), recipe, shuffle=False))
    assert sum(step.lost.get("dropped", 0) for step in found) == 201
    assert found[-1].cursor.position["position"] == len(lengths)


def test_a_group_that_no_step_can_hold_is_named() -> None:
    recipe = Recipe(layout=Packed(max_tokens=40), steps=Steps(samples=2))
    groups = np.array([7, 5, 5, 5])
    for plan in (
        lambda: list(PlannedStream(Lengths(np.full(4, 3)), recipe, groups=groups)),
        lambda: make_plan(np.full(4, 3), recipe, groups=groups),
    ):
        with pytest.raises(PlanError, match="group 5 has 3 samples but a step holds 2"):
            plan()
    # Dropped samples do not count.
    recipe = replace(recipe, overflow="drop")
    lengths = np.array([3, 3, 3, 50])
    (first, second) = PlannedStream(Lengths(lengths), recipe, groups=groups, shuffle=False)
    assert [first.totals["samples"], second.totals["samples"]] == [1, 2]


def test_a_cursor_past_the_end_of_other_groups_is_refused() -> None:
    lengths, recipe = Lengths(np.full(300_000, 3)), Recipe(layout=Packed(max_tokens=40))
    groups = np.arange(300_000)
    (step,) = PlannedStream(lengths, replace(recipe, groups="step"), groups=groups)
    groups[5] = groups[4]  # not among those in the fingerprint
    with pytest.raises(CursorError, match="position 300000, but an epoch has 299999"):
        PlannedStream(lengths, recipe, groups=groups).load_state_dict(step.cursor.to_dict())


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (["a", "b"], r"expected a source, got list.* MeasuredMapped\(.* \(from evenstep\.data"),
        ([5, 3, 4], r"Lengths\(np\.asarray\(.* \(from evenstep\.data"),
        (np.array([5, 3, 4]), r"expected a source, got ndarray.* Lengths\("),
        ({"train": MapStyle()}, "expected a source, got dict.* one of its values"),
        (range(3).__iter__, r"PooledStream with Iterated\("),
        ("data.jsonl", "expected a source, got str.* TokenFile"),
        (3, "expected a source, got int.* a list of samples"),
        (Mapped(MapStyle()), r"with known lengths, got Mapped.* PooledStream, .* MeasuredMapped\("),
        (Iterated([1]), r"with known lengths, got Iterated.* PooledStream\.$"),
    ],
)
def test_a_source_without_lengths_is_refused_with_the_wrapper_to_use(
    source: Any, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        PlannedStream(source, Recipe(layout=Packed(max_tokens=16)))


def test_a_stream_does_not_read_the_fingerprint_before_it_is_needed() -> None:
    class Lazy(Faulty):
        @property
        def fingerprint(self) -> str:  # type: ignore[override]
            raise AssertionError("read too early")

    PlannedStream(Lazy(), Recipe(layout=Packed(max_tokens=16)))


def test_a_source_may_delegate_its_attributes() -> None:
    class Passing:
        def __getattr__(self, name: str) -> Any:
            return getattr(Faulty(), name)

        def __len__(self) -> int:
            return 8

        def __getitem__(self, item: int) -> Any:
            return Faulty()[item]

    source: Any = Passing()
    assert len(list(PlannedStream(source, Recipe(layout=Packed(max_tokens=16))))) == 1


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_lists_are_accepted_as_arrays_are(kind: Any) -> None:
    recipe = Recipe(
        layout=Packed(max_tokens=16), steps=Steps(samples=2), limits=Limits(columns={"images": 3})
    )
    about: dict[str, Any] = {
        "loss_tokens": [4, 0, 3, 1],
        "groups": [7, 5, 7, 5],
        "columns": {"images": [1, 2, 1, 0]},
    }
    given = {
        name: {key: kind(column) for key, column in value.items()}
        if isinstance(value, dict)
        else kind(value)
        for name, value in about.items()
    }
    steps = list(stream_of([5, 3, 4, 2], recipe=recipe, shuffle=False, **given))
    assert [step.totals["loss_tokens"] for step in steps] == [7, 1]
    assert [sorted(i for m in s.micro_batches for i in m.segments.sample) for s in steps] == [
        [0, 2],
        [1, 3],
    ]


def test_floats_without_fraction_are_accepted_as_in_make_plan() -> None:
    stream = stream_of([5, 3], shuffle=False, loss_tokens=[4.0, 2.0], groups=[1.0, 1.0])
    (step,) = stream
    assert step.totals["loss_tokens"] == 6
    assert all(type(n) is int for n in step.loss_tokens.values())


@pytest.mark.parametrize("name", ["groups", "loss_tokens"])
@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (["a", 2, "a"], "{name} must be a flat sequence of integers.*, one per sample"),
        ([1, None, 2], "sample 1 has {name} None; expected an integer"),
        ([1, 2.5, 2], "sample 1 has {name} 2.5; expected an integer"),
        ([1, 2, float("nan")], "sample 2 has {name} nan; expected an integer"),
        ([1, 2, 2**70], "sample 2 has {name} 1180591620717411303424; expected an integer"),
        ([True, False, True], "{name} must be .* got shape .* and dtype bool"),
        ([[1], [2], [3]], r"{name} must be .* got shape \(3, 1\)"),
        ([[1], [2, 3], [3]], "{name} must be a flat sequence of integers, one per sample"),
        (7, r"{name} must be .* got shape \(\)"),
        ([1, 2], "{name} has 2 entries for 3 samples"),
    ],
)
def test_entries_that_are_not_integers_are_refused_by_sample(
    name: str, values: Any, fault: str
) -> None:
    with pytest.raises(InputError, match=fault.format(name=name)):
        stream_of([1, 2, 3], **{name: values})


def test_an_empty_dataset_has_no_entries() -> None:
    assert list(stream_of([], groups=[], loss_tokens=[])) == []


@pytest.mark.parametrize(
    ("steps", "position", "digest", "expected"),
    [
        (Steps(samples=6), 12, "7f7b39eac411cccf", [2, 28, 35, 39, 58, 61]),
        (Steps(tokens=140), 6, "dce0f1b2c86ca9ac", [18, 30, 78]),
    ],
)
def test_a_cursor_of_version_0_1_0_between_steps_still_loads(
    steps: Steps, position: int, digest: str, expected: list[int]
) -> None:
    """Written by version 0.1.0; the next step holds the samples that it held there."""
    state = {
        "evenstep_cursor": 1,
        "step": 2,
        "belongs": {
            "stream": "planned",
            "data": "80 samples, 4b74053103d3fee7",
            "order": "shuffled by seed 3",
        },
        "place": {"epoch": 0, "position": position},
        "digest": digest,
    }
    recipe = Recipe(layout=Packed(max_tokens=80), steps=steps)
    stream = PlannedStream(Lengths(np.arange(1, 81)), recipe, seed=3)
    stream.load_state_dict(state)
    step = next(iter(stream))
    assert step.number == 2
    assert step.own_sample_ids.tolist() == expected


def test_all_lengths_are_checked_before_the_first_step() -> None:
    lengths = np.array([5] * 40 + [90, 3, 70])
    recipe = Recipe(layout=Packed(max_tokens=64), steps=Steps(samples=4))
    stream = PlannedStream(Lengths(lengths), recipe, shuffle=False)
    with pytest.raises(
        SampleError, match=r"sample 40 has 90 tokens.*\(1 more samples are too long"
    ):
        next(iter(stream))
    with pytest.raises(SampleError, match="sample 41 has length 0; expected at least 1"):
        next(iter(PlannedStream(Lengths(np.array([5] * 41 + [0])), recipe, shuffle=False)))
    split = PlannedStream(Lengths(lengths), replace(recipe, overflow="split"), shuffle=False)
    assert sum(len(step.own_sample_ids) for step in split) == len(lengths)
