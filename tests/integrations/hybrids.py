"""Tiny hybrid models with random weights, and gradients of packed batches and samples alone."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from evenstep import Packed, Recipe
from evenstep.integrations.huggingface import hf_forward
from evenstep.tensors import Batch
from tests.slow.kinds import kind_of
from tests.slow.measure import MOST, Gradients, error_of, gradients_of, made, rounding_of, summed
from tests.tensors.batches import batches_of

FAMILIES = ("nemotron_h", "qwen3_next", "kimi_linear", "lfm2", "falcon_h1")


def hybrid(name: str, implementation: str | None = "sdpa") -> Any:
    """In double precision; some of its layers compute in single precision."""
    return made(kind_of(name), implementation, torch.float64)


def samples_of(lengths: Sequence[int], seed: int = 0) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, 90, (length,), generator=random)} for length in lengths]


def packed(samples: list[dict[str, Tensor]], tail: int = 0) -> Batch:
    """All samples in one row, with padding at its end."""
    width = sum(len(sample["input_ids"]) for sample in samples) + tail
    (batch,) = batches_of(samples, Recipe(layout=Packed(max_tokens=width, pad_to=width)))
    return batch


def alone(model: Any, samples: list[dict[str, Tensor]]) -> Gradients:
    """The gradient of samples one at a time."""
    return gradients_of(
        model,
        (
            summed(model(input_ids=tokens[None], use_cache=False).logits[:, :-1], tokens[None, 1:])
            for tokens in (sample["input_ids"] for sample in samples)
            if len(tokens) > 1
        ),
    )


def together(model: Any, *batches: Batch) -> Gradients:
    """The gradient of batches: all forwards, then one backward."""
    forward = hf_forward(model)
    losses = [summed(forward(model, batch), batch.labels) for batch in batches]
    return gradients_of(model, [torch.stack(losses).sum()])


def errors(model: Any, samples: list[dict[str, Tensor]], *batches: Batch) -> float:
    return error_of(together(model, *batches), alone(model, samples))


def rounding(model: Any, samples: list[dict[str, Tensor]]) -> float:
    """The error of samples alone in single precision, where it is no expert chosen otherwise."""
    error = rounding_of(alone(deepcopy(model).float(), samples), alone(model, samples))
    return min(error, MOST)
