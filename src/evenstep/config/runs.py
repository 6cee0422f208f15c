"""What a training run asks of its settings, and which of them may change while it goes on.

out/settings.json   the settings of a run, as `Settings.to_dict` gives them
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from evenstep.config.nested import leaves
from evenstep.config.settings import Settings, TrainerSettings
from evenstep.config.training import LoraSettings, ModelSettings
from evenstep.core.models import ModelSize, read_model_config
from evenstep.core.plan import Plan
from evenstep.core.plan_file import replace_file
from evenstep.core.recipe import Topology
from evenstep.core.text import listed, short_repr
from evenstep.errors import ConfigError, FileError
from evenstep.report.simulation.memory import memory_of

_SETTINGS = "settings.json"
_MATTERS = (
    "steps", "overflow", "optimizer", "stream.seed", "stream.shuffle", "model", "data.format",
    "data.field", "data.validation", "trainer.job", "trainer.beta", "trainer.precision",
    "trainer.per_micro_batch_normalization",
)  # fmt: skip
"""Settings that the losses of a run depend on, by the beginnings of their names."""
_FREE = ("model.path", "model.attention")
"""Others below them: checkpoints and streams compare what is in the files themselves."""
_SIZES = ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn")
_CUTS = ("layout", "limits")  # matter too where they decide what is cut off or left out


def run_faults(settings: Settings) -> list[str]:
    """What a training run lacks, what does not go together in it, and what has no effect on it."""
    faults = {**_incomplete(settings), **_of_pairs(settings), **_without_effect(settings)}
    return [fault for fault, wrong in faults.items() if wrong]


def _incomplete(settings: Settings) -> dict[str, bool]:
    """What every run needs, and what the trainer cannot do."""
    recipe, trainer, path = settings.recipe, settings.trainer, settings.model.path
    faults = {
        "data is missing. Set data.paths to files, folders or globs.": settings.data is None,
        "stream.max_num_steps is missing. Set it to the steps of the whole run.": not (
            settings.stream.max_num_steps
        ),
        "trainer.out is missing. Set it to a folder.": not trainer.out,
        "trainer.save writes a Hugging Face model, but model.path is missing. Set it to a folder "
        "or a config.json, or remove trainer.save.": bool(trainer.save) and path is None,
        "trainer.save is trainer.out, the folder of the run itself. Name another folder.": (
            trainer.save is not None and Path(trainer.save) == Path(trainer.out or "")
        ),
        f"limits.columns has {listed(list(recipe.limits.columns))}, which the samples of the "
        "trainer do not have. Remove it; layout.max_tokens and limits.cost bound a micro-batch.": (
            bool(recipe.limits.columns)
        ),
    }
    for name, word in {"cp": "context", "tp": "tensor", "pp": "pipeline"}.items():
        fault = (
            f"topology.{name} must be 1: the trainer has no {word} parallelism. Use Runner in a "
            f"trainer that has."
        )
        faults[fault] = getattr(recipe.topology, name) > 1
    return faults


def _of_pairs(settings: Settings) -> dict[str, bool]:
    """What goes together with pairs only."""
    recipe, trainer, data = settings.recipe, settings.trainer, settings.data
    pairs, dpo = data is not None and data.format == "pairs", trainer.job == "dpo"
    return {
        "trainer.job is dpo, which trains on pairs. Set data.format to pairs, and give each row "
        "'chosen' and 'rejected'.": dpo and data is not None and not pairs,
        f"data.format is pairs, which {trainer.job} does not train on. Set trainer.job to dpo.": (
            pairs and not dpo
        ),
        f"overflow={recipe.overflow!r} would part the chats of a pair that does not fit. Set "
        "overflow to error or truncate.": dpo and recipe.overflow not in ("error", "truncate"),
        f"groups is {recipe.groups!r}, but dpo keeps the chats of a pair in one micro-batch. "
        "Remove it; where a pair does not fit, raise layout.max_tokens or shorten its chats.": (
            dpo and recipe.groups != "micro_batch"
        ),
        f"trainer.beta has no effect on {trainer.job}. Set trainer.job to dpo, or remove it.": (
            not dpo and trainer.beta != TrainerSettings().beta
        ),
    }


def _without_effect(settings: Settings) -> dict[str, bool]:
    """What would have no effect."""
    stream, model, trainer = settings.stream, settings.model, settings.trainer
    held_out = settings.data is not None and settings.data.validation is not None
    default = ModelSettings()
    sizes = [f"model.{name}" for name in _SIZES if getattr(model, name) != getattr(default, name)]
    return {
        "trainer.evaluate_every has no effect without held-out data. Set data.validation, or "
        "remove it.": trainer.evaluate_every is not None and not held_out,
        "trainer.max_skipped has no effect where a step that is not finite ends the run. Set "
        "trainer.on_nonfinite to skip, or remove it.": (
            trainer.on_nonfinite == "stop" and trainer.max_skipped != TrainerSettings().max_skipped
        ),
        "trainer.reduce_every has no effect on ddp. Set trainer.parallel to fsdp2, or remove it.": (
            trainer.parallel == "ddp" and trainer.reduce_every is not None
        ),
        "log_probs has no effect on training. Remove it.": settings.log_probs is not None,
        "stream.pool has no effect: the trainer tokenizes all samples first and plans whole "
        "steps. Remove it.": stream.pool is not None,
        "stream.share_prefixes has no effect: it is for rollouts, and the trainer packs whole "
        "samples. Remove it.": stream.share_prefixes,
        "second_work has no effect: the trainer reads text only. Remove it.": (
            settings.recipe.second_work is not None
        ),
        "model.attention has no effect on the example decoder. Set model.path, or remove it.": (
            model.path is None and model.attention != default.attention
        ),
        f"{listed(sizes)} would have no effect: the config of model.path has the sizes. Remove "
        "model.path or the sizes.": bool(sizes) and model.path is not None,
    }


def compare_settings(
    stored: Mapping[str, Any], settings: Settings
) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """(before and now of every setting that differs, the names of those that losses depend on).

    `stored` is what `Settings.to_dict` gave, from JSON.

    >>> from dataclasses import replace
    >>> from evenstep import Packed, Recipe
    >>> from evenstep.config import TrainerSettings
    >>> before = Settings(recipe=Recipe(layout=Packed(max_tokens=8192)))
    >>> now = replace(before, trainer=TrainerSettings(keep=3, precision="bfloat16"))
    >>> compare_settings(before.to_dict(), now)[1]
    ['trainer.precision']
    """
    then, now = leaves(json.loads(json.dumps(stored))), leaves(_stored(settings))
    changed = {
        name: (then.get(name), now.get(name))
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    }
    return changed, [name for name in changed if _matters(name, changed[name], now)]


def _matters(name: str, change: tuple[Any, Any], now: Mapping[str, Any]) -> bool:
    cuts = now.get("overflow") not in ("error", "alone")
    names = (*_MATTERS, *_CUTS) if cuts else _MATTERS
    if name.startswith(_FREE) or (name == "trainer.beta" and now["trainer.job"] != "dpo"):
        return False
    if name == "data.validation":  # held-out files do not change what is trained on
        return any(isinstance(value, float) for value in change)
    return any(name == each or name.startswith(f"{each}.") for each in names)


def peak_of_steps(
    settings: Settings, ranks: int, plans: Iterable[Plan], trained: float, scattered: bool
) -> float:
    """Bytes that steps of these plans take on a rank, as `evenstep tune` estimates them; 0 if the
    layers of the model are unknown. `trained` is the share of its weights that are."""
    sharded = settings.trainer.parallel == "fsdp2"
    try:
        size = ModelSize.of(read_model_config(settings.model.path).section("text"))
    except ConfigError:  # also without a path
        return 0.0
    sizes = [(plan.slots.max(initial=1), np.diff(plan.cell_offsets).max()) for plan in plans]
    slots, micro_batches = np.max(sizes, axis=0).tolist()
    return memory_of(
        size,
        Topology(dp=ranks if sharded else 1),
        slots=slots,
        micro_batches=micro_batches,
        checkpointing=settings.trainer.checkpointing,
        scattered=scattered and sharded,
        trained=trained,
    ).peak


# The settings of the run in a folder --------------------------------------------------------------


def changed_settings(folder: Path, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from those that the run in a folder began with, by name; those
    that its losses depend on are an error."""
    path = folder / _SETTINGS
    if not path.exists():  # a new run, or one of an earlier version
        return {}
    changed, refused = compare_settings(_read(path), settings)
    if refused:
        said = "; ".join(
            f"{name} was {short_repr(changed[name][0])}, is {short_repr(changed[name][1])}"
            for name in refused
        )
        raise ConfigError(
            f"{folder} holds a run with other settings, on which its losses depend: {said}. Set "
            f"them back, or set trainer.out to another folder; `evenstep export` writes the model "
            f"of this one, to begin from."
        )
    return changed


def store_settings(folder: Path, settings: Settings) -> None:
    """Remember the settings of a run in its folder."""
    text = json.dumps(_stored(settings), indent=1)
    replace_file(folder / _SETTINGS, text.encode())


def _stored(settings: Settings) -> dict[str, Any]:
    """Settings as JSON has them; paths that an export reads are absolute, for any directory."""
    values: dict[str, Any] = json.loads(json.dumps(settings.to_dict()))
    for section, name in (("model", "path"), ("data", "tokenizer")):
        if (values[section] or {}).get(name) is not None:
            values[section][name] = str(Path(values[section][name]).absolute())
    return values


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
