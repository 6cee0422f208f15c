"""FurtherLimits: several limits on what leaves a pool together, in addition to its slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.recipe import Recipe
from evenstep.core.rounding import rounded_up
from evenstep.planning.pool import Room


@dataclass(frozen=True, slots=True)
class FurtherLimits:
    """What each sample of a pool takes of every limit.

    taken, caps  samples x limits, and what one pack may hold of each limit
    most         per sample, the most samples in a pack with it
    adds_up      whether the slots of a pack are the sum of its samples' lengths (packed rows)
    """

    taken: FloatArray
    caps: FloatArray
    most: IntArray
    adds_up: bool

    def within(self, lengths: IntArray, room: Room, order: list[int]) -> list[int]:
        """In this order, each sample that still fits. The first always does."""
        first = order[0]
        chosen, used = [first], self.taken[first].copy()
        slots = widest = int(lengths[first])
        most = min(int(self.most[first]), len(order) if room.most is None else room.most)
        for at in order[1:]:
            if len(chosen) >= most:
                break
            fewer = min(most, int(self.most[at]))
            width = max(widest, int(lengths[at]))
            total = slots + int(lengths[at])
            if not self.adds_up:
                total = rounded_up(width, room.unit) * (len(chosen) + 1)
            fits = total <= room.capacity and len(chosen) < fewer
            if fits and (used + self.taken[at] <= self.caps).all():
                chosen.append(at)
                used += self.taken[at]
                slots, widest, most = slots + int(lengths[at]), width, fewer
        return chosen


def further_limits(
    recipe: Recipe, lengths: IntArray, columns: IntArray, shares: IntArray
) -> FurtherLimits:
    """The limits on columns and cost for samples of these aligned lengths.

    `columns` are samples x columns; a pack may hold `shares` of them.
    """
    layout = recipe.layout
    taken, caps = columns.astype(np.float64), shares.astype(np.float64)
    in_rows = "cost" in layout.measured(recipe)
    if recipe.limits.cost is not None and not in_rows:
        costs = layout.segment_costs(recipe, lengths)
        taken = np.column_stack((taken, costs))
        caps = np.append(caps, layout.cost_share(recipe) * (1 + 1e-12))
    return FurtherLimits(taken, caps, layout.pack_bounds(recipe, lengths)[1], not in_rows)
