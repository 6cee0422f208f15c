"""The ways to form packs that a recipe allows, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np

from evenstep.core.layout import PACKER_NAMES
from evenstep.core.ragged import IntArray, Ragged
from evenstep.core.recipe import Recipe
from evenstep.planning.balance.construct import (
    NONE,
    fill_bins,
    of_bins,
    ranks_first,
    waves_first,
)
from evenstep.planning.balance.equal_sizes import deal_equal
from evenstep.planning.balance.kinds import kinds_apart
from evenstep.planning.balance.partition import partition
from evenstep.planning.balance.problem import Problem
from evenstep.planning.units import Units
from evenstep.planning.vector_packing import spread_units

Way: TypeAlias = Callable[[Problem, int], IntArray]
"""(problem, waves) -> the address of each unit; empty if units do not fit that way."""

BEST_FIT = "best_fit_decreasing"
_SLACK = (1.0, 1.02, 1.05)  # widths tried where all micro-batches share one, over the least


def main_ways(problem: Problem) -> list[Way]:
    """The ways that are tried first."""
    recipe = problem.recipe
    if problem.kinds_matter:
        return [kinds_apart]
    if recipe.equal_sizes:
        own: Way = partial(ranks_first, equal=True)
        shaped = recipe.topology.equal_widths or recipe.layout.static
        ways: list[Way] = [partial(rank_by_rank, by_size=True)] if shaped else []
        ways += [rank_by_rank] if shaped or recipe.layout.packer is not None else []
        return ways + ([own] if recipe.layout.packer is None else [])
    if not problem.joint:
        return [filled, spread_out] if len(problem.units.caps) else [filled]
    if recipe.topology.equal_widths:
        return [partial(narrow, slack=slack) for slack in _SLACK]
    if recipe.second_work is not None:
        return [kinds_apart, waves_first, ranks_first, filled]
    if problem.by_rank:
        return [ranks_first, waves_first, partial(ranks_first, equal=True)]
    return [waves_first]


def further_ways(problem: Problem, *, few: bool = False) -> list[Way]:
    """The ways that are tried where the first are not even: simple ones that may be faster.

    Only the first two are tried where ranks are nearly even. With `few`, there is only the one that
    needs the fewest packs.
    """
    recipe = problem.recipe
    if problem.kinds_matter:
        return []
    if recipe.equal_sizes:
        return [] if recipe.layout.packer else [rank_by_rank]
    if not problem.joint:
        return []
    if few:
        return [filled]
    ways: list[Way] = [partial(ranks_first, equal=True), partial(filled, balance="lpt")]
    ways += [filled, *([] if problem.by_rank else [ranks_first])]
    ways += [partial(filled, balance=balance) for balance in ("karmarkar_karp", "stride")]
    if not len(problem.units.caps):
        ways += [partial(filled, packer=name) for name in PACKER_NAMES if name != BEST_FIT]
    if recipe.topology.equal_widths:
        ways += [waves_first, ranks_first]
    return ways


def filled(
    problem: Problem, waves: int, *, packer: str | None = None, balance: str | None = None
) -> IntArray:
    """Bins that a packer fills one by one, dealt by a balance."""
    recipe = problem.recipe
    if packer is not None or balance is not None:
        packs = waves * problem.per_wave
        bins = fill_bins(problem.units, problem.capacity, packer or BEST_FIT, recipe.seed, packs)
        return of_bins(problem, bins, waves, refined=False, balance=balance)
    return of_bins(problem, bins_for(problem, waves), waves, refined=problem.joint)


def spread_out(problem: Problem, waves: int) -> IntArray:
    """Units spread over all packs within their limits, dealt by the recipe's balance."""
    bins = spread_units(problem.units, problem.capacity, waves * problem.per_wave)
    return NONE if bins is None else of_bins(problem, bins, waves, refined=False)


def bins_for(problem: Problem, waves: int) -> Ragged:
    """Units in bins; where these are more than `waves` hold, other ways to need fewer are tried."""
    units, capacity, recipe = problem.units, problem.capacity, problem.recipe
    packer, packs = recipe.layout.packer, waves * problem.per_wave
    bins = fill_bins(units, capacity, packer or BEST_FIT, recipe.seed, packs)
    if len(bins) > packs and problem.joint and not len(units.caps):
        better = fill_bins(units, capacity, "optimal", recipe.seed)
        bins = better if len(better) < len(bins) else bins
    return bins


def narrow(problem: Problem, waves: int, *, slack: float) -> IntArray:
    """Packs of similar size, for micro-batches that all have one width.

    `slack` is how much wider than the narrowest packs may be, so that their work is more even.
    """
    units, packs = problem.units, waves * problem.per_wave
    bins = Ragged.group(partition(units.size, packs), packs)
    if len(units.caps) and not _within_caps(units, bins):
        spread = spread_units(units, problem.capacity, packs)
        if spread is None:
            return NONE
        bins = spread
    widest = int(bins.sums(units.size).max())
    if widest > problem.capacity:
        return NONE
    if slack == 1.0:
        return of_bins(problem, bins, waves, refined=False)
    capacity = min(problem.capacity, problem.rounded(int(widest * slack)))
    return waves_first(replace(problem, capacity=capacity), waves)


def _within_caps(units: Units, bins: Ragged) -> bool:
    """Whether every bin keeps the further limits."""
    held = np.zeros((len(bins), len(units.caps)))
    np.add.at(held, bins.owner, units.extra[bins.values])
    return bool((held <= units.caps).all())


def rank_by_rank(problem: Problem, waves: int, *, by_size: bool = False) -> IntArray:
    """Equally many segments on each rank, packed rank by rank; empty if a rank does not fit.

    Ranks are even by their work, or by their slots. The deal by "lpt" is tried too: steps of
    micro-batches are sized with it.
    """
    units, ranks, rows = problem.units, problem.ranks, problem.rows
    recipe = replace(problem.recipe, topology=replace(problem.recipe.topology, dp=1))
    way = partial(narrow, slack=1.0) if recipe.topology.equal_widths else filled
    way = filled if recipe.layout.packer else way
    evened = replace(units, cost=units.size.astype(np.float64)) if by_size else units
    for balance in dict.fromkeys((recipe.balance, "lpt")):
        rank_of = deal_equal(evened, ranks, balance)
        address = np.full(len(units), -1, np.int64)
        for rank in range(ranks):
            own = np.flatnonzero(rank_of == rank)
            found = way(replace(problem, units=units.take(own), recipe=recipe), waves)
            if len(found) < len(own):
                break
            address[own] = (found // rows * ranks + rank) * rows + found % rows
        if address.min(initial=0) >= 0:
            return address
    return NONE


def count_packs(units: Units, capacity: int, recipe: Recipe, packs: int) -> int:
    """How many packs the units need; at most `packs` if they can be filled into that many."""
    if len(units) == 0:
        return 0
    return len(fill_bins(units, capacity, recipe.layout.packer or BEST_FIT, recipe.seed, packs))
