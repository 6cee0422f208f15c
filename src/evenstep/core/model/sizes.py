"""ModelSize: the weights of a decoder, and the bytes that a token leaves in its layers.

Bytes per token and layer, in bfloat16, as autograd keeps them for decoders of Hugging Face with
flash attention. h is the hidden size, q and k the widths of queries and of keys, f that of the
feed-forward layer:

    kept     16 h + 4 q + 4 k + 8 f     two norms (in float32), their outputs, queries, keys, values
                                        and outputs of attention, four tensors of the gated layer
    moved    250 h + 70 (q + k) + 30 f  read and written by kernels that are not matrix products, in
                                        forward and backward

A norm of queries and keys keeps 6 and moves 108 bytes for each of their numbers. A gate of the
feed-forward layer counts half of its bytes. Experts count as far as a token passes through them,
and 6 h for each for the tokens that are sorted by expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.core.model.config import ModelConfig
from evenstep.core.model.kinds import Kind, kind_of
from evenstep.core.model.layers import mixing_of, sparse_layers
from evenstep.core.model.text import expert_widths, feed_forward_width, hidden_size, text_work
from evenstep.core.model.work import Work
from evenstep.errors import ConfigError

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

        >>> from evenstep.core.model.named import named_config
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


def _widths(config: ModelConfig, kind: Kind) -> tuple[int, int]:
    """The numbers of a token's queries and of its keys."""
    heads = config.whole("num_attention_heads", "n_head")
    if kind.attention == "latent":  # keys and values are expanded to all heads
        key = config.whole("qk_nope_head_dim") + config.whole("qk_rope_head_dim")
        return heads * key, heads * key
    dim = config.whole("head_dim", default=max(1, hidden_size(config) // heads))
    groups = heads
    if kind.groups != "none":
        groups = config.whole("num_key_value_heads", default=heads)
    return heads * dim, groups * dim


def _feed_forward(config: ModelConfig, kind: Kind, sparse: bool) -> tuple[int, int, int]:
    """(width that a token passes through, experts that it visits, weights that it does not)."""
    if not sparse:
        return feed_forward_width(config, kind), 0, 0
    experts, chosen, width, shared = expert_widths(config)
    rest = 3 * hidden_size(config) * width * (experts - chosen)
    return chosen * width + shared, chosen, rest
