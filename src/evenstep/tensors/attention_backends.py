"""Attention within the segments of a batch, with the same result on every backend.

varlen    variable-length flash attention: CUDA, half precision
flex      FlexAttention with a block mask that is built once per batch
causal    causal attention over rows of one segment each (padded layout)
segments  scaled dot product attention, one segment at a time
mask      scaled dot product attention with a dense mask, for many short segments

        soft cap  sinks  dropout  gradients on the CPU
varlen            x               if compiled
flex    x         x
others  x         x      x        x
"""

from __future__ import annotations

import torch
from torch import Tensor

from evenstep.errors import ConfigError
from evenstep.tensors.attention_call import Backend, Call
from evenstep.tensors.batch import Batch
from evenstep.tensors.boundaries import Boundaries
from evenstep.tensors.flex_backend import FLEX
from evenstep.tensors.segment_attention import CAUSAL, MASK, SEGMENTS
from evenstep.tensors.varlen_backend import VARLEN

TINY = 2048
"""Entries of a dense mask that cost about as much as one more call, measured on a CPU core."""

BACKENDS: dict[str, Backend] = {
    "varlen": VARLEN,
    "flex": FLEX,
    "causal": CAUSAL,
    "segments": SEGMENTS,
    "mask": MASK,
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute attention within each segment of a batch.

    q is (rows, heads, width, dim); k and v may have fewer heads, a divisor of q's.
    With `window`, a token attends to itself and the window - 1 tokens before it; without `causal`,
    also to the window - 1 tokens after it. `softcap` limits scores to softcap * tanh(score /
    softcap). `sinks` (heads) are logits that join the denominator of the softmax. Outputs of
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
    call = Call(q, k, v, Boundaries.of(batch), causal, window, scale, softcap, sinks)
    return attend(call) if backend is None else _named(backend, call)


def attend(call: Call) -> Tensor:
    """Run a call on the fastest backend that supports it."""
    return BACKENDS[choose(call)].run(call)


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


def choose(call: Call) -> str:
    """The name of the fastest backend that supports a call."""
    if call.q.is_cuda or torch.compiler.is_compiling():
        # Neither reads the boundaries on the host, so there is no device synchronisation.
        for name in ("varlen", "flex"):
            if BACKENDS[name].refuses(call) is None:
                return name
    if CAUSAL.refuses(call) is None:
        return "causal"
    bounds = call.bounds
    return "mask" if bounds.rows * bounds.width**2 < TINY * bounds.tiles else "segments"
