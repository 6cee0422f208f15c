"""The packers by name, `pack`, and the check of a caller's own packer.

A packer is a pure function (lengths, capacity, seed) -> the items of each bin.
"""

from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.layout import Packer
from evenstep.core.ragged import IntArray, Ragged, rounded_up
from evenstep.core.text import MOST, seed_number, whole_number
from evenstep.errors import ConfigError, InputError, PlanError
from evenstep.planning.packing.best_fit import best_fit_decreasing
from evenstep.planning.packing.first_fit import (
    concatenative,
    first_fit_decreasing,
    first_fit_shuffle,
    modified_first_fit_decreasing,
)
from evenstep.planning.packing.items import check_items
from evenstep.planning.packing.more_bins import even_bins
from evenstep.planning.packing.optimal import optimal

PACKERS: dict[str, Packer] = {
    packer.__name__: packer
    for packer in (
        concatenative,
        first_fit_decreasing,
        modified_first_fit_decreasing,
        first_fit_shuffle,
        best_fit_decreasing,
        optimal,
    )
}


def pack(
    lengths: ArrayLike,
    capacity: int,
    packer: str | Packer = "best_fit_decreasing",
    *,
    seed: int = 0,
    min_bin_count: int = 0,
    bin_count_multiple: int = 1,
) -> Ragged:
    """Pack items of these lengths into bins of `capacity`; bin i holds the items `result[i]`.

    Where `min_bin_count` or `bin_count_multiple` ask for more bins than the packer needs, all items
    are spread evenly over that many bins.

    >>> pack([5, 4, 3, 2], 7).tolist()
    [[0, 3], [1, 2]]
    >>> pack([5, 4, 3, 2], 14, bin_count_multiple=2).tolist()
    [[0, 3], [1, 2]]
    """
    items = np.asarray(lengths)
    if items.ndim != 1 or (items.size and items.dtype.kind not in "iu"):
        raise InputError(
            f"lengths must be a flat sequence of integers, got shape {items.shape} and dtype "
            f"{items.dtype}."
        )
    if items.dtype.kind == "u" and items.size and int(items.max()) > MOST:
        at = int(items.argmax())
        raise InputError(f"item {at} has length {items[at]}; expected at most {MOST}.")
    items = np.ascontiguousarray(items, np.int64)
    capacity = whole_number("capacity", capacity)
    seed = seed_number(seed)
    min_bin_count = whole_number("min_bin_count", min_bin_count, least=0)
    bin_count_multiple = whole_number("bin_count_multiple", bin_count_multiple)
    packed = _packed(items, capacity, packer, seed)
    target = rounded_up(max(len(packed), min_bin_count), bin_count_multiple)
    if target > len(packed):
        if target > len(items):
            raise InputError(
                f"Cannot create {target} bins with only {len(items)} sequences. Lower "
                f"min_bin_count or bin_count_multiple."
            )
        packed = even_bins(items, packed, capacity, target)
    return packed


def _packed(items: IntArray, capacity: int, packer: str | Packer, seed: int) -> Ragged:
    """The bins of a packer, given by name or as a function. The bins of a function are checked."""
    if isinstance(packer, str):
        known = PACKERS.get(packer)
        if known is None:
            if ":" in packer:
                raise ConfigError(
                    f"packer {packer!r} is a function's name, read from a file. Pass the function."
                )
            raise ConfigError(f"unknown packer {packer!r}; expected one of: {', '.join(PACKERS)}.")
        return known(items, capacity, seed) if len(items) else Ragged.of([])
    if len(items) == 0:
        return Ragged.of([])
    check_items(items, capacity)
    packed = _as_ragged(packer(items.copy(), capacity, seed), packer)
    fault = _fault(packed, items, capacity)
    if fault:
        raise PlanError(f"packer {_name(packer)} {fault}. Correct the packer.")
    full = np.flatnonzero(packed.lengths)
    return Ragged(packed.values, np.append(packed.offsets[full], len(packed.values)))


def _as_ragged(bins: Any, packer: Packer) -> Ragged:
    """The bins as `Ragged`; lists of item numbers are accepted too."""
    if isinstance(bins, Ragged):
        return bins
    try:
        return Ragged.of([[index(item) for item in row] for row in bins])
    except TypeError:
        raise PlanError(
            f"packer {_name(packer)} returned {type(bins).__name__}; expected a Ragged, or a list "
            f"of item numbers for each bin."
        ) from None


def _fault(packed: Ragged, items: IntArray, capacity: int) -> str:
    """What is wrong with the bins of a caller's packer; empty if nothing is."""
    values, n = packed.values, len(items)
    if len(values) and (values.min() < 0 or values.max() >= n):
        return f"returned item {values[(values < 0) | (values >= n)][0]} of {n}"
    seen = np.bincount(values, minlength=n)
    if (seen != 1).any():
        at = int(np.argmax(seen != 1))
        return f"returned item {at} {seen[at]} times"
    used = packed.sums(items)
    if used.max(initial=0) > capacity:
        at = int(used.argmax())
        return f"put {used[at]} tokens into bin {at}, which holds {capacity}"
    return ""


def _name(packer: Packer) -> str:
    return getattr(packer, "__qualname__", repr(packer))
