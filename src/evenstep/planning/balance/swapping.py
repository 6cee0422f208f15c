"""Lower the heaviest part by swaps with lighter parts.

The heaviest part swaps one item for one, or two for two, with a lighter part, such that the two
parts come close to their mean. Items of no cost stand for empty places: a swap with one of them
moves an item. Where no swap lowers the heaviest part, random swaps between the other parts, which
keep them lighter, may make one possible.
"""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.balance.parts import Parts, exchange_items, gather_parts
from evenstep.planning.kernels import kernel

_PARTNERS = 16  # light parts tried for one swap before all others
_LOOKS = 64  # partners tried per part, on average
_PAIRS_UP_TO = 32  # items a part may have for two-against-two swaps
_LOWER = 1 - 1e-12  # what counts as lower
_RANDOM, _PRIME = 48271, 2**31 - 1  # a multiplicative generator


@kernel
def best_swap(heavy: FloatArray, light: FloatArray, gap: float) -> tuple[float, int, int]:
    """The swap that best halves `gap`: (distance from half, index in heavy, index in light).

    Both are costs, heaviest first, so two pointers find the best pair.
    """
    best, at, to = gap / 2, -1, -1
    j = 0
    for i in range(heavy.shape[0]):
        # The ideal partner is lighter than item i by half the gap.
        wanted = heavy[i] - gap / 2
        while j < light.shape[0] and light[j] > wanted:
            j += 1
        for k in (j - 1, j):
            if 0 <= k < light.shape[0]:
                off = abs(heavy[i] - light[k] - gap / 2)
                if off < best:
                    best, at, to = off, i, k
    return best, at, to


@kernel
def pair_sums(held: FloatArray) -> tuple[FloatArray, IntArray]:
    """(the cost of every pair of items of a part, heaviest first, and its name i * n + j)."""
    n = held.shape[0]
    sums = np.empty(n * (n - 1) // 2)
    names = np.empty(sums.shape[0], np.int64)
    k = 0
    for i in range(n):
        for j in range(i + 1, n):
            sums[k] = held[i] + held[j]
            names[k] = i * n + j
            k += 1
    order = np.argsort(-sums, kind="mergesort")
    return sums[order], names[order]


@kernel
def find_swap(parts: Parts, heavy: int, others: IntArray) -> tuple[int, int, int, int]:
    """The swap of two items that lowers part `heavy` most: (other part or -1, place of its own
    item, place of the other's, parts looked at).

    After some of `others`, the best swap so far is taken.
    """
    start, held, load = parts.start, parts.held, parts.load
    mine = held[start[heavy] : start[heavy + 1]]
    best, other, at, to, looked = load[heavy] * _LOWER, -1, -1, -1, 0
    for k in range(others.shape[0]):
        if k >= _PARTNERS and other >= 0:
            break
        light = others[k]
        mean = (load[heavy] + load[light]) / 2
        if light == heavy or mean >= best:  # at best, both parts reach their mean
            continue
        looked += 1
        theirs = held[start[light] : start[light + 1]]
        off, i, j = best_swap(mine, theirs, load[heavy] - load[light])
        if i >= 0 and mean + off < best:
            best, other, at, to = mean + off, light, start[heavy] + i, start[light] + j
    return other, at, to, looked


@kernel
def find_double_swap(
    parts: Parts, heavy: int, others: IntArray, looks: int
) -> tuple[int, IntArray, IntArray, int]:
    """A swap of two items for two that lowers part `heavy`: (other part or -1, places of its own
    items, places of the other's, effort).

    After an effort of about `looks` the search ends.
    """
    start, held, load = parts.start, parts.held, parts.load
    mine = held[start[heavy] : start[heavy + 1]]
    n, effort = mine.shape[0], 0
    none = np.empty(0, np.int64)
    if n > _PAIRS_UP_TO:
        return -1, none, none, 0
    sums, names = pair_sums(mine)
    for light in others:
        theirs = held[start[light] : start[light + 1]]
        m, gap = theirs.shape[0], load[heavy] - load[light]
        if light == heavy or gap <= 0 or m > _PAIRS_UP_TO:
            continue
        effort += 1 + m * m // 16
        other_sums, other_names = pair_sums(theirs)
        off, i, j = best_swap(sums, other_sums, gap)
        if i >= 0 and load[light] + gap / 2 + off < load[heavy] * _LOWER:
            at = start[heavy] + np.array([names[i] // n, names[i] % n])
            to = start[light] + np.array([other_names[j] // m, other_names[j] % m])
            return light, at, to, effort
        if effort >= looks:
            break
    return -1, none, none, effort


@kernel
def find_any_swap(
    parts: Parts, heavy: int, others: IntArray, looks: int
) -> tuple[int, IntArray, IntArray, int]:
    """A swap of one item for one, or else of two for two, as `find_double_swap` returns it."""
    other, i, j, looked = find_swap(parts, heavy, others)
    if other >= 0:
        return other, np.array([i]), np.array([j]), looked + 1
    other, at, to, effort = find_double_swap(parts, heavy, others, looks)
    return other, at, to, looked + effort + 1


@kernel
def random_swap(parts: Parts, heavy: int, state: int) -> tuple[int, int, int]:
    """Swap two items of parts other than `heavy`, if both parts stay lighter than it.

    (one part, the other, next state); the parts are -1 if no items were swapped.
    """
    start, held, load = parts.start, parts.held, parts.load
    state = state * _RANDOM % _PRIME
    one = state % load.shape[0]
    state = state * _RANDOM % _PRIME
    other = state % load.shape[0]
    if heavy in (one, other) or one == other:
        return -1, -1, state
    mine, theirs = start[one + 1] - start[one], start[other + 1] - start[other]
    if mine == 0 or theirs == 0:
        return -1, -1, state
    state = state * _RANDOM % _PRIME
    i = start[one] + state % mine
    state = state * _RANDOM % _PRIME
    j = start[other] + state % theirs
    difference, most = held[i] - held[j], load[heavy] * _LOWER
    if difference == 0 or load[one] - difference >= most or load[other] + difference >= most:
        return -1, -1, state
    exchange_items(parts, one, other, np.array([i]), np.array([j]))
    return one, other, state


@kernel
def swap_kernel(
    costs: FloatArray, part_of: IntArray, count: int, target: float, shakes: int
) -> IntArray:
    """The part of each item after swaps, until the heaviest of `count` parts is at most `target`.

    Costs are heaviest first. Parts keep their number of items. Where no swap lowers the heaviest
    part, random swaps between other parts are tried; `shakes` is the effort for them.
    """
    parts = gather_parts(costs, part_of, count)
    looks, state = _LOOKS * (count + _LOOKS), 1
    while looks > 0 and parts.load[parts.heaviest[0]] > target:
        heavy, other, stage = parts.heaviest[0], -1, 0
        while other < 0:
            others = parts.lightest[:_PARTNERS] if stage == 0 else parts.lightest
            if stage >= 2:
                if shakes <= 0:
                    break
                shakes -= 1
                a, b, state = random_swap(parts, heavy, state)
                if a < 0:
                    continue
                others = np.array([a, b])
            other, at, to, effort = find_any_swap(parts, heavy, others, looks)
            if stage < 2:
                looks -= effort
            else:
                shakes -= effort
            stage += 1
        if other < 0:
            break
        exchange_items(parts, heavy, other, at, to)
    found = np.empty(costs.shape[0], np.int64)
    for part in range(count):
        for i in range(parts.start[part], parts.start[part + 1]):
            found[parts.member[i]] = part
    return found
