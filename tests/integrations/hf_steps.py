"""Gradients of Hugging Face models: of a step, and of its samples one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenstep import Recipe, make_plan
from evenstep.tensors import Batch, Collator, cross_entropy
from evenstep.train import Runner
from tests.internals import errors_of_parameters
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
    """The largest difference of a parameter's gradient, relative to its own largest entry."""
    both = {**expected, **found}
    return max(
        errors_of_parameters(
            *({name: each.get(name, torch.zeros_like(both[name])) for name in both}
              for each in (found, expected))
        ).values()
    )  # fmt: skip
