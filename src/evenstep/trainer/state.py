"""State: the model, the optimizer and the samples of a run, ready for the next step."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from evenstep.config.training import OptimizerSettings
from evenstep.core.cost import Cost
from evenstep.core.recipe import Recipe
from evenstep.data.planned import PlannedStream
from evenstep.data.token_file import TokenFile
from evenstep.errors import ConfigError, EvenstepError, FileError
from evenstep.tensors.losses import cross_entropy
from evenstep.train.runner import Runner
from evenstep.trainer.checkpoints import Checkpoints, Place
from evenstep.trainer.job import Job
from evenstep.trainer.model import build, cost_of, forward_for, wrapped
from evenstep.trainer.peaks import peak_flops
from evenstep.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True)
class State:
    """What a run trains with, on this rank."""

    model: Any
    optimizer: torch.optim.Optimizer
    runner: Runner
    stream: PlannedStream
    place: Place
    checkpoints: Checkpoints


def prepared(job: Job, ranks: Ranks) -> State:
    """Read the data, build the model, and load the newest checkpoint."""
    settings, corpus = job.settings, tokenized(job, ranks)
    torch.manual_seed(settings.stream.seed)
    bare = build(settings.model, job.corpus.vocabulary())
    cost = cost_of(bare)
    recipe = recipe_for(job, ranks, bare, cost, corpus)
    model = wrapped(bare, settings.trainer, ranks)
    optimizer = adamw(model, settings.optimizer)
    checkpoints = Checkpoints(job.folder / "checkpoints", settings.trainer.keep, ranks)
    torch.manual_seed(settings.stream.seed + 1 + ranks.world.rank)  # dropout differs between ranks
    place = checkpoints.resume(model, optimizer, settings.trainer.fall_back)
    if place.step > job.steps:
        raise ConfigError(
            f"stream.max_num_steps is {job.steps}, but {place.step} steps are done in "
            f"{job.folder}. Raise it, or set trainer.out to another folder."
        )
    stream = PlannedStream(
        corpus,
        recipe,
        world=ranks.world,
        seed=settings.stream.seed,
        shuffle=settings.stream.shuffle,
        max_num_steps=job.steps,
        infinite_loop=True,
    )
    if place.cursor is not None:
        stream.load_state_dict(place.cursor)
    runner = Runner(
        model=model,
        loss=cross_entropy(),
        mode="per_micro_batch" if settings.trainer.per_micro_batch_normalization else None,
        collective=ranks.collective,
        forward=forward_for(model, settings.trainer, ranks.device),
        device=ranks.device,
        cost=cost,
        on_nonfinite="skip" if settings.trainer.on_nonfinite == "skip" else "raise",
        peak_flops=peak_flops(ranks.device, settings.trainer.precision),
    )
    return State(model, optimizer, runner, stream, place, checkpoints)


def tokenized(job: Job, ranks: Ranks) -> TokenFile:
    """The samples as tokens. Rank 0 writes them; the others wait."""
    path = job.folder / "data.tokens"
    failure: EvenstepError | None = None
    if ranks.first:
        try:
            job.corpus.stored(path, reporter())
        except OSError as error:
            failure = FileError(f"{job.folder} cannot be written ({error.strerror or error}).")
        except EvenstepError as error:
            failure = error
    ranks.agree(failure)
    return job.corpus.stored(path)


def reporter() -> Any:
    """Progress of tokenizing on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return None

    def report(done: int, total: int) -> None:
        sys.stderr.write(f"\rtokenizing {done:,} of {total:,}")
        sys.stderr.flush()

    return report


def recipe_for(job: Job, ranks: Ranks, model: Any, cost: Cost | None, corpus: TokenFile) -> Recipe:
    """The recipe with the number of ranks and, unless given, the model's cost; padded if the model
    cannot pack."""
    settings, size = job.settings, ranks.world.size
    recipe = settings.recipe
    changes: dict[str, Any] = {"topology": replace(recipe.topology, dp=size)}
    if cost is not None and recipe.cost == Cost():
        changes["cost"] = cost
    if settings.trainer.parallel == "ddp" or size == 1:
        changes["sync_every"] = "step"
    if settings.model.path is not None:
        from evenstep.integrations.huggingface import choose_layout

        longest = int(corpus.lengths_of(np.arange(len(corpus))).max())
        changes["layout"] = choose_layout(model, recipe.layout, longest=longest)
    return replace(recipe, **changes)


def adamw(model: Any, options: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW over the weights that are trained; weights of one dimension do not decay."""
    trained = [each for each in model.parameters() if each.requires_grad]
    matrices = [each for each in trained if each.ndim > 1]
    vectors = [each for each in trained if each.ndim <= 1]
    decays = ((matrices, options.weight_decay), (vectors, 0.0))
    groups = [{"params": each, "weight_decay": decay} for each, decay in decays if each]
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
