"""Planned cost and measured time of the micro-batches of all ranks."""

from __future__ import annotations

import torch

from evenstep.core.recipe import World
from evenstep.train.collectives import Collective
from evenstep.train.result import StepResult


def gathered(result: StepResult, world: World, collective: Collective) -> dict[str, object]:
    """What a log keeps of a step: planned cost and busy seconds of every micro-batch, as lists of
    ranks × micro-batches. Every rank calls it; all have equally many micro-batches."""
    own = torch.tensor([result.costs or [0.0] * len(result.busy), result.busy], dtype=torch.float64)
    whole = torch.zeros((world.size, *own.shape), dtype=torch.float64)
    whole[world.rank] = own
    costs, busy = collective.all_reduce_sum(whole).cpu().unbind(1)
    return {"micro_batches/cost": costs.tolist(), "micro_batches/busy": busy.tolist()}
