"""What a training run would do: its samples, the plan of its first steps, its memory."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np

from evenstep.core.models import ModelSize, named_config
from evenstep.core.plan import join_plans
from evenstep.core.recipe import Topology, World
from evenstep.report.simulation.memory import memory_of
from evenstep.train.collectives import Alone
from evenstep.trainer.job import Job
from evenstep.trainer.model import build, cost_of
from evenstep.trainer.ranks import Ranks, device_of
from evenstep.trainer.samples import recipe_for, stored_samples

_PLANNED = 20  # steps


def preview(job: Job) -> dict[str, float]:
    """Figures of a run that is not run: the samples are tokenized, the first steps planned for
    `topology.dp` ranks, and the memory of one of them estimated."""
    import torch

    settings, size = job.settings, job.settings.recipe.topology.dp
    device = device_of(settings.trainer.device)
    alone = Ranks(world=World(0, 1), device=device, collective=Alone(), slow=None, background=None)
    samples, held_out = stored_samples(job, alone)
    with torch.device("meta"):
        model = build(settings.model, job.corpus.vocabulary())
    stream = samples.stream(
        recipe_for(job, size, cost_of(model)),
        World(0, size),
        seed=settings.stream.seed,
        shuffle=settings.stream.shuffle,
        max_num_steps=job.steps,
        infinite_loop=True,
    )
    steps = list(islice(stream, _PLANNED))
    plans = [step.plan for step in steps if step.plan is not None]
    ends = np.cumsum([0, *(len(plan.lengths) for plan in plans)]).tolist()
    plan = join_plans(plans, [np.arange(*pair) for pair in pairwise(ends)])
    stats = plan.stats()
    lengths = samples.file.lengths_of(np.arange(len(samples.file)))
    micro_batches = max(len(step.micro_batches) for step in steps)
    slots = max(micro.slots for step in steps for micro in step.micro_batches)
    figures: dict[str, float] = {
        "samples": len(lengths),
        "held_out_samples": 0 if held_out is None else len(held_out.file),
        "tokens": int(lengths.sum()),
        "steps": job.steps,
        "epochs": job.steps * ends[-1] / len(plans) / len(lengths),
        "planned_steps": len(plans),
        "micro_batches_per_rank_and_step": micro_batches,
        "slots_of_the_largest_micro_batch": slots,
        "padding_percent": 100 * float(stats["padding_ratio"] or 0),
        "parameters": sum(each.numel() for each in model.parameters()),
        "trained_parameters": sum(e.numel() for e in model.parameters() if e.requires_grad),
    }
    if settings.model.path is not None:
        sharded = settings.trainer.parallel == "fsdp2"
        memory = memory_of(
            ModelSize.of(named_config(settings.model.path)),
            Topology(dp=size if sharded else 1),
            slots=slots,
            micro_batches=micro_batches,
            checkpointing=settings.trainer.checkpointing,
        )
        frozen = 1 - figures["trained_parameters"] / figures["parameters"]
        peak = memory.peak - frozen * (memory.optimizer + memory.summed_gradients)
        figures["memory_per_rank_gb"] = peak / 1e9
    return figures
