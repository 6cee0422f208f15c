"""Units that can never run are refused, by name and with the remedy."""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe
from evenstep.core.segments import Segments
from evenstep.errors import PlanError
from evenstep.planning.units import Units


def check_units(
    units: Units,
    recipe: Recipe,
    segments: Segments,
    groups: IntArray | None,
    names: IntArray,
) -> None:
    """Raise where a unit breaks a limit by itself, naming it and the remedy.

    With overflow = "alone" a single over-long or over-limit sample may; a group never may.
    """
    several = units.count > 1
    capacity, most = recipe.layout.pack_bounds(recipe, units.widest)
    large = several & (units.count > most)
    if capacity is not None:
        large |= several & (units.size > capacity)
    if large.any():
        raise _refused_group(int(np.argmax(large)), units, segments, groups, names, "the budget")
    for d, cap in enumerate(units.caps):
        name = units.limits[d] if units.limits[d] == "samples" else f"limits.{units.limits[d]}"
        beyond = units.extra[:, d] > cap * (1 + 1e-12)
        if (beyond & several).any():
            at = int(np.argmax(beyond & several))
            raise _refused_group(at, units, segments, groups, names, name)
        if beyond.any() and recipe.overflow != "alone":
            at = int(np.argmax(beyond))
            sample = segments.sample[np.flatnonzero(units.of_segment == at)[0]]
            alone = "" if recipe.layout.pad_to is not None else ", or set overflow='alone'"
            raise PlanError(
                f"sample {names[sample]} takes {units.extra[at, d]:g} of {name}, but a micro-batch "
                f"holds {cap:g}. Raise the limit, remove the sample{alone}."
            )


def _refused_group(
    at: int,
    units: Units,
    segments: Segments,
    groups: IntArray | None,
    names: IntArray,
    limit: str,
) -> PlanError:
    members = segments.sample[units.of_segment == at]
    name = groups[members[0]] if groups is not None else "?"
    some = ", ".join(map(str, names[members[:4]]))
    return PlanError(
        f"group {name} has {units.count[at]} segments and {units.size[at]} slots, more than "
        f"{limit} allows in one micro-batch (samples {some}...). Raise {limit}, or set "
        f"groups='step'."
    )
