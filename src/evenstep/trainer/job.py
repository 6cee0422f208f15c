"""Job: the settings of a training run, complete, and what changed since the run began."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.config.changes import compare_settings
from evenstep.config.faults import FaultsError
from evenstep.config.settings import Settings
from evenstep.config.training import LoraSettings, ModelSettings
from evenstep.core.plan_file import replace_file
from evenstep.core.recipe import World
from evenstep.core.text import short_repr
from evenstep.data.corpus import Corpus
from evenstep.errors import ConfigError, FileError

_SETTINGS = "settings.json"


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
    faults = [*_faults(settings), *_not_here(settings, ranks or World.detect().size)]
    if faults or data is None or not steps or not out:
        raise FaultsError(faults, source)
    return Job(settings=settings, corpus=data, steps=steps, folder=Path(out))


def _faults(settings: Settings) -> list[str]:
    recipe, stream, trainer, data = (
        settings.recipe, settings.stream, settings.trainer, settings.data
    )  # fmt: skip
    pairs = data is not None and data.format == "pairs"
    parallel = {"cp": "context", "tp": "tensor", "pp": "pipeline"}
    faults = {
        "data is missing. Set data.paths to files, folders or globs.": data is None,
        "stream.max_num_steps is missing. Set it to the steps of the whole run.": not (
            stream.max_num_steps
        ),
        "trainer.out is missing. Set it to a folder.": not trainer.out,
        "trainer.job is dpo, which trains on pairs. Set data.format to pairs, and give each row "
        "'chosen' and 'rejected'.": trainer.job == "dpo" and data is not None and not pairs,
        f"data.format is pairs, which {trainer.job} does not train on. Set trainer.job to dpo.": (
            pairs and trainer.job != "dpo"
        ),
        "trainer.evaluate_every has no effect without held-out data. Set data.validation, or "
        "remove it.": trainer.evaluate_every is not None
        and (data is None or data.validation is None),
        "trainer.save writes a Hugging Face model, but model.path is missing. Set it to a folder "
        "or a config.json, or remove trainer.save.": bool(trainer.save)
        and settings.model.path is None,
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
        faults[fault] = getattr(recipe.topology, name) > 1
    return [fault for fault, wrong in faults.items() if wrong]


def _not_here(settings: Settings, size: int) -> list[str]:
    """What the settings name that this process does not have: files, processes, a device."""
    from evenstep.trainer.ranks import device_of  # imports torch

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
        device_of(settings.trainer.device)
    except ConfigError as error:
        faults.append(f"trainer.{error}")
    return faults


# The settings of the run in a folder --------------------------------------------------------------


def changed_settings(job: Job) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from those that the run in the folder began with, by name; those
    that its losses depend on are an error."""
    path = job.folder / _SETTINGS
    if not path.exists():  # a new run, or one of an earlier version
        return {}
    changed, refused = compare_settings(_read(path), job.settings)
    if refused:
        said = "; ".join(
            f"{name} was {short_repr(changed[name][0])}, is {short_repr(changed[name][1])}"
            for name in refused
        )
        raise ConfigError(
            f"{job.folder} holds a run with other settings, on which its losses depend: {said}. "
            f"Set them back, or set trainer.out to another folder; `evenstep export` writes the "
            f"model of this one, to begin from."
        )
    return changed


def store_settings(job: Job) -> None:
    """Remember the settings of a run, on rank 0."""
    text = json.dumps(job.settings.to_dict(), indent=1)
    replace_file(job.folder / _SETTINGS, text.encode())


def stored_model(folder: Path) -> tuple[ModelSettings, str | None, int]:
    """(the model, the folder of the tokenizer, the seed) of the run in a folder."""
    path = folder / _SETTINGS
    if not path.exists():
        raise FileError(
            f"{folder} has no {_SETTINGS}. Name the folder of a run of `evenstep train`; one of an "
            f"earlier version writes it when it is started again."
        )
    values = _read(path)
    lora = values["model"]["lora"]
    model = values["model"] | {"lora": None if lora is None else LoraSettings(**lora)}
    tokenizer = (values["data"] or {}).get("tokenizer")
    return ModelSettings(**model), tokenizer, values["stream"]["seed"]


def _read(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read ({error}). Restore it.") from None
    return values
