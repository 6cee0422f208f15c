"""A lower bound on bins under several limits that sees two limits at a time.

`bins_bound` looks at one limit after the other. An item with nearly all tokens of a bin and no
patches then counts for little by patches, although it leaves no room for any other item.
"""

from __future__ import annotations

from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.bounds import bins_bound
from evenstep.core.ragged import FloatArray

BoolArray: TypeAlias = NDArray[np.bool_]

_SLACK = 2e-9  # rounding errors of a sum of floats, with a margin


def least_bins(taken: FloatArray, caps: FloatArray) -> int:
    """At least this many bins hold the items: item i takes `taken[i, d]` of `caps[d]`.

    Items that share a bin with no other are counted; the others are bounded limit by limit.

    >>> two = np.array([[10.0, 0.0], [1.0, 3.0], [1.0, 3.0]])
    >>> least_bins(two, np.array([10.0, 4.0])), bins_bound(two, np.array([10.0, 4.0]))
    (3, 2)
    """
    single = shares_with_none(taken, caps)
    return int(single.sum()) + bins_bound(taken[~single], caps)


def shares_with_none(taken: FloatArray, caps: FloatArray) -> BoolArray:
    """Which items can share a bin with no other item, by some two limits.

    For limits a and b: of the items that fit beside it by a, the one that takes least of b is
    still too much.
    """
    single = (taken > caps).any(axis=1)
    for a, b in combinations(range(len(caps)), 2):
        order = np.argsort(taken[:, a], kind="stable")
        least = np.concatenate(([np.inf], np.minimum.accumulate(taken[order, b])))
        room = caps * (1 + _SLACK) - taken
        beside = np.searchsorted(taken[order, a], room[:, a], "right")
        single |= least[beside] > room[:, b]
    return np.asarray(single, np.bool_)
