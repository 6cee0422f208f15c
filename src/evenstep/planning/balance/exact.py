"""The fastest packs of a few units, by a search of all assignments with a limit on its length.

For ranks that synchronise at every micro-batch; `exact_ranks` is for once per step.
"""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.balance.packs import Movable, Room, Shape
from evenstep.planning.kernel import kernel


@kernel
def is_first_empty(pack: int, number: IntArray, filled: IntArray, shape: Shape) -> bool:
    """Whether an empty pack is the one to try of those that are alike.

    Empty micro-batches of a wave are alike, and waves without units.
    """
    wave = pack // shape.ranks
    for other in range(wave if filled[wave] == 0 else 0):
        if filled[other] == 0:
            return False
    for other in range(wave * shape.ranks, pack):
        if number[other] == 0:
            return False
    return True


@kernel
def least(
    load: FloatArray, size: IntArray, smallest: int, total: float, room: Room, shape: Shape
) -> float:
    """A lower bound on the time, however the units that are left are assigned.

    What a full pack waits for the heaviest of its wave is lost.
    """
    ranks, waves = shape.ranks, shape.waves
    time, lost = 0.0, 0.0
    for wave in range(waves):
        heaviest = 0.0
        for pack in range(wave * ranks, (wave + 1) * ranks):
            heaviest = max(heaviest, load[pack])
        time += heaviest
        for pack in range(wave * ranks, (wave + 1) * ranks):
            if size[pack] + smallest > room.capacity:
                lost += heaviest - load[pack]
    return max(time, (total + lost) / ranks)


@kernel
def search_all(
    units: Movable, room: Room, shape: Shape, order: IntArray, best: float, goal: float, tries: int
) -> tuple[IntArray, bool]:
    """(the pack of each unit if a time below `best` is found, else empty; whether that is proved).

    Units come in `order`, most expensive first; micro-batches have one row. Ends at a time of
    `goal`, or after `tries` assignments of a unit.
    """
    n, packs = order.shape[0], shape.ranks * shape.waves
    size, number = np.zeros(packs, np.int64), np.zeros(packs, np.int64)
    held, load = np.zeros((packs, room.caps.shape[0])), np.zeros(packs)
    filled = np.zeros(shape.waves, np.int64)
    at = np.full(n + 1, -1, np.int64)  # the pack of each unit of the order
    smallest = np.full(n + 1, room.capacity + 1, np.int64)  # of this unit and those after it
    total = 0.0
    for depth in range(n - 1, -1, -1):
        smallest[depth] = min(smallest[depth + 1], units.size[order[depth]])
        total += units.cost[order[depth]]
    found = np.empty(0, np.int64)
    depth = 0
    for _ in range(tries):
        unit = order[depth]
        pack = at[depth]
        if pack >= 0:  # take the unit out of its last pack
            add_unit(unit, pack, -1, units, shape, size, number, held, load, filled)
        elif depth > 0 and alike(unit, order[depth - 1], units):
            pack = at[depth - 1] - 1  # of units that are alike, the later ones come later
        pack += 1
        while pack < packs and not can_hold(
            unit, pack, units, room, size, number, held, filled, shape
        ):
            pack += 1
        at[depth] = pack if pack < packs else -1
        if pack == packs:
            depth -= 1
            if depth < 0:
                return found, True
            continue
        add_unit(unit, pack, 1, units, shape, size, number, held, load, filled)
        bound = least(load, size, smallest[depth + 1], total, room, shape)
        if bound >= best * (1 - 1e-9):
            continue
        depth += 1
        at[depth] = -1
        if depth == n:
            best = bound
            found = np.empty(n, np.int64)
            for i in range(n):
                found[order[i]] = at[i]
            if best <= goal:
                return found, True
            depth -= 1
    return found, False


@kernel
def alike(a: int, b: int, units: Movable) -> bool:
    """Whether two units take and cost the same."""
    same = units.size[a] == units.size[b] and units.cost[a] == units.cost[b]
    for d in range(units.extra.shape[1]):
        same = same and units.extra[a, d] == units.extra[b, d]
    return bool(same)


@kernel
def can_hold(
    unit: int,
    pack: int,
    units: Movable,
    room: Room,
    size: IntArray,
    number: IntArray,
    held: FloatArray,
    filled: IntArray,
    shape: Shape,
) -> bool:
    """Whether the unit is worth a try in the pack: it fits, or is the first in it."""
    if number[pack] == 0:
        return is_first_empty(pack, number, filled, shape)
    if size[pack] + units.size[unit] > room.capacity:
        return False
    for d in range(room.caps.shape[0]):
        if held[pack, d] + units.extra[unit, d] > room.caps[d]:
            return False
    return True


@kernel
def add_unit(
    unit: int,
    pack: int,
    sign: int,
    units: Movable,
    shape: Shape,
    size: IntArray,
    number: IntArray,
    held: FloatArray,
    load: FloatArray,
    filled: IntArray,
) -> None:
    """Put the unit into the pack (sign 1), or take it out (-1)."""
    size[pack] += sign * units.size[unit]
    number[pack] += sign
    load[pack] += sign * units.cost[unit]
    for d in range(held.shape[1]):
        held[pack, d] += sign * units.extra[unit, d]
    filled[pack // shape.ranks] += sign
