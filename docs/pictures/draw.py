"""Draws the pictures of the documentation: `python -m docs.pictures.draw`."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from docs.pictures import concepts
from evenstep import Cost, Packed, Padded, Recipe, Steps, Topology, make_plan
from evenstep.report import comparison_picture, plan_picture

HERE = Path(__file__).parent
RANKS, COST = Topology(dp=4), Cost(per_token=24576.0, per_pair=1.0)


def lengths(count: int) -> list[int]:
    """Lengths as in a corpus: many short, few long."""
    drawn = np.random.default_rng(3).lognormal(6.6, 0.8, count)
    return [int(length) for length in np.clip(drawn, 32, 4096)]


def comparison() -> str:
    """Steps of 64 samples on four ranks, in three ways."""
    layouts: dict[str, Padded | Packed] = {
        "dynamic batches": Padded(max_tokens=8192),
        "packed": Packed(max_tokens=8192),
    }
    recipes = {
        "padded batches of 8": Recipe(
            layout=Padded(samples=8), topology=RANKS, cost=COST, balance="none"
        ),
        **{
            name: Recipe(layout=layout, topology=RANKS, cost=COST)
            for name, layout in layouts.items()
        },
    }
    steps = Steps(samples=64)
    plans = {
        name: make_plan(lengths(256), replace(recipe, steps=steps))
        for name, recipe in recipes.items()
    }
    return comparison_picture(plans, "4 steps of 64 samples on 4 ranks")


def plan() -> str:
    """The plan of a report, where a long sample sets the pace of one step."""
    drawn = lengths(96)
    drawn[50] = 60_000
    recipe = Recipe(
        layout=Packed(max_tokens=65536), topology=RANKS, cost=COST, steps=Steps(samples=48)
    )
    return plan_picture(make_plan(drawn, recipe), "Two steps; sample 50 sets the pace of step 1")


def main() -> None:
    """Write the pictures next to this file."""
    for name, draw in {"comparison": comparison, "plan": plan}.items():
        (HERE / f"{name}.svg").write_text(draw(), "utf-8")
    for name, canvas in concepts.PICTURES.items():
        (HERE / f"{name}.svg").write_text(canvas().svg, "utf-8")


if __name__ == "__main__":
    main()
