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
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from evenstep.core.ragged import divided_up, rounded_up
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import Batch, Boundaries
from evenstep.tensors.head import wide
from evenstep.tensors.transport import sum_rows

BLOCK = 128
"""Slots per side of a FlexAttention block."""
LEAST = 64
"""Fewest queries of a block where a window limits the keys."""
MASKED = 256
"""Queries of a block where keys are in front of a segment: masks grow with keys alone."""
LARGEST = 256
"""Largest head dimension of the kernels of flash attention."""
FEW = 256
"""Slots of a segment, on average, from which one at a time is faster in float32 on a GPU."""
TINY = 2048
"""Entries of a dense mask that cost about as much as one more call, measured on a CPU core."""

# Importing it takes a second: it imports the compiler.
_IN_TORCH = find_spec("torch.nn.attention.varlen") is not None  # not in torch < 2.10

# Masks -----------------------------------------------------------------------------------------


def check_window(window: int | None) -> None:
    """Raise if the window is not positive."""
    if window is not None and window < 1:
        raise ConfigError(f"window must be at least 1, or None for no window; got {window}.")


def visible(bounds: Boundaries, causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
    """The first and last slot of its row that attend to each slot, (rows, width) each.

    A window reaches window - 1 slots ahead and, without `causal`, as far back. A slot attends to
    itself. Segments that see others lie behind them, so all slots that see a slot are one range; a
    window of such segments is one of `positions`, not of slots.
    cu_seqlens [0, 3, 5] in one row -> first [0, 1, 2, 3, 4], last [2, 2, 2, 4, 4]; if the second
    segment sees the first, last [4, 4, 4, 4, 4].
    """
    check_window(window)
    device = bounds.cu_seqlens.device
    row = torch.arange(bounds.rows, device=device)[:, None] * bounds.width
    slot = torch.arange(bounds.width, device=device).expand(bounds.rows, -1)
    tiles = last_tile = bounds.segment_ids
    if bounds.seen is not None:
        assert bounds.index is not None
        seeing = bounds.seen.segment_ids.flatten()
        last_tile = tiles.flatten().scatter_reduce(0, bounds.index, seeing, "amax").view_as(tiles)
    first = slot if causal else bounds.cu_seqlens[tiles] - row
    last = bounds.cu_seqlens[last_tile + 1] - row - 1
    if window is not None and bounds.seen is None:
        first = torch.maximum(first, slot - (window - 1))
        last = torch.minimum(last, slot + (window - 1))
    return first, last


def positions(bounds: Boundaries) -> Tensor:
    """(rows, width): the place of each slot among the keys that its tile sees."""
    tiles, ends = bounds.segment_ids, bounds.keys.cu_seqlens
    slot = torch.arange(tiles.numel(), device=tiles.device).view_as(tiles)
    return slot - bounds.cu_seqlens[tiles + 1] + (ends[1:] - ends[:-1])[tiles]


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
    bounds = batch if isinstance(batch, Boundaries) else Boundaries.of(batch, causal)
    seen = _mask_mod(bounds, *visible(bounds, causal, window), window)
    row = torch.arange(bounds.rows, device=bounds.cu_seqlens.device)[:, None, None]
    slot = torch.arange(bounds.width, device=row.device)
    return seen(row, row, slot[:, None], slot).unsqueeze(1)


def block_mask(
    batch: Batch | Boundaries, *, causal: bool = True, window: int | None = None
) -> BlockMask:
    """The mask for `flex_attention`, built without a width × width tensor.

    The queries of a key block are one contiguous range. A block of queries is computed if it
    overlaps the range, and needs no mask if all of it attends to every key of the block. Where
    segments see others, a window may leave blocks to compute of which nothing is seen.

        flex_attention(q, k, v, block_mask=block_mask(batch))
    """
    bounds = batch if isinstance(batch, Boundaries) else Boundaries.of(batch, causal)
    slots = visible(bounds, causal, window)
    first, last = map(_extremes, slots)
    begin = torch.arange(divided_up(bounds.width, BLOCK), device=slots[0].device) * BLOCK
    end = torch.clamp(begin + BLOCK, max=bounds.width) - 1
    # (rows, query blocks, key blocks)
    overlaps = (first[0] <= end[:, None]) & (last[1] >= begin[:, None])
    whole = (first[1] <= begin[:, None]) & (last[0] >= begin[:, None] + BLOCK - 1)
    whole &= begin + BLOCK <= bounds.width
    if window is not None and bounds.seen is not None:
        low, high = _extremes(positions(bounds))
        overlaps &= (low.mT - high < window) & (low - high.mT < window)
        whole &= (high.mT - low < window) & (high - low.mT < window)
    return BlockMask.from_kv_blocks(
        *_listed(overlaps & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(bounds, *slots, window),
        seq_lengths=(bounds.width, bounds.width),
    )


def _extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, width) -> the least and the largest of each block, (rows, 1, blocks) each."""
    count = divided_up(values.shape[1], BLOCK)
    slots = torch.arange(count * BLOCK, device=values.device).clamp(max=values.shape[1] - 1)
    blocks = values[:, slots].unflatten(1, (count, BLOCK))
    return blocks.amin(-1).unsqueeze(1), blocks.amax(-1).unsqueeze(1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, queries, keys) bool -> number of key blocks per query block, and their indices."""
    listed = blocks.int().argsort(dim=-1, descending=True, stable=True)
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    return counts.unsqueeze(1), listed.int().unsqueeze(1).contiguous()


def _mask_mod(
    bounds: Boundaries, first: Tensor, last: Tensor, window: int | None
) -> Callable[..., Tensor]:
    """FlexAttention's mask function. It refers to tensors of its own only, not to the batch."""

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[row, key] <= query) & (query <= last[row, key])

    if window is None or bounds.seen is None:
        return seen
    place = positions(bounds)

    def near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        away = place[row, query] - place[row, key]
        return seen(row, head, query, key) & (away < window) & (away > -window)

    return near


