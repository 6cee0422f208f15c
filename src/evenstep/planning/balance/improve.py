"""Seeded exchanges of units between packs that lower the modelled time of a step.

A *load* is what a rank works between two synchronisations: a micro-batch if ranks synchronise at
every one, else all micro-batches of a rank. Loads of a *group* wait for each other: those of a
wave, or all. The time of a step is the sum over groups of the heaviest load.

The heaviest load has plateaus: exchanges that lower the second-heaviest load do not change it. So
exchanges lower the sum of the groups' 32-norms instead. At first they may raise it a little
(threshold accepting). Everything is deterministic: the random numbers are our own, and roots and
powers are products and square roots alone.
"""

from typing import NamedTuple

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernel import kernel

_MASK = 2**48 - 1


class Movable(NamedTuple):
    """The units: slots, first and second work, further limits, segments, and kind.

    `kind[u]` is 1 for a unit with second work where kinds have waves of their own, else 0.
    """

    size: IntArray
    cost: FloatArray
    second: FloatArray
    extra: FloatArray
    segments: IntArray
    kind: IntArray


class Shape(NamedTuple):
    """The packs of a step: `waves` waves of `ranks` micro-batches of `rows` packs.

    Pack `(wave * ranks + rank) * rows + row`. With `by_rank`, ranks synchronise once per step. With
    `equal`, ranks keep their number of segments. The first `special` waves hold the units of kind
    1, at least one in each micro-batch; -1 if kinds do not matter.
    """

    ranks: int
    rows: int
    waves: int
    by_rank: bool
    equal: bool
    special: int


class Room(NamedTuple):
    """What one pack may hold: slots, and an amount of each further limit."""

    capacity: int
    caps: FloatArray


@kernel
def power(ratio: float, squarings: int) -> float:
    """`ratio ** (2 ** squarings)`."""
    for _ in range(squarings):
        ratio = ratio * ratio
    return ratio


@kernel
def root(value: float, squarings: int) -> float:
    """`value ** (1 / 2 ** squarings)`."""
    value = max(value, 0.0)
    for _ in range(squarings):
        value = np.sqrt(value)
    return value


@kernel
def load_of(pack: int, shape: Shape) -> int:
    """The load that a pack belongs to; loads of a group are numbered together."""
    micro = pack // shape.rows
    return micro % shape.ranks if shape.by_rank else micro


