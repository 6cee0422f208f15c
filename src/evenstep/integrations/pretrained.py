"""Hugging Face models with all of their weights, and adapters, or an error that says why not."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep.core.text import listed
from evenstep.errors import ConfigError, FileError


def load_model(path: str | Path, *, attention: str | None = None) -> Any:
    """The causal language model in a folder that `save_pretrained` wrote, in float32 on the CPU.

    All weights of the folder are loaded, and tensors only; missing, unexpected and mis-shaped ones
    are errors. A `config.json` gives random weights; under `torch.device("meta")` there are none.
    `attention` is the model's attention implementation; None or "evenstep" is ours, if the model
    can call it.
    """
    try:
        from transformers.utils import logging
    except ImportError:
        raise ConfigError(
            'model.path needs transformers. Install it with pip install "evenstep[hf]".'
        ) from None
    from evenstep.integrations.hf_attention import NAME, use_attention

    logging.disable_progress_bar()  # every rank would draw one, in logs too
    path = Path(path)
    if not path.exists():
        raise FileError(
            f"model.path: {path} does not exist. Set it to a folder that save_pretrained wrote, or "
            f"to a config.json for random weights."
        )
    ours = attention in (None, NAME)
    chosen = {} if ours else {"attn_implementation": attention}
    stored = path.is_dir() and torch.get_default_device().type != "meta"
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would report is an error of ours
    try:
        model = _with_weights(path, chosen) if stored else _with_random_weights(path, chosen)
    finally:
        logging.set_verbosity(verbosity)
    if ours:
        with suppress(ConfigError):  # it keeps its own, and `choose_layout` warns if it must pad
            use_attention(model)
    return model


def _with_random_weights(path: Path, chosen: dict[str, str | None]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen)
    except (OSError, ValueError, KeyError) as error:
        raise _not_a_model(path, error) from None


def _with_weights(folder: Path, chosen: dict[str, str | None]) -> Any:
    """The model in a folder, with all of its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise _not_a_model(folder, error) from None
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise FileError(
            f"model.path: {folder} has no weights. Add them, or set model.path to its config.json "
            f"for random weights."
        )
    try:
        model, keys = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            weights_only=True,  # tensors only, if the file is a pickle
            ignore_mismatched_sizes=True,  # refused below, with the other faults
            output_loading_info=True,
            **chosen,
        )
    except pickle.UnpicklingError:
        raise FileError(
            f"model.path: the weights in {folder} cannot be read: a file is damaged, or holds "
            f"Python objects, which are not loaded. Load it where you trust it and save it as "
            f"safetensors, with save_pretrained."
        ) from None
    except Exception as error:  # of safetensors and torch, for damaged and missing files
        if "Unrecognized configuration class" in str(error):
            raise _not_a_model(folder, error) from None
        raise FileError(
            f"model.path: the weights in {folder} cannot be read ({_first_line(error)}). Copy "
            f"them again."
        ) from None
    # transformers leaves out what the class ignores, and has forgotten one constant.
    keys["unexpected_keys"] = {
        name for name in keys["unexpected_keys"] if not _is_constant(name, model)
    }
    _refuse_other_weights(folder, type(model).__name__, keys)
    return model


def _is_constant(name: str, model: nn.Module) -> bool:
    """Whether a name in a file is of no weight: the number that masked scores had in attention of
    earlier versions, or a buffer that the model computes."""
    if name.endswith((".attn.masked_bias", ".attention.masked_bias")):
        return True
    kept = model.state_dict().keys()
    return any(name == buffer and name not in kept for buffer, _ in model.named_buffers())


def _refuse_other_weights(folder: Path, kind: str, keys: Mapping[str, Any]) -> None:
    """Refuse weights that are missing, which would be random, or that the model does not have."""
    shapes = [
        f"{name} with shape {tuple(stored)}, expected {tuple(expected)}"
        for name, stored, expected in sorted(keys["mismatched_keys"])
    ]
    faults = []
    if keys["missing_keys"]:
        faults.append(f"lack {listed(sorted(keys['missing_keys']))}")
    if shapes:
        faults.append(f"have {listed(shapes)}")
    if keys["unexpected_keys"]:
        faults.append(f"have {listed(sorted(keys['unexpected_keys']))}, which {kind} does not have")
    if faults or keys["error_msgs"]:
        said = "; they ".join([*faults, *keys["error_msgs"]])
        raise FileError(
            f"model.path: the weights in {folder} {said}. Use the config.json that belongs to "
            f"them, or save the whole model with save_pretrained."
        )


def _not_a_model(path: Path, error: Exception) -> FileError:
    return FileError(
        f"model.path: {path} is not a causal language model ({_first_line(error)}). Use one that "
        f"AutoModelForCausalLM loads."
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def add_adapters(model: Any, *, rank: int, alpha: float, targets: Sequence[str] = ()) -> Any:
    """The model with low-rank adapters of peft on linear layers, and its own weights frozen.

    `targets` are the names of the layers; without any, all but the head.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError("model.lora needs peft. Install it with pip install peft.") from None
    names = [name for name, each in model.named_modules() if not any(each.children())]
    for target in targets:  # peft ignores one that matches no layer, if another does
        if not any(f".{name}".endswith(f".{target}") for name in names):
            known = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise ConfigError(
                f"model.lora.targets: the model has no layer {target!r}; it has {', '.join(known)}."
            )
    chosen: Any = list(targets) or "all-linear"
    options = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, task_type="CAUSAL_LM")
    try:
        return get_peft_model(model, options)
    except ValueError as error:  # a layer that cannot have an adapter
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"model.lora does not fit the model ({reason}).") from None


def merge_adapters(model: Any) -> Any:
    """The model that an adapted one was made of, with the adapters in its weights."""
    _untie(model.get_base_model())
    return model.merge_and_unload()


def _untie(model: Any) -> None:
    """Give the last layer a weight of its own, if it shares that of the embeddings and one of both
    has an adapter, which the other would get too when it is merged."""
    layers = [model.get_output_embeddings(), model.get_input_embeddings()]
    head, embeddings = (getattr(layer, "base_layer", layer) for layer in layers)
    adapted = head is not layers[0] or embeddings is not layers[1]
    if head is not None and adapted and head.weight is embeddings.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
