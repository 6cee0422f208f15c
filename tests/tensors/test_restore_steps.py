"""Restore by the step of a rank: planned, pooled, fed, resumed, with skipped samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import (
    MicroBatch,
    Packed,
    PlannedStream,
    PooledStream,
    Recipe,
    Step,
    Steps,
    Topology,
    World,
)
from evenstep.data import Feed, InMemory, Pool
from evenstep.errors import InputError, SampleError
from evenstep.integrations.dataloader import StreamLoader
from evenstep.tensors import (
    Batch,
    Collator,
    restore_ragged,
    restore_sequences,
    restore_tokens,
    shard_context,
)
from tests.examples import examples
from tests.internals import Layout, Overflow, StreamPosition, item_and_part
from tests.tensors.works import CAPACITY, layouts, same

COLLATOR = Collator()
OVERFLOWS: tuple[Overflow, ...] = ("split", "split", "truncate", "drop")


def source_of(lengths: Sequence[int]) -> InMemory:
    """Token j of sample i is 100 * i + j + 1."""
    return InMemory([{"input_ids": 100 * i + np.arange(n) + 1} for i, n in enumerate(lengths)])


def results_of(batches: Sequence[Batch], shifted: bool = False) -> list[Tensor]:
    """The token of each slot, or the token that it predicts; -7 for padding."""
    found = [b.ahead("tokens") if shifted else b.tokens for b in batches]
    return [torch.where(b.token_mask, f, -7) for b, f in zip(batches, found, strict=True)]


def check(
    micros: Sequence[MicroBatch],
    batches: Sequence[Batch],
    lengths: Sequence[int],
    work: Any,
    more: int = 0,
) -> None:
    """Check that each token is in its position and all else is padding."""
    ids = sorted({n for micro in micros for n in micro.segments.sample.tolist()})
    if isinstance(work, Step):
        assert work.own_sample_ids.tolist() == ids
    wholes = [lengths[item_and_part(n)[0]] for n in ids]
    width = max(wholes, default=0) + more
    for shifted in (False, True):
        expected = torch.full((len(ids), width), -1)
        for micro in micros:
            s, ends = micro.segments, micro.sample_ends.tolist()
            for n, start, length, end in zip(
                s.sample.tolist(), s.start.tolist(), s.length.tolist(), ends, strict=True
            ):
                first, row = 100 * item_and_part(n)[0] + 1, expected[ids.index(n)]
                if shifted:  # from the second on, and the first of the next segment
                    row[start] = max(int(row[start]), 0)
                    tokens = range(start + 1, start + length + (start + length < end))
                else:
                    tokens = range(start, start + length)
                row[tokens.start : tokens.stop] = first + torch.arange(tokens.start, tokens.stop)
        results = results_of(batches, shifted)
        found = restore_tokens(work, results, width=width, pad=-1, shifted=shifted)
        assert same(found, expected)
        ragged = restore_ragged(work, results, pad=-1, shifted=shifted)
        assert ragged.offsets.diff().tolist() == wholes
        inside = torch.arange(width) < torch.tensor(wholes, dtype=torch.int64)[:, None]
        assert same(ragged.values, expected[inside])
    per_segment = [batch.sample_ids[batch.sample_ids >= 0] for batch in batches]
    assert restore_sequences(work, per_segment, combine="max").tolist() == ids


def check_step(step: Step, lengths: Sequence[int], more: int = 0) -> None:
    """Lazily read, read at once, and collated by a loader."""
    read = list(step)
    micros, batches = [micro for micro, _ in read], [COLLATOR(*item) for item in read]
    for work in (step, step.loaded(), step.collated(COLLATOR), micros):
        check(micros, batches, lengths, work, more)


def recipe_of(
    layout: Layout, steps: Steps, overflow: Overflow, ranks: int = 1, cp: int = 1
) -> Recipe:
    topology = Topology(dp=ranks, cp=cp)
    return Recipe(layout=layout, topology=topology, steps=steps, overflow=overflow)


LENGTHS = st.lists(st.sampled_from([1, 1, 2, 3, 7, 8, 15, 31, 40, 70]), min_size=1, max_size=12)


@examples(50)
@given(
    lengths=LENGTHS,
    layout=layouts(),
    each=st.sampled_from([1, 4, 12]),
    ranks=st.integers(1, 3),
    cp=st.sampled_from([1, 2]),
    overflow=st.sampled_from(OVERFLOWS),
    more=st.integers(0, 3),
)
def test_a_planned_step_restores_the_samples_of_its_rank(
    lengths: list[int],
    layout: Layout,
    each: int,
    ranks: int,
    cp: int,
    overflow: Overflow,
    more: int,
) -> None:
    recipe = recipe_of(layout, Steps(samples=each), overflow, ranks, cp)
    for rank in range(ranks):
        for step in PlannedStream(source_of(lengths), recipe, world=World(rank, ranks)):
            check_step(step, lengths, more)


@examples(40)
@given(
    lengths=LENGTHS,
    layout=layouts(),
    count=st.integers(1, 3),
    overflow=st.sampled_from(OVERFLOWS),
    endless=st.booleans(),
)
def test_a_pooled_step_restores_its_samples(
    lengths: list[int], layout: Layout, count: int, overflow: Overflow, endless: bool
) -> None:
    if overflow == "drop" and min(lengths) > CAPACITY:
        return
    recipe = recipe_of(layout, Steps(micro_batches=count), overflow)
    pool = Pool(samples=4, tokens=40)
    stream = PooledStream(
        source_of(lengths), recipe, pool=pool, max_num_steps=4, infinite_loop=endless
    )
    for step in stream:
        check_step(step, lengths)


@examples(40)
@given(
    lengths=LENGTHS,
    layout=layouts(),
    ranks=st.integers(1, 3),
    before=st.integers(1, 3),
    done=st.integers(1, 2),
    overflow=st.sampled_from(OVERFLOWS),
)
def test_a_step_that_was_resumed_inside_restores_what_is_left_of_it(
    lengths: list[int], layout: Layout, ranks: int, before: int, done: int, overflow: Overflow
) -> None:
    begun = recipe_of(layout, Steps(samples=8), overflow, before)
    count = len(next(iter(PlannedStream(source_of(lengths), begun, world=World(0, before))), ()))
    if done >= count:
        return
    for rank in range(ranks):
        recipe = recipe_of(layout, Steps(samples=8), overflow, ranks)
        stream = PlannedStream(source_of(lengths), recipe, world=World(rank, ranks))
        stream.load_state_dict(stream.cursor(StreamPosition(inside=((before, done),))).to_dict())
        for step in stream:
            check_step(step, lengths)
            assert (step.plan is None) == (step.number == 0)


@examples(40)
@given(lengths=LENGTHS, layout=layouts(), overflow=st.sampled_from(["split", "truncate"]))
def test_fed_micro_batches_restore_their_samples(
    lengths: list[int], layout: Layout, overflow: Overflow
) -> None:
    feed = Feed(recipe_of(layout, Steps(), overflow))
    source = source_of(lengths)
    for number in range(len(lengths)):
        feed.put(source[number])
    feed.close()
    fed = list(feed)
    micros = [item.micro for item in fed]
    batches = [COLLATOR(item.micro, item.samples) for item in fed]
    for work in (fed, micros):
        check(micros, batches, lengths, work)
    some = slice(0, -1 if len(fed) > 1 else None)
    check(micros[some], batches[some], lengths, fed[some])


class Faulty:
    """Samples of which some cannot be read."""

    fingerprint = "faulty"

    def __init__(self, lengths: Sequence[int], broken: set[int]) -> None:
        self.samples, self.lengths, self.broken = source_of(lengths), np.array(lengths), broken

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Any:
        if number in self.broken:
            raise SampleError(f"sample {number} is broken")
        return self.samples[number]

    def lengths_of(self, samples: Any) -> Any:
        return self.lengths[samples]


@examples(40)
@given(
    lengths=LENGTHS,
    layout=layouts(),
    broken=st.sets(st.integers(0, 11), max_size=6),
    overflow=st.sampled_from(OVERFLOWS),
)
def test_a_step_without_the_samples_that_could_not_be_read_restores_the_others(
    lengths: list[int], layout: Layout, broken: set[int], overflow: Overflow
) -> None:
    assume(not broken.issuperset(range(len(lengths))))  # that is an error
    recipe = recipe_of(layout, Steps(samples=6), overflow)
    source = Faulty(lengths, broken)
    for step in PlannedStream(source, recipe, on_error="skip"):
        check_step(step, lengths)
        assert not broken & set(step.own_sample_ids.tolist())


@examples(20)
@given(lengths=LENGTHS, cp=st.sampled_from([1, 2, 4]))
def test_results_of_context_parallel_ranks_are_joined_for_a_step(
    lengths: list[int], cp: int
) -> None:
    recipe = recipe_of(Packed(max_tokens=CAPACITY), Steps(samples=4), "split", cp=cp)
    for step in PlannedStream(source_of(lengths), recipe):
        batches = [COLLATOR(*item) for item in step]
        whole = results_of(batches)
        parts = [
            [shard_context(batch, rank, cp).take(result) for rank in range(cp)]
            for batch, result in zip(batches, whole, strict=True)
        ]
        assert same(restore_tokens(step, parts), restore_tokens(step, whole))


def test_all_ranks_steps_together_restore_what_the_plan_does() -> None:
    lengths, ranks = [3, 9, 2, 7, 5, 1, 4, 8], 3
    recipe = recipe_of(Packed(max_tokens=12), Steps(), "error", ranks)
    restored: dict[int, list[int]] = {}
    by_plan: list[Tensor] = []
    for rank in range(ranks):
        (step,) = PlannedStream(source_of(lengths), recipe, world=World(rank, ranks))
        results = results_of([COLLATOR(*item) for item in step])
        rows = restore_tokens(step, results, width=9).tolist()
        restored |= dict(zip(step.own_sample_ids.tolist(), rows, strict=True))
        by_plan += results
    assert step.plan is not None
    assert step.sample_ids is not None
    whole = restore_tokens(step.plan, by_plan, width=9)
    assert whole.tolist() == [restored[number] for number in step.sample_ids.tolist()]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_steps_from_workers_restore_their_samples() -> None:
    lengths = [3, 9, 2, 7, 5, 1, 4, 8]
    recipe = recipe_of(Packed(max_tokens=12), Steps(samples=4), "error")
    loader = StreamLoader(
        PlannedStream(source_of(lengths), recipe), collate=COLLATOR, num_workers=1
    )
    for step in loader:
        assert step.batches is not None
        check(step.micro_batches, step.batches, lengths, step)


def one_step(lengths: Sequence[int] = (3, 4), **options: Any) -> Step:
    recipe = recipe_of(Packed(max_tokens=4), Steps(), "error")
    return next(iter(PlannedStream(source_of(lengths), recipe, shuffle=False, **options)))


def test_a_rank_without_work_restores_nothing() -> None:
    recipe = recipe_of(Packed(max_tokens=4), Steps(), "error", ranks=2)
    (step,) = PlannedStream(source_of([3]), recipe, world=World(1, 2))
    assert restore_tokens(step, [torch.ones(1, 1)]).shape == (0, 0)
    assert restore_tokens(step, [torch.ones(1, 1, 5)], width=3).shape == (0, 3, 5)
    assert restore_ragged(step, [torch.ones(1, 1)]).offsets.tolist() == [0]
    assert restore_sequences(step, [torch.ones(0)]).shape == (0,)


FIT = torch.zeros(1, 4)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([FIT], "expected 2 results, .* of step 0, got 1"),
        ([FIT, FIT], r"micro-batch 1 of step 0 \(samples 0\) has shape \(1, 3\), .* \(1, 4\)"),
        ({(0, 0, 0): FIT}, "results of step 0 were passed as a mapping"),
        ([], "expected 2 results, .* got 0"),
    ],
)
def test_results_that_do_not_fit_a_step_are_refused_by_name(results: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        restore_tokens(one_step(), results)


def test_other_objects_than_micro_batches_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"expected a Plan, a Step or a sequence of micro-batches, .* Tensor"
    ):
        restore_tokens([FIT], [FIT])
