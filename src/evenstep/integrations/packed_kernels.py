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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 64


class Chunks(NamedTuple):
    """Chunks of segments, step after step."""

    slots: Tensor  # (chunks, 64), of the flat batch; 0 in padding
    inside: Tensor  # (chunks, 64) bool
    places: Tensor  # (tokens,) where the tokens are in (chunks * 64)
    following: Tensor  # (chunks,) the next of the same segment, or itself
    continued: Tensor  # (chunks,) bool: whether there is a next one
    counts: list[int]  # chunks of each step


def chunks_of(begins: Sequence[int], lengths: Sequence[int], device: torch.device) -> Chunks:
    """The chunks of segments, from their first slots and lengths (above 0)."""
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
    slots = torch.where(inside, begin[segment, None] + place, 0)
    continued = step + 1 < numbers[segment]
    following = torch.arange(len(step)) + torch.where(continued, counts[step], 0)
    tensors = (slots, inside, inside.flatten().nonzero()[:, 0], following, continued)
    return Chunks(*(each.to(device) for each in tensors), counts.tolist())


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks,
    normalized: bool,
) -> Tensor:  # fmt: skip
    """The gated delta rule of (rows, width, heads, size) each, `decay` (a logarithm) and `beta`
    without a size; zeros in slots of no segment. With `normalized`, queries and keys have length 1.

    Only the arguments are kept for the backward, which computes all else again.
    """

    def run(*tensors: Tensor) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            return _delta_rule(*tensors, chunks, normalized)

    result: Tensor = _Recomputed.apply(run, query, key, value, decay, beta)
    return result


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks,
    normalized: bool,
) -> Tensor:  # fmt: skip
    def chunked(tensor: Tensor) -> Tensor:  # (chunks, heads, 64, ...) in float32
        rows = tensor.flatten(0, 1).index_select(0, chunks.slots.flatten())
        inside = chunks.inside.view(-1, *[1] * (rows.ndim - 1))
        rows = torch.where(inside, rows, 0).unflatten(0, chunks.slots.shape)
        return rows.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)

    dtype, shape = query.dtype, value.shape
    query, key, value, decay, beta = map(chunked, (query, key, value, decay, beta))
    if normalized:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    # Within a chunk: what each token writes, if the state before the chunk were zero (`written`),
    # and what it reads from that state and takes off (`read`).
    total = decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    key_beta, since = key * beta.unsqueeze(-1), total.exp().unsqueeze(-1)
    right = torch.cat((value * beta.unsqueeze(-1), key_beta * since), -1)
    system = (key_beta @ key.mT) * between
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    # From chunk to chunk: state -> carry @ state + update.
    until = (total[..., -1:] - total).exp().unsqueeze(-1)
    moved = (key * until).mT @ solved
    update, taken = moved.split((value.shape[-1], key.shape[-1]), -1)
    identity = torch.eye(key.shape[-1], device=key.device)
    carry = identity * total[..., -1].exp()[..., None, None] - taken
    states: Tensor = _States.apply(carry, update, chunks)
    written, read = solved.split((value.shape[-1], key.shape[-1]), -1)
    new = written - read @ states
    result = (query * since) @ states + ((query @ key.mT) * between) @ new
    tokens = result.transpose(1, 2).flatten(0, 1).index_select(0, chunks.places).to(dtype)
    flat = tokens.new_zeros((shape[0] * shape[1], *tokens.shape[1:]))
    slots = chunks.slots.flatten().index_select(0, chunks.places)
    return flat.index_copy(0, slots, tokens).unflatten(0, shape[:2])


class _States(torch.autograd.Function):
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
        after = torch.where(chunks.continued[:, None, None, None], after, 0)
        return after @ states.mT, after, None


def _steps(chunks: Chunks, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """(chunks, heads, ...) as (chunks of a step * heads, ...) for each step."""
    heads = tensors[0].shape[1]
    sizes = [count * heads for count in chunks.counts]
    return [tensor.flatten(0, 1).split(sizes) for tensor in tensors]


class _Recomputed(torch.autograd.Function):
    """Calls a function of tensors, and again in the backward: nothing inside it is kept."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*tensors)
        return run(*tensors)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]
        tensors = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            result = ctx.run(*tensors)
        wanted = [tensor for tensor, needs in zip(tensors, needed, strict=True) if needs]
        gradients = iter(torch.autograd.grad(result, wanted, gradient))
        return None, *(next(gradients) if needs else None for needs in needed)


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
    wide = tokens.new_zeros((end, tokens.shape[1])).index_copy(0, places, tokens)
    result = run(wide.T[None])[0].T.index_select(0, places)
    return result.unflatten(0, (inputs.shape[0], inputs.shape[2])).transpose(1, 2)
