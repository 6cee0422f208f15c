"""Functions that the processes of distributed tests run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenstep import EvenstepError, Packed, PlannedStream, Recipe, Topology, World
from evenstep.data import Feed, InMemory
from evenstep.demo import Decoder
from evenstep.tensors import Metric, cross_entropy, shard_context
from evenstep.train import Distributed, Loss, Runner, StepResult, Watch, compute_log_probs
from tests.internals import Block, Bundle
from tests.train.running import Plan, steps_of
from tests.train.steps import (
    COLLATOR,
    LIMIT,
    NORMALIZATIONS,
    SHAPE,
    Gradient,
    Work,
    gradient_of,
)

Samples: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A way to wrap a model and to run a step with it."""

    wrap: str = "plain"
    """plain, ddp or fsdp, optionally with + checkpoint, + buffer and + compile."""
    plan: Plan = field(default_factory=lambda: Plan("planned", Packed(max_tokens=LIMIT)))
    name: str = "token mean"
    known: bool = False
    dtype: torch.dtype = torch.float64
    on_memory: Any = "raise"
    most: int | None = None
    """Slots above which the model runs out of memory."""
    where: str = "forward"


@dataclass(frozen=True)
class Outcome:
    """The loss and gradient of a rank after a step."""

    loss: float
    gradient: Gradient
    exchanges: int
    micro_batches: int
    error: str = ""


class Small(nn.Module):  # type: ignore[misc]
    """A model that runs out of memory, in its forward or in the middle of its backward."""

    def __init__(self, model: Decoder, most: int, where: str) -> None:
        super().__init__()
        self.model, self.most, self.where = model, most, where

    def forward(self, batch: Any) -> Tensor:
        too_large = batch.rows * batch.width > self.most
        if too_large and self.where == "forward":
            raise torch.OutOfMemoryError("there is no more")
        if not too_large:
            return self.model(batch)
        for parameter in self.model.blocks[0].parameters():
            parameter.register_post_accumulate_grad_hook(_out_of_memory)
            break  # the head has its gradient by then
        return self.model(batch)


def _out_of_memory(parameter: Tensor) -> None:
    hooks = parameter._post_accumulate_grad_hooks
    hooks.clear()
    raise torch.OutOfMemoryError("there is no more")


def _work(samples: Samples) -> Work:
    no_plan: Any = None  # each rank makes its own
    return Work(no_plan, samples)


def decoder(dtype: torch.dtype, context: Any = None) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SHAPE, context=context)
    model.to(dtype)
    return model


def wrapped(model: nn.Module, how: str, world: int) -> tuple[Any, list[int]]:
    """(the wrapped model, a list that gets one entry per gradient exchange)."""
    exchanges: list[int] = []
    if "buffer" in how:
        model.register_buffer("counted", torch.zeros(1))  # DDP broadcasts it in forwards
    if "checkpoint" in how:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    if "fsdp" in how:
        mesh = init_device_mesh("cpu", (world,))
        for module in list(model.modules()):
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        _count_reduce_scatters(exchanges)
    if "ddp" in how:
        model = DistributedDataParallel(model)

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations
            exchanges.append(bucket.buffer().numel())
            return allreduce_hook(state, bucket)

        model.register_comm_hook(None, hook)
    if "compile" in how:
        model = torch.compile(model, backend="eager")
    return model, exchanges


def _count_reduce_scatters(exchanges: list[int]) -> None:
    """Record each reduce-scatter of fully_shard in this list from now on."""
    single = hasattr(distributed, "reduce_scatter_single")  # torch >= 2.13
    name = "reduce_scatter_single" if single else "reduce_scatter_tensor"
    called = getattr(distributed, name)
    original = getattr(called, "original", called)

    def counting(*args: Any, **kwargs: Any) -> Any:
        exchanges.append(1)
        return original(*args, **kwargs)

    counting.original = original  # type: ignore[attr-defined]
    setattr(distributed, name, counting)


def outcomes(
    rank: int, size: int, cases: dict[str, Case], samples: Samples, groups: tuple[int, ...] = ()
) -> dict[str, Outcome]:
    """Run each case. `groups` are the numbers of context-parallel ranks that occur."""
    contexts = {cp: _context_group(rank, size, cp) for cp in groups}
    work = _work(samples)
    return {key: _outcome(rank, size, case, work, contexts) for key, case in cases.items()}


