"""Loads: the units of steps as rows of arrays, as far as bounds on time need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from evenstep.core.crowding import packs_of_first
from evenstep.core.ragged import FloatArray, IntArray, sum_by

if TYPE_CHECKING:
    from evenstep.core.recipe import Recipe

Measured = TypeVar("Measured")


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
    _known: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_step(
        cls,
        recipe: Recipe,
        aligned: IntArray,
        unit_of: IntArray | None = None,
        second: FloatArray | None = None,
    ) -> Loads:
        """One step. `unit_of` is the unit of each segment, by default a unit each.

        `second` is the second work of each unit. The rows of a padded layout are segments, also
        where groups share a micro-batch. Units without second work come largest first, as bounds
        would otherwise sort them one by one.
        """
        if unit_of is None or recipe.layout.segments_per_row is not None:
            unit_of = np.arange(len(aligned))
        count = int(unit_of.max(initial=-1)) + 1
        if second is None and count == len(aligned):
            return cls.of_segments(recipe, -np.sort(-aligned)[None])
        size, attended = (
            sum_by(unit_of, column, count)[None]
            for column in (aligned, attended_costs(recipe, aligned))
        )
        held = np.bincount(unit_of, minlength=count)[None]
        return cls(size.astype(np.int64), held, attended, None if second is None else second[None])

    @classmethod
    def of_segments(cls, recipe: Recipe, aligned: IntArray) -> Loads:
        """Steps x segments, each segment a unit; missing segments have length 0."""
        held = aligned > 0
        return cls(aligned, held.astype(np.int64), attended_costs(recipe, aligned) * held)

    def once(self, name: str, measure: Callable[[], Measured]) -> Measured:
        """The result of `measure`, which is called once for these units."""
        if name not in self._known:
            self._known[name] = measure()
        return cast(Measured, self._known[name])

    def packs_of_first(self, capacity: int) -> IntArray:
        """`core.crowding.packs_of_first` of these units; a larger one fills a pack."""
        size = np.minimum(self.size, capacity).astype(np.float64)
        column = np.full((len(size), 1), float(capacity))
        return self.once(f"packs of {capacity}", lambda: packs_of_first(size, column))

    def work(self, recipe: Recipe) -> FloatArray:
        """What each unit costs without padding."""
        return recipe.cost.per_token * self.size + self.attended


def attended_costs(recipe: Recipe, aligned: NDArray[np.integer]) -> FloatArray:
    """The cost of segments that does not depend on padding."""
    length = aligned.astype(np.float64)  # a square may not fit 64 bits
    return recipe.cost.per_pair * length * length + recipe.cost.per_segment
