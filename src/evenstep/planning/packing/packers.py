"""Packers: lengths -> bins of at most `capacity`, as indices by bin."""

from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.bounds import pack_bound
from evenstep.core.layout import Packer
from evenstep.core.ragged import IntArray, Ragged
from evenstep.core.rounding import rounded_up
from evenstep.core.validate import MOST, seed_number, whole_number
from evenstep.errors import ConfigError, InputError, PlanError
from evenstep.planning.packing.best_fit import best_fit
from evenstep.planning.packing.first_fit import (
    first_fit_kernel,
    modified_first_fit_kernel,
    next_fit_kernel,
)
from evenstep.planning.packing.items import check_items
from evenstep.planning.packing.more_bins import even_bins
from evenstep.planning.packing.optimal import optimal_kernel

_LARGE, _EACH = 2**22, 64  # spaces of a table, in all or for each item, that are worth their memory


def concatenative(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """In the given order, a new bin whenever the next item does not fit. For debugging.

    >>> concatenative(np.array([4, 1, 3, 2, 1, 3, 4, 5]), 5).tolist()
    [[0, 1], [2, 3], [4, 5], [6], [7]]
    """
    check_items(lengths, capacity)
    return _grouped(next_fit_kernel(lengths, capacity))


def first_fit_decreasing(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """Longest first into the first bin with room; of equal lengths the later item goes first.

    >>> first_fit_decreasing(np.array([30, 30, 30, 30, 30]), 100).tolist()
    [[4, 3, 2], [1, 0]]
    """
    check_items(lengths, capacity)
    order = np.argsort(lengths, kind="stable")[::-1]
    return _placed(first_fit_kernel(lengths, order, capacity, 0), order)


def modified_first_fit_decreasing(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """Johnson and Garey's five phases: large items with a medium or two smalls, then the rest.

    >>> sizes = np.array([46, 24, 55, 88, 11, 14, 73, 17])
    >>> sorted(sorted(b) for b in modified_first_fit_decreasing(sizes, 100).tolist())
    [[0], [1, 2, 7], [3, 4], [5, 6]]
    """
    check_items(lengths, capacity)
    order = np.argsort(-lengths, kind="stable")
    return _placed(modified_first_fit_kernel(lengths, order, capacity), order)


def first_fit_shuffle(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """First fit in an order drawn from `seed`, and from nothing else."""
    check_items(lengths, capacity)
    order = np.random.default_rng(seed).permutation(len(lengths))
    return _placed(first_fit_kernel(lengths, order, capacity, 0), order)


def best_fit_decreasing(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """Longest first into the fullest bin with room; where there are far more spaces than items,
    into the first, which takes no table of them and promises as much.

    >>> best_fit_decreasing(np.array([10, 20, 30, 40, 50, 60, 70, 80, 90]), 100).tolist()
    [[8, 0], [7, 1], [6, 2], [5, 3], [4]]
    """
    if capacity > max(_LARGE, _EACH * len(lengths)):
        return first_fit_decreasing(lengths, capacity)
    return best_fit(lengths, capacity)


def optimal(lengths: IntArray, capacity: int, seed: int = 0) -> Ragged:
    """As few bins as the search finds; certified where they meet `pack_bound`.

    Best fit first. If that misses the bound, bins are filled to the brim by subset sums, under
    several tolerances, until one meets it; beyond four million spaces there is no such search.

    >>> len(optimal(np.array([6, 5, 4, 3, 2]), 10)), pack_bound(np.array([6, 5, 4, 3, 2]), 10)
    (2, 2)
    """
    packed = best_fit_decreasing(lengths, capacity)
    bound = pack_bound(lengths, capacity)
    if len(packed) > bound and capacity <= _LARGE:
        better = optimal_kernel(lengths, capacity, bound, len(packed))
        if len(better):
            return _grouped(better)
    return packed


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
    """Put items of these lengths into bins of `capacity`; bin i holds the items `result[i]`.

    Where the number of bins is raised to `min_bin_count` or to a multiple of
    `bin_count_multiple`, items are dealt anew to so many bins, balanced instead of filled.

    >>> pack([5, 4, 3, 2], 7).tolist()
    [[0, 3], [1, 2]]
    >>> pack([5, 4, 3, 2], 14, bin_count_multiple=2).tolist()
    [[0, 3], [1, 2]]
    """
    items = np.asarray(lengths)
    if items.ndim != 1 or (items.size and items.dtype.kind not in "iu"):
        raise InputError(
            f"lengths have shape {items.shape} and type {items.dtype}, not one integer each, so "
            f"nothing can be packed. Pass a flat sequence of whole numbers."
        )
    if items.dtype.kind == "u" and items.size and int(items.max()) > MOST:
        at = int(items.argmax())
        raise InputError(
            f"item {at} has length {items[at]}, beyond what sums of lengths can hold. Check it."
        )
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
                f"{target} bins were asked for but there are {len(items)} items; some bins would "
                f"stay empty. Lower min_bin_count or bin_count_multiple."
            )
        packed = even_bins(items, packed, capacity, target)
    return packed


def _packed(items: IntArray, capacity: int, packer: str | Packer, seed: int) -> Ragged:
    """The bins of a packer, by name or of the caller's own, whose bins are checked."""
    if isinstance(packer, str):
        known = PACKERS.get(packer.lower())
        if known is None:
            if ":" in packer:
                raise ConfigError(
                    f"packer {packer!r} was written to a file by name. Pass the function itself."
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
    """Lists of item numbers are taken as bins, too."""
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
    """What is wrong with bins that a caller's packer made; empty if nothing is."""
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


def _grouped(bin_of: IntArray) -> Ragged:
    """Bins by number, their items in order of index."""
    return Ragged.group(bin_of, int(bin_of.max(initial=-1)) + 1)


def _placed(bin_of: IntArray, order: IntArray) -> Ragged:
    """Bins by number, their items in the order in which they were considered."""
    count = int(bin_of.max(initial=-1)) + 1
    grouped = Ragged.group(bin_of[order], count)
    return Ragged(order[grouped.values], grouped.offsets)
