"""Shared sequences: steps in which several ranks of a wave compute one long sequence together.

    lengths 9 2 2 1 on 3 ranks   ->   0-5 | 5-8 1 | 8-9 2 2      parts of the first on each rank

Where a sequence costs more than a rank's fair share, whole sequences cannot be even. A few waves
hold the longest ones and divide them; the rest is planned unshared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, pairwise, product
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from evenstep.core.prefixes import Prefixes
from evenstep.core.ragged import (
    ELSEWHERE,
    FloatArray,
    IntArray,
    Segments,
    divided_up,
    offsets_of,
)
from evenstep.core.recipe import Recipe
from evenstep.errors import PlanError
from evenstep.planning.kernels import kernel, rise, sink
from evenstep.planning.step import DecidedStep, decide_step
from evenstep.planning.trees import share_prefixes, time_of
from evenstep.planning.units import Units

_LEVEL = 1.0003  # loads over their mean that are level
_OVER = 1.02  # loads over the level that a part is divided to avoid
_WORTH = 0.1  # of the level is worth a part
_LOOK = 8  # ranks that are asked for room
_CLOSE = 1.0005  # times over another that are as good


@kernel
def share_wave(
    size: IntArray,
    cost: FloatArray,
    extra: FloatArray,
    caps: FloatArray,
    capacity: int,
    ranks: int,
    most_parts: int,
    most_received: int,
    unit: int,
    per_token: float,
    per_pair: float,
    per_segment: float,
    per_moved: float,
) -> tuple[float, IntArray]:
    """(the load of the slowest rank, the parts) of a wave with these units, dearest first.

    Parts are columns: unit, start, end, rank. The load is infinite and there are no parts if units
    do not fit.
    """
    n, limits = size.shape[0], caps.shape[0]
    most = n + 6 * ranks + 8
    columns = np.empty((6, most), np.int64)
    unit_of, start, end, rank_of = columns[0], columns[1], columns[2], columns[3]
    later, after = columns[4], columns[5]  # parts it is sent to, the next part on the same rank
    first = np.empty(ranks, np.int64)
    used, sent, received = np.empty(ranks, np.int64), np.empty(ranks), np.empty(ranks)
    work, load, held = np.empty(ranks), np.empty(ranks), np.empty((ranks, limits))
    parts_of, cuts = np.empty(n, np.int64), np.empty(ranks + 1, np.int64)
    heap, aside = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    items, item_cost = np.empty(n, np.int64), np.empty(n)
    count = np.zeros(1, np.int64)

    def price(s: int, e: int) -> float:
        """What tokens s to e of a unit cost behind those before them."""
        return (e - s) * (per_token + per_pair * (e + s)) + per_segment

    def boundary(e: int, behind: int, load: float) -> int:
        """Where a part begins that ends at e, is sent to `behind` parts, and loads its rank so."""
        value = per_token * e + per_pair * e * e + per_segment - load
        latest = 0.0
        for slope, level in (
            (per_token - per_moved, value),
            (per_token + per_moved * behind, value + per_moved * behind * e),
        ):
            root = slope * slope + 4 * per_pair * level
            if level > 0 and root > 0 and slope + np.sqrt(root) > 0:
                latest = max(latest, 2 * level / (slope + np.sqrt(root)))
        return int(min(np.round(latest / unit) * unit, float(e)))

    def round_up(x: int) -> int:
        return (x + unit - 1) // unit * unit

    def measure(r: int) -> None:
        load[r] = work[r] + per_moved * max(sent[r], received[r])

    def fits(u: int, s: int, e: int, r: int) -> bool:
        """Whether rank r has room for tokens s to e of a unit."""
        if used[r] + e - s > capacity or received[r] + s > most_received:
            return False
        for d in range(limits):
            if held[r, d] + extra[u, d] > caps[d]:
                return False
        return True

    def can_swap(a: int, b: int, p: int, q: int) -> bool:
        """Whether unit a of rank p and unit b of rank q have room in each other's place."""
        more = size[a] - size[b]
        if used[q] + more > capacity or used[p] - more > capacity:
            return False
        for d in range(limits):
            more = extra[a, d] - extra[b, d]
            if held[q, d] + more > caps[d] or held[p, d] - more > caps[d]:
                return False
        return True

    def put(at: int, r: int) -> None:
        """Put part `at` on rank r."""
        u, s, e = unit_of[at], start[at], end[at]
        rank_of[at], after[at], first[r] = r, first[r], at
        used[r] += e - s
        work[r] += cost[u] if s == 0 and e == size[u] else price(s, e)
        received[r] += s
        sent[r] += (e - s) * later[at]
        for d in range(limits):
            held[r, d] += extra[u, d]
        measure(r)

    def take(at: int) -> None:
        """Take part `at` from its rank."""
        r, u, s, e = rank_of[at], unit_of[at], start[at], end[at]
        if first[r] == at:
            first[r] = after[at]
        else:
            before = first[r]
            while after[before] != at:
                before = after[before]
            after[before] = after[at]
        used[r] -= e - s
        work[r] -= cost[u] if s == 0 and e == size[u] else price(s, e)
        received[r] -= s
        sent[r] -= (e - s) * later[at]
        for d in range(limits):
            held[r, d] -= extra[u, d]
        measure(r)

    def add(u: int, s: int, e: int, behind: int) -> int:
        """A new part, which is sent to `behind` others."""
        at = count[0]
        unit_of[at], start[at], end[at], later[at] = u, s, e, behind
        count[0] += 1
        return int(at)

    def has_part(u: int, r: int) -> bool:
        at = first[r]
        while at >= 0:
            if unit_of[at] == u:
                return True
            at = after[at]
        return False

    def cut(at: int, x: int, r: int) -> None:
        """Divide part `at` at token x; its end goes to rank r."""
        old, e = rank_of[at], end[at]
        take(at)
        new = add(unit_of[at], x, e, later[at])
        end[at] = x
        later[at] += 1
        parts_of[unit_of[at]] += 1
        put(at, old)
        put(new, r)

    def split(u: int, level: float, free: int) -> int:
        """How many parts are peeled from the end of unit u; -1 if it cannot be divided so.

        They start at `cuts`. With too few parts, each has more than the level.
        """
        if size[u] <= capacity and cost[u] <= level * _LEVEL:
            return 0
        while True:
            e, parts = size[u], 0
            while e > capacity or price(0, e) + per_moved * e * parts > level * _LEVEL:
                s = max(boundary(e, parts, level), round_up(e - capacity))
                s = min(s, most_received // unit * unit, (e - 1) // unit * unit)
                if s <= 0:
                    return parts
                if parts + 2 > most_parts or parts >= free or e - s > capacity:
                    parts = -1
                    break
                cuts[parts] = s
                parts, e = parts + 1, s
            if parts >= 0 or level == np.inf:
                return parts
            level = level * 1.03 if level < 2 * cost[u] else np.inf  # by the capacity alone

    level, best, chosen = cost.sum() / ranks, np.inf, np.empty((4, 0), np.int64)
    for _ in range(3):
        count[0] = 0
        parts_of[:] = 1
        first[:], used[:], work[:], sent[:], received[:], load[:] = -1, 0, 0.0, 0.0, 0.0, 0.0
        held[:] = 0.0
        feasible, taken, num_items = True, 0, 0
        # Peel parts from the end of units above the level, each for a rank of its own.
        for u in range(n):
            parts = split(u, level, ranks - taken)
            feasible = feasible and parts >= 0
            if parts <= 0:
                continue
            parts_of[u], e = parts + 1, size[u]
            for k in range(parts):
                put(add(u, cuts[k], e, k), taken)
                taken, e = taken + 1, cuts[k]
            items[num_items] = add(u, 0, e, parts)
            item_cost[num_items] = price(0, e) + per_moved * e * parts
            num_items += 1
        if not feasible:
            level *= 1.05
            continue
        # What is left and whole units, dearest first, each on the least loaded rank with room.
        by_cost = np.argsort(-item_cost[:num_items])
        ready = ranks
        for r in range(ranks):
            heap[r] = r
        for node in range(ranks // 2, -1, -1):
            sink(heap, ready, load, node, True)
        next_item, u = 0, 0
        while next_item < num_items or u < n:
            while u < n and parts_of[u] > 1:
                u += 1
            if next_item < num_items and (u >= n or item_cost[by_cost[next_item]] >= cost[u]):
                at = items[by_cost[next_item]]
                next_item += 1
            elif u < n:
                at = add(u, 0, size[u], 0)
                u += 1
            else:
                break
            v, s, e, looked, target = unit_of[at], start[at], end[at], 0, -1
            while ready > 0:
                r = heap[0]
                if fits(v, s, e, r) and not (parts_of[v] > 1 and has_part(v, r)):
                    target = r
                    break
                ready -= 1
                heap[0] = heap[ready]
                sink(heap, ready, load, 0, True)
                aside[looked] = r
                looked += 1
            # Divide what fits nowhere, or only where it exceeds the level, over the room of less
            # loaded ranks, from the end: first up to the level, then anywhere.
            over = target < 0 or (looked > 0 and load[target] + price(s, e) > level * _OVER)
            if over and s == 0 and parts_of[v] == 2 and later[at] == 1:
                # Its last part takes fewer slots: the rank of that one takes a longer head.
                last, p = at - 1, rank_of[at - 1]
                value = level - per_segment
                slope = per_token + per_moved
                x = int(2 * value / (slope + np.sqrt(slope * slope + 4 * per_pair * value)))
                x = min(x // unit * unit, capacity // unit * unit)
                for k in range(looked if e < x < end[last] and used[p] == end[last] - e else 0):
                    r = aside[k]
                    heavier = load[r] + price(x, end[last]) + per_moved * x
                    if heavier <= level * _OVER and fits(v, x, end[last], r):
                        take(last)
                        end[at], start[last] = x, x
                        put(at, p)
                        put(last, r)
                        s = x
                        break
            for k in range(2 * looked if over else 0):
                if s == end[at] or (k == looked and target >= 0):
                    break
                r, x = aside[k % looked], s
                if has_part(v, r) or count[0] == most:
                    continue
                if k < looked:
                    if level - load[r] < _WORTH * level:
                        continue
                    x = max(x, boundary(end[at], later[at], level - load[r]))
                x = max(x, round_up(end[at] - (capacity - used[r])))
                if x >= end[at] or (x > s and parts_of[v] >= most_parts):
                    continue
                if not fits(v, x, end[at], r):
                    continue
                if x > s:
                    put(add(v, x, end[at], later[at]), r)
                    end[at] = x
                    later[at] += 1
                    parts_of[v] += 1
                else:
                    put(at, r)
                    s = end[at]
            if s < end[at] and target >= 0:
                put(at, target)
                sink(heap, ready, load, 0, True)
            elif s < end[at]:
                feasible = False
            for k in range(looked):
                heap[ready] = aside[k]
                ready += 1
                rise(heap, ready, load, True)
            if not feasible:
                break
        if not feasible:
            level *= 1.05
            continue
        # Level: from the most to the least loaded rank.
        slowest = np.inf
        for _ in range(3):
            mean = load.sum() / ranks
            if load.max() <= mean * _LEVEL or load.max() >= slowest:
                break
            slowest = load.max()
            order = np.argsort(-load)
            heavy, light, steps = 0, ranks - 1, 0
            while heavy < light and steps < 4 * ranks and count[0] < most:
                steps += 1
                p = order[heavy]
                excess = load[p] - mean
                if excess <= mean * (_LEVEL - 1):
                    heavy += 1
                    continue
                done = False
                for look in range(min(_LOOK, light - heavy)):
                    q = order[light - look]
                    if mean - load[q] <= mean * (_LEVEL - 1) / 4:
                        break
                    # Exchange whole units, of which none may be one, by about what helps both.
                    high = min(excess, mean - load[q]) + mean * (_LEVEL - 1)
                    low, give, get, least = high * 0.5, -1, -1, np.inf
                    at = first[p]
                    while at >= 0:
                        a = unit_of[at]
                        if later[at] == 0 and start[at] == 0:
                            if low <= cost[a] <= high and fits(a, 0, size[a], q):
                                gap = high - cost[a]
                                if gap < least:
                                    give, get, least = at, -1, gap
                            other = first[q] if cost[a] > low else -1
                            while other >= 0:
                                b = unit_of[other]
                                change = cost[a] - cost[b]
                                if (
                                    low <= change <= high
                                    and high - change < least
                                    and later[other] == 0
                                    and start[other] == 0
                                    and can_swap(a, b, p, q)
                                ):
                                    give, get, least = at, other, high - change
                                other = after[other]
                        at = after[at]
                    if give >= 0:
                        take(give)
                        if get >= 0:
                            take(get)
                            put(get, p)
                        put(give, q)
                        done = True
                        break
                for look in range(0 if done else min(_LOOK, light - heavy)):
                    # Else cut the shortest unit or head that costs more than the amount.
                    q = order[light - look]
                    amount = min(excess, mean - load[q])
                    if amount <= mean * (_LEVEL - 1) / 4:
                        break
                    at, divide, shortest = first[p], -1, np.inf
                    while at >= 0:
                        v, s, e = unit_of[at], start[at], end[at]
                        if (
                            s == 0
                            and e < shortest
                            and price(s, e) > amount
                            and parts_of[v] < most_parts
                            and not has_part(v, q)
                        ):
                            divide, shortest = at, e
                        at = after[at]
                    if divide < 0:
                        continue
                    v, s, e = unit_of[divide], start[divide], end[divide]
                    x = max(boundary(e, later[divide], amount), s)
                    x = max(x, e - (capacity - used[q]) // unit * unit)
                    if s < x < e and price(x, e) > per_moved * x and fits(v, x, e, q):
                        cut(divide, x, q)
                        done = True
                        break
                if done and load[q] >= mean * (2 - _LEVEL):
                    order[light - look] = order[light]
                    light -= 1
                if not done:
                    heavy += 1
        slowest = load.max()
        gains = slowest < best / _CLOSE
        if slowest < best:
            best = slowest
            chosen = columns[:4, : count[0]].copy()
        mean = load.sum() / ranks
        if slowest <= mean * _CLOSE or not gains:
            break
        level = mean
    return best, chosen


_EVEN = 1.002  # times over the ideal from which nothing is shared
_WAVES = 6  # waves that share, at most
_FILLS = (0.6, 0.7, 0.78, 0.85, 0.9, 0.95, 0.98, 0.99)  # of the waves that do not
_TIGHT = 0.8  # of the slots of a wave that shares: more are hard to divide evenly
_SHORT = 0.1  # of the work of a wave that shares is that of the shortest units
_UNEVEN = 0.005  # of its dearest unit is about what a wave that does not share waits
_SCORED, _PLANNED = 16, 2  # candidates
_POOR = 1.02  # times over the estimate of others from which these are scored as well
_MORE = 6  # numbers of waves that are tried where a step has to share


class _Candidate(NamedTuple):
    """The first `units` in `shared` of `waves` waves, which end at `ends`, with the units from
    `last` on, which take turns.

    `time` is what it takes at least, with what ranks are likely to wait; `rest` is that of the
    waves that do not share.
    """

    time: float
    rest: float
    shared: int
    waves: int
    units: int
    last: int
    ends: list[int]


class _Sharing:
    """The units of one step, the dearest first, and its candidates."""

    def __init__(
        self, segments: Segments, units: Units, recipe: Recipe, prefixes: Prefixes | None
    ) -> None:
        sharing, capacity = recipe.sharing, recipe.capacity
        self.plain, self.prefixes = replace(recipe, sharing=None), prefixes
        assert sharing is not None
        assert capacity is not None
        self.segments, self.recipe, self.original = segments, recipe, units
        self.ranks, self.capacity = recipe.topology.dp, capacity
        over = units.size > capacity
        self.order = np.lexsort((-units.cost, ~over))
        self.units = units.reordered(self.order)
        self.must = int(over.sum())  # units that only several ranks hold
        longest = int(units.size.max(initial=1))
        self.received = sharing.max_received or max(capacity, longest)
        self.parts = sharing.most_ranks or self.ranks
        size, cost = units.size, units.cost
        if prefixes is not None:  # computed once by what ranks do not share
            order, forks = prefixes.forks(segments, np.zeros_like(size))
            behind = np.empty_like(forks)
            behind[order] = forks
            size = segments.length - behind
            cost = recipe.cost.of_lengths(size, behind)
        # Sums over the dearest units, where ranks share them and where they do not.
        self.slots, self.rest_slots = offsets_of(self.units.size), offsets_of(size[self.order])
        self.work, self.rest_work = (
            np.append(0.0, each[self.order].cumsum()) for each in (units.cost, cost)
        )
        self.ideal = float(self.rest_work[-1]) / self.ranks

    def candidates(self, fewest: int) -> Iterator[_Candidate]:
        """Candidates with `fewest` waves or one more, the most promising first: by time if all
        waves that share exchange, and by time if some of them need no exchange, in turn.

        Time is the ideal, what exchanges and micro-batches cost, and waiting.
        """
        cost, ranks, slots, work = self.recipe.cost, self.ranks, self.slots, self.work
        per_wave = self.capacity * ranks
        least = max(divided_up(int(slots[self.must]), per_wave), 1)
        # Short units even out a wave that shares without further parts.
        tails = (0.0, _SHORT) if self.prefixes is None else (0.0,)
        grid = product((fewest, fewest + 1), range(least, least + _WAVES), tails, _FILLS)
        columns = np.array([*grid])
        # Each is [candidate], as what follows.
        waves, shared, tail, fill = columns[columns[:, 1] <= columns[:, 0]].T
        last = np.searchsorted(work, work[-1] * (1 - tail * (shared < waves) * shared / waves))
        room = np.floor(fill * per_wave * (waves - shared))
        count = np.searchsorted(self.rest_slots, self.rest_slots[last] - room)
        count = count.clip(max(self.must, 1))
        used = slots[count] + slots[-1] - slots[last]
        fits = (count <= last) & (used <= per_wave * shared)
        columns = np.stack([shared, waves, count, last])[:, fits].astype(np.int64)
        shared, waves, count, last = np.unique(columns, axis=1)
        # Full waves with a long unit on every rank, then equally many slots in each.
        large = offsets_of((self.units.size > self.capacity // 2).astype(np.int64))
        full = np.minimum(large[count] // ranks, shared - 1)
        first, rest = slots[ranks * full], waves - shared
        used = slots[count] - first + slots[-1] - slots[last]
        wave = np.arange(shared.max(initial=0) + 1)  # [candidate, wave] below
        part = (wave - full[:, np.newaxis]).clip(0) / (shared - full)[:, np.newaxis]
        slots_shared = first[:, np.newaxis] + (slots[count] - first)[:, np.newaxis] * part
        ends = np.searchsorted(slots, slots_shared).clip(max=count[:, np.newaxis])
        ends = np.where(wave < full[:, np.newaxis], ranks * wave, ends)
        # Waves that short units make even without dividing others.
        short = (work[-1] - work[last]) / shared
        level = (np.diff(work[ends]) + short[:, np.newaxis]) / ranks
        dearest = np.append(self.units.cost, 0.0)
        whole = (wave[:-1] < shared[:, np.newaxis]) & (dearest[ends[:, :-1]] <= level * _LEVEL)
        even = whole.sum(axis=1) * (count < last)
        # Waves with few slots to spare cannot be even, nor can large units of the rest.
        waits = self.waiting(count, rest)
        waits += np.where(count < last, _UNEVEN * dearest[count] * rest, 0)
        alone = (self.rest_work[last] - self.rest_work[count]) / ranks + waits
        alone += rest * cost.per_micro_batch
        time = alone + work[count] / ranks + short * shared / ranks
        time += shared * (cost.exchange + cost.per_micro_batch)
        tight = np.maximum(used / (shared - full) / per_wave - _TIGHT, 0)
        time += tight * self.ideal / waves
        lucky = time - even * cost.exchange / 2  # about half of them do
        orders = (np.argsort(each, kind="stable").tolist() for each in (time, lucky))
        for k in dict.fromkeys(chain.from_iterable(zip(*orders, strict=True))):
            yield _Candidate(
                time=float(lucky[k]),
                rest=float(alone[k]),
                shared=int(shared[k]),
                waves=int(waves[k]),
                units=int(count[k]),
                last=int(last[k]),
                ends=ends[k, 1 : shared[k] + 1].tolist(),
            )

    def waiting(self, count: IntArray, waves: IntArray) -> FloatArray:
        """Lower bounds on what ranks wait in so many waves with the units from `count` on.

        The k waves with the dearest units hold at most their slots, so that they do at most the
        work of the dearest tokens, and a unit that these slots cannot hold is in another wave.
        """
        cost, slots, work = np.append(self.units.cost, 0.0), self.rest_slots, self.rest_work
        n = len(self.units)
        if self.recipe.sync_every == "step":
            waits = np.where(waves > 0, cost[count] - (work[-1] - work[count]) / self.ranks, 0.0)
            return np.maximum(waits, 0.0)
        wave = np.arange(min(int(waves.max(initial=0)), 8) + 1)  # [candidate, wave] below
        ends = slots[count][:, np.newaxis] + wave * (self.capacity * self.ranks)
        first = np.searchsorted(slots, ends, "right") - 1
        first[:, -1] = n
        first = np.where(wave < waves[:, np.newaxis], first, n)
        done = work[np.minimum(first[:, 1:] + 1, n)] - work[count][:, np.newaxis]
        waits = np.cumsum(cost[first[:, :-1]], axis=1) - done / self.ranks
        bounds: FloatArray = waits.max(axis=1, initial=0.0)
        return bounds

    def share(self, candidate: _Candidate) -> tuple[float, list[IntArray]]:
        """(the time of the waves that share, their parts)."""
        cost, units = self.recipe.cost, self.units
        time, waves = 0.0, []
        for wave, (first, end) in enumerate(pairwise((0, *candidate.ends))):
            short = np.arange(candidate.last + wave, len(units), candidate.shared)
            each = np.append(np.arange(first, end), short)
            slowest, parts = share_wave(
                units.size[each],
                units.cost[each],
                units.extra[each],
                units.caps,
                self.capacity,
                self.ranks,
                self.parts,
                self.received,
                self.recipe.topology.alignment,
                cost.per_token,
                cost.per_pair,
                cost.per_segment,
                cost.moved,
            )
            exchange = cost.exchange if parts[1].any() else 0.0
            time += slowest + exchange + cost.per_micro_batch
            parts[0] = each[parts[0]]
            waves.append(parts)
        return time, waves

    def rest(self, candidate: _Candidate, waves: int | None) -> DecidedStep:
        """The units that are not in waves that share, in so many waves. Raises if none fit."""
        unit = self.units.of_segment
        chosen = np.flatnonzero((unit >= candidate.units) & (unit < candidate.last))
        if waves == 0 or not len(chosen):
            return _NOTHING
        units = self.original.of_segments(chosen)
        return self.unshared(self.segments.take(chosen), units, waves)

    def unshared(self, segments: Segments, units: Units, waves: int | None) -> DecidedStep:
        """The step of these units without sharing between ranks, in so many waves."""
        if self.prefixes is None:
            return decide_step(segments, units, self.plain, waves)
        return share_prefixes(segments, units, self.plain, waves, self.prefixes)

    def step(self, waves: int, shared: list[IntArray], rest: DecidedStep) -> DecidedStep:
        """The step whose first waves share, with the rest after them."""
        columns = []
        for wave, parts in enumerate(shared):
            unit, start, end, rank = parts
            segment = self.order[unit]
            length = np.minimum(end, self.segments.length[segment]) - start
            parent = np.where(start > 0, ELSEWHERE, -1)
            columns.append(
                (self.segments.sample[segment], start, length, parent, rank * waves + wave)
            )
        if len(rest.segments):
            micro = rest.micro // rest.per_rank * waves + len(shared) + rest.micro % rest.per_rank
            whole = rest.segments
            parent = np.full(len(micro), -1) if whole.parent is None else whole.parent
            columns.append((whole.sample, whole.start, whole.length, parent, micro))
        joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
        row = np.zeros(len(joined[4]), np.int64)
        return DecidedStep(Segments(*joined[:4]), joined[4], row, waves, None)

    def search(self, fewest: int, time: float) -> DecidedStep | None:
        """The fastest step that shares; None if none takes less than `time`."""
        best: DecidedStep | None = None
        scored, least = [], time
        # Score candidates by their waves that share and by what the others take at least.
        for number, candidate in enumerate(self.candidates(fewest)):
            if number >= _SCORED and least < candidate.time * _POOR:
                break
            if candidate.time * _CLOSE >= least:
                continue
            shared_time, waves = self.share(candidate)
            score = candidate.rest + shared_time
            if score < time:
                scored.append((score, candidate, shared_time, waves))
            least = min(least, score)
        # Plan the others of the best.
        for score, candidate, shared_time, waves in sorted(scored, key=itemgetter(0))[:_PLANNED]:
            if score * _CLOSE >= time:
                break
            try:
                rest = self.rest(candidate, candidate.waves - candidate.shared)
            except PlanError:
                continue
            total = shared_time + (time_of(rest, self.recipe) if rest.per_rank else 0.0)
            if total < time:
                best, time = self.step(candidate.waves, waves, rest), total
        return best

    def one_by_one(self) -> DecidedStep:
        """A wave for each unit that no rank holds alone, and the others after them."""
        count, ends = self.must, [*range(1, self.must + 1)]
        candidate = _Candidate(0.0, 0.0, count, 0, count, len(self.units), ends)
        rest = self.rest(candidate, None)
        time, parts = self.share(candidate)
        assert time < np.inf, "ranks together hold a unit alone"
        return self.step(count + rest.per_rank, parts, rest)


_NONE = np.empty(0, np.int64)
_NOTHING = DecidedStep(Segments(_NONE, _NONE, _NONE), _NONE, _NONE, 0, None)


def share_sequences(
    segments: Segments, units: Units, recipe: Recipe, prefixes: Prefixes | None
) -> DecidedStep:
    """Decide one step in which ranks share sequences, or not where that is as fast.

    A sequence that ranks share repeats its prefix; the others compute theirs once.
    """
    sharing = _Sharing(segments, units, recipe, prefixes)
    fewest = divided_up(int(sharing.rest_slots[-1]), sharing.capacity * sharing.ranks)
    if not sharing.must:
        alone = sharing.unshared(segments, units, None)
        time, fewest = time_of(alone, recipe), alone.per_rank
        even = sharing.ideal * _EVEN + fewest * recipe.cost.per_micro_batch
        return (
            alone if time <= even or sharing.ranks == 1 else sharing.search(fewest, time) or alone
        )
    # Samples that no rank holds alone: more and more waves, at last one for each of them.
    for more in range(_MORE):
        step = sharing.search(fewest + more * (1 + fewest // 8), np.inf)
        if step is not None:
            return step
    return sharing.one_by_one()
