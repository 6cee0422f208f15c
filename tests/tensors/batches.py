"""Batches of random samples in every layout, and their results by sample."""

from __future__ import annotations

import torch
from torch import Tensor

from evenstep import Packed, Padded, Recipe, Topology, make_plan
from evenstep.tensors import Batch, Collator

VOCAB = 61

# For samples of up to 24 tokens; a handful of them needs several micro-batches.
RECIPES = {
    "packed": Recipe(layout=Packed(max_tokens=64)),
    "packed with a tail": Recipe(layout=Packed(max_tokens=64, pad_to=64)),
    "packed and aligned": Recipe(layout=Packed(max_tokens=64), topology=Topology(cp=2)),
    "packed static": Recipe(layout=Packed(rows=3, pad_to=24)),
    "padded": Recipe(layout=Padded(max_tokens=24 * 24, pad_to=24)),
    "dynamic": Recipe(layout=Padded(max_tokens=48, round_to=4)),
    "one by one": Recipe(layout=Packed(samples=1)),
}


def samples_of(lengths: list[int], seed: int = 0) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(0, VOCAB, (n,), generator=random)} for n in lengths]


def batches_of(samples: list[dict[str, Tensor]], recipe: Recipe) -> list[Batch]:
    plan = make_plan([len(sample["input_ids"]) for sample in samples], recipe)
    return [Collator()(micro, samples) for micro in plan[0, 0]]


def batch_of(lengths: list[int], recipe: str | Recipe, seed: int = 0) -> Batch:
    """The first micro-batch."""
    recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    return batches_of(samples_of(lengths, seed), recipe)[0]


def by_sample(batch: Batch, values: Tensor) -> dict[int, Tensor]:
    """One value per slot -> the values of each sample's real tokens."""
    flat = values.flatten(0, 1)
    begins, sizes = batch.cu_seqlens.tolist(), batch.seqlens.tolist()
    return {
        sample: flat[begins[tile] : begins[tile] + sizes[tile]]
        for tile, sample in enumerate(batch.sample_ids.tolist())
        if sample >= 0
    }


def distance(found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """The largest difference, relative to the largest value (at least `least`)."""
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), least)
