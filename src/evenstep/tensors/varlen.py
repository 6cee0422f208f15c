"""Variable-length flash attention with sinks: half precision on CUDA, and any device if compiled.

torch's `varlen_attn` differs between releases and ignores the gradient of the log-sum-exp that it
returns, which sinks need. Both operators that it calls are the same in all releases since 2.10, so
they are called here: with window, scale and fewer key heads in every release, and in the backward
with the outputs and the log-sum-exp *after* the sink.

    lse' = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse')

With these the backward computes the weights exp(score - lse') and rowsum(d_out * out'), which are
those of the softmax with the sink, so dq, dk and dv are exact. The sink has the weight
exp(sink - lse') and the value 0: d_sink = -sum(exp(sink - lse') * rowsum(d_out * out')).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("evenstep::varlen", mutates_args=())  # type: ignore[untyped-decorator]
def varlen(
    q: Tensor,  # (slots, heads, dim)
    k: Tensor,  # (keys, kv heads, dim)
    v: Tensor,
    cu_seqlens: Tensor,  # tile i of the queries attends to tile i of the keys
    cu_seqlens_k: Tensor,
    longest: int,
    longest_k: int,
    causal: bool,  # aligned at the end: the last query of a tile sees its last key
    window: int,  # 0 for none
    scale: float,
    softcap: float,  # 0 for none
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs (slots, heads, dim) and the log-sum-exp (heads, slots), both after the sink.

    Contiguous: compiled code relies on the strides of the fake. The kernels follow those of q.
    """
    if q.is_cuda:
        assert not softcap
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens_k, longest, longest_k, 0.0, causal and not window,
            return_debug_mask=False, scale=scale, **_sides(causal, window),
        )  # fmt: skip
    else:
        tiles = _tiles(cu_seqlens, cu_seqlens_k)
        out, lse = _tiles_forward(q, k, v, tiles, causal, window, scale, softcap)
    if sinks is None:
        return out.contiguous(), lse.contiguous()
    both = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))
    keys = torch.exp(lse - both).transpose(0, 1).unsqueeze(2)
    return (out * keys).to(out.dtype).contiguous(), both.contiguous()


@varlen.register_fake  # type: ignore[untyped-decorator]
def _varlen_fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor, longest: int,
    longest_k: int, causal: bool, window: int, scale: float, softcap: float, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=_wide(q))
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), lse


@torch.library.custom_op("evenstep::varlen_backward", mutates_args=())  # type: ignore[untyped-decorator]
def varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    longest: int,
    longest_k: int,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous."""
    if q.is_cuda:
        # Both describe the dropout, of which there is none.
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        gradients = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse, cu_seqlens, cu_seqlens_k, longest, longest_k,
            0.0, causal and not window, random, unused, scale=scale, **_sides(causal, window),
        )  # fmt: skip
    else:
        tiles = _tiles(cu_seqlens, cu_seqlens_k)
        gradients = _tiles_backward(grad, q, k, v, out, lse, tiles, causal, window, scale, softcap)
    dq, dk, dv = (gradient.contiguous() for gradient in gradients)
    return dq, dk, dv


@varlen_backward.register_fake  # type: ignore[untyped-decorator]
def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    cu_seqlens_k: Tensor, longest: int, longest_k: int, causal: bool, window: int, scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, cu_seqlens_k, *how, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, cu_seqlens_k, sinks)
    ctx.mark_non_differentiable(output[1])
    ctx.how = how


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    dq, dk, dv = varlen_backward(grad, *saved, *ctx.how)
    ds = None
    if sinks is not None:
        out, lse = saved[3:5]
        delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(2).transpose(0, 1)
        weight = torch.exp(sinks.to(lse.dtype).unsqueeze(1) - lse)
        ds = -(weight * delta).sum(1).to(sinks.dtype)
    return dq, dk, dv, None, None, *(None for _ in ctx.how), ds


varlen.register_autograd(_differentiate, setup_context=_keep)


def _sides(causal: bool, window: int) -> dict[str, int]:
    """How far the kernels of CUDA look back and ahead; -1: everywhere."""
    back = window - 1 if window else -1
    return {"window_size_left": back, "window_size_right": 0 if causal else back}


# Other devices: the same operators, one tile at a time. Compiled models call them on the CPU, and
# tests compare the formulas above with the definition.


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _tiles(cu_seqlens: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """Slots and keys of each tile that is not empty."""
    both = zip(pairwise(cu_seqlens.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    return [(slice(*slots), slice(*keys)) for slots, keys in both if slots[1] > slots[0]]


def _of_tile(tensor: Tensor, slots: slice, repeat: int = 1) -> Tensor:
    """(slots, heads, dim) -> the (heads * repeat, n, dim) part of one tile."""
    part = tensor[slots].transpose(0, 1).to(_wide(tensor))
    return part.repeat_interleave(repeat, 0) if repeat > 1 else part


def _scores(q: Tensor, k: Tensor, causal: bool, window: int, scale: float, softcap: float) -> Any:
    """(heads, n, keys) scores, -inf where masked, and their derivative by the product of q and k.

    2 queries and 4 keys: the queries have the places 2 and 3.
    """
    scores = (q @ k.transpose(1, 2)) * scale
    slope = torch.full_like(scores, scale)
    if softcap:
        tanh = torch.tanh(scores / softcap)
        scores, slope = tanh * softcap, (1 - tanh**2) * scale
    keys = torch.arange(k.shape[1], device=q.device)
    away = keys[len(keys) - q.shape[1] :, None] - keys
    hidden = away < 0 if causal else torch.zeros_like(away, dtype=torch.bool)
    if window:
        hidden = hidden | (away >= window) | (away <= -window)
    return scores.masked_fill(hidden, -torch.inf), slope


def _tiles_forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: list[tuple[slice, slice]], *how: Any
) -> tuple[Tensor, Tensor]:
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_zeros(q.shape[1], q.shape[0], dtype=_wide(q))
    shared = q.shape[1] // k.shape[1]
    for slots, keys in tiles:
        key, value = (_of_tile(x, keys, shared) for x in (k, v))
        scores, _ = _scores(_of_tile(q, slots), key, *how)
        lse[:, slots] = scores.logsumexp(-1)
        out[slots] = (scores.softmax(-1) @ value).transpose(0, 1).to(out.dtype)
    return out, lse


def _tiles_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    tiles: list[tuple[slice, slice]], *how: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    for slots, keys in tiles:
        query, upstream, mixed = (_of_tile(x, slots) for x in (q, grad, out))
        key, value = (_of_tile(x, keys, heads[1]) for x in (k, v))
        scores, slope = _scores(query, key, *how)
        weights = torch.exp(scores - lse[:, slots, None])
        delta = (upstream * mixed).sum(-1, keepdim=True)
        inner = weights * (upstream @ value.transpose(1, 2) - delta) * slope
        dq[slots] = (inner @ key).transpose(0, 1).to(q.dtype)
        of_keys, of_values = inner.transpose(1, 2) @ query, weights.transpose(1, 2) @ upstream
        for into, gradient in ((dk, of_keys), (dv, of_values)):
            into[keys] = gradient.unflatten(0, heads).sum(1).transpose(0, 1).to(into.dtype)
    return dq, dk, dv
