"""The mask function that transformers calls for attn_implementation="evenstep".

No mask is built. What comes back is the padding mask of the caller, or None. Rules that attention
within segments cannot follow are refused: chunks, image blocks that see both ways, unknown rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import ConfigError

WINDOW = "_evenstep_window"
"""Attribute of a returned mask: the window that it stands for, which some models pass only so."""

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
) -> Tensor | None:
    """The 2-D padding mask or None. A windowed mask is a tensor that carries its window."""
    _refuse_chunks(local_size, config, kv_length)
    bidirectional = "allow_is_bidirectional_skip" in options
    if mask_function is not None and not bidirectional:
        if device is None:
            device = "cpu" if attention_mask is None else attention_mask.device
        _refuse_unknown(mask_function, batch_size, kv_length, device, options.get("use_vmap"))
    if local_size is None:
        return attention_mask
    if attention_mask is None:
        attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
        attention_mask._evenstep_full = True
    else:
        attention_mask = attention_mask.clone()
    # A bidirectional window of transformers includes tokens at a distance of local_size.
    setattr(attention_mask, WINDOW, local_size + 1 if bidirectional else local_size)
    return attention_mask


def padding_of(mask: Any) -> Tensor | None:
    """The padding that a mask stands for: None without padding. Refuses other masks."""
    if mask is None or getattr(mask, "_evenstep_full", False):
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
    """The window of a layer: what it passes, else what its mask stands for."""
    built: int | None = getattr(mask, WINDOW, None)
    if sliding_window is None or built is None:
        return built if sliding_window is None else sliding_window
    if sliding_window != built:
        raise ConfigError(
            f"a layer passes sliding_window={sliding_window}, but its mask has a window of "
            f"{built}. Use attn_implementation='sdpa' for this model."
        )
    return sliding_window


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
    rule: Callable[..., Tensor], rows: int, width: int, device: Any, custom: bool | None
) -> None:
    """Refuse rules that are not followed. Additions that make nothing more visible pass."""
    if torch.compiler.is_compiling():
        if custom:
            raise ConfigError(
                "a compiled model must not add rules of its own to the attention mask. Use "
                "attn_implementation='sdpa' or do not compile it."
            )
        torch._assert_async(~_ahead(rule, rows, width, device), "tokens see later tokens")
        return
    added = _added(rule)
    if added and bool(_ahead(rule, rows, width, device)):
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
