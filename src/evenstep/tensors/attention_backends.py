"""Attention within the segments of a batch, with the same result on every backend.

varlen    torch's variable-length flash attention: CUDA, half precision
flex      FlexAttention with a block mask that is built once per batch
causal    causal attention over rows of one segment each (padded layout)
segments  scaled dot product attention, one segment at a time
mask      scaled dot product attention with a dense mask, for many short segments
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.masks import block_mask, check_window, one_segment_per_row, sdpa_mask

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch < 2.10
    varlen_attn = None

TINY = 2048
"""Entries of a dense mask that cost about as much as one more call, measured on a CPU core."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The validated arguments of one call of `attention`."""

    q: Tensor  # (rows, heads, width, dim)
    k: Tensor  # (rows, kv heads, width, dim)
    v: Tensor
    batch: Batch
    causal: bool
    window: int | None
    scale: float | None

    def __post_init__(self) -> None:
        check_window(self.causal, self.window)
        q, k, v, batch = self.q, self.k, self.v, self.batch
        shape = (batch.rows, batch.width)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.ndim != 4 or (tensor.shape[0], tensor.shape[2]) != shape:
                raise InputError(
                    f"{name} has shape {tuple(tensor.shape)}, but the batch has {shape[0]} rows "
                    f"of {shape[1]} slots. Pass q, k and v as (rows, heads, width, dim)."
                )
        if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
            raise InputError(
                f"q has {q.shape[1]} heads, k has {k.shape[1]} and v has {v.shape[1]}. k and v "
                f"must have the same number of heads, a divisor of q's."
            )

    @property
    def shared(self) -> int:
        """Query heads per key head (grouped-query attention)."""
        return int(self.q.shape[1] // self.k.shape[1])

    def keys(self, repeat: bool) -> tuple[Tensor, Tensor]:
        """k and v; with `repeat`, each head is repeated for the query heads that share it."""
        if not repeat or self.shared == 1:
            return self.k, self.v
        return (
            self.k.repeat_interleave(self.shared, dim=1),
            self.v.repeat_interleave(self.shared, dim=1),
        )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute attention within each segment of a batch.

    q is (rows, heads, width, dim); k and v may have fewer heads, a divisor of q's.
    With `window`, a token attends to itself and the window - 1 tokens before it. Outputs of
    padding slots are finite and otherwise unspecified. `backend` names one of `BACKENDS`; None
    selects the fastest one that supports the call.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> q = k = torch.zeros(1, 1, 3, 8)
    >>> v = torch.tensor([1.0, 3.0, 7.0])[None, None, :, None].expand(1, 1, 3, 8)
    >>> attention(q, k, v, batch)[0, 0, :, 0].tolist()  # the third token attends to itself only
    [1.0, 2.0, 7.0]
    """
    call = Call(q, k, v, batch, causal, window, scale)
    if backend is None:
        return BACKENDS[_choose(call)].run(call)
    return _named(backend, call)


# Choosing ------------------------------------------------------------------------------------


def _named(name: str, call: Call) -> Tensor:
    if name not in BACKENDS:
        raise ConfigError(
            f"unknown attention backend {name!r}; expected one of: {', '.join(BACKENDS)}, or None "
            f"to select one automatically."
        )
    why = BACKENDS[name].refuses(call)
    if why is not None:
        raise ConfigError(
            f"the attention backend {name!r} {why}. Use another of {', '.join(BACKENDS)}, or None "
            f"to select one automatically."
        )
    return BACKENDS[name].run(call)


def _choose(call: Call) -> str:
    if call.q.is_cuda:
        # Neither reads the boundaries on the host, so there is no device synchronisation.
        for name in ("varlen", "flex"):
            if BACKENDS[name].refuses(call) is None:
                return name
    if _causal_refuses(call) is None:
        return "causal"
    batch = call.batch
    calls = len(batch.seqlens)
    return "mask" if batch.rows * batch.width**2 < TINY * calls else "segments"


# varlen --------------------------------------------------------------------------------------


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    """Parameters of `varlen_attn` in the installed torch.

    2.10 has is_causal; 2.11 has window_size and scale instead; 2.12 adds enable_gqa.
    """
    return frozenset(inspect.signature(varlen_attn).parameters)


def _varlen_refuses(call: Call) -> str | None:
    if varlen_attn is None:
        return f"is not part of torch {torch.__version__}"
    if not call.q.is_cuda:
        return f"supports CUDA only, not {call.q.device.type}"
    if call.q.dtype not in (torch.bfloat16, torch.float16):
        return f"supports bfloat16 and float16 only, not {call.q.dtype}"
    if call.q.shape[3] > 256 or call.q.shape[3] % 8 or call.q.shape[3] != call.v.shape[3]:
        return "requires one head dimension for q, k and v, a multiple of 8 up to 256"
    if call.window is not None and "window_size" not in _varlen_parameters():
        return f"of torch {torch.__version__} does not support a sliding window"
    return None


def _varlen(call: Call) -> Tensor:
    supported, q = _varlen_parameters(), call.q
    grouped = "enable_gqa" in supported
    k, v = call.keys(repeat=not grouped)
    options: dict[str, Any] = {"enable_gqa": True} if grouped and call.shared > 1 else {}
    if "window_size" in supported:
        back = -1 if call.window is None else call.window - 1
        options["window_size"] = (back, 0) if call.causal else (-1, -1)
    else:
        options["is_causal"] = call.causal
    if call.scale is not None:
        if "scale" in supported:
            options["scale"] = call.scale
        else:
            q = q * (call.scale * q.shape[3] ** 0.5)
    bounds, longest = call.batch.cu_seqlens, call.batch.max_seqlen
    # (rows, heads, width, dim) -> (slots, heads, dim)
    flat = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
    out = varlen_attn(*flat, bounds, bounds, longest, longest, **options)
    return out.unflatten(0, (call.batch.rows, call.batch.width)).transpose(1, 2)


# flex ----------------------------------------------------------------------------------------

# Building a block mask costs as much as several layers, and all layers of a model use the same one.
_block_masks: weakref.WeakKeyDictionary[Batch, dict[tuple[bool, int | None], BlockMask]]
_block_masks = weakref.WeakKeyDictionary()


def _block_mask(call: Call) -> BlockMask:
    masks = _block_masks.setdefault(call.batch, {})
    key = (call.causal, call.window)
    if key not in masks:
        masks[key] = block_mask(call.batch, causal=call.causal, window=call.window)
    return masks[key]


@functools.cache
def _flex_kernel(device: str) -> Callable[..., Tensor]:
    """Compiled on CUDA; eager on the CPU, where compiling takes a minute."""
    return torch.compile(flex_attention) if device == "cuda" else _eager_flex


def _eager_flex(*args: Any, **kwargs: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(*args, **kwargs)


def _flex_refuses(call: Call) -> str | None:
    needs_grad = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (call.q, call.k, call.v)
    )
    if call.q.device.type == "cpu" and needs_grad:
        return "does not support gradients on the CPU"
    if call.q.is_cuda and (call.q.shape[3] < 16 or call.q.dtype == torch.float64):
        return "requires head dimensions of at least 16 in single or half precision"
    return None


def _flex(call: Call) -> Tensor:
    # The kernels require a power of two of query heads per key head.
    repeat = bool(call.shared & (call.shared - 1))
    k, v = call.keys(repeat)
    return _flex_kernel(call.q.device.type)(
        call.q, k, v,
        block_mask=_block_mask(call),
        scale=call.scale,
        enable_gqa=call.shared > 1 and not repeat,
    )  # fmt: skip


# scaled dot product attention ----------------------------------------------------------------


def _sdpa(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v,
        attn_mask=mask,
        is_causal=call.causal and mask is None,
        scale=call.scale,
        enable_gqa=call.shared > 1,
    )  # fmt: skip


def _causal_refuses(call: Call) -> str | None:
    if not call.causal or (call.window is not None and call.window < call.batch.width):
        return "supports neither windows nor bidirectional attention"
    if not one_segment_per_row(call.batch):
        return "requires one segment per row"
    return None


def _causal(call: Call) -> Tensor:
    return _sdpa(call, call.q, call.k, call.v)


def _segments(call: Call) -> Tensor:
    lengths = call.batch.cu_seqlens.diff().tolist()
    # (rows, heads, width, dim) -> (1, heads, slots, dim), split into tiles. The backward of split
    # is cheap; each slice would allocate a gradient of all slots.
    flat = (t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (call.q, call.k, call.v))
    tiles = zip(lengths, *(tensor.split(lengths, dim=2) for tensor in flat), strict=True)
    out = torch.cat([_sdpa(call, q, k, v, _band(call, n)) for n, q, k, v in tiles if n], dim=2)
    return out[0].unflatten(1, (call.batch.rows, call.batch.width)).transpose(0, 1)


def _band(call: Call, length: int) -> Tensor | None:
    """The window mask within one tile; None where the window does not limit it."""
    if call.window is None or call.window >= length:
        return None
    every = torch.ones(length, length, dtype=torch.bool, device=call.q.device)
    return every.tril().triu(1 - call.window)


def _mask(call: Call) -> Tensor:
    mask = sdpa_mask(call.batch, causal=call.causal, window=call.window)
    return _sdpa(call, call.q, call.k, call.v, mask)


def _never(call: Call) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """A function that runs a call, and one that says why it cannot (None if it can)."""

    run: Callable[[Call], Tensor]
    refuses: Callable[[Call], str | None] = _never


BACKENDS: dict[str, Backend] = {
    "varlen": Backend(_varlen, _varlen_refuses),
    "flex": Backend(_flex, _flex_refuses),
    "causal": Backend(_causal, _causal_refuses),
    "segments": Backend(_segments),
    "mask": Backend(_mask),
}
