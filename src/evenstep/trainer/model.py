"""The model of a run: built, adapted, and wrapped for its ranks."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep.config.settings import TrainerSettings
from evenstep.config.training import LoraSettings, ModelSettings
from evenstep.core.cost import Cost
from evenstep.core.text import listed
from evenstep.demo.decoder import Decoder, DecoderShape
from evenstep.errors import ConfigError, FileError
from evenstep.train.compiling import compile_layers, layers_of
from evenstep.train.framework import Forward, forward_of, mark_plain
from evenstep.trainer.ranks import Ranks


def build(options: ModelSettings, vocab: int) -> nn.Module:
    """The model on the CPU, in float32. `vocab` is the number of token ids in the data."""
    if options.path is None:
        sizes = {name: getattr(options, name) for name in ("hidden", "layers", "heads")}
        rest = {name: getattr(options, name) for name in ("kv_heads", "ffn")}
        _check_vocabulary(options.vocab or vocab, vocab, "model.vocab")
        return Decoder(DecoderShape(vocab=options.vocab or vocab, **sizes, **rest))
    model = _hugging_face(options)
    _check_vocabulary(model.config.get_text_config().vocab_size, vocab, "the model's vocabulary")
    return model if options.lora is None else _adapted(model, options.lora)


def cost_of(model: nn.Module) -> Cost | None:
    """Training FLOPs of a model that `build` made, from its shape; None if its layers are
    unknown."""
    if isinstance(model, Decoder):
        shape = model.shape
        names = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
        return Cost.of_model(**{name: getattr(shape, name) for name in names})
    try:
        return Cost.of_config(model.config)
    except ConfigError as error:
        warnings.warn(f"balancing by tokens only: {error}", stacklevel=2)
        return None


def wrapped(model: nn.Module, settings: TrainerSettings, ranks: Ranks) -> Any:
    """The model on its device, with checkpointing, compilation and what exchanges gradients."""
    model = model.to(ranks.device)
    layers = layers_of(model)
    if settings.checkpointing:
        _checkpoint(model, layers)
    if settings.compile:
        compile_layers(model)
    if ranks.slow is None:
        return model
    if settings.parallel == "fsdp2":
        return _sharded(model, settings)
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def forward_for(model: Any, settings: TrainerSettings, device: torch.device) -> Forward:
    """How the model is called: in mixed precision if asked for."""
    forward = forward_of(model)
    if settings.precision == "float32" or (settings.parallel == "fsdp2" and _is_sharded(model)):
        return forward  # fully_shard casts weights and inputs itself

    def cast(model: Any, batch: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return forward(model, batch)

    return mark_plain(cast)


def _hugging_face(options: ModelSettings) -> Any:
    try:
        from transformers.utils import logging
    except ImportError:
        raise ConfigError(
            'model.path needs transformers. Install it with pip install "evenstep[hf]".'
        ) from None
    from evenstep.integrations.hf_attention import NAME, use_attention

    logging.disable_progress_bar()  # every rank would draw one, in logs too
    path = Path(str(options.path))
    if not path.exists():
        raise FileError(
            f"model.path: {path} does not exist. Set it to a folder that save_pretrained wrote, or "
            f"to a config.json for random weights."
        )
    ours = options.attention == NAME
    chosen = {} if ours else {"attn_implementation": options.attention}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would report is an error of ours
    try:
        model = _with_weights(path, chosen) if path.is_dir() else _with_random_weights(path, chosen)
    finally:
        logging.set_verbosity(verbosity)
    if ours:
        with suppress(ConfigError):  # it keeps its own, and `choose_layout` warns if it must pad
            use_attention(model)
    return model


def _with_random_weights(path: Path, chosen: dict[str, str]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen)
    except (OSError, ValueError, KeyError) as error:
        raise _not_a_model(path, error) from None


def _with_weights(folder: Path, chosen: dict[str, str]) -> Any:
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


def _check_vocabulary(size: int, needed: int, what: str) -> None:
    if size < needed:
        raise ConfigError(
            f"{what} has {size} tokens but the data has ids up to {needed - 1}. Use the tokenizer "
            f"of the model."
        )


def _adapted(model: Any, lora: LoraSettings) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError("model.lora needs peft. Install it with pip install peft.") from None
    names = [name for name, each in model.named_modules() if not any(each.children())]
    for target in lora.targets:  # peft ignores one that matches no layer, if another does
        if not any(f".{name}".endswith(f".{target}") for name in names):
            known = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise ConfigError(
                f"model.lora.targets: the model has no layer {target!r}; it has {', '.join(known)}."
            )
    targets: Any = list(lora.targets) or "all-linear"
    options = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        return get_peft_model(model, options)
    except ValueError as error:  # a layer that cannot have an adapter
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"model.lora does not fit the model ({reason}).") from None


def _checkpoint(model: Any, layers: list[Any]) -> None:
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if hasattr(model, "enable_input_require_grads"):
            model.enable_input_require_grads()  # frozen embeddings would end the graph
        return
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    chosen = set(map(id, layers))
    wrapper.apply_activation_checkpointing(model, check_fn=lambda each: id(each) in chosen)


def _sharded(model: Any, settings: TrainerSettings) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if settings.precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers_of(model):
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _is_sharded(model: Any) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)
