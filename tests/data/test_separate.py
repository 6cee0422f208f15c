"""Steps whose micro-batches hold short or long segments, never both."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import (
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
from evenstep.data import InMemory, separate_lengths
from evenstep.errors import ConfigError, PlanError
from tests.internals import Layout

LAYOUTS = [Packed(max_tokens=24), Packed(rows=2, pad_to=16), Padded(max_tokens=48)]


def steps_of(lengths: list[int], recipe: Recipe, **options: object) -> list[list[Step]]:
    """The steps of each rank."""
    source = InMemory([{"input_ids": [7] * n} for n in lengths])
    ranks = recipe.topology.dp
    return [
        list(PlannedStream(source, recipe, world=World(rank, ranks), **options))  # type: ignore[arg-type]
        for rank in range(ranks)
    ]


def segments_of(step: Step) -> list[tuple[int, int, int]]:
    return sorted(
        entry
        for micro in step.micro_batches
        for entry in zip(
            micro.segments.sample.tolist(), micro.segments.start.tolist(),
            micro.segments.length.tolist(), strict=True,
        )
    )  # fmt: skip


@given(
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=24),
    limit=st.integers(1, 16),
    ranks=st.integers(1, 3),
    cp=st.integers(1, 2),
    layout=st.sampled_from(LAYOUTS),
)
def test_every_segment_runs_once_on_its_rank_and_no_micro_batch_is_mixed(
    lengths: list[int], limit: int, ranks: int, cp: int, layout: Layout
) -> None:
    recipe = Recipe(layout=layout, topology=Topology(dp=ranks, cp=cp), steps=Steps(samples=12))
    for steps in zip(*steps_of(lengths, recipe), strict=True):
        found = [separate_lengths(step, limit) for step in steps]
        assert len({len(step) for step in found}) == 1
        for step, before in zip(found, steps, strict=True):
            assert segments_of(step) == segments_of(before)
            assert step.cursor == before.cursor
            for micro in step.micro_batches:
                assert len(np.unique(micro.segments.length > limit)) <= 1
                assert micro.slots <= (layout.budget or 0)
                micro.placement  # noqa: B018  # segments fit into their rows


def test_waves_without_both_sides_stay_as_they_are() -> None:
    (steps,) = steps_of([5, 3, 4, 2], Recipe(layout=Packed(max_tokens=8)))
    assert separate_lengths(steps[0], 9).micro_batches == steps[0].micro_batches
    separated = separate_lengths(steps[0], 3)
    assert [micro.segments.length.tolist() for micro in separated.micro_batches] != []
    assert sum(micro.tokens for micro in separated.micro_batches) == 14


def test_a_pooled_step_has_two_micro_batches_for_each() -> None:
    source = InMemory([{"input_ids": [7] * n} for n in (5, 3, 4, 2)])
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(micro_batches=1))
    for step in PooledStream(source, recipe):
        assert len(separate_lengths(step, 3)) == 2


def test_a_group_on_both_sides_and_collated_steps_are_refused() -> None:
    recipe = Recipe(layout=Packed(max_tokens=16))
    ((step,),) = steps_of([5, 3], recipe, groups=[1, 1])
    with pytest.raises(PlanError, match=r"group 1 holds .*groups='step'"):
        separate_lengths(step, 4)
    assert len(separate_lengths(step, 9)) == 1
    with pytest.raises(ConfigError, match="not collated yet"):
        separate_lengths(replace(step, batches=()), 4)
