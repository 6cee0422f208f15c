"""Padded rows: sorted from narrow to wide, cut into micro-batches and dealt to ranks.

A *block* is a contiguous micro-batch of sorted units: it ends at j, its widest unit is j - 1, and
it starts where a level (the most it may cost) or a limit is reached. Narrower units never need more
than wider ones, so the earliest start is best for the blocks that follow.

cuts    the least cost in total for an exact number of blocks
levels  ranks that wait in every wave: how expensive each wave may be, lowered pair by pair
shifts  ranks that wait once per step: cuts shift and blocks change ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from evenstep.core.layout import Padded
from evenstep.core.ragged import FloatArray, IntArray, divided_up, offsets_of, rounded_up
from evenstep.core.recipe import Recipe
from evenstep.planning.kernels import kernel
from evenstep.planning.partition import DEALS, deal_packs, partition
from evenstep.planning.policies import shared_cuts
from evenstep.planning.units import (
    Packing,
    Problem,
    Units,
    empty_cost,
    faster,
    first_worth,
    more_counts,
    without_empty,
)

_EXACT = 2**24
_ROUNDING = 1 + 1e-12  # 3 rows of cost 0.1 fit a level of 0.3
_LESS = 1 - 1e-9
_SHARES = np.array([0.6, 0.45, 0.3, 0.2, 0.14, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005])
_TRIALS = 6  # bisections of one level
_ROUNDS = 20  # of lowering all levels
_CAPS = 5  # between the most expensive blocks of the even and of the cheapest cut
_WORK = 100_000  # blocks tried while levels or the slowest rank are lowered
_FARTHEST = 64  # blocks between the two that exchange a unit
_NARROWER, _WIDER, _SWAP, _MOVE, _MERGE = -1, 1, 0, 2, 3
TINY = 24  # units up to which all assignments are tried
FEW = 256  # units that are exchanged
EVEN = 1 + 1e-9  # a time this close to its floor is final
_SHIFTED = 2048  # units up to which even waves are tried
_WORTH = 1.02  # times over the least that exchanges may still make the least
_PHASES = ((4, 0.3, 3_000), (5, 0.02, 3_000), (7, 0.005, 3_000), (9, 0.001, 2_000))


class Rows(NamedTuple):
    """Units from narrow to wide, as kernels take them.

    rows    the rows of each unit
    below   the rows of the first j units
    price   what one row costs at the width of each unit
    scaled  the prices as integers, for exact sums
    starts  for each end, where the limits let a block start (`feasible_starts`)
    empty   what an empty micro-batch costs
    """

    rows: IntArray
    below: IntArray
    price: FloatArray
    scaled: IntArray
    starts: IntArray
    empty: float


def problem_of(units: Units, recipe: Recipe, layout: Padded, aligned: IntArray) -> Problem:
    """The problem of cutting these units: sorted, with sizes in rows and the price of one row."""
    width = layout.widths(units.widest, recipe.width_unit)
    order = np.lexsort((units.count, width))
    units, width = units.reordered(order), width[order]
    units = replace(units, size=units.count, cost=recipe.cost.of_lengths(width))
    return Problem(recipe, units, aligned, layout.rows_that_fit(recipe, width), cut=True)


def rows_of(problem: Problem) -> Rows:
    """The sorted units of a problem for kernels."""
    units = problem.units
    starts = feasible_starts(units.size, problem.most, units.extra, units.caps)
    scaled = whole_prices(units.cost)
    return Rows(
        units.size, offsets_of(units.size), units.cost, scaled, starts, empty_cost(problem.recipe)
    )


def count_cuts(units: Units, layout: Padded, recipe: Recipe) -> int:
    """The fewest micro-batches that hold these units."""
    problem = problem_of(units, recipe, layout, units.size[:0])
    return fewest_cuts(rows_of(problem).starts) if len(units) else 0


def cut_rows(problem: Problem, layout: Padded, wanted: int | None) -> tuple[IntArray, int]:
    """(address of each unit, waves): the cuts with the least modelled time.

    Without `wanted`, the number of waves is searched among the fewest and two more multiples of
    the pipeline's (four for few units), which must save `recipe.saving` of the time with the
    fewest. More waves are taken if the greedy cut needs them and is faster.

    With another balance than "refined", the cuts cost least in total, and that balance deals them
    to ranks.
    """
    recipe, saving = problem.recipe, problem.recipe.saving
    if not len(problem.units):
        return np.empty(0, np.int64), wanted or recipe.topology.multiple
    divider = _Divider(problem, layout)
    fewest = max(wanted or 0, divider.fewest)
    if recipe.balance != "refined":
        return divider.by_balance(fewest), fewest
    tried = [divider.at(fewest)]
    if wanted is None and not layout.static:
        # Trainers fix the most micro-batches of a step: without a price, few more than needed, or
        # than the greedy cut has.
        few = len(problem.units) <= FEW and recipe.cost.per_micro_batch > 0
        counts = {*more_counts(fewest, recipe, 4 if few else 2)}
        if len(problem.units) <= TINY:
            counts |= {*more_counts(divider.greedy_waves, recipe)}
        for count in sorted(count for count in counts if count > fewest):
            best = tried[first_worth([each.time for each in tried], saving)]
            if divider.floor(count) < best.time * (1 - saving):
                tried.append(divider.at(count))
    least = min(each.time for each in tried)
    floor = divider.floor
    tried = [
        exchanged(problem, each, floor) if each.time < least * _WORTH else each for each in tried
    ]
    best = tried[first_worth([each.time for each in tried], saving)]
    if wanted is None:
        best = divider.no_slower_than_greedy(best)
    best = without_empty(problem, best)
    return best.address, best.waves


class _Divider:
    """Divides the sorted units of one step between the micro-batches of all ranks."""

    def __init__(self, problem: Problem, layout: Padded) -> None:
        self.problem, self.rows, self.ranks = problem, rows_of(problem), problem.ranks
        multiple = problem.recipe.topology.multiple
        fewest = divided_up(fewest_cuts(self.rows.starts), self.ranks)
        self.fewest = rounded_up(fewest, multiple)
        self.greedy = shared_cuts(problem.units, layout, problem.recipe)
        self.greedy_waves = rounded_up(len(self.greedy.ends), multiple)
        self._cheapest: dict[int, IntArray] = {}

    def cheapest(self, count: int) -> IntArray:
        """The ends of the blocks that cost least in total, with `count` per rank."""
        if count not in self._cheapest:
            rows, blocks = self.rows, min(count * self.ranks, len(self.rows.price))
            self._cheapest[count] = optimal_cuts(rows.scaled, rows.rows, rows.starts, blocks)
        return self._cheapest[count]

    def floor(self, count: int) -> float:
        """No contiguous cut into `count` micro-batches per rank is faster.

        Nor are other micro-batches, if every unit is one row: see `cut_times` of `core.bounds`.
        """
        rows = self.rows
        costs = block_costs(rows, self.cheapest(count))
        empty = (count * self.ranks - len(costs)) * rows.empty
        mean = (float(costs.sum()) + empty) / self.ranks
        largest = float((rows.rows * rows.price).max()) + (count - 1) * rows.empty
        return max(mean, largest) + count * self.problem.recipe.cost.per_micro_batch

    def by_balance(self, count: int) -> IntArray:
        """The address of each unit: the cheapest cuts, dealt by the recipe's balance."""
        recipe = self.problem.recipe
        return self.dealt(self.cheapest(count), count, recipe.balance, recipe.sync_every)

    def dealt(self, ends: IntArray, count: int, balance: str, sync_every: str) -> IntArray:
        """The address of each unit when blocks are dealt to ranks."""
        costs = np.full(count * self.ranks, self.rows.empty)
        costs[: len(ends)] = block_costs(self.rows, ends)
        address = deal_packs(costs, self.ranks, balance, sync_every)
        return np.repeat(address[: len(ends)], np.diff(ends, prepend=0))

    def at(self, count: int) -> Packing:
        """The best division with `count` micro-batches per rank."""
        problem, best, least = self.problem, None, (np.inf, np.inf)
        for address in self._addresses(count):
            works = problem.works(address, count)
            time, total = problem.time(works), float(works[0].sum())
            if time < least[0] * (1 - 1e-12) or (time <= least[0] and total < least[1]):
                best, least = Packing(address, count, time), (time, total)
        assert best is not None
        return best

    def no_slower_than_greedy(self, best: Packing) -> Packing:
        """`best`, or the best division with the waves of the greedy cut if that is faster."""
        waves = self.greedy_waves
        if waves > (self.problem.recipe.steps.micro_batches or waves):
            return best
        greedy = faster(self.problem, best, self.greedy.address(waves), waves)
        if greedy is None or greedy is best:
            return best
        if waves < self.fewest:
            return greedy
        cut = exchanged(self.problem, self.at(waves), self.floor)
        return min(cut, greedy, key=lambda each: each.time)

    def _addresses(self, count: int) -> Iterator[IntArray]:
        """The addresses to compare."""
        rows, ranks, n, cheapest = self.rows, self.ranks, len(self.rows.price), self.cheapest(count)
        if ranks == 1:
            yield self.dealt(cheapest, count, "lpt", "step")
            return
        if self.problem.by_rank(count):
            for balance in DEALS:
                yield self.dealt(cheapest, count, balance, "step")
            for ends, rank_of in lowered_cuts(rows, ranks, count, cheapest):
                yield self._by_rank(ends, rank_of)
            return
        cuts = [cheapest]
        if n <= _SHIFTED:
            # Even waves, shifted from waves of the cheapest blocks and of one unit per block on.
            blocks = np.arange(count, -1, -1) * ranks  # from the start of each wave on
            by_block = np.append(0, cheapest)[np.maximum(len(cheapest) - blocks, 0)]
            by_unit = np.maximum(n - blocks, 0)
            by_unit[0] = 0  # the narrowest wave has all that is left
            even = [even_waves(rows, starts, ranks) for starts in (by_block, by_unit)]
            cuts += [cut for cut in even if len(cut)]
        capped = _capped(rows, ranks * count, cheapest) if n <= FEW else []
        for at, ends in enumerate(cuts + capped):  # where levels end depends on their start
            ends = lower_levels(rows, ends, ranks, count, _WORK, at < len(cuts))
            yield self.dealt(ends, count, "refined", "micro_batch")

    def _by_rank(self, ends: IntArray, rank_of: IntArray) -> IntArray:
        """The address of each unit where every rank runs its blocks most expensive first."""
        order = np.lexsort((-block_costs(self.rows, ends), rank_of))
        held = np.bincount(rank_of, minlength=self.ranks)
        turn = np.arange(len(ends)) - np.repeat(np.cumsum(held) - held, held)
        address = np.empty(len(ends), np.int64)
        address[order] = turn * self.ranks + rank_of[order]
        return np.repeat(address, np.diff(ends, prepend=0))