def _near(queries: Tensor, keys: Tensor, causal: bool, window: int | None) -> Tensor:
    """(queries, keys) bool: which keys tokens attend to, by their places in one sequence."""
    away, reach = queries[:, None] - keys, window or len(keys)
    return (away < reach) & (away >= 0 if causal else away > -reach)


def one_segment_per_row(batch: Batch) -> bool:
    """Whether every segment begins a row (padded layout, or a single sequence)."""
    return Boundaries.of(batch).one_per_row


# Calls and backends ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """q, k and v, where segments begin and end, and what the softmax does.

    k and v have the rows and width of q, and behind them what `bounds.received` from other ranks. A
    backend gathers the keys of `bounds.index`, if segments see others.

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
        q, k, v = self.q, self.k, self.v
        own = seen = (self.bounds.rows, self.bounds.width)
        if self.bounds.received:
            seen = (1, own[0] * own[1] + self.bounds.received)
        for name, tensor, shape in (("q", q, own), ("k", k, seen), ("v", v, seen)):
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
        enable_gqa=call.k.shape[1] < call.q.shape[1],
    )  # fmt: skip


def explicit(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The same from the scores themselves, with a soft cap and sinks, in float32 or wider."""
    with torch.autocast(q.device.type, enabled=False):
        # (rows, heads, queries, dim) -> (rows, kv heads, shared, queries, dim)
        query = wide(q).unflatten(1, (k.shape[1], call.shared))
        key, value = (wide(tensor).unsqueeze(2) for tensor in (k, v))
        scores = (query * call.scaling) @ key.transpose(-1, -2)
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if mask is None and call.causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            mask = mask.unsqueeze(1) if mask.ndim == 4 else mask
            scores = scores.masked_fill(~mask, -torch.inf)
        if call.sinks is None:
            weights = scores.softmax(-1)
        else:
            sinks = call.sinks.to(scores).view(1, k.shape[1], call.shared, 1, 1)
            both = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
            weights = both.softmax(-1)[..., :-1]
        if call.dropout:
            weights = functional.dropout(weights, call.dropout)
        return (weights @ value).flatten(1, 2).to(v.dtype)


def _segments(call: Call) -> Tensor:
    bounds, keys = call.bounds, call.bounds.keys
    # (rows, heads, width, dim) -> (1, heads, slots, dim), split into tiles. The backward of split
    # is cheap; each slice would allocate a gradient of all slots.
    flat = [x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (call.q, call.k, call.v)]
    if bounds.index is not None:  # gradients are summed in float32 or wider
        flat[1:] = [wide(x).index_select(2, bounds.index).to(x.dtype) for x in flat[1:]]
    lengths = (bounds.lengths, keys.lengths, keys.lengths)
    tiles = [tensor.split(sizes, dim=2) for tensor, sizes in zip(flat, lengths, strict=True)]
    parts = [_segment(call, q, k, v) for q, k, v in zip(*tiles, strict=True) if q.shape[2]]
    out = torch.cat(parts, dim=2)
    return out[0].unflatten(1, (bounds.rows, bounds.width)).transpose(0, 1)


def _segment(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention within one tile. Its place and a window limit the keys of each block of queries.

    The last query and the last key belong to the same token: 2 queries see 4 keys as the tokens
    2 and 3 of 4 would.
    """
    length, keys, window = q.shape[2], k.shape[2], call.window
    before = keys - length  # keys in front of the first query
    if not before and (window is None or window >= length):
        return scaled(call, q, k, v, None)
    reach, size = (keys, MASKED) if window is None else (window, max(window, LEAST))
    out, places = [], torch.arange(keys, device=q.device)
    for begin in range(0, length, size):
        end = min(begin + size, length)
        first, last = max(before + begin - reach + 1, 0), before + end
        if not call.causal:
            last = min(last + reach - 1, keys)
        mask = _near(places[before + begin : before + end], places[first:last], call.causal, reach)
        seen = k[:, :, first:last], v[:, :, first:last]
        out.append(scaled(call, q[:, :, begin:end], *seen, mask))
    return torch.cat(out, dim=2)


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
    if hasattr(flex, "AuxRequest"):
        out, aux = kernel(call.q, k, v, return_aux=flex.AuxRequest(lse=True), **options)
        lse = aux.lse
    else:  # torch < 2.9
        out, lse = kernel(call.q, k, v, return_lse=True, **options)
    # softmax over keys and sink = softmax over keys * (1 - probability of the sink)
    keys = torch.sigmoid(lse - call.sinks.to(lse.dtype).view(1, -1, 1))
    return out * keys.unsqueeze(-1).to(out.dtype)


# Variable-length flash attention --------------------------------------------------------------


def _varlen(call: Call) -> Tensor:
    bounds = call.bounds
    # (rows, heads, width, dim) -> (slots, heads, dim)
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (call.q, call.k, call.v))
    dim = v.shape[2]
    if q.is_cuda:
        # The kernels take one dimension, a multiple of 8. Zeros change neither scores nor outputs.
        size = rounded_up(max(q.shape[2], dim), 8)
        wider = (
            functional.pad(x, (0, size - x.shape[2])) if x.shape[2] < size else x for x in (q, k, v)
        )
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in wider)
    keys = bounds.keys
    out, _ = varlen(
        q, k, v, bounds.cu_seqlens, keys.cu_seqlens, bounds.max_seqlen, keys.max_seqlen,
        call.causal, call.window or 0, call.scaling, call.softcap or 0.0, call.sinks, bounds.index,
    )  # fmt: skip
    out = out if out.shape[2] == dim else out[..., :dim]
    return out.unflatten(0, (bounds.rows, bounds.width)).transpose(1, 2)


