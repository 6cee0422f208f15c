"""Seeded exchanges of units between packs that lower the modelled time of a step.

A *load* is what a rank works between two synchronisations: a micro-batch if ranks synchronise at
every one, else all micro-batches of a rank. Loads of a *group* wait for each other: those of a
wave, or all. The time of a step is the sum over groups of the heaviest load.

The heaviest load has plateaus: exchanges that lower the second-heaviest load do not change it. So
exchanges lower the sum of the groups' p-norms instead. At first they may raise it a little
(threshold accepting). Everything is deterministic: the random numbers are our own, and powers and
roots are products and square roots alone.
"""

from typing import NamedTuple

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.balance.packs import (
    Movable,
    Packs,
    Room,
    Shape,
    allowed,
    load_of,
    move,
    packs_of,
)
from evenstep.planning.kernel import kernel

_MASK = 2**48 - 1


class Norms(NamedTuple):
    """Of each group: the scale of its loads, its heaviest load, and the price of a power.

    The scaled powers of a group's loads add up to S, and its norm is scale * S ** (1 / p). The
    price is the norm's derivative by S. The norm is concave in S, so prices never promise more than
    an exchange gains.
    """

    scale: FloatArray
    heaviest: FloatArray
    at: IntArray
    price: FloatArray


@kernel
def power(ratio: float, squarings: int) -> float:
    """`ratio ** p` for p = `2 ** squarings`; a ratio over 1.9 counts as 1.9, to stay finite."""
    ratio = min(max(ratio, 0.0), 1.9)
    for _ in range(squarings):
        ratio = ratio * ratio
    return ratio


@kernel
def measure(group: int, load: FloatArray, ranks: int, squarings: int, norms: Norms) -> None:
    """Compute the norm of one group again."""
    first, last = group * ranks, (group + 1) * ranks
    top = first
    for at in range(first, last):
        if load[at] > load[top]:
            top = at
    scale = load[top] if load[top] > 0 else 1.0
    total = 0.0
    for at in range(first, last):
        total += power(load[at] / scale, squarings)
    root = total
    for _ in range(squarings):
        root = np.sqrt(root)
    norms.scale[group], norms.heaviest[group], norms.at[group] = scale, load[top], top
    norms.price[group] = scale * root / max(total, 1.0) / 2**squarings


@kernel
def measure_all(load: FloatArray, ranks: int, squarings: int) -> Norms:
    """The norms of all groups."""
    groups = load.shape[0] // ranks
    norms = Norms(np.ones(groups), np.zeros(groups), np.zeros(groups, np.int64), np.zeros(groups))
    for group in range(groups):
        measure(group, load, ranks, squarings, norms)
    return norms


@kernel
def best_partner(
    i: int,
    q: int,
    units: Movable,
    room: Room,
    shape: Shape,
    packs: Packs,
    squarings: int,
    beyond: float,
    one: Norms,
    two: Norms,
) -> tuple[float, int]:
    """(change of the sum of norms by prices, unit of pack q to exchange unit i with).

    The unit is -1 if i moves alone, -2 if nothing is allowed. No load may exceed the
    heaviest of its group `beyond` times; with 1, i's own load must not rise.
    """
    a, b = load_of(packs.of_unit[i], shape), load_of(q, shape)
    g, h = a // shape.ranks, b // shape.ranks
    both = two.heaviest.shape[0] > 0
    least, found, j = np.inf, -2, -1
    # What would raise a load far beyond the heaviest is left out before powers are computed.
    lowest = packs.first[a] - beyond * one.scale[g] if beyond > 1.0 or both else 0.0
    highest = max(beyond, 1.02) * one.scale[h] - packs.first[b]
    while True:
        given = units.cost[i] - (units.cost[j] if j >= 0 else 0.0)
        also = units.second[i] - (units.second[j] if j >= 0 else 0.0)
        if lowest < given < highest:
            less = power((packs.first[a] - given) / one.scale[g], squarings)
            more = power((packs.first[b] + given) / one.scale[h], squarings)
            gained = one.price[g] * less + one.price[h] * more
            if both:
                less = power((packs.second[a] - also) / two.scale[g], squarings)
                more = power((packs.second[b] + also) / two.scale[h], squarings)
                gained += two.price[g] * less + two.price[h] * more
            if gained < least and allowed(i, j, q, units, room, shape, packs):
                least, found = gained, j
        j = packs.head[q] if j < 0 else packs.after[j]
        if j < 0:
            break
    before = one.price[g] * power(packs.first[a] / one.scale[g], squarings)
    before += one.price[h] * power(packs.first[b] / one.scale[h], squarings)
    if both:
        before += two.price[g] * power(packs.second[a] / two.scale[g], squarings)
        before += two.price[h] * power(packs.second[b] / two.scale[h], squarings)
    return least - before, found


@kernel
def pick_pack(load: int, random: int, shape: Shape) -> int:
    """One of the packs of a load."""
    if shape.by_rank:
        wave = random // shape.rows % shape.waves
        return int((wave * shape.ranks + load) * shape.rows + random % shape.rows)
    return int(load * shape.rows + random % shape.rows)


@kernel
def next_random(state: int) -> int:
    """The next state of the random numbers; the upper bits are the number."""
    return (state * 25214903917 + 11) & _MASK


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
    ranks = shape.ranks
    packs = packs_of(units, room, shape, pack_of)
    loads = packs.first.shape[0]
    groups = loads // ranks
    one = measure_all(packs.first, ranks, squarings)
    two = measure_all(packs.second, ranks, squarings)
    if packs.second.max() == 0:
        two = Norms(np.zeros(0), np.zeros(0), np.zeros(0, np.int64), np.zeros(0))
    both = two.heaviest.shape[0] > 0
    typical = (one.heaviest.sum() + two.heaviest.sum()) / groups
    best, best_of = one.heaviest.sum() + two.heaviest.sum(), pack_of.copy()
    state, beyond = seed * 2 + 1, 1.0 + 5.0 * loose
    for attempt in range(tries):
        if best <= goal:
            break
        state = next_random(state)
        group = (state >> 17) % groups
        a = two.at[group] if both and (state >> 16) & 1 else one.at[group]
        state = next_random(state)
        b = (state >> 17) % loads
        if (state >> 40) & 1:
            b = group * ranks + b % ranks
        state = next_random(state)
        p, q = pick_pack(a, state >> 17, shape), pick_pack(b, state >> 22, shape)
        if a == b or packs.number[p] == 0:
            continue
        state = next_random(state)
        i = packs.head[p]
        for _ in range((state >> 17) % packs.number[p]):
            i = packs.after[i]
        least, j = best_partner(i, q, units, room, shape, packs, squarings, beyond, one, two)
        most = loose * typical * (1.0 - attempt / tries) * ((state >> 20) % 1024) / 1024
        if j == -2 or least >= most - 1e-12 * typical:
            continue
        move(i, q, units, shape, packs)
        if j >= 0:
            move(j, p, units, shape, packs)
        for g in (a // ranks, b // ranks):
            measure(g, packs.first, ranks, squarings, one)
            if both:
                measure(g, packs.second, ranks, squarings, two)
        time = one.heaviest.sum() + two.heaviest.sum()
        if time < best * (1 - 1e-9):
            best = time
            best_of[:] = packs.of_unit
    return best_of, best
