"""Options of a runner and of what wraps its model, drawn together, in two processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from evenstep import Packed, Step
from evenstep.tensors import cross_entropy
from evenstep.train import Distributed, Loss, Runner, compute_log_probs
from tests.internals import Block
from tests.train.failing import _wrap
from tests.train.processes import results_of
from tests.train.running import LAYOUTS, Plan, Way, expected, samples_of, steps_of
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

GIANT = Plan("batches", Packed(max_tokens=999))


@dataclass(frozen=True)
class Options:
    """What a user chose."""

    seed: int
    wrap: str
    tied: bool
    frozen: tuple[str, ...]
    checkpoint: str | None
    losses: tuple[tuple[str, float], ...]
    plan: Plan
    known: bool
    runner: dict[str, Any]
    scaled: bool
    most: int | None
    """Slots above which a micro-batch runs out of memory, with on_memory="split"."""
    where: str
    between: str
    accumulate: bool

    @property
    def works(self) -> list[Work]:
        """The samples of two steps."""
        rng = np.random.default_rng(self.seed)
        return [
            samples_of(rng.integers(1, LIMIT + 1, 11).tolist(), seed=self.seed + at, masked=0.2)
            for at in (0, 1)
        ]

    def model(self) -> Any:
        model = model_of(self.seed)
        if self.tied:
            model.head.weight = model.embed.weight
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return model

    def exact(self) -> list[tuple[float, Gradient]]:
        """By definition, the loss of each step and the gradient after it; the second step has half
        the weights."""
        found: list[tuple[float, Gradient]] = []
        model = self.model()
        for work in self.works:
            parts = [expected(name, model, work, steps_of(GIANT, work)) for name, _ in self.losses]
            weights = [weight for _, weight in self.losses]
            gradient: Any = sum(w * each for w, (_, each) in zip(weights, parts, strict=True))
            if found and self.accumulate:
                gradient = gradient + found[0][1]
            loss = sum(w * each for w, (each, _) in zip(weights, parts, strict=True))
            found.append((loss, gradient))
            halve(model)
        return found


def halve(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def drawn(seed: int) -> Options:
    rng = np.random.default_rng(seed)

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    wrap = one_of("plain", "ddp", "views", "unused", "fsdp", "fsdp+kept", "fsdp+flat")
    names = rng.permutation(list(NORMALIZATIONS))[: one_of(1, 1, 2, 3)].tolist()
    way: Way = one_of("planned", "planned", "collated", "batches")
    splits = way == "planned" and "fsdp" not in wrap and one_of(True, False)
    frozen = one_of((), ("embed.weight",), ("head.weight", "blocks.0.attention.key.weight"))
    scaled, tied = one_of(False, False, True), one_of(True, False)
    runner: dict[str, Any] = {
        "mode": one_of(None, None, "deferred", "counted"),
        "prefetch": one_of(0, 1, 3),
        "keep": one_of(None, "samples", "tokens"),
        "on_nonfinite": None if scaled else one_of(None, "raise", "skip"),
        "on_memory": "split" if splits else "raise",
    }
    if "fsdp" in wrap:
        runner["reduce_every"] = one_of("step", "micro_batch")
    # Reentrant checkpoints have no gradient if none of their inputs has one, and DDP that looks for
    # unused parameters refuses them.
    plain = "embed.weight" in frozen or wrap == "unused"
    checkpoints = [None, "no_reentrant"] if plain else [None, *CHECKPOINTS]
    return Options(
        seed=seed,
        wrap=wrap,
        tied=tied,
        frozen=frozen,
        checkpoint=one_of(*checkpoints),
        losses=tuple((name, one_of(1.0, 0.25)) for name in names),
        plan=Plan(way, LAYOUTS[rng.integers(len(LAYOUTS))], dp=2),
        known=way != "batches" and one_of(True, False),
        runner=runner,
        scaled=scaled,
        most=2 * LIMIT - 1 if splits else None,
        where=one_of("before", "after", "backward"),
        between=one_of("nothing", "evaluate", "scores"),
        accumulate=one_of(True, False),
    )


CHECKPOINTS = ("no_reentrant", "reentrant")


def run_options(rank: int, size: int, seeds: list[int]) -> list[list[tuple[float, Gradient]]]:
    return [run(drawn(seed), rank, size) for seed in seeds]


def run(options: Options, rank: int, size: int) -> list[tuple[float, Gradient]]:
    """The loss of each of two steps and the gradient after it, as this rank has them."""
    model = options.model()
    if options.checkpoint is not None:
        implementation = CheckpointImpl[options.checkpoint.upper()]
        wrapper = partial(checkpoint_wrapper, checkpoint_impl=implementation)
        apply_activation_checkpointing(model, wrapper, lambda module: isinstance(module, Block))
    model, ranks = _wrap(model, options.wrap, size), Distributed()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if options.scaled else None
    runner = Runner(
        model=model,
        loss={
            name: Loss(function=cross_entropy(), normalization=NORMALIZATIONS[name], weight=weight)
            for name, weight in options.losses
        },
        collective=ranks,
        collate=COLLATOR,
        forward=forward_of(options),
        scaler=scaler,
        **options.runner,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for work in options.works:
        step: Any = steps_of(options.plan, work, options.known)[rank]
        if isinstance(step, Step) and options.between == "evaluate":
            runner.evaluate([step])
        if isinstance(step, Step) and options.between == "scores":
            compute_log_probs(model, step)
        if not options.accumulate:
            optimizer.zero_grad()
        loss = runner.run(step).reduce(ranks).loss
        gradient = gradient_of(model)
        found.append((loss, 2.0**-8 * gradient if options.scaled else gradient))
        halve(model)
    return found


def forward_of(options: Options) -> Any:
    """The forward of a model, which runs out of memory in large micro-batches."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("there is no more")

    def forward(model: Any, batch: Any) -> Tensor:
        large = options.most is not None and batch.rows * batch.width > options.most
        large = large and torch.is_grad_enabled() and int((batch.sample_ids >= 0).sum()) > 1
        if large and options.where == "before":
            fail()
        outputs: Tensor = model(batch)
        if large and options.where == "after":
            fail()
        if large and options.where == "backward":
            outputs.register_hook(fail)
        return outputs

    return forward


def check(seeds: list[int], folder: Path) -> None:
    ran = results_of(2, run_options, folder, seeds)
    for at, seed in enumerate(seeds):
        print(drawn(seed))  # shown if it is wrong
        for found in (ran[0][at], ran[1][at]):
            for (loss, gradient), (value, exact) in zip(found, drawn(seed).exact(), strict=True):
                assert loss == pytest.approx(value, rel=1e-10, abs=1e-12)
                assert distance(gradient, exact) < 1e-10


def test_options_drawn_together_have_the_exact_gradient(tmp_path: Path) -> None:
    check(list(range(12)), tmp_path)


@pytest.mark.slow
def test_many_options_drawn_together_have_the_exact_gradient(tmp_path: Path) -> None:
    check(list(range(100, 400)), tmp_path)
