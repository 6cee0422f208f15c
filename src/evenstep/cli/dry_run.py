"""What a training run would do: its samples, the plan of its first steps, its memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from evenstep.config.runs import peak_of_steps
from evenstep.core.plan import join_plans
from evenstep.core.recipe import World
from evenstep.train.collectives import Alone
from evenstep.trainer.job import Job
from evenstep.trainer.model import build, cost_of
from evenstep.trainer.ranks import Ranks, device_of
from evenstep.trainer.samples import recipe_for, stored_samples


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
    recipe = recipe_for(job, size, cost_of(model))
    plans = samples.first_plans(job, recipe, World(0, size))
    ends = np.cumsum([0, *(len(plan.lengths) for plan in plans)]).tolist()
    plan = join_plans(plans, [np.arange(*pair) for pair in pairwise(ends)])
    stats = plan.stats()
    lengths = samples.file.lengths_of(np.arange(len(samples.file)))
    counts = np.concatenate([np.diff(each.cell_offsets) for each in plans])
    figures: dict[str, float] = {
        "samples": len(lengths),
        "held_out_samples": 0 if held_out is None else len(held_out.file),
        "tokens": int(lengths.sum()),
        "steps": job.steps,
        "epochs": job.steps * ends[-1] / len(plans) / len(lengths),
        "planned_steps": len(plans),
        "micro_batches_per_rank_and_step": int(counts.max()),
        "slots_of_the_largest_micro_batch": int(plan.slots.max()),
        "padding_percent": 100 * float(stats["padding_ratio"] or 0),
        "parameters": sum(each.numel() for each in model.parameters()),
        "trained_parameters": sum(e.numel() for e in model.parameters() if e.requires_grad),
    }
    trained = figures["trained_parameters"] / figures["parameters"]
    peaks = [peak_of_steps(settings, size, plans, trained, each) for each in (False, True)]
    if peaks[0]:
        chosen = peaks[settings.trainer.reduce_every == "micro_batch"]
        figures["memory_per_rank_gb"] = chosen / 1e9
        if peaks[1] < chosen:
            figures["memory_per_rank_gb_if_reduced_every_micro_batch"] = peaks[1] / 1e9
    return figures
