"""Micro-batches that run out of memory: errors and splitting."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import MicroBatch, Packed, Padded, Step
from evenstep.errors import ConfigError, MicroBatchError, PlanError
from evenstep.tensors import Batch, Collator, cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Collective, Runner
from tests.examples import examples
from tests.internals import Layout
from tests.train.on_ranks import Small
from tests.train.running import Plan, Way, expected, samples_of, steps_of, worlds
from tests.train.steps import (
    COLLATOR,
    LIMIT,
    NORMALIZATIONS,
    Gradient,
    Work,
    distance,
    gradient_of,
    model_of,
)
from tests.train.test_lazy import prefetching

WIDE: list[Layout] = [
    Packed(max_tokens=3 * LIMIT),
    Padded(max_tokens=3 * LIMIT),
    Padded(max_tokens=3 * LIMIT, cut="greedy"),
]


def run(
    plan: Plan, work: Work, most: int, where: str = "forward", known: bool = False, **more: Any
) -> Any:
    model, steps = model_of(), steps_of(plan, work, known)

    def rank(ranks: Collective) -> tuple[Any, Gradient]:
        own = Small(copy.deepcopy(model), most, where)
        runner = Runner(
            model=own, loss=cross_entropy(), collective=ranks, collate=COLLATOR, on_memory="split",
            **more,
        )  # fmt: skip
        return runner.run(steps[ranks.rank]).reduce(ranks), gradient_of(own)

    return run_ranks(plan.dp, rank)


@pytest.mark.parametrize("where", ["forward", "backward"])
@examples(12)
@given(
    work=worlds(),
    layout=st.sampled_from(WIDE),
    dp=st.integers(1, 3),
    most=st.integers(LIMIT, 2 * LIMIT),
    known=st.booleans(),
)
def test_splitting_ends_with_the_very_same_gradient(
    where: str, work: Work, layout: Layout, dp: int, most: int, known: bool
) -> None:
    plan = Plan("planned", layout, dp=dp)
    steps = steps_of(plan, work, known)
    loss, gradient = expected("token mean", model_of(), work, steps)
    ran = run(plan, work, most, where, known)
    counts = {result.num_micro_batches for result, _ in ran}
    assert len(counts) == 1
    fitted = all(
        micro.slots <= most for step in steps if isinstance(step, Step)
        for micro in step.micro_batches
    )  # fmt: skip
    assert (counts.pop() == len(steps[0])) == fitted
    for result, found in ran:
        assert result.loss == pytest.approx(loss, rel=1e-12, abs=1e-15)
        assert distance(found, gradient) < 1e-12


def test_the_error_names_shape_position_and_samples() -> None:
    work = samples_of([LIMIT, 3, 2, 3])
    plan = Plan("planned", Packed(max_tokens=LIMIT), seed=1)
    (step,) = steps_of(plan, work)
    assert isinstance(step, Step)
    step = replace(step, number=41)
    names = [micro.segments.sample.tolist() for micro in step.micro_batches]
    at = names.index(next(found for found in names if len(found) == 3))
    positions = iter(range(2))

    def forward(model: Any, batch: Any) -> Tensor:
        if next(positions) == at:
            raise torch.OutOfMemoryError("there is no more")
        return model(batch)

    runner = Runner(model=model_of(), loss=cross_entropy(), collate=COLLATOR, forward=forward)
    with pytest.raises(MicroBatchError) as caught:
        runner.run(step)
    listed = ", ".join(map(str, names[at]))
    assert str(caught.value).startswith(
        f"micro-batch {at} of 2 of step 41 on rank 0 (1 x 8 slots, 3 segments of samples {listed}) "
        f"ran out of memory. Lower max_tokens below 8 slots"
    )
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert not prefetching()


# A device without memory for prepared batches ------------------------------------------------


@contextmanager
def room_for(slots: int, ahead: int) -> Iterator[None]:
    """Batches of at most `slots` slots can be moved; while another runs, `ahead` slots."""
    moved = Batch.to

    def to(batch: Batch, *where: Any, **how: Any) -> Batch:
        in_turn = threading.current_thread().name != "evenstep-prefetch"
        if batch.rows * batch.width > (slots if in_turn else ahead):
            raise torch.OutOfMemoryError("there is no more")
        return moved(batch, *where, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "to", to)
        yield


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_copy_without_memory_is_an_error_when_it_runs(prefetch: int) -> None:
    work = samples_of([3, LIMIT, 2])
    (step,) = steps_of(Plan("planned", Packed(samples=1)), work)
    assert isinstance(step, Step)
    at = [micro.slots for micro in step.micro_batches].index(LIMIT)
    ran: list[int] = []

    def forward(model: Any, batch: Any) -> Tensor:
        ran.append(1)
        return model(batch)

    runner = Runner(
        model=model_of(), loss=cross_entropy(), collate=COLLATOR, forward=forward, device="cpu",
        prefetch=prefetch,
    )  # fmt: skip
    with room_for(LIMIT - 1, ahead=LIMIT - 1), pytest.raises(MicroBatchError) as caught:
        runner.run(step)
    assert str(caught.value).startswith(
        f"micro-batch {at} of 3 of step 0 on rank 0 (1 x 8 slots, 1 segments of samples 1) ran out "
        f"of memory. Lower max_tokens below 8 slots"
    )
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert len(ran) == at
    assert not prefetching()


def test_a_batch_without_memory_ahead_is_copied_when_it_runs() -> None:
    work = samples_of([8, 3, 5, 7], masked=0.0)
    (step,) = steps_of(Plan("planned", Packed(max_tokens=LIMIT)), work)
    model = model_of()
    _, gradient = expected("token mean", model, work, [step])
    with room_for(LIMIT, ahead=0):
        Runner(model=model, loss=cross_entropy(), collate=COLLATOR, device="cpu").run(step)
    assert distance(gradient_of(model), gradient) < 1e-12


@examples(12)
@given(work=worlds(), dp=st.integers(1, 3), known=st.booleans())
def test_a_copy_without_memory_is_split_on_all_ranks(work: Work, dp: int, known: bool) -> None:
    plan = Plan("planned", Packed(max_tokens=3 * LIMIT), dp=dp)
    _, gradient = expected("token mean", model_of(), work, steps_of(plan, work, known))
    with room_for(LIMIT, ahead=LIMIT - 1):
        ran = run(plan, work, most=99, known=known, device="cpu")
    for result, found in ran:
        assert distance(found, gradient) < 1e-12
        assert result.slots <= LIMIT * result.num_micro_batches


def test_what_ran_out_of_memory_is_divided_before_it_runs_again() -> None:
    """Three micro-batches become five, of which one ran in vain, and none in the next step."""
    work = samples_of([4, 4, 4, 4, 4], masked=0.0)
    (step,) = steps_of(Plan("planned", Packed(samples=2, max_tokens=LIMIT)), work)
    assert isinstance(step, Step)
    assert sorted(micro.slots for micro in step.micro_batches) == [4, LIMIT, LIMIT]
    model, counts = Small(model_of(), LIMIT - 1, "forward"), []

    def forward(model: Any, batch: Any) -> Tensor:
        counts.append(batch.width)
        return model(batch)

    runner = Runner(
        model=model, loss=cross_entropy(), collate=COLLATOR, forward=forward, on_memory="split"
    )
    _, gradient = expected("token mean", model_of(), work, [step])
    assert runner.run(step).num_micro_batches == 5
    before = [micro.slots for micro in step.micro_batches].index(LIMIT)
    assert len(counts) == before + 1 + 5
    assert distance(gradient_of(model), gradient) < 1e-12
    counts.clear()
    assert runner.run(step).num_micro_batches == 5
    assert len(counts) == 5


def test_running_out_of_memory_in_collate_names_the_samples() -> None:
    (step,) = steps_of(Plan("planned", Packed(max_tokens=LIMIT)), samples_of([LIMIT]))

    def collate(micro: Any, samples: Any) -> Batch:
        raise torch.OutOfMemoryError("there is no more")

    message = r"of step 0 on rank 0 \(1 x 8 slots, 1 segments of samples 0\) ran out .* collated"
    with pytest.raises(MicroBatchError, match=message):
        Runner(model=model_of(), loss=cross_entropy(), collate=collate).run(step)
    assert not prefetching()


# Splitting ------------------------------------------------------------------------------------


def test_a_segment_that_cannot_be_split_is_an_error_on_every_rank() -> None:
    work = samples_of([LIMIT, 3, 3], masked=0.0)
    plan = Plan("planned", Packed(max_tokens=LIMIT), dp=2)
    model, steps = model_of(), steps_of(plan, work)

    def rank(ranks: Collective) -> str:
        own = Small(copy.deepcopy(model), LIMIT - 1, "forward")
        runner = Runner(
            model=own, loss=cross_entropy(), collective=ranks, collate=COLLATOR, on_memory="split"
        )
        with pytest.raises(MicroBatchError, match="with a single segment") as caught:
            runner.run(steps[ranks.rank])
        return str(caught.value)

    messages = run_ranks(2, rank)
    # Both name the rank that holds the segment.
    whose = next(rank for rank in range(2) if "(1 x 8 slots" in messages[rank])
    for message in messages:
        assert f"of step 0 on rank {whose}" in message


GROUPED: list[Layout] = [
    *WIDE,
    Packed(max_tokens=4 * LIMIT, pad_to=4 * LIMIT, round_to=LIMIT),
    Packed(rows=2, pad_to=2 * LIMIT),
    Padded(samples=5, pad_to=LIMIT),
]


@examples(40)
@given(
    work=worlds(),
    layout=st.sampled_from(GROUPED),
    dp=st.integers(1, 3),
    most=st.integers(LIMIT, 3 * LIMIT),
    equal=st.booleans(),
    normalization=st.sampled_from(["token mean", "group mean"]),
    known=st.booleans(),
)
def test_splitting_keeps_groups_of_a_micro_batch_together(
    work: Work, layout: Layout, dp: int, most: int, equal: bool, normalization: str, known: bool
) -> None:
    plan = Plan("planned", layout, dp=dp, groups="micro_batch", equal_sizes=equal)
    try:
        steps = steps_of(plan, work, known)
    except PlanError:
        return  # a group that no micro-batch can hold
    model = model_of()
    loss, gradient = expected(normalization, model, work, steps)

    def rank(ranks: Collective) -> tuple[list[set[int]], float, Gradient] | str:
        own, seen = Small(copy.deepcopy(model), most, "forward"), list[set[int]]()

        def forward(model: Any, batch: Any) -> Tensor:
            outputs = model(batch)
            seen.append({work.samples[n]["group"] for n in batch.sample_ids.tolist() if n >= 0})
            return outputs

        runner = Runner(
            model=own, loss=cross_entropy(), collective=ranks, collate=without_group_tokens,
            forward=forward, on_memory="split", normalization=NORMALIZATIONS[normalization],
        )  # fmt: skip
        try:
            result = runner.run(steps[ranks.rank]).reduce(ranks)
        except MicroBatchError as error:
            return str(error)
        return seen[-result.num_micro_batches :], result.loss, gradient_of(own)

    ran = run_ranks(dp, rank)
    if any(isinstance(found, str) for found in ran):
        assert all("with a single" in found for found in ran if isinstance(found, str))
        assert all(isinstance(found, str) for found in ran)
        return
    for found in ran:
        assert not isinstance(found, str)
        groups, value, grad = found
        assert sum(map(len, groups)) == len(set().union(*groups))
        assert value == pytest.approx(loss, rel=1e-12, abs=1e-15)
        assert distance(grad, gradient) < 1e-12


def without_group_tokens(micro: MicroBatch, samples: Any) -> Batch:
    """Collate such that GroupMean counts the tokens of groups in each batch."""
    extras = {name: extra for name, extra in COLLATOR.extras.items() if name != "group_tokens"}
    without = {
        number: {key: value for key, value in sample.items() if key != "group_tokens"}
        for number, sample in samples.items()
        if sample is not None  # skipped
    }
    return Collator(extras=extras)(micro, without)


def test_a_group_that_cannot_be_split_is_an_error_on_every_rank() -> None:
    work = samples_of([4, 4, 4, 4], masked=0.0)
    for number, sample in enumerate(work.samples):
        sample["group"] = number // 2
    steps = steps_of(Plan("planned", Packed(max_tokens=8), dp=2, groups="micro_batch"), work)
    model = model_of()

    def rank(ranks: Collective) -> str:
        own = Small(copy.deepcopy(model), 7 if ranks.rank else 99, "forward")
        runner = Runner(
            model=own, loss=cross_entropy(), collective=ranks, collate=COLLATOR, on_memory="split"
        )
        with pytest.raises(MicroBatchError) as caught:
            runner.run(steps[ranks.rank])
        return str(caught.value)

    assert run_ranks(2, rank) == [
        "micro-batch 0 of 1 of step 0 on rank 1 ran out of memory with a single group, which "
        "groups='micro_batch' keeps together. Lower max_tokens or the samples per group, or plan "
        "with groups='step'.",
        "micro-batch 0 of 1 of step 0 on rank 1 (1 x 8 slots, 2 segments of samples "
        f"{held(steps[1])}) ran out of memory with a single group, which groups='micro_batch' "
        "keeps together. Lower max_tokens or the samples per group, or plan with groups='step'.",
    ]


def held(step: Any) -> str:
    return ", ".join(map(str, step.micro_batches[0].segments.sample.tolist()))


def test_splitting_would_change_a_loss_per_micro_batch() -> None:
    with pytest.raises(ConfigError, match="on which the loss of mode='per_micro_batch' depends"):
        Runner(model=model_of(), loss=cross_entropy(), on_memory="split", mode="per_micro_batch")


def test_splitting_cannot_keep_equal_tokens() -> None:
    work = samples_of([4, 4, 2, 2], masked=0.0)
    steps = steps_of(Plan("planned", Packed(max_tokens=8), dp=2, equal_tokens=True), work)
    runner = Runner(model=model_of(), loss=cross_entropy(), on_memory="split")
    with pytest.raises(ConfigError, match="equal_tokens makes those of a wave equally wide"):
        runner.run(steps[0])


def test_gradients_that_were_there_before_are_not_lost_by_trying_again() -> None:
    work = samples_of([LIMIT, 3, 3], masked=0.0)
    (step,) = steps_of(Plan("planned", Packed(max_tokens=2 * LIMIT)), work, known=True)
    found = []
    for most in (99, LIMIT):
        model = model_of()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        own = Small(model, most, "backward")
        Runner(model=own, loss=cross_entropy(), collate=COLLATOR, on_memory="split").run(step)
        found.append(gradient_of(own))
    assert distance(found[1], found[0]) < 1e-12


def test_splitting_needs_samples_not_batches() -> None:
    work = samples_of([LIMIT, 3])
    runner = Runner(model=model_of(), loss=cross_entropy(), on_memory="split")
    ways: list[Way] = ["batches", "collated"]
    for way in ways:
        plan = Plan(way, Packed(max_tokens=LIMIT))
        with pytest.raises(ConfigError, match="holds collated batches"):
            runner.run(steps_of(plan, work)[0])
