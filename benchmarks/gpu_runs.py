"""Measured steps of a Hugging Face model, set up as the trainer does: FSDP2, bfloat16, AdamW."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from evenstep import Packed, Plan, PlannedStream, Recipe, Steps
from evenstep.config.settings import TrainerSettings
from evenstep.config.training import OptimizerSettings
from evenstep.core.models import PRESETS
from evenstep.data import InMemory
from evenstep.integrations import hf_attention  # noqa: F401  registers "evenstep"
from evenstep.tensors.losses import cross_entropy
from evenstep.train.result import StepResult
from evenstep.train.runner import Runner
from evenstep.trainer.model import adamw, forward_for, wrapped
from evenstep.trainer.ranks import Ranks, joined

WARM, TIMED = 2, 3  # steps


@dataclass(frozen=True, slots=True)
class Case:
    """A model by name, the slots of a micro-batch, and whether activations are recomputed."""

    model: str
    budget: int
    checkpointing: bool = False
    waves: int = 2
    """Micro-batches per step."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a case took: seconds of a step, and bytes on the device."""

    plans: list[Plan]
    busy: list[list[float]]
    step: float
    update: float
    resident: int
    peak: int
    update_peak: int
    parameters: int


@contextmanager
def one_rank(device: str) -> Iterator[Ranks]:
    """A process group of this process alone, as torchrun would start it."""
    about = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(about | {"MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "benchmark"})
    with joined(device) as ranks:
        yield ranks


def recipe_of(budget: int, waves: int) -> Recipe:
    """Packed micro-batches of at most `budget` slots."""
    return Recipe(layout=Packed(max_tokens=budget), steps=Steps(micro_batches=waves))


def measure(case: Case, ranks: Ranks, shape: dict[str, Any] | None = None) -> Measured:
    """Run a few steps of a case."""
    device = ranks.device
    config = transformers.AutoConfig.for_model(**(shape or PRESETS[case.model]))
    source = corpus(case, config.vocab_size)
    settings = TrainerSettings(
        parallel="fsdp2", precision="bfloat16", checkpointing=case.checkpointing
    )
    torch.manual_seed(0)
    with torch.device(device):
        bare = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="evenstep"
        )
    count = sum(each.numel() for each in bare.parameters())
    model = wrapped(bare.train(), settings, ranks)
    optimizer = adamw(model, OptimizerSettings())
    runner = Runner(
        model=model,
        loss=cross_entropy(),
        collective=ranks.collective,
        forward=forward_for(model, settings, device),
        device=device,
    )
    recipe = recipe_of(case.budget, case.waves)
    stream = PlannedStream(source, recipe, max_num_steps=WARM + TIMED, infinite_loop=True)
    steps, plans, found = list(stream), [], []
    for step in steps:
        plans.append(step.plan)
        found.append(_step(runner, optimizer, step, device))
    del runner, optimizer, model, bare
    free(device)
    timed = found[WARM:]
    return Measured(
        plans=[plan for plan in plans[WARM:] if plan is not None],
        busy=[list(each[0].busy) for each in timed],
        step=statistics.median(each[1] + each[2] for each in timed),
        update=statistics.median(each[2] for each in timed),
        resident=timed[-1][3],
        peak=max(each[4] for each in timed),
        update_peak=max(each[5] for each in timed),
        parameters=count,
    )


def _step(
    runner: Runner, optimizer: torch.optim.Optimizer, step: Any, device: torch.device
) -> tuple[StepResult, float, float, int, int, int]:
    resident = _memory(device, reset=True)[0]
    begin = time.perf_counter()
    result = runner.run(step).reduce(runner.collective)
    _wait(device)
    ran, peak = time.perf_counter(), _memory(device, reset=True)[1]
    torch.nn.utils.clip_grad_norm_(runner.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    _wait(device)
    ended = time.perf_counter()
    return result, ran - begin, ended - ran, resident, peak, _memory(device, reset=True)[1]


def corpus(case: Case, vocab: int) -> InMemory:
    """Samples of log-normal lengths, mean about 1,200, none longer than half of the budget."""
    rng = np.random.default_rng(0)
    count = max(8, (WARM + TIMED + 1) * case.waves * case.budget // 700)
    drawn = np.exp(rng.normal(6.6, 0.9, count)).astype(int)
    lengths = drawn.clip(16, min(4096, case.budget // 2))
    return InMemory([{"input_ids": rng.integers(0, vocab, n)} for n in lengths])


def free(device: torch.device) -> None:
    """Give memory back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _memory(device: torch.device, reset: bool) -> tuple[int, int]:
    """(bytes allocated now, most bytes since the last reset)."""
    if device.type != "cuda":
        return 0, 0
    found = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