def _context_group(rank: int, size: int, cp: int) -> Any:
    made = [distributed.new_group(list(range(first, first + cp))) for first in range(0, size, cp)]
    return made[rank // cp]


def _outcome(rank: int, size: int, case: Case, work: Work, contexts: dict[int, Any]) -> Outcome:
    cp, step = case.plan.cp, steps_of(case.plan, work, case.known)[rank // case.plan.cp]
    model: nn.Module = decoder(case.dtype, contexts.get(cp))
    if case.most is not None:
        model = Small(model, case.most, case.where)
    model, exchanges = wrapped(model, case.wrap, size)
    ranks = Distributed()
    try:
        runner = Runner(
            model=model,
            loss=cross_entropy(),
            normalization=NORMALIZATIONS[case.name],
            collective=ranks,
            collate=COLLATOR,
            shard=(lambda batch: shard_context(batch, rank % cp, cp)) if cp > 1 else None,
            on_memory=case.on_memory,
        )
        result = runner.run(step).reduce(ranks)
    except EvenstepError as error:
        distributed.barrier()
        return Outcome(0.0, Gradient(), 0, 0, f"{type(error).__name__}: {error}")
    return Outcome(result.loss, gradient_of(model), len(exchanges), result.num_micro_batches)


# Ways to wrap a model -----------------------------------------------------------------------------


def wrappings(rank: int, size: int, samples: Samples) -> dict[str, Outcome]:
    """A step for each way to wrap, with a gradient of 0.5 from before."""
    plain, both = (
        init_device_mesh("cpu", (size,)),
        init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicated", "sharded")),
    )

    def shard(model: Any, mesh: Any, divide: float | None = None, **options: Any) -> Any:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, **options)
            if divide is not None:
                module.set_gradient_divide_factor(divide)
        return model

    def divide_the_root(model: Any) -> Any:
        shard(model, plain).set_gradient_divide_factor(1.0)
        return model

    ways: dict[str, Callable[[Any], Any]] = {
        "ddp": DistributedDataParallel,
        "views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
        "unused": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
        "static": lambda model: DistributedDataParallel(model, static_graph=True),
        "fsdp": lambda model: shard(model, plain),
        "hybrid": lambda model: shard(model, both),
        "half": lambda model: shard(model, both),
        "divided": lambda model: shard(model, plain, divide=1.0),
        "uneven": divide_the_root,
        "ignored": lambda model: fully_shard(model, mesh=plain, ignored_params={model.norm.weight}),
    }
    step = steps_of(Plan("planned", Packed(max_tokens=LIMIT), dp=size), _work(samples))[rank]
    found = {}
    for name, wrap in ways.items():
        model = wrap(decoder(torch.float64))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        if name == "fsdp":  # its root stays unsharded after a forward without backward
            recipe = Recipe(layout=Packed(max_tokens=LIMIT), topology=Topology(dp=size))
            compute_log_probs(model, samples, recipe, collective=Distributed(), collate=COLLATOR)
        ranks = Distributed(both.get_group(1) if name == "half" else None)
        runner = Runner(model=model, loss=cross_entropy(), collective=ranks, collate=COLLATOR)
        try:
            result = runner.run(step)
            found[name] = Outcome(result.loss, gradient_of(model), 0, result.num_micro_batches)
        except EvenstepError as error:
            found[name] = Outcome(0.0, Gradient(), 0, 0, str(error))
    return found


# Bundles ----------------------------------------------------------------------------------------


def bundled(rank: int, size: int) -> tuple[float, float]:
    """A sum and a maximum over all ranks."""
    ranks = Distributed()
    assert (ranks.rank, ranks.size) == (rank, size)
    metrics = {"most": Metric.max(torch.tensor([rank + 1.0]))}
    reduced = Bundle({"loss": torch.tensor(rank + 0.5)}, metrics).reduce(ranks)
    return float(reduced.sums["loss"]), float(reduced.metrics["most"].value)


# Steps without a loss token -----------------------------------------------------------------------


def unreduced_steps(
    rank: int, size: int, wraps: list[str], samples: Samples
) -> dict[tuple[str, str], list[str]]:
    """By wrapper and kind of step: the error of a step with loss tokens on rank 0 alone, of one
    without any, and of one with them again. No result is reduced."""
    masked = [{**sample, "loss_mask": sample["loss_mask"] & False} for sample in samples]
    constant = NORMALIZATIONS["constant"]
    kinds: dict[str, dict[str, Any]] = {
        "constant": {"normalization": constant},
        "split": {"normalization": constant, "on_memory": "split"},
        "fixed length": {"normalization": NORMALIZATIONS["fixed length"]},
        "counted": {
            "loss": {
                "nll": Loss(function=cross_entropy()),
                "sum": Loss(function=cross_entropy(), normalization=constant),
            }
        },
        "fed": {"normalization": constant},
    }
    found: dict[tuple[str, str], list[str]] = {}
    for wrap in wraps:
        for kind, options in kinds.items():
            if kind == "split" and wrap == "fsdp":
                continue  # not supported
            model, _ = wrapped(decoder(torch.float64), wrap, size)
            options = {"loss": cross_entropy(), **options, "collective": Distributed()}
            runner = Runner(model=model, collate=COLLATOR, **options)
            errors = found[wrap, kind] = []
            for number, held in enumerate((samples, masked, samples)):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 0.5)
                try:
                    _run_unreduced(runner, rank, size, held, kind)
                    errors.append("")
                except EvenstepError as error:
                    errors.append(str(error))
                changed = any(bool((each.grad != 0.5).any()) for each in model.parameters())
                assert changed == (number != 1), (wrap, kind, number)
    return found


