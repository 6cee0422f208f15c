"""Streams whose samples share prefixes: every sample once, wherever a run stops and continues."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evenstep import (
    Limits,
    Packed,
    PlannedStream,
    Prefixes,
    Recipe,
    Steps,
    Topology,
    World,
    find_prefixes,
    make_plan,
)
from evenstep.data import Lengths, separate_lengths
from evenstep.errors import ConfigError, CursorError, EvenstepError, PlanError
from tests.internals import StreamPosition
from tests.tree_cases import random_samples


def own_samples(step: Any) -> list[int]:
    """The samples that have a segment of their own in a step of one rank."""
    return [
        int(sample)
        for micro in step.micro_batches
        for at, sample in enumerate(micro.segments.sample)
        if micro.segments.parent is None or at not in micro.segments.parent
    ]


def stream_of(samples: list[list[int]], recipe: Recipe, rank: int, ranks: int) -> PlannedStream:
    lengths = Lengths(np.array([len(tokens) for tokens in samples]))
    recipe = replace(recipe, topology=Topology(dp=ranks))
    return PlannedStream(
        lengths, recipe, world=World(rank, ranks), prefixes=find_prefixes(samples), seed=3
    )


@pytest.mark.parametrize("change", [(1, 2), (2, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("steps", [Steps(), Steps(samples=9), Steps(tokens=90)])
@pytest.mark.parametrize(("budget", "overflow"), [(40, "error"), (8, "truncate")])
def test_a_stream_with_prefixes_continues_inside_a_step_on_other_ranks(
    change: tuple[int, int], steps: Steps, budget: int, overflow: Any
) -> None:
    before, after = change
    samples = random_samples(np.random.default_rng(5), 80)
    assert overflow == "error" or max(map(len, samples)) > budget
    recipe = Recipe(layout=Packed(max_tokens=budget), steps=steps, overflow=overflow)
    whole = Counter(s for step in stream_of(samples, recipe, 0, 1) for s in own_samples(step))
    assert whole == Counter(range(len(samples)))
    # One wave of the first step runs on `before` ranks, everything else on `after`.
    seen = Counter[int]()
    for rank in range(before):
        first = next(iter(stream_of(samples, recipe, rank, before)))
        micro = first.micro_batches[0]
        parent = micro.segments.parent
        for at, sample in enumerate(micro.segments.sample):
            if parent is None or at not in parent:
                seen[int(sample)] += 1
    cursor = stream_of(samples, recipe, 0, before).cursor(StreamPosition().within(before, 1))
    for rank in range(after):
        stream = stream_of(samples, recipe, rank, after)
        stream.load_state_dict(cursor.to_dict())
        for step in stream:
            seen.update(own_samples(step))
    assert seen == whole


def test_prefixes_of_other_samples_are_refused() -> None:
    lengths = Lengths(np.array([3, 4, 5]))
    recipe = Recipe(layout=Packed(max_tokens=16))
    for prefixes in (
        Prefixes(np.arange(2), np.zeros(2, np.int64)),
        Prefixes(np.arange(3), np.full(3, 9)),
    ):
        with pytest.raises(EvenstepError, match=r"find_prefixes|Correct shared"):
            PlannedStream(lengths, recipe, prefixes=prefixes)


def test_an_epoch_of_a_stream_is_one_plan_with_its_prefixes() -> None:
    samples = random_samples(np.random.default_rng(6), 60)
    recipe = Recipe(layout=Packed(max_tokens=64), steps=Steps(samples=16))
    stream = stream_of(samples, recipe, 0, 1)
    plan = stream.plan_epoch(0)
    by_step = [sum(micro.tokens for micro in step.micro_batches) for step in stream]
    assert [sum(m.tokens for rank in step for m in rank) for step in plan] == by_step
    assert plan.segments.parent is not None


@pytest.mark.parametrize(
    "steps", [Steps(), Steps(samples=8), Steps(tokens=200), Steps(micro_batches=2)]
)
def test_a_group_that_fits_only_with_its_prefix_runs_in_a_stream_as_in_a_plan(steps: Steps) -> None:
    samples = [[group] * 20 + [answer] for group in range(6) for answer in range(4)]
    lengths, groups = [len(tokens) for tokens in samples], np.repeat(np.arange(6), 4)
    recipe = Recipe(layout=Packed(max_tokens=40), groups="micro_batch", steps=steps)
    about: dict[str, Any] = {"groups": groups, "prefixes": find_prefixes(samples)}
    plan = make_plan(lengths, recipe, **about)
    stream = PlannedStream(Lengths(np.array(lengths)), recipe, shuffle=False, **about)
    assert stream.epoch_size().steps == plan.num_steps
    for step, planned in zip(stream, plan, strict=True):
        micros = [micro.segments.sample.tolist() for micro in planned[0]]
        assert [micro.segments.sample.tolist() for micro in step.micro_batches] == micros
    with pytest.raises(PlanError, match="group"):  # without prefixes, it does not fit
        next(iter(PlannedStream(Lengths(np.array(lengths)), recipe, groups=groups)))


def one_rank(samples: list[list[int]], **options: Any) -> PlannedStream:
    lengths = Lengths(np.array([len(tokens) for tokens in samples]))
    return PlannedStream(lengths, Recipe(layout=Packed(max_tokens=40)), **options)


def test_a_cursor_inside_a_step_is_refused_with_other_prefixes() -> None:
    samples = random_samples(np.random.default_rng(5), 80)
    prefixes = find_prefixes(samples)
    fewer = Prefixes(prefixes.order, np.minimum(prefixes.shared, 2))
    inside = StreamPosition().within(1, 1)
    for before, after in [(prefixes, None), (None, prefixes), (prefixes, fewer)]:
        stream, changed = one_rank(samples, prefixes=before), one_rank(samples, prefixes=after)
        with pytest.raises(CursorError, match="prefixes"):
            changed.load_state_dict(stream.cursor(inside).to_dict())
        # A step has the same samples with any prefixes, so between steps they may change.
        changed.load_state_dict(stream.cursor(StreamPosition(step=1)).to_dict())
    same = Prefixes(prefixes.order.copy(), prefixes.shared.copy())
    stream = one_rank(samples, prefixes=same)
    stream.load_state_dict(one_rank(samples, prefixes=prefixes).cursor(inside).to_dict())


def test_a_cursor_inside_a_step_of_samples_that_share_is_refused_with_other_columns() -> None:
    samples = random_samples(np.random.default_rng(5), 80)
    lengths, prefixes = (
        Lengths(np.array([len(tokens) for tokens in samples])),
        find_prefixes(samples),
    )
    recipe = Recipe(layout=Packed(max_tokens=40), limits=Limits(columns={"images": 4}))
    streams = [
        PlannedStream(
            lengths, recipe, prefixes=prefixes, columns={"images": np.full(len(samples), count)}
        )
        for count in (1, 2)
    ]
    state = streams[0].cursor(StreamPosition().within(1, 1)).to_dict()
    streams[0].load_state_dict(state)
    with pytest.raises(CursorError, match="columns"):
        streams[1].load_state_dict(state)


def test_ranks_with_other_prefixes_have_other_fingerprints() -> None:
    samples = random_samples(np.random.default_rng(5), 80)
    prefixes = find_prefixes(samples)
    fewer = Prefixes(prefixes.order, np.minimum(prefixes.shared, 2))
    streams = [one_rank(samples, prefixes=each) for each in (prefixes, fewer, None)]
    assert len({stream.fingerprint for stream in streams}) == 3
    assert len({next(iter(stream)).fingerprint for stream in streams}) == 3
    assert one_rank(samples, prefixes=find_prefixes(samples)).fingerprint == streams[0].fingerprint


def test_cursors_without_prefixes_stay_as_they_were() -> None:
    identity = one_rank([[1, 2], [3]]).cursor(StreamPosition().within(1, 1)).identity
    assert sorted(identity) == ["data", "lengths", "order", "recipe", "stream"]


def test_lengths_of_samples_that_share_cannot_be_separated() -> None:
    samples = [[1, 2, 3, 4, 5, 6, prompt, answer] for prompt in range(20) for answer in range(4)]
    stream = one_rank(samples, prefixes=find_prefixes(samples))
    whole = next(iter(stream))
    stream.load_state_dict(stream.cursor(StreamPosition().within(1, 1)).to_dict())
    rest = next(iter(stream))
    for step in (whole, rest):
        with pytest.raises(ConfigError, match="Plan without prefixes"):
            separate_lengths(step, 3)
    alone = next(iter(one_rank(samples)))
    assert sorted(own_samples(separate_lengths(alone, 3))) == list(range(len(samples)))
