"""Dynamic batching of one step: cut sorted rows into padded micro-batches, deal them to ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from evenstep.core.layout import Padded
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe
from evenstep.core.rounding import divided_up, rounded_up
from evenstep.planning.balance.deal import deal_packs
from evenstep.planning.batching.cuts import (
    divide_cuts,
    feasible_starts,
    fewest_cuts,
    greedy_cuts,
    optimal_cuts,
)
from evenstep.planning.units import Units


def count_cuts(units: Units, layout: Padded, recipe: Recipe) -> int:
    """The fewest micro-batches that hold the sorted units."""
    return fewest_cuts(_sorted(units, layout, recipe)[2]) if len(units) else 0


def cut_optimal(
    units: Units, layout: Padded, recipe: Recipe, ranks: int, wanted: int | None
) -> tuple[IntArray, int]:
    """(address of each unit, waves): optimal cuts, each micro-batch dealt to a rank."""
    if len(units) == 0:
        return np.empty(0, np.int64), wanted or recipe.topology.multiple
    order, width, starts = _sorted(units, layout, recipe)
    needed = rounded_up(divided_up(fewest_cuts(starts), ranks), recipe.topology.multiple)
    count = max(wanted or 0, needed)
    cuts = min(count * ranks, len(units))
    ends = optimal_cuts(width, units.count[order], starts, cuts)
    block = np.empty(len(units), np.int64)
    block[order] = np.searchsorted(ends, np.arange(len(units)), "right")
    rows = np.bincount(block, weights=units.count, minlength=count * ranks)
    widest = np.zeros(count * ranks, np.int64)
    widest[:cuts] = width[ends - 1]
    costs = rows * recipe.cost.of_lengths(widest)
    return deal_packs(costs, ranks, recipe.balance, recipe.sync_every)[block], count


def _sorted(units: Units, layout: Padded, recipe: Recipe) -> tuple[IntArray, IntArray, IntArray]:
    """(units from narrow to wide, their widths, `feasible_starts` of each end)."""
    width = layout.widths(units.widest, recipe.width_unit)
    order = np.lexsort((units.count, width))
    most = layout.rows_that_fit(recipe, width[order])
    starts = feasible_starts(units.count[order], most, units.extra[order], units.caps)
    return order, width[order], starts


def count_greedy(units: Units, layout: Padded, recipe: Recipe) -> int:
    """How many waves the cuts that all ranks share need."""
    return len(_greedy_cuts(units, layout, recipe)[3])


def cut_greedy(
    units: Units, layout: Padded, recipe: Recipe, wanted: int | None
) -> tuple[IntArray, int, IntArray]:
    """(address of each unit, waves, width of each): the dynamic batching of NeMo-RL and ROLL.

    Sorted units are dealt to ranks in turn, and all ranks cut at the same turns.
    """
    ranks, n = recipe.topology.dp, len(units)
    order, rows, widest, ends = _greedy_cuts(units, layout, recipe)
    most = layout.rows_that_fit(recipe, widest)
    count = max(wanted or 0, rounded_up(max(len(ends), 1), recipe.topology.multiple))
    ends = divide_cuts(ends, widest, count)
    address = np.empty(n, np.int64)
    wave = np.searchsorted(ends, np.arange(n) // ranks, "right")
    address[order] = wave * ranks + np.arange(n) % ranks
    widths = np.full(count, recipe.width_unit, np.int64)
    widths[: len(ends)] = widest[ends - 1]
    # 0: the ranks do not share this width. An over-long sample runs alone and must not widen other
    # ranks' micro-batches. Nor may a sample widen a group beyond the budget: two rows of 1 fit 20
    # slots, two rows of 17 do not.
    if recipe.longest_segment is not None:
        widths[widths > layout.widths(recipe.longest_segment, recipe.width_unit)] = 0
    for at, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        if rows[start:end].sum(axis=0).max() > most[end - 1]:
            widths[at] = 0
    return address, count, widths


def _greedy_cuts(
    units: Units, layout: Padded, recipe: Recipe
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(units by length, rows of each turn and rank, width of each turn, ends of the cuts).

    In turn t, rank r gets the sorted unit `t * ranks + r`.
    """
    ranks = recipe.topology.dp
    width = layout.widths(units.widest, recipe.width_unit)
    order = np.argsort(units.widest, kind="stable")
    turns = divided_up(len(units), ranks)
    padded = np.full(turns * ranks, -1, np.int64)
    padded[: len(units)] = order
    here = padded.reshape(turns, ranks)
    real = here >= 0
    rows = np.where(real, units.count[here], 0)
    extra = np.where(real[:, :, None], units.extra[here], 0.0)
    widest = np.where(real, width[here], 0).max(axis=1, initial=0)
    most = layout.rows_that_fit(recipe, widest)
    return order, rows, widest, greedy_cuts(rows, most, extra, units.caps)
