"""Models: their configurations, and the FLOPs and bytes that follow from them."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from evenstep.core.plan_file import reading
from evenstep.core.ragged import divided_up, rounded_up
from evenstep.core.text import MOST, short_repr, shorten, truth_value, whole_number
from evenstep.errors import ConfigError, FileError

# Configurations: a path, a mapping, an object, or a well-known name ------------------------------

_SECTIONS = {"text": ("text_config", "llm_config", "language_config"), "vision": ("vision_config",)}
_MOST_LAYERS = 100_000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Plain fields and the place they come from, which messages name.

    A field that is absent or null counts as missing.

    >>> config = ModelConfig({"model_type": "gpt2", "n_embd": 768}, "config.json")
    >>> config.whole("hidden_size", "n_embd")
    768
    >>> config.whole("vocab_size")
    Traceback (most recent call last):
    evenstep.errors.ConfigError: config.json has no vocab_size. Add it, or pass the loaded ...
    """

    fields: Mapping[str, Any]
    where: str

    @property
    def model_type(self) -> str:
        """The name of the architecture, such as "llama"."""
        return str(self._given("model_type")[1])

    def has(self, *names: str) -> bool:
        """Whether any of these fields is given."""
        return any(self.fields.get(name) is not None for name in names)

    def _given(self, *names: str) -> tuple[str, Any]:
        """(where the first of these fields is that is given, its value)."""
        for name in names:
            if self.fields.get(name) is not None:
                return f"{name} in {self.where}", self.fields[name]
        raise ConfigError(
            f"{self.where} has no {names[0]}. Add it, or pass the loaded configuration object, "
            f"which has all defaults."
        )

    def whole(
        self, *names: str, default: int | None = None, least: int = 1, most: int = MOST
    ) -> int:
        """The first of these fields that is given, as an integer; else `default`."""
        if default is not None and not self.has(*names):
            return default
        return whole_number(*self._given(*names), least=least, most=most)

    def truth(self, name: str, default: bool) -> bool:
        """A field that is true or false; `default` if it is missing."""
        return truth_value(*self._given(name)) if self.has(name) else default

    def entries(self, *names: str, count: int | None = None) -> list[Any]:
        """The first of these fields that is given, as a list; empty if none is given.

        With a `count`, it must have that many entries, one for each layer.
        """
        if not self.has(*names):
            return []
        path, value = self._given(*names)
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path} must be a list, got {short_repr(value)}.")
        if count is not None and len(value) != count:
            raise ConfigError(
                f"{path} has {len(value)} entries, but there are {count} layers. Correct one of "
                f"them."
            )
        return list(value)

    def section(self, part: str) -> ModelConfig:
        """The configuration of the language model ("text") or of the vision tower ("vision").

        A nested configuration without a model type has that of the whole.
        """
        whole = self._nested("thinker_config") if self.has("thinker_config") else self
        name = next((name for name in _SECTIONS[part] if whole.has(name)), None)
        if name is None:
            if part == "vision" and not whole.has("patch_size"):
                raise ConfigError(f"{self.where} has no vision_config. Use part='text'.")
            return whole
        inner = whole._nested(name)
        fields = {"model_type": whole.fields.get("model_type"), **inner.fields}
        # A saved file leaves out what equals the default of a nested configuration's class.
        defaults = DEFAULTS.get(str(fields["model_type"]), {})
        return ModelConfig({**defaults, **fields}, inner.where)

    def _nested(self, name: str) -> ModelConfig:
        return ModelConfig(_mapping(self.fields[name], f"{name} in {self.where}"), self.where)


def read_model_config(config: object) -> ModelConfig:
    """The fields of a `config.json`, of the folder that holds it, of a mapping or of an object.

    >>> read_model_config({"model_type": "llama"}).model_type
    'llama'
    """
    if not isinstance(config, str | os.PathLike):
        return ModelConfig(_mapping(config, "the configuration"), "the configuration")
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        with reading(path, "Give the path of a model's config.json or of its folder."):
            data = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        raise FileError(f"{path} is not JSON. Give the path of a model's config.json.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {short_repr(data)}, expected the fields of a model.")
    return ModelConfig(data, str(path))


