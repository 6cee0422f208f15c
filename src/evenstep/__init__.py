"""Evenstep turns variable-length samples into training steps that are full, even and exact.

    lengths --make_plan--> Plan --> batches --> loss and gradient

A `Plan` is data: it can be printed, saved, checked, compared and simulated, and every rank computes
the same one from the same lengths.

>>> from evenstep import Packed, Recipe, Topology, make_plan
>>> recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2))
>>> plan = make_plan([5, 3, 4, 2, 2], recipe)
>>> [[micro.segments.sample.tolist() for micro in plan[0, rank]] for rank in range(2)]
[[[2, 3, 4]], [[0, 1]]]
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.core.checks import violations
    from evenstep.core.cost import Cost
    from evenstep.core.layout import Packed, Padded
    from evenstep.core.plan import MicroBatch, Plan
    from evenstep.core.prefixes import Prefixes, find_prefixes
    from evenstep.core.ragged import Ragged
    from evenstep.core.recipe import Limits, Recipe, SecondWork, Sharing, Steps, Topology, World
    from evenstep.core.step import Cursor, Step
    from evenstep.data.planned import PlannedStream
    from evenstep.data.pooled import PooledStream
    from evenstep.errors import EvenstepError
    from evenstep.planning.packers import pack
    from evenstep.planning.partition import partition
    from evenstep.planning.planner import make_plan

__version__ = "0.1.0"

__all__ = [
    "Cost",
    "Cursor",
    "EvenstepError",
    "Limits",
    "MicroBatch",
    "Packed",
    "Padded",
    "Plan",
    "PlannedStream",
    "PooledStream",
    "Prefixes",
    "Ragged",
    "Recipe",
    "SecondWork",
    "Sharing",
    "Step",
    "Steps",
    "Topology",
    "World",
    "find_prefixes",
    "make_plan",
    "pack",
    "partition",
    "violations",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "core.checks": ["violations"],
            "core.cost": ["Cost"],
            "core.layout": ["Packed", "Padded"],
            "core.plan": ["MicroBatch", "Plan"],
            "core.prefixes": ["Prefixes", "find_prefixes"],
            "core.ragged": ["Ragged"],
            "core.recipe": [
                "Limits",
                "Recipe",
                "SecondWork",
                "Sharing",
                "Steps",
                "Topology",
                "World",
            ],
            "core.step": ["Cursor", "Step"],
            "data.planned": ["PlannedStream"],
            "data.pooled": ["PooledStream"],
            "errors": ["EvenstepError"],
            "planning.partition": ["partition"],
            "planning.packers": ["pack"],
            "planning.planner": ["make_plan"],
        },
    )
