"""From segments to units with all that is limited, and the word on units that can never fit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from evenstep.core.layout import Fixed, PackedStatic, Padded
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.recipe import Recipe
from evenstep.core.segments import Segments
from evenstep.errors import PlanError
from evenstep.planning.units import Units, make_units


def units_of(
    segments: Segments,
    recipe: Recipe,
    columns: Mapping[str, IntArray],
    groups: IntArray | None,
) -> Units:
    """The units of these segments: what they take of the budget and of every further limit.

    A piece of a split or truncated sample counts its sample's columns in full: how they divide
    is unknown, and limits are hard.
    """
    unit = recipe.topology.alignment
    aligned = -(-segments.length // unit) * unit
    cost = recipe.cost.of_lengths(aligned)
    share = recipe.layout.rows if isinstance(recipe.layout, PackedStatic) else 1
    limits = recipe.limits
    for name, limit in (("segments", limits.segments), *limits.columns.items()):
        if limit is not None and limit < share:
            raise PlanError(
                f"the limit {limit} on {name} is shared by {share} rows of a packed_static "
                f"micro-batch, so a row could hold none. Raise it to {share} or more."
            )
    if limits.cost is not None and limits.cost <= recipe.cost.per_micro_batch:
        raise PlanError(
            f"limits.cost is {limits.cost} but an empty micro-batch costs "
            f"{recipe.cost.per_micro_batch} already, so none could hold anything. Raise the limit."
        )
    taken: list[FloatArray] = []
    caps: list[float] = []
    if recipe.limits.segments is not None:
        taken.append(np.ones(len(segments)))
        caps.append(recipe.limits.segments // share)
    if recipe.limits.cost is not None and not isinstance(recipe.layout, Padded):
        taken.append(cost)
        caps.append((recipe.limits.cost - recipe.cost.per_micro_batch) / share)
    for name, most in recipe.limits.columns.items():
        taken.append(columns[name][segments.sample].astype(np.float64))
        caps.append(most // share)
    extra = np.column_stack(taken) if taken else np.zeros((len(segments), 0))
    group = None
    if groups is not None and recipe.groups == "micro_batch":
        group = groups[segments.sample]
    return make_units(aligned, cost, extra, np.array(caps, np.float64), group)


def row_widths(units: Units, recipe: Recipe) -> IntArray:
    """The width that each unit needs of a padded micro-batch."""
    assert isinstance(recipe.layout, Padded)
    unit = recipe.width_unit
    width = -(-units.widest // unit) * unit
    return np.maximum(width, recipe.layout.pad_to) if recipe.layout.pad_to else width


def rows_that_fit(recipe: Recipe, widths: IntArray) -> IntArray:
    """How many padded rows of each width a micro-batch holds; one by itself always counts."""
    limits, cost = recipe.limits, recipe.cost
    assert isinstance(recipe.layout, Padded)
    assert recipe.capacity is not None
    most = np.where(widths > recipe.capacity, 1, recipe.layout.max_tokens // widths)
    if limits.cost is not None:
        dear = (limits.cost - cost.per_micro_batch) / cost.of_lengths(widths) + 1e-9
        most = np.minimum(most, dear).astype(np.int64)  # a limit may be beyond any integer
    return np.maximum(most, 1)


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
    lenient = recipe.overflow == "alone"
    capacity, layout = recipe.capacity, recipe.layout
    over = np.zeros(len(units), bool)
    if isinstance(layout, Padded):
        over |= units.count > rows_that_fit(recipe, row_widths(units, recipe))
    elif capacity is not None:
        over |= units.size > capacity
    if isinstance(layout, Fixed):
        over |= units.count > layout.samples
    grouped = over & (units.count > 1)
    if grouped.any():
        at = int(np.argmax(grouped))
        _refuse_group(at, units, segments, groups, names, "more than its budget")
    limits = _limit_names(recipe)
    for d, cap in enumerate(units.caps):
        beyond = units.extra[:, d] > cap * (1 + 1e-12)
        if (beyond & (units.count > 1)).any():
            at = int(np.argmax(beyond & (units.count > 1)))
            _refuse_group(at, units, segments, groups, names, f"over limits.{limits[d]}")
        if beyond.any() and not lenient:
            at = int(np.argmax(beyond))
            sample = segments.sample[np.flatnonzero(units.of_segment == at)[0]]
            raise PlanError(
                f"sample {names[sample]} takes {units.extra[at, d]:g} of limits.{limits[d]} but a "
                f"micro-batch holds {cap:g}; it could never run. Raise the limit, remove the "
                f"sample, or set overflow='alone'."
            )


def _refuse_group(
    at: int,
    units: Units,
    segments: Segments,
    groups: IntArray | None,
    names: IntArray,
    fault: str,
) -> None:
    members = segments.sample[units.of_segment == at]
    name = groups[members[0]] if groups is not None else "?"
    some = ", ".join(map(str, names[members[:4]]))
    raise PlanError(
        f"group {name} has {units.count[at]} segments and {units.size[at]} slots, {fault}, so it "
        f"could never share a micro-batch (samples {some}...). Raise the budget, or set "
        f"groups='step'."
    )


def _limit_names(recipe: Recipe) -> list[str]:
    names = [] if recipe.limits.segments is None else ["segments"]
    if recipe.limits.cost is not None and not isinstance(recipe.layout, Padded):
        names.append("cost")
    return [*names, *(f"columns.{name}" for name in recipe.limits.columns)]