def _mapping(config: object, where: str) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, type):
        if callable(getattr(config, "to_dict", None)):
            return _mapping(config.to_dict(), where)  # type: ignore[attr-defined]
        if is_dataclass(config):
            return {field.name: getattr(config, field.name) for field in fields(config)}
        if hasattr(config, "__dict__"):
            return vars(config)
    raise ConfigError(
        f"{where} must be a path, a mapping or a configuration object, got {short_repr(config)}."
    )


# `presets` are shapes of well-known models by name, `defaults` those of the classes of transformers
# that are nested in other configurations, both in the fields of a `config.json`; `kinds` and
# `towers` are traits of model types that these fields do not say: see `Kind` and `TOWERS`.
_KNOWN = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
PRESETS: dict[str, dict[str, Any]] = _KNOWN["presets"]
DEFAULTS: dict[str, dict[str, Any]] = _KNOWN["defaults"]


def named_config(model: str) -> ModelConfig:
    """The language model's configuration: a known name, a `config.json` or its folder.

    >>> named_config("llama-3-8b").whole("hidden_size")
    4096
    """
    path = path_of_model(model, "--model")
    if path is None:
        return ModelConfig(PRESETS[model], model)
    return read_model_config(path).section("text")


def path_of_model(model: str, key: str) -> Path | None:
    """The path of a model's configuration; None for a known name. `key` is the user's word for it.

    >>> path_of_model("llama-3-8b", "--model") is None
    True
    """
    if model in PRESETS:
        return None
    path = Path(model)
    try:
        exists = bool(model) and path.exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        exists = False
    if not exists:
        parent = str(path.parent)
        place = "the working directory" if parent == "." else shorten(parent, 300)
        raise ConfigError(
            f"{key} {short_repr(path.name)} is not a known name, and {place} has no such file. "
            f"Give the path of a config.json or of its folder, or one of: {', '.join(PRESETS)}."
        )
    return path


# The decoders whose layers are known, by their `model_type` ---------------------------------------


