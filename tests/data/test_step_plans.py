"""step.plan and step.sample_ids: the plan of the whole step, in planned streams."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import (
    Packed,
    PlannedStream,
    PooledStream,
    Recipe,
    Step,
    Steps,
    Topology,
    World,
    violations,
)
from evenstep.data import InMemory, Lengths, until_all_end
from evenstep.integrations.dataloader import StreamDataset, StreamLoader
from evenstep.integrations.sampler import PlannedBatchSampler
from evenstep.tensors import Collator
from tests.data.test_planned import LAYOUTS, STEPS, Faulty, micro_key
from tests.internals import Layout, Overflow

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
OVERFLOWS: tuple[Overflow, ...] = ("error", "drop", "truncate", "split")


def same_plan(first: Step, second: Step) -> bool:
    assert first.plan is not None
    assert first.sample_ids is not None
    assert second.sample_ids is not None
    return first.plan == second.plan and np.array_equal(first.sample_ids, second.sample_ids)


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    steps=st.sampled_from(STEPS),
    ranks=st.integers(1, 3),
    overflow=st.sampled_from(OVERFLOWS),
    grouped=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_planned_step_has_the_plan_of_all_ranks_and_the_ids_of_its_samples(
    layout: Layout, steps: Steps, ranks: int, overflow: Overflow, grouped: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 20 if overflow == "error" or grouped else 30, 25)
    groups = np.arange(25) // 2 if grouped and lengths.max() <= 10 else None
    recipe = Recipe(layout=layout, topology=Topology(dp=ranks), steps=steps, overflow=overflow)
    streams = [
        PlannedStream(Lengths(lengths), recipe, world=World(rank, ranks), seed=seed, groups=groups)
        for rank in range(ranks)
    ]
    named: list[int] = []
    for by_rank in zip(*streams, strict=True):
        for rank, step in enumerate(by_rank):
            assert same_plan(step, by_rank[0])
            assert step.plan is not None
            assert step.sample_ids is not None
            assert step.plan.num_steps == 1
            assert violations(step.plan) == []
            assert step.plan.lengths.tolist() == lengths[step.sample_ids].tolist()
            mine = [micro.renumbered(step.sample_ids) for micro in step.plan[0, rank]]
            assert [micro_key(m) for m in mine] == [micro_key(m) for m in step.micro_batches]
            own = {n for micro in mine for n in micro.segments.sample.tolist()}
            assert step.own_sample_ids.tolist() == sorted(own)
            with pytest.raises(ValueError, match="read-only"):
                step.sample_ids[0] = 1
        assert by_rank[0].sample_ids is not None
        named += by_rank[0].sample_ids.tolist()
    assert sorted(named) == list(range(25))


SOURCE = InMemory([{"input_ids": np.full(3 + n % 7, n)} for n in range(30)])


def planned(rank: int = 0, ranks: int = 1, source: Any = SOURCE, **more: Any) -> PlannedStream:
    recipe = Recipe(
        layout=Packed(max_tokens=16), topology=Topology(dp=ranks), steps=Steps(samples=8)
    )
    return PlannedStream(source, recipe, world=World(rank, ranks), **more)


def test_a_pooled_step_has_no_plan() -> None:
    recipe = Recipe(layout=Packed(max_tokens=16), steps=Steps(micro_batches=2))
    for step in PooledStream(SOURCE, recipe):
        assert step.plan is None
        assert step.sample_ids is None
        assert len(step.own_sample_ids)


def test_a_step_that_was_resumed_inside_has_no_plan_and_the_next_has_one() -> None:
    stream = planned(shuffle=False)
    sampler = PlannedBatchSampler(stream)
    next(iter(sampler))
    stream.load_state_dict(sampler.state_dict())
    first, second, *_ = stream
    assert first.plan is None
    assert first.sample_ids is None
    assert 0 < len(first.own_sample_ids) < 8
    assert same_plan(second, list(planned(shuffle=False))[1])


def test_an_empty_step_after_the_end_has_no_plan() -> None:
    first, answers = next(iter(planned())), iter([True, True, False])
    steps = list(until_all_end(iter([first]), lambda mine: next(answers), planned().recipe))
    assert [step.plan is None for step in steps] == [False, True]
    assert steps[1].sample_ids is None
    assert len(steps[1].own_sample_ids) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_survives_copying_a_step(ranks: int) -> None:
    for step in planned(ranks - 1, ranks):
        others = [
            step.loaded(),
            step.collated(Collator()),
            replace(step, number=9),
            pickle.loads(pickle.dumps(step.loaded())),
            ForkingPickler.loads(ForkingPickler.dumps(step.collated(Collator()))),
            copy.copy(step),
        ]
        assert all(same_plan(other, step) for other in others)
        assert all(not other.plan.lengths.flags.writeable for other in others if other.plan)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("collate", [None, Collator()])
def test_a_plan_comes_from_workers(workers: int, collate: Any) -> None:
    expected = list(planned())
    found = list(StreamLoader(planned(), num_workers=workers, collate=collate))
    assert len(found) == len(expected)
    assert all(same_plan(*pair) for pair in zip(found, expected, strict=True))
    alone = list(StreamDataset(planned(), collate))
    assert all(same_plan(*pair) for pair in zip(alone, expected, strict=True))


def test_own_samples_are_the_readable_ones() -> None:
    (step,) = planned(source=Faulty(), on_error="skip", shuffle=False)  # 3 and 5 cannot be read
    assert step.own_sample_ids.tolist() == list(range(8))
    read = [micro for micro, _ in step]
    for same in (step, replace(step, number=7), copy.copy(step), step.loaded()):
        assert same.own_sample_ids.tolist() == [0, 1, 2, 4, 6, 7]
    assert [micro_key(m) for m in step.read_micro_batches] == [micro_key(m) for m in read]
    assert step.plan is not None
    assert len(step.plan.lengths) == 8


# Printing --------------------------------------------------------------------------------------


def test_a_step_prints_in_one_line_and_reads_nothing() -> None:
    source = InMemory([{"input_ids": np.zeros(n, np.int64)} for n in (5, 3, 8, 4)])
    recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2))
    step = next(iter(PlannedStream(source, recipe, world=World(0, 2), shuffle=False)))
    unread = replace(step, samples={})
    sizes = "Step(number 0, epoch 0, 1 of 2 ranks, "
    assert repr(unread).startswith(sizes)
    assert repr(unread).endswith(f"imbalance {step.totals['imbalance_micro_batch']:.3f})")
    assert repr(step.collated(Collator())).endswith(", collated)")
    bare = replace(step, plan=None, sample_ids=None, totals={}, micro_batches=())
    assert repr(bare) == sizes + "0 samples, 0 micro-batches)"


def test_steps_of_every_kind_print_in_one_line() -> None:
    pooled = Recipe(layout=Packed(max_tokens=16), steps=Steps(micro_batches=2))
    steps = [*planned(), *PooledStream(SOURCE, pooled)]
    for step in (*steps, *(pickle.loads(pickle.dumps(step.loaded())) for step in steps)):
        shown = repr(step)
        assert shown.startswith(f"Step(number {step.number}, epoch 0, 1 of 1 rank, ")
        assert "fill " in shown
        assert "\n" not in shown
        assert len(shown) < 150
