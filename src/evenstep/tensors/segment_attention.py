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

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from evenstep.core.ragged import divided_up
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import Batch, Boundaries
from evenstep.tensors.varlen import varlen

BLOCK = 128
"""Slots per side of a FlexAttention block."""
LEAST = 64
"""Fewest queries of a block where a window limits the keys."""
LARGEST = 256
"""Largest head dimension of the kernels of flash attention."""
TINY = 2048
"""Entries of a dense mask that cost about as much as one more call, measured on a CPU core."""

# Importing it takes a second: it imports the compiler.
_IN_TORCH = find_spec("torch.nn.attention.varlen") is not None  # not in torch < 2.10
_SEES_OTHERS = "supports no segment that sees another one"

# Masks -----------------------------------------------------------------------------------------


def check_window(window: int | None) -> None:
    """Raise if the window is not positive."""
    if window is not None and window < 1:
        raise ConfigError(f"window must be at least 1, or None for no window; got {window}.")


def visible(
    bounds: Boundaries, causal: bool = True, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """The first and last slot of its row that each slot attends to, (rows, width) each.

    A window reaches window - 1 slots back and, without `causal`, as far ahead.

    Both never decrease along a row, and a slot attends to itself; `block_mask` relies on this.
    cu_seqlens [0, 3, 5] in one row -> first [0, 0, 0, 3, 3], last [0, 1, 2, 3, 4].
    """
    check_window(window)
    row = torch.arange(bounds.rows, device=bounds.device)[:, None] * bounds.width
    slot = torch.arange(bounds.width, device=bounds.device).expand(bounds.rows, -1)
    first = bounds.cu_seqlens[bounds.segment_ids] - row
    last = slot if causal else bounds.cu_seqlens[bounds.segment_ids + 1] - row - 1
    if window is not None:
        first = torch.maximum(first, slot - (window - 1))
        last = torch.minimum(last, slot + (window - 1))
    return first, last


def sdpa_mask(
    batch: Batch | Boundaries, *, causal: bool = True, window: int | None = None
) -> Tensor:
    """The mask for `scaled_dot_product_attention`: (rows, 1, width, width) bool, True = attend.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> sdpa_mask(batch)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    bounds = batch if isinstance(batch, Boundaries) else Boundaries.of(batch)
    first, last = visible(bounds, causal, window)
    slot = torch.arange(bounds.width, device=bounds.device)
    return ((first[..., None] <= slot) & (slot <= last[..., None])).unsqueeze(1)


def block_mask(
    batch: Batch | Boundaries, *, causal: bool = True, window: int | None = None
) -> BlockMask:
    """The mask for `flex_attention`, built without a width × width tensor.

    The keys of a query block are one contiguous range, from the first key of its first query to
    the last key of its last query. A key block is computed if it overlaps the range, and needs no
    mask if both the first and the last query of the block attend to all of it.

        flex_attention(q, k, v, block_mask=block_mask(batch))
    """
    bounds = batch if isinstance(batch, Boundaries) else Boundaries.of(batch)
    first, last = visible(bounds, causal, window)
    count = divided_up(bounds.width, BLOCK)
    begin = torch.arange(count, device=bounds.device) * BLOCK
    end = torch.clamp(begin + BLOCK, max=bounds.width) - 1
    overlaps = (last[:, end, None] >= begin) & (first[:, begin, None] <= end)
    whole = (first[:, end, None] <= begin) & (last[:, begin, None] >= begin + BLOCK - 1)
    whole &= (begin + BLOCK <= bounds.width)[:, None]
    return BlockMask.from_kv_blocks(
        *_listed(overlaps & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(bounds.segment_ids, causal, window),
        seq_lengths=(bounds.width, bounds.width),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, queries, keys) bool -> number of key blocks per query block, and their indices."""
    listed = blocks.int().argsort(dim=-1, descending=True, stable=True)
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    return counts.unsqueeze(1), listed.int().unsqueeze(1).contiguous()


def _mask_mod(tiles: Tensor, causal: bool, window: int | None):  # type: ignore[no-untyped-def]
    """FlexAttention's mask function. It refers to the tile numbers only, not to the batch."""

    def same(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return tiles[row, query] == tiles[row, key]

    def before(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (tiles[row, query] == tiles[row, key]) & (key <= query)

    def near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query - key < window)
        return (tiles[row, query] == tiles[row, key]) & seen

    def around(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key - query < window) & (query - key < window)
        return (tiles[row, query] == tiles[row, key]) & seen

    if window is None:
        return before if causal else same
    return near if causal else around


def one_segment_per_row(batch: Batch) -> bool:
    """Whether every segment begins a row (padded layout, or a single sequence)."""
    return Boundaries.of(batch).one_per_row


# Calls and backends ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """q, k and v, where segments begin and end, and what the softmax does.

    k and v have the rows and width of `bounds.keys`, which are those of q today.

    softcap  scores become softcap * tanh(scores / softcap), before masking
    sinks    (heads) one logit per query head that joins the denominator of the softmax
    dropout  probability of dropping an attention weight
    """

    q: Tensor  # (rows, heads, width, dim)
    k: Tensor  # (rows, kv heads, width, dim)
    v: Tensor  # (rows, kv heads, width, value dim)
    bounds: Boundaries
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_window(self.window)
        q, k, v, keys = self.q, self.k, self.v, self.bounds.keys
        for name, tensor, bounds in (("q", q, self.bounds), ("k", k, keys), ("v", v, keys)):
            shape = (bounds.rows, bounds.width)
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
        if self.softcap is not None and not self.softcap > 0:
            raise ConfigError(f"softcap must be positive, or None for none; got {self.softcap}.")
        if self.sinks is not None and tuple(self.sinks.shape) != (q.shape[1],):
            raise InputError(
                f"sinks has shape {tuple(self.sinks.shape)}, expected one logit for each of the "
                f"{q.shape[1]} heads of q, ({q.shape[1]},)."
            )

    @property
    def shared(self) -> int:
        """Query heads per key head (grouped-query attention)."""
        return int(self.q.shape[1] // self.k.shape[1])

    @property
    def scaling(self) -> float:
        """What scores are multiplied by."""
        return float(self.q.shape[3] ** -0.5 if self.scale is None else self.scale)


def _never(call: Call) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """A function that runs a call, and one that says why it cannot (None if it can)."""

    run: Callable[[Call], Tensor]
    refuses: Callable[[Call], str | None] = _never


def scaled(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of all queries to all keys, or to those of the mask; causal without a mask."""
    if call.softcap is not None or call.sinks is not None:
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


def _causal_refuses(call: Call) -> str | None:
    if call.bounds.seen is not None:
        return _SEES_OTHERS
    if not call.causal or (call.window is not None and call.window < call.bounds.width):
        return "supports neither windows nor bidirectional attention"
    if not call.bounds.one_per_row:
        return "requires one segment per row"
    return None


def _causal(call: Call) -> Tensor:
    return scaled(call, call.q, call.k, call.v, None)


def _segments(call: Call) -> Tensor:
    bounds, keys = call.bounds, call.bounds.keys
    # (rows, heads, width, dim) -> (1, heads, slots, dim), split into tiles. The backward of split
    # is cheap; each slice would allocate a gradient of all slots.
    flat = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (call.q, call.k, call.v))
    lengths = (bounds.lengths, keys.lengths, keys.lengths)
    tiles = [tensor.split(sizes, dim=2) for tensor, sizes in zip(flat, lengths, strict=True)]
    parts = [_segment(call, q, k, v) for q, k, v in zip(*tiles, strict=True) if q.shape[2]]
    out = torch.cat(parts, dim=2)
    return out[0].unflatten(1, (bounds.rows, bounds.width)).transpose(0, 1)


def _segment(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention within one tile. A window limits the keys of each block of queries.

    The last query and the last key belong to the same token: 2 queries see 4 keys as the tokens
    2 and 3 of 4 would.
    """
    length, keys, window = q.shape[2], k.shape[2], call.window
    before = keys - length  # keys in front of the first query
    if not before and (window is None or window >= length):
        return scaled(call, q, k, v, None)
    reach, size = (keys, length) if window is None else (window, max(window, LEAST))
    out = []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        first, last = max(before + begin - reach + 1, 0), before + end
        if not call.causal:
            last = min(last + reach - 1, keys)
        away = torch.arange(before + begin, before + end, device=q.device)[:, None]
        away = away - torch.arange(first, last, device=q.device)
        mask = (away < reach) & (away >= 0 if call.causal else away > -reach)
        seen = k[:, :, first:last], v[:, :, first:last]
        out.append(scaled(call, q[:, :, begin:end], *seen, mask))
    return torch.cat(out, dim=2)


def _mask_refuses(call: Call) -> str | None:
    return None if call.bounds.seen is None else _SEES_OTHERS


def _mask(call: Call) -> Tensor:
    mask = sdpa_mask(call.bounds, causal=call.causal, window=call.window)
    return scaled(call, call.q, call.k, call.v, mask)


# FlexAttention ---------------------------------------------------------------------------------


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


def _flex_refuses(call: Call) -> str | None:
    if call.dropout:
        return "does not support dropout"
    inputs = (call.q, call.k, call.v, call.sinks)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if call.q.device.type == "cpu" and needs_grad:
        return "does not support gradients on the CPU"
    if call.q.is_cuda and (call.q.shape[3] < 16 or call.v.shape[3] < 16):
        return "requires head dimensions of at least 16"
    if call.q.is_cuda and call.q.dtype == torch.float64:
        return "supports single and half precision only"
    return None if call.bounds.seen is None else _SEES_OTHERS


def _flex(call: Call) -> Tensor:
    # The kernels require a power of two of query heads per key head.
    repeat = bool(call.shared & (call.shared - 1))
    k, v = call.k, call.v
    if repeat:
        k, v = (tensor.repeat_interleave(call.shared, dim=1) for tensor in (k, v))
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
    if hasattr(flex, "AuxRequest"):
        out, aux = kernel(q, k, v, return_aux=flex.AuxRequest(lse=True), **options)
        return out, aux.lse
    out, lse = kernel(q, k, v, return_lse=True, **options)  # torch < 2.9
    return out, lse


# Variable-length flash attention --------------------------------------------------------------


def _varlen_refuses(call: Call) -> str | None:
    if call.dropout:
        return "does not support dropout"
    if not call.q.is_cuda:
        compiled = torch.compiler.is_compiling()
        return None if compiled else f"supports CUDA only, not {call.q.device.type}"
    if not _IN_TORCH:
        return f"is not part of torch {torch.__version__}"
    if call.q.dtype not in (torch.bfloat16, torch.float16):
        return f"supports bfloat16 and float16 only, not {call.q.dtype}"
    if max(call.q.shape[3], call.v.shape[3]) > LARGEST:
        return f"requires head dimensions of at most {LARGEST}"
    if call.softcap is not None:
        return "does not support a soft cap"
    if call.bounds.tiles > max(call.bounds.rows * call.bounds.width // 2, 4096):
        return "is slow for tiles of one slot"  # a compiled model may not know how many there are
    return None


def _widened(x: Tensor, size: int) -> Tensor:
    if x.shape[2] == size:  # pad would copy
        return x if x.stride(2) == 1 else x.contiguous()
    return functional.pad(x, (0, size - x.shape[2]))


def _varlen(call: Call) -> Tensor:
    bounds = call.bounds
    # (rows, heads, width, dim) -> (slots, heads, dim)
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (call.q, call.k, call.v))
    dim = v.shape[2]
    if q.is_cuda:
        # The kernels take one dimension, a multiple of 8. Zeros change neither scores nor outputs.
        size = -(-max(q.shape[2], dim) // 8) * 8
        q, k, v = (_widened(x, size) for x in (q, k, v))
    keys = bounds.keys
    out, _ = varlen(
        q, k, v, bounds.cu_seqlens, keys.cu_seqlens, bounds.max_seqlen, keys.max_seqlen,
        call.causal, call.window or 0, call.scaling, call.softcap or 0.0, call.sinks,
    )  # fmt: skip
    out = out if out.shape[2] == dim else out[..., :dim]
    return out.unflatten(0, (bounds.rows, bounds.width)).transpose(1, 2)


BACKENDS: dict[str, Backend] = {
    "varlen": Backend(_varlen, _varlen_refuses),
    "flex": Backend(_flex, _flex_refuses),
    "causal": Backend(_causal, _causal_refuses),
    "segments": Backend(_segments),
    "mask": Backend(_mask, _mask_refuses),
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
    if BACKENDS["causal"].refuses(call) is None:
        return "causal"
    bounds = call.bounds
    tiny = bounds.rows * bounds.width**2 < TINY * bounds.tiles
    return "mask" if tiny and bounds.seen is None else "segments"