@kernel
def norms(
    load: FloatArray, ranks: int, squarings: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(scale of each group, sum of its scaled powers, its heaviest load)."""
    groups = load.shape[0] // ranks
    scale, total, heaviest = np.ones(groups), np.zeros(groups), np.zeros(groups)
    for g in range(groups):
        for at in range(g * ranks, (g + 1) * ranks):
            heaviest[g] = max(heaviest[g], load[at])
        scale[g] = heaviest[g] if heaviest[g] > 0 else 1.0
        for at in range(g * ranks, (g + 1) * ranks):
            total[g] += power(load[at] / scale[g], squarings)
    return scale, total, heaviest


@kernel
def change(
    load: FloatArray,
    a: int,
    b: int,
    given: float,
    scale: FloatArray,
    total: FloatArray,
    ranks: int,
    squarings: int,
) -> float:
    """How the sum of norms changes when load a gives this much to load b."""
    g, h = a // ranks, b // ranks
    less = power(max(load[a] - given, 0.0) / scale[g], squarings)
    less -= power(load[a] / scale[g], squarings)
    more = power(max(load[b] + given, 0.0) / scale[h], squarings)
    more -= power(load[b] / scale[h], squarings)
    if g == h:
        after = root(total[g] + less + more, squarings)
        return float(scale[g] * (after - root(total[g], squarings)))
    first = scale[g] * (root(total[g] + less, squarings) - root(total[g], squarings))
    second = scale[h] * (root(total[h] + more, squarings) - root(total[h], squarings))
    return float(first + second)


@kernel
def allowed(
    i: int,
    j: int,
    p: int,
    q: int,
    units: Movable,
    room: Room,
    shape: Shape,
    size: IntArray,
    held: FloatArray,
    special: IntArray,
) -> bool:
    """Whether unit i may move from pack p to pack q, and unit j, unless -1, back."""
    larger = units.size[i] - (units.size[j] if j >= 0 else 0)
    if size[q] + larger > room.capacity or size[p] - larger > room.capacity:
        return False
    for d in range(room.caps.shape[0]):
        more = units.extra[i, d] - (units.extra[j, d] if j >= 0 else 0.0)
        if held[q, d] + more > room.caps[d] or held[p, d] - more > room.caps[d]:
            return False
    a, b = p // shape.rows, q // shape.rows
    if (
        shape.equal
        and a % shape.ranks != b % shape.ranks
        and (j < 0 or units.segments[i] != units.segments[j])
    ):
        return False
    if shape.special >= 0:
        first = shape.special * shape.ranks  # micro-batches from here on hold no unit of kind 1
        given = units.kind[i] - (units.kind[j] if j >= 0 else 0)
        if (units.kind[i] == 1 and b >= first) or (j >= 0 and units.kind[j] == 1 and a >= first):
            return False
        if (a < first and special[a] - given < 1) or (b < first and special[b] + given < 1):
            return False
    return True


@kernel
def improve(
    units: Movable,
    room: Room,
    shape: Shape,
    pack_of: IntArray,
    tries: int,
    squarings: int,
    loose: float,
    goal: float,
    seed: int,
) -> tuple[IntArray, float]:
    """(a pack of each unit, modelled time), from `pack_of` on; never slower.

    Stops at a time of `goal`, after `tries` exchanges, or when a quarter of them gained nothing.
    """
    n, ranks, rows = units.size.shape[0], shape.ranks, shape.rows
    packs = shape.waves * ranks * rows
    loads = ranks if shape.by_rank else shape.waves * ranks
    pack_of = pack_of.copy()
    size = np.zeros(packs, np.int64)
    held = np.zeros((packs, room.caps.shape[0]))
    special = np.zeros(shape.waves * ranks, np.int64)
    head = np.full(packs, -1, np.int64)
    after, before = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    number = np.zeros(packs, np.int64)
    first, second = np.zeros(loads), np.zeros(loads)
    for u in range(n):
        p = pack_of[u]
        size[p] += units.size[u]
        for d in range(room.caps.shape[0]):
            held[p, d] += units.extra[u, d]
        special[p // rows] += units.kind[u]
        number[p] += 1
        after[u] = head[p]
        if head[p] >= 0:
            before[head[p]] = u
        head[p] = u
        first[load_of(p, shape)] += units.cost[u]
        second[load_of(p, shape)] += units.second[u]
    two = second.max() > 0 if loads else False
    scale, total, heaviest = norms(first, ranks, squarings)
    scale2, total2, heaviest2 = norms(second, ranks, squarings)
    groups = scale.shape[0]
    typical = (scale.sum() + scale2.sum()) / groups
    time = heaviest.sum() + heaviest2.sum()
    best, best_of = time, pack_of.copy()
    state = (seed * 2 + 1) & _MASK
    for attempt in range(tries):
        if best <= goal:
            break
        state = (state * 25214903917 + 11) & _MASK
        g = (state >> 17) % groups
        by_second = two and (state >> 16) & 1 == 1
        chosen = second if by_second else first
        a = g * ranks
        for at in range(g * ranks + 1, (g + 1) * ranks):
            if chosen[at] > chosen[a]:
                a = at
        state = (state * 25214903917 + 11) & _MASK
        if groups == 1 or (state >> 40) & 1:
            b = g * ranks + (state >> 17) % ranks
        else:
            b = (state >> 17) % loads
        if a == b:
            continue
        state = (state * 25214903917 + 11) & _MASK
        p, q = pick_pack(a, state >> 17, shape), pick_pack(b, state >> 22, shape)
        if number[p] == 0:
            continue
        state = (state * 25214903917 + 11) & _MASK
        i = head[p]
        for _ in range((state >> 17) % number[p]):
            i = after[i]
        least, j, found = np.inf, -1, -2
        while True:
            given = units.cost[i] - (units.cost[j] if j >= 0 else 0.0)
            given2 = units.second[i] - (units.second[j] if j >= 0 else 0.0)
            if (given > 0 or (two and given2 > 0) or loose > 0) and allowed(
                i, j, p, q, units, room, shape, size, held, special
            ):
                gained = change(first, a, b, given, scale, total, ranks, squarings)
                if two:
                    gained += change(second, a, b, given2, scale2, total2, ranks, squarings)
                if gained < least:
                    least, found = gained, j
            j = head[q] if j < 0 else after[j]
            if j < 0:
                break
        most = loose * typical * (1.0 - attempt / tries)
        if found == -2 or least >= most * ((state >> 20) % 1024) / 1024 - 1e-12 * typical:
            continue
        for unit, source, target in ((i, p, q), (found, q, p)):
            if unit < 0:
                continue
            if before[unit] >= 0:
                after[before[unit]] = after[unit]
            else:
                head[source] = after[unit]
            if after[unit] >= 0:
                before[after[unit]] = before[unit]
            before[unit], after[unit] = -1, head[target]
            if head[target] >= 0:
                before[head[target]] = unit
            head[target] = unit
            number[source] -= 1
            number[target] += 1
            size[source] -= units.size[unit]
            size[target] += units.size[unit]
            for d in range(room.caps.shape[0]):
                held[source, d] -= units.extra[unit, d]
                held[target, d] += units.extra[unit, d]
            special[source // rows] -= units.kind[unit]
            special[target // rows] += units.kind[unit]
            first[load_of(source, shape)] -= units.cost[unit]
            first[load_of(target, shape)] += units.cost[unit]
            second[load_of(source, shape)] -= units.second[unit]
            second[load_of(target, shape)] += units.second[unit]
            pack_of[unit] = target
        for h in (a // ranks, b // ranks):
            own = slice(h * ranks, (h + 1) * ranks)
            time -= heaviest[h] + heaviest2[h]
            again = norms(first[own], ranks, squarings)
            scale[h], total[h], heaviest[h] = again[0][0], again[1][0], again[2][0]
            again = norms(second[own], ranks, squarings)
            scale2[h], total2[h], heaviest2[h] = again[0][0], again[1][0], again[2][0]
            time += heaviest[h] + heaviest2[h]
        if time < best * (1 - 1e-9):
            best = time
            best_of[:] = pack_of
    return best_of, best


@kernel
def pick_pack(load: int, random: int, shape: Shape) -> int:
    """One of the packs of a load."""
    if shape.by_rank:
        wave = random // shape.rows % shape.waves
        return int((wave * shape.ranks + load) * shape.rows + random % shape.rows)
    return int(load * shape.rows + random % shape.rows)
