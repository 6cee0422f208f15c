"""The same samples as many different steps, run by `Runner` on fake ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

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
    make_plan,
)
from evenstep.data import InMemory, until_all_end
from evenstep.tensors import Batch, BatchShard, Collator, cross_entropy, shard_context
from evenstep.testing import run_ranks
from evenstep.train import Collective, Loss, Normalization, Runner, StepResult
from tests.internals import Layout, LossFunction, Scope, Segments
from tests.train.steps import (
    COLLATOR,
    LIMIT,
    Gradient,
    Work,
    by_definition,
    gradient_of,
    make_work,
    model_of,
)

Way = Literal["batches", "collated", "planned", "pooled"]

LAYOUTS: list[Layout] = [
    Packed(max_tokens=LIMIT),
    Packed(max_tokens=2 * LIMIT, pad_to=2 * LIMIT),
    Padded(max_tokens=2 * LIMIT, pad_to=LIMIT),
    Padded(max_tokens=2 * LIMIT, cut="greedy"),
    Packed(rows=2, pad_to=LIMIT),
    Packed(samples=2, max_tokens=LIMIT),
    Packed(samples=1, max_tokens=LIMIT),
    Padded(samples=2, max_tokens=2 * LIMIT),
    Padded(samples=3, pad_to=LIMIT),
]


@dataclass(frozen=True)
class Plan:
    """How a step is made: its layout, its number of ranks and its stream."""

    way: Way
    layout: Layout
    dp: int = 1
    cp: int = 1
    seed: int = 0
    split: bool = False
    in_order: bool = False
    prefetch: int = 1
    micro_batches: int = 12
    groups: Scope = "step"
    equal_sizes: bool = False
    equal_tokens: bool = False

    @property
    def recipe(self) -> Recipe:
        pooled = self.way == "pooled"
        layout = self.layout
        if isinstance(layout, Padded) and pooled:
            layout = replace(layout, cut=None)  # pools do not support cut
        return Recipe(
            layout=layout,
            topology=Topology(dp=self.dp, cp=self.cp),
            steps=Steps(micro_batches=self.micro_batches) if pooled else Steps(),
            overflow="split" if self.split else "error",
            groups="micro_batch" if pooled else self.groups,
            equal_sizes=self.equal_sizes,
            equal_tokens=self.equal_tokens,
            balance="none" if self.in_order and not self.layout.options else "refined",
        )


def plans(split: bool = False) -> SearchStrategy[Plan]:
    @st.composite
    def plan(draw: DrawFn) -> Plan:
        way: Way = draw(st.sampled_from(["batches", "collated", "planned", "pooled"]))
        return Plan(
            way=way,
            layout=draw(st.sampled_from(LAYOUTS)),
            dp=draw(st.integers(1, 4)),
            cp=draw(st.sampled_from([1, 1, 2])),
            seed=draw(st.integers(0, 9)),
            split=split and draw(st.booleans()),
            in_order=way != "pooled" and draw(st.booleans()),
            prefetch=draw(st.integers(0, 2)),
            micro_batches=24 if split else 12,
        )

    return plan()


def samples_of(lengths: Sequence[int], seed: int = 0, masked: float = 0.3) -> Work:
    """Samples with masks, groups and weights; the plan that comes with them is not used."""
    return make_work(list(lengths), Recipe(layout=Packed(samples=1)), seed=seed, masked=masked)


def worlds(longest: int = LIMIT, without_loss: bool = False) -> SearchStrategy[Work]:
    """Samples, some without loss tokens; all of them only if they are of one token each, which has
    nothing to predict, or with `without_loss`."""
    masked = [0.0, 0.3, 0.3, 0.8, 1.0] if without_loss else [0.0, 0.3, 0.3, 0.8]
    found = st.builds(
        samples_of,
        st.lists(st.integers(1, longest), min_size=1, max_size=10 if longest == LIMIT else 6),
        st.integers(0, 99),
        st.sampled_from(masked),
    )
    return found if without_loss else found.filter(lambda work: not is_without_loss(work))


def is_without_loss(work: Work) -> bool:
    """Whether there are tokens to predict, and none of them is a loss token."""
    longest = max(len(sample["input_ids"]) for sample in work.samples)
    return longest > 1 and work.totals["loss_tokens"] == 0


def steps_of(plan: Plan, work: Work, known: bool = False) -> list[Step | list[Batch]]:
    """The step that holds all samples, for each data-parallel rank."""
    return [_step(plan, work, World(rank, plan.dp), known) for rank in range(plan.dp)]


def _step(plan: Plan, work: Work, world: World, known: bool) -> Step | list[Batch]:
    source = InMemory(work.samples)
    if plan.way == "pooled":
        stream = PooledStream(source, plan.recipe, world=world, seed=plan.seed)
        # A rank without samples gets an empty step.
        steps = list(islice(until_all_end(iter(stream), lambda mine: True, plan.recipe), 2))
        assert all(micro.is_empty for micro in steps[1].micro_batches), "the first holds it all"
        return steps[0]
    counts = np.array([int(sample["loss_mask"][1:].sum()) for sample in work.samples])
    step = next(
        iter(
            PlannedStream(
                source,
                plan.recipe,
                world=world,
                seed=plan.seed,
                groups=np.array([sample["group"] for sample in work.samples]),
                loss_tokens=counts if known else None,
            )
        )
    )
    totals = {**step.totals, **(work.totals if known else {})}
    step = replace(step, totals=totals if known else {})
    if plan.way == "planned":
        return step
    collated = step.collated(COLLATOR)
    assert collated.batches is not None
    return collated if plan.way == "collated" else list(collated.batches)


def definition(name: str, model: Any, work: Work, steps: Sequence[Step | list[Batch]]) -> Tensor:
    """The loss by its definition, one segment at a time, for the segments of these steps."""
    segments: set[tuple[int, int, int]] = set()
    for step in steps:
        if isinstance(step, Step):
            for micro in step.micro_batches:
                held = micro.segments
                segments |= set(zip(held.sample, held.start, held.length, strict=True))
        else:
            for batch in step:
                real = batch.sample_ids >= 0
                found = (batch.sample_ids, batch.starts, batch.seqlens)
                segments |= set(zip(*(each[real].tolist() for each in found), strict=True))
    columns = np.array(sorted(segments), np.int64).reshape(-1, 3).T
    plan = SimpleNamespace(segments=Segments(*columns))
    return by_definition(name, model, SimpleNamespace(plan=plan, samples=work.samples))  # type: ignore[arg-type]


def expected(name: str, model: Any, work: Work, steps: Sequence[Any]) -> tuple[float, Gradient]:
    """(loss, gradient) by definition."""
    model.zero_grad()
    loss = definition(name, model, work, steps)
    loss.backward()
    gradient = gradient_of(model)
    model.zero_grad()
    return float(loss.detach()), gradient


def scores_alone(model: Any, ids: Any) -> Tensor:
    """Log-probs of one sequence alone, with 0 for its first token."""
    ids = torch.as_tensor(ids)
    micro = make_plan([len(ids)], Recipe(layout=Packed(samples=1)))[0, 0][0]
    with torch.no_grad():
        log_probs = model(Collator()(micro, [{"input_ids": ids}]))[0].log_softmax(-1)
    return torch.cat((torch.zeros(1).double(), log_probs[torch.arange(len(ids) - 1), ids[1:]]))


@dataclass
class Counting:
    """A collective that records the size of each reduction."""

    ranks: Collective
    calls: list[int] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        self.calls.append(tensor.numel())
        return self.ranks.all_reduce_sum(tensor)


@dataclass
class Context:
    """Context parallelism without processes: the model runs the whole batch; logits are sharded."""

    rank: int
    size: int
    whole: Batch | None = None

    def shard(self, batch: Batch) -> BatchShard:
        self.whole = batch
        return shard_context(batch, self.rank, self.size)

    def forward(self, model: Any, shard: BatchShard) -> Tensor:
        assert self.whole is not None
        return shard.take(model(self.whole))


@dataclass(frozen=True)
class Ran:
    """The result, gradient and reductions of one rank."""

    result: StepResult
    gradient: Gradient
    calls: list[int]


def run_plan(
    plan: Plan,
    steps: Sequence[Step | list[Batch]],
    model: Any = None,
    loss: LossFunction | Mapping[str, Loss] | None = None,
    normalization: Normalization | None = None,
    **options: Any,
) -> list[Ran]:
    """Run the step on dp x cp fake ranks."""
    model = model_of() if model is None else model
    if normalization is not None:
        options["normalization"] = normalization

    def rank(ranks: Collective) -> Ran:
        own, counting = copy.deepcopy(model), Counting(ranks)
        if plan.cp > 1:
            context = Context(ranks.rank % plan.cp, plan.cp)
            options_here = {"shard": context.shard, "forward": context.forward, **options}
        else:
            options_here = options
        runner = Runner(
            model=own,
            loss=cross_entropy() if loss is None else loss,
            collective=counting,
            collate=COLLATOR,
            prefetch=plan.prefetch,
            **options_here,
        )
        result = runner.run(steps[ranks.rank // plan.cp])
        calls = list(counting.calls)
        return Ran(result.reduce(ranks), gradient_of(own), calls)

    return run_ranks(plan.dp * plan.cp, rank)


def parameters_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
