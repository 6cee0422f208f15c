"""Loads: the units of steps as rows of arrays, as far as bounds on time need them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evenstep.core.crowding import packs_of_first
from evenstep.core.ragged import FloatArray, IntArray

if TYPE_CHECKING:
    from evenstep.core.recipe import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Steps x units. Rows have equal length; missing units have size 0 and cost nothing.

    size      the aligned slots of each unit: a segment, or a group that shares a micro-batch
    count     its segments
    attended  its cost that does not depend on padding: pairs and segments
    second    its second work, or None
    """

    size: IntArray
    count: IntArray
    attended: FloatArray
    second: FloatArray | None = None
    _packs: dict[int, IntArray] = field(default_factory=dict)

    @classmethod
    def of_units(
        cls,
        recipe: Recipe,
        sizes: IntArray,
        costs: FloatArray,
        counts: IntArray | None = None,
        second: FloatArray | None = None,
    ) -> Loads:
        """One step. `costs` are without padding; `second` is in the unit of `costs`."""
        attended = np.maximum(costs - recipe.cost.per_token * sizes, 0)
        one = np.ones_like(sizes) if counts is None else counts
        return cls(sizes[None], one[None], attended[None], None if second is None else second[None])

    @classmethod
    def of_segments(cls, recipe: Recipe, aligned: IntArray) -> Loads:
        """Steps x segments, each segment a unit; missing segments have length 0."""
        held = aligned > 0
        return cls(aligned, held.astype(np.int64), attended_costs(recipe, aligned) * held)

    def packs_of_first(self, capacity: int) -> IntArray:
        """`core.crowding.packs_of_first` of these units; a larger one fills a pack."""
        if capacity not in self._packs:
            size = np.minimum(self.size, capacity).astype(np.float64)
            self._packs[capacity] = packs_of_first(size, np.full((len(size), 1), float(capacity)))
        return self._packs[capacity]

    def work(self, recipe: Recipe) -> FloatArray:
        """What each unit costs without padding."""
        return recipe.cost.per_token * self.size + self.attended


def attended_costs(recipe: Recipe, aligned: NDArray[np.integer]) -> FloatArray:
    """The cost of segments that does not depend on padding."""
    length = aligned.astype(np.float64)  # a square may not fit 64 bits
    return recipe.cost.per_pair * length * length + recipe.cost.per_segment
