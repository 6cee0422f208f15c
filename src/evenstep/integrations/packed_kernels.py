"""Kernels of layers that carry state, for packed rows: every segment begins anew.

convolve    a causal convolution, by whatever function computes it without boundaries
delta_rule  the gated delta rule, as in the linear attention of Qwen3-Next

Both take the tensors of transformers' functions of the same purpose. Within chunks of 64 tokens,
the delta rule is computed for all segments at once. From chunk to chunk, the state of step t is
computed for all segments that have so many chunks, the longest first, so nothing is padded but the
last chunk of each:

    chunks   a0 a1 a2        steps   a0 b0 c0 | a1 b1 | a2
             b0 b1
             c0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 64
AT_ONCE = 5120
"""Chunks times heads that are computed together, at least one head: it bounds the memory. With
heads of 128 channels, a backward needs 1 MB for each."""


class Chunks(NamedTuple):
    """Chunks of segments, step after step. The last chunk of a segment is padded with the first
    token of the segment: no token sees it there, and no chunk follows it."""

    slots: Tensor  # (chunks, 64), of the flat batch
    inside: Tensor  # (chunks, 64) bool
    places: Tensor  # (slots,) where each slot is in (chunks * 64), 0 outside of segments
    outside: Tensor | None  # (slots,) bool, if there are slots of no segment
    following: Tensor  # (chunks,) the next of the same segment, or itself
    last: Tensor  # (chunks,) bool: whether there is no next one
    counts: list[int]  # chunks of each step

    def gathered(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """(rows, width, heads, ...) as (chunks, heads, 64, ...)."""
        rows = tensor.flatten(0, 1).index_select(0, self.slots.flatten())
        rows = rows.unflatten(0, self.slots.shape).transpose(1, 2)
        return rows.to(dtype, memory_format=torch.contiguous_format)

    def put_back(self, chunked: Tensor, like: Tensor) -> Tensor:
        """(chunks, heads, 64, ...) as (rows, width, heads, ...), zeros outside of segments."""
        tokens = chunked.transpose(1, 2).to(like.dtype, memory_format=torch.contiguous_format)
        flat = tokens.flatten(0, 1).index_select(0, self.places)
        if self.outside is not None:
            flat[self.outside] = 0
        return flat.unflatten(0, like.shape[:2])


def chunks_of(
    begins: Sequence[int], lengths: Sequence[int], slots: int, device: torch.device
) -> Chunks:
    """The chunks of segments in a batch of so many slots, from their first slots and lengths."""
    order = sorted(range(len(lengths)), key=lambda k: -lengths[k])
    begin = torch.tensor([begins[k] for k in order])
    length = torch.tensor([lengths[k] for k in order])
    numbers = (length + CHUNK - 1) // CHUNK
    steps = torch.arange(int(numbers.max()))
    active = steps[:, None] < numbers  # (steps, segments), the first ones of each step
    counts = active.sum(1)
    step, segment = active.nonzero(as_tuple=True)
    place = step[:, None] * CHUNK + torch.arange(CHUNK)
    inside = place < length[segment, None]
    at = torch.where(inside, begin[segment, None] + place, begin[segment, None])
    places = torch.zeros(slots, dtype=torch.int64)
    places[at[inside]] = inside.flatten().nonzero()[:, 0]
    outside = torch.ones(slots, dtype=torch.bool)
    outside[at[inside]] = False
    last = step + 1 == numbers[segment]
    following = torch.arange(len(step)) + torch.where(last, 0, counts[step])
    return Chunks(
        at.to(device),
        inside.to(device),
        places.to(device),
        outside.to(device) if bool(outside.any()) else None,
        following.to(device),
        last.to(device),
        counts.tolist(),
    )


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks,
    normalized: bool,
) -> Tensor:  # fmt: skip
    """The gated delta rule of (rows, width, heads, size) each, `decay` (a logarithm) and `beta`
    without a size; zeros in slots of no segment. With `normalized`, queries and keys have length 1.
    """
    result: Tensor = _DeltaRule.apply(chunks, normalized, query, key, value, decay, beta)
    return result


class _DeltaRule(torch.autograd.Function):  # type: ignore[misc]
    """Keeps its arguments alone for the backward, which computes all else again."""

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, normalized: bool, *tensors: Tensor) -> Tensor:
        ctx.chunks, ctx.normalized = chunks, normalized
        ctx.save_for_backward(*tensors)
        parts = []
        for heads in _parts_of_heads(chunks, *tensors):
            chunked = (chunks.gathered(tensor, _precision(tensors)) for tensor in heads)
            result = _compute(chunks, normalized, *chunked)
            parts.append(chunks.put_back(result, heads[2]))
        return torch.cat(parts, 2)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Any:
        chunks: Chunks = ctx.chunks
        tensors = ctx.saved_tensors  # once: a checkpoint hands them out and forgets them
        parts = []
        for outer, *heads in _parts_of_heads(chunks, gradient, *tensors):
            dtype = _precision(tensors)
            chunked = [chunks.gathered(tensor, dtype).requires_grad_() for tensor in heads]
            with torch.enable_grad():
                result = _compute(chunks, ctx.normalized, *chunked)
            weights = chunks.gathered(outer, dtype).mul_(chunks.inside[:, None, :, None])
            gradients = torch.autograd.grad(result, chunked, weights)
            parts.append(list(map(chunks.put_back, gradients, heads)))
        return None, None, *(torch.cat(each, 2) for each in zip(*parts, strict=True))


def _precision(tensors: Iterable[Tensor]) -> torch.dtype:
    """Single precision, or double if any of the tensors has it."""
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def _parts_of_heads(chunks: Chunks, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """(rows, width, heads, ...) each, some heads at a time, about as many in each part."""
    most = max(1, AT_ONCE // len(chunks.slots))
    parts = -(-tensors[0].shape[2] // most)
    return zip(*(tensor.chunk(parts, 2) for tensor in tensors), strict=True)


def _compute(
    chunks: Chunks, normalized: bool, query: Tensor, key: Tensor, value: Tensor, decay: Tensor,
    beta: Tensor,
) -> Tensor:  # fmt: skip
    """The gated delta rule of (chunks, heads, 64, ...). Factors of tokens are multiplied into the
    64 x 64 products, which are smaller than queries and keys."""
    with torch.autocast(query.device.type, enabled=False):
        keys, queries = key @ key.mT, query @ key.mT
        scale, length = torch.full_like(beta, query.shape[-1] ** -0.5), torch.ones_like(beta)
        if normalized:
            scale = scale * (torch.linalg.vector_norm(query, dim=-1).square() + 1e-6).rsqrt()
            length = (keys.diagonal(dim1=-2, dim2=-1) + 1e-6).rsqrt()
        total = decay.cumsum(-1)
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
        between = between * length.unsqueeze(-2)
        # What each token of a chunk writes if the state before the chunk is zero, and what it takes
        # off for what it reads from that state: two products with one inverse.
        rate, since = beta * length, total.exp()
        system = keys * between * rate.unsqueeze(-1)
        identity = torch.eye(CHUNK, dtype=query.dtype, device=query.device).expand_as(system)
        inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
        written = (inverse * beta.unsqueeze(-2)) @ value
        taken = (inverse * (rate * since).unsqueeze(-2)) @ key
        # From chunk to chunk, state -> carry @ state + update.
        until = key * ((total[..., -1:] - total).exp() * length).unsqueeze(-1)
        kept = torch.diag_embed(since[..., -1:].expand(*since.shape[:-1], key.shape[-1]))
        carry = _subtract_product(kept, until.mT, taken)
        states: Tensor = _States.apply(carry, until.mT @ written, chunks)
        new = _subtract_product(written, taken, states)
        seen = (queries * between * scale.unsqueeze(-1)) @ new
        return torch.addcmul(seen, (scale * since).unsqueeze(-1), query @ states)


def _subtract_product(tensor: Tensor, left: Tensor, right: Tensor) -> Tensor:
    flat = (each.flatten(0, 1) for each in (tensor, left, right))
    return torch.baddbmm(*flat, alpha=-1).view_as(tensor)


class _States(torch.autograd.Function):  # type: ignore[misc]
    """The states before all chunks, zeros before the first of each segment."""

    @staticmethod
    def forward(ctx: Any, carry: Tensor, update: Tensor, chunks: Chunks) -> Tensor:
        states = torch.empty_like(update, memory_format=torch.contiguous_format)
        before, carries, updates = _steps(chunks, states, carry, update)
        before[0].zero_()
        for step in range(1, len(before)):
            count = len(before[step])
            torch.baddbmm(
                updates[step - 1][:count],
                carries[step - 1][:count],
                before[step - 1][:count],
                out=before[step],
            )
        ctx.save_for_backward(carry, states)
        ctx.chunks = chunks
        return states

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Any:
        carry, states = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        before, carries = _steps(chunks, gradient, carry)
        for step in range(len(before) - 1, 0, -1):
            count = len(before[step])
            before[step - 1][:count].baddbmm_(carries[step - 1][:count].mT, before[step])
        after = gradient.index_select(0, chunks.following)
        after.masked_fill_(chunks.last[:, None, None, None], 0)
        return after @ states.mT, after, None


def _steps(chunks: Chunks, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """(chunks, heads, ...) as (chunks of a step * heads, ...) for each step."""
    heads = tensors[0].shape[1]
    sizes = [count * heads for count in chunks.counts]
    return [tensor.flatten(0, 1).split(sizes) for tensor in tensors]


def spaced(begins: Sequence[int], lengths: Sequence[int], slots: int, space: int) -> Tensor:
    """(slots,) where each slot of the flat batch goes if every segment, and padding behind one,
    has `space` empty places in front.

    >>> spaced([0, 2], [2, 1], 4, 3).tolist()
    [3, 4, 8, 12]
    """
    first = torch.zeros(slots + 1, dtype=torch.int64)
    first[[0, *begins, *(b + n for b, n in zip(begins, lengths, strict=True))]] = 1
    return torch.arange(slots) + space * first[:slots].cumsum(0)


def convolve(run: Callable[[Tensor], Tensor], inputs: Tensor, places: Tensor, end: int) -> Tensor:
    """A causal convolution of (rows, channels, width); `run` computes one of (1, channels, end).
    With as many zeros in front of each segment as it sees tokens, none sees another segment."""
    tokens = inputs.transpose(1, 2).flatten(0, 1)
    wide = tokens.new_zeros((end, tokens.shape[1])).index_copy_(0, places, tokens)
    result = run(wide.T[None])[0].T[places]
    return result.unflatten(0, (inputs.shape[0], inputs.shape[2])).transpose(1, 2)
