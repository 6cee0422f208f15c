"""Units: what planning moves as a whole, a segment or the segments of one group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray, sum_by


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Columns of equal height, one row per unit.

    `of_segment` names each segment's unit. `size` is its slots in a packed row, `count` its
    segments, `widest` its longest aligned segment, and `extra[:, d]` what it takes of the d-th
    further limit `caps[d]`.
    """

    of_segment: IntArray
    size: IntArray
    cost: FloatArray
    count: IntArray
    widest: IntArray
    extra: FloatArray
    caps: FloatArray

    def __len__(self) -> int:
        return len(self.size)

    def take(self, index: IntArray) -> Units:
        """Some of the units; `of_segment` no longer applies and is empty."""
        return Units(
            np.empty(0, np.int64),
            self.size[index],
            self.cost[index],
            self.count[index],
            self.widest[index],
            self.extra[index],
            self.caps,
        )

    def by_count(self, max_tokens: int | None) -> Units:
        """The same units measured in segments; their slots become one more limit, if any."""
        extra, caps = self.extra, self.caps
        if max_tokens is not None:
            extra = np.column_stack((extra, self.size.astype(np.float64)))
            caps = np.append(caps, float(max_tokens))
        return Units(self.of_segment, self.count, self.cost, self.count, self.widest, extra, caps)


def make_units(
    aligned: IntArray,
    cost: FloatArray,
    extra: FloatArray,
    caps: FloatArray,
    group: IntArray | None,
) -> Units:
    """One unit per segment, or per group id where `group` is given (any integers)."""
    n = len(aligned)
    if group is None:
        one = np.ones(n, np.int64)
        return Units(np.arange(n), aligned, cost, one, aligned, extra, caps)
    _, first, unit = np.unique(group, return_index=True, return_inverse=True)
    # Number the groups by their first appearance: ids [7, 3, 7] -> units [0, 1, 0].
    renumber = np.empty(len(first), np.int64)
    renumber[np.argsort(first)] = np.arange(len(first))
    unit = renumber[unit]
    count = len(first)
    size, widest = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(size, unit, aligned)
    np.maximum.at(widest, unit, aligned)
    total = np.zeros((count, extra.shape[1]))
    np.add.at(total, unit, extra)
    costs = sum_by(unit, cost, count)
    return Units(unit, size, costs, np.bincount(unit, minlength=count), widest, total, caps)
