"""Dynamic batching of one step: cut sorted rows into padded micro-batches, deal them to ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from evenstep.core.layout import Padded
from evenstep.core.ragged import IntArray, divided_up, offsets_of, rounded_up
from evenstep.core.recipe import Recipe
from evenstep.planning.balance.deal import deal_packs
from evenstep.planning.batching.blocks import SortedUnits, block_costs, whole_prices
from evenstep.planning.batching.cuts import (
    divide_cuts,
    feasible_starts,
    fewest_cuts,
    greedy_cuts,
    optimal_cuts,
)
from evenstep.planning.batching.least_time import Divider
from evenstep.planning.counts import more_counts
from evenstep.planning.units import Units


def count_cuts(units: Units, layout: Padded, recipe: Recipe) -> int:
    """The fewest micro-batches that hold the sorted units."""
    return fewest_cuts(_sorted(units, layout, recipe)[1].starts) if len(units) else 0


def cut_optimal(
    units: Units, layout: Padded, recipe: Recipe, ranks: int, wanted: int | None
) -> tuple[IntArray, int]:
    """(address of each unit, waves): the cuts with the least modelled time.

    Without `wanted`, the number of waves is searched among the fewest and two more multiples of
    the pipeline's, which must save `recipe.saving` of the time with the fewest. More waves
    are taken if the greedy cut needs them and is faster.

    With another balance than "refined", the cuts have the fewest slots, and that balance deals
    them to ranks.
    """
    multiple = recipe.topology.multiple
    if len(units) == 0:
        return np.empty(0, np.int64), wanted or multiple
    order, rows = _sorted(units, layout, recipe)
    fewest = rounded_up(divided_up(fewest_cuts(rows.starts), ranks), multiple)
    count = max(wanted or 0, fewest)
    address = np.empty(len(units), np.int64)
    if recipe.balance != "refined":
        address[order] = _dealt(rows, recipe, ranks, count)
        return address, count
    shared = shared_cuts(units, layout, recipe) if ranks == recipe.topology.dp else None
    divider = Divider(
        units=rows,
        ranks=ranks,
        lock_step=recipe.sync_every == "micro_batch",
        per_micro_batch=recipe.cost.per_micro_batch,
        static=layout.static,
        fewest=fewest,
        fewest_shared=0 if shared is None else rounded_up(len(shared.ends), multiple),
        greedy=lambda waves: None if shared is None else shared.address(waves)[order],
    )
    if wanted is not None:
        best = divider.at(count)
    else:
        best = divider.fastest(_counts(fewest, layout, recipe), recipe.saving)
        best = divider.no_slower_than_greedy(best, recipe.steps.micro_batches)
    address[order] = best.address
    return address, best.waves


def _counts(fewest: int, layout: Padded, recipe: Recipe) -> list[int]:
    """The numbers of waves to search. A static micro-batch costs the same however it is filled."""
    return [fewest, *([] if layout.static else more_counts(fewest, recipe))]


def _dealt(rows: SortedUnits, recipe: Recipe, ranks: int, count: int) -> IntArray:
    """The address of each sorted unit: the fewest slots, dealt by the recipe's balance."""
    blocks = min(count * ranks, len(rows.width))
    ends = optimal_cuts(rows.width, rows.rows, rows.starts, blocks)
    costs = np.full(count * ranks, rows.empty)
    costs[:blocks] = block_costs(rows, ends)
    address = deal_packs(costs, ranks, recipe.balance, recipe.sync_every)
    return np.repeat(address[:blocks], np.diff(ends, prepend=0))


def _sorted(units: Units, layout: Padded, recipe: Recipe) -> tuple[IntArray, SortedUnits]:
    """(units from narrow to wide, what blocks of them cost)."""
    width = layout.widths(units.widest, recipe.width_unit)
    order = np.lexsort((units.count, width))
    width, rows = width[order], units.count[order]
    most = layout.rows_that_fit(recipe, width)
    starts = feasible_starts(rows, most, units.extra[order], units.caps)
    price = recipe.cost.of_lengths(width)
    least = np.array([layout.widths(0, recipe.width_unit)])
    empty = float(recipe.cost.of_lengths(least)[0])
    whole = whole_prices(price)
    return order, SortedUnits(rows, offsets_of(rows), width, price, whole, starts, empty)


def count_greedy(units: Units, layout: Padded, recipe: Recipe) -> int:
    """How many waves the cuts that all ranks share need."""
    return len(shared_cuts(units, layout, recipe).ends)


def cut_greedy(
    units: Units, layout: Padded, recipe: Recipe, wanted: int | None
) -> tuple[IntArray, int, IntArray]:
    """(address of each unit, waves, width of each): the dynamic batching of NeMo-RL and ROLL.

    Sorted units are dealt to ranks in turn, and all ranks cut at the same turns.
    """
    cuts = shared_cuts(units, layout, recipe)
    most = layout.rows_that_fit(recipe, cuts.widest)
    count = max(wanted or 0, rounded_up(max(len(cuts.ends), 1), recipe.topology.multiple))
    ends = divide_cuts(cuts.ends, cuts.widest, count)
    widths = np.full(count, recipe.width_unit, np.int64)
    widths[: len(ends)] = cuts.widest[ends - 1]
    # 0: the ranks do not share this width. An over-long sample runs alone and must not widen other
    # ranks' micro-batches. Nor may a sample widen a group beyond the budget: two rows of 1 fit 20
    # slots, two rows of 17 do not.
    if recipe.longest_segment is not None:
        widths[widths > layout.widths(recipe.longest_segment, recipe.width_unit)] = 0
    for at, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        if cuts.rows[start:end].sum(axis=0).max() > most[end - 1]:
            widths[at] = 0
    return cuts.address(count), count, widths


class SharedCuts(NamedTuple):
    """Cuts that all ranks share: in turn t, rank r gets the sorted unit `t * ranks + r`.

    order   units by length
    rows    rows of each turn and rank
    widest  width of each turn
    ends    the turns at which all ranks cut
    """

    order: IntArray
    rows: IntArray
    widest: IntArray
    ends: IntArray

    def address(self, waves: int) -> IntArray:
        """`wave * ranks + rank` of each unit, with the largest cuts divided up to `waves`."""
        n, ranks = len(self.order), self.rows.shape[1]
        ends = divide_cuts(self.ends, self.widest, waves)
        wave = np.searchsorted(ends, np.arange(n) // ranks, "right")
        address = np.empty(n, np.int64)
        address[self.order] = wave * ranks + np.arange(n) % ranks
        return address


def shared_cuts(units: Units, layout: Padded, recipe: Recipe) -> SharedCuts:
    """The greedy cuts of these units."""
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
    return SharedCuts(order, rows, widest, greedy_cuts(rows, most, extra, units.caps))
