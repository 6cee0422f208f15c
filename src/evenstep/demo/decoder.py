"""Decoder: a small language model whose forward takes a `Batch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.errors import ConfigError
from evenstep.tensors.batch import Batch, BatchShard
from evenstep.tensors.segment_attention import attention
from evenstep.train.collectives import context_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """The sizes of a `Decoder`. `window` limits attention to that many tokens.

    >>> DecoderShape(vocab=256, hidden=64, heads=4).dim
    16
    """

    vocab: int
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 128
    window: int | None = None
    rope_base: float = 10_000.0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ConfigError(
                f"hidden={self.hidden} must be a multiple of 2 * heads, and heads={self.heads} a "
                f"multiple of kv_heads={self.kv_heads}."
            )

    @property
    def dim(self) -> int:
        """The size of one head."""
        return self.hidden // self.heads


class Decoder(nn.Module):  # type: ignore[misc]
    """A decoder with rotary positions, grouped-query attention, SwiGLU and pre-norm (RMS).

    Positions and segment boundaries come from the batch, so logits do not depend on the layout.
    `context` is the process group for context parallelism; each rank passes its `shard_context`
    of a batch.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> Decoder(DecoderShape(vocab=10))(batch).shape
    torch.Size([1, 3, 10])
    """

    def __init__(
        self, shape: DecoderShape, backend: str | None = None, context: Any = None
    ) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, backend, context) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.apply(_initialise)

    def get_output_embeddings(self) -> nn.Linear:
        """The layer that makes logits, by the name that transformers has for it."""
        return self.head

    def forward(self, batch: Batch | BatchShard) -> Tensor:
        """Logits, (rows, width, vocab)."""
        x = self.embed(batch.tokens)
        turn = rotation(batch.position_ids, self.shape)
        for block in self.blocks:
            x = block(x, turn, batch)
        return self.head(self.norm(x))


class Block(nn.Module):  # type: ignore[misc]
    """One layer: attention and SwiGLU, each with a residual connection."""

    def __init__(self, shape: DecoderShape, backend: str | None, context: Any) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.attention = Attention(shape, backend, context)
        self.ffn_norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.ffn = SwiGLU(shape)

    def forward(self, x: Tensor, turn: Tensor, batch: Batch | BatchShard) -> Tensor:
        """(rows, width, hidden) -> (rows, width, hidden)."""
        x = x + self.attention(self.attention_norm(x), turn, batch)
        return x + self.ffn(self.ffn_norm(x))


class Attention(nn.Module):  # type: ignore[misc]
    """Grouped-query attention within each segment."""

    def __init__(self, shape: DecoderShape, backend: str | None, context: Any) -> None:
        super().__init__()
        self.shape = shape
        self.backend, self.context = backend, context
        keys = shape.kv_heads * shape.dim
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key = nn.Linear(shape.hidden, keys, bias=False)
        self.value = nn.Linear(shape.hidden, keys, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, turn: Tensor, batch: Batch | BatchShard) -> Tensor:
        """(rows, width, hidden) -> (rows, width, hidden)."""
        q, k, v = (
            # (rows, width, heads * dim) -> (rows, heads, width, dim)
            project(x).unflatten(2, (-1, self.shape.dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k, window = rotate(q, turn), rotate(k, turn), self.shape.window
        if isinstance(batch, BatchShard):
            if self.context is None:
                raise ConfigError(
                    "a batch shard needs the process group of its context-parallel ranks. Pass "
                    "Decoder(..., context=group)."
                )
            mixed = context_attention(q, k, v, batch, self.context, window)
        else:
            mixed = attention(q, k, v, batch, window=window, backend=self.backend)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):  # type: ignore[misc]
    """Gated feed-forward layer."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width, hidden) -> (rows, width, hidden)."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def rotation(positions: Tensor, shape: DecoderShape) -> Tensor:
    """Cosine and sine of each position, (2, rows, 1, width, dim / 2), in float32."""
    steps = torch.arange(0, shape.dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, :, None] * shape.rope_base ** (-steps / shape.dim)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Apply rotary embeddings to the pairs (i, i + dim / 2) of each head."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    (cos, sin), (a, b) = turn, wide.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _initialise(module: Any) -> None:
    if isinstance(module, (nn.Embedding, nn.Linear)):
        nn.init.normal_(module.weight, std=0.02 if isinstance(module, nn.Linear) else 1.0)
