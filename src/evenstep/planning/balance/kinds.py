"""Packs for units with and without second work, such that both works are even."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray, Ragged, divided_up, sum_by
from evenstep.errors import PlanError
from evenstep.planning.balance.construct import NONE
from evenstep.planning.balance.deal import deal_packs
from evenstep.planning.balance.exchange import PackLimits, UnitArrays
from evenstep.planning.balance.problem import Problem
from evenstep.planning.balance.ranks_first import has_room
from evenstep.planning.balance.waves import fill_around
from evenstep.planning.kernels import kernel, rise, sink
from evenstep.planning.packers import divide_bins
from evenstep.planning.units import Units
from evenstep.planning.vector_packing import spread_units, vector_pack

_LOOK = 64  # packs tried for a unit, from the lightest on, before all others are


def kinds_apart(problem: Problem, waves: int) -> IntArray:
    """The address of each unit; the waves with second work come first. Empty if units do not fit.

    The units with second work are spread over some of the waves, such that their work is even. With
    `same_waves`, each micro-batch of these waves has at least one. The other units go, largest
    first, to the cheapest pack with room, in any wave.
    """
    units, ranks = problem.units, problem.ranks
    special = np.flatnonzero(units.second > 0)
    own = units.take(special)
    bins = vector_pack(own.size, own.extra, problem.capacity, own.caps)
    fewest, most = divided_up(len(bins), problem.per_wave), waves
    if problem.kinds_matter:
        _check_enough(problem, len(special), fewest)
        most = min(waves, len(special) // ranks)
    best, time = NONE, np.inf
    counts = {fewest, fewest + 1, (fewest + most) // 2, most}
    for count in sorted(count for count in counts if fewest <= count <= most):
        for some in _spread(problem, own, bins, count):
            packs = _in_waves(problem, own, some, count)
            for fill in (_fill_waves, _fill_lightest):
                found = fill(problem, waves, count, special, packs)
                if len(found) and problem.time(found, waves) < time:
                    best, time = found, problem.time(found, waves)
    return best


def _spread(problem: Problem, own: Units, bins: Ragged, waves: int) -> Iterator[Ragged]:
    """Ways to put the special units into these waves: by even work, by even limits, as bins."""
    packs = waves * problem.per_wave
    order = np.lexsort((-own.size, -own.second))
    none = np.full(len(own), -1, np.int64)
    even = fill_lightest(
        order, none, own.size, own.second, own.extra, problem.capacity, own.caps, packs
    )
    if len(even):
        yield Ragged.group(even, packs)
    spread = spread_units(own, problem.capacity, packs)
    if spread is not None:
        yield spread
    yield bins  # `waves` are at least as many as these need


def _check_enough(problem: Problem, special: int, waves: int) -> None:
    """Raise if there are fewer special units than micro-batches in their waves."""
    second, ranks = problem.recipe.second_work, problem.ranks
    if special < waves * ranks and second is not None:
        raise PlanError(
            f"a step has {special} samples with {second.column} for {waves} waves of {ranks} "
            f"ranks, so not every rank has one. Take more samples per step, or set "
            f"second_work.same_waves=False."
        )


def _in_waves(problem: Problem, own: Units, bins: Ragged, waves: int) -> IntArray:
    """The pack of each special unit; with `same_waves`, no micro-batch is without one.

    Bins without units are left out; the largest are divided where more are needed.
    """
    rows, micros = problem.rows, waves * problem.ranks
    filled = Ragged.of([bin_.tolist() for bin_ in bins if len(bin_)])
    if problem.kinds_matter:
        filled = divide_bins(own.size, filled, max(len(filled), micros))
    pack_of_bin = np.arange(len(filled))
    pack_of_bin = pack_of_bin % micros * rows + pack_of_bin // micros
    found = np.empty(len(own), np.int64)
    found[filled.values] = pack_of_bin[filled.owner]
    return found


def _fill_lightest(
    problem: Problem, waves: int, special_waves: int, special: IntArray, own: IntArray
) -> IntArray:
    """The addresses when the other units go to the cheapest pack with room, in any wave."""
    units, count = problem.units, len(problem.units)
    pack_of = np.full(count, -1, np.int64)
    pack_of[special] = own
    rest = np.flatnonzero(pack_of < 0)
    rest = rest[np.lexsort((-units.cost[rest], -units.size[rest]))]
    found = fill_lightest(
        rest,
        pack_of,
        units.size,
        units.cost,
        units.extra,
        problem.capacity,
        units.caps,
        waves * problem.per_wave,
    )
    return _dealt(problem, found, special_waves, waves) if len(found) else found


def _fill_waves(
    problem: Problem, waves: int, special_waves: int, special: IntArray, own: IntArray
) -> IntArray:
    """The addresses when packs of similar cost share a wave, and waves are filled one by one."""
    units, count = problem.units, len(problem.units)
    cost = sum_by(own // problem.rows, units.cost[special], special_waves * problem.ranks)
    moved = deal_packs(cost, problem.ranks, "refined", "micro_batch")
    own = moved[own // problem.rows] * problem.rows + own % problem.rows
    order = np.lexsort((-units.cost, -units.size))
    pack_of = np.full(count, -1, np.int64)
    pack_of[special] = own
    found = fill_around(
        UnitArrays(units.size[order], units.cost[order], units.extra[order]),
        PackLimits(problem.capacity, units.caps),
        problem.per_wave,
        waves,
        pack_of[order],
    )
    if len(found) < count:
        return NONE
    pack_of[order] = found
    return pack_of


def _dealt(problem: Problem, pack_of: IntArray, special: int, waves: int) -> IntArray:
    """The addresses after micro-batches of similar work share a wave, those of each kind apart."""
    units, ranks, rows = problem.units, problem.ranks, problem.rows
    work = sum_by(pack_of // rows, units.cost + units.second, waves * ranks)
    moved = np.arange(waves * ranks)
    for part in (slice(0, special * ranks), slice(special * ranks, waves * ranks)):
        if part.stop > part.start:
            dealt = deal_packs(work[part], ranks, "refined", problem.recipe.sync_every)
            moved[part] = part.start + dealt
    return np.asarray(moved[pack_of // rows] * rows + pack_of % rows, np.int64)


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
