"""Evenstep's attention as an attention implementation of transformers.

    import evenstep.integrations.hf_attention
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="evenstep")

    use_attention(model)  # or on a loaded model, with a check that its layers call it

Segments are told apart by `cu_seq_lens_q`, else by `position_ids` that restart. A 2-D padding mask
is honoured. With neither, each row is one segment. Sliding windows, soft caps and sinks are exact.
Refused, with an error: chunks, image blocks that see both ways, position biases, a cache, masks of
other shapes, and every keyword that is not understood.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from evenstep.errors import ConfigError
from evenstep.integrations.hf_boundaries import Hints
from evenstep.integrations.hf_mask import mask_function, padding_of, rule_of, window_of
from evenstep.integrations.hf_probe import Seen, probed, switch
from evenstep.tensors.segment_attention import Call, attend

NAME = "evenstep"

# Keywords of `model(...)` and of attention layers that do not change attention.
_IGNORED = {
    "cache_position",
    "deterministic",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "seq_idx",
    "shift_labels",
    "use_cache",
}
_REASONS = {
    "position_bias": "adds a position bias to its scores",
    "output_attentions": "asks for attention weights, which are never computed",
    "cache": "uses a paged cache",
    "indices": "selects keys by indices",
    "block_indices": "selects blocks of keys",
}


def attention_function(
    module: nn.Module,
    query: Tensor,  # (rows, heads, width, dim)
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: attention within segments, (rows, width, heads, dim).

    `model(**hf_kwargs(batch))` passes the boundaries of a batch.
    """
    _refuse_keywords(module, keywords)
    _refuse_lengths(module, query, key, cu_seq_lens_q, cu_seq_lens_k)
    causal = _is_causal(module, is_causal, attention_mask)
    hints = Hints(
        rows=query.shape[0],
        width=query.shape[2],
        device=query.device,
        cu_seqlens=cu_seq_lens_q,
        longest=None if max_length_q is None else int(max_length_q),
        padding=padding_of(attention_mask),
        # Encoders and vision towers have positions that say nothing about segments.
        positions=position_ids if causal else None,
    )
    window = window_of(attention_mask, sliding_window)
    if not torch.compiler.is_compiling() and (probe := probed()) is not None:
        probe.append(Seen(module, causal, window, hints.boundaries()))
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return value.new_zeros(shape), None
    query, key, value = _one_dtype(query, key, value)
    call = Call(
        query, key, value, hints.boundaries(), causal, window, scaling, softcap, s_aux, dropout
    )
    return attend(call).transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make attn_implementation="evenstep" known to transformers. Importing this module does it.

    >>> register_attention()
    >>> from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    >>> "evenstep" in ALL_ATTENTION_FUNCTIONS
    True
    """
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)


def use_attention(model: Any, **inputs: Any) -> Any:
    """Switch a loaded model, or the model inside a PeftModel, to Evenstep's attention.

    A forward of a few tokens checks that every attention layer that runs calls it and receives
    the boundaries of segments, because transformers only logs a warning where it is not called.
    If not, raises `ConfigError` with the reason and leaves the model as it was. `inputs` are
    further arguments of that forward, for models that need more than tokens.

        model = use_attention(AutoModelForCausalLM.from_pretrained(name))
    """
    switch(model, NAME, inputs)
    return model


def _is_causal(module: nn.Module, given: bool | None, mask: Any) -> bool:
    """What the mask says, as in eager attention; without a mask, what the layer says."""
    rule = rule_of(mask)
    if rule is not None:
        return rule.causal
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One dtype for all three: that of autocast, else that of v, which is as projected."""
    kind = v.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v.dtype
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _refuse_keywords(module: nn.Module, keywords: dict[str, Any]) -> None:
    for name, given in keywords.items():
        if given is None or given is False or name in _IGNORED:
            continue
        reason = _REASONS.get(name, f"passes {name!r}, which is not understood")
        raise ConfigError(
            f"{type(module).__name__} {reason}. Use attn_implementation='sdpa' or 'eager' and the "
            f"padded layout, or leave out the keyword {name!r} if it is yours."
        )


def _refuse_lengths(
    module: nn.Module, query: Tensor, key: Tensor, ends: Tensor | None, key_ends: Tensor | None
) -> None:
    if key.shape[2] != query.shape[2]:
        raise ConfigError(
            f"{type(module).__name__} has {key.shape[2]} keys for {query.shape[2]} queries, from a "
            f"cache, a prefix or another sequence. Pass use_cache=False, and generate with "
            f"attn_implementation='sdpa'."
        )
    if ends is None or key_ends is None or ends is key_ends:
        if ends is None and key_ends is not None:
            raise ConfigError("cu_seq_lens_k is given without cu_seq_lens_q. Pass both.")
        return
    if ends.shape != key_ends.shape or (
        not torch.compiler.is_compiling() and not torch.equal(ends, key_ends)
    ):
        raise ConfigError(
            "cu_seq_lens_q and cu_seq_lens_k differ. Pass the same boundaries for queries and keys."
        )


register_attention()

__all__ = ["register_attention", "use_attention"]
