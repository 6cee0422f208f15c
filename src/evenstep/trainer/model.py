"""The model of a run: built, adapted, wrapped for its ranks, and its optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenstep.config.settings import TrainerSettings
from evenstep.config.training import ModelSettings, OptimizerSettings
from evenstep.core.cost import GPUS, Cost
from evenstep.demo.decoder import Decoder, DecoderShape
from evenstep.errors import ConfigError
from evenstep.integrations.pretrained import add_adapters, load_model
from evenstep.train.compiling import compile_layers, layers_of
from evenstep.train.framework import Forward, forward_of, mark_plain
from evenstep.trainer.ranks import Ranks


def build(options: ModelSettings, vocab: int) -> nn.Module:
    """The model on the CPU, in float32. `vocab` is the number of token ids in the data.

    Under `torch.device("meta")` it has shapes, but no weights.
    """
    if options.path is None:
        sizes = {name: getattr(options, name) for name in ("hidden", "layers", "heads")}
        rest = {name: getattr(options, name) for name in ("kv_heads", "ffn")}
        _check_vocabulary(options.vocab or vocab, vocab, "model.vocab")
        return Decoder(DecoderShape(vocab=options.vocab or vocab, **sizes, **rest))
    model = load_model(options.path, attention=options.attention)
    _check_vocabulary(model.config.get_text_config().vocab_size, vocab, "the model's vocabulary")
    if options.lora is None:
        return model
    lora = options.lora
    return add_adapters(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)


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
    return DistributedDataParallel(model)


def forward_for(model: Any, settings: TrainerSettings, device: torch.device) -> Forward:
    """How the model is called: in mixed precision if asked for."""
    forward = forward_of(model)
    if settings.precision == "float32" or isinstance(model, FSDPModule):
        return forward  # fully_shard casts weights and inputs itself

    def cast(model: Any, batch: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return forward(model, batch)

    return mark_plain(cast)


def adamw(model: Any, options: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW over the weights that are trained; weights of one dimension do not decay."""
    trained = [each for each in model.parameters() if each.requires_grad]
    matrices = [each for each in trained if each.ndim > 1]
    vectors = [each for each in trained if each.ndim <= 1]
    decays = ((matrices, options.weight_decay), (vectors, 0.0))
    groups = [{"params": each, "weight_decay": decay} for each, decay in decays if each]
    return torch.optim.AdamW(
        groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True
    )


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOPs per second of a device in bfloat16; None if unknown or in another precision."""
    if device.type != "cuda" or precision != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return next((gpu.flops for gpu in GPUS.values() if gpu.name in name), None)


def _check_vocabulary(size: int, needed: int, what: str) -> None:
    if size < needed:
        raise ConfigError(
            f"{what} has {size} tokens but the data has ids up to {needed - 1}. Use the tokenizer "
            f"of the model."
        )


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
    policy = MixedPrecisionPolicy()
    if settings.precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers_of(model):
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)
