"""The decoders whose layers are known, by their `model_type`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from evenstep.core.glimpse import glimpse
from evenstep.errors import ConfigError

Attention: TypeAlias = Literal["grouped", "latent"]
Groups: TypeAlias = Literal["given", "optional", "none"]
Windows: TypeAlias = Literal["none", "all", "upper"]
Experts: TypeAlias = Literal["none", "every", "after_dense", "stepped", "periodic", "interval"]
Mixer: TypeAlias = Literal["none", "delta", "mamba", "mamba2", "short_conv"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What a model type's name says and its fields do not.

    gated       three feed-forward matrices instead of two
    attention   grouped heads, or latent: low-rank queries, keys and values
    query_gate  the query projection also gives a gate of the attention's output
    own_dim     the field `head_dim` must be there; otherwise it may be hidden / heads
    groups      the field `num_key_value_heads` must be there, may be there, or has no effect
    windows     where layers slide if no layer types are given: in all layers, or from
                `max_window_layers` on
    period      if above 0: every `period`-th layer attends to all tokens, the others slide
    experts     which layers have experts
    mixer       what layers without attention do
    bare        layers are mixers alone, without feed-forward matrices
    """

    gated: bool = True
    attention: Attention = "grouped"
    query_gate: bool = False
    own_dim: bool = False
    groups: Groups = "given"
    windows: Windows = "none"
    period: int = 0
    experts: Experts = "none"
    mixer: Mixer = "none"
    bare: bool = False


def kind_of(model_type: str) -> Kind:
    """What is known of a model type; raises if nothing is.

    >>> kind_of("gpt2").gated
    False
    """
    if model_type not in KINDS:
        near = difflib.get_close_matches(model_type, KINDS, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"the layers of model_type {glimpse(model_type)} are not known. {hint}Give the shape "
            f"to Cost.of_model, or measured times to Cost.fit."
        )
    return KINDS[model_type]


def _each(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


_DELTA = Kind(mixer="delta", query_gate=True, own_dim=True)

KINDS: dict[str, Kind] = {
    **_each(Kind(), "olmo olmo2 granite stablelm cohere hunyuan_v1_dense smollm3"),
    **_each(Kind(groups="optional"), "llama"),
    **_each(Kind(own_dim=True), "gemma glm glm4 seed_oss helium ernie4_5"),
    **_each(Kind(windows="all"), "mistral ministral ministral3 phi3"),
    **_each(Kind(windows="upper"), "qwen2 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text"),
    **_each(Kind(windows="upper"), "qwen2_5_omni_text"),
    **_each(Kind(windows="upper", own_dim=True), "qwen3"),
    **_each(Kind(own_dim=True), "qwen3_vl_text"),
    **_each(Kind(period=2, own_dim=True), "gemma2"),
    **_each(Kind(period=6, own_dim=True), "gemma3_text"),
    **_each(Kind(period=4), "cohere2 olmo3 exaone4"),
    **_each(Kind(gated=False), "phi apertus arcee nemotron"),
    **_each(Kind(gated=False, windows="all"), "starcoder2"),
    **_each(Kind(gated=False, groups="none"), "gpt2 gpt_neox gptj"),
    **_each(Kind(windows="all", experts="every"), "mixtral phimoe"),
    **_each(Kind(experts="every"), "olmoe flex_olmo granitemoe granitemoeshared"),
    **_each(Kind(experts="every", own_dim=True), "minimax_m2"),
    **_each(Kind(experts="every", own_dim=True, period=2), "gpt_oss"),
    **_each(Kind(experts="stepped", windows="upper"), "qwen2_moe"),
    **_each(Kind(experts="stepped", windows="all"), "qwen3_moe qwen3_omni_moe_text"),
    **_each(Kind(experts="stepped", own_dim=True), "qwen3_vl_moe_text"),
    **_each(Kind(experts="after_dense"), "glm4_moe"),
    **_each(Kind(experts="after_dense", windows="upper"), "dots1"),
    **_each(Kind(experts="after_dense", attention="latent"), "deepseek_v2 deepseek_v3 kimi_k2"),
    **_each(Kind(experts="after_dense", attention="latent"), "glm4_moe_lite"),
    **_each(Kind(experts="interval"), "ernie4_5_moe"),
    "qwen3_next": replace(_DELTA, experts="stepped"),
    "qwen3_5_moe_text": replace(_DELTA, experts="every"),
    "qwen3_5_text": _DELTA,
    **_each(Kind(experts="periodic", mixer="mamba"), "jamba"),
    **_each(Kind(mixer="mamba2"), "bamba"),
    **_each(Kind(experts="every", mixer="mamba2"), "granitemoehybrid"),
    **_each(Kind(mixer="short_conv"), "lfm2"),
    **_each(Kind(mixer="mamba", bare=True), "mamba falcon_mamba"),
    **_each(Kind(mixer="mamba2", bare=True), "mamba2"),
}
