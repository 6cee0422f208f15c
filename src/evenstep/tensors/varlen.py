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
    k: Tensor,  # (slots, kv heads, dim)
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    causal: bool,
    window: int,  # 0 for none
    scale: float,
    softcap: float,  # 0 for none
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs (slots, heads, dim) and the log-sum-exp (heads, slots), both after the sink.

    Contiguous: compiled code relies on the strides of the fake. The kernels follow those of q.
    """
    run = _flash_forward if q.is_cuda else _tiles_forward
    out, lse = run(q, k, v, cu_seqlens, longest, causal, window, scale, softcap)
    if sinks is None:
        return out.contiguous(), lse.contiguous()
    both = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))
    keys = torch.exp(lse - both).transpose(0, 1).unsqueeze(2)
    return (out * keys).to(out.dtype).contiguous(), both.contiguous()


@varlen.register_fake  # type: ignore[untyped-decorator]
def _varlen_fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, causal: bool, window: int,
    scale: float, softcap: float, sinks: Tensor | None,
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
    longest: int,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous."""
    run = _flash_backward if q.is_cuda else _tiles_backward
    found = run(grad, q, k, v, out, lse, cu_seqlens, longest, causal, window, scale, softcap)
    dq, dk, dv = (each.contiguous() for each in found)
    return dq, dk, dv


@varlen_backward.register_fake  # type: ignore[untyped-decorator]
def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    longest: int, causal: bool, window: int, scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *how, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, sinks)
    ctx.mark_non_differentiable(output[1])
    ctx.how = how


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens, sinks = ctx.saved_tensors
    dq, dk, dv = varlen_backward(grad, q, k, v, out, lse, cu_seqlens, *ctx.how)
    ds = None
    if sinks is not None:
        delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(2).transpose(0, 1)
        weight = torch.exp(sinks.to(lse.dtype).unsqueeze(1) - lse)
        ds = -(weight * delta).sum(1).to(sinks.dtype)
    return dq, dk, dv, None, *(None for _ in ctx.how), ds


varlen.register_autograd(_differentiate, setup_context=_keep)


# CUDA ----------------------------------------------------------------------------------------


def _sides(causal: bool, window: int) -> dict[str, int]:
    back = window - 1 if window else -1
    return {"window_size_left": back, "window_size_right": 0 if causal else back}


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, causal: bool, window: int,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert not softcap
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest,
        0.0, causal and not window, return_debug_mask=False, scale=scale, **_sides(causal, window),
    )  # fmt: skip
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    longest: int, causal: bool, window: int, scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # Both describe the dropout, of which there is none.
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, lse, cu_seqlens, cu_seqlens, longest, longest,
        0.0, causal and not window, random, unused, scale=scale, **_sides(causal, window),
    )  # fmt: skip
    return dq, dk, dv


# Other devices: the same operators, one tile at a time. Compiled models call them on the CPU, and
# tests compare the formulas above with the definition.


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _scores(q: Tensor, k: Tensor, causal: bool, window: int, scale: float, softcap: float) -> Any:
    """(heads, n, n) scores, -inf where masked, and their derivative by the product of q and k."""
    scores = (q @ k.transpose(1, 2)) * scale
    slope = torch.full_like(scores, scale)
    if softcap:
        tanh = torch.tanh(scores / softcap)
        scores, slope = tanh * softcap, (1 - tanh**2) * scale
    slots = torch.arange(q.shape[1], device=q.device)
    away = slots[:, None] - slots
    hidden = away < 0 if causal else torch.zeros_like(away, dtype=torch.bool)
    if window:
        hidden = hidden | (away >= window) | (away <= -window)
    return scores.masked_fill(hidden, -torch.inf), slope


def _tiles(cu_seqlens: Tensor, *tensors: Tensor) -> Any:
    """(slots, heads, dim) tensors -> the slots of each tile, and its (heads, n, dim) parts."""
    for begin, end in pairwise(cu_seqlens.tolist()):
        if end > begin:
            parts = (x[begin:end].transpose(0, 1).to(_wide(x)) for x in tensors)
            yield slice(begin, end), *parts


def _tiles_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, causal: bool, window: int,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_zeros(q.shape[1], q.shape[0], dtype=_wide(q))
    shared = q.shape[1] // k.shape[1]
    for tile, query, key, value in _tiles(cu_seqlens, q, k, v):
        key, value = (x.repeat_interleave(shared, 0) for x in (key, value))
        scores, _ = _scores(query, key, causal, window, scale, softcap)
        lse[:, tile] = scores.logsumexp(-1)
        out[tile] = (scores.softmax(-1) @ value).transpose(0, 1).to(out.dtype)
    return out, lse


def _tiles_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    longest: int, causal: bool, window: int, scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    for tile, query, key, value, given, mixed in _tiles(cu_seqlens, q, k, v, grad, out):
        key, value = (x.repeat_interleave(heads[1], 0) for x in (key, value))
        scores, slope = _scores(query, key, causal, window, scale, softcap)
        weights = torch.exp(scores - lse[:, tile, None])
        delta = (given * mixed).sum(-1, keepdim=True)
        inner = weights * (given @ value.transpose(1, 2) - delta) * slope
        dq[tile] = (inner @ key).transpose(0, 1).to(q.dtype)
        for into, found in (
            (dk, inner.transpose(1, 2) @ query),
            (dv, weights.transpose(1, 2) @ given),
        ):
            into[tile] = found.unflatten(0, heads).sum(1).transpose(0, 1).to(into.dtype)
    return dq, dk, dv
