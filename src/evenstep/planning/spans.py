"""Shared sequences: steps in which several ranks of a wave compute one long sequence together.

    lengths 9 2 2 1 on 3 ranks   ->   7-9 | 4-7 | 0-4 2 2 1      parts of the first on each rank

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
    sum_by,
)
from evenstep.core.recipe import Recipe
from evenstep.errors import PlanError
from evenstep.planning.kernels import kernel, rise, sink
from evenstep.planning.step import DecidedStep, decide_step
from evenstep.planning.trees import share_prefixes, time_of
from evenstep.planning.units import Units

_LEVEL = 1.0003  # loads over their mean that are level
_OVER = 1.02  # loads over the level that a part is divided to avoid
_RAISE = 1.03  # times a load that needs too many parts
_WORTH = 0.1  # of the level is worth a part
_LOOK = 64  # ranks that are asked for room
_STEPS = 12  # up to a level that ranks can do, and then down to the lowest
_ATTEMPTS = 4  # levels that are tried until units fit
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
) -> tuple[FloatArray, IntArray]:
    """(the load of each rank, the parts) of a wave with these units, dearest first.

    Parts are columns: unit, start, end, rank. Loads are infinite and there are no parts if units
    do not fit. The level is what each rank has to do: of lengths 9 2 2 1 on 3 ranks, if L tokens
    cost L * L, a third of 90.

    peel     4-7 and 7-9 of the first     33 and 32, as near to 30 as tokens allow; 0-4 is left
    place    7-9 | 4-7 | 0-4 2 2 1        dearest first, on the least loaded rank: 32, 33, 25
    level    exchange whole units, or cut what starts at 0, while that evens out ranks
    """
    n, limits = size.shape[0], caps.shape[0]
    most = n + 6 * ranks + 8
    columns = np.empty((6, most), np.int64)
    unit_of, start, end, rank_of = columns[0], columns[1], columns[2], columns[3]
    later, after = columns[4], columns[5]  # parts it is sent to; the next part on the same rank
    value = np.empty(most)  # what a part costs; on each rank, the next part costs as much or more
    first = np.empty(ranks, np.int64)
    used, sent, received = np.empty(ranks, np.int64), np.empty(ranks), np.empty(ranks)
    work, load, held = np.empty(ranks), np.empty(ranks), np.empty((ranks, limits))
    parts_of, cuts = np.empty(n, np.int64), np.empty(ranks + 1, np.int64)
    heap, aside = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    heads, head_cost = np.empty(n, np.int64), np.empty(n)
    count = np.zeros(1, np.int64)

    def price(s: int, e: int) -> float:
        """What tokens s to e of a unit cost behind those before them."""
        return (e - s) * (per_token + per_pair * (e + s)) + per_segment

    def boundary(e: int, behind: int, load: float) -> int:
        """Where a part begins that ends at e, is sent to `behind` parts, and loads its rank so."""
        level = per_token * e + per_pair * e * e + per_segment - load
        latest = 0.0
        for slope, root_of in (
            (per_token - per_moved, level),
            (per_token + per_moved * behind, level + per_moved * behind * e),
        ):
            root = slope * slope + 4 * per_pair * max(root_of, 0.0)
            if root_of > 0 and root > 0 and slope + np.sqrt(root) > 0:
                latest = max(latest, 2 * root_of / (slope + np.sqrt(root)))
        return int(min(np.round(latest / unit) * unit, float(e)))

    def round_up(x: int) -> int:
        return (x + unit - 1) // unit * unit

    def is_whole(at: int) -> bool:
        return bool(later[at] == 0 and start[at] == 0)

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

    def count_part(at: int, r: int, sign: int) -> None:
        """Add what a part takes to its rank (sign 1), or subtract it (-1)."""
        s, length = start[at], end[at] - start[at]
        used[r] += sign * length
        work[r] += sign * value[at]
        received[r] += sign * s
        sent[r] += sign * length * later[at]
        for d in range(limits):
            held[r, d] += sign * extra[unit_of[at], d]
        load[r] = work[r] + per_moved * max(sent[r], received[r])

    def put(at: int, r: int) -> None:
        """Put part `at` on rank r, before the parts that cost more."""
        u, s, e = unit_of[at], start[at], end[at]
        value[at] = cost[u] if s == 0 and e == size[u] else price(s, e)
        rank_of[at] = r
        before, following = -1, first[r]
        while following >= 0 and value[following] < value[at]:
            before, following = following, after[following]
        after[at] = following
        if before < 0:
            first[r] = at
        else:
            after[before] = at
        count_part(at, r, 1)

    def take(at: int) -> None:
        """Take part `at` from its rank."""
        r = rank_of[at]
        if first[r] == at:
            first[r] = after[at]
        else:
            before = first[r]
            while after[before] != at:
                before = after[before]
            after[before] = after[at]
        count_part(at, r, -1)

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
        """Divide part `at`, which is on no rank, at token x; its end goes to rank r."""
        u = unit_of[at]
        put(add(u, x, end[at], later[at]), r)
        end[at] = x
        later[at] += 1
        parts_of[u] += 1

    def peel(u: int, level: float, free: int) -> int:
        """How many parts are peeled from the end of unit u; -1 if `free` ranks are too few.

        They start at `cuts`. Where `most_parts` are too few, each has more than the level.
        """
        if size[u] <= capacity and cost[u] <= level * _LEVEL:
            return 0
        most_load = level
        while True:
            e, parts = size[u], 0
            while e > capacity or price(0, e) + per_moved * e * parts > most_load * _LEVEL:
                s = max(boundary(e, parts, most_load), round_up(e - capacity))
                s = min(s, most_received // unit * unit, (e - 1) // unit * unit)
                if s <= 0:
                    return parts
                if parts >= free or parts + 2 > ranks:
                    return -1
                if parts + 2 > most_parts or e - s > capacity:
                    parts = -1
                    break
                cuts[parts] = s
                parts, e = parts + 1, s
            if parts >= 0 or most_load == np.inf:
                return parts
            # More than the level, in as many parts as may be; at last by the capacity alone.
            most_load = most_load * _RAISE if most_load < 2 * cost[u] else np.inf

    def mean_at(level: float) -> float:
        """What ranks do on average if units are peeled at this level; infinite if ranks are too
        few. At a higher level fewer keys move, so it is less."""
        taken, total = 0, cost.sum()
        for u in range(n):
            parts, e = peel(u, level, ranks - taken), size[u]
            if parts < 0:
                return np.inf
            for k in range(parts):
                s = cuts[k]
                total += price(s, e) + per_moved * max(float((e - s) * k), float(s))
                e = s
            if parts > 0:
                total += price(0, e) + per_moved * e * parts - cost[u]
            taken += parts
        return float(total / ranks)

    def best_exchange(p: int, q: int, low: float, high: float) -> tuple[int, int]:
        """The whole units of ranks p and q (-1: none) whose exchange moves at most `high`, and as
        much of it as possible, from p to q; (-1, -1) if none moves `low`."""
        give, get, at, other = -1, -1, first[p], first[q]
        while at >= 0:
            if is_whole(at):
                a = unit_of[at]
                if low <= value[at] <= high and fits(a, 0, size[a], q):
                    give, get, low = at, -1, value[at]
                while other >= 0 and value[at] - value[other] > high:
                    other = after[other]
                b = other
                while b >= 0 and value[at] - value[b] >= low:
                    if is_whole(b) and can_swap(a, unit_of[b], p, q):
                        give, get, low = at, b, value[at] - value[b]
                        break
                    b = after[b]
            at = after[at]
        return give, get

    # The lowest level that ranks can do: keys cost, so it is higher than the work without them.
    low = level = cost.sum() / ranks
    mean, feasible = mean_at(level), False
    for step in range(_STEPS):
        if mean <= level * _LEVEL:
            break
        # At last as high as the capacity allows.
        low, level = level, min(mean, 2 * level) if step + 1 < _STEPS else np.inf
        mean = mean_at(level)
    for _ in range(_STEPS if level < np.inf else 0):
        if level <= low * _LEVEL:
            break
        middle = (low + level) / 2
        if mean_at(middle) > middle:
            low = middle
        else:
            level = middle
    for _ in range(_ATTEMPTS):
        # Peel parts from the end of units above the level, each for a rank of its own.
        count[0], parts_of[:], first[:], used[:] = 0, 1, -1, 0
        work[:], sent[:], received[:], load[:], held[:] = 0.0, 0.0, 0.0, 0.0, 0.0
        feasible, taken, num_heads = True, 0, 0
        for u in range(n):
            parts = peel(u, level, ranks - taken)
            feasible = feasible and parts >= 0
            if parts <= 0:
                continue
            parts_of[u], e = parts + 1, size[u]
            for k in range(parts):
                put(add(u, cuts[k], e, k), taken)
                taken, e = taken + 1, cuts[k]
            heads[num_heads] = add(u, 0, e, parts)
            head_cost[num_heads] = price(0, e) + per_moved * e * parts
            num_heads += 1
        if not feasible:
            level *= 1.05
            continue
        # Place heads and whole units, dearest first, each on the least loaded rank with room.
        by_cost = np.argsort(-head_cost[:num_heads], kind="mergesort")
        ready = ranks
        for r in range(ranks):
            heap[r] = r
        for node in range(ranks // 2, -1, -1):
            sink(heap, ready, load, node, True)
        next_head, u = 0, 0
        while feasible:
            while u < n and parts_of[u] > 1:
                u += 1
            if next_head < num_heads and (u >= n or head_cost[by_cost[next_head]] >= cost[u]):
                at = heads[by_cost[next_head]]
                next_head += 1
            elif u < n:
                at = add(u, 0, size[u], 0)
                u += 1
            else:
                break
            v, e, looked, target = unit_of[at], end[at], 0, -1
            while ready > 0:
                r = heap[0]
                if fits(v, 0, e, r) and not (parts_of[v] > 1 and has_part(v, r)):
                    target = r
                    break
                ready -= 1
                heap[0] = heap[ready]
                sink(heap, ready, load, 0, True)
                aside[looked] = r
                looked += 1
            # Divide what fits nowhere, or only where it exceeds the level, over the room of less
            # loaded ranks, from the end: first up to the level, then anywhere.
            over = target < 0 or (looked > 0 and load[target] + price(0, e) > level * _OVER)
            for k in range(2 * looked if over else 0):
                if end[at] == 0 or (k == looked and target >= 0):
                    break
                r, x = aside[k % looked], 0
                if has_part(v, r) or count[0] == most:
                    continue
                if k < looked:
                    if level - load[r] < _WORTH * level:
                        continue
                    x = boundary(end[at], later[at], level - load[r])
                x = max(x, round_up(end[at] - (capacity - used[r])))
                if x >= end[at] or (x > 0 and parts_of[v] >= most_parts):
                    continue
                if not fits(v, x, end[at], r):
                    continue
                if x > 0:
                    cut(at, x, r)
                else:
                    put(at, r)
                    target = -2
                    break
            if target >= 0:
                put(at, target)
                sink(heap, ready, load, 0, True)
            feasible = target != -1
            for k in range(looked):
                heap[ready] = aside[k]
                ready += 1
                rise(heap, ready, load, True)
        if feasible:
            break
        level *= 1.05
    if not feasible:
        return np.full(ranks, np.inf), np.empty((4, 0), np.int64)

    # Level: from the most to the least loaded rank.
    slowest = np.inf
    for _ in range(3):
        mean = load.sum() / ranks
        near = mean * (_LEVEL - 1)
        if load.max() <= mean + near or load.max() >= slowest:
            break
        slowest = load.max()
        order = np.argsort(-load, kind="mergesort")
        heavy, light, steps = 0, ranks - 1, 0
        while heavy < light and steps < 4 * ranks and count[0] < most:
            steps += 1
            p = order[heavy]
            excess = load[p] - mean
            if excess <= near:
                heavy += 1
                continue
            done = False
            # Exchange whole units, of which none may be one, by about what helps both.
            for look in range(min(_LOOK, light - heavy)):
                q = order[light - look]
                if mean - load[q] <= near / 4:
                    break
                high = min(excess, mean - load[q]) + near
                give, get = best_exchange(p, q, high / 2, high)
                if give >= 0:
                    take(give)
                    if get >= 0:
                        take(get)
                        put(get, p)
                    put(give, q)
                    done = True
                    break
            # Else cut the shortest unit or head that costs more than the amount.
            for look in range(0 if done else min(_LOOK, light - heavy)):
                q = order[light - look]
                amount = min(excess, mean - load[q])
                if amount <= near / 4:
                    break
                at, divide = first[p], -1
                while at >= 0:
                    v = unit_of[at]
                    if (
                        start[at] == 0
                        and value[at] > amount
                        and parts_of[v] < most_parts
                        and not has_part(v, q)
                    ):
                        divide = at
                        break
                    at = after[at]
                if divide < 0:
                    continue
                v, e = unit_of[divide], end[divide]
                x = max(boundary(e, later[divide], amount), e - (capacity - used[q]) // unit * unit)
                if 0 < x < e and price(x, e) > per_moved * x and fits(v, x, e, q):
                    take(divide)
                    cut(divide, x, q)
                    put(divide, p)
                    done = True
                    break
            if done and load[q] >= mean - near:
                order[light - look] = order[light]
                light -= 1
            if not done:
                heavy += 1
    return load, columns[:4, : count[0]].copy()


_EVEN = 1.002  # times over the ideal from which nothing is shared
_WAVES = 6  # waves that share, at most
_FILLS = (0.6, 0.7, 0.78, 0.85, 0.9, 0.95, 0.98, 0.99)  # of the waves that do not
_TIGHT = 0.8  # of the slots of a wave that shares: more are hard to divide evenly
_SHORT = 0.1  # of the work of a wave that shares is that of the shortest units
_ALIKE = 1.02  # costs over another that are alike
_UNEVEN = 0.005  # of its dearest unit is about what a wave that does not share waits
_SCORED, _PLANNED = 16, 2  # candidates
_THOROUGH = 2048  # units that are exchanged thoroughly after those that ranks share
_POOR = 1.02  # times over the estimate of others from which these are scored as well
_MORE = 6  # numbers of waves that are tried where a step has to share


class _Candidate(NamedTuple):
    """The first `units` in `shared` of `waves` waves, which end at `ends`. The units from `last` on
    take turns in those after the `full` ones.

    `time` is what it takes at least, with what ranks are likely to wait; `rest` is that of the
    waves that do not share.
    """

    time: float
    rest: float
    shared: int
    waves: int
    units: int
    last: int
    full: int
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
        dearest = np.append(self.units.cost, 0.0)
        # Full waves with one of the dearest units on every rank, then equally many slots in each.
        alike = 0 if self.must else int((dearest * _ALIKE >= dearest[0]).sum())
        full = np.minimum(np.minimum(alike, count) // ranks, shared - 1)
        first, rest = slots[ranks * full], waves - shared
        used = slots[count] - first + slots[-1] - slots[last]
        wave = np.arange(shared.max(initial=0) + 1)  # [candidate, wave] below
        part = (wave - full[:, np.newaxis]).clip(0) / (shared - full)[:, np.newaxis]
        slots_shared = first[:, np.newaxis] + (slots[count] - first)[:, np.newaxis] * part
        ends = np.searchsorted(slots, slots_shared).clip(max=count[:, np.newaxis])
        ends = np.where(wave < full[:, np.newaxis], ranks * wave, ends)
        # Waves that short units make even without dividing others.
        short = (work[-1] - work[last]) / (shared - full)
        short = short[:, np.newaxis] * (wave[:-1] >= full[:, np.newaxis])
        level = (np.diff(work[ends]) + short) / ranks
        whole = (wave[:-1] < shared[:, np.newaxis]) & (dearest[ends[:, :-1]] <= level * _LEVEL)
        even = whole.sum(axis=1) * (count < last)
        alone = self.rest_time(count, last, rest)
        time = alone + (work[count] + work[-1] - work[last]) / ranks
        time += shared * (cost.exchange + cost.per_micro_batch)
        # Waves with few slots to spare cannot be even.
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
                full=int(full[k]),
                ends=ends[k, 1 : shared[k] + 1].tolist(),
            )

    def rest_time(self, count: IntArray, last: IntArray, waves: IntArray) -> FloatArray:
        """What so many waves with the units from `count` to `last` take, with what ranks wait.

        A wave with the dearest unit does at most the work of the dearest tokens.
        """
        slots, work, cost = self.rest_slots, self.work, np.append(self.units.cost, 0.0)[count]
        end = np.searchsorted(slots, slots[count] + self.capacity * self.ranks)
        dearest_wave = work[end.clip(max=len(self.units))] - work[count]
        waits = np.maximum(cost - dearest_wave / self.ranks, 0) + _UNEVEN * cost * waves
        mean = (self.rest_work[last] - self.rest_work[count]) / self.ranks
        time: FloatArray = mean + waits * (count < last) + waves * self.recipe.cost.per_micro_batch
        return time

    def share(self, candidate: _Candidate) -> tuple[float, list[IntArray]]:
        """(the time of the waves that share, their parts)."""
        cost, units, full = self.recipe.cost, self.units, candidate.full
        time, waves = 0.0, []
        for wave, (first, end) in enumerate(pairwise((0, *candidate.ends))):
            each = np.arange(first, end)
            if wave >= full:
                turns = candidate.shared - full
                short = np.arange(candidate.last + wave - full, len(units), turns)
                each = np.append(each, short)
            loads, parts = share_wave(
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
            used = sum_by(parts[3], parts[2] - parts[1], self.ranks).astype(np.int64)
            padding = self.recipe.layout.widths(used, self.recipe.width_unit) - used
            exchange = cost.exchange if parts[1].any() else 0.0
            time += float((loads + cost.per_token * padding).max()) + exchange
            time += cost.per_micro_batch
            parts[0] = each[parts[0]]
            waves.append(parts)
        return time, waves

    def rest(
        self, candidate: _Candidate, waves: int | None, *, thorough: bool = True
    ) -> DecidedStep:
        """The units that are not in waves that share, in so many waves. Raises if none fit."""
        unit = self.units.of_segment
        chosen = np.flatnonzero((unit >= candidate.units) & (unit < candidate.last))
        if waves == 0 or not len(chosen):
            return _NOTHING
        units = self.original.of_segments(chosen)
        thorough = thorough and len(chosen) <= _THOROUGH
        return self.unshared(self.segments.take(chosen), units, waves, thorough=thorough)

    def unshared(
        self, segments: Segments, units: Units, waves: int | None, *, thorough: bool = True
    ) -> DecidedStep:
        """The step of these units without sharing between ranks, in so many waves."""
        if self.prefixes is None:
            return decide_step(segments, units, self.plain, waves, thorough=thorough)
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
        scored.sort(key=itemgetter(0))
        for number, (score, candidate, shared_time, waves) in enumerate(scored[:_PLANNED]):
            if score * _CLOSE >= time:
                break
            try:
                count = candidate.waves - candidate.shared
                rest = self.rest(candidate, count, thorough=number == 0)
            except PlanError:
                continue
            total = shared_time + (time_of(rest, self.recipe) if rest.per_rank else 0.0)
            if total < time:
                best, time = self.step(candidate.waves, waves, rest), total
        return best

    def one_by_one(self) -> DecidedStep:
        """A wave for each unit that no rank holds alone, and the others after them."""
        count, ends = self.must, [*range(1, self.must + 1)]
        candidate = _Candidate(0.0, 0.0, count, 0, count, len(self.units), 0, ends)
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
