"""sample_tokens: let a `Decoder` continue prompts, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from evenstep.core.text import whole_number
from evenstep.demo.decoder import Block, Decoder, rotate, rotation
from evenstep.errors import InputError

_COMPACT = 8
"""Tokens between two removals of rows that have ended."""


def sample_tokens(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    max_tokens: int,
    stop: int,
    temperature: float = 1.0,
) -> list[list[int]]:
    """At most `max_tokens` tokens after each prompt, up to and with `stop`.

    What a row gets depends on its prompt and its seed, up to rounding, not on the other rows, so
    prompts can be divided between workers in any way. `temperature` 0 takes the likeliest token.

    >>> from evenstep.demo import DecoderShape
    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <...>
    >>> model = Decoder(DecoderShape(vocab=9))
    >>> found = sample_tokens(model, [[1, 2], [3]], [7, 8], max_tokens=4, stop=0)
    >>> [len(row) <= 4 for row in found]
    [True, True]
    """
    whole_number("max_tokens", max_tokens)
    if len(prompts) != len(seeds) or not all(prompts):
        raise InputError(
            f"got {len(seeds)} seeds for {len(prompts)} prompts. Pass one per prompt, and at least "
            f"one token in each."
        )
    if not prompts:
        return []
    noise = torch.stack([_noise(seed, max_tokens, model.shape.vocab) for seed in seeds])
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    start = torch.tensor([width - len(prompt) for prompt in prompts])
    found = torch.full((len(prompts), max_tokens), stop)
    with torch.no_grad():
        cache = _Cache.empty(model, len(prompts), width + max_tokens)
        alive = torch.arange(len(prompts))
        for at in range(max_tokens):
            logits = _next_logits(model, cache, ids, start)
            if temperature > 0:
                logits = logits / temperature + noise[alive, at].to(logits)
            token = logits.argmax(-1)
            found[alive, at] = token
            ids = token[:, None]
            going = found[alive, : at + 1].ne(stop).all(1)
            if not going.any():
                break
            if at % _COMPACT == _COMPACT - 1:
                alive, ids, start = alive[going], ids[going], start[going]
                cache.keep(going)
    lengths = (found != stop).cumprod(1).sum(1).add(1).clamp(max=max_tokens).tolist()
    return [row[:length] for row, length in zip(found.tolist(), lengths, strict=True)]


def _noise(seed: int, steps: int, vocab: int) -> Tensor:
    """Gumbel noise: the largest logit plus noise is a sample of the distribution."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand((steps, vocab), generator=generator, dtype=torch.float64)
    return -(-uniform.clamp(min=1e-300).log()).log()


@dataclass(slots=True)
class _Cache:
    """Rotated keys, and values, (layers, rows, kv heads, columns, dim); `used` columns are set."""

    keys: Tensor
    values: Tensor
    used: int

    @classmethod
    def empty(cls, model: Decoder, rows: int, columns: int) -> _Cache:
        shape = model.shape
        sizes = (shape.layers, rows, shape.kv_heads, columns, shape.dim)
        return cls(model.head.weight.new_zeros(sizes), model.head.weight.new_zeros(sizes), 0)

    def keep(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


def _next_logits(model: Decoder, cache: _Cache, ids: Tensor, start: Tensor) -> Tensor:
    """The logits after the last column; `ids` (rows, new columns) follow those in the cache.

    Row i begins at column `start[i]`; columns before are padding.
    """
    columns = torch.arange(cache.used, cache.used + ids.shape[1])
    turn = rotation((columns - start[:, None]).clamp(min=0), model.shape)
    seen = torch.arange(cache.used + ids.shape[1])
    mask = (seen <= columns[:, None]) & (seen >= start[:, None, None])
    if model.shape.window is not None:
        mask &= seen > columns[:, None] - model.shape.window
    mask = mask | (seen == columns[:, None])  # padding sees itself, so that no row is empty
    x = model.embed(ids)
    for layer, block in enumerate(model.blocks):
        x = x + _attend(block, block.attention_norm(x), turn, cache, layer, mask[:, None])
        x = x + block.ffn(block.ffn_norm(x))
    cache.used += ids.shape[1]
    return model.head(model.norm(x[:, -1]))


def _attend(
    block: Block, x: Tensor, turn: Tensor, cache: _Cache, layer: int, mask: Tensor
) -> Tensor:
    """Attention of the new columns to all columns so far, whose keys and values are cached."""
    part, here = block.attention, slice(cache.used, cache.used + x.shape[1])
    q, k, v = (
        project(x).unflatten(2, (-1, part.shape.dim)).transpose(1, 2)
        for project in (part.query, part.key, part.value)
    )
    cache.keys[layer, :, :, here] = rotate(k, turn)
    cache.values[layer, :, :, here] = v
    mixed = functional.scaled_dot_product_attention(
        rotate(q, turn),
        cache.keys[layer, :, :, : here.stop],
        cache.values[layer, :, :, : here.stop],
        attn_mask=mask,
        enable_gqa=True,
    )
    return part.out(mixed.transpose(1, 2).flatten(2))
