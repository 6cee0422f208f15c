"""The fastest packs of a few units, by a search of all assignments with a limit on its length.

For ranks that synchronise at every micro-batch; `exact_ranks` is for once per step. Inner functions
are compiled into the kernel, as in `improve`.
"""

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.planning.balance.packs import Movable, Room, Shape
from evenstep.planning.kernels import kernel


@kernel
def search_all(
    units: Movable, room: Room, shape: Shape, order: IntArray, best: float, goal: float, tries: int
) -> tuple[IntArray, bool]:
    """(the pack of each unit if a time below `best` is found, else empty; whether that is proved).

    Units come in `order`, most expensive first; micro-batches have one row. Ends at a time of
    `goal`, or after `tries` assignments of a unit.
    """
    ranks, waves, capacity, caps = shape.ranks, shape.waves, room.capacity, room.caps
    n, packs = order.shape[0], ranks * waves
    size, cost, extra = units.size[order], units.cost[order], units.extra[order]
    used, number = np.zeros(packs, np.int64), np.zeros(packs, np.int64)
    held, load = np.zeros((packs, caps.shape[0])), np.zeros(packs)
    filled = np.zeros(waves, np.int64)  # units of each wave
    at = np.full(n + 1, -1, np.int64)  # the pack of each unit
    smallest = np.full(n + 1, capacity + 1, np.int64)  # of this unit and those after it
    total = 0.0
    for unit in range(n - 1, -1, -1):
        smallest[unit] = min(smallest[unit + 1], size[unit])
        total += cost[unit]

    def add(unit: int, pack: int, sign: int) -> None:
        """Put the unit into the pack (sign 1), or take it out (-1)."""
        used[pack] += sign * size[unit]
        number[pack] += sign
        load[pack] += sign * cost[unit]
        for d in range(caps.shape[0]):
            held[pack, d] += sign * extra[unit, d]
        filled[pack // ranks] += sign

    def alike(a: int, b: int) -> bool:
        """Whether two units take and cost the same."""
        same = size[a] == size[b] and cost[a] == cost[b]
        for d in range(caps.shape[0]):
            same = same and extra[a, d] == extra[b, d]
        return bool(same)

    def is_first_empty(pack: int) -> bool:
        """Whether an empty pack is the one to try of those that are alike.

        Empty micro-batches of a wave are alike, and waves without units.
        """
        wave = pack // ranks
        for other in range(wave if filled[wave] == 0 else 0):
            if filled[other] == 0:
                return False
        for other in range(wave * ranks, pack):
            if number[other] == 0:
                return False
        return True

    def can_hold(unit: int, pack: int) -> bool:
        """Whether the unit is worth a try in the pack: it fits, or is the first in it."""
        if number[pack] == 0:
            return is_first_empty(pack)
        if used[pack] + size[unit] > capacity:
            return False
        for d in range(caps.shape[0]):
            if held[pack, d] + extra[unit, d] > caps[d]:
                return False
        return True

    def least(unit: int) -> float:
        """A lower bound on the time, however the units from this one on are assigned.

        What a full pack waits for the heaviest of its wave is lost.
        """
        time, lost = 0.0, 0.0
        for wave in range(waves):
            heaviest = 0.0
            for pack in range(wave * ranks, (wave + 1) * ranks):
                heaviest = max(heaviest, load[pack])
            time += heaviest
            for pack in range(wave * ranks, (wave + 1) * ranks):
                if used[pack] + smallest[unit] > capacity:
                    lost += heaviest - load[pack]
        return max(time, (total + lost) / ranks)

    found = np.empty(0, np.int64)
    unit = 0
    for _ in range(tries):
        pack = at[unit]
        if pack >= 0:  # take the unit out of its last pack
            add(unit, pack, -1)
        elif unit > 0 and alike(unit, unit - 1):
            pack = at[unit - 1] - 1  # of units that are alike, the later ones come later
        pack += 1
        while pack < packs and not can_hold(unit, pack):
            pack += 1
        at[unit] = pack if pack < packs else -1
        if pack == packs:
            unit -= 1
            if unit < 0:
                return found, True
            continue
        add(unit, pack, 1)
        bound = least(unit + 1)
        if bound >= best * (1 - 1e-9):
            continue
        unit += 1
        at[unit] = -1
        if unit == n:
            best = bound
            found = np.empty(n, np.int64)
            found[order] = at[:n]
            if best <= goal:
                return found, True
            unit -= 1
    return found, False
