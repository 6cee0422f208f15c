"""The work of a decoder: attention, mixers, feed-forward matrices, experts, head."""

from __future__ import annotations

from evenstep.core.model.config import ModelConfig
from evenstep.core.model.kinds import Kind, kind_of
from evenstep.core.model.layers import Mixing, mixing_of, sparse_layers, window_of
from evenstep.core.model.work import Work
from evenstep.core.rounding import divided_up, rounded_up
from evenstep.errors import ConfigError


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
    weights, pair = (_latent if kind.attention == "latent" else _grouped)(config, kind)
    window = window_of(config) if mixing == "window" else 0
    if window:
        return Work(weights=weights, nearby=pair * window)
    causal = not config.truth("use_bidirectional_attention", False)
    return Work(weights=weights, pairs=pair / 2 if causal else pair)


def _grouped(config: ModelConfig, kind: Kind) -> tuple[int, int]:
    """The weights of attention and the multiply-adds of one pair: its score and its value."""
    hidden, heads = hidden_size(config), config.whole("num_attention_heads", "n_head")
    derived = "head_dim" in config.fields or not kind.own_dim
    dim = config.whole("head_dim", default=hidden // heads if derived else None)
    if dim == 0:
        raise ConfigError(f"{config.where} has more heads than hidden_size. Set head_dim.")
    groups = heads
    if kind.groups != "none":
        given = "num_key_value_heads" in config.fields or kind.groups == "optional"
        groups = config.whole("num_key_value_heads", default=heads if given else None)
    queries, keys = heads * dim, groups * dim
    return hidden * ((3 if kind.query_gate else 2) * queries + 2 * keys), 2 * queries


def _latent(config: ModelConfig, kind: Kind) -> tuple[int, int]:
    """Attention with low-rank queries, keys and values (DeepSeek)."""
    hidden, heads = hidden_size(config), config.whole("num_attention_heads")
    positioned = config.whole("qk_rope_head_dim")
    plain, value = config.whole("qk_nope_head_dim"), config.whole("v_head_dim")
    rank, key = config.whole("kv_lora_rank"), plain + positioned
    if config.has("q_lora_rank"):
        query_rank = config.whole("q_lora_rank")
        queries = query_rank * (hidden + heads * key)
    else:
        queries = hidden * heads * key
    keys = hidden * (rank + positioned) + rank * heads * (plain + value)
    return queries + keys + heads * value * hidden, heads * (key + value)


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
