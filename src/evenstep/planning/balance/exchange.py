"""Exchanges of units between packs that lower the heaviest pack of each wave."""

from typing import NamedTuple

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernels import kernel

_CLOSE = 1e-3  # a heaviest pack this close to its wave's mean is accepted
_ROUNDS = 100  # exchanges per wave
_SEEN = 64  # units of a pack that are considered for an exchange
_PARTNERS = 256  # packs of a wave that are considered, from the heaviest pack's number on


class UnitArrays(NamedTuple):
    """The units to pack, one entry each; `extra[u, d]` counts against `PackLimits.caps[d]`."""

    size: IntArray
    cost: FloatArray
    extra: FloatArray


class PackLimits(NamedTuple):
    """What one pack may hold: slots, and an amount of each further limit."""

    capacity: int
    caps: FloatArray


class WavePacks(NamedTuple):
    """The packs of all waves. Pack `wave * ranks + i` is the i-th of its wave.

    `pack_of[u]` is the pack of unit u. `size`, `cost` and `held` are sums over each pack's units.
    """

    pack_of: IntArray
    size: IntArray
    cost: FloatArray
    held: FloatArray


@kernel
def refine_waves(
    units: UnitArrays, limits: PackLimits, ranks: int, waves: int, packs: WavePacks
) -> None:
    """Move or swap units between the heaviest pack of each wave and the others, in place."""
    n = units.size.shape[0]
    start = np.zeros(ranks * waves + 1, np.int64)
    for u in range(n):
        start[packs.pack_of[u] + 1] += 1
    for pack in range(ranks * waves):
        start[pack + 1] += start[pack]
    cursor = start[:-1].copy()
    by_pack = np.empty(n, np.int64)
    for u in range(n):
        by_pack[cursor[packs.pack_of[u]]] = u
        cursor[packs.pack_of[u]] += 1
    for wave in range(waves):
        first = wave * ranks
        mean, most = 0.0, 0
        for pack in range(first, first + ranks):
            mean += packs.cost[pack] / ranks
            most = max(most, start[pack + 1] - start[pack])
        member = np.empty((ranks, most + _ROUNDS), np.int64)  # units of each pack of the wave
        filled = np.zeros(ranks, np.int64)
        for i in range(ranks):
            for at in range(start[first + i], start[first + i + 1]):
                member[i, filled[i]] = by_pack[at]
                filled[i] += 1
        for _ in range(_ROUNDS):
            a = int(np.argmax(packs.cost[first : first + ranks]))
            if packs.cost[first + a] <= mean * (1 + _CLOSE):
                break
            b, x, y = best_exchange(a, first, ranks, units, limits, packs, member, filled)
            if b < 0:
                break
            given = member[a, x]
            taken = member[b, y] if y >= 0 else -1
            exchange(given, taken, first + a, first + b, units, packs)
            if taken >= 0:
                member[a, x] = taken
                member[b, y] = given
            else:
                filled[a] -= 1
                member[a, x] = member[a, filled[a]]
                member[b, filled[b]] = given
                filled[b] += 1


@kernel
def best_exchange(
    a: int,
    first: int,
    ranks: int,
    units: UnitArrays,
    limits: PackLimits,
    packs: WavePacks,
    member: IntArray,
    filled: IntArray,
) -> tuple[int, int, int]:
    """The exchange that lowers pack `first + a` most, as (b, x, y); b is -1 if none helps.

    Unit `member[a, x]` moves to pack `first + b`, and `member[b, y]` moves back unless y is -1.
    At most `_SEEN` units of a pack are considered.
    """
    top = packs.cost[first + a]
    best = top * (1 - 1e-7)
    found = (-1, -1, -1)
    step = (filled[a] + _SEEN - 1) // _SEEN
    for other in range(1, min(ranks, _PARTNERS + 1)):
        b = (a + other) % ranks
        gap = top - packs.cost[first + b]
        # At best, an exchange makes both packs cost their mean.
        if top - gap / 2 >= best:
            continue
        stride = max((filled[b] + _SEEN - 1) // _SEEN, 1)
        for x in range(0, filled[a], step):
            i = member[a, x]
            for y in range(-1, filled[b], stride):
                j = member[b, y] if y >= 0 else -1
                difference = units.cost[i] - (units.cost[j] if j >= 0 else 0.0)
                reached = max(top - difference, top - gap + difference)
                if reached >= best:
                    continue
                larger = units.size[i] - (units.size[j] if j >= 0 else 0)
                if (
                    packs.size[first + b] + larger > limits.capacity
                    or packs.size[first + a] - larger > limits.capacity
                ):
                    continue
                if not exchange_fits(i, j, first + a, first + b, units, limits, packs):
                    continue
                best = reached
                found = (b, x, y)
    return found


@kernel
def exchange_fits(
    i: int, j: int, a: int, b: int, units: UnitArrays, limits: PackLimits, packs: WavePacks
) -> bool:
    """Whether both packs keep their further limits if unit i moves from pack a to pack b and
    unit j, unless -1, moves back."""
    for d in range(limits.caps.shape[0]):
        more = units.extra[i, d] - (units.extra[j, d] if j >= 0 else 0.0)
        if packs.held[b, d] + more > limits.caps[d] or packs.held[a, d] - more > limits.caps[d]:
            return False
    return True


@kernel
def exchange(i: int, j: int, a: int, b: int, units: UnitArrays, packs: WavePacks) -> None:
    """Move unit i from pack a to pack b and unit j, unless -1, back."""
    for unit, source, target in ((i, a, b), (j, b, a)):
        if unit < 0:
            continue
        packs.pack_of[unit] = target
        packs.size[source] -= units.size[unit]
        packs.size[target] += units.size[unit]
        packs.cost[source] -= units.cost[unit]
        packs.cost[target] += units.cost[unit]
        for d in range(packs.held.shape[1]):
            packs.held[source, d] -= units.extra[unit, d]
            packs.held[target, d] += units.extra[unit, d]
