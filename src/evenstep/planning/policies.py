"""Policies: how other systems divide a step. Each keeps to one rule; nothing is searched.

in_order     `balance="none"`: micro-batches take the next samples while the bounds hold
bins_dealt   a packer's bins, or those of best fit, dealt to ranks by a balance
spread_out   units spread over all packs within further limits, dealt by a balance
equal_ranks  `equal_sizes`: equally many segments on each rank, then packs inside each rank
shared_cuts  the greedy cut of NeMo-RL and ROLL: all ranks cut sorted rows at the same turns
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from evenstep.core.layout import Padded
from evenstep.core.ragged import FloatArray, IntArray, divided_up, rounded_up
from evenstep.core.recipe import Recipe
from evenstep.errors import PlanError
from evenstep.planning.construct import (
    BEST_FIT,
    NONE,
    fill_bins,
    filled,
    narrow,
    of_bins,
    pack_ranks,
)
from evenstep.planning.kernels import kernel
from evenstep.planning.partition import partition
from evenstep.planning.units import Problem, Units


def in_order(units: Units, recipe: Recipe, wanted: int | None) -> tuple[IntArray, int]:
    """(address of each unit, waves): micro-batch k runs on rank k mod ranks."""
    ranks, rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
    pack_of = packs_in_order(units, recipe)
    micro, row = pack_of // rows, pack_of % rows
    needed = max(divided_up(int(micro.max(initial=-1)) + 1, ranks), 1)
    count = wanted or rounded_up(needed, recipe.topology.multiple)
    return (micro // ranks) * ranks * rows + micro % ranks * rows + row, count


def packs_in_order(units: Units, recipe: Recipe) -> IntArray:
    """The pack of each unit, in the order of the units."""
    widest = units.widest
    if recipe.topology.equal_widths:
        widest = np.full_like(widest, widest.max(initial=0))
    capacity, most = recipe.layout.pack_bounds(recipe, widest)
    taken, caps = units.extra, units.caps
    if capacity is not None:
        taken, caps = np.column_stack((units.size, taken)), np.append(float(capacity), caps)
    ends = greedy_cuts(units.count[:, None], most, taken[:, None], caps)
    return np.searchsorted(ends, np.arange(len(units)), "right")


def bins_dealt(problem: Problem, waves: int) -> IntArray:
    """A packer's bins, or those of best fit, dealt by the recipe's balance."""
    recipe, packs = problem.recipe, waves * problem.per_wave
    return of_bins(problem, fill_bins(problem, recipe.layout.packer or BEST_FIT, packs), waves)


def spread_out(problem: Problem, waves: int) -> IntArray:
    """Units spread over all packs within their limits, dealt by the recipe's balance."""
    bins = problem.limited.spread(waves * problem.per_wave)
    return NONE if bins is None else of_bins(problem, bins, waves)


def equal_fit(problem: Problem, waves: int) -> IntArray:
    """Equally many segments on each rank, packed inside each rank by best fit."""
    rank_of = deal_equal(problem.units, problem.ranks, problem.recipe.balance)
    return pack_ranks(problem, rank_of, waves, strict=True)