def exchanged(
    problem: Problem, best: Packing, floor: Callable[[int], float], most: int = FEW
) -> Packing:
    """The packs of up to `most` units after a search of all, if few, and after exchanges.

    These end at the `floor` of contiguous packs. Of groups and under further limits, the cheapest
    packs may not be contiguous.
    """
    n, waves, units = len(problem.units), best.waves, problem.units
    if n > most or problem.ranks == 1:
        return best
    if len(units.caps) or int(units.size.max()) > 1:
        floor = problem.quick_floor
    fixed = waves * problem.recipe.cost.per_micro_batch
    goal = (floor(waves) - fixed) * EVEN
    proved = best.time - fixed <= goal
    if n <= TINY and not (proved or problem.recipe.equal_sizes):
        widest_first, least = np.arange(n)[::-1].copy(), best.time - fixed
        address, proved = problem.search_all(widest_first, best.address, waves, least, goal)
        best = faster(problem, best, address, waves) or best
    if proved:
        return best
    times = 2 if problem.by_rank(waves) else 1  # any rank may take a unit, not only a wave's
    address = problem.exchange(best.address, waves, _PHASES, goal, times=times)
    return faster(problem, best, address, waves) or best


@kernel
def feasible_starts(
    rows: IntArray, most: IntArray, extra: FloatArray, caps: FloatArray
) -> IntArray:
    """For each end j, the first i such that units i..j-1 fit one micro-batch.

    Units are sorted from narrow to wide. `most[j]` rows fit where unit j is the widest. A single
    unit always counts as fitting.
    """
    n = rows.shape[0]
    starts = np.zeros(n + 1, np.int64)
    first = 0
    held_rows = 0
    held = np.zeros(caps.shape[0])
    for j in range(1, n + 1):
        held_rows += rows[j - 1]
        for d in range(caps.shape[0]):
            held[d] += extra[j - 1, d]
        while first < j - 1:
            over = held_rows > most[j - 1]
            for d in range(caps.shape[0]):
                over = over or held[d] > caps[d]
            if not over:
                break
            held_rows -= rows[first]
            for d in range(caps.shape[0]):
                held[d] -= extra[first, d]
            first += 1
        starts[j] = first
    return starts


