"""Refuse units that exceed a limit by themselves."""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import IntArray, Segments
from evenstep.core.recipe import Recipe
from evenstep.errors import PlanError
from evenstep.planning.units import Units


def check_units(
    units: Units,
    recipe: Recipe,
    segments: Segments,
    groups: IntArray | None,
    names: IntArray,
) -> None:
    """Raise if a unit exceeds a limit by itself.

    With overflow = "alone" a single sample may; a group of several never may.
    """
    several = units.count > 1
    capacity, most = recipe.layout.pack_bounds(recipe, units.widest)
    large = several & (units.count > most)
    if capacity is not None:
        large |= several & (units.size > capacity)
    if large.any():
        raise _refused_group(int(np.argmax(large)), units, segments, groups, names, "the layout")
    for d, cap in enumerate(units.caps):
        owner = "layout" if units.limits[d] == "samples" else "limits"
        name = f"{owner}.{units.limits[d]}"
        beyond = units.extra[:, d] > cap * (1 + 1e-12)
        if (beyond & several).any():
            at = int(np.argmax(beyond & several))
            raise _refused_group(at, units, segments, groups, names, name)
        if beyond.any() and recipe.overflow != "alone":
            at = int(np.argmax(beyond))
            sample = segments.sample[np.flatnonzero(units.of_segment == at)[0]]
            wider = recipe.layout.pad_to is None and not recipe.topology.equal_widths
            alone = ", or set overflow='alone'" if wider else ""
            holder = "a micro-batch" if recipe.layout.packs_per_micro_batch == 1 else "a row"
            raise PlanError(
                f"sample {names[sample]} takes {units.extra[at, d]:g} of {name}, more than the "
                f"{cap:g} that {holder} holds. Raise {name} or remove the sample{alone}."
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
    some = ", ".join(map(str, names[members[:4]])) + (", ..." if len(members) > 4 else "")
    remedy = "the layout's bounds" if limit == "the layout" else limit
    return PlanError(
        f"group {name} has {units.count[at]} segments and {units.size[at]} slots, more than "
        f"{limit} allows in one micro-batch (samples {some}). Raise {remedy}, or set "
        f"groups='step'."
    )
