"""The mask function that transformers calls for attn_implementation="evenstep".

No width × width mask is built. What comes back is the 2-D padding mask of the caller, or ones, and
carries the rule that the mask stands for: some layers say themselves neither that they are causal
nor what their window is. Rules that attention within segments cannot follow are refused: chunks,
image blocks that see both ways, and unknown ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenstep.errors import ConfigError


class Rule(NamedTuple):
    """What a mask stands for."""

    causal: bool
    window: int | None
    padded: bool  # whether the tensor is a padding mask, not just ones


# Rules of transformers.masking_utils that attention within segments follows.
_FOLLOWED = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
    "padding_mask_function.<locals>.inner_mask",
}
_AND, _OR = "and_masks.<locals>.and_mask", "or_masks.<locals>.or_mask"


def mask_function(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    device: Any = None,
    **options: Any,
) -> Tensor:
    """A (rows, width) bool tensor, the padding mask or ones, that carries its `Rule`."""
    if rule_of(attention_mask) is not None:
        # A model that made its mask passes it to its language model, which keeps it as it is.
        assert attention_mask is not None
        return attention_mask
    _refuse_chunks(local_size, config, kv_length)
    causal = "allow_is_bidirectional_skip" not in options
    if device is None:
        device = "cpu" if attention_mask is None else attention_mask.device
    if mask_function is not None:
        custom = options.get("use_vmap")
        _refuse_unknown(mask_function, batch_size, kv_length, device, custom, causal)
    window = local_size
    if window is not None and not causal:
        window += 1  # a window of transformers that sees both ways includes this distance
    if attention_mask is None:
        mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:
        mask = attention_mask.view(attention_mask.shape)  # the caller's own gets no attribute
    mask._evenstep_rule = Rule(causal, window, attention_mask is not None)
    return mask


def rule_of(mask: Any) -> Rule | None:
    """The rule that a mask carries; None for other masks."""
    rule: Rule | None = getattr(mask, "_evenstep_rule", None)
    return rule


def padding_of(mask: Any) -> Tensor | None:
    """The padding that a mask stands for: None without padding. Refuses other masks."""
    rule = rule_of(mask)
    if mask is None or (rule is not None and not rule.padded):
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point():
        shape = f" of shape {tuple(mask.shape)}" if hasattr(mask, "shape") else ""
        raise ConfigError(
            f"attn_implementation='evenstep' takes a 2-D padding mask or none, got "
            f"{type(mask).__name__}{shape}. Give boundaries as cu_seq_lens_q or position_ids, or "
            f"use attn_implementation='sdpa'."
        )
    return mask


def window_of(mask: Any, sliding_window: int | None) -> int | None:
    """The window of a layer: that of its mask, which must agree with what the layer passes."""
    rule = rule_of(mask)
    if rule is None or rule.window == sliding_window:
        return sliding_window
    if sliding_window is not None:
        raise ConfigError(
            f"a layer passes sliding_window={sliding_window}, but its mask has "
            f"{'no window' if rule.window is None else f'a window of {rule.window}'}. Use "
            f"attn_implementation='sdpa' for this model."
        )
    return rule.window


def _refuse_chunks(local_size: int | None, config: Any, length: int) -> None:
    chunk = getattr(config, "attention_chunk_size", None)
    if local_size is None or local_size != chunk:
        return
    if getattr(config, "sliding_window", None) != chunk or length > chunk:
        raise ConfigError(
            f"attn_implementation='evenstep' does not support chunked attention "
            f"(attention_chunk_size={chunk}). Use attn_implementation='sdpa' and the padded "
            f"layout."
        )


def _refuse_unknown(
    rule: Callable[..., Tensor],
    rows: int,
    width: int,
    device: Any,
    custom: bool | None,
    causal: bool,
) -> None:
    """Refuse rules that are not followed. Additions that make nothing more visible pass."""
    if torch.compiler.is_compiling():
        if custom:
            raise ConfigError(
                "a compiled model must not add rules of its own to the attention mask. Use "
                "attn_implementation='sdpa' or do not compile it."
            )
        if causal:
            torch._assert_async(~_ahead(rule, rows, width, device), "tokens see later tokens")
        return
    added = _added(rule)
    if causal and added and bool(_ahead(rule, rows, width, device)):
        raise ConfigError(
            "attn_implementation='evenstep' is causal, but in this batch some tokens see later "
            "ones, such as image blocks that see both ways. Use attn_implementation='sdpa' and "
            "the padded layout."
        )


def _added(rule: Any) -> bool:
    """Whether a rule adds to what causal attention sees. Raises if it is not known."""
    name = getattr(rule, "__qualname__", "")
    if not getattr(rule, "__module__", "").startswith("transformers."):
        name = ""
    if name in _FOLLOWED:
        return False
    if name in (_AND, _OR):
        parts = rule.__closure__[0].cell_contents
        if name == _AND:
            return sum(map(_added, parts)) > 0  # all of them, so that an unknown one raises
        return not all(_known(part) for part in parts)
    raise ConfigError(
        f"attn_implementation='evenstep' does not know the attention rule "
        f"{getattr(rule, '__qualname__', rule)!r}. Use attn_implementation='sdpa' and the padded "
        f"layout."
    )


def _known(rule: Any) -> bool:
    return getattr(rule, "__qualname__", "") in _FOLLOWED


def _ahead(rule: Callable[..., Tensor], rows: int, width: int, device: Any) -> Tensor:
    """Whether any token sees the one after it; () bool."""
    if width < 2:
        return torch.zeros((), dtype=torch.bool, device=device)
    row = torch.arange(rows, device=device)[:, None]
    head = torch.zeros_like(row)
    slot = torch.arange(width - 1, device=device)[None, :]
    return rule(row, head, slot, slot + 1).any()
