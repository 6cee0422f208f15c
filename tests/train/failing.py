"""Steps that fail on all ranks, then a step that works, as processes of distributed tests run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenstep import Packed
from evenstep.tensors import cross_entropy
from evenstep.train import Distributed, Runner
from tests.internals import Block
from tests.train.on_ranks import Samples, _work, decoder, wrapped
from tests.train.running import Plan, steps_of
from tests.train.steps import COLLATOR, LIMIT, Gradient, gradient_of

KINDS = ("forward", "model", "loss", "memory", "backward", "interrupt")


@dataclass(frozen=True)
class Failing:
    """How a step fails, and the micro-batch in which each rank fails."""

    kind: str
    at: tuple[int, ...] = (1, 1)
    known: bool = False
    older: bool = False
    """Whether fully_shard is reset as before torch 2.13."""


@dataclass(frozen=True)
class Failed:
    """What a failed step raised and left behind, and the gradient of the step after it."""

    error: str
    untouched: bool
    """Whether `.grad` and the parameters are those from before the step."""
    gradient: Gradient
    expected: Gradient
    """The gradient of the same step before anything failed."""


class _Break(torch.autograd.Function):  # type: ignore[misc]
    """The identity, whose backward raises."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("broken backward")


class _Trap:
    """Raises in one micro-batch of a step, in the chosen place."""

    def __init__(self) -> None:
        self.kind, self.at, self.count = "", 0, 0

    def arm(self, kind: str, at: int = 0) -> None:
        self.kind, self.at, self.count = kind, at, -1

    def hook(self, module: Any, inputs: Any, output: Any) -> Any:
        """After the last block: inside the model, between two of its modules."""
        if self._now("model"):
            raise ArithmeticError("broken model")
        return _Break.apply(output) if self._now("backward") else output

    def forward(self, model: Any, batch: Any) -> Tensor:
        self.count += 1
        if self._now("forward"):
            raise ArithmeticError("broken forward")
        outputs = model(batch)
        if self._now("memory"):
            raise torch.OutOfMemoryError("there is no more")
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        if self._now("loss"):
            raise ArithmeticError("broken loss")
        if self._now("interrupt"):
            raise KeyboardInterrupt
        return cross_entropy()(outputs, batch)

    def _now(self, kind: str) -> bool:
        return self.kind == kind and self.count == self.at


def _wrap(model: nn.Module, how: str, size: int) -> Any:
    ddp: dict[str, dict[str, Any]] = {
        "views": {"gradient_as_bucket_view": True},
        "buckets": {"bucket_cap_mb": 1e-4},
        "views+buckets": {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
    }
    if how in ddp:
        return DistributedDataParallel(model, **ddp[how])
    if not how.startswith("fsdp+") or "compile" in how or "checkpoint" in how:
        return wrapped(model, how, size)[0]
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (size,))}
    if "hybrid" in how:
        options["mesh"] = init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "shards"))
    if "kept" in how:
        options["reshard_after_forward"] = False
    if "mixed" in how:
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
        options["mp_policy"] = policy
    modules = [m for m in model.modules() if isinstance(m, Block)] if "flat" not in how else []
    for module in (*modules, model):
        fully_shard(module, **options)
    return model


def failed(
    rank: int, size: int, cases: dict[str, dict[str, Failing]], samples: Samples
) -> dict[str, dict[str, Failed]]:
    """By wrapper and case. The cases of a wrapper run one after the other on one model."""
    return {wrap: _failed(rank, size, wrap, those, samples) for wrap, those in cases.items()}


def _failed(
    rank: int, size: int, wrap: str, cases: dict[str, Failing], samples: Samples
) -> dict[str, Failed]:
    trap, model = _Trap(), decoder(torch.float64)
    model.blocks[-1].register_forward_hook(trap.hook)
    model = _wrap(model, wrap, size)
    runner = Runner(
        model=model, loss=trap.loss, collective=Distributed(), collate=COLLATOR,
        forward=trap.forward,
    )  # fmt: skip
    plan = Plan("planned", Packed(max_tokens=LIMIT), dp=size)
    steps = {known: steps_of(plan, _work(samples), known)[rank] for known in (False, True)}
    expected, found = {}, {}
    for known, step in steps.items():
        model.zero_grad()
        runner.run(step)
        expected[known] = gradient_of(model)
    for key, case in cases.items():
        if len(set(case.at)) > 1:
            runner.run(steps[case.known])  # DDP rebuilds its buckets in the second step
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        trap.arm(case.kind, case.at[rank])
        with _older_torch(case.older):
            error = _error_of(runner, steps[case.known])
        trap.arm("")
        same = [p is q for p, q in zip(parameters, model.parameters(), strict=True)]
        untouched = all(same) and bool((gradient_of(model).flat == 0.5).all())
        for parameter in model.parameters():
            parameter.grad = None
        distributed.barrier()
        runner.run(steps[case.known])
        found[key] = Failed(error, untouched, gradient_of(model), expected[case.known])
    return found


def _error_of(runner: Runner, step: Any) -> str:
    try:
        runner.run(step)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def _older_torch(older: bool) -> Iterator[None]:
    """Without `FSDPModule.reset_iter_state`, which torch has since 2.13."""
    if not (older and hasattr(FSDPModule, "reset_iter_state")):
        yield
        return
    reset = FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        yield
    finally:
        FSDPModule.reset_iter_state = reset