def _causal(call: Call) -> Tensor:
    return scaled(call, call.q, call.k, call.v, None)


BACKENDS: dict[str, Callable[[Call], Tensor]] = {
    "varlen": _varlen,
    "flex": _flex,
    "causal": _causal,
    "segments": _segments,
    "mask": _mask,
}


def refusal(name: str, call: Call) -> str | None:
    """Why a backend cannot run a call; None if it can."""
    q, v, bounds, cuda = call.q, call.v, call.bounds, call.q.is_cuda
    if name in ("varlen", "flex") and call.dropout:
        return "does not support dropout"
    if name == "varlen" and not cuda:
        return None if torch.compiler.is_compiling() else f"supports CUDA only, not {q.device.type}"
    if name == "varlen":
        if not _IN_TORCH:
            return f"is not part of torch {torch.__version__}"
        if q.dtype not in (torch.bfloat16, torch.float16):
            return f"supports bfloat16 and float16 only, not {q.dtype}"
        if max(q.shape[3], v.shape[3]) > LARGEST:
            return f"requires head dimensions of at most {LARGEST}"
        if call.softcap is not None:
            return "does not support a soft cap"
        # A compiled model may not know how many tiles there are.
        many = bounds.tiles > max(bounds.rows * bounds.width // 2, 4096)
        return "is slow for tiles of one slot" if many else None
    if name == "flex":
        needs_grad = any(x is not None and x.requires_grad for x in (q, call.k, v, call.sinks))
        if q.device.type == "cpu" and needs_grad and torch.is_grad_enabled():
            return "does not support gradients on the CPU"
        if cuda and min(q.shape[3], v.shape[3]) < 16:
            return "requires head dimensions of at least 16"
        if cuda and q.dtype == torch.float64:
            return "supports single and half precision only"
    if name == "causal" and bounds.seen is not None:
        return "supports no segment that sees another one"
    if name in ("flex", "mask") and bounds.received:
        return "supports no keys of other ranks"
    if name == "causal":
        if not call.causal or (call.window is not None and call.window < bounds.width):
            return "supports neither windows nor bidirectional attention"
        return None if bounds.one_per_row else "requires one segment per row"
    return None


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
    Where samples share a prefix, a segment also attends to those in front of it in its samples;
    where ranks share a sample, to the tokens in front of it, which the ranks exchange here.
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
    if batch.tree is not None and not causal:
        raise ConfigError(
            "samples share prefixes in this batch, whose tokens see only those before them, but "
            "this layer is not causal. Plan without prefixes."
        )
    if batch.exchange is not None:
        if backend in ("flex", "causal", "mask"):  # on all ranks, which would wait for each other
            raise ConfigError(
                f"the attention backend {backend!r} supports no keys of other ranks, which share "
                f"samples in this wave. Use None to select one automatically."
            )
        k, v = batch.exchange.join(k, v, causal)
    call = Call(q, k, v, Boundaries.of(batch, causal), causal, window, scale, softcap, sinks)
    if backend is None:
        return attend(call)
    if backend not in BACKENDS:
        raise ConfigError(
            f"unknown attention backend {backend!r}; expected one of: {', '.join(BACKENDS)}, or "
            f"None to select one automatically."
        )
    why = refusal(backend, call)
    if why is not None:
        raise ConfigError(
            f"the attention backend {backend!r} {why}. Use another of {', '.join(BACKENDS)}, or "
            f"None to select one automatically."
        )
    return BACKENDS[backend](call)


def attend(call: Call) -> Tensor:
    """Run a call on the fastest backend that supports it."""
    return BACKENDS[choose(call)](call)


def choose(call: Call) -> str:
    """The name of the fastest backend that supports a call."""
    # The first two do not read the boundaries on the host, so there is no device synchronisation.
    bounds, compiling = call.bounds, torch.compiler.is_compiling()
    names = ["varlen", "flex", "causal"] if call.q.is_cuda or compiling else ["causal"]
    if call.q.dtype == torch.float32 and not compiling:
        # FlexAttention takes four times as long as one long segment at a time, nine times where
        # segments see others, and as long where they have 180 tokens. One at a time, a soft cap and
        # sinks hold all scores of a segment, and a window takes many calls.
        long = bounds.rows * bounds.width >= FEW * bounds.tiles
        long = long and call.softcap is None and call.sinks is None and call.window is None
        names = ["causal"] if long or bounds.seen is not None else names
    for name in names:
        if refusal(name, call) is None:
            return name
    tiny = bounds.rows * bounds.width**2 < TINY * bounds.tiles
    return "mask" if tiny and refusal("mask", call) is None else "segments"


# The operator of variable-length attention ------------------------------------------------------
#
# torch's `varlen_attn` differs between releases and ignores the gradient of the log-sum-exp that
# it returns, which sinks need. Both operators that it calls are the same in all releases since
# 2.10, so they are called here: with window, scale and fewer key heads in every release, and in
# the backward with the outputs and the log-sum-exp *after* the sink.
#
#     lse' = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse')
#
# With these the backward computes the weights exp(score - lse') and rowsum(d_out * out'), which
# are those of the softmax with the sink, so dq, dk and dv are exact. The sink has the weight
# exp(sink - lse') and the value 0: d_sink = -sum(exp(sink - lse') * rowsum(d_out * out')).


@torch.library.custom_op("evenstep::varlen", mutates_args=())  # type: ignore[untyped-decorator]
def varlen(
    q: Tensor,  # (slots, heads, dim)
    k: Tensor,  # (keys, kv heads, dim); with an index, (slots, kv heads, dim)
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
    index: Tensor | None = None,  # (keys) the slots of k and v that they are gathered from
) -> tuple[Tensor, Tensor]:
    """Outputs (slots, heads, dim) and the log-sum-exp (heads, slots), both after the sink.

    Contiguous: compiled code relies on the strides of the fake. The kernels follow those of q.
    Gathered keys are not kept for the backward, which gathers them again.
    """
    if index is not None:
        k, v = k.index_select(0, index), v.index_select(0, index)
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
def _varlen_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), lse


