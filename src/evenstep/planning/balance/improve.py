"""Seeded exchanges of units between packs that lower the modelled time of a step.

A *load* is what a rank works between two synchronisations: a micro-batch if ranks synchronise at
every one, else all micro-batches of a rank. Loads of a *group* wait for each other: those of a
wave, or all. The time of a step is the sum over groups of the heaviest load.

The heaviest load has plateaus: exchanges that lower the second-heaviest load do not change it. So
exchanges lower the sum of the groups' p-norms instead. At first they may raise it a little
(threshold accepting). Everything is deterministic: the random numbers are our own, and powers and
roots are products and square roots alone.

The kernel is one function with inner ones, which numba compiles into it. As functions of their own
they would be called with every array in turn, which takes six times as long.
"""

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.planning.balance.packs import Movable, Room, Shape
from evenstep.planning.kernels import kernel

_MASK = 2**48 - 1


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
    """(a pack of each unit, modelled time of their works), from `pack_of` on; never slower.

    Each try takes a unit of the heaviest load of some group and the best exchange for it with some
    other pack. At first, the sum of norms may rise by a share `loose` of a group's norm. Stops at
    a time of `goal`.
    """
    size, extra, segments, kind = units.size, units.extra, units.segments, units.kind
    capacity, caps = room.capacity, room.caps
    ranks, rows, waves, by_rank = shape.ranks, shape.rows, shape.waves, shape.by_rank
    n, micros = pack_of.shape[0], waves * ranks
    count, loads = micros * rows, ranks if by_rank else micros
    groups = loads // ranks
    works = 2 if units.second.any() else 1
    work = np.empty((works, n))
    work[0] = units.cost
    if works == 2:
        work[1] = units.second

    # Of each pack: its units as a linked list from `head` on, their number, and what they take.
    of_unit, head = np.full(n, -1, np.int64), np.full(count, -1, np.int64)
    after, before = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    number, used = np.zeros(count, np.int64), np.zeros(count, np.int64)
    held = np.zeros((count, caps.shape[0]))
    kinds = np.zeros(micros, np.int64)  # units of kind 1 of each micro-batch

    # Of each work and load: the work, and its scaled power.
    load, powers = np.zeros((works, loads)), np.zeros((works, loads))
    # Of each work and group: the scale of its loads, its heaviest load, and the price of a power.
    # The powers of a group add up to S, and its norm is scale * S ** (1 / p). The price is the
    # norm's derivative by S. The norm is concave in S, so prices never promise more than an
    # exchange gains.
    scale, heaviest = np.ones((works, groups)), np.zeros((works, groups))
    top, price = np.zeros((works, groups), np.int64), np.zeros((works, groups))

    def power(ratio: float) -> float:
        """`ratio ** p` for p = `2 ** squarings`; a ratio over 1.9 counts as 1.9, to stay finite."""
        ratio = min(max(ratio, 0.0), 1.9)
        for _ in range(squarings):
            ratio = ratio * ratio
        return ratio

    def measure(group: int) -> None:
        """Compute the norms of one group again."""
        first, last = group * ranks, (group + 1) * ranks
        for k in range(works):
            most = first
            for at in range(first, last):
                if load[k, at] > load[k, most]:
                    most = at
            largest = load[k, most] if load[k, most] > 0 else 1.0
            total = 0.0
            for at in range(first, last):
                powers[k, at] = power(load[k, at] / largest)
                total += powers[k, at]
            root = total
            for _ in range(squarings):
                root = np.sqrt(root)
            scale[k, group], heaviest[k, group], top[k, group] = largest, load[k, most], most
            price[k, group] = largest * root / max(total, 1.0) / 2**squarings

    def count_unit(unit: int, pack: int, sign: int) -> None:
        """Add what a unit takes to its pack (sign 1), or subtract it (-1)."""
        number[pack] += sign
        used[pack] += sign * size[unit]
        for d in range(caps.shape[0]):
            held[pack, d] += sign * extra[unit, d]
        micro = pack // rows
        kinds[micro] += sign * kind[unit]
        for k in range(works):
            load[k, micro % ranks if by_rank else micro] += sign * work[k, unit]

    def put(unit: int, pack: int) -> None:
        """Put a unit into a pack."""
        of_unit[unit] = pack
        before[unit], after[unit] = -1, head[pack]
        if head[pack] >= 0:
            before[head[pack]] = unit
        head[pack] = unit
        count_unit(unit, pack, 1)

    def take(unit: int, pack: int) -> None:
        """Take a unit out of its pack."""
        left, right = before[unit], after[unit]
        if left >= 0:
            after[left] = right
        else:
            head[pack] = right
        if right >= 0:
            before[right] = left
        count_unit(unit, pack, -1)

    def allowed(i: int, j: int, p: int, q: int) -> bool:
        """Whether unit i of pack p may move to q, and unit j, unless -1, back."""
        larger = size[i] - (size[j] if j >= 0 else 0)
        if used[q] + larger > capacity or used[p] - larger > capacity:
            return False
        for d in range(caps.shape[0]):
            more = extra[i, d] - (extra[j, d] if j >= 0 else 0.0)
            if held[q, d] + more > caps[d] or held[p, d] - more > caps[d]:
                return False
        a, b = p // rows, q // rows
        other = a % ranks != b % ranks
        if shape.equal and other and (j < 0 or segments[i] != segments[j]):
            return False
        if shape.special < 0:
            return True
        first = shape.special * ranks  # micro-batches from here on hold no unit of kind 1
        mine, theirs = kind[i], kind[j] if j >= 0 else 0
        if (mine == 1 and b >= first) or (theirs == 1 and a >= first):
            return False
        left, joined = kinds[a] - mine + theirs, kinds[b] + mine - theirs
        return not ((a < first and left < 1) or (b < first and joined < 1))

    def pick_pack(one: int, random: int) -> int:
        """One of the packs of a load."""
        wave = random // rows % waves * ranks if by_rank else 0
        return int((wave + one) * rows + random % rows)

    def next_random(state: int) -> int:
        """The next state of the random numbers; the upper bits are the number."""
        return (state * 25214903917 + 11) & _MASK

    for unit in range(n):
        put(unit, pack_of[unit])
    for group in range(groups):
        measure(group)
    best, best_of = heaviest.sum(), pack_of.copy()
    typical = best / groups
    state, beyond = seed * 2 + 1, 1.0 + 5.0 * loose
    for attempt in range(tries):
        if best <= goal:
            break
        state = next_random(state)
        g = (state >> 17) % groups
        a = top[works - 1 if (state >> 16) & 1 else 0, g]
        state = next_random(state)
        b = (state >> 17) % loads
        if (state >> 40) & 1:
            b = g * ranks + b % ranks
        h = b // ranks
        state = next_random(state)
        p, q = pick_pack(a, state >> 17), pick_pack(b, state >> 22)
        if a == b or number[p] == 0:
            continue
        state = next_random(state)
        i = head[p]
        for _ in range((state >> 17) % number[p]):
            i = after[i]

        # The best exchange of unit i: with unit j of pack q, or alone (-1). No load may exceed the
        # heaviest of its group `beyond` times; with 1, i's own load must not rise. What would raise
        # a load far beyond the heaviest is left out before powers are computed.
        least, found, j = np.inf, -2, -1
        lowest = load[0, a] - beyond * scale[0, g] if beyond > 1.0 or works == 2 else 0.0
        highest = max(beyond, 1.02) * scale[0, h] - load[0, b]
        while True:
            given = work[0, i] - (work[0, j] if j >= 0 else 0.0)
            if lowest < given < highest:
                norms = 0.0
                for k in range(works):
                    given = work[k, i] - (work[k, j] if j >= 0 else 0.0)
                    less = power((load[k, a] - given) / scale[k, g])
                    more = power((load[k, b] + given) / scale[k, h])
                    norms += price[k, g] * less + price[k, h] * more
                if norms < least and allowed(i, j, p, q):
                    least, found = norms, j
            j = head[q] if j < 0 else after[j]
            if j < 0:
                break
        for k in range(works):
            least -= price[k, g] * powers[k, a] + price[k, h] * powers[k, b]
        most = loose * typical * (1.0 - attempt / tries) * ((state >> 20) % 1024) / 1024
        if found == -2 or least >= most - 1e-12 * typical:
            continue

        take(i, p)
        put(i, q)
        if found >= 0:
            take(found, q)
            put(found, p)
        measure(g)
        if h != g:
            measure(h)
        time = heaviest.sum()
        if time < best * (1 - 1e-9):
            best = time
            best_of[:] = of_unit
    return best_of, best
