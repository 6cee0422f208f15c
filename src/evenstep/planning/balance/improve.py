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
    """Of each group: the scale of its loads, the sum of their scaled powers, the heaviest load."""

    scale: FloatArray
    total: FloatArray
    heaviest: FloatArray


@kernel
def power(ratio: float, squarings: int) -> float:
    """`ratio ** p` for p = `2 ** squarings`; a ratio over 1.9 counts as 1.9, to stay finite."""
    ratio = min(ratio, 1.9)
    for _ in range(squarings):
        ratio = ratio * ratio
    return ratio


@kernel
def root(value: float, squarings: int) -> float:
    """`value ** (1 / p)` for p = `2 ** squarings`."""
    value = max(value, 0.0)
    for _ in range(squarings):
        value = np.sqrt(value)
    return value


@kernel
def measure(group: int, load: FloatArray, ranks: int, squarings: int, norms: Norms) -> None:
    """Compute the norm of one group again."""
    first, last = group * ranks, (group + 1) * ranks
    heaviest = 0.0
    for at in range(first, last):
        heaviest = max(heaviest, load[at])
    scale = heaviest if heaviest > 0 else 1.0
    total = 0.0
    for at in range(first, last):
        total += power(load[at] / scale, squarings)
    norms.scale[group], norms.total[group], norms.heaviest[group] = scale, total, heaviest


@kernel
def measure_all(load: FloatArray, ranks: int, squarings: int) -> Norms:
    """The norms of all groups."""
    groups = load.shape[0] // ranks
    norms = Norms(np.ones(groups), np.zeros(groups), np.zeros(groups))
    for group in range(groups):
        measure(group, load, ranks, squarings, norms)
    return norms


@kernel
def change(
    load: FloatArray, a: int, b: int, given: float, ranks: int, squarings: int, norms: Norms
) -> float:
    """How the sum of norms changes when load a gives this much to load b."""
    g, h = a // ranks, b // ranks
    less = power(max(load[a] - given, 0.0) / norms.scale[g], squarings)
    less -= power(load[a] / norms.scale[g], squarings)
    more = power(max(load[b] + given, 0.0) / norms.scale[h], squarings)
    more -= power(load[b] / norms.scale[h], squarings)
    if g == h:
        less, more = less + more, 0.0
    gained = root(norms.total[g] + less, squarings) - root(norms.total[g], squarings)
    raised = root(norms.total[h] + more, squarings) - root(norms.total[h], squarings)
    if g == h:
        raised = 0.0
    return float(norms.scale[g] * gained + norms.scale[h] * raised)


@kernel
def best_partner(
    i: int,
    q: int,
    units: Movable,
    room: Room,
    shape: Shape,
    packs: Packs,
    squarings: int,
    raising: bool,
    one: Norms,
    two: Norms,
) -> tuple[float, int]:
    """(change of the sum of norms, unit of pack q to exchange unit i with).

    The unit is -1 if i moves alone, -2 if nothing is allowed. Unless `raising`, exchanges that do
    not lower i's load are left out.
    """
    p = packs.of_unit[i]
    a, b = load_of(p, shape), load_of(q, shape)
    both = two.heaviest.shape[0] > 0
    least, found, j = np.inf, -2, -1
    while True:
        given = units.cost[i] - (units.cost[j] if j >= 0 else 0.0)
        also = units.second[i] - (units.second[j] if j >= 0 else 0.0)
        if (given > 0 or (both and also > 0) or raising) and allowed(
            i, j, q, units, room, shape, packs
        ):
            gained = change(packs.first, a, b, given, shape.ranks, squarings, one)
            if both:
                gained += change(packs.second, a, b, also, shape.ranks, squarings, two)
            if gained < least:
                least, found = gained, j
        j = packs.head[q] if j < 0 else packs.after[j]
        if j < 0:
            return least, found


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
        two = Norms(np.zeros(0), np.zeros(0), np.zeros(0))
    both = two.heaviest.shape[0] > 0
    typical = (one.heaviest.sum() + two.heaviest.sum()) / groups
    best, best_of = one.heaviest.sum() + two.heaviest.sum(), pack_of.copy()
    state = seed * 2 + 1
    for attempt in range(tries):
        if best <= goal:
            break
        state = next_random(state)
        group = (state >> 17) % groups
        chosen = packs.second if both and (state >> 16) & 1 else packs.first
        a = group * ranks
        for at in range(group * ranks + 1, (group + 1) * ranks):
            if chosen[at] > chosen[a]:
                a = at
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
        least, j = best_partner(i, q, units, room, shape, packs, squarings, loose > 0, one, two)
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
