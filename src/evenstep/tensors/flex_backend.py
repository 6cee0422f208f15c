"""FlexAttention with a block mask that is built once per batch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from evenstep.tensors.attention_call import Backend, Call
from evenstep.tensors.masks import block_mask


def _block_mask(call: Call) -> BlockMask:
    """Building one costs as much as several layers, and all layers of a model use the same."""
    masks = call.bounds.kept.setdefault("block_masks", {})
    key = (call.causal, call.window)
    if key not in masks:
        masks[key] = block_mask(call.bounds, causal=call.causal, window=call.window)
    return masks[key]


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    """Compiled on CUDA; eager on the CPU, where compiling takes a minute."""
    return torch.compile(flex_attention) if device == "cuda" else _eager


def _eager(*args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(*args, **kwargs)


@functools.cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """The score function of a soft cap; one object per cap, because each is compiled once."""

    def cap(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _refuses(call: Call) -> str | None:
    if call.dropout:
        return "does not support dropout"
    if call.q.device.type == "cpu" and call.needs_grad:
        return "does not support gradients on the CPU"
    if call.q.is_cuda and (call.q.shape[3] < 16 or call.v.shape[3] < 16):
        return "requires head dimensions of at least 16"
    if call.q.is_cuda and call.q.dtype == torch.float64:
        return "supports single and half precision only"
    return None


def _flex(call: Call) -> Tensor:
    # The kernels require a power of two of query heads per key head.
    repeat = bool(call.shared & (call.shared - 1))
    k, v = call.keys(repeat)
    options: dict[str, Any] = {
        "block_mask": _block_mask(call),
        "scale": call.scale,
        "enable_gqa": call.shared > 1 and not repeat,
    }
    if call.q.is_cuda:
        # Fewer than 128 queries would take a kernel for decoding, which has none for float32.
        options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    if call.softcap is not None:
        options["score_mod"] = _capped(call.softcap)
    kernel = flex_attention if torch.compiler.is_compiling() else _kernel(call.q.device.type)
    if call.sinks is None:
        out: Tensor = kernel(call.q, k, v, **options)
        return out
    out, lse = _with_lse(kernel, call.q, k, v, options)
    # softmax over keys and sink = softmax over keys * (1 - probability of the sink)
    keys = torch.sigmoid(lse - call.sinks.to(lse.dtype).view(1, -1, 1))
    return out * keys.unsqueeze(-1).to(out.dtype)


def _with_lse(
    kernel: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    if hasattr(module, "AuxRequest"):
        out, aux = kernel(q, k, v, return_aux=module.AuxRequest(lse=True), **options)
        return out, aux.lse
    out, lse = kernel(q, k, v, return_lse=True, **options)  # torch < 2.9
    return out, lse


FLEX = Backend(_flex, _refuses)