class Work(NamedTuple):
    """What a token takes in a part of a layer, or in all layers together: parts add up.

    weights   multiply-adds of a forward in matrices: the weights that a token passes through
    pairs     multiply-adds per squared length, where tokens attend to all others or to all before
    nearby    multiply-adds where tokens attend within a window, or update a state
    unused    weights of experts that a token does not visit
    keys      numbers of keys and values
    kept      bytes that the backward needs
    moved     bytes that kernels other than matrix products read and write

    Bytes are in bfloat16, as autograd keeps them for decoders of Hugging Face with flash attention.
    Per token and layer, with h the hidden size, q and k the widths of queries and of keys, and f
    that of the feed-forward layer:

    kept     16 h + 4 q + 4 k + 8 f     two norms (in float32), their outputs, queries, keys, values
                                        and outputs of attention, four tensors of the gated layer
    moved    250 h + 70 (q + k) + 30 f  by kernels that are not matrix products, forward and
                                        backward

    Layers that carry state have no queries and keys, but 4 c + 30 i kept and 520 (c + i) moved,
    with c the numbers that are convolved and i those that the recurrence returns: what Evenstep's
    kernels for the gated delta rule take. A layer that is only one of attention, recurrence and
    feed-forward counts half of the norms.

    A norm of queries and keys keeps 6 and moves 108 bytes for each of their numbers. A gate of the
    feed-forward layer counts half of its bytes. Experts count as far as a token passes through
    them, and 6 h for each for the tokens that are sorted by expert.
    """

    weights: float = 0
    pairs: float = 0
    nearby: float = 0
    unused: int = 0
    keys: int = 0
    kept: float = 0
    moved: float = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What a model type's name says and its fields do not.

    gated       three feed-forward matrices instead of two
    attention   grouped heads, or latent: low-rank queries, keys and values
    query_gate  the query projection also gives a gate of the attention's output
    own_dim     the field `head_dim` must be there; otherwise it may be hidden / heads
    groups      the field `num_key_value_heads` must be there (given), may be there (optional), or
                has no effect (none)
    windows     where layers slide if no layer types are given: in all layers, or from
                `max_window_layers` on (upper)
    period      if above 0: every `period`-th layer attends to all tokens, the others slide
    experts     which layers have experts: see `sparse_layers`
    mixer       what layers without attention do: see `_MIXERS`
    both        every layer has attention and a mixer, side by side (Falcon-H1)
    alone       every layer is attention, a mixer or a feed-forward layer, and nothing else
    normed      queries and keys are normed
    tied        the head shares the embedding by default
    """

    gated: bool = True
    attention: Literal["grouped", "latent"] = "grouped"
    query_gate: bool = False
    own_dim: bool = False
    groups: Literal["given", "optional", "none"] = "given"
    windows: Literal["none", "all", "upper"] = "none"
    period: int = 0
    experts: str = "none"
    mixer: str = "none"
    both: bool = False
    alone: bool = False
    normed: bool = False
    tied: bool = False


KINDS: dict[str, Kind] = {name: Kind(**traits) for name, traits in _KNOWN["kinds"].items()}


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


# The order of a decoder's layers ------------------------------------------------------------------

Mixing: TypeAlias = Literal["full", "window", "mixer", "both", "none"]
_MIXING: dict[Any, Mixing] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "linear_attention": "mixer",
    "mamba": "mixer",
    "conv": "mixer",
    "hybrid": "both",
    "mlp": "none",
    "moe": "none",
}
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern


def _layer_types(config: ModelConfig, layers: int) -> list[Any]:
    """The names of layers, if the configuration lists them."""
    if config.has("hybrid_override_pattern"):
        pattern = list(str(config.fields["hybrid_override_pattern"]))
        config = ModelConfig({"layer_types": [_PATTERN.get(c, c) for c in pattern]}, config.where)
    return config.entries("layer_types", "layers_block_type", count=layers)


def mixing_of(config: ModelConfig, kind: Kind, layers: int) -> list[Mixing]:
    """How each layer mixes tokens.

    >>> config = ModelConfig({"sliding_window": 512}, "config.json")
    >>> mixing_of(config, kind_of("gemma2"), 3)
    ['window', 'full', 'window']
    """
    names = _layer_types(config, layers)
    if not names and (kind.both or kind.alone):
        return ["both" if kind.both else "mixer"] * layers
    if names:
        for name in names:
            known = isinstance(name, str) and name in _MIXING
            known = known and (_MIXING[name] != "mixer" or kind.mixer != "none")
            known = known and (_MIXING[name] != "both" or kind.both)
            if not known or (_MIXING[name] == "none" and not kind.alone):
                raise ConfigError(
                    f"layer_types in {config.where} has {short_repr(name)}, which is not known in "
                    f"{config.model_type}. Give the shape to Cost.of_model, or measured times to "
                    f"Cost.fit."
                )
        return [_MIXING[name] for name in names]
    chosen: set[Any] = set()
    # Without layer types: in a hybrid, the layers that attend.
    if kind.mixer != "none":
        if config.has("attn_layer_indices", "full_attn_idxs"):
            chosen = set(config.entries("attn_layer_indices", "full_attn_idxs"))
        elif config.has("linear_attn_config"):  # counted from 1
            linear = config._nested("linear_attn_config")
            chosen = {layer - 1 for layer in linear.entries("full_attn_layers")}
        elif config.has("attn_layer_period"):
            offset = config.whole("attn_layer_offset", least=0)
            chosen = set(range(offset, layers, config.whole("attn_layer_period")))
        else:
            every = config.whole("full_attention_interval")
            chosen = set(range(every - 1, layers, every))
        return ["full" if layer in chosen else "mixer" for layer in range(layers)]
    # Otherwise all layers attend, and the chosen ones within a window.
    if window_of(config) == 0:
        return ["full"] * layers
    if kind.period:  # with a period of 4, three of four layers slide
        period = config.whole("sliding_window_pattern", default=kind.period)
        chosen = {layer for layer in range(layers) if (layer + 1) % period}
    elif kind.windows == "upper":
        chosen = set(range(config.whole("max_window_layers", least=0), layers))
    elif kind.windows == "all":
        chosen = set(range(layers))
    return ["window" if layer in chosen else "full" for layer in range(layers)]


def window_of(config: ModelConfig) -> int:
    """The window of sliding layers; 0 if there is none, or if no sequence is longer."""
    if not config.truth("use_sliding_window", True):
        return 0
    window = config.whole("sliding_window", default=0, least=0)
    longest = config.whole("max_position_embeddings", default=MOST)
    return 0 if window >= longest else window


def sparse_layers(config: ModelConfig, kind: Kind, layers: int) -> set[int]:
    """The layers with experts.

    >>> config = ModelConfig({"first_k_dense_replace": 1}, "config.json")
    >>> sparse_layers(config, kind_of("deepseek_v3"), 3)
    {1, 2}
    """
    every = range(layers)
    if config.has("mlp_layer_types"):
        types = config.entries("mlp_layer_types", count=layers)
        return {layer for layer in every if types[layer] == "sparse"}
    match kind.experts:
        case "every":
            return set(every)
        case "alone":
            names = _layer_types(config, layers)
            return {layer for layer in every if names[layer] == "moe"}
        case "after_dense":  # from the first ones on; a list has 0 for a dense layer
            if isinstance(config.fields.get("moe_layer_freq"), list):
                sparse = config.entries("moe_layer_freq", count=layers)
                return {layer for layer in every if sparse[layer]}
            step = config.whole("moe_layer_freq", default=1)
            first = config.whole("first_k_dense_replace", least=0)
            return {layer for layer in every[first:] if layer % step == 0}
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


# The work of a decoder ----------------------------------------------------------------------------


def text_work(config: ModelConfig) -> Work:
    """The work of all layers and the head. The embedding is a lookup and counts nothing.

    >>> shape = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16}
    >>> heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10}
    >>> text_work(ModelConfig({"model_type": "llama", **shape, **heads}, "a dict"))[:3]
    (656, 8.0, 0)
    """
    kind, layers = kind_of(config.model_type), _layers(config)
    mixing, sparse = mixing_of(config, kind, layers), sparse_layers(config, kind, layers)
    hidden = _hidden(config)
    norms = (1 if kind.alone else 2) * layers * hidden
    head = Work(weights=hidden * config.whole("vocab_size"))
    parts = [head, Work(kept=8 * norms, moved=125 * norms)]
    for layer in range(layers):
        if mixing[layer] in ("mixer", "both"):
            parts.append(_MIXERS[kind.mixer](config))
        if mixing[layer] in ("full", "window", "both"):
            window = window_of(config) if mixing[layer] == "window" else 0
            parts.append(_attention(config, kind, window))
        if mixing[layer] == "none" or not kind.alone:
            parts.append(_feed_forward(config, kind, layer in sparse))
    return Work(*map(sum, zip(*parts, strict=True)))


def _layers(config: ModelConfig) -> int:
    if not config.has("num_hidden_layers") and config.has("layers_block_type"):
        return len(config.entries("layers_block_type"))  # Nemotron-H
    return config.whole("num_hidden_layers", "n_layer", most=_MOST_LAYERS)


def _hidden(config: ModelConfig) -> int:
    """The numbers of a token between layers."""
    return config.whole("hidden_size", "n_embd")


def _widths(config: ModelConfig, kind: Kind) -> tuple[int, int]:
    """The numbers of a token's queries and of its keys."""
    heads = config.whole("num_attention_heads", "n_head")
    if kind.attention == "latent":  # keys and values are expanded to all heads
        key = config.whole("qk_nope_head_dim") + config.whole("qk_rope_head_dim")
        return heads * key, heads * key
    # A field that is null has the default of its class; one that is absent may not.
    derived = "head_dim" in config.fields or not kind.own_dim
    dim = config.whole("head_dim", default=_hidden(config) // heads if derived else None)
    if dim == 0:
        raise ConfigError(f"{config.where} has more heads than hidden_size. Set head_dim.")
    groups = heads
    if kind.groups != "none":
        optional = "num_key_value_heads" in config.fields or kind.groups == "optional"
        groups = config.whole("num_key_value_heads", default=heads if optional else None)
    return heads * dim, groups * dim


def _attention(config: ModelConfig, kind: Kind, window: int) -> Work:
    """Attention to the tokens of a window, or without one (0) to all before a token."""
    hidden, (queries, keys) = _hidden(config), _widths(config, kind)
    # Weights, and the multiply-adds of one pair of tokens: its score and its value.
    if kind.attention == "grouped":
        weights, pair = hidden * ((3 if kind.query_gate else 2) * queries + 2 * keys), 2 * queries
    else:
        # Latent (DeepSeek): low-rank queries, keys and values from one vector of `rank` numbers.
        heads, rank = config.whole("num_attention_heads"), config.whole("kv_lora_rank")
        plain, positioned = config.whole("qk_nope_head_dim"), config.whole("qk_rope_head_dim")
        value = config.whole("v_head_dim")
        weights = hidden * queries
        if config.has("q_lora_rank"):
            weights = config.whole("q_lora_rank") * (hidden + queries)
        weights += hidden * (rank + positioned) + rank * heads * (plain + value)
        weights, pair = weights + heads * value * hidden, queries + heads * value
    pairs = 0.0
    if not window:
        causal = not config.truth("use_bidirectional_attention", False)
        pairs = pair / 2 if causal else pair
    normed = queries + keys if kind.normed else 0
    return Work(
        weights=weights,
        pairs=pairs,
        nearby=pair * window,
        keys=2 * keys,
        kept=4 * (queries + keys) + 6 * normed,
        moved=70 * (queries + keys) + 108 * normed,
    )


def _feed_forward(config: ModelConfig, kind: Kind, sparse: bool) -> Work:
    """Two matrices, or three with a gate; in sparse layers those of all experts."""
    hidden, matrices = _hidden(config), 3 if kind.gated else 2
    if not sparse:
        width, chosen, unused = _dense_width(config, kind), 0, 0
        weights = matrices * hidden * width
    else:
        gated, plain = "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"
        shared = config.whole(gated, plain, "shared_intermediate_size", default=0, least=0)
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        experts, chosen, each = config.whole(*names, least=0), 0, 0
        if experts:
            chosen = config.whole("num_experts_per_tok", "num_experts_per_token", "moe_k")
            each = config.whole("moe_intermediate_size", "intermediate_size")
            if not config.has(plain):
                numbers = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
                shared += each * config.whole(*numbers, default=0, least=0)
        # The router scores every expert, and a shared one if that has a gate (Qwen2-MoE). Experts
        # may see fewer numbers of a token than there are between layers (Nemotron-H).
        router = experts + (1 if config.has(gated) else 0)
        latent = config.whole("moe_latent_size", default=hidden)
        weights = hidden * router + matrices * (latent * chosen * each + hidden * shared)
        weights += 2 * hidden * latent if config.has("moe_latent_size") else 0
        unused = matrices * latent * each * (experts - chosen)
        width = chosen * each + shared  # of all experts that a token visits
    share = 1.0 if kind.gated else 0.5
    kept = 8 * share * width + 6 * hidden * chosen
    moved = 30 * share * width + 18 * hidden * chosen
    return Work(weights=weights, unused=unused, kept=kept, moved=moved)


def _dense_width(config: ModelConfig, kind: Kind) -> int:
    """The width of the feed-forward layer; LFM2 gives one that is still to be adjusted."""
    if not kind.gated and "n_inner" in config.fields:  # null: four times the width
        return config.whole("n_inner", default=4 * _hidden(config))
    if config.model_type != "lfm2":
        return config.whole("intermediate_size")
    width = config.whole("intermediate_size", "block_ff_dim")
    if not config.truth("block_auto_adjust_ff_dim", True):
        return width
    width = int(float(config.fields.get("block_ffn_dim_multiplier") or 1.0) * int(2 * width / 3))
    return rounded_up(width, config.whole("block_multiple_of"))


def _carrying(weights: int, convolved: int, inner: int, state: int = 0) -> Work:
    """A layer that carries a state of so many numbers, which a token updates and reads once.

    convolved  numbers that a convolution makes of a token
    inner      numbers that the layer's kernel returns
    """
    kept, moved = 4 * convolved + 30 * inner, 520 * (convolved + inner)
    return Work(weights=weights, nearby=2 * state, kept=kept, moved=moved)


def _delta(config: ModelConfig) -> Work:
    """Gated delta rule (Qwen3-Next)."""
    hidden, heads = _hidden(config), config.whole("linear_num_value_heads")
    key, value = config.whole("linear_key_head_dim"), config.whole("linear_value_head_dim")
    keys, values = config.whole("linear_num_key_heads") * key, heads * value
    convolved = 2 * keys + values
    weights = hidden * (convolved + 2 * values + 2 * heads)
    weights += convolved * config.whole("linear_conv_kernel_dim")
    return _carrying(weights, convolved, values, heads * key * value)


def _channels(config: ModelConfig) -> Work:
    """Delta rule with a decay for every channel (Kimi-Linear)."""
    linear = config._nested("linear_attn_config") if config.has("linear_attn_config") else config
    hidden, heads = _hidden(config), linear.whole("linear_num_heads", "num_heads")
    size = linear.whole("linear_head_dim", "head_dim")
    inner, gates = heads * size, 2 * size  # gates of a low rank
    weights = hidden * (4 * inner + heads + gates) + gates * inner
    weights += 3 * inner * linear.whole("linear_conv_kernel_dim", "short_conv_kernel_size")
    return _carrying(weights, 3 * inner, inner, inner * size)


def _mamba(config: ModelConfig) -> Work:
    hidden, named = _hidden(config), "state_size" in config.fields
    inner = hidden * config.whole("mamba_expand", "expand")
    if named:
        inner = config.whole("intermediate_size", default=inner)
    # The time step is a product of two matrices of a low rank.
    state = config.whole("mamba_d_state", "state_size")
    name = "time_step_rank" if named else "mamba_dt_rank"
    automatic = divided_up(hidden, 16)
    rank = automatic if config.fields.get(name) == "auto" else config.whole(name)
    convolution = inner * config.whole("mamba_d_conv", "conv_kernel")
    weights = 3 * hidden * inner + inner * (2 * rank + 2 * state) + convolution
    return _carrying(weights, inner, inner, inner * state)


def _mamba2(config: ModelConfig) -> Work:
    hidden = _hidden(config)
    heads = config.whole("mamba_n_heads", "mamba_num_heads", "num_heads")
    if config.has("mamba_head_dim"):  # Nemotron-H
        inner = heads * config.whole("mamba_head_dim")
    elif config.has("mamba_d_ssm"):  # Falcon-H1
        inner = config.whole("mamba_d_ssm")
    else:
        inner = hidden * config.whole("mamba_expand", "expand")
    state = config.whole("mamba_d_state", "ssm_state_size", "state_size")
    convolved = inner + 2 * config.whole("mamba_n_groups", "n_groups") * state
    weights = hidden * (2 * inner + convolved + heads)
    weights += convolved * config.whole("mamba_d_conv", "conv_kernel")
    return _carrying(weights, convolved, inner, inner * state)


def _short_conv(config: ModelConfig) -> Work:
    """Three projections, a short convolution and one more projection (LFM2)."""
    hidden = _hidden(config)
    weights = 4 * hidden * hidden + hidden * config.whole("conv_L_cache")
    return _carrying(weights, hidden, hidden)


_MIXERS = {
    "delta": _delta,
    "channels": _channels,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "short_conv": _short_conv,
}


# The work of a vision tower, per patch ------------------------------------------------------------

# By model type: three feed-forward matrices (gated) or two, and whether patches are merged before
# they leave the tower (merges).
TOWERS: dict[str, list[str]] = _KNOWN["towers"]


def vision_work(config: ModelConfig) -> Work:
    """The work of the patch embedding, of all layers, and of a merger inside the tower.

    Patches attend to all patches of their image. A class token and a projector outside the tower
    are not counted.

    >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    >>> patches = {"num_attention_heads": 2, "patch_size": 2}
    >>> tower = {"model_type": "siglip_vision_model", **sizes, **patches}
    >>> vision_work(ModelConfig(tower, "a dict"))[:3]
    (608, 16, 0)
    """
    if config.model_type not in TOWERS:
        raise ConfigError(
            f"the vision tower of model_type {short_repr(config.model_type)} is not known. Give "
            f"its shape to Cost.of_model with causal=False."
        )
    tower = TOWERS[config.model_type]
    layers = config.whole("num_hidden_layers", "depth", most=_MOST_LAYERS)
    hidden = config.whole("embed_dim", "hidden_size")
    width = config.whole("intermediate_size", default=0) or hidden * config.whole("mlp_ratio")
    config.whole("num_attention_heads", "num_heads")
    matrices = 4 * hidden * hidden + (3 if "gated" in tower else 2) * hidden * width
    # The pixels of a patch; its size may be given as height and width.
    sides = config.fields.get("patch_size")
    sides = sides if isinstance(sides, list | tuple) else [config.whole("patch_size")]
    sides = [whole_number(f"patch_size in {config.where}", side) for side in sides]
    values = sides[0] * sides[-1] * config.whole("temporal_patch_size", default=1)
    values *= config.whole("num_channels", "in_channels", "in_chans", default=3)
    weights: float = hidden * values + layers * matrices
    if "merges" in tower:
        # Two matrices over 2 x 2 patches, as work per patch; deep features have mergers too.
        patches = config.whole("spatial_merge_size") ** 2
        name = "hidden_size" if config.has("embed_dim") else "out_hidden_size"
        wide, mergers = hidden * patches, 1 + len(config.entries("deepstack_visual_indexes"))
        weights += mergers * (wide * wide + wide * config.whole(name)) / patches
    # Layers that attend within windows of patches cost the same for every patch.
    everywhere, within = layers, 0
    if config.has("window_size"):
        everywhere = len(config.entries("fullatt_block_indexes"))
        within = (config.whole("window_size") // config.whole("patch_size")) ** 2
    pair = 2 * hidden
    return Work(weights, everywhere * pair, (layers - everywhere) * pair * within)


# Weights and bytes -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """A decoder's weights and what a token takes in all its layers together.

    parameters  all weights
    outside     weights outside of layers: embedding, head
    work        of a token in all layers and the head
    stateful    whether layers carry state from token to token
    """

    parameters: int
    outside: int
    layers: int
    hidden: int
    vocab: int
    work: Work
    stateful: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> ModelSize:
        """The sizes of a configuration.

        >>> size = ModelSize.of(named_config("llama-3.2-1b"))
        >>> round(size.parameters / 1e9, 2), round(size.work.kept / 1e6, 2)
        (1.24, 1.74)
        """
        kind, layers, hidden = kind_of(config.model_type), _layers(config), _hidden(config)
        work, vocab = text_work(config), config.whole("vocab_size")
        tied = config.truth("tie_word_embeddings", kind.tied)
        embedding = hidden * vocab
        outside = (1 if tied else 2) * embedding
        norms = ((1 if kind.alone else 2) * layers + 1) * hidden
        return cls(
            # The head is counted in the work.
            parameters=int(work.weights - embedding + outside + work.unused + norms),
            outside=outside,
            layers=layers,
            hidden=hidden,
            vocab=vocab,
            work=work,
            stateful=not {"mixer", "both"}.isdisjoint(mixing_of(config, kind, layers)),
        )
