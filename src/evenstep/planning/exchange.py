"""Exchanges of units between packs, and the fastest packs of a few units.

Both ask one question: what does a pack cost with one unit in or out? A pack of a packed layout
costs the sum of its units and holds `most` slots. A pack of padded rows costs its rows at the price
of the widest and holds as many rows as fit at that width; units are numbered from narrow to wide,
so the widest is the last.

    packed   size [5, 3] slots, cost [50, 30]   -> 80 together
    padded   size [1, 2] rows, cost [3, 5] each -> 3 rows at 5: 15 together

A *load* is what a rank works between two synchronisations: a micro-batch if ranks synchronise at
every one, else all micro-batches of a rank. Loads of a *group* wait for each other: those of a
wave, or all. The time of a step is the sum over groups of the heaviest load.
"""

from typing import NamedTuple

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernels import kernel

_MASK = 2**48 - 1


class Shape(NamedTuple):
    """The packs of a step: `waves` waves of `ranks` micro-batches of `rows` packs.

    Pack `(wave * ranks + rank) * rows + row`. With `by_rank`, ranks synchronise once per step. With
    `equal`, ranks keep their number of segments. The first `special` waves hold the units with
    second work, at least one in each micro-batch; -1 if they may be anywhere. `padded` packs cost
    their rows at the price of the widest, and `empty` without a row; exchanges leave none empty.
    """

    ranks: int
    rows: int
    waves: int
    by_rank: bool
    equal: bool
    special: int
    padded: bool
    empty: float


