"""Workers of an RL job whose results are known, for dispatchers of any kind."""

from __future__ import annotations

import gc
import os
import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep import World
from evenstep.train import RolloutBatch, RolloutPlan


def token_values(ids: Tensor) -> Tensor:
    return 3.0 * ids + torch.arange(len(ids))


class RolloutWorker:
    """Computes numbers of the tokens of its rows. `delay` is the most seconds of a call."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.held: Any = None

    def pid(self) -> int:
        return os.getpid()

    def hold(self, value: Any) -> None:
        self.held = value

    def get_held(self) -> Any:
        return self.held

    def per_row(self, plan: RolloutPlan, batch: RolloutBatch, world: World) -> list[Tensor]:
        """A tensor per row, of the samples that the steps read."""
        (step,) = plan.steps(batch, world)
        samples = {id_: sample for _, found in step for id_, sample in found.items()}
        time.sleep(random.random() * self.delay)
        return [token_values(samples[row]["input_ids"]) for row in plan.rows_of(world.rank)]

    def end_to_end(self, plan: RolloutPlan, batch: RolloutBatch, world: World) -> Any:
        """The same as one array."""
        found = self.per_row(plan, batch, world)
        return np.concatenate([value.numpy() for value in found] or [np.zeros(0, np.float32)])

    def sums(
        self, plan: RolloutPlan, batch: RolloutBatch, world: World, *, times: Any = 1
    ) -> list[float]:
        """A number per row."""
        return [float(value.sum()) * times for value in self.per_row(plan, batch, world)]

    def rows_run(self, plan: RolloutPlan, batch: RolloutBatch, world: World) -> list[int]:
        time.sleep(random.random() * self.delay)
        return [int(row) for step in plan.steps(batch, world) for row in step.own_sample_ids]

    def fail(self, plan: RolloutPlan, batch: RolloutBatch, world: World) -> None:
        if world.rank == 1:
            raise KeyError("a key of this worker")

    def die(self, plan: RolloutPlan, batch: RolloutBatch, world: World, *, rank: int) -> int:
        if world.rank == rank:
            os._exit(1)
        return world.rank

    def hold_plan(self, plan: RolloutPlan, batch: RolloutBatch, world: World) -> set[str]:
        """Keeps the plan; returns what owns the memory of its arrays."""
        self.held = plan
        owners = set()
        for array in (plan.lengths, plan.epochs[0].lengths, plan.epochs[0].segments.sample):
            owner: Any = array
            while isinstance(owner, np.ndarray):
                owner = owner.base
            owners.add(type(owner).__name__)
        return owners

    def batches_in_memory(self) -> int:
        gc.collect()
        return sum(isinstance(found, RolloutBatch) for found in gc.get_objects())

    def call(self, other: Any) -> Any:
        """Calls another actor."""
        import ray

        return ray.get(other.pid.remote())


def expected_tokens(batch: RolloutBatch, pad: float = 0.0) -> Tensor:
    found = torch.full((len(batch), batch.width), pad)
    for row, (start, length) in enumerate(
        zip(batch.spans.starts.tolist(), batch.lengths.tolist(), strict=True)
    ):
        if length:
            found[row, start : start + length] = token_values(batch[row]["input_ids"])
    return found


def expected_sums(batch: RolloutBatch) -> Tensor:
    return expected_tokens(batch).sum(1)
