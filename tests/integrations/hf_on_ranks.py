"""What the processes of distributed tests of Hugging Face models run."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenstep import Packed, PlannedStream, Recipe, Topology, World
from evenstep.data import InMemory
from evenstep.tensors import cross_entropy
from evenstep.train import Distributed, Runner, compute_log_probs
from tests.integrations.models import llama
from tests.tensors.batches import samples_of

LENGTHS = [5, 3, 1, 4, 9, 2, 7, 6]
UNEVEN = [40, 20, 20]


def steps_and_scores(rank: int, size: int) -> dict[str, Any]:
    """The gradient of a step without a forward on each framework, and log-probs."""
    found: dict[str, Any] = {}
    recipe = Recipe(layout=Packed(max_tokens=10), topology=Topology(dp=size))
    samples = samples_of(LENGTHS)
    for name in ("plain", "ddp", "fsdp"):
        model = wrapped(name, size)
        (step,) = PlannedStream(InMemory(samples), recipe, world=World(rank, size))
        assert len(step) > 1
        Runner(model=model, loss=cross_entropy(), collective=Distributed()).run(step)
        found[name] = {
            key.removeprefix("module."): full(p.grad) for key, p in model.named_parameters()
        }
        scores = compute_log_probs(model, samples, recipe, collective=Distributed())
        found[f"{name} scores"] = [score.tolist() for score in scores]
    return found


def first_batch_packed_on_one_rank(rank: int, size: int) -> dict[str, Tensor]:
    """The gradient of a step in which one rank's only micro-batch is a single sample."""
    model = wrapped("fsdp", size)
    recipe = Recipe(layout=Packed(max_tokens=40), topology=Topology(dp=size))
    (step,) = PlannedStream(InMemory(samples_of(UNEVEN)), recipe, world=World(rank, size))
    Runner(model=model, loss=cross_entropy(), collective=Distributed()).run(step)
    return {key: full(p.grad) for key, p in model.named_parameters()}


def wrapped(name: str, size: int, double: bool = False) -> Any:
    model = llama("sdpa").double() if double else llama("sdpa")
    if name == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model) if name == "ddp" else model


def full(gradient: Any) -> Tensor:
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.detach().clone()


def gradients_in_head(rank: int, size: int, lengths: list[int]) -> dict[str, dict[str, Tensor]]:
    """The gradient of a step on each framework, computed in the model's last layer."""
    gradients = {}
    recipe = Recipe(layout=Packed(max_tokens=10), topology=Topology(dp=size))
    for name in ("plain", "ddp", "fsdp"):
        model = wrapped(name, size, double=True)
        stream = PlannedStream(InMemory(samples_of(lengths)), recipe, world=World(rank, size))
        runner = Runner(model=model, loss=cross_entropy(head="model"), collective=Distributed())
        for step in stream:
            runner.run(step)
        gradients[name] = {
            key.removeprefix("module."): full(p.grad) for key, p in model.named_parameters()
        }
    return gradients