@torch.library.custom_op("evenstep::varlen_backward", mutates_args=())  # type: ignore[untyped-decorator]
def varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    cu_seqlens_k: Tensor, longest: int, longest_k: int, causal: bool, window: int, scale: float,
    softcap: float, index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, contiguous; those of keys that several tiles see are summed in
    float32 or wider."""
    slots = k.shape[0]
    if index is not None:
        k, v = k.index_select(0, index), v.index_select(0, index)
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
    if index is not None:
        dk, dv = (sum_rows(gradient, index, slots) for gradient in (dk, dv))
    return dq, dk, dv


@varlen_backward.register_fake  # type: ignore[untyped-decorator]
def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, cu_seqlens_k, *how, sinks, index = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, cu_seqlens_k, sinks, index)
    ctx.mark_non_differentiable(output[1])
    ctx.how = how


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, sinks, index = ctx.saved_tensors
    dq, dk, dv = varlen_backward(grad, *saved, *ctx.how, index)
    ds = None
    if sinks is not None:
        out, lse = saved[3:5]
        delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(2).transpose(0, 1)
        weight = torch.exp(sinks.to(lse.dtype).unsqueeze(1) - lse)
        ds = -(weight * delta).sum(1).to(sinks.dtype)
    return dq, dk, dv, None, None, *(None for _ in ctx.how), ds, None


varlen.register_autograd(_differentiate, setup_context=_keep)


def _sides(causal: bool, window: int) -> dict[str, int]:
    """How far the kernels of CUDA look back and ahead. Without a window nothing is passed: some
    that can be activated take -1 as a window, or refuse any."""
    back = window - 1
    return {"window_size_left": back, "window_size_right": 0 if causal else back} if window else {}


# Other devices: the same operators, one tile at a time. Compiled models call them on the CPU, and
# tests compare the formulas above with the definition.


def _tiles(cu_seqlens: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """Slots and keys of each tile that is not empty."""
    both = zip(pairwise(cu_seqlens.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    return [(slice(*slots), slice(*keys)) for slots, keys in both if slots[1] > slots[0]]


def _of_tile(tensor: Tensor, slots: slice, repeat: int = 1) -> Tensor:
    """(slots, heads, dim) -> the (heads * repeat, n, dim) part of one tile."""
    part = wide(tensor[slots].transpose(0, 1))
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
    places = torch.arange(k.shape[1], device=q.device)
    seen = _near(places[k.shape[1] - q.shape[1] :], places, causal, window)
    return scores.masked_fill(~seen, -torch.inf), slope


def _tiles_forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: list[tuple[slice, slice]], *how: Any
) -> tuple[Tensor, Tensor]:
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_zeros(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
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
