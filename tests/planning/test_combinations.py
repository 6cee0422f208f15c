"""Combinations of options that broke once."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import (
    Limits,
    Packed,
    Padded,
    PlannedStream,
    PooledStream,
    Recipe,
    Steps,
    Topology,
    World,
    make_plan,
    violations,
)
from evenstep.data import Feed, InMemory, Lengths, Pool
from evenstep.errors import ConfigError, EvenstepError
from evenstep.integrations.sampler import PlannedBatchSampler
from tests.examples import examples
from tests.internals import Layout, StreamPosition, step_size


@examples(300)
@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=30),
    st.sampled_from(["refined", "lpt", "karmarkar_karp", "stride"]),
    st.sampled_from([Padded(max_tokens=12), Padded(max_tokens=24, samples=2), Padded(samples=2)]),
    st.integers(1, 4),
)
def test_padded_steps_of_micro_batches_with_equal_sizes_keep_their_bounds(
    lengths: list[int], balance: Any, layout: Layout, ranks: int
) -> None:
    recipe = Recipe(
        layout=layout,
        topology=Topology(dp=ranks),
        steps=Steps(micro_batches=2),
        equal_sizes=True,
        balance=balance,
    )
    plan = make_plan(lengths, recipe)
    assert violations(plan) == []
    assert plan.stats()["num_packs"] >= plan.stats()["num_packs_bound"]


@pytest.mark.parametrize(
    "layout", [Padded(samples=4, cut="greedy"), Padded(max_tokens=1000, cut="greedy")]
)
def test_a_sample_over_the_cost_limit_widens_no_other_rank(layout: Layout) -> None:
    recipe = Recipe(
        layout=layout, topology=Topology(dp=2), limits=Limits(cost=10), overflow="alone"
    )
    plan = make_plan([3, 100], recipe)
    assert violations(plan) == []
    assert sorted(plan.widths.tolist()) == [3, 100]


def test_only_a_sample_over_a_limit_may_break_it() -> None:
    recipe = Recipe(layout=Padded(max_tokens=1000), limits=Limits(cost=10), overflow="alone")
    plan = make_plan([3], recipe)
    wide = replace(plan, widths=np.array([100]))
    assert any("limits_hold" in fault for fault in violations(wide))


@pytest.mark.parametrize(
    ("before", "after", "done"), [(1, 2, 1), (2, 1, 1), (2, 1, 2), (2, 3, 1), (3, 2, 1), (3, 2, 2)]
)
def test_a_step_of_micro_batches_resumes_inside_on_other_ranks(
    before: int, after: int, done: int
) -> None:
    lengths = np.random.default_rng(before * 10 + after).integers(1, 8, 60)

    def samplers(ranks: int) -> list[PlannedBatchSampler]:
        recipe = Recipe(
            layout=Packed(max_tokens=8), topology=Topology(dp=ranks), steps=Steps(micro_batches=3)
        )
        return [
            PlannedBatchSampler(
                PlannedStream(Lengths(lengths), recipe, world=World(rank, ranks), seed=0)
            )
            for rank in range(ranks)
        ]

    seen: list[int] = []
    first = samplers(before)
    for sampler in first:
        batches = iter(sampler)
        for _ in range(done):
            seen += list(next(batches))
    state = first[0].state_dict()
    for sampler in samplers(after):
        sampler.load_state_dict(state)
        for batch in sampler:
            seen += list(batch)
    assert sorted(seen) == list(range(60))


@pytest.mark.parametrize(
    "layout",
    [
        Padded(samples=4, pad_to=65536),
        Padded(max_tokens=262144, pad_to=65536),
        Packed(max_tokens=65536, samples=2),
        Padded(max_tokens=10**6, samples=2),
        Packed(rows=2, pad_to=128),
        Packed(max_tokens=512),
        Padded(max_tokens=512),
    ],
)
def test_the_length_of_a_stream_is_about_right_whichever_bound_binds(layout: Layout) -> None:
    lengths = np.random.default_rng(0).integers(10, 60, 2000)
    recipe = Recipe(layout=layout, steps=Steps(micro_batches=1))
    stream = PlannedStream(Lengths(lengths), recipe)
    real = sum(1 for _ in stream)
    assert 0.6 * real <= len(stream) <= 1.4 * real


def samples_of(lengths: list[int]) -> InMemory:
    return InMemory([{"input_ids": [1] * n} for n in lengths])


@pytest.mark.parametrize("layout", [Padded(samples=128), Packed(samples=128)])
def test_a_pool_holds_as_many_samples_as_a_micro_batch_takes(layout: Layout) -> None:
    stream = PooledStream(samples_of([3] * 512), Recipe(layout=layout))
    assert [len(step.micro_batches[0].segments) for step in stream] == [128] * 4


def test_warm_up_grows_the_budget_of_static_rows() -> None:
    pool = Pool(warmup_steps=8, warmup_tokens=16)
    stream = PooledStream(
        samples_of([3] * 200), Recipe(layout=Padded(samples=4, pad_to=16)), pool=pool
    )
    rows = [len(step.micro_batches[0].segments) for step, _ in zip(stream, range(10), strict=False)]
    assert rows == [1, 1, 1, 2, 2, 2, 3, 3, 4, 4]


def test_warm_up_without_a_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="warm"):
        PooledStream(
            samples_of([3]),
            Recipe(layout=Packed(samples=4)),
            pool=Pool(warmup_steps=8, warmup_tokens=16),
        )
    with pytest.raises(ConfigError, match="warm"):
        Feed(Recipe(layout=Packed(max_tokens=64)), pool=Pool(warmup_steps=8, warmup_tokens=16))


def test_padded_rows_without_a_budget_are_chosen_by_length() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 2000), 1, 4000).astype(int).tolist()
    stream = PooledStream(samples_of(lengths), Recipe(layout=Padded(samples=8)))
    micros = [step.micro_batches[0] for step in stream]
    assert sum(m.tokens for m in micros) / sum(m.slots for m in micros) > 0.6


def test_a_feed_gives_a_micro_batch_when_its_rows_are_full() -> None:
    feed = Feed(Recipe(layout=Padded(max_tokens=64, pad_to=16)))
    for _ in range(4):
        feed.put({"input_ids": [1, 2]})
    assert len(next(iter(feed)).micro.segments) == 4


def test_a_long_sample_behind_a_step_stops_a_stream_at_once_and_no_size() -> None:
    lengths = np.full(200, 8)
    lengths[150] = 600
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(micro_batches=1))
    with pytest.raises(EvenstepError, match="sample 150 has 600 tokens"):
        next(iter(PlannedStream(Lengths(lengths), recipe, shuffle=False)))
    assert step_size(lengths, recipe) == 1


def test_what_is_left_of_a_step_may_be_empty_micro_batches_alone() -> None:
    """One rank of a pipeline runs a micro-batch and an empty one, and stops between them."""
    inside = StreamPosition(0, 0, 0, inside=((1, 1),))
    for rank in range(2):
        recipe = Recipe(
            layout=Padded(max_tokens=12),
            topology=Topology(dp=2, pp=2, vpp=2, variable_seq_lengths=True),
            steps=Steps(samples=12),
            balance="none",
        )
        stream = PlannedStream(Lengths(np.array([6])), recipe, world=World(rank, 2))
        stream.load_state_dict(stream.cursor(inside).to_dict())
        (step,) = stream
        assert all(micro.is_empty for micro in step.micro_batches)


def test_copies_of_a_plan_keep_a_packer_of_ones_own() -> None:
    from tests.internals import shortest_first

    plan = make_plan([3, 4], Recipe(layout=Packed(max_tokens=8, packer=shortest_first)))
    assert copy.copy(plan).recipe.layout.packer is shortest_first
    assert copy.deepcopy(plan) == plan


class Stateful:
    def pack(self, lengths: Any, capacity: int, seed: int) -> Any:
        return [[item] for item in range(len(lengths))]


@pytest.mark.parametrize("packer", [Stateful().pack, Stateful, len])
def test_a_packer_that_files_cannot_name_is_refused(packer: Any) -> None:
    with pytest.raises(ConfigError, match="function that a module defines"):
        Packed(max_tokens=8, packer=packer)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Packed(max_tokens=5, round_to=None),  # type: ignore[arg-type]
        lambda: Packed(max_tokens=5, kind="padded"),  # type: ignore[arg-type]
        lambda: Recipe(layout=None),  # type: ignore[arg-type]
        lambda: Recipe(layout={"max_tokens": 5}),  # type: ignore[arg-type]
        lambda: Recipe(layout=Packed(max_tokens=5), steps=4),  # type: ignore[arg-type]
        lambda: Recipe(layout=Packed(max_tokens=5), topology=8),  # type: ignore[arg-type]
    ],
)
def test_values_of_another_kind_are_refused_where_they_are_given(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
