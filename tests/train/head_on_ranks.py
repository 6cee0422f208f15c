"""Models that return hidden states, wrapped and run by the processes of a test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenstep import Packed
from evenstep.demo import Decoder
from evenstep.errors import EvenstepError
from evenstep.tensors import Head, cross_entropy
from evenstep.train import Distributed, Runner
from tests.internals import rotation
from tests.train.on_ranks import Samples, decoder, wrapped
from tests.train.running import Plan, steps_of
from tests.train.steps import COLLATOR, LIMIT, SHAPE, Gradient, Work, gradient_of


class Headless(Decoder):
    """A decoder that returns hidden states; its head is used by the loss."""

    def forward(self, batch: Any) -> Tensor:
        x = self.embed(batch.tokens)
        turn = rotation(batch.position_ids, self.shape)
        for block in self.blocks:
            x = block(x, turn, batch)
        return self.norm(x)


def headless() -> Headless:
    torch.manual_seed(0)
    model = Headless(SHAPE)
    model.double()
    return model


def run_headless(rank: int, size: int, samples: Samples) -> dict[str, tuple[float, Gradient] | str]:
    """(loss, gradient) of a step for each way to wrap, or the error."""
    no_plan: Any = None
    plan = Plan("planned", Packed(max_tokens=LIMIT), dp=size)
    step = steps_of(plan, Work(no_plan, samples))[rank]
    found: dict[str, tuple[float, Gradient] | str] = {}
    for how in ("plain", "ddp", "fsdp", "sharded head"):
        model = headless()
        head = model.head
        if how == "sharded head":
            fully_shard(head, mesh=init_device_mesh("cpu", (size,)))
        whole, _ = wrapped(model, "fsdp" if how == "sharded head" else how, size)
        ranks = Distributed()
        loss = cross_entropy(head=Head(head, chunk=3))
        runner = Runner(model=whole, loss=loss, collective=ranks, collate=COLLATOR)
        try:
            result = runner.run(step).reduce(ranks)
            found[how] = (result.loss, gradient_of(whole))
        except EvenstepError as error:
            found[how] = str(error)
    return found


WRAPPERS = (
    "plain",
    "ddp",
    "ddp, unused parameters",
    "fsdp",
    "fsdp, root alone",
    "fsdp, head by itself",
    "fsdp, head by itself, kept whole",
    "fsdp, tied",
    "ddp, tied",
    "fsdp + checkpoint",
)


def run_wrapped(rank: int, size: int, samples: Samples, how: str) -> tuple[float, Gradient, int]:
    """(loss, gradient, micro-batches) of the second of two equal steps, computed in the head."""
    no_plan: Any = None
    plan = Plan("planned", Packed(max_tokens=LIMIT), dp=size)
    step = steps_of(plan, Work(no_plan, samples))[rank]
    model: Any = decoder(torch.float64)
    if "tied" in how:
        model.head.weight = model.embed.weight
    if "by itself" in how:
        mesh = init_device_mesh("cpu", (size,))
        fully_shard(model.head, mesh=mesh, reshard_after_forward="kept" not in how)
    if how == "fsdp, root alone":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif "unused" in how:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        model, _ = wrapped(model, how, size)
    ranks = Distributed()
    loss = cross_entropy(head="model")
    runner = Runner(model=model, loss=loss, collective=ranks, collate=COLLATOR)
    for _ in range(2):
        model.zero_grad()
        result = runner.run(step).reduce(ranks)
    return result.loss, gradient_of(model), result.num_micro_batches
