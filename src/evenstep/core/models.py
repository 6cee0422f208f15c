"""The FLOPs and bytes of models, from their configurations."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from evenstep.core.model_config import ModelConfig
from evenstep.core.ragged import divided_up, rounded_up
from evenstep.core.text import short_repr, whole_number
from evenstep.errors import ConfigError

# Work ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Multiply-adds of one forward pass.

    weights   per token, in matrices: the number of weights that a token passes through
    pairs     per squared length, where tokens attend to all others or to all before them
    nearby    per token, where they attend within a window, or update a state

    >>> Work(weights=3) + Work(weights=4, pairs=1)
    Work(weights=7, pairs=1, nearby=0)
    """

    weights: float = 0
    pairs: float = 0
    nearby: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            weights=self.weights + other.weights,
            pairs=self.pairs + other.pairs,
            nearby=self.nearby + other.nearby,
        )


# The decoders whose layers are known, by their `model_type` ---------------------------------------

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
            f"the layers of model_type {short_repr(model_type)} are not known. {hint}Give the "
            f"shape to Cost.of_model, or measured times to Cost.fit."
        )
    return KINDS[model_type]


def _kinds(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


_DELTA = Kind(mixer="delta", query_gate=True, own_dim=True)

KINDS: dict[str, Kind] = {
    **_kinds(Kind(), "olmo olmo2 granite stablelm cohere hunyuan_v1_dense smollm3"),
    **_kinds(Kind(groups="optional"), "llama"),
    **_kinds(Kind(own_dim=True), "gemma glm glm4 seed_oss helium ernie4_5"),
    **_kinds(Kind(windows="all"), "mistral ministral ministral3 phi3"),
    **_kinds(Kind(windows="upper"), "qwen2 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text"),
    **_kinds(Kind(windows="upper"), "qwen2_5_omni_text"),
    **_kinds(Kind(windows="upper", own_dim=True), "qwen3"),
    **_kinds(Kind(own_dim=True), "qwen3_vl_text"),
    **_kinds(Kind(period=2, own_dim=True), "gemma2"),
    **_kinds(Kind(period=6, own_dim=True), "gemma3_text"),
    **_kinds(Kind(period=4), "cohere2 olmo3 exaone4"),
    **_kinds(Kind(gated=False), "phi apertus arcee nemotron"),
    **_kinds(Kind(gated=False, windows="all"), "starcoder2"),
    **_kinds(Kind(gated=False, groups="none"), "gpt2 gpt_neox gptj"),
    **_kinds(Kind(windows="all", experts="every"), "mixtral phimoe"),
    **_kinds(Kind(experts="every"), "olmoe flex_olmo granitemoe granitemoeshared"),
    **_kinds(Kind(experts="every", own_dim=True), "minimax_m2"),
    **_kinds(Kind(experts="every", own_dim=True, period=2), "gpt_oss"),
    **_kinds(Kind(experts="stepped", windows="upper"), "qwen2_moe"),
    **_kinds(Kind(experts="stepped", windows="all"), "qwen3_moe qwen3_omni_moe_text"),
    **_kinds(Kind(experts="stepped", own_dim=True), "qwen3_vl_moe_text"),
    **_kinds(Kind(experts="after_dense"), "glm4_moe"),
    **_kinds(Kind(experts="after_dense", windows="upper"), "dots1"),
    **_kinds(Kind(experts="after_dense", attention="latent"), "deepseek_v2 deepseek_v3 kimi_k2"),
    **_kinds(Kind(experts="after_dense", attention="latent"), "glm4_moe_lite"),
    **_kinds(Kind(experts="interval"), "ernie4_5_moe"),
    "qwen3_next": replace(_DELTA, experts="stepped"),
    "qwen3_5_moe_text": replace(_DELTA, experts="every"),
    "qwen3_5_text": _DELTA,
    **_kinds(Kind(experts="periodic", mixer="mamba"), "jamba"),
    **_kinds(Kind(mixer="mamba2"), "bamba"),
    **_kinds(Kind(experts="every", mixer="mamba2"), "granitemoehybrid"),
    **_kinds(Kind(mixer="short_conv"), "lfm2"),
    **_kinds(Kind(mixer="mamba", bare=True), "mamba falcon_mamba"),
    **_kinds(Kind(mixer="mamba2", bare=True), "mamba2"),
}


# The order of a decoder's layers ------------------------------------------------------------------

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

    >>> from evenstep.core.models import kind_of
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
                f"layer_types in {config.where} has {short_repr(name)}, which is not known in "
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

    >>> from evenstep.core.models import kind_of
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


# The work of a decoder ----------------------------------------------------------------------------


def text_work(config: ModelConfig) -> Work:
    """The work of all layers and the head. The embedding is a lookup and counts nothing.

    >>> shape = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16}
    >>> heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10}
    >>> text_work(ModelConfig({"model_type": "llama", **shape, **heads}, "a dict"))
    Work(weights=656, pairs=8.0, nearby=0)
    """
    kind = kind_of(config.model_type)
    layers = config.layers("num_hidden_layers", "n_layer")
    mixing = mixing_of(config, kind, layers)
    sparse = sparse_layers(config, kind, layers)
    total = Work(weights=hidden_size(config) * config.whole("vocab_size"))
    for layer in range(layers):
        total += _mix(config, kind, mixing[layer])
        if not kind.bare:
            weights = _experts(config) if layer in sparse else _dense(config, kind)
            total += Work(weights=weights)
    return total


def hidden_size(config: ModelConfig) -> int:
    """The numbers of a token between layers."""
    return config.whole("hidden_size", "n_embd")


def _mix(config: ModelConfig, kind: Kind, mixing: Mixing) -> Work:
    if mixing == "mixer":
        return _MIXERS[kind.mixer](config)
    weights, pair = _attention(config, kind)
    window = window_of(config) if mixing == "window" else 0
    if window:
        return Work(weights=weights, nearby=pair * window)
    causal = not config.truth("use_bidirectional_attention", False)
    return Work(weights=weights, pairs=pair / 2 if causal else pair)


def _widths(config: ModelConfig, kind: Kind) -> tuple[int, int]:
    """The numbers of a token's queries and of its keys."""
    heads = config.whole("num_attention_heads", "n_head")
    if kind.attention == "latent":  # keys and values are expanded to all heads
        key = config.whole("qk_nope_head_dim") + config.whole("qk_rope_head_dim")
        return heads * key, heads * key
    derived = "head_dim" in config.fields or not kind.own_dim
    dim = config.whole("head_dim", default=hidden_size(config) // heads if derived else None)
    if dim == 0:
        raise ConfigError(f"{config.where} has more heads than hidden_size. Set head_dim.")
    groups = heads
    if kind.groups != "none":
        optional = "num_key_value_heads" in config.fields or kind.groups == "optional"
        groups = config.whole("num_key_value_heads", default=heads if optional else None)
    return heads * dim, groups * dim


def _attention(config: ModelConfig, kind: Kind) -> tuple[int, int]:
    """The weights of attention and the multiply-adds of one pair: its score and its value."""
    hidden, (queries, keys) = hidden_size(config), _widths(config, kind)
    if kind.attention == "grouped":
        return hidden * ((3 if kind.query_gate else 2) * queries + 2 * keys), 2 * queries
    # Latent (DeepSeek): low-rank queries, and keys and values from one vector of `rank` numbers.
    heads, rank = config.whole("num_attention_heads"), config.whole("kv_lora_rank")
    plain, positioned = config.whole("qk_nope_head_dim"), config.whole("qk_rope_head_dim")
    value = config.whole("v_head_dim")
    to_queries = hidden * queries
    if config.has("q_lora_rank"):
        to_queries = config.whole("q_lora_rank") * (hidden + queries)
    to_keys = hidden * (rank + positioned) + rank * heads * (plain + value)
    return to_queries + to_keys + heads * value * hidden, queries + heads * value


def _dense(config: ModelConfig, kind: Kind) -> int:
    return (3 if kind.gated else 2) * hidden_size(config) * feed_forward_width(config, kind)


def feed_forward_width(config: ModelConfig, kind: Kind) -> int:
    """The width of the feed-forward layer; LFM2 gives one that is still to be adjusted."""
    if not kind.gated and "n_inner" in config.fields:  # null: four times the width
        return config.whole("n_inner", default=4 * hidden_size(config))
    if config.model_type != "lfm2":
        return config.whole("intermediate_size")
    width = config.whole("intermediate_size", "block_ff_dim")
    if not config.truth("block_auto_adjust_ff_dim", True):
        return width
    width = int(float(config.fields.get("block_ffn_dim_multiplier") or 1.0) * int(2 * width / 3))
    return rounded_up(width, config.whole("block_multiple_of"))


def _experts(config: ModelConfig) -> int:
    """The weights that one token passes through: the router, its experts, the shared ones."""
    hidden = hidden_size(config)
    experts, chosen, width, shared = expert_widths(config)
    gate = hidden if config.has("shared_expert_intermediate_size") else 0
    return hidden * experts + 3 * hidden * (chosen * width + shared) + gate


def expert_widths(config: ModelConfig) -> tuple[int, int, int, int]:
    """(experts, how many a token visits, the width of one, the width of the shared ones)."""
    shared = config.whole(
        "shared_expert_intermediate_size", "shared_intermediate_size", default=0, least=0
    )
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = config.whole(*names, least=0)
    if experts == 0:
        return 0, 0, 0, shared
    width = config.whole("moe_intermediate_size", "intermediate_size")
    shared += width * config.whole("n_shared_experts", "moe_num_shared_experts", default=0, least=0)
    return experts, config.whole("num_experts_per_tok", "moe_k"), width, shared


# A state is updated and read once per token: two multiply-adds for each of its numbers.


def _delta(config: ModelConfig) -> Work:
    """Gated delta rule (Qwen3-Next)."""
    hidden, heads = hidden_size(config), config.whole("linear_num_value_heads")
    key, value = config.whole("linear_key_head_dim"), config.whole("linear_value_head_dim")
    keys, values = config.whole("linear_num_key_heads") * key, heads * value
    convolution = (2 * keys + values) * config.whole("linear_conv_kernel_dim")
    projections = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
    return Work(weights=projections + convolution, nearby=2 * heads * key * value)


def _mamba(config: ModelConfig) -> Work:
    hidden, bare = hidden_size(config), "state_size" in config.fields
    inner = hidden * config.whole("mamba_expand", "expand")
    if bare:
        inner = config.whole("intermediate_size", default=inner)
    state = config.whole("mamba_d_state", "state_size")
    name = "time_step_rank" if bare else "mamba_dt_rank"
    automatic = divided_up(hidden, 16)
    rank = automatic if config.fields.get(name) == "auto" else config.whole(name)
    convolution = inner * config.whole("mamba_d_conv", "conv_kernel")
    weights = 3 * hidden * inner + inner * (2 * rank + 2 * state) + convolution
    return Work(weights=weights, nearby=2 * inner * state)


def _mamba2(config: ModelConfig) -> Work:
    hidden = hidden_size(config)
    inner = hidden * config.whole("mamba_expand", "expand")
    state = config.whole("mamba_d_state", "state_size")
    groups = config.whole("mamba_n_groups", "n_groups") * state
    heads = config.whole("mamba_n_heads", "num_heads")
    convolution = (inner + 2 * groups) * config.whole("mamba_d_conv", "conv_kernel")
    weights = hidden * (3 * inner + 2 * groups + heads) + convolution
    return Work(weights=weights, nearby=2 * inner * state)


def _short_conv(config: ModelConfig) -> Work:
    """Three projections, a short convolution and one more projection (LFM2)."""
    hidden = hidden_size(config)
    return Work(weights=4 * hidden * hidden + hidden * config.whole("conv_L_cache"))


_MIXERS = {"delta": _delta, "mamba": _mamba, "mamba2": _mamba2, "short_conv": _short_conv}


# The work of a vision tower, per patch ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tower:
    """gated: three feed-forward matrices; merges: patches are merged before they leave."""

    gated: bool = False
    merges: bool = False


def _towers(tower: _Tower, names: str) -> dict[str, _Tower]:
    return dict.fromkeys(names.split(), tower)


TOWERS: dict[str, _Tower] = {
    **_towers(_Tower(), "clip_vision_model siglip_vision_model idefics3_vision smolvlm_vision"),
    **_towers(_Tower(), "idefics3 smolvlm internvl_vision"),
    **_towers(_Tower(gated=True), "pixtral"),
    **_towers(_Tower(merges=True), "qwen2_vl qwen2_vl_vision qwen3_vl qwen3_vl_vision"),
    **_towers(
        _Tower(merges=True), "qwen3_vl_moe qwen3_vl_moe_vision qwen3_omni_moe_vision_encoder"
    ),
    **_towers(_Tower(merges=True), "qwen3_5 qwen3_5_vision qwen3_5_moe qwen3_5_moe_vision"),
    **_towers(_Tower(merges=True, gated=True), "qwen2_5_vl qwen2_5_vl_vision"),
    **_towers(_Tower(merges=True, gated=True), "qwen2_5_omni_vision_encoder"),
}


def vision_work(config: ModelConfig) -> Work:
    """The work of the patch embedding, of all layers, and of a merger inside the tower.

    Patches attend to all patches of their image. A class token and a projector outside the tower
    are not counted.

    >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    >>> patches = {"num_attention_heads": 2, "patch_size": 2}
    >>> tower = {"model_type": "siglip_vision_model", **sizes, **patches}
    >>> vision_work(ModelConfig(tower, "a dict"))
    Work(weights=608, pairs=16, nearby=0)
    """
    if config.model_type not in TOWERS:
        raise ConfigError(
            f"the vision tower of model_type {short_repr(config.model_type)} is not known. Give "
            f"its shape to Cost.of_model with causal=False."
        )
    tower = TOWERS[config.model_type]
    layers = config.layers("num_hidden_layers", "depth")
    hidden = config.whole("embed_dim", "hidden_size")
    if config.has("intermediate_size"):
        width = config.whole("intermediate_size")
    else:
        width = hidden * config.whole("mlp_ratio")
    config.whole("num_attention_heads", "num_heads")
    matrices = 4 * hidden * hidden + (3 if tower.gated else 2) * hidden * width
    embedding = hidden * config.whole("num_channels", "in_channels", "in_chans", default=3)
    embedding *= _area(config) * config.whole("temporal_patch_size", default=1)
    weights = embedding + layers * matrices + (_mergers(config, hidden) if tower.merges else 0)
    # Layers that attend within windows of patches cost the same for every patch.
    everywhere, within = layers, 0
    if config.has("window_size"):
        everywhere = len(config.entries("fullatt_block_indexes"))
        within = (config.whole("window_size") // config.whole("patch_size")) ** 2
    pair = 2 * hidden
    return Work(
        weights=weights, pairs=everywhere * pair, nearby=(layers - everywhere) * pair * within
    )


def _area(config: ModelConfig) -> int:
    """The pixels of a patch; its size may be given as height and width."""
    size = config.fields.get("patch_size")
    if isinstance(size, list | tuple):
        sides = [whole_number(f"patch_size in {config.where}", side) for side in size]
        return sides[0] * sides[-1]
    return config.whole("patch_size") ** 2


def _mergers(config: ModelConfig, hidden: int) -> float:
    """Two matrices over 2 × 2 patches, as work per patch; deep features have mergers too."""
    patches = config.whole("spatial_merge_size") ** 2
    name = "hidden_size" if config.has("embed_dim") else "out_hidden_size"
    wide, out = hidden * patches, config.whole(name)
    mergers = 1 + len(config.entries("deepstack_visual_indexes"))
    return mergers * (wide * wide + wide * out) / patches


# Weights and bytes -----------------------------------------------------------------------------

# Model types that norm queries and keys, and that share the embedding with the head by default.
_NORMED = {"qwen3", "qwen3_moe", "qwen3_vl_text", "gemma3_text", "olmo2", "olmo3", "olmoe"}
_TIED = {"gemma", "gemma2", "gemma3_text", "gpt2", "cohere", "cohere2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """A decoder's weights and what a token takes in all its layers together.

    parameters  all weights
    outside     weights outside of layers: embedding, head
    keys        numbers of keys and values per token
    kept        bytes per token that the backward needs
    moved       bytes per token that kernels other than matrix products read and write
    work        multiply-adds of a forward

    Bytes are in bfloat16, as autograd keeps them for decoders of Hugging Face with flash attention.
    Per token and layer, with h the hidden size, q and k the widths of queries and of keys, and f
    that of the feed-forward layer:

    kept     16 h + 4 q + 4 k + 8 f     two norms (in float32), their outputs, queries, keys, values
                                        and outputs of attention, four tensors of the gated layer
    moved    250 h + 70 (q + k) + 30 f  by kernels that are not matrix products, forward and
                                        backward

    A norm of queries and keys keeps 6 and moves 108 bytes for each of their numbers. A gate of the
    feed-forward layer counts half of its bytes. Experts count as far as a token passes through
    them, and 6 h for each for the tokens that are sorted by expert.
    """

    parameters: int
    outside: int
    layers: int
    hidden: int
    vocab: int
    keys: int
    kept: float
    moved: float
    work: Work

    @classmethod
    def of(cls, config: ModelConfig) -> ModelSize:
        """The sizes of a configuration. Raises for layers whose memory is not known.

        >>> from evenstep.core.model_config import named_config
        >>> size = ModelSize.of(named_config("llama-3.2-1b"))
        >>> round(size.parameters / 1e9, 2), round(size.kept / 1e6, 2)
        (1.24, 1.74)
        """
        kind = kind_of(config.model_type)
        layers, hidden = config.layers("num_hidden_layers", "n_layer"), hidden_size(config)
        if "mixer" in mixing_of(config, kind, layers):
            raise ConfigError(
                f"the memory of {config.model_type} layers without attention is not known. Use a "
                f"model that attends in every layer."
            )
        work, vocab = text_work(config), config.whole("vocab_size")
        sparse = sparse_layers(config, kind, layers)
        queries, keys = _widths(config, kind)
        tied = config.truth("tie_word_embeddings", config.model_type in _TIED)
        outside = (1 if tied else 2) * hidden * vocab
        # Add up the layers: weights that no token passes through, bytes kept and bytes moved.
        unused, kept, moved = 0.0, 0.0, 0.0
        for layer in range(layers):
            width, copies, rest = _feed_forward(config, kind, layer in sparse)
            normed = queries + keys if config.model_type in _NORMED else 0
            share = 1.0 if kind.gated else 0.5
            kept += 16 * hidden + 4 * (queries + keys) + 6 * normed + 8 * share * width
            moved += 250 * hidden + 70 * (queries + keys) + 108 * normed + 30 * share * width
            kept, moved = kept + 6 * hidden * copies, moved + 18 * hidden * copies
            unused += rest
        head = hidden * vocab  # counted in the work
        norms = (2 * layers + 1) * hidden
        return cls(
            parameters=int(work.weights - head + outside + unused + norms),
            outside=outside,
            layers=layers,
            hidden=hidden,
            vocab=vocab,
            keys=2 * keys * layers,
            kept=kept,
            moved=moved,
            work=work,
        )


def _feed_forward(config: ModelConfig, kind: Kind, sparse: bool) -> tuple[int, int, int]:
    """(width that a token passes through, experts that it visits, weights that it does not)."""
    if not sparse:
        return feed_forward_width(config, kind), 0, 0
    experts, chosen, width, shared = expert_widths(config)
    rest = 3 * hidden_size(config) * width * (experts - chosen)
    return chosen * width + shared, chosen, rest
