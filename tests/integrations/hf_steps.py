"""Gradients of Hugging Face models: of a step, and of its samples one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenstep import Recipe, make_plan
from evenstep.tensors import Batch, Collator, cross_entropy
from evenstep.train import Runner
from tests.tensors.batches import samples_of


def batches_for(lengths: list[int], recipe: Recipe) -> list[Batch]:
    samples = samples_of(lengths)
    return [Collator()(micro, samples) for micro in make_plan(lengths, recipe)[0, 0]]


def step_gradient(model: Any, batches: list[Batch], **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    Runner(model=model, loss=cross_entropy(), **options).run(batches)
    return gradients_of(model)


def gradient_alone(model: Any, lengths: list[int]) -> dict[str, Tensor]:
    """The gradient of the mean over all labels, each sample run alone without any argument."""
    model.zero_grad()
    samples = samples_of(lengths)
    total = sum(length - 1 for length in lengths)
    for sample in samples:
        tokens = sample["input_ids"]
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
        (loss / total).backward()
    return gradients_of(model)


def gradients_of(model: Any) -> dict[str, Tensor]:
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, relative to the largest gradient."""
    scale = max(float(grad.abs().max()) for grad in expected.values())
    zero = torch.zeros(())
    return max(
        float((found.get(name, zero) - expected.get(name, zero)).abs().max())
        for name in found.keys() | expected.keys()
    ) / scale  # fmt: skip
