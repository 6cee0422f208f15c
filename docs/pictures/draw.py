"""Draws the picture of the README: `python docs/pictures/draw.py`."""

from pathlib import Path

import numpy as np

from evenstep import Cost, Packed, Padded, Recipe, Topology, make_plan
from evenstep.report import comparison_picture

LENGTHS = np.clip(np.random.default_rng(3).lognormal(6.6, 0.8, 48), 32, 4096).astype(np.int64)


def main() -> None:
    """One step of 48 samples on four ranks, in three ways."""
    ranks, cost = Topology(dp=4), Cost(per_token=24576.0, per_pair=1.0)
    recipes = {
        "4 samples in order, padded": Recipe(
            layout=Padded(samples=4), topology=ranks, cost=cost, balance="none"
        ),
        "dynamic batches": Recipe(layout=Padded(max_tokens=8192), topology=ranks, cost=cost),
        "packed": Recipe(layout=Packed(max_tokens=8192), topology=ranks, cost=cost),
    }
    plans = {name: make_plan(LENGTHS, recipe) for name, recipe in recipes.items()}
    picture = comparison_picture(plans, "One step of 48 samples on 4 ranks")
    Path(__file__).with_name("comparison.svg").write_text(picture)


if __name__ == "__main__":
    main()
