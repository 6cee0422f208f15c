"""Packs: the units of each pack of a step, and the loads that they add up to."""

from typing import NamedTuple

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernel import kernel


class Movable(NamedTuple):
    """The units: slots, first and second work, further limits, segments, and kind.

    `kind[u]` is 1 for a unit with second work, else 0.
    """

    size: IntArray
    cost: FloatArray
    second: FloatArray
    extra: FloatArray
    segments: IntArray
    kind: IntArray


class Room(NamedTuple):
    """What one pack may hold: slots, and an amount of each further limit."""

    capacity: int
    caps: FloatArray


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


class Packs(NamedTuple):
    """Of each pack: slots and limits in use, and its units as a linked list from `head` on.

    `first` and `second` are the two works of each load; `kinds` counts the units of kind 1 of each
    micro-batch.
    """

    of_unit: IntArray
    size: IntArray
    held: FloatArray
    number: IntArray
    head: IntArray
    after: IntArray
    before: IntArray
    kinds: IntArray
    first: FloatArray
    second: FloatArray


@kernel
def load_of(pack: int, shape: Shape) -> int:
    """The load that a pack belongs to: its micro-batch or its rank."""
    micro = pack // shape.rows
    return micro % shape.ranks if shape.by_rank else micro


@kernel
def packs_of(units: Movable, room: Room, shape: Shape, pack_of: IntArray) -> Packs:
    """The packs when each unit is in `pack_of`."""
    n, micros = pack_of.shape[0], shape.waves * shape.ranks
    count, loads = micros * shape.rows, shape.ranks if shape.by_rank else micros
    packs = Packs(
        np.full(n, -1, np.int64),
        np.zeros(count, np.int64),
        np.zeros((count, room.caps.shape[0])),
        np.zeros(count, np.int64),
        np.full(count, -1, np.int64),
        np.full(n, -1, np.int64),
        np.full(n, -1, np.int64),
        np.zeros(micros, np.int64),
        np.zeros(loads),
        np.zeros(loads),
    )
    for unit in range(n):
        add(unit, pack_of[unit], 1, units, shape, packs)
    return packs


@kernel
def add(unit: int, pack: int, sign: int, units: Movable, shape: Shape, packs: Packs) -> None:
    """Put the unit into the pack (sign 1), or take it out (-1)."""
    if sign == 1:
        packs.of_unit[unit] = pack
        packs.before[unit], packs.after[unit] = -1, packs.head[pack]
        if packs.head[pack] >= 0:
            packs.before[packs.head[pack]] = unit
        packs.head[pack] = unit
    else:
        before, after = packs.before[unit], packs.after[unit]
        if before >= 0:
            packs.after[before] = after
        else:
            packs.head[pack] = after
        if after >= 0:
            packs.before[after] = before
    packs.number[pack] += sign
    packs.size[pack] += sign * units.size[unit]
    for d in range(packs.held.shape[1]):
        packs.held[pack, d] += sign * units.extra[unit, d]
    packs.kinds[pack // shape.rows] += sign * units.kind[unit]
    load = load_of(pack, shape)
    packs.first[load] += sign * units.cost[unit]
    packs.second[load] += sign * units.second[unit]


@kernel
def move(unit: int, target: int, units: Movable, shape: Shape, packs: Packs) -> None:
    """Move the unit to another pack."""
    add(unit, packs.of_unit[unit], -1, units, shape, packs)
    add(unit, target, 1, units, shape, packs)


@kernel
def allowed(i: int, j: int, q: int, units: Movable, room: Room, shape: Shape, packs: Packs) -> bool:
    """Whether unit i may move to pack q, and unit j of that pack, unless -1, to i's."""
    p = packs.of_unit[i]
    larger = units.size[i] - (units.size[j] if j >= 0 else 0)
    if packs.size[q] + larger > room.capacity or packs.size[p] - larger > room.capacity:
        return False
    for d in range(room.caps.shape[0]):
        more = units.extra[i, d] - (units.extra[j, d] if j >= 0 else 0.0)
        if packs.held[q, d] + more > room.caps[d] or packs.held[p, d] - more > room.caps[d]:
            return False
    a, b = p // shape.rows, q // shape.rows
    if (
        shape.equal
        and a % shape.ranks != b % shape.ranks
        and (j < 0 or units.segments[i] != units.segments[j])
    ):
        return False
    if shape.special < 0:
        return True
    first = shape.special * shape.ranks  # micro-batches from here on hold no unit of kind 1
    mine, theirs = units.kind[i], units.kind[j] if j >= 0 else 0
    if (mine == 1 and b >= first) or (theirs == 1 and a >= first):
        return False
    left, joined = packs.kinds[a] - mine + theirs, packs.kinds[b] + mine - theirs
    return not ((a < first and left < 1) or (b < first and joined < 1))
