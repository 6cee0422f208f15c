"""Attention by scaled dot product or explicit scores: whole rows, one segment at a time, masked."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from evenstep.tensors.attention_call import Backend, Call
from evenstep.tensors.masks import sdpa_mask

LEAST = 64
"""Fewest queries of a block where a window limits the keys."""


def scaled(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of all queries to all keys, or to those of the mask; causal without a mask."""
    if not call.plain:
        return explicit(call, q, k, v, mask)
    return functional.scaled_dot_product_attention(
        q, k, v,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=call.causal and mask is None,
        scale=call.scale,
        enable_gqa=call.shared > 1,
    )  # fmt: skip


def explicit(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The same from the scores themselves, with a soft cap and sinks, in float32 or wider."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    # (rows, heads, queries, dim) -> (rows, kv heads, shared, queries, dim)
    query = q.unflatten(1, (k.shape[1], call.shared)).to(dtype)
    key, value = (tensor.unsqueeze(2).to(dtype) for tensor in (k, v))
    scores = (query * call.scaling) @ key.transpose(-1, -2)
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is None and call.causal:
        every = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = every.tril()
    if mask is not None:
        mask = mask.unsqueeze(1) if mask.ndim == 4 else mask
        scores = scores.masked_fill(~mask, -torch.inf)
    if call.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = call.sinks.to(dtype).view(1, k.shape[1], call.shared, 1, 1)
        sinks = sinks.expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    if call.dropout:
        weights = functional.dropout(weights, call.dropout)
    return (weights @ value).flatten(1, 2).to(v.dtype)


# Whole rows ----------------------------------------------------------------------------------


def _causal_refuses(call: Call) -> str | None:
    if not call.causal or (call.window is not None and call.window < call.bounds.width):
        return "supports neither windows nor bidirectional attention"
    if not call.bounds.one_per_row:
        return "requires one segment per row"
    return None


def _causal(call: Call) -> Tensor:
    return scaled(call, call.q, call.k, call.v, None)


# One segment at a time -----------------------------------------------------------------------


def _segments(call: Call) -> Tensor:
    lengths, bounds = call.bounds.lengths, call.bounds
    # (rows, heads, width, dim) -> (1, heads, slots, dim), split into tiles. The backward of split
    # is cheap; each slice would allocate a gradient of all slots.
    flat = (t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (call.q, call.k, call.v))
    tiles = zip(lengths, *(tensor.split(lengths, dim=2) for tensor in flat), strict=True)
    out = torch.cat([_segment(call, q, k, v) for n, q, k, v in tiles if n], dim=2)
    return out[0].unflatten(1, (bounds.rows, bounds.width)).transpose(0, 1)


def _segment(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention within one tile. A window limits the keys of each block of queries."""
    length, window = q.shape[2], call.window
    if window is None or window >= length:
        return scaled(call, q, k, v, None)
    size = max(window, LEAST)
    out = []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        first, last = max(begin - window + 1, 0), end
        if not call.causal:
            last = min(end + window - 1, length)
        away = torch.arange(begin, end, device=q.device)[:, None]
        away = away - torch.arange(first, last, device=q.device)
        mask = (away < window) & (away >= 0 if call.causal else away > -window)
        keys, values = k[:, :, first:last], v[:, :, first:last]
        out.append(scaled(call, q[:, :, begin:end], keys, values, mask))
    return torch.cat(out, dim=2)


# A dense mask --------------------------------------------------------------------------------


def _mask(call: Call) -> Tensor:
    mask = sdpa_mask(call.bounds, causal=call.causal, window=call.window)
    return scaled(call, call.q, call.k, call.v, mask)


CAUSAL = Backend(_causal, _causal_refuses)
SEGMENTS = Backend(_segments)
MASK = Backend(_mask)
