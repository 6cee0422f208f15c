"""What users combine: kinds of steps, layouts, ranks, overflow, groups, skipped samples, memory,
mixed precision and what wraps the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
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
from evenstep.train import (
    Collective,
    Distributed,
    GroupMean,
    Normalization,
    Runner,
    SequenceMean,
    StepResult,
    TokenMean,
)
from tests.examples import examples
from tests.internals import Layout, Overflow, Scope, Segments
from tests.train.on_ranks import Small, feeding, wrapped
from tests.train.processes import results_of
from tests.train.running import Context, samples_of
from tests.train.steps import COLLATOR, LIMIT, Gradient, distance, gradient_of, model_of
from tests.train.test_memory import without_group_tokens

Kind = Literal["planned", "loaded", "pooled", "fed"]
Autocast = Literal["none", "inside", "around"]
Wrapper = Literal["plain", "ddp", "fsdp"]

ROUNDING = 0.05
"""The largest error of a parameter under autocast. bfloat16 has 8 bits; layouts round otherwise:
1.5 % at most in 1,171 gradients. Where casts of weights outlive a step, errors are 50 %; where they
outlive a micro-batch of fully_shard, up to 45 %."""

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
    autocast: Autocast = "none"
    """`around` two steps between which weights change, `inside` the forward, or `none`."""
    wrapper: Wrapper = "plain"

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
            autocast=draw(st.sampled_from(["none", "none", "inside", "around"])),
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
    cast: bool,
) -> tuple[float, Gradient]:
    """(loss, gradient) of these segments, one at a time; `cast` runs the model under autocast."""
    grouped = isinstance(normalization, GroupMean)
    by_sample: dict[int, list[Tensor]] = {}  # or by group
    for number, start, end, stop in sorted(segments):
        ids = torch.as_tensor(samples[number]["input_ids"])
        kept = torch.as_tensor(samples[number]["loss_mask"])
        length, zero = np.array([end - start]), np.zeros(1, np.int64)
        alone = MicroBatch(Segments(zero, zero, length), np.array([0, 1]), end - start, length)
        batch = COLLATOR(alone, {0: {**samples[number], **_cut(samples[number], start, end)}})
        with autocast(cast):
            logits = model(batch)[0]
        log_probs = (logits.float() if cast else logits).log_softmax(-1)
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
    model = model_for(choice)
    ran = run_ranks(choice.dp * choice.cp, lambda ranks: run(choice, ranks, model, steps, samples))
    judge(choice, samples, ran)


def judge(choice: Choice, samples: list[dict[str, Any]], ran: Sequence[Ran | str]) -> None:
    """Compare what all ranks found with the definition."""
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
    cast, model = choice.autocast != "none", model_for(choice)
    loss, gradient = by_definition(model, samples, held, choice.normalization, cast)
    for found in done:
        assert abs(found.loss - loss) < (0.01 if cast else 1e-12) * max(1.0, abs(loss))
        assert distance(found.gradient, gradient) < (ROUNDING if cast else 1e-12)
    if choice.cp == 1:
        total = sum(float(values.sum()) for found in done for values in found.kept.values())
        assert abs(total - done[0].total) < (1e-5 if cast else 1e-10) * max(1.0, abs(total))
        assert {n for found in done for n in found.kept} == {number for number, *_ in held}
    if choice.overflow != "drop":
        missing = set(range(len(samples))) - choice.broken
        assert {number for number, *_ in held} == missing


def model_for(choice: Choice) -> Any:
    """In double precision, or in single precision for autocast."""
    model = model_of()
    return model if choice.autocast == "none" else model.float()


def autocast(enabled: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()


def multiply_weights(model: Any, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


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
    own: Any = Small(copy.deepcopy(model), choice.most or 10**9, choice.where)
    if choice.wrapper != "plain":
        own, _ = wrapped(own, choice.wrapper, ranks.size)
    rank, options = ranks.rank // choice.cp, dict[str, Any]()
    if choice.cp > 1:
        context = Context(ranks.rank % choice.cp, choice.cp)
        options = {"shard": context.shard, "forward": context.forward}
    inner = options.get("forward", lambda model, batch: model(batch))

    def forward(model: Any, batch: Any) -> Any:
        with autocast(choice.autocast == "inside"):
            return inner(model, batch)

    options["forward"] = forward
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
        with autocast(choice.autocast == "around"):
            if choice.autocast == "around":
                multiply_weights(own, 0.5)  # exact in binary
                run_once(choice, runner, rank, steps, samples)
                multiply_weights(own, 2.0)
                own.zero_grad()
                held.clear()
            result = run_once(choice, runner, rank, steps, samples).reduce(ranks)
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


def run_once(
    choice: Choice, runner: Runner, rank: int, steps: list[Step], samples: list[dict[str, Any]]
) -> StepResult:
    if choice.kind != "fed":
        return runner.run(steps[rank])
    feed = Feed(replace(choice.recipe, steps=Steps()))

    def fill() -> None:
        with feed:
            for sample in samples[rank :: choice.dp]:
                feed.put(sample)

    with feeding(fill):
        return runner.run_fed(feed, lock_step=choice.lock_step)


# In processes, with wrappers ----------------------------------------------------------------------


Case = tuple[Choice, list[int], int]
"""A choice, the lengths of its samples and the seed of their contents."""


def wrapped_cases(count: int) -> list[Case]:
    """Random cases on two ranks, every wrapper with every place of autocast in turn."""
    rng = np.random.default_rng(0)

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    wrappers: list[Wrapper] = ["plain", "ddp", "fsdp"]
    places: list[Autocast] = ["around", "inside", "none"]
    turns = list(product(wrappers, places))
    cases: list[Case] = []
    for wrapper, place in (turns[at % len(turns)] for at in range(count)):
        kind: Kind = one_of("planned", "planned", "loaded", "loaded", "pooled", "fed")
        planned = kind in ("planned", "loaded")
        choice = Choice(
            kind=kind,
            layout=one_of(*LAYOUTS),
            dp=2,
            cp=1,
            overflow=one_of("split", "truncate"),
            groups=one_of(None, "step") if planned else None,
            broken=frozenset(),
            known=planned and one_of(True, False),
            most=None,
            where="forward",
            normalization=one_of(TokenMean(), SequenceMean()),
            prefetch=one_of(0, 1, 2),
            lock_step=None,
            autocast=place,
            wrapper=wrapper,
        )
        lengths = rng.integers(1, 2 * LIMIT + 3, rng.integers(8, 24)).tolist()
        cases.append((choice, lengths, int(rng.integers(100))))
    return cases


def run_wrapped(rank: int, size: int, cases: list[Case]) -> list[Ran | str]:
    """What this process found in each case."""
    found = []
    for choice, lengths, seed in cases:
        samples = samples_of(lengths, seed=seed).samples
        steps = [] if choice.kind == "fed" else steps_of(choice, samples)
        found.append(run(choice, Distributed(), model_for(choice), steps, samples))
    return found


def check_wrapped(cases: list[Case], folder: Path) -> None:
    ran = results_of(2, run_wrapped, folder, cases)
    for at, (choice, lengths, seed) in enumerate(cases):
        print(choice, lengths, seed)  # shown if it is wrong
        judge(choice, samples_of(lengths, seed=seed).samples, [found[at] for found in ran])


def test_every_wrapper_has_the_exact_gradient_with_and_without_autocast(tmp_path: Path) -> None:
    check_wrapped(wrapped_cases(36), tmp_path)


@pytest.mark.slow
def test_many_wrapped_combinations_have_the_exact_gradient(tmp_path: Path) -> None:
    check_wrapped(wrapped_cases(180), tmp_path)
