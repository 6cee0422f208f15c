"""The most even ranks of a few units, by a search of all divisions with a limit on its length.

Where ranks synchronise once per step, it makes no difference which pack of its rank a unit is in.
So the search divides units between ranks, and checks that those of a rank fit into its packs. Inner
functions are compiled into the kernel, as in `improve`.
"""

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.planning.balance.packs import Movable, Room, Shape
from evenstep.planning.kernels import kernel

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
    ranks, packs, capacity, caps = shape.ranks, shape.waves, room.capacity, room.caps
    n, slots = order.shape[0], shape.waves * room.capacity
    size, cost, extra = units.size[order], units.cost[order], units.extra[order]
    taken = np.minimum(size, capacity)
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    by_size = place[np.argsort(-units.size, kind="mergesort")]
    rank_of, found = np.full(n, -1, np.int64), np.empty(0, np.int64)
    load, used = np.zeros(ranks), np.zeros(ranks, np.int64)
    turn = np.full(n + 1, -1, np.int64)  # of each unit: the rank tried, of `ranked`
    ranked = np.zeros((n + 1, ranks), np.int64)
    ranked[0] = np.arange(ranks)
    cost_left, size_left = np.zeros(n + 1), np.zeros(n + 1, np.int64)
    for at in range(n - 1, -1, -1):
        cost_left[at] = cost_left[at + 1] + cost[at]
        size_left[at] = size_left[at + 1] + taken[at]
    lightest = cost[n - 1]

    # The packs of the rank that `pack_rank` looks at.
    own, pack_of = np.empty(n, np.int64), np.empty(n, np.int64)
    filled, number = np.empty(packs, np.int64), np.empty(packs, np.int64)
    held = np.empty((packs, caps.shape[0]))

    def alike(a: int, b: int) -> bool:
        """Whether two units take and cost the same."""
        same = size[a] == size[b] and cost[a] == cost[b]
        for d in range(caps.shape[0]):
            same = same and extra[a, d] == extra[b, d]
        return bool(same)

    def has_room(most: float, after: int) -> bool:
        """Whether ranks can take the units from `after` on, each rank up to a load of `most`."""
        spare, free = 0.0, 0
        for rank in range(ranks):
            if load[rank] < most - lightest:
                spare += most - load[rank]
                free += slots - used[rank]
        return bool(spare >= cost_left[after] and free >= size_left[after])

    def shift(unit: int, pack: int, sign: int) -> None:
        """Put the unit into the pack (sign 1), or take it out (-1)."""
        filled[pack] += sign * size[unit]
        number[pack] += sign
        for d in range(caps.shape[0]):
            held[pack, d] += sign * extra[unit, d]

    def takes(unit: int, pack: int) -> bool:
        """Whether the pack keeps every limit when the unit joins it, or is empty."""
        if number[pack] == 0:
            return True
        if filled[pack] + size[unit] > capacity:
            return False
        for d in range(caps.shape[0]):
            if held[pack, d] + extra[unit, d] > caps[d]:
                return False
        return True

    def pack_rank(rank: int) -> tuple[bool, bool]:
        """(whether the units of the rank fit into its packs, `pack_of`; whether that is proved).

        All packings are searched, for a while. A unit over a limit needs an empty pack.
        """
        count = 0
        for unit in by_size:
            if rank_of[unit] == rank:
                own[count] = unit
                count += 1
        pack_of[:], filled[:], number[:], held[:] = -1, 0, 0, 0.0
        if count == 0:
            return True, True
        at = 0
        for _ in range(_TRIES):
            unit = own[at]
            pack = pack_of[unit]
            if pack >= 0:
                shift(unit, pack, -1)
                if number[pack] == 0:  # packs without units are alike
                    pack = packs
            pack += 1
            while pack < packs and not takes(unit, pack):
                pack += 1
            if pack >= packs:
                pack_of[unit] = -1
                at -= 1
                if at < 0:
                    return False, True
                continue
            pack_of[unit] = pack
            shift(unit, pack, 1)
            at += 1
            if at == count:
                return True, True
        return False, False

    unit, sure = 0, True
    for _ in range(tries):
        if rank_of[unit] >= 0:
            load[rank_of[unit]] -= cost[unit]
            used[rank_of[unit]] -= taken[unit]
            rank_of[unit] = -1
        turn[unit] += 1
        if turn[unit] == ranks:
            unit -= 1
            if unit < 0:
                return found, sure
            continue
        rank = ranked[unit, turn[unit]]
        most = best * (1 - 1e-9)
        if load[rank] + cost[unit] >= most:
            turn[unit] = ranks - 1  # the ranks after it are heavier
            continue
        if used[rank] == 0 and turn[unit] > 0 and used[ranked[unit, turn[unit] - 1]] == 0:
            continue  # ranks without units are alike
        if unit > 0 and alike(unit, unit - 1) and rank < rank_of[unit - 1]:
            continue  # of units that are alike, the later ones come later
        rank_of[unit] = rank
        load[rank] += cost[unit]
        used[rank] += taken[unit]
        if not has_room(most, unit + 1):
            continue
        fits, ended = pack_rank(rank)
        if not fits:
            sure = sure and ended
            continue
        unit += 1
        turn[unit] = -1
        if unit < n:
            ranked[unit] = np.argsort(load, kind="mergesort")
            continue
        best = load.max()
        found = np.empty(n, np.int64)
        for r in range(ranks):
            pack_rank(r)
            for u in range(n):
                if rank_of[u] == r:
                    found[order[u]] = pack_of[u] * ranks + r
        if best <= goal:
            return found, True
        unit -= 1
    return found, False


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
