"""FSDP2 on two processes: sharded weights, planned micro-batches, one exact gradient.

    torchrun --nproc-per-node 2 examples/fsdp2.py        15 seconds on two cores

`fully_shard` gathers weights at every micro-batch, so ranks wait for the slowest each time, and all
need equally many micro-batches. A plan gives both; every process computes it by itself. The tiny
Llama trains in padded batches of 4, then packed, on the same 32 samples per step. The first process
compares each loss with that of an unsharded model that runs the whole step alone.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from evenstep import Packed, Padded, PlannedStream, Recipe, Steps, Topology, World
from evenstep.data import InMemory
from evenstep.tensors import cross_entropy
from evenstep.train import Distributed, Runner, Watch

STEP = Steps(samples=32)
RECIPES = {
    "padded batches of 4": Recipe(layout=Padded(samples=4), steps=STEP, balance="none"),
    "packed": Recipe(layout=Packed(max_tokens=1024), steps=STEP),
}


def made_samples(count: int) -> list[dict[str, Any]]:
    """Sequences that count upwards in steps of 1 to 4, most of them short."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(8 + rng.exponential(60, count).astype(int), 400)
    starts, widths = rng.integers(0, 128, count), rng.integers(1, 5, count)
    return [
        {"input_ids": (start + width * np.arange(length)) % 128}
        for start, width, length in zip(starts, widths, lengths, strict=True)
    ]


def tiny_llama() -> Any:
    torch.manual_seed(0)  # the same weights on all ranks
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_attention_heads=4, **sizes))


def sharded_llama(size: int) -> Any:
    model, mesh = tiny_llama(), init_device_mesh("cpu", (size,))  # "cuda" on GPUs
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(runner: Runner, recipe: Recipe, world: World) -> tuple[list[float], list[float], float]:
    """The loss of each step, the imbalance that was planned, and the share of padding."""
    stream = PlannedStream(InMemory(made_samples(256)), recipe, world=world, seed=0)
    optimizer = torch.optim.AdamW(runner.model.parameters(), lr=3e-3)
    losses, planned = [], []
    for step in stream:
        result = runner.run(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss)  # over all ranks
        planned.append(result.planned_imbalance or 1.0)
    return losses, planned, float(stream.plan_epoch(0).stats()["padding_ratio"])


def main() -> None:
    torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
    ranks, rows = Distributed(), []
    topology = Topology(dp=ranks.size)
    with Watch():  # if a rank fails, all stop and name it
        for name, recipe in RECIPES.items():
            model = sharded_llama(ranks.size)
            runner = Runner(model=model, loss=cross_entropy(), collective=ranks)
            started = time.perf_counter()
            found = train(runner, replace(recipe, topology=topology), World.detect(topology))
            rows.append((name, time.perf_counter() - started, *found))
    if ranks.rank == 0:
        runner = Runner(model=tiny_llama(), loss=cross_entropy())
        expected, _, _ = train(runner, RECIPES["packed"], World(0, 1))
        print(f"{'':20}  padding  seconds  imbalance  last loss  differs from one process by")
        for name, seconds, losses, planned, padding in rows:
            apart = np.abs(np.subtract(losses, expected)).max()
            print(
                f"{name:20}  {padding:7.1%}  {seconds:7.1f}  {np.mean(planned):9.3f}  "
                f"{losses[-1]:9.3f}  {apart:27.1e}"
            )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
