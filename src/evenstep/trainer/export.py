"""export_model: a checkpoint of a run -> a folder that `from_pretrained` reads."""

from __future__ import annotations

import shutil
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from evenstep.config.runs import stored_model
from evenstep.data.manifest import DamagedError
from evenstep.errors import ConfigError, FileError
from evenstep.integrations.pretrained import merge_adapters
from evenstep.trainer.checkpoints import complete, loading, read_place, stored, verify
from evenstep.trainer.model import build

_REMEDY = "A run that goes on removes old ones: export again, or name another with --checkpoint."


def export_model(
    run: Path, out: Path, *, checkpoint: str | None = None, adapters: bool = False
) -> Path:
    """Write the model of a run, its tokenizer and its generation config to a folder.

    Any checkpoint can be exported by one process, whatever number of ranks wrote it; the model is
    in memory once. Weights have the precision that the model's own config names, or float32.

    checkpoint  its name, such as step-000120, or best; None: the newest
    adapters    with LoRA: only the adapters, without merging them into the model

        export_model(Path("runs/first"), Path("models/first"))
    """
    options, tokenizer, seed = stored_model(run)
    if options.path is None:
        raise ConfigError(
            f"{run} trained the example decoder, which is no Hugging Face model. Set model.path to "
            f"the config.json of one."
        )
    if adapters and (options.lora is None or Path(options.path).is_file()):
        why = "model.lora was not set" if options.lora is None else "model.path has no weights"
        raise ConfigError(f"{run} has no adapters to use alone: {why}. Export the whole model.")
    if lost := [each for each in (options.path, tokenizer) if each and not Path(each).exists()]:
        raise FileError(f"{lost[0]}, which {run} began with, does not exist. Restore it.")
    check_target(out, options.path)
    path = _checkpoint_of(run, checkpoint)
    try:
        verify(path)
    except DamagedError as error:
        raise DamagedError(f"{error}. Name another with --checkpoint.") from None
    names, dtype = stored(path, "model.").keys(), _dtype_of(Path(options.path))
    with torch.device("meta"):
        model: Any = build(replace(options, lora=None), 0)
    if options.lora is None and names >= model.state_dict().keys():
        model = model.to(dtype).to_empty(device="cpu")
        model.tie_weights()
    else:  # what is not trained is not in checkpoints; random weights are those of the run
        torch.manual_seed(seed)
        model = build(options, 0)
    _load(path, names, model)
    model.eval()
    if not adapters:
        model = (model if options.lora is None else merge_adapters(model)).to(dtype)
    out = out.resolve()  # behind a link
    beside = out.with_name(f".{out.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(beside)
        _copy_tokenizer(tokenizer, beside)
        if out.exists():
            shutil.rmtree(out)
        beside.rename(out)
    except OSError as error:
        raise FileError(f"{out} cannot be written ({error.strerror or error}).") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return path


def _checkpoint_of(run: Path, name: str | None) -> Path:
    paths = {path.name: path for path in complete(run / "checkpoints")}
    if not paths:
        raise FileError(f"{run} has no checkpoint. Train at least until trainer.save_every.")
    newest = list(paths.values())[-1]
    if name is None:
        return newest
    if name == "best":
        best = read_place(newest).best
        if best is None:
            raise ConfigError(f"{run} has no best checkpoint: data.validation was not set.")
        name = f"step-{best[0]:06d}"
    if name not in paths:
        raise ConfigError(f"{run} has no checkpoint {name!r}; it has {', '.join(paths)}.")
    return paths[name]


def _load(path: Path, names: Set[str], model: Any) -> None:
    """Read the trained weights of a checkpoint into the model."""
    weights = {name: each for name, each in model.state_dict().items() if name in names}
    if missing := len(names) - len(weights):
        raise FileError(
            f"{path} has {missing} weights that the model lacks. Set model.path of the run to the "
            f"model that it trained."
        )
    with loading(path, _REMEDY):
        dcp.load({"model": weights}, checkpoint_id=path, no_dist=True)


def _dtype_of(path: Path) -> torch.dtype:
    """The precision that the config of a model names; float32 if it names none."""
    from transformers import AutoConfig

    dtype = getattr(AutoConfig.from_pretrained(path, local_files_only=True), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _copy_tokenizer(tokenizer: str | None, folder: Path) -> None:
    """Save the tokenizer, and end answers where it ends them unless the model says otherwise."""
    if tokenizer is None:
        return
    from transformers import AutoTokenizer, GenerationConfig

    loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    loaded.save_pretrained(folder)
    if (folder / "adapter_config.json").exists():
        return
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        generation = GenerationConfig()
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        if getattr(generation, name) is None:
            setattr(generation, name, getattr(loaded, name))
    generation.save_pretrained(folder)


def check_target(out: Path, model: str | None) -> None:
    """Refuse to replace anything but an earlier export, or the model that a run began with."""
    if out.resolve() == Path.cwd():
        raise ConfigError(f"{out} is the working directory, which is not replaced. Name another.")
    if model is not None and out.resolve() in (Path(model).resolve(), Path(model).resolve().parent):
        raise ConfigError(f"{out} holds the model that the run began with. Name another folder.")
    if not out.exists():
        return
    inside = {path.name: path.is_dir() for path in out.iterdir()} if out.is_dir() else {"": True}
    inside.pop("additional_chat_templates", None)
    known = any(name in inside for name in ("config.json", "adapter_config.json"))
    if inside and (not known or any(inside.values())):
        raise FileError(f"{out} exists and is not an exported model. Name another folder.")
