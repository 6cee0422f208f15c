"""The cut of sorted units with the least modelled time, and how many micro-batches it has.

Several cuts are made for each number of micro-batches per rank, and the fastest is kept: waves or
ranks of even cost, the cut with the fewest slots, the cut that all ranks share (`greedy`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.planning.balance.deal import deal_packs
from evenstep.planning.batching.blocks import (
    SortedUnits,
    block_costs,
    capped_starts,
    cheapest_cuts,
    dearest,
    step_time,
)
from evenstep.planning.batching.cuts import optimal_cuts
from evenstep.planning.batching.levels import levels_of, lower_levels
from evenstep.planning.batching.lock_step import wave_cuts
from evenstep.planning.batching.rank_sums import rank_sum_cuts
from evenstep.planning.counts import first_worth

_WORK = 200_000  # blocks tried while levels are lowered
_SAME = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Sorted units divided between micro-batches: `address` is `wave * ranks + rank` of each.

    `time` is the modelled time of the step, `total` the cost of all its micro-batches.
    """

    address: IntArray
    waves: int
    time: float
    total: float

    def better(self, other: Division) -> bool:
        """Whether it is faster, or as fast and cheaper in total."""
        if abs(self.time - other.time) <= _SAME * other.time:
            return self.total < other.total
        return self.time < other.time


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Divider:
    """Divides the sorted units of one step between the micro-batches of all ranks.

    static         every micro-batch has one shape, so that only their number counts
    fewest         waves that contiguous cuts need
    fewest_shared  waves that the cut that all ranks share needs
    greedy(waves)  the address of each unit in that cut; None for one rank of several
    """

    units: SortedUnits
    ranks: int
    lock_step: bool
    per_micro_batch: float
    static: bool
    fewest: int
    fewest_shared: int
    greedy: Callable[[int], IntArray | None]
    _cheapest: dict[int, IntArray] = field(default_factory=dict)

    def fastest(self, counts: list[int], saving: float) -> Division:
        """The best division with any of these numbers of micro-batches per rank, ascending.

        Others than the first are taken only if they save the share `saving`.
        """
        cuts = self._wave_cuts(counts)
        found = [self.at(counts[0], cuts[0])]
        for count, waves in zip(counts[1:], cuts[1:], strict=True):
            if self.floor(count) < min(each.time for each in found) * (1 - saving):
                found.append(self.at(count, waves))
        return found[first_worth([each.time for each in found], saving)]

    def no_slower_than_greedy(self, best: Division, most: int | None) -> Division:
        """`best`, or the best division with the waves of the greedy cut if that is faster.

        It has at most `most` waves.
        """
        address = self.greedy(self.fewest_shared)
        if address is None or (most is not None and self.fewest_shared > most):
            return best
        greedy = self.division(address, self.fewest_shared)
        if greedy.time >= best.time:
            return best
        return self.at(greedy.waves) if greedy.waves >= self.fewest else greedy

    def at(self, count: int, waves: IntArray | None = None) -> Division:
        """The best division with `count` micro-batches per rank.

        `waves` are the ends of blocks in even waves, if they are known.
        """
        if waves is None:
            waves = self._wave_cuts([count])[0]
        best = None
        for address in self._addresses(count, waves):
            found = self.division(address, count)
            if best is None or found.better(best):
                best = found
        assert best is not None
        return best

    def division(self, address: IntArray, count: int) -> Division:
        """These addresses with their time."""
        time, total = step_time(self.units, address, self.ranks, count, self.lock_step)
        each = self.per_micro_batch
        if self.static:
            return Division(address, count, float(count), time)  # of equals, the most even
        return Division(address, count, time + count * each, total + count * self.ranks * each)

    def cheapest(self, count: int) -> IntArray:
        """The ends of the blocks that cost least in total, with `count` per rank."""
        if count not in self._cheapest:
            blocks = min(count * self.ranks, len(self.units.price))
            self._cheapest[count] = cheapest_cuts(self.units, self.units.starts, blocks)
        return self._cheapest[count]

    def floor(self, count: int) -> float:
        """No contiguous cut into `count` micro-batches per rank is faster."""
        units = self.units
        costs = block_costs(units, self.cheapest(count))
        empty = (count * self.ranks - len(costs)) * units.empty
        mean = (float(costs.sum()) + empty) / self.ranks
        largest = float((units.rows * units.price).max()) + (count - 1) * units.empty
        return max(mean, largest) + count * self.per_micro_batch

    def _wave_cuts(self, counts: list[int]) -> list[IntArray]:
        """For each count, the ends of blocks in even waves; no more waves than units."""
        n = len(self.units.price)
        if self.ranks == 1:
            return [np.empty(0, np.int64) for _ in counts]
        first, last = min(counts[0], n), min(counts[-1], n)
        found = wave_cuts(self.units, self.ranks, first, last)
        return [found[min(count, n) - first] for count in counts]

    def _addresses(self, count: int, waves: IntArray) -> Iterable[IntArray]:
        """The addresses to compare."""
        units, ranks = self.units, self.ranks
        cheapest = self.cheapest(count)
        if ranks == 1:
            yield self._by_rank(cheapest, np.zeros(len(cheapest), np.int64), count)
        else:
            # The fewest slots; they are the cheapest where cost is per token.
            fewest = cheapest
            if not np.array_equal(units.scaled, units.width):
                fewest = optimal_cuts(units.width, units.rows, units.starts, len(cheapest))
            cuts = [fewest, cheapest, *([waves] if len(waves) else [])]
            yield from self._waves(count, cuts) if self.lock_step else self._sums(count, cuts)
        shared = self.greedy(count) if count >= self.fewest_shared else None
        if shared is not None:
            yield shared

    def _waves(self, count: int, cuts: list[IntArray]) -> Iterable[IntArray]:
        """The addresses of the fastest of these cuts, before and after lowering its levels."""
        units, ranks = self.units, self.ranks
        ends = min(cuts, key=lambda cut: float(levels_of(units, cut, ranks, count).sum()))
        yield self._by_wave(ends, count)
        for relative in (True, False):
            ends = lower_levels(units, ends, ranks, count, relative, _WORK)
        if count == 1:  # cheaper blocks, as fast as the dearest
            cap = dearest(units, 0, ends)
            ends = cheapest_cuts(units, capped_starts(units, cap), len(cuts[1]))
        yield self._by_wave(ends, count)

    def _sums(self, count: int, cuts: list[IntArray]) -> Iterable[IntArray]:
        """The addresses of cuts whose slowest rank is lowered."""
        for ends, rank_of in rank_sum_cuts(self.units, self.ranks, count, cuts):
            yield self._by_rank(ends, rank_of, count)

    def _by_wave(self, ends: IntArray, count: int) -> IntArray:
        """The address of each unit where blocks of similar cost share a wave."""
        costs = np.full(count * self.ranks, self.units.empty)
        costs[: len(ends)] = block_costs(self.units, ends)
        address = deal_packs(costs, self.ranks, "refined", "micro_batch")
        return np.repeat(address[: len(ends)], np.diff(ends, prepend=0))

    def _by_rank(self, ends: IntArray, rank_of: IntArray, count: int) -> IntArray:
        """The address of each unit where every rank runs its blocks dearest first."""
        order = np.lexsort((-block_costs(self.units, ends), rank_of))
        held = np.bincount(rank_of, minlength=self.ranks)
        turn = np.arange(len(ends)) - np.repeat(np.cumsum(held) - held, held)
        address = np.empty(len(ends), np.int64)
        address[order] = turn * self.ranks + rank_of[order]
        return np.repeat(address, np.diff(ends, prepend=0))
