"""Evenstep turns variable-length samples into training steps that are full, even and exact.

    lengths --make_plan--> Plan --> batches --> loss and gradient

Deciding is kept apart from doing: a `Plan` is data that can be printed, saved, checked, compared
and simulated, and every rank computes the same one from the same lengths.

>>> from evenstep import Packed, Recipe, Topology, make_plan
>>> recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2))
>>> plan = make_plan([5, 3, 4, 2, 2], recipe)
>>> [[micro.segments.sample.tolist() for micro in plan[0, rank]] for rank in range(2)]
[[[0, 1]], [[2, 3, 4]]]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenstep.core.checks import violations
from evenstep.core.cost import Cost
from evenstep.core.layout import Packed, Padded
from evenstep.core.micro_batch import MicroBatch
from evenstep.core.plan import Plan
from evenstep.core.ragged import Ragged
from evenstep.core.recipe import Limits, Recipe, Steps
from evenstep.core.topology import Topology
from evenstep.core.world import World
from evenstep.errors import EvenstepError

if TYPE_CHECKING:
    from evenstep.data.streams.planned import PlannedStream
    from evenstep.data.streams.pooled import PooledStream
    from evenstep.planning import make_plan, pack, partition

__version__ = "0.1.0"

__all__ = [
    "Cost",
    "EvenstepError",
    "Limits",
    "MicroBatch",
    "Packed",
    "Padded",
    "Plan",
    "PlannedStream",
    "PooledStream",
    "Ragged",
    "Recipe",
    "Steps",
    "Topology",
    "World",
    "make_plan",
    "pack",
    "partition",
    "violations",
]


_LATER = {
    "make_plan": "evenstep.planning",
    "pack": "evenstep.planning",
    "partition": "evenstep.planning",
    "PlannedStream": "evenstep.data.streams.planned",
    "PooledStream": "evenstep.data.streams.pooled",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Planning brings its compiler along, so it is loaded when it is first used."""
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'evenstep' has no attribute {name!r}")
