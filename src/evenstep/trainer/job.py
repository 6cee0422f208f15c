"""Job: the settings of a training run, complete."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evenstep.config.faults import FaultsError
from evenstep.config.settings import Settings
from evenstep.core.recipe import World
from evenstep.data.corpus import Corpus
from evenstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Settings with everything that a run needs: the corpus, the number of steps, the folder."""

    settings: Settings
    corpus: Corpus
    steps: int
    folder: Path


def job_of(settings: Settings, source: str = "") -> Job:
    """The job, or an error with all that is missing, does not exist or has no effect.

    >>> from evenstep import Packed, Recipe
    >>> job_of(Settings(recipe=Recipe(layout=Packed(max_tokens=8192))), "run.yaml")
    Traceback (most recent call last):
    evenstep.config.faults.FaultsError: run.yaml has 3 faults:
      (1) data is missing...
    """
    data, steps, out = settings.data, settings.stream.max_num_steps, settings.trainer.out
    faults = [*_faults(settings), *_not_here(settings)]
    if faults or data is None or not steps or not out:
        raise FaultsError(faults, source)
    return Job(settings=settings, corpus=data, steps=steps, folder=Path(out))


def _faults(settings: Settings) -> list[str]:
    recipe, stream = settings.recipe, settings.stream
    parallel = {"cp": "context", "tp": "tensor", "pp": "pipeline"}
    found = {
        "data is missing. Set data.paths to files, folders or globs.": settings.data is None,
        "stream.max_num_steps is missing. Set it to the steps of the whole run.": not (
            stream.max_num_steps
        ),
        "trainer.out is missing. Set it to a folder.": not settings.trainer.out,
        "log_probs has no effect on training. Remove it.": settings.log_probs is not None,
        "stream.pool has no effect: the trainer tokenizes all samples first and plans whole "
        "steps. Remove it.": stream.pool is not None,
        "stream.share_prefixes has no effect: it is for rollouts, and the trainer packs whole "
        "samples. Remove it.": stream.share_prefixes,
        "second_work has no effect: the trainer reads text only. Remove it.": (
            recipe.second_work is not None
        ),
    }
    for name, word in parallel.items():
        fault = (
            f"topology.{name} must be 1: the trainer has no {word} parallelism. Use Runner in a "
            f"trainer that has."
        )
        found[fault] = getattr(recipe.topology, name) > 1
    return [fault for fault, wrong in found.items() if wrong]


def _not_here(settings: Settings) -> list[str]:
    """What the settings name that this process does not have: files, processes, a device."""
    from evenstep.trainer.ranks import device_of  # imports torch

    found = [] if settings.data is None else settings.data.faults()
    path, dp, size = settings.model.path, settings.recipe.topology.dp, World.detect().size
    if path is not None and not Path(path).exists():
        found.append(f"model.path: {path} does not exist. Give a folder or a config.json.")
    if dp not in (1, size):
        found.append(
            f"topology.dp is {dp}, but the number of processes is {size}. Remove dp, or start "
            f"torchrun --nproc-per-node {dp}."
        )
    try:
        device_of(settings.trainer.device)
    except ConfigError as error:
        found.append(f"trainer.{error}")
    return found
