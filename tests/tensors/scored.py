"""Batches with random extras per token or per sequence, and logits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep import Packed, Recipe, make_plan
from evenstep.tensors import Batch, Collator, Extra
from tests.internals import Layout

torch.set_num_threads(1)

VOCABULARY = 7
ROOM = Packed(max_tokens=64, pad_to=64)


def samples_with(
    lengths: Sequence[int], per_token: Sequence[str] = (), seed: int = 0, masked: float = 0.25
) -> list[dict[str, Any]]:
    """Samples with random tokens, loss masks and float64 values around -1 per token."""
    rng = np.random.default_rng(seed)
    return [
        {
            "input_ids": rng.integers(0, VOCABULARY, length),
            "loss_mask": rng.random(length) >= masked,
            **{name: rng.normal(-1.0, 1.0, length) for name in per_token},
        }
        for length in lengths
    ]


def collator_of(per_token: Sequence[str] = (), per_sequence: Sequence[str] = ()) -> Collator:
    """Float64 extras; `group` is an integer."""
    token = {name: Extra(aligned="token", dtype=torch.float64) for name in per_token}
    sequence = {
        name: Extra(aligned="sequence", dtype=torch.int64 if name == "group" else torch.float64)
        for name in per_sequence
    }
    return Collator(extras={**token, **sequence})


def batches_of(
    samples: list[dict[str, Any]],
    collate: Collator,
    layout: Layout = ROOM,
    groups: Sequence[int] | None = None,
) -> list[Batch]:
    """All micro-batches of one step on one rank."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    plan = make_plan(lengths, Recipe(layout=layout), groups=groups)
    return [collate(micro, samples) for micro in plan[0, 0]]


def batch_with(lengths: Sequence[int], per_token: Sequence[str] = (), seed: int = 0) -> Batch:
    """One micro-batch, every token in the loss."""
    samples = samples_with(lengths, per_token, seed, masked=0.0)
    return batches_of(samples, collator_of(per_token))[0]


def flat_logits(batch: Batch, seed: int = 0, size: int = VOCABULARY) -> Tensor:
    """Random float32 logits of each slot."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn((batch.rows, batch.width, size), generator=random)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale, check_dtype=False)
