"""Waves for one kind of unit: in each wave, every micro-batch has second work or none has."""

from __future__ import annotations

import numpy as np

from evenstep.core.bounds import bins_bound
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.rounding import divided_up
from evenstep.errors import PlanError
from evenstep.planning.balance.problem import Problem
from evenstep.planning.balance.ranks_first import has_room
from evenstep.planning.heap import rise, sink
from evenstep.planning.kernel import kernel

_TRIED = 4  # numbers of waves with second work that are tried
_LOOK = 64  # packs tried for a unit, from the lightest on, before all others are


def kinds_apart(problem: Problem, waves: int) -> IntArray:
    """The address of each unit; the waves with second work come first. Empty if units do not fit.

    Each micro-batch of these waves starts with one unit that has second work. The other units go,
    largest first, to the lightest pack with room: those with second work in these waves, the rest
    anywhere.
    """
    units, ranks = problem.units, problem.ranks
    special = np.flatnonzero(units.second > 0)
    if len(special) < ranks:
        second = problem.recipe.second_work
        assert second is not None
        raise PlanError(
            f"a step has {len(special)} samples with {second.column} for {ranks} ranks, so they "
            f"cannot share waves. Take more samples per step, or set second_work.same_waves=False."
        )
    taken = np.column_stack((units.size.astype(np.float64), units.extra))[special]
    bins = bins_bound(taken, np.append(float(problem.capacity), units.caps))
    least = max(divided_up(bins, problem.per_wave), 1)
    best, time = np.empty(0, np.int64), np.inf
    for own in range(least, min(least + _TRIED, waves + 1, len(special) // ranks + 1)):
        found = _apart(problem, waves, own, special)
        if len(found) and problem.time(found, waves) < time:
            best, time = found, problem.time(found, waves)
    return best


def _apart(problem: Problem, waves: int, own: int, special: IntArray) -> IntArray:
    """The addresses with `own` waves for the special units."""
    units, rows = problem.units, problem.rows
    count = len(units)
    pack_of = np.full(count, -1, np.int64)
    ordered = special[np.lexsort((-units.size[special], -units.second[special]))]
    first = own * problem.ranks  # micro-batches with second work
    pack_of[ordered[:first]] = np.arange(first) * rows
    rest = np.setdiff1d(np.arange(count), special)
    rest = rest[np.lexsort((-units.cost[rest], -units.size[rest]))]
    both = (
        (ordered[first:], units.second, first * rows),
        (rest, units.cost, waves * problem.per_wave),
    )
    for order, work, packs in both:
        pack_of = fill_lightest(
            order, pack_of, units.size, work, units.extra, problem.capacity, units.caps, packs
        )
        if len(pack_of) < count:
            break
    return pack_of


@kernel
def fill_lightest(
    order: IntArray,
    pack_of: IntArray,
    size: IntArray,
    work: FloatArray,
    extra: FloatArray,
    capacity: int,
    caps: FloatArray,
    packs: int,
) -> IntArray:
    """The pack of each unit when those in `order` go to the lightest of the first packs with room.

    `pack_of` is -1 for units in no pack. Empty if a unit fits nowhere.
    """
    pack_of = pack_of.copy()
    held = np.zeros(packs, np.int64)
    used = np.zeros((packs, caps.shape[0]))
    number = np.zeros(packs, np.int64)
    load = np.zeros(packs)
    for u in range(pack_of.shape[0]):
        if pack_of[u] >= 0:
            p = pack_of[u]
            held[p] += size[u]
            load[p] += work[u]
            number[p] += 1
            for d in range(caps.shape[0]):
                used[p, d] += extra[u, d]
    heap = np.argsort(load, kind="mergesort")
    count = packs
    seen = np.empty(_LOOK, np.int64)
    for u in order:
        chosen, looked = -1, 0
        while count > 0 and looked < _LOOK and chosen < 0:
            p = heap[0]
            if has_room(u, p, size, extra, capacity, caps, held, used, number):
                chosen = p
            seen[looked] = p
            looked += 1
            count -= 1
            heap[0] = heap[count]
            sink(heap, count, load, 0, True)
        at = 0
        while chosen < 0 and at < count:
            if has_room(u, heap[at], size, extra, capacity, caps, held, used, number):
                chosen = heap[at]
            at += 1
        if chosen < 0:
            return np.empty(0, np.int64)
        pack_of[u] = chosen
        held[chosen] += size[u]
        load[chosen] += work[u]
        number[chosen] += 1
        for d in range(caps.shape[0]):
            used[chosen, d] += extra[u, d]
        for k in range(looked):
            heap[count] = seen[k]
            count += 1
            rise(heap, count, load, True)
        if at > 0:
            sink(heap, count, load, at - 1, True)
    return pack_of
