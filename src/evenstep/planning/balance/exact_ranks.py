"""The most even ranks of a few units, by a search of all divisions with a limit on its length.

Where ranks synchronise once per step, it makes no difference which pack of its rank a unit is in.
So the search divides units between ranks, and checks that those of a rank fit into its packs.
"""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.balance.exact import alike
from evenstep.planning.balance.packs import Movable, Room, Shape
from evenstep.planning.kernel import kernel

_TRIES = 100  # assignments of a unit to a pack while one rank is packed


@kernel
def search_ranks(
    units: Movable, room: Room, shape: Shape, order: IntArray, best: float, goal: float, tries: int
) -> tuple[IntArray, bool]:
    """(the pack of each unit if a slowest rank below `best` is found, else empty; whether that is
    proved).

    Units come in `order`, most expensive first; micro-batches have one row. Ends at a slowest rank
    of `goal`, or after `tries` assignments of a unit. Ranks are tried lightest first.
    """
    n, ranks = order.shape[0], shape.ranks
    by_size = np.argsort(-units.size, kind="mergesort")
    rank_of, found = np.full(n, -1, np.int64), np.empty(0, np.int64)
    load, used = np.zeros(ranks), np.zeros(ranks, np.int64)
    turn = np.full(n + 1, -1, np.int64)  # of each unit of the order: the rank tried, of `ranked`
    ranked = np.zeros((n + 1, ranks), np.int64)
    ranked[0] = np.arange(ranks)
    cost_left, size_left = np.zeros(n + 1), np.zeros(n + 1, np.int64)
    for at in range(n - 1, -1, -1):
        cost_left[at] = cost_left[at + 1] + units.cost[order[at]]
        size_left[at] = size_left[at + 1] + min(units.size[order[at]], room.capacity)
    lightest = units.cost[order[n - 1]]
    depth, sure = 0, True
    for _ in range(tries):
        unit = order[depth]
        if rank_of[unit] >= 0:
            load[rank_of[unit]] -= units.cost[unit]
            used[rank_of[unit]] -= min(units.size[unit], room.capacity)
            rank_of[unit] = -1
        turn[depth] += 1
        if turn[depth] == ranks:
            depth -= 1
            if depth < 0:
                return found, sure
            continue
        rank = ranked[depth, turn[depth]]
        most = best * (1 - 1e-9)
        if load[rank] + units.cost[unit] >= most:
            turn[depth] = ranks - 1  # the ranks after it are heavier
            continue
        if used[rank] == 0 and turn[depth] > 0 and used[ranked[depth, turn[depth] - 1]] == 0:
            continue  # ranks without units are alike
        if depth > 0 and alike(unit, order[depth - 1], units):
            before = rank_of[order[depth - 1]]
            if rank < before:  # of units that are alike, the later ones come later
                continue
        rank_of[unit] = rank
        load[rank] += units.cost[unit]
        used[rank] += min(units.size[unit], room.capacity)
        spare, slots = left_over(load, used, most - lightest, most, shape.waves * room.capacity)
        if spare < cost_left[depth + 1] or slots < size_left[depth + 1]:
            continue
        fitted, ended = pack_rank(rank, rank_of, by_size, units, room, shape.waves)
        if fitted.shape[0] == 0:
            sure = sure and ended
            continue
        depth += 1
        turn[depth] = -1
        if depth < n:
            ranked[depth] = np.argsort(load, kind="mergesort")
            continue
        best = load.max()
        found = np.empty(n, np.int64)
        for r in range(ranks):
            fitted, _ = pack_rank(r, rank_of, by_size, units, room, shape.waves)
            for u in range(n):
                if rank_of[u] == r:
                    found[u] = fitted[u] * ranks + r
        if best <= goal:
            return found, True
        depth -= 1
    return found, False


@kernel
def left_over(
    load: FloatArray, used: IntArray, highest: float, most: float, slots: int
) -> tuple[float, int]:
    """(cost, slots) that ranks still take: those with a load below `highest`, each up to `most`."""
    cost, free = 0.0, 0
    for rank in range(load.shape[0]):
        if load[rank] < highest:
            cost += most - load[rank]
            free += slots - used[rank]
    return cost, free


@kernel
def pack_rank(
    rank: int, rank_of: IntArray, by_size: IntArray, units: Movable, room: Room, packs: int
) -> tuple[IntArray, bool]:
    """(the pack of each unit of the rank, empty if they do not fit; whether that is proved).

    All packings are searched, for a while. A unit over a limit needs an empty pack.
    """
    own = np.empty(by_size.shape[0], np.int64)
    n = 0
    for unit in by_size:
        if rank_of[unit] == rank:
            own[n] = unit
            n += 1
    pack_of = np.full(rank_of.shape[0], -1, np.int64)
    size, number = np.zeros(packs, np.int64), np.zeros(packs, np.int64)
    held = np.zeros((packs, room.caps.shape[0]))
    if n == 0:
        return pack_of, True
    depth = 0
    for _ in range(_TRIES):
        unit = own[depth]
        pack = pack_of[unit]
        if pack >= 0:
            shift(unit, pack, -1, units, size, number, held)
            if number[pack] == 0:  # packs without units are alike
                pack = packs
        pack += 1
        while pack < packs and not takes(unit, pack, units, room, size, number, held):
            pack += 1
        if pack >= packs:
            pack_of[unit] = -1
            depth -= 1
            if depth < 0:
                return np.empty(0, np.int64), True
            continue
        pack_of[unit] = pack
        shift(unit, pack, 1, units, size, number, held)
        depth += 1
        if depth == n:
            return pack_of, True
    return np.empty(0, np.int64), False


@kernel
def takes(
    unit: int,
    pack: int,
    units: Movable,
    room: Room,
    size: IntArray,
    number: IntArray,
    held: FloatArray,
) -> bool:
    """Whether the pack keeps every limit when the unit joins it, or is empty."""
    if number[pack] == 0:
        return True
    if size[pack] + units.size[unit] > room.capacity:
        return False
    for d in range(room.caps.shape[0]):
        if held[pack, d] + units.extra[unit, d] > room.caps[d]:
            return False
    return True


@kernel
def shift(
    unit: int,
    pack: int,
    sign: int,
    units: Movable,
    size: IntArray,
    number: IntArray,
    held: FloatArray,
) -> None:
    """Put the unit into the pack (sign 1), or take it out (-1)."""
    size[pack] += sign * units.size[unit]
    number[pack] += sign
    for d in range(held.shape[1]):
        held[pack, d] += sign * units.extra[unit, d]


def without_empty(address: IntArray, shape: Shape) -> IntArray:
    """The addresses with units moved to empty packs of their rank, which would cost a slot."""
    address = address.copy()
    for rank in range(shape.ranks):
        for empty in range(rank, shape.ranks * shape.waves, shape.ranks):
            own = np.flatnonzero(address % shape.ranks == rank)
            number = np.bincount(address[own], minlength=shape.ranks * shape.waves)
            if number[empty] == 0 and number.max(initial=0) > 1:
                address[own[address[own] == number.argmax()][-1]] = empty
    return address
