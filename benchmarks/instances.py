"""Instances: the steps that quality is measured on, from lengths, sizes, ranks and costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.bench import Bench
from benchmarks.lengths import draw, log_normal
from evenstep import Cost, Packed, Recipe, Topology
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Overflow, SyncEvery

COSTS = {
    "L": Cost.tokens(),
    "24576·L + L²": Cost(per_token=24576, per_pair=1),
    "4096·L + L²": Cost(per_token=4096, per_pair=1),
}
START = 256  # where a micro-batch has a cost of its own, it is that of so many tokens

# (samples, ranks, budget)
SHAPES = (
    (64, 8, 8192),
    (128, 8, 16384),
    (256, 8, 32768),
    (512, 8, 8192),
    (512, 32, 16384),
    (512, 64, 8192),
    (1024, 16, 32768),
    (1024, 64, 16384),
    (2048, 64, 32768),
    (2048, 256, 8192),
    (4096, 128, 16384),
    (8192, 64, 8192),
    (8192, 256, 32768),
)
FEW_SHAPES = ((64, 8, 8192), (128, 8, 16384))


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """One step: where its lengths come from, and the recipe without a way to synchronise."""

    source: str
    model: str
    lengths: IntArray
    recipe: Recipe

    @property
    def name(self) -> str:
        """The instance in one line."""
        recipe = self.recipe
        start = " + start" if recipe.cost.per_micro_batch else ""
        return (
            f"{len(self.lengths):,} of {self.source} on {recipe.topology.dp}, budget "
            f"{recipe.layout.budget:,}, {recipe.overflow}, {self.model}{start}"
        )

    def synced(self, sync_every: SyncEvery) -> Recipe:
        """The recipe with a way to synchronise."""
        return replace(self.recipe, sync_every=sync_every)


def distributions(bench: Bench) -> dict[str, IntArray]:
    """The corpora and log-normal lengths of three widths."""
    sigmas = bench.pick((0.6, 1.0, 1.5), (1.0,))
    named = {f"log-normal, σ {sigma}": log_normal(100_000, sigma) for sigma in sigmas}
    return {**bench.corpora, **named}


def with_start(cost: Cost) -> Cost:
    """The same cost, and that of 256 tokens for every micro-batch."""
    return replace(cost, per_micro_batch=float(cost.of_lengths(np.array([START]))[0]))


def instances(bench: Bench) -> Iterator[Instance]:
    """Every distribution, size and cost; without and with a cost per micro-batch."""
    for source, lengths in distributions(bench).items():
        for at, (samples, ranks, budget) in enumerate(bench.pick(SHAPES, FEW_SHAPES)):
            overflow: Overflow = "split" if at % 2 else "truncate"
            drawn = draw(lengths, samples, seed=at)
            for model, cost in COSTS.items():
                for each in (cost, with_start(cost)):
                    recipe = Recipe(
                        layout=Packed(max_tokens=budget),
                        topology=Topology(dp=ranks),
                        cost=each,
                        overflow=overflow,
                    )
                    yield Instance(source, model, drawn, recipe)
