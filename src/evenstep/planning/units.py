"""Units: what the planner moves as a whole, a segment or the segments of a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evenstep.core.ragged import (
    FloatArray,
    IntArray,
    Segments,
    by_first_appearance,
    rounded_up,
    sum_by,
)
from evenstep.core.recipe import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Columns with one entry per unit, numbered by first appearance.

    `of_segment` is the unit of each segment. `size` is the slots of a unit in a packed row, `cost`
    the work that moves with it, `second` its second work, `count` its segments, `widest` its
    longest aligned segment, and `extra[:, d]` what it takes of the d-th further limit, `caps[d]`,
    which is called `limits[d]`.
    """

    of_segment: IntArray
    size: IntArray
    cost: FloatArray
    second: FloatArray
    count: IntArray
    widest: IntArray
    extra: FloatArray
    caps: FloatArray
    limits: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.size)

    def take(self, index: IntArray | slice) -> Units:
        """The units at `index`; their `of_segment` is empty."""
        return Units(
            np.empty(0, np.int64),
            self.size[index],
            self.cost[index],
            self.second[index],
            self.count[index],
            self.widest[index],
            self.extra[index],
            self.caps,
            self.limits,
        )

    def of_segments(self, segments: IntArray) -> Units:
        """The units of these segments, in the order of all units. Units must be complete.

        Where every segment is a unit, segment i is unit i.
        """
        if len(self.of_segment) == len(self.size):
            index, owner = segments, np.arange(len(segments))
        else:
            index, owner = np.unique(self.of_segment[segments], return_inverse=True)
        found = self.take(index)
        object.__setattr__(found, "of_segment", owner)
        return found

    def by_count(self) -> Units:
        """The same units with sizes in segments."""
        return Units(
            self.of_segment,
            self.count,
            self.cost,
            self.second,
            self.count,
            self.widest,
            self.extra,
            self.caps,
            self.limits,
        )


def units_of(
    segments: Segments,
    recipe: Recipe,
    columns: Mapping[str, IntArray],
    groups: IntArray | None,
) -> Units:
    """The units of these segments, with what each takes of every limit.

    A segment of a split or truncated sample counts its sample's columns in full, because how they
    divide is unknown and limits are hard. `groups` and `columns` are per sample.
    """
    layout, n = recipe.layout, len(segments)
    aligned = rounded_up(segments.length, recipe.topology.alignment)
    cost = layout.moving_costs(recipe, aligned)
    second = np.zeros(n)
    if recipe.second_work is not None:
        column = columns[recipe.second_work.column][segments.sample]
        second = recipe.second_work.of_column(column)
    measured = layout.measured(recipe)
    shares = {name: most for name, most in layout.shares(recipe).items() if name not in measured}
    taken = layout.taken(recipe, aligned, {k: v[segments.sample] for k, v in columns.items()})
    extra = np.zeros((n, len(shares)))
    for at, name in enumerate(shares):
        extra[:, at] = taken[name]
    caps = np.array(list(shares.values()), np.float64)
    limits = tuple(shares)
    if groups is None or recipe.groups != "micro_batch":
        one = np.ones(n, np.int64)
        return Units(np.arange(n), aligned, cost, second, one, aligned, extra, caps, limits)
    unit, first = by_first_appearance(groups[segments.sample])
    count = len(first)
    size, widest = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(size, unit, aligned)
    np.maximum.at(widest, unit, aligned)
    total = np.zeros((count, extra.shape[1]))
    np.add.at(total, unit, extra)
    costs, works = sum_by(unit, cost, count), sum_by(unit, second, count)
    held = np.bincount(unit, minlength=count)
    return Units(unit, size, costs, works, held, widest, total, caps, limits)
