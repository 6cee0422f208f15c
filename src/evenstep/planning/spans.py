"""Shared sequences: steps in which several ranks of a wave compute one long sequence together.

    lengths 9 2 2 1 on 3 ranks   ->   0-5 | 5-8 1 | 8-9 2 2      parts of the first on each rank

Where a sequence costs more than a rank's fair share, whole sequences cannot be even. A few waves
hold the longest ones and divide them; the rest is planned unshared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from evenstep.core.ragged import (
    FloatArray,
    IntArray,
    Segments,
    divided_up,
    offsets_of,
    ranges_of,
)
from evenstep.core.recipe import Recipe
from evenstep.errors import PlanError
from evenstep.planning.step import DecidedStep, decide_step
from evenstep.planning.trees import time_of
from evenstep.planning.units import Units

ELSEWHERE = -2
from evenstep.planning.kernels import kernel, rise, sink

_LEVEL = 1.0003  # loads over their mean that are level
_LOOK = 8  # ranks that are asked for room


@kernel
def share_wave(
    size: IntArray,
    cost: FloatArray,
    whole: IntArray,
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

    A part is (unit, start, end, rank). Units of which `whole` is 1 are never divided. The load is
    infinite and there are no parts if units do not fit.
    """
    n, limits = size.shape[0], caps.shape[0]
    most = n + 6 * ranks + 8
    unit_of, start, end = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    rank_of, later = np.empty(most, np.int64), np.empty(most, np.int64)
    after = np.empty(most, np.int64)  # the next part on the same rank
    first = np.empty(ranks, np.int64)
    used, sent, received = np.empty(ranks, np.int64), np.empty(ranks), np.empty(ranks)
    work, load, held = np.empty(ranks), np.empty(ranks), np.empty((ranks, limits))
    parts_of = np.empty(n, np.int64)
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

    total = cost.sum()
    level, best, none = total / ranks, np.inf, np.empty((0, 4), np.int64)
    chosen = none
    for _ in range(4):
        count[0] = 0
        parts_of[:] = 1
        first[:], used[:], work[:], sent[:], received[:], load[:] = -1, 0, 0.0, 0.0, 0.0, 0.0
        held[:] = 0.0
        feasible, taken, num_items, e, behind = True, 0, 0, 0, 0
        # Peel parts from the end of units above the level, each for a rank of its own.
        for u in range(n):
            if size[u] <= capacity and (cost[u] <= level * _LEVEL or whole[u]):
                continue
            if whole[u]:
                feasible = False
                break
            share, before, short = level, count[0], True
            while short and share < 2 * cost[u]:  # with too few parts, each has more
                count[0], e, behind, short = before, size[u], 0, False
                while e > capacity or price(0, e) + per_moved * e * behind > share * _LEVEL:
                    s = max(boundary(e, behind, share), round_up(e - capacity))
                    s = min(s, most_received // unit * unit, (e - 1) // unit * unit)
                    if s <= 0:
                        break
                    behind += 1
                    if behind >= most_parts or taken + behind > ranks or e - s > capacity:
                        short = True
                        break
                    add(u, s, e, behind - 1)
                    e = s
                share *= 1.03
            if short or e > capacity:
                feasible = False
                break
            if behind == 0:
                continue
            parts_of[u] = behind + 1
            for at in range(before, count[0]):
                put(at, taken)
                taken += 1
            items[num_items] = add(u, 0, e, behind)
            item_cost[num_items] = price(0, e) + per_moved * e * behind
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
            if next_item < num_items and (
                u >= n or item_cost[by_cost[next_item]] >= cost[u]
            ):
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
            if target >= 0:
                put(at, target)
                sink(heap, ready, load, 0, True)
            elif whole[v]:
                feasible = False
            else:
                # Divide it over the room, from the end: first up to the level, then anywhere.
                for k in range(2 * looked):
                    r, x = aside[k % looked], s
                    if has_part(v, r) or count[0] == most:
                        continue
                    if k < looked:
                        x = max(x, boundary(end[at], later[at], level - load[r]))
                    x = max(x, round_up(end[at] - (capacity - used[r])))
                    if x >= end[at] or (x > s and parts_of[v] >= most_parts):
                        continue
                    if not fits(v, x, end[at], r):
                        continue
                    if x == s:
                        put(at, r)
                        target = r
                        break
                    put(add(v, x, end[at], later[at]), r)
                    end[at] = x
                    later[at] += 1
                    parts_of[v] += 1
                feasible = feasible and target >= 0
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
        mean = load.sum() / ranks
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
                amount = min(excess, mean - load[q])
                if amount <= mean * (_LEVEL - 1) / 4:
                    break
                # The dearest whole unit of at most the amount, or the shortest part above it.
                at, move, divide, dearest, shortest = first[p], -1, -1, 0.0, np.inf
                while at >= 0:
                    v, s, e = unit_of[at], start[at], end[at]
                    value = cost[v] if s == 0 and e == size[v] else price(s, e)
                    if value <= amount * 1.02 and s == 0 and later[at] == 0:
                        if value > dearest and fits(v, 0, e, q):
                            move, dearest = at, value
                    elif (
                        value > amount
                        and not whole[v]
                        and parts_of[v] < most_parts
                        and e < shortest
                        and not has_part(v, q)
                    ):
                        divide, shortest = at, e
                    at = after[at]
                if move >= 0 and (dearest > 0.9 * amount or divide < 0):
                    take(move)
                    put(move, q)
                    done = True
                elif divide >= 0:
                    v, s, e = unit_of[divide], start[divide], end[divide]
                    x = max(boundary(e, later[divide], amount), s)
                    x = max(x, e - (capacity - used[q]) // unit * unit)
                    if x > s and x < e and fits(v, x, e, q):
                        cut(divide, x, q)
                        done = True
                    elif move >= 0:
                        take(move)
                        put(move, q)
                        done = True
                if done:
                    if load[q] >= mean * (2 - _LEVEL):
                        order[light - look] = order[light]
                        light -= 1
                    break
            if not done:
                heavy += 1
        slowest = load.max()
        if slowest < best:
            best = slowest
            chosen = np.empty((count[0], 4), np.int64)
            for at in range(count[0]):
                chosen[at, 0], chosen[at, 1] = unit_of[at], start[at]
                chosen[at, 2], chosen[at, 3] = end[at], rank_of[at]
        mean = load.sum() / ranks
        if slowest <= mean * 1.0005 or mean <= level * 1.0002 and slowest > best:
            break
        level = mean
    return best, chosen


_EVEN = 1.002  # times over the ideal from which nothing is shared
_CLOSE = 1.0005  # times over their bound that are not searched further
_WAVES = 4  # waves that share, at most
_FILLS = (0.85, 0.9, 0.95, 0.99)  # of the waves that do not
_SCORED, _PLANNED = 10, 2  # candidates


class _Candidate(NamedTuple):
    """The first `count` units in `shared` of `waves` waves.

    `bound` is a lower bound on its time.
    """

    bound: float
    shared: int
    waves: int
    count: int


class _Sharing:
    """The units of one step, the dearest first, and its candidates."""

    def __init__(self, segments: Segments, units: Units, recipe: Recipe) -> None:
        sharing, capacity = recipe.sharing, recipe.capacity
        assert sharing is not None and capacity is not None
        self.segments, self.recipe, self.original = segments, recipe, units
        self.ranks, self.capacity = recipe.topology.dp, capacity
        over = units.size > capacity
        self.order = np.lexsort((-units.cost, ~over))
        self.units = units.reordered(self.order)
        self.must = int(over.sum())  # units that only several ranks hold
        longest = int(units.size.max(initial=1))
        self.received = sharing.max_received or max(capacity, longest)
        self.parts = sharing.most_ranks or self.ranks
        self.slots, self.work = offsets_of(self.units.size), np.append(0.0, self.units.cost.cumsum())
        self.whole = (self.units.count > 1).astype(np.int64)
        self.ideal = float(self.work[-1]) / self.ranks

    def candidates(self, fewest: int) -> list[_Candidate]:
        """The most promising candidates with `fewest` waves or one more, the best bound first."""
        found = set()
        per_wave, total = self.capacity * self.ranks, int(self.slots[-1])
        for waves in (fewest, fewest + 1):
            for shared in range(1, min(_WAVES, waves) + 1):
                for fill in _FILLS:
                    rest = int(fill * per_wave * (waves - shared))
                    count = int(np.searchsorted(self.slots, total - rest))
                    count = max(count, self.must, 1)
                    if self.slots[count] <= per_wave * shared:
                        found.add((self.bound(shared, waves, count), shared, waves, count))
        return [_Candidate(*each) for each in sorted(found)]

    def bound(self, shared: int, waves: int, count: int) -> float:
        """The ideal, what exchanges and micro-batches cost, and what the rest waits at least."""
        recipe = self.recipe
        fixed = shared * recipe.cost.exchange + waves * recipe.cost.per_micro_batch
        return self.ideal + fixed + self.waiting(count, waves - shared)

    def waiting(self, count: int, waves: int) -> float:
        """A lower bound on what ranks wait in `waves` waves with the units from `count` on.

        The k waves with the dearest units hold at most their slots, so that they do at most the
        work of the dearest tokens, and a unit that these slots cannot hold is in another wave.
        """
        cost, slots = self.units.cost, self.slots
        if waves == 0 or count == len(cost):
            return 0.0
        if self.recipe.sync_every == "step":
            return max(0.0, float(cost[count]) - (self.work[-1] - self.work[count]) / self.ranks)
        ends = slots[count] + np.arange(min(waves, 8)) * (self.capacity * self.ranks)
        first = np.searchsorted(slots, ends[ends < slots[-1]], "right") - 1
        done = np.append(self.work[first[1:] + 1], self.work[-1]) - self.work[count]
        return max(0.0, float((np.cumsum(cost[first]) - done / self.ranks).max()))

    def share(self, candidate: _Candidate) -> tuple[float, list[tuple[int, IntArray]]]:
        """(the time of the waves that share, their parts); parts count from the wave's first."""
        cost, units = self.recipe.cost, self.units
        time, waves, first = 0.0, [], 0
        ends = self.slots[candidate.count] * np.arange(1, candidate.shared + 1) / candidate.shared
        for end in np.searchsorted(self.slots, ends).tolist():
            each = slice(first, max(end, first))
            slowest, parts = share_wave(
                units.size[each],
                units.cost[each],
                self.whole[each],
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
            time += slowest + cost.exchange + cost.per_micro_batch
            waves.append((first, parts))
            first = each.stop
        return time, waves

    def rest(self, candidate: _Candidate) -> DecidedStep | None:
        """The units that are not in waves that share; None if they do not fit."""
        waves = candidate.waves - candidate.shared
        chosen = np.flatnonzero(self.units.of_segment >= candidate.count)
        if waves == 0 or not len(chosen):
            return None if len(chosen) else _NOTHING
        units = self.original.of_segments(chosen)
        try:
            return decide_step(self.segments.take(chosen), units, self.recipe, waves)
        except PlanError:
            return None

    def step(
        self, waves: int, shared: list[tuple[int, IntArray]], rest: DecidedStep
    ) -> DecidedStep:
        """The step whose first waves share, with the rest after them."""
        segment_of = np.argsort(self.units.of_segment, kind="stable")
        offsets = offsets_of(self.units.count)
        columns = []
        for wave, (first, parts) in enumerate(shared):
            unit, start, end, rank = parts.T
            unit = unit + first
            # All segments of a unit that is not divided, and the one of a unit that is.
            count = self.units.count[unit]
            segment = segment_of[ranges_of(offsets[unit], count)]
            start, end = np.repeat(start, count), np.repeat(end, count)
            length = np.minimum(end, self.segments.length[segment]) - start
            micro = np.repeat(rank, count) * waves + wave
            parent = np.where(start > 0, ELSEWHERE, -1)
            columns.append((self.segments.sample[segment], start, length, parent, micro))
        if len(rest.segments):
            micro = rest.micro // rest.per_rank * waves + len(shared) + rest.micro % rest.per_rank
            none = np.full(len(micro), -1)
            each = rest.segments
            columns.append((each.sample, each.start, each.length, none, micro))
        sample, start, length, parent, micro = (np.concatenate(each) for each in zip(*columns))
        segments = Segments(sample, start, length, parent)
        return DecidedStep(segments, micro, np.zeros(len(micro), np.int64), waves, None)


_NOTHING = DecidedStep(
    Segments([], [], []), np.empty(0, np.int64), np.empty(0, np.int64), 0, None
)


def share_sequences(
    segments: Segments, units: Units, recipe: Recipe, wanted: int | None
) -> DecidedStep:
    """Decide one step in which ranks share sequences, or not where that is as fast."""
    sharing = _Sharing(segments, units, recipe)
    if sharing.ranks == 1:
        return decide_step(segments, units, recipe, wanted)
    alone, time = None, np.inf
    fewest = divided_up(int(units.size.sum()), sharing.capacity * sharing.ranks)
    if not sharing.must:
        alone = decide_step(segments, units, recipe, wanted)
        time, fewest = time_of(alone, recipe), alone.per_rank
        if time <= sharing.ideal * _EVEN + fewest * recipe.cost.per_micro_batch:
            return alone
    # Score candidates by their waves that share and the bound of the others.
    scored = []
    least = time
    for candidate in sharing.candidates(fewest)[:_SCORED]:
        if candidate.bound >= least:
            break
        shared_time, shared = sharing.share(candidate)
        cost = recipe.cost
        ideal = (sharing.work[candidate.count]) / sharing.ranks + candidate.shared * (cost.exchange + cost.per_micro_batch)
        score = candidate.bound - ideal + shared_time
        if score < least:
            scored.append((score, candidate, shared_time, shared))
        least = min(least, score)
        if score <= candidate.bound * _CLOSE:
            break
    best = alone
    for score, candidate, shared_time, shared in sorted(scored, key=lambda each: each[0])[:_PLANNED]:
        if score >= time:
            break
        rest = sharing.rest(candidate)
        if rest is None:
            continue
        step = sharing.step(candidate.waves, shared, rest)
        now = shared_time + (time_of(rest, recipe) if rest.per_rank else 0.0)
        if now < time:
            best, time = step, now
    assert best is not None
    return best
