"""Job: the settings of a training run, complete, or an error with all that is missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evenstep.config.faults import FaultsError
from evenstep.config.runs import run_faults
from evenstep.config.settings import Settings
from evenstep.core.recipe import World
from evenstep.data.corpus import Corpus
from evenstep.errors import ConfigError, EvenstepError


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Settings with everything that a run needs: the corpus, the number of steps, the folder."""

    settings: Settings
    corpus: Corpus
    steps: int
    folder: Path


def job_of(settings: Settings, source: str = "", ranks: int | None = None) -> Job:
    """The job, or an error with all that is missing, does not exist or has no effect.

    `ranks` is the number of processes; None: as many as there are.

    >>> from evenstep import Packed, Recipe
    >>> job_of(Settings(recipe=Recipe(layout=Packed(max_tokens=8192))), "run.yaml")
    Traceback (most recent call last):
    evenstep.config.faults.FaultsError: run.yaml has 3 faults:
      (1) data is missing...
    """
    data, steps, out = settings.data, settings.stream.max_num_steps, settings.trainer.out
    faults = [*run_faults(settings), *_not_here(settings, ranks or World.detect().size)]
    if faults or data is None or not steps or not out:
        raise FaultsError(faults, source)
    return Job(settings=settings, corpus=data, steps=steps, folder=Path(out))


def _not_here(settings: Settings, size: int) -> list[str]:
    """What the settings name that this process does not have: files, processes, a device."""
    from evenstep.trainer.export import check_target  # imports torch
    from evenstep.trainer.logs import tracker_kinds, trackers_of
    from evenstep.trainer.ranks import device_of

    faults = [] if settings.data is None else settings.data.faults()
    path, dp = settings.model.path, settings.recipe.topology.dp
    if path is not None and not Path(path).exists():
        faults.append(f"model.path: {path} does not exist. Give a folder or a config.json.")
    if dp not in (1, size):
        faults.append(
            f"topology.dp is {dp}, but the number of processes is {size}. Remove dp, or start "
            f"torchrun --nproc-per-node {dp}."
        )
    try:
        tracker_kinds(trackers_of(settings.trainer))
    except ConfigError as error:
        faults.append(str(error))
    try:
        device_of(settings.trainer.device)
    except ConfigError as error:
        faults.append(f"trainer.{error}")
    try:
        if settings.trainer.save:
            check_target(Path(settings.trainer.save), path)
    except EvenstepError as error:
        faults.append(f"trainer.save: {error}")
    return faults