def equal_ranks(problem: Problem, waves: int, *, by_size: bool = False) -> IntArray:
    """Equally many segments on each rank, packed rank by rank; empty if a rank does not fit.

    Ranks are even by their work, or by their slots. The deal by "lpt" is tried too: steps of
    micro-batches are sized with it.
    """
    units, ranks, rows = problem.units, problem.ranks, problem.rows
    recipe = replace(problem.recipe, topology=replace(problem.recipe.topology, dp=1))
    form = filled if recipe.balance == "refined" else bins_dealt
    form = partial(narrow, wider=1.0) if recipe.topology.equal_widths else form
    form = form if recipe.layout.packer is None else bins_dealt
    evened = replace(units, cost=units.size.astype(np.float64)) if by_size else units
    for balance in dict.fromkeys((recipe.balance, "lpt")):
        rank_of = deal_equal(evened, ranks, balance)
        address = np.full(len(units), -1, np.int64)
        for rank in range(ranks):
            members = np.flatnonzero(rank_of == rank)
            packed = form(Problem(recipe, units.take(members), NONE, problem.capacity), waves)
            if len(packed) < len(members):
                break
            address[members] = (packed // rows * ranks + rank) * rows + packed % rows
        if address.min(initial=0) >= 0:
            return address
    return NONE


def deal_equal(units: Units, ranks: int, balance: str = "lpt") -> IntArray:
    """The rank of each unit, with equally many segments on each rank.

    Groups of different sizes are dealt most segments first, each to the rank with the fewest. If
    ranks then differ by more than one segment, a partition by number of segments alone is tried.

    Groups of 3, 3, 2, 2 and 2 on two ranks -> 3 + 3 and 2 + 2 + 2
    """
    if int(units.count.max(initial=1)) == int(units.count.min(initial=1)):
        return partition(units.cost, ranks, balance, equal_sizes=True)
    share = units.cost / (2 * max(float(units.cost.sum()), 1e-300))  # decides between equal counts
    rank_of = partition(units.count + share, ranks, "lpt")
    by_count = partition(units.count, ranks) if _unevenness(rank_of, units, ranks) > 1 else rank_of
    return by_count if _unevenness(by_count, units, ranks) <= 1 else rank_of


def check_equal(rank: IntArray, units: Units, ranks: int) -> None:
    """Raise if ranks hold different numbers of segments because of groups."""
    if _unevenness(rank, units, ranks) > 1:
        held = np.bincount(rank, weights=units.count, minlength=ranks)
        raise PlanError(
            f"equal_sizes needs equally many segments on each rank, but the {len(units)} groups of "
            f"this step give ranks {held.min():.0f} to {held.max():.0f} segments. Use groups of "
            f"one size and a multiple of {ranks} groups per step, or set equal_sizes=False."
        )


def _unevenness(rank_of: IntArray, units: Units, ranks: int) -> int:
    """The largest difference in segments between two ranks."""
    return int(np.ptp(np.bincount(rank_of, weights=units.count, minlength=ranks)))


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


@kernel
def greedy_cuts(rows: IntArray, most: IntArray, extra: FloatArray, caps: FloatArray) -> IntArray:
    """The ends of the micro-batches, the same for all ranks, cut as late as the limits allow.

    rows[t, r] and extra[t, r] describe the unit that rank r gets in turn t. A micro-batch holds at
    most `most[t]` rows if turn t is in it, and `caps[d]` of each further limit. A turn that exceeds
    a limit by itself gets its own.

        rows of 1 on one rank, most [9, 9, 9, 2], extra [3, 2, 4, 1] of at most 5 -> ends [2, 4]
    """
    turns, ranks = rows.shape
    ends = np.empty(turns, np.int64)
    count, begun, least = 0, 0, 0
    held_rows = np.zeros(ranks, np.int64)
    held = np.zeros((ranks, caps.shape[0]))
    for t in range(turns):
        over = False
        for r in range(ranks):
            over = over or held_rows[r] + rows[t, r] > min(least, most[t])
            for d in range(caps.shape[0]):
                over = over or held[r, d] + extra[t, r, d] > caps[d]
        if over and t > begun:
            ends[count] = t
            count, begun = count + 1, t
            held_rows[:] = 0
            held[:] = 0
        least = most[t] if t == begun else min(least, most[t])
        for r in range(ranks):
            held_rows[r] += rows[t, r]
            for d in range(caps.shape[0]):
                held[r, d] += extra[t, r, d]
    if turns:
        ends[count] = turns
        count += 1
    return ends[:count]


def divide_cuts(ends: IntArray, widths: IntArray, wanted: int) -> IntArray:
    """Halve the largest micro-batches until there are `wanted`, or none can be divided.

    ends [2, 3, 4] with widths [2, 6, 8, 8], 4 wanted -> [1, 2, 3, 4]: the first is divided.
    """
    if len(ends) >= wanted:
        return ends
    held = [_largest_first(a, b, widths) for a, b in pairwise([0, *ends.tolist()])]
    heapq.heapify(held)
    while len(held) < wanted and held[0][0] < 0:
        _, start, end = heapq.heappop(held)
        middle = (start + end) // 2
        heapq.heappush(held, _largest_first(start, middle, widths))
        heapq.heappush(held, _largest_first(middle, end, widths))
    return np.array(sorted(end for _, _, end in held), np.int64)


def _largest_first(start: int, end: int, widths: IntArray) -> tuple[int, int, int]:
    """An entry of a heap: a micro-batch of one turn cannot be divided and comes last."""
    size = (end - start) * int(widths[end - 1]) if end - start > 1 else 0
    return -size, start, end