@kernel
def fewest_cuts(starts: IntArray) -> int:
    """The fewest contiguous micro-batches, taken greedily from the widest end."""
    count = 0
    j = starts.shape[0] - 1
    while j > 0:
        j = starts[j]
        count += 1
    return count


@kernel
def turning_end(
    early: int,
    late: int,
    widths: IntArray,
    below: IntArray,
    expires: IntArray,
    value: IntArray,
    cuts: IntArray,
    sign: int,
) -> int:
    """The first end for which `late` is a better start of the last micro-batch than `early`.

    `late` stays better for all later ends: they are wider, so the rows between the two starts cost
    more in the last micro-batch, and from some end on, a start at `early` is infeasible.
    """
    worse = value[late] - value[early]
    between = below[late] - below[early]
    if sign * cuts[late] < sign * cuts[early]:
        width = -(-worse // between) - 1  # at equal cost, the later one wins too
    else:
        width = worse // between
    return min(int(expires[early]), int(np.searchsorted(widths, width, "right")) + 1)


@kernel
def priced_cuts(
    widths: IntArray, below: IntArray, starts: IntArray, expires: IntArray, price: int, sign: int
) -> tuple[IntArray, IntArray]:
    """(least slots plus prices up to each end, number of cuts).

    Among equal values, the one with the fewest cuts (sign 1) or the most (sign -1) is taken.
    `below[j]` counts the rows of the first j units. A queue holds starts, early to late, each with
    the first end for which it is best.
    """
    n = widths.shape[0]
    value = np.zeros(n + 1, np.int64)
    cuts = np.zeros(n + 1, np.int64)
    queue = np.empty(n + 1, np.int64)
    since = np.empty(n + 1, np.int64)
    front, back = 0, 0
    for j in range(1, n + 1):
        late, turn = j - 1, j
        while back > front:
            early = queue[back - 1]
            turn = max(j, turning_end(early, late, widths, below, expires, value, cuts, sign))
            if turn > since[back - 1]:
                break
            back -= 1
        if back == front:
            turn = j
        if turn <= n:
            queue[back], since[back] = late, turn
            back += 1
        while front + 1 < back and since[front + 1] <= j:
            front += 1
        best = queue[front]
        value[j] = value[best] + (below[j] - below[best]) * widths[j - 1] + price
        cuts[j] = cuts[best] + 1
    return value, cuts


@kernel
def optimal_cuts(widths: IntArray, rows: IntArray, starts: IntArray, count: int) -> IntArray:
    """The ends of exactly `count` micro-batches with the fewest slots; `count` must be feasible.

    With the costs of one row in place of `widths`, the total cost is least.

    widths [1, 1, 8], rows of one, count 2 -> ends [2, 3]: 1*2 + 8 slots
    """
    n = widths.shape[0]
    below = np.zeros(n + 1, np.int64)
    for j in range(n):
        below[j + 1] = below[j] + rows[j]
    expires = np.full(n + 1, n + 1, np.int64)  # the first end that each start cannot reach
    for j in range(n, 0, -1):
        for i in range(starts[j - 1], starts[j]):
            expires[i] = j
    # A higher price gives fewer cuts. Find a price that gives `count`, or else the lowest that
    # gives fewer. It is rarely more than the slots of one micro-batch, and never more than all rows
    # at full width.
    low, high = 0, below[n] * widths[n - 1]
    price = (below[n] - below[starts[n]]) * widths[n - 1]
    while low < high:
        _, fewest = priced_cuts(widths, below, starts, expires, price, 1)
        if fewest[n] == count:
            low = high = price
        elif fewest[n] < count:
            high = price
        else:
            low = price + 1
        price = (low + high) // 2
    value, fewest = priced_cuts(widths, below, starts, expires, low, 1)
    _, most = priced_cuts(widths, below, starts, expires, low, -1)
    ends = np.empty(count, np.int64)
    j = n
    for left in range(count, 0, -1):
        ends[left - 1] = j
        found = -1
        for i in range(starts[j], j):
            total = value[i] + (below[j] - below[i]) * widths[j - 1] + low
            if total == value[j] and fewest[i] <= left - 1 <= most[i]:
                found = i
                break
        j = found
    return ends


def whole_prices(price: FloatArray) -> IntArray:
    """Prices as integers in proportion, exact if they are integers already.

    >>> whole_prices(np.array([0.5, 1.0])).tolist()
    [8388608, 16777216]
    """
    if price[-1] < _EXACT and (price == np.floor(price)).all():
        return np.asarray(price, np.int64)
    return np.asarray(np.maximum(np.rint(price / price[-1] * _EXACT), 1), np.int64)


@kernel
def block_cost(units: Rows, start: int, end: int) -> float:
    """The cost of the units from `start` up to `end` in one micro-batch."""
    return float((units.below[end] - units.below[start]) * units.price[end - 1])


@kernel
def block_start(units: Rows, end: int, level: float) -> int:
    """Where a block that ends at `end` and costs at most `level` starts; `end` if none does."""
    rows = level / units.price[end - 1] * _ROUNDING
    if rows >= units.below[end]:
        return int(units.starts[end])
    least = units.below[end] - int(rows)
    if units.below[end] == end:  # one row per unit up to here
        return max(int(units.starts[end]), int(least))
    low, high = int(units.starts[end]), end
    while low < high:
        middle = (low + high) // 2
        if units.below[middle] >= least:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def blocks_at(units: Rows, start: int, end: int, level: float, most: int) -> IntArray:
    """The ends, ascending, of at most `most` blocks that cost at most `level`; empty if more."""
    ends = np.empty(most, np.int64)
    count = 0
    j = end
    while j > start and count < most:
        i = max(start, block_start(units, j, level))
        if i == j:
            break
        ends[count] = j
        count += 1
        j = i
    return ends[:count][::-1].copy() if j == start else ends[:0]


@kernel
def even_blocks(units: Rows, start: int, end: int, most: int, near: float = 1e-9) -> IntArray:
    """The ends of at most `most` blocks whose most expensive costs least; empty if they cannot fit.

    Exact up to a share `near` where every unit is one row and there are no further limits.
    """
    best = blocks_at(units, start, end, np.inf, most)
    if best.shape[0] == 0:
        return best
    total = 0.0
    for j in range(start, end):
        total += (units.below[j + 1] - units.below[j]) * units.price[j]
    low, high = total / most, most_expensive(units, start, best)
    while high - low > near * high:
        middle = (low + high) / 2
        found = blocks_at(units, start, end, middle, most)
        if found.shape[0]:
            best = found
            high = min(middle, most_expensive(units, start, found))
        else:
            low = middle
    return best


@kernel
def most_expensive(units: Rows, start: int, ends: IntArray) -> float:
    """The cost of the most expensive block."""
    most = 0.0
    for end in ends:
        most = max(most, block_cost(units, start, end))
        start = end
    return most


@kernel
def block_costs(units: Rows, ends: IntArray) -> FloatArray:
    """The cost of each block; the first starts at 0."""
    costs = np.empty(ends.shape[0])
    start = 0
    for b in range(ends.shape[0]):
        costs[b] = block_cost(units, start, ends[b])
        start = ends[b]
    return costs


@kernel
def capped_starts(units: Rows, level: float) -> IntArray:
    """For each end, where a block within the limits that costs at most `level` starts.

    A single unit always counts as fitting.
    """
    n = units.price.shape[0]
    starts = np.zeros(n + 1, np.int64)
    for j in range(1, n + 1):
        starts[j] = min(block_start(units, j, level), j - 1)
    return starts


@kernel
def even_waves(units: Rows, starts: IntArray, ranks: int) -> IntArray:
    """The ends of blocks where each wave is contiguous and cut as evenly as its ranks allow.

    `starts` is where each wave begins at first, and the number of units. Where one ends and the
    next begins shifts, by ever smaller steps, while that lowers the sum of their most expensive
    blocks. Empty if units do not fit so.
    """
    n, waves, bounds = units.price.shape[0], starts.shape[0] - 1, starts.copy()
    level = np.zeros(waves)
    for wave in range(waves):
        level[wave] = even_level(units, bounds[wave], bounds[wave + 1], ranks)
    step = max(n // (2 * waves), 1)
    while step > 0:
        lowered = False
        for at in range(1, waves):
            for shift in (-step, step):
                middle = bounds[at] + shift
                if not bounds[at - 1] <= middle <= bounds[at + 1]:
                    continue
                below = even_level(units, bounds[at - 1], middle, ranks)
                above = even_level(units, middle, bounds[at + 1], ranks)
                if below + above < (level[at - 1] + level[at]) * _LESS:
                    bounds[at], level[at - 1], level[at] = middle, below, above
                    lowered = True
        step = step if lowered else step // 2
    if level.max() == np.inf:
        return bounds[:0]
    found = np.empty(waves * ranks, np.int64)
    count = 0
    for wave in range(waves):
        if bounds[wave + 1] > bounds[wave]:
            for cut in even_blocks(units, bounds[wave], bounds[wave + 1], ranks):
                found[count] = cut
                count += 1
    return found[:count]


@kernel
def even_level(units: Rows, start: int, end: int, most: int) -> float:
    """The cost of the most expensive of `most` even blocks; infinite if units do not fit."""
    if start == end:
        return units.empty
    ends = even_blocks(units, start, end, most, 1e-3)
    return most_expensive(units, start, ends) if ends.shape[0] else np.inf


@kernel
def blocks_in_waves(
    units: Rows, levels: FloatArray, ranks: int, by_share: bool
) -> tuple[IntArray, int]:
    """(ends of blocks such that each wave of `ranks` blocks keeps its level, blocks tried).

    There are no ends if the levels are too low.

    Each block goes to the wave whose level it leaves the least of, or the least share of.

    rows of 8 and 5, 5, 1 x 8 with 2 ranks and levels 8, 5 -> 8 and 1 x 8; 5 and 5
    """
    waves = levels.shape[0]
    left = np.full(waves, ranks)
    ends = np.empty(waves * ranks, np.int64)
    count = 0
    j = units.price.shape[0]
    while j > 0:
        chosen, start, least = -1, 0, np.inf
        for wave in range(waves):
            if left[wave] == 0 or (
                wave > 0 and left[wave - 1] and levels[wave] == levels[wave - 1]
            ):
                continue
            i = block_start(units, j, levels[wave])
            if i == j:
                continue
            unused = levels[wave] - block_cost(units, i, j)
            unused /= levels[wave] if by_share else 1.0
            if unused < least:
                chosen, start, least = wave, i, unused
        if chosen < 0:
            return ends[:0], (count + 1) * waves
        left[chosen] -= 1
        ends[count] = j
        count += 1
        j = start
    return ends[:count][::-1].copy(), count * waves


@kernel
def levels_of(units: Rows, ends: IntArray, ranks: int, waves: int) -> FloatArray:
    """The cost of each wave where blocks of similar cost share one, most expensive first."""
    costs = np.full(waves * ranks, units.empty)
    for block, cost in enumerate(block_costs(units, ends)):
        costs[block] = cost
    return np.sort(costs)[::-1][::ranks].copy()


@kernel
def lower_levels(
    units: Rows, ends: IntArray, ranks: int, waves: int, work: int, by_share: bool
) -> IntArray:
    """The ends after levels are lowered, one by one and one at the expense of another.

    A level falls by a share; the other rises by as little as bisection finds. The change is kept if
    the sum of levels falls. Stops after about `work` blocks are tried.
    """
    levels = levels_of(units, ends, ranks, waves)
    time = levels.sum()
    for _ in range(_ROUNDS):
        before = time
        for share in _SHARES:
            for lower in range(waves):
                for higher in range(waves):
                    if work < 0:
                        return ends
                    gain = levels[lower] * share
                    trial = levels.copy()
                    trial[lower] -= gain
                    low, high = 0.0, gain * _LESS
                    if higher != lower:
                        trial[higher] += high
                    found, tried = blocks_in_waves(units, trial, ranks, by_share)
                    work -= tried
                    if found.shape[0] == 0:
                        continue
                    for _ in range(_TRIALS if higher != lower else 0):
                        middle = (low + high) / 2
                        trial[higher] = levels[higher] + middle
                        lower_ends, tried = blocks_in_waves(units, trial, ranks, by_share)
                        work -= tried
                        if lower_ends.shape[0]:
                            high, found = middle, lower_ends
                        else:
                            low = middle
                    reached = levels_of(units, found, ranks, waves)
                    if reached.sum() < time * _LESS:
                        time, levels, ends = reached.sum(), reached, found
        if time == before:
            break
    return ends


def lowered_cuts(
    units: Rows, ranks: int, waves: int, cheapest: IntArray
) -> Iterator[tuple[IntArray, IntArray]]:
    """(ends of the blocks, rank of each) of the two most even cuts, after shifts and swaps."""

    def slowest(ends: IntArray) -> float:
        rank_of = deal_blocks(units, ends, ranks, waves, "lpt")
        return float(np.bincount(rank_of, block_costs(units, ends), ranks).max())

    cuts = sorted([cheapest, *_capped(units, ranks * waves, cheapest)], key=slowest)
    for ends in cuts[:2]:
        rank_of = deal_blocks(units, ends, ranks, waves)
        yield slowest_lowered(units, ends, rank_of, ranks, waves, _WORK)


def _capped(units: Rows, blocks: int, cheapest: IntArray) -> list[IntArray]:
    """The ends of even blocks, and of the cheapest cuts with a capped most expensive block."""
    even = even_blocks(units, 0, len(units.price), blocks)
    low, high = most_expensive(units, 0, even), most_expensive(units, 0, cheapest)
    caps = np.geomspace(low, high, _CAPS + 1)[:-1] if high > low else np.array([low])
    count = len(cheapest)
    starts = [capped_starts(units, cap) for cap in caps]
    return [even, *(optimal_cuts(units.scaled, units.rows, each, count) for each in starts)]


def deal_blocks(
    units: Rows, ends: IntArray, ranks: int, waves: int, balance: str = "refined"
) -> IntArray:
    """The rank of each block; no rank has more than `waves`."""
    costs = np.full(ranks * waves, units.empty)
    costs[: len(ends)] = block_costs(units, ends)
    return partition(costs, ranks, balance, equal_sizes=True)[: len(ends)]


@kernel
def chain(
    units: Rows,
    ends: IntArray,
    costs: FloatArray,
    rank_of: IntArray,
    load: FloatArray,
    change: FloatArray,
    block: int,
    step: int,
    limit: float,
) -> tuple[float, int]:
    """(slowest rank it touches, the other block) of the best chain of shifted cuts.

    `block` gives a unit to a block on its narrow (step -1) or wide side (step 1). All cuts between
    the two shift by one unit, so that the blocks between keep their number of units. Only chains
    that end below `limit` are found; the block is -1 if there is none.
    """
    count = ends.shape[0]
    heavy = rank_of[block]
    start = ends[block - 1] if block > 0 else 0
    end = ends[block]
    best, found = limit, -1
    if end - start < 2:
        return best, found
    if step < 0:
        given = block_cost(units, start + 1, end)
    else:
        given = block_cost(units, start, end - 1)
    change[heavy] += given - costs[block]
    peak = 0.0
    other = block + step
    last = block
    while 0 <= other < count and abs(other - block) <= _FARTHEST:
        last = other
        r = rank_of[other]
        start = ends[other - 1] if other > 0 else 0
        end = ends[other]
        # The other block takes the unit and gives none on.
        first, final = (start, end + 1) if step < 0 else (start - 1, end)
        if units.starts[final] <= first:
            taken = block_cost(units, first, final) - costs[other]
            reached = max(peak, load[r] + change[r] + taken, load[heavy] + change[heavy])
            if r == heavy:
                reached = max(peak, load[r] + change[r] + taken)
            if reached < best:
                best, found = reached, other
        # It takes one and gives one on.
        first, final = (start + 1, end + 1) if step < 0 else (start - 1, end - 1)
        if units.starts[final] > first:
            break
        change[r] += block_cost(units, first, final) - costs[other]
        peak = max(peak, load[r] + change[r])
        if peak >= best:
            break
        other += step
    change[heavy] = 0.0
    for other in range(min(block, last), max(block, last) + 1):
        change[rank_of[other]] = 0.0
    return best, found


@kernel
def best_merge(
    units: Rows,
    ends: IntArray,
    costs: FloatArray,
    rank_of: IntArray,
    load: FloatArray,
    block: int,
    limit: float,
) -> tuple[float, int]:
    """(slower of the two ranks, the neighbour) if `block` joins a neighbour on another rank."""
    heavy = rank_of[block]
    best, found = limit, -1
    for other in (block - 1, block + 1):
        if not 0 <= other < ends.shape[0] or rank_of[other] == heavy:
            continue
        low, high = min(block, other), max(block, other)
        start = ends[low - 1] if low > 0 else 0
        if units.starts[ends[high]] > start:
            continue
        joined = block_cost(units, start, ends[high]) - units.empty
        r = rank_of[other]
        reached = max(load[heavy] - costs[block], load[r] - costs[other] + joined)
        if reached < best:
            best, found = reached, other
    return best, found


@kernel
def slowest_lowered(
    units: Rows, ends: IntArray, rank_of: IntArray, ranks: int, waves: int, work: int
) -> tuple[IntArray, IntArray]:
    """(ends, rank of each block) after moves that lower the slowest rank.

    A rank runs at most `waves` blocks. Stops after about `work` blocks are looked at.
    """
    ends, rank_of = ends.copy(), rank_of.copy()
    load = np.zeros(ranks)
    held = np.zeros(ranks, np.int64)
    change = np.zeros(ranks)
    while True:
        count = ends.shape[0]
        costs = block_costs(units, ends) - units.empty
        load[:] = 0.0
        held[:] = 0
        for b in range(count):
            load[rank_of[b]] += costs[b]
            held[rank_of[b]] += 1
        heavy, spare = 0, -1
        for r in range(ranks):
            heavy = r if load[r] > load[heavy] else heavy
            if held[r] < waves and (spare < 0 or load[r] < load[spare]):
                spare = r
        if work <= 0:
            break
        best = load[heavy] * _LESS
        block, other, kind = -1, -1, _SWAP
        for b in range(count):
            if rank_of[b] != heavy or work <= 0:
                continue
            for step in (_NARROWER, _WIDER):
                reached, c = chain(units, ends, costs, rank_of, load, change, b, step, best)
                if c >= 0:
                    best, block, other, kind = reached, b, c, step
            for c in range(count):
                r = rank_of[c]
                reached = max(load[heavy] - costs[b] + costs[c], load[r] + costs[b] - costs[c])
                if r != heavy and reached < best:
                    best, block, other, kind = reached, b, c, _SWAP
            reached, c = best_merge(units, ends, costs, rank_of, load, b, best)
            if c >= 0:
                best, block, other, kind = reached, b, c, _MERGE
            if spare >= 0 and spare != heavy:
                reached = max(load[heavy] - costs[b], load[spare] + costs[b])
                if reached < best:
                    best, block, kind = reached, b, _MOVE
            work -= 3 * _FARTHEST + count
        work -= count + ranks
        if block < 0:
            break
        if kind == _MOVE:
            rank_of[block] = spare
        elif kind == _SWAP:
            rank_of[block], rank_of[other] = rank_of[other], heavy
        elif kind == _MERGE:
            low = min(block, other)
            kept = rank_of[other]
            ends = np.concatenate((ends[:low], ends[low + 1 :]))
            rank_of = np.concatenate((rank_of[:low], rank_of[low + 1 :]))
            rank_of[low] = kept
        else:
            for b in range(min(block, other), max(block, other)):
                ends[b] -= kind
    return ends, rank_of