def _run_unreduced(runner: Runner, rank: int, size: int, samples: Samples, kind: str) -> None:
    recipe = Recipe(layout=Packed(max_tokens=LIMIT), topology=Topology(dp=size))
    if kind != "fed":
        stream = PlannedStream(InMemory(samples), recipe, world=World(rank, size))
        runner.run(next(iter(stream)))
        return
    feed = Feed(recipe)

    def fill() -> None:
        with feed:
            for sample in samples[rank::size]:
                feed.put(sample)

    with feeding(fill):
        runner.run_fed(feed)


# Sparse gradients -------------------------------------------------------------------------------


def sparse_steps(rank: int, size: int, samples: Samples) -> dict[bool, tuple[Gradient, bool]]:
    """(the gradient of two steps, whether the embedding's is sparse), known and deferred."""
    found = {}
    for known in (True, False):
        model, ranks = decoder(torch.float64), Distributed()
        model.embed.sparse = True
        plan = Plan("planned", Packed(max_tokens=LIMIT), dp=size)
        step = steps_of(plan, _work(samples), known)[rank]
        runner = Runner(model=model, loss=cross_entropy(), collective=ranks, collate=COLLATOR)
        for _ in range(2):
            runner.run(step).reduce(ranks)
        sparse = bool(model.embed.weight.grad.is_sparse)
        model.embed.weight.grad = model.embed.weight.grad.to_dense()
        found[known] = (gradient_of(model), sparse)
    return found


# Fed steps --------------------------------------------------------------------------------


