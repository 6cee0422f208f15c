"""The order of a decoder's layers: where it attends, and where it has experts."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from evenstep.core.glimpse import glimpse
from evenstep.core.model.config import ModelConfig
from evenstep.core.model.kinds import Kind
from evenstep.errors import ConfigError

Mixing: TypeAlias = Literal["full", "window", "mixer"]

_LONGEST = "max_position_embeddings"
_MIXING: dict[str, Mixing] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "linear_attention": "mixer",
    "mamba": "mixer",
    "conv": "mixer",
}


def mixing_of(config: ModelConfig, kind: Kind, layers: int) -> list[Mixing]:
    """How each layer mixes tokens.

    >>> from evenstep.core.model.kinds import kind_of
    >>> config = ModelConfig({"sliding_window": 512}, "config.json")
    >>> mixing_of(config, kind_of("gemma2"), 3)
    ['window', 'full', 'window']
    """
    if kind.bare:
        return ["mixer"] * layers
    if config.has("layer_types", "layers_block_type"):
        return _named(config, kind, layers)
    if kind.mixer != "none":
        attends = _attending(config, layers)
        return ["full" if layer in attends else "mixer" for layer in range(layers)]
    slides = _sliding(config, kind, layers)
    return ["window" if layer in slides else "full" for layer in range(layers)]


def _named(config: ModelConfig, kind: Kind, layers: int) -> list[Mixing]:
    names = _per_layer(config, layers, "layer_types", "layers_block_type")
    for name in names:
        known = isinstance(name, str) and name in _MIXING
        if not known or (_MIXING[name] == "mixer" and kind.mixer == "none"):
            raise ConfigError(
                f"layer_types in {config.where} has {glimpse(name)}, which is not known in "
                f"{config.model_type}. Give the shape to Cost.of_model, or measured times to "
                f"Cost.fit."
            )
    return [_MIXING[name] for name in names]


def _per_layer(config: ModelConfig, layers: int, *names: str) -> list[Any]:
    entries = config.entries(*names)
    if len(entries) != layers:
        raise ConfigError(
            f"{names[0]} in {config.where} has {len(entries)} entries, but there are {layers} "
            f"layers. Correct one of them."
        )
    return entries


def _attending(config: ModelConfig, layers: int) -> set[Any]:
    """The layers with attention in a hybrid model."""
    if config.has("attn_layer_indices", "full_attn_idxs"):
        return set(config.entries("attn_layer_indices", "full_attn_idxs"))
    if config.has("attn_layer_period"):
        offset = config.whole("attn_layer_offset", least=0)
        return set(range(offset, layers, config.whole("attn_layer_period")))
    every = config.whole("full_attention_interval")
    return set(range(every - 1, layers, every))


def _sliding(config: ModelConfig, kind: Kind, layers: int) -> set[int]:
    """The layers that slide if no layer types are given; with a period of 4, three of four do."""
    if window_of(config) == 0:
        return set()
    if kind.period:
        period = config.whole("sliding_window_pattern", default=kind.period)
        return {layer for layer in range(layers) if (layer + 1) % period}
    if kind.windows == "upper":
        return set(range(config.whole("max_window_layers", least=0), layers))
    return set(range(layers)) if kind.windows == "all" else set()


def window_of(config: ModelConfig) -> int:
    """The window of sliding layers; 0 if there is none, or if no sequence is longer."""
    if not config.truth("use_sliding_window", True):
        return 0
    window = config.whole("sliding_window", default=0, least=0)
    return 0 if config.has(_LONGEST) and window >= config.whole(_LONGEST) else window


def sparse_layers(config: ModelConfig, kind: Kind, layers: int) -> set[int]:
    """The layers with experts.

    >>> from evenstep.core.model.kinds import kind_of
    >>> config = ModelConfig({"first_k_dense_replace": 1}, "config.json")
    >>> sparse_layers(config, kind_of("deepseek_v3"), 3)
    {1, 2}
    """
    every = range(layers)
    if config.has("mlp_layer_types"):
        named = _per_layer(config, layers, "mlp_layer_types")
        return {layer for layer in every if named[layer] == "sparse"}
    match kind.experts:
        case "every":
            return set(every)
        case "after_dense":
            return _after_dense(config, layers)
        case "stepped":
            step = config.whole("decoder_sparse_step", default=1)
            return set(every[step - 1 :: step]) - set(config.entries("mlp_only_layers"))
        case "periodic":
            offset = config.whole("expert_layer_offset", least=0)
            return set(every[offset :: config.whole("expert_layer_period")])
        case "interval":
            first = config.whole("moe_layer_start_index", least=0)
            last = config.whole("moe_layer_end_index", least=-1)
            step = config.whole("moe_layer_interval")
            chosen = range(first, layers if last == -1 else min(last + 1, layers))
            return {layer for layer in chosen if (layer + 1) % step == 0}
        case _:
            return set()


def _after_dense(config: ModelConfig, layers: int) -> set[int]:
    """The layers from `first_k_dense_replace` on; of these every `moe_layer_freq`-th.

    The frequency may also be a list with 0 for a dense layer.
    """
    if isinstance(config.fields.get("moe_layer_freq"), list):
        named = _per_layer(config, layers, "moe_layer_freq")
        return {layer for layer in range(layers) if named[layer]}
    step = config.whole("moe_layer_freq", default=1)
    first = config.whole("first_k_dense_replace", least=0)
    return {layer for layer in range(first, layers) if layer % step == 0}
