"""Contents: everything that a micro-batch or a rank of a small step can hold, by subset.

Subset 0b101 holds units 0 and 2. There are 2^units of them, so units are few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evenstep import Padded, Recipe
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernels import kernel


@dataclass(frozen=True, slots=True, eq=False)
class Small:
    """A small step of whole samples: no alignment, no rounding, one row per pack."""

    recipe: Recipe
    lengths: IntArray
    groups: IntArray | None = None
    columns: Mapping[str, IntArray] | None = None

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self.recipe.topology.dp

    @property
    def owner(self) -> IntArray:
        """The unit of each sample: its group, or itself."""
        if self.groups is None:
            return np.arange(len(self.lengths))
        return np.asarray(np.unique(self.groups, return_inverse=True)[1], np.int64)

    @property
    def empty(self) -> float:
        """The cost of an empty micro-batch, without `per_micro_batch`: a slot, or a row of one."""
        if isinstance(self.recipe.layout, Padded):
            return float(self.recipe.cost.of_lengths(np.ones(1, np.int64))[0])
        return self.recipe.cost.per_token

    def work(self) -> FloatArray:
        """The cost of each subset's samples, without padding."""
        return by_subset(self.owner, self.recipe.cost.of_lengths(self.lengths))

    def pack_costs(self) -> FloatArray:
        """The cost of a micro-batch with each subset; infinite if it exceeds a bound."""
        recipe, owner, costs = self.recipe, self.owner, self.work()
        slots = by_subset(owner, self.lengths.astype(np.float64))
        if isinstance(recipe.layout, Padded):
            held = by_subset(owner, np.ones(len(owner)))
            widest = _widest(owner, self.lengths)
            costs, slots = held * recipe.cost.of_lengths(widest), held * widest
        fits = slots <= (recipe.layout.budget or np.inf)
        for name, most in recipe.limits.columns.items():
            assert self.columns is not None, "columns for the limits"
            fits &= by_subset(owner, self.columns[name].astype(np.float64)) <= most
        return np.where(fits, costs, np.inf)


def by_subset(owner: IntArray, values: FloatArray) -> FloatArray:
    """The sum of the values of each subset's units.

    >>> by_subset(np.array([0, 1, 1]), np.array([5.0, 2.0, 1.0])).tolist()
    [0.0, 5.0, 3.0, 8.0]
    """
    total = np.zeros(1)
    for value in np.bincount(owner, weights=values):
        total = np.concatenate((total, total + value))
    return total


def _widest(owner: IntArray, lengths: IntArray) -> IntArray:
    """The longest sample of each subset; 1 if it has none."""
    widest = np.ones(1, np.int64)
    for unit in range(int(owner.max()) + 1):
        longest = int(lengths[owner == unit].max())
        widest = np.concatenate((widest, np.maximum(widest, longest)))
    return widest


@kernel
def divided(packs: FloatArray, most: int, by_sum: bool) -> FloatArray:
    """`[j, S]`: the least cost of subset S in exactly j micro-batches that are not empty.

    `packs[S]` is the cost of one micro-batch with S. The cost of several is their sum, or the
    largest of them. The micro-batch with the lowest unit comes first.
    """
    subsets = packs.shape[0]
    least = np.full((most + 1, subsets), np.inf)
    least[0, 0] = 0.0
    for subset in range(1, subsets):
        lowest = subset & -subset
        rest = subset ^ lowest
        others = rest
        while True:
            cost = packs[others | lowest]
            if cost < np.inf:
                left = rest ^ others
                for j in range(1, most + 1):
                    before = least[j - 1, left]
                    found = before + cost if by_sum else max(before, cost)
                    if found < least[j, subset]:
                        least[j, subset] = found
            if others == 0:
                break
            others = (others - 1) & rest
    return least
