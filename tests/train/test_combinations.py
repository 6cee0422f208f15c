"""What users combine: kinds of steps, layouts, ranks, overflow, groups, skipped samples, memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from evenstep import (
    MicroBatch,
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
from evenstep.data import Feed, InMemory, until_all_end
from evenstep.errors import InputError, MicroBatchError, PlanError, SampleError
from evenstep.tensors import cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Collective, GroupMean, Normalization, Runner, SequenceMean, TokenMean
from tests.examples import examples
from tests.internals import Layout, Overflow, Scope, Segments
from tests.train.on_ranks import Small, feeding
from tests.train.running import Context, samples_of
from tests.train.steps import COLLATOR, LIMIT, Gradient, distance, gradient_of, model_of
from tests.train.test_memory import without_group_tokens

Kind = Literal["planned", "loaded", "pooled", "fed"]

LAYOUTS: list[Layout] = [
    Packed(max_tokens=3 * LIMIT),
    Packed(max_tokens=2 * LIMIT, round_to=8),
    Packed(max_tokens=3 * LIMIT, pad_to=3 * LIMIT),
    Packed(rows=2, pad_to=2 * LIMIT),
    Packed(rows=2, pad_to=2 * LIMIT, samples=4),
    Packed(samples=3, max_tokens=3 * LIMIT),
    Padded(max_tokens=3 * LIMIT),
    Padded(max_tokens=4 * LIMIT, round_to=8),
    Padded(samples=3, pad_to=2 * LIMIT),
    Padded(samples=3, max_tokens=3 * LIMIT),
]


@dataclass(frozen=True)
class Choice:
    """What a user chose."""

    kind: Kind
    layout: Layout
    dp: int
    cp: int
    overflow: Overflow
    groups: Scope | None
    broken: frozenset[int]
    """Samples that cannot be read and are skipped."""
    known: bool
    most: int | None
    """Slots above which the model runs out of memory, with on_memory="split"."""
    where: Literal["forward", "backward"]
    normalization: Normalization
    prefetch: int
    lock_step: bool | None

    @property
    def recipe(self) -> Recipe:
        planned = self.kind in ("planned", "loaded")
        return Recipe(
            layout=self.layout,
            topology=Topology(dp=self.dp, cp=self.cp),
            steps=Steps() if planned else Steps(micro_batches=24),
            overflow=self.overflow,
            groups=(self.groups or "micro_batch") if planned else "micro_batch",
        )


def choices() -> SearchStrategy[Choice]:
    @st.composite
    def choice(draw: DrawFn) -> Choice:
        kind: Kind = draw(st.sampled_from(["planned", "planned", "loaded", "pooled", "fed"]))
        planned = kind in ("planned", "loaded")
        splits = kind != "fed" and draw(st.booleans())
        broken = draw(st.frozensets(st.integers(0, 9), max_size=2)) if kind != "fed" else ()
        overflow: Overflow = draw(st.sampled_from(["split", "split", "truncate", "drop"]))
        groups: Scope | None = draw(st.sampled_from([None, "micro_batch", "step"]))
        means: list[Normalization] = [TokenMean(), SequenceMean()]
        if planned and groups == "micro_batch" and overflow != "split":
            means.append(GroupMean())
        return Choice(
            kind=kind,
            layout=draw(st.sampled_from(LAYOUTS)),
            dp=draw(st.integers(1, 3)),
            cp=draw(st.sampled_from([1, 1, 2])),
            overflow=overflow,
            groups=groups if planned else None,
            broken=frozenset(broken),
            known=planned and draw(st.booleans()),
            most=draw(st.integers(LIMIT, 3 * LIMIT)) if splits else None,
            where=draw(st.sampled_from(["forward", "backward"])),
            normalization=draw(st.sampled_from(means)),
            prefetch=draw(st.integers(0, 2)),
            lock_step=draw(st.sampled_from([None, True])),
        )

    return choice()


class Faulty(InMemory):
    """Samples of which some cannot be read."""

    broken: frozenset[int] = frozenset()

    def __getitem__(self, item: int) -> Any:
        if item in self.broken:
            raise SampleError(f"sample {item} is damaged")
        return super().__getitem__(item)


def steps_of(choice: Choice, samples: list[dict[str, Any]]) -> list[Step]:
    """The first step of each data-parallel rank."""
    source = Faulty(samples)
    source.broken = choice.broken
    groups = np.array([sample["group"] for sample in samples])
    counts = np.array([int(sample["loss_mask"][1:].sum()) for sample in samples])
    steps = []
    for rank in range(choice.dp):
        world = World(rank, choice.dp)
        if choice.kind == "pooled":
            step: Step | None
            pooled = PooledStream(source, choice.recipe, world=world, on_error="skip")
            ended = until_all_end(iter(pooled), lambda mine: True, choice.recipe)
            (step,) = islice(ended, 1)
        else:
            stream = PlannedStream(
                source,
                choice.recipe,
                world=world,
                groups=None if choice.groups is None else groups,
                loss_tokens=counts if choice.known else None,
                on_error="skip" if choice.broken else "raise",
            )
            step = next(iter(stream), None)
            if step is None:
                return []  # all samples were dropped
        steps.append(step.loaded() if choice.kind == "loaded" else step)
    return steps


# By definition --------------------------------------------------------------------------------


def segments_of(micros: Sequence[MicroBatch]) -> set[tuple[int, int, int, int]]:
    """(sample, start, end, end of the sample) of each segment."""
    return {
        (sample, start, start + length, end)
        for micro in micros
        for sample, start, length, end in zip(
            micro.segments.sample.tolist(),
            micro.segments.start.tolist(),
            micro.segments.length.tolist(),
            micro.sample_ends.tolist(),
            strict=True,
        )
    }


def by_definition(
    model: Any,
    samples: list[dict[str, Any]],
    segments: set[tuple[int, int, int, int]],
    normalization: Normalization,
) -> tuple[float, Gradient]:
    """(loss, gradient) of these segments, one at a time."""
    grouped = isinstance(normalization, GroupMean)
    by_sample: dict[int, list[Tensor]] = {}  # or by group
    for number, start, end, stop in sorted(segments):
        ids = torch.as_tensor(samples[number]["input_ids"])
        kept = torch.as_tensor(samples[number]["loss_mask"])
        length, zero = np.array([end - start]), np.zeros(1, np.int64)
        alone = MicroBatch(Segments(zero, zero, length), np.array([0, 1]), end - start, length)
        batch = COLLATOR(alone, {0: {**samples[number], **_cut(samples[number], start, end)}})
        log_probs = model(batch)[0].log_softmax(-1)
        labels = ids[start + 1 : min(end + 1, stop)]
        nll = -log_probs[torch.arange(len(labels)), labels]
        key = samples[number]["group"] if grouped else number
        by_sample.setdefault(key, []).append(nll[kept[start + 1 : start + 1 + len(labels)]])
    losses = [torch.cat(each) for each in by_sample.values()]
    losses = [each for each in losses if each.numel()]
    model.zero_grad()
    if not losses:
        return 0.0, gradient_of(model)
    means = torch.stack([each.mean() for each in losses])
    loss = torch.cat(losses).mean() if isinstance(normalization, TokenMean) else means.mean()
    loss.backward()
    found = gradient_of(model)
    model.zero_grad()
    return float(loss.detach()), found


def _cut(sample: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    return {name: sample[name][start:end] for name in ("input_ids", "loss_mask", "token_weight")}


# Running --------------------------------------------------------------------------------------


LENGTHS = st.lists(st.integers(1, 2 * LIMIT + 3), min_size=1, max_size=10)
pytestmark = pytest.mark.filterwarnings("ignore:reader . lost samples after its last step")


@examples(25)
@given(choice=choices(), lengths=LENGTHS, seed=st.integers(0, 99))
def test_every_combination_has_the_exact_gradient(
    choice: Choice, lengths: list[int], seed: int
) -> None:
    check(choice, lengths, seed)


@pytest.mark.slow
@examples(1000)
@given(choice=choices(), lengths=LENGTHS, seed=st.integers(0, 99))
def test_every_of_many_combinations_has_the_exact_gradient(
    choice: Choice, lengths: list[int], seed: int
) -> None:
    check(choice, lengths, seed)


def check(choice: Choice, lengths: list[int], seed: int) -> None:
    """Compare the loss and gradient of all ranks with the definition."""
    samples = samples_of(lengths, seed=seed).samples
    # Data of which nothing can be read is an error; test_reader.py and test_planned.py test it.
    assume(choice.kind == "fed" or not set(range(len(lengths))) <= choice.broken)
    try:
        steps = [] if choice.kind == "fed" else steps_of(choice, samples)
    except PlanError:
        steps = []  # a group that no micro-batch can hold
    if choice.kind != "fed" and not steps:
        event("no step")
        return
    model = model_of()
    ran = run_ranks(choice.dp * choice.cp, lambda ranks: run(choice, ranks, model, steps, samples))
    errors = [found for found in ran if isinstance(found, str)]
    if errors and all("counts in the loss, on any rank" in error for error in errors):
        event("no loss token")
        assert len(errors) == len(ran)
        if choice.overflow == "split":  # nothing is left out, so that no sample has a loss token
            read = [each for at, each in enumerate(samples) if at not in choice.broken]
            assert not any(bool(np.any(np.asarray(each["loss_mask"])[1:])) for each in read)
        return
    if errors:
        event("cannot be split")
        assert choice.most is not None
        assert len(errors) == len(ran)
        assert all("with a single" in error for error in errors)
        return
    done = [found for found in ran if not isinstance(found, str)]
    held = set().union(*(found.segments for found in done))
    loss, gradient = by_definition(model, samples, held, choice.normalization)
    for found in done:
        assert abs(found.loss - loss) < 1e-12 * max(1.0, abs(loss))
        assert distance(found.gradient, gradient) < 1e-12
    if choice.cp == 1:
        total = sum(float(values.sum()) for found in done for values in found.kept.values())
        assert abs(total - done[0].total) < 1e-10 * max(1.0, abs(total))
        assert {n for found in done for n in found.kept} == {number for number, *_ in held}
    if choice.overflow != "drop":
        missing = set(range(len(samples))) - choice.broken
        assert {number for number, *_ in held} == missing


@dataclass(frozen=True)
class Ran:
    """What a rank found."""

    loss: float
    gradient: Gradient
    segments: set[tuple[int, int, int, int]]
    kept: dict[int, Tensor]
    """The losses of the tokens of each sample."""
    total: float
    """The loss times its denominator."""


def run(
    choice: Choice,
    ranks: Collective,
    model: Any,
    steps: list[Step],
    samples: list[dict[str, Any]],
) -> Ran | str:
    """The step of one rank, or its error."""
    own = Small(copy.deepcopy(model), choice.most or 10**9, choice.where)
    rank, options = ranks.rank // choice.cp, dict[str, Any]()
    if choice.cp > 1:
        context = Context(ranks.rank % choice.cp, choice.cp)
        options = {"shard": context.shard, "forward": context.forward}
    held: list[MicroBatch] = []

    def collate(micro: MicroBatch, samples: Any) -> Any:
        held.append(micro)
        grouped = isinstance(choice.normalization, GroupMean)
        return (without_group_tokens if grouped else COLLATOR)(micro, samples)

    runner = Runner(
        model=own,
        loss=cross_entropy(),
        normalization=choice.normalization,
        collective=ranks,
        collate=collate,
        prefetch=choice.prefetch,
        on_memory="raise" if choice.most is None else "split",
        keep="tokens" if choice.cp == 1 else None,
        **options,
    )
    try:
        if choice.kind == "fed":
            feed = Feed(replace(choice.recipe, steps=Steps()))

            def fill() -> None:
                with feed:
                    for sample in samples[rank :: choice.dp]:
                        feed.put(sample)

            with feeding(fill):
                result = runner.run_fed(feed, lock_step=choice.lock_step)
        else:
            result = runner.run(steps[rank])
        result = result.reduce(ranks)
    except (MicroBatchError, InputError) as error:
        return str(error)
    numbers = np.arange(rank, len(samples), choice.dp)
    kept: dict[int, Tensor] = {}
    if result.kept is not None:
        ids = result.kept.sample_ids
        ids = numbers[ids] if choice.kind == "fed" else ids
        kept = dict(zip(ids.tolist(), result.kept.tokens["loss"], strict=True))
    assert result.numbers is not None
    (denominator,) = result.numbers.denominators.values()
    named = held if choice.kind != "fed" else [micro.renumbered(numbers) for micro in held]
    total = result.loss * denominator
    return Ran(result.loss, gradient_of(own), segments_of(named), kept, total)