@kernel
def exchange(
    size: IntArray,
    cost: FloatArray,
    second: FloatArray,
    segments: IntArray,
    extra: FloatArray,
    most: IntArray,
    caps: FloatArray,
    shape: Shape,
    pack_of: IntArray,
    tries: int,
    squarings: int,
    loose: float,
    goal: float,
    seed: int,
) -> tuple[IntArray, float]:
    """(a pack of each unit, modelled time of their works), from `pack_of` on; never slower.

    A pack with unit u as its widest holds `most[u]`; of a packed layout, all entries are alike.
    Each try takes a unit of the heaviest load of some group and the best exchange for it with some
    other pack. The heaviest load has plateaus: exchanges that lower the second-heaviest do not
    change it. So exchanges lower the sum of the groups' p-norms, p = 2 ** `squarings`. At first
    that sum may rise by a share `loose` of a group's norm (threshold accepting). Stops at a time of
    `goal`. Deterministic: the random numbers are our own, and powers and roots are products and
    square roots alone.

    Inner functions are compiled into the kernel. As kernels of their own they would be called with
    every array in turn, which takes six times as long.
    """
    padded, empty = shape.padded, shape.empty
    ranks, rows, waves, by_rank = shape.ranks, shape.rows, shape.waves, shape.by_rank
    n, micros = pack_of.shape[0], waves * ranks
    count, loads = micros * rows, ranks if by_rank else micros
    groups = loads // ranks
    works = 2 if second.any() else 1
    work = np.empty((works, n))
    work[0] = cost
    if works == 2:
        work[1] = second

    # Of each pack: its units as a linked list from `head` on, their number, and what they take.
    of_unit, head = np.full(n, -1, np.int64), np.full(count, -1, np.int64)
    after, before = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    number, used = np.zeros(count, np.int64), np.zeros(count, np.int64)
    held = np.zeros((count, caps.shape[0]))
    seconds = np.zeros(micros, np.int64)  # units with second work of each micro-batch
    # Of each padded pack: its widest unit, the next one (-1: none), and its cost.
    wide, wide_next = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    paid = np.full(count, empty)

    # Of each work and load: the work, and its scaled power.
    load, powers = np.zeros((works, loads)), np.zeros((works, loads))
    # Of each work and group: the scale of its loads, its heaviest load, and the price of a power.
    # The powers of a group add up to S, and its norm is scale * S ** (1 / p). The price is the
    # norm's derivative by S. The norm is concave in S, so prices never promise more than an
    # exchange gains.
    scale, heaviest = np.ones((works, groups)), np.zeros((works, groups))
    top, price = np.zeros((works, groups), np.int64), np.zeros((works, groups))

    def power(ratio: float) -> float:
        """`ratio ** p`; a ratio over 1.9 counts as 1.9, to stay finite."""
        ratio = min(max(ratio, 0.0), 1.9)
        for _ in range(squarings):
            ratio = ratio * ratio
        return ratio

    def load_of(pack: int) -> int:
        """The load that a pack belongs to."""
        micro = pack // rows
        return int(micro % ranks if by_rank else micro)

    def measure(group: int) -> None:
        """Compute the norms of one group again."""
        first, last = group * ranks, (group + 1) * ranks
        for k in range(works):
            peak = first
            for at in range(first, last):
                if load[k, at] > load[k, peak]:
                    peak = at
            largest = load[k, peak] if load[k, peak] > 0 else 1.0
            total = 0.0
            for at in range(first, last):
                powers[k, at] = power(load[k, at] / largest)
                total += powers[k, at]
            root = total
            for _ in range(squarings):
                root = np.sqrt(root)
            scale[k, group], heaviest[k, group], top[k, group] = largest, load[k, peak], peak
            price[k, group] = largest * root / max(total, 1.0) / 2**squarings

    def reprice(pack: int) -> None:
        """Find the two widest units of a padded pack, and its cost."""
        one, two = -1, -1
        unit = head[pack]
        while unit >= 0:
            one, two = (unit, one) if unit > one else (one, max(two, unit))
            unit = after[unit]
        wide[pack], wide_next[pack] = one, two
        now = used[pack] * cost[one] if one >= 0 else empty
        load[0, load_of(pack)] += now - paid[pack]
        paid[pack] = now

    def count_unit(unit: int, pack: int, sign: int) -> None:
        """Add what a unit takes to its pack (sign 1), or subtract it (-1)."""
        number[pack] += sign
        used[pack] += sign * size[unit]
        for d in range(caps.shape[0]):
            held[pack, d] += sign * extra[unit, d]
        seconds[pack // rows] += sign * (second[unit] > 0)
        if padded:
            reprice(pack)
            return
        for k in range(works):
            load[k, load_of(pack)] += sign * work[k, unit]

    def widest(pack: int, out: int, joining: int) -> int:
        """The widest unit of a padded pack when one leaves and another joins (-1: none)."""
        left = wide_next[pack] if wide[pack] == out else wide[pack]
        return int(max(left, joining))

    def price_of(pack: int, out: int, joining: int) -> float:
        """The cost of a padded pack when one unit leaves and another joins (-1: none)."""
        unit = widest(pack, out, joining)
        rows_now = used[pack] - (size[out] if out >= 0 else 0)
        rows_now += size[joining] if joining >= 0 else 0
        return float(rows_now * cost[unit]) if unit >= 0 else empty

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
        holds_p, holds_q = most[0], most[0]
        if padded:
            if number[p] == 1 and j < 0:
                return False  # the pack would be empty
            one, two = widest(p, i, j), widest(q, j, i)
            holds_p, holds_q = most[one], most[two]
        if used[q] + larger > holds_q or used[p] - larger > holds_p:
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
        first = shape.special * ranks  # micro-batches from here on hold no second work
        mine, theirs = int(second[i] > 0), int(j >= 0 and second[j] > 0)
        if (mine == 1 and b >= first) or (theirs == 1 and a >= first):
            return False
        left, joined = seconds[a] - mine + theirs, seconds[b] + mine - theirs
        return not ((a < first and left < 1) or (b < first and joined < 1))

    def pick_pack(one: int, random: int) -> int:
        """One of the packs of a load."""
        wave = random // rows % waves * ranks if by_rank else 0
        return int((wave + one) * rows + random % rows)

    def next_random(state: int) -> int:
        """The next state of the random numbers; the upper bits are the number."""
        return (state * 25214903917 + 11) & _MASK

    if padded:
        for pack in range(count):
            load[0, load_of(pack)] += empty
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
        # Draw a group, its heaviest load or another one, and a pack p of it; then a pack q.
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
        if p == q or (a == b and not padded) or number[p] == 0:
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
            if padded:
                given = paid[p] - price_of(p, i, j)
                taken = price_of(q, j, i) - paid[q]
                given, taken = (given - taken, 0.0) if a == b else (given, taken)
            else:
                given = work[0, i] - (work[0, j] if j >= 0 else 0.0)
                taken = given
            if lowest < given and taken < highest:
                norms = 0.0
                for k in range(works):
                    if k == 1:
                        given = work[k, i] - (work[k, j] if j >= 0 else 0.0)
                        taken = given
                    less = power((load[k, a] - given) / scale[k, g])
                    more = power((load[k, b] + taken) / scale[k, h]) if a != b else powers[k, a]
                    norms += price[k, g] * less + price[k, h] * more
                if norms < least and allowed(i, j, p, q):
                    least, found = norms, j
            j = head[q] if j < 0 else after[j]
            if j < 0:
                break
        for k in range(works):
            least -= price[k, g] * powers[k, a] + price[k, h] * powers[k, b]
        rise = loose * typical * (1.0 - attempt / tries) * ((state >> 20) % 1024) / 1024
        if found == -2 or least >= rise - 1e-12 * typical:
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


@kernel
def search_all(
    size: IntArray,
    cost: FloatArray,
    extra: FloatArray,
    most: IntArray,
    caps: FloatArray,
    shape: Shape,
    order: IntArray,
    best: float,
    goal: float,
    tries: int,
) -> tuple[IntArray, bool]:
    """(the pack of each unit if a time below `best` is found, else empty; whether that is proved).

    Micro-batches have one pack. Units come in `order`: most expensive first, padded ones widest
    first, so that the first unit of a pack is its widest. Ends at a time of `goal`, or after
    `tries` assignments of a unit.
    """
    ranks, waves, padded = shape.ranks, shape.waves, shape.padded
    n, packs = order.shape[0], shape.ranks * shape.waves
    used, number = np.zeros(packs, np.int64), np.zeros(packs, np.int64)
    held, load = np.zeros((packs, caps.shape[0])), np.zeros(packs)
    first = np.full(packs, -1, np.int64)  # the first unit of each pack
    at = np.full(n + 1, -1, np.int64)  # the pack of each unit, by its place in `order`
    # Of the units from each place on: the smallest, and what they cost at least.
    smallest, rest = np.full(n + 1, 2**62, np.int64), np.zeros(n + 1)
    for place in range(n - 1, -1, -1):
        unit = order[place]
        smallest[place] = min(smallest[place + 1], size[unit])
        rest[place] = rest[place + 1] + cost[unit] * (size[unit] if padded else 1)

    def add(unit: int, pack: int, sign: int) -> None:
        """Put the unit into the pack (sign 1), or take it out (-1)."""
        if number[pack] == 0:
            first[pack] = unit
        used[pack] += sign * size[unit]
        number[pack] += sign
        load[pack] += sign * (cost[first[pack]] * size[unit] if padded else cost[unit])
        for d in range(caps.shape[0]):
            held[pack, d] += sign * extra[unit, d]

    def alike(one: int, other: int) -> bool:
        """Whether two units take and cost the same."""
        same = size[one] == size[other] and cost[one] == cost[other]
        for d in range(caps.shape[0]):
            same = same and extra[one, d] == extra[other, d]
        return bool(same)

    def has_units(start: int, step: int) -> bool:
        """Whether a wave (from its first pack on, by 1) or a rank (by `ranks`) has a unit."""
        for k in range(ranks if step == 1 else waves):
            if number[start + k * step] > 0:
                return True
        return False

    def is_first_empty(pack: int) -> bool:
        """Whether an empty pack is the one to try of those that are alike.

        Empty packs of a wave are alike and waves without units, or packs of a rank and ranks.
        """
        wave, rank = pack // ranks, pack % ranks
        if shape.by_rank:
            for other in range(rank if not has_units(rank, ranks) else 0):
                if not has_units(other, ranks):
                    return False
            return wave == 0 or number[pack - ranks] > 0
        for other in range(wave if not has_units(wave * ranks, 1) else 0):
            if not has_units(other * ranks, 1):
                return False
        return rank == 0 or number[pack - 1] > 0

    def can_hold(unit: int, pack: int) -> bool:
        """Whether the unit is worth a try in the pack: it fits, or is the first in it."""
        if number[pack] == 0:
            return is_first_empty(pack)
        if used[pack] + size[unit] > most[first[pack]]:
            return False
        for d in range(caps.shape[0]):
            if held[pack, d] + extra[unit, d] > caps[d]:
                return False
        return True

    def least(place: int) -> float:
        """A lower bound on the time, however the units from this place on are assigned.

        The mean of all work is one; what a full pack waits for the heaviest of its wave is lost.
        """
        time, lost, total = 0.0, 0.0, rest[place]
        if shape.by_rank:
            for rank in range(ranks):
                own = 0.0
                for pack in range(rank, packs, ranks):
                    own += load[pack]
                time = max(time, own)
                total += own
            return float(max(time, total / ranks))
        for wave in range(waves):
            peak = 0.0
            for pack in range(wave * ranks, (wave + 1) * ranks):
                peak = max(peak, load[pack])
                total += load[pack]
            time += peak
            for pack in range(wave * ranks, (wave + 1) * ranks):
                if number[pack] > 0 and used[pack] + smallest[place] > most[first[pack]]:
                    lost += peak - load[pack]
        return float(max(time, (total + lost) / ranks))

    found = np.empty(0, np.int64)
    place = 0
    for _ in range(tries):
        unit, pack = order[place], at[place]
        if pack >= 0:  # take the unit out of its last pack
            add(unit, pack, -1)
        elif place > 0 and alike(unit, order[place - 1]):
            pack = at[place - 1] - 1  # of units that are alike, the later ones come later
        pack += 1
        while pack < packs and not can_hold(unit, pack):
            pack += 1
        at[place] = pack if pack < packs else -1
        if pack == packs:
            place -= 1
            if place < 0:
                return found, True
            continue
        add(unit, pack, 1)
        bound = least(place + 1)
        if bound >= best * (1 - 1e-9):
            continue
        place += 1
        at[place] = -1
        if place == n:
            best = bound
            found = np.empty(n, np.int64)
            found[order] = at[:n]
            if best <= goal:
                return found, True
            place -= 1
    return found, False


@kernel
def fill_empty(pack_of: IntArray, cost: FloatArray, shape: Shape, same_rank: bool) -> IntArray:
    """The packs with the cheapest unit of the fullest pack in every empty one.

    The fullest pack is one of the same rank, or of the same wave. Packs of one unit keep it.

        packs of rank 0 in two waves hold [3, 1] and nothing -> [3] and [1]
    """
    ranks, waves, packed = shape.ranks, shape.waves, pack_of.copy()
    number = np.bincount(pack_of, minlength=ranks * waves)
    start = np.cumsum(number) - number
    members = np.argsort(pack_of, kind="mergesort")  # of pack p from start[p] on
    for empty in np.flatnonzero(number == 0):
        first, step, count = empty // ranks * ranks, 1, ranks
        if same_rank:
            first, step, count = empty % ranks, ranks, waves
        fullest = int(first)
        for pack in range(first, first + count * step, step):
            fullest = pack if number[pack] > number[fullest] else fullest
        if number[fullest] > 1:
            at = start[fullest]
            for other in range(at, start[fullest] + number[fullest]):
                at = other if cost[members[other]] < cost[members[at]] else at
            packed[members[at]] = empty
            number[fullest], number[empty] = number[fullest] - 1, 1
            for other in range(at, start[fullest] + number[fullest]):
                members[other] = members[other + 1]
    return packed