def fed(
    rank: int, size: int, wraps: list[str], samples: Samples, shares: list[list[int]], cp: int = 1
) -> dict[str, tuple[Outcome, tuple[float, ...]]]:
    """Run steps while a thread feeds each rank its share of the samples one by one."""
    context = _context_group(rank, size, cp) if cp > 1 else None
    work, found = _work(samples), {}
    for wrap in wraps:
        model, exchanges = wrapped(decoder(torch.float64, context), wrap, size)
        for _ in range(2 if "twice" in wrap else 1):
            model.zero_grad()
            exchanges.clear()
            result = run_fed(
                model, Distributed(), work, shares[rank // cp], cp=cp, shard=_shard(rank % cp, cp)
            )
        outcome = Outcome(result.loss, gradient_of(model), len(exchanges), result.num_micro_batches)
        found[wrap] = (outcome, result.ages)
    return found


def _shard(rank: int, cp: int) -> Any:
    return (lambda batch: shard_context(batch, rank, cp)) if cp > 1 else None


def run_fed(
    model: Any,
    ranks: Any,
    work: Work,
    share: list[int],
    *,
    cp: int = 1,
    lock_step: bool | None = None,
    **options: Any,
) -> StepResult:
    recipe = Recipe(layout=Packed(max_tokens=LIMIT), topology=Topology(dp=ranks.size, cp=cp))
    feed = Feed(recipe)
    options = {"loss": cross_entropy(), **options}
    runner = Runner(model=model, collective=ranks, collate=COLLATOR, **options)

    def fill() -> None:
        for number in share:
            feed.put(work.samples[number])
        feed.close()

    with feeding(fill):
        return runner.run_fed(feed, lock_step=lock_step)


def fed_one_after_the_other(
    rank: int, size: int, wraps: list[str], samples: Samples, folder: str
) -> dict[str, Outcome]:
    """Feed each rank once the rank before it has run all its micro-batches; rank 0 gets most."""
    found, last = {}, len(samples) - size + 1
    share = list(range(last)) if rank == 0 else [last + rank - 1]
    for wrap in wraps:
        model, exchanges = wrapped(decoder(torch.float64), wrap, size)
        feed = Feed(Recipe(layout=Packed(max_tokens=LIMIT), topology=Topology(dp=size)))
        tokens = sum(len(samples[number]["input_ids"]) for number in share)
        left = [tokens]

        def forward(model: Any, batch: Any, left: list[int] = left, wrap: str = wrap) -> Tensor:
            outputs = model(batch)
            left[0] -= int(batch.seqlens.sum())
            if not left[0]:
                Path(folder, f"{wrap}-{rank}").touch()
            return outputs

        def fill(feed: Feed = feed, wrap: str = wrap) -> None:
            with feed:
                deadline = time.monotonic() + 300
                while rank and not Path(folder, f"{wrap}-{rank - 1}").exists():
                    if time.monotonic() > deadline:
                        raise TimeoutError("the rank before waits for this one")
                    time.sleep(0.01)
                for number in share:
                    feed.put(samples[number])

        runner = Runner(
            model=model, loss=cross_entropy(), collective=Distributed(), collate=COLLATOR,
            forward=forward,
        )  # fmt: skip
        with feeding(fill):
            result = runner.run_fed(feed)
        found[wrap] = Outcome(
            result.loss, gradient_of(model), len(exchanges), result.num_micro_batches
        )
    return found


@contextlib.contextmanager
def feeding(fill: Callable[[], None]) -> Any:
    thread = threading.Thread(target=fill, name="feeding")
    thread.start()
    try:
        yield
    finally:
        thread.join()


# Scoring ----------------------------------------------------------------------------------------


def scores(rank: int, size: int, wraps: list[str], samples: Samples) -> dict[str, list[Tensor]]:
    recipe = Recipe(layout=Packed(max_tokens=2 * LIMIT), topology=Topology(dp=size))
    found = {}
    for wrap in wraps:
        model, _ = wrapped(decoder(torch.float64), wrap, size)
        found[wrap] = compute_log_probs(
            model, samples, recipe, collective=Distributed(), collate=COLLATOR
        )
    return found


# Failing ----------------------------------------------------------------------------------------


def watched(
    rank: int, size: int, samples: Samples, who: int, fate: str, wrap: str = "ddp"
) -> list[str]:
    """Train under `Watch` until a rank raises or is killed in its forward, or all are done."""
    work = _work(samples)
    model, _ = wrapped(decoder(torch.float64), wrap, size)
    step = steps_of(Plan("planned", Packed(max_tokens=LIMIT), dp=size), work)[rank]
    calls = iter(range(10**9))

    def forward(model: Any, batch: Any) -> Tensor:
        if rank == who and next(calls) == 7:
            if fate == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fate == "stuck":
                time.sleep(600)
            if fate != "done":
                raise ValueError("what is this\nand this")
        return model(batch)

    runner = Runner(
        model=model, loss=cross_entropy(), collective=Distributed(), collate=COLLATOR,
        forward=forward,
    )  # fmt: skip
    # Only these wait for the timeout; others must not reach it on a loaded machine.
    timeout = 4.0 if fate in ("killed", "done") else 60.0
    try:
        with Watch(timeout=timeout, grace=2.0):
            for _ in range(5 if fate == "done" else 10**6):
                runner.run(step)
            if fate == "done" and rank != who:
                time.sleep(timeout + 1.0)  # the other rank ended earlier by more than the timeout
    except ValueError:
        if fate == "lingers":  # its error is recorded, but its connections stay open
            time.sleep(600)
        raise
    return [thread.name for thread in threading.enumerate()]


def without_collective(rank: int, size: int, samples: Samples) -> list[str]:
    """Errors of a runner without a collective, for a shared step and for a step of one rank."""
    errors = []
    for dp in (size, 1):
        step = steps_of(Plan("planned", Packed(max_tokens=LIMIT), dp=dp), _work(samples))[rank % dp]
        try:
            Runner(model=Decoder(SHAPE), loss=cross_entropy(), collate=COLLATOR).run(step)
            errors.append("")
        except EvenstepError as error:
            errors.append(str(error))
    return errors
