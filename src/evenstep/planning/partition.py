"""Divide items of known cost between parts (ranks) such that the heaviest part is light.

stride          sorted, then dealt round-robin, as in NeMo-RL and ROLL
lpt             heaviest first, each to the lightest part
karmarkar_karp  largest differencing: combine the two least even partial partitions
refined         lpt, then swaps that lower the heaviest part (the default)

`deal_packs` deals the packs of a step to ranks and waves by one of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.bounds import makespans
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.text import MOST_RANKS, truth_value, whole_number
from evenstep.errors import ConfigError, InputError
from evenstep.planning.kernels import kernel, sink

Deal: TypeAlias = Callable[[FloatArray, int, bool], IntArray]

_CLOSE = 1e-4  # a heaviest part this close to its bound is accepted
_TABLE = 2**17  # items x parts up to which largest differencing is tried: some milliseconds
_SHAKEN = 4096  # items up to which random swaps are tried
_SHAKES = 30_000  # effort for random swaps: up to a millisecond
_PARTNERS = 16  # light parts tried for one swap before all others
_LOOKS = 128  # partners tried per part, on average
_FRESH = 32  # swaps after which parts are sorted by load again
_LOWER = 1 - 1e-12  # what counts as lower
_RANDOM, _PRIME = 48271, 2**31 - 1  # a multiplicative generator
_SWAPS = 200  # of packs between ranks, in one step


def partition(
    costs: ArrayLike, parts: int, algorithm: str = "refined", *, equal_sizes: bool = False
) -> IntArray:
    """The part of each item. With `equal_sizes`, parts differ by one item at most.

    >>> partition([5, 4, 3, 3, 3], 2).tolist()
    [0, 0, 1, 1, 1]
    """
    if algorithm not in DEALS:
        raise ConfigError(f"unknown balance {algorithm!r}; expected one of: {', '.join(DEALS)}.")
    parts = whole_number("parts", parts, most=MOST_RANKS)
    equal_sizes = truth_value("equal_sizes", equal_sizes)
    try:
        items = np.ascontiguousarray(costs, np.float64)
    except (TypeError, ValueError):
        items = np.full(1, np.nan)  # refused below
    if items.ndim != 1 or not np.isfinite(items).all() or (items < 0).any():
        raise InputError("costs must be a flat sequence of finite numbers of 0 or more.")
    if len(items) == 0:
        return np.empty(0, np.int64)
    order = np.argsort(items if algorithm == "stride" else -items, kind="stable")
    part_of = np.empty(len(items), np.int64)
    part_of[order] = DEALS[algorithm](items[order], parts, equal_sizes)
    return part_of


# Each deal gets costs heaviest first (stride: lightest first) and gives the part of each.


def stride(costs: FloatArray, parts: int, equal_sizes: bool) -> IntArray:
    """Round-robin: item i goes to part i mod parts.

    >>> partition([7, 6, 8, 5, 1, 3, 8, 6], 2, "stride").tolist()
    [1, 1, 0, 0, 0, 1, 1, 0]
    """
    return np.arange(len(costs)) % parts


def lpt(costs: FloatArray, parts: int, equal_sizes: bool) -> IntArray:
    """Each to the lightest part that may take another item.

    >>> partition([5, 4, 3, 3, 3], 2, "lpt").tolist()
    [0, 1, 1, 0, 1]
    """
    n = len(costs)
    room = np.full(parts, n)
    if equal_sizes:  # 5 items on 3 parts: 2, 2, 1
        room = ((n + np.arange(parts)[::-1]) // parts)[: min(parts, n)]
    return lpt_kernel(costs, room)


def karmarkar_karp(costs: FloatArray, parts: int, equal_sizes: bool) -> IntArray:
    """Largest differencing: partial partitions are combined, heaviest part with lightest.

    >>> partition([8, 7, 6, 5, 4], 2, "karmarkar_karp").tolist()
    [1, 0, 1, 0, 0]
    """
    if not equal_sizes:
        return differencing_kernel(costs, parts, 1)
    padded = np.concatenate((costs, np.zeros(-len(costs) % parts)))
    return differencing_kernel(padded, parts, parts)[: len(costs)]


def refined(costs: FloatArray, parts: int, equal_sizes: bool) -> IntArray:
    """LPT, then swaps that lower the heaviest part; never worse than LPT.

    Where that stays uneven, swaps start from largest differencing too, and then from random swaps.
    Without equal sizes, items may also move: two items of no cost in each part stand for free
    places.

    >>> partition([5, 4, 3, 3, 3], 2).tolist()
    [0, 0, 1, 1, 1]
    """
    n, free = len(costs), np.arange(0 if equal_sizes else parts)
    bound = makespans(costs[None], parts, equal_sizes=equal_sizes, packs=False)[0]
    bound *= _LOWER  # rounding errors
    if (costs == np.floor(costs)).all():
        bound = np.ceil(bound)  # sums of integers are integers
    target = float(bound) * (1 + _CLOSE)
    items = np.concatenate((costs, np.zeros(2 * len(free))))

    def swapped(part_of: IntArray, shakes: int) -> IntArray:
        placed = np.concatenate((part_of, free, free))
        return swap_kernel(items, placed, parts, target, shakes)[:n]

    def heaviest(part_of: IntArray) -> float:
        return float(np.bincount(part_of, costs, parts).max())

    best = lpt(costs, parts, equal_sizes)
    best = best if heaviest(best) <= target else swapped(best, 0)
    if heaviest(best) > target and n * parts <= _TABLE:
        other = swapped(karmarkar_karp(costs, parts, equal_sizes), 0)
        best = min(best, other, key=heaviest)
    if heaviest(best) > target and n <= _SHAKEN:
        best = swapped(best, _SHAKES)
    return best


DEALS: dict[str, Deal] = {deal.__name__: deal for deal in (refined, lpt, karmarkar_karp, stride)}


@kernel
def lpt_kernel(costs: FloatArray, room: IntArray) -> IntArray:
    """The part of each item; part p takes at most `room[p]` items."""
    parts = room.shape[0]
    part_of = np.empty(costs.shape[0], np.int64)
    load = np.zeros(parts)
    left = room.copy()
    heap = np.arange(parts)  # lightest part at the root; ties by number
    alive = parts
    for i in range(costs.shape[0]):
        part = heap[0]
        part_of[i] = part
        load[part] += costs[i]
        left[part] -= 1
        if left[part] == 0:
            alive -= 1
            heap[0] = heap[alive]
        sink(heap, alive, load, 0, True)
    return part_of


@kernel
def differencing_kernel(costs: FloatArray, parts: int, layer: int) -> IntArray:
    """The part of each item. Each initial partition deals `layer` items, one to a part.

    Costs are heaviest first. With layer = 1 parts may hold any number of items; with layer = parts
    they hold equally many. A partition has a load per part, heaviest first, and a linked list of
    items per part. Combining two of them adds the heaviest part of one to the lightest of the
    other.
    """
    n = costs.shape[0]
    deals = n // layer
    load = np.zeros((deals, parts))
    head = np.full((deals, parts), -1, np.int64)
    tail = np.full((deals, parts), -1, np.int64)
    following = np.full(n, -1, np.int64)
    evenness = np.empty(deals)  # the lightest part minus the heaviest; lower is less even
    for d in range(deals):
        for part in range(layer):
            item = d * layer + part
            load[d, part] = costs[item]
            head[d, part] = item
            tail[d, part] = item
        evenness[d] = load[d, parts - 1] - load[d, 0]
    heap = np.arange(deals)  # the least even partition at the root
    alive = deals
    for node in range(alive // 2 - 1, -1, -1):
        sink(heap, alive, evenness, node, False)
    while alive > 1:
        a = heap[0]
        alive -= 1
        heap[0] = heap[alive]
        sink(heap, alive, evenness, 0, False)
        b = heap[0]
        for part in range(parts):
            other = parts - 1 - part
            load[a, part] += load[b, other]
            if head[b, other] >= 0:
                if head[a, part] < 0:
                    head[a, part] = head[b, other]
                else:
                    following[tail[a, part]] = head[b, other]
                tail[a, part] = tail[b, other]
        ranking = np.argsort(-load[a], kind="mergesort")
        load[b] = load[a][ranking]
        head[b] = head[a][ranking]
        tail[b] = tail[a][ranking]
        evenness[b] = load[b, parts - 1] - load[b, 0]
        sink(heap, alive, evenness, 0, False)
    part_of = np.empty(n, np.int64)
    for part in range(parts):
        item = head[heap[0], part]
        while item >= 0:
            part_of[item] = part
            item = following[item]
    return part_of


@kernel
def swap_kernel(
    costs: FloatArray, part_of: IntArray, count: int, target: float, shakes: int
) -> IntArray:
    """The part of each item after swaps, until the heaviest of `count` parts is at most `target`.

    Costs are heaviest first. Parts keep their number of items. The heaviest part swaps an item with
    a lighter part, such that the two come close to their mean. Where no swap lowers it, random
    swaps between other parts, which keep them lighter, may make one possible; `shakes` is the
    effort for them.
    """
    n = costs.shape[0]
    number = np.zeros(count + 1, np.int64)
    for i in range(n):
        number[part_of[i] + 1] += 1
    # The items of part p stand at start[p] up to start[p + 1], heaviest first.
    start = np.cumsum(number)
    member, held, load = np.empty(n, np.int64), np.empty(n), np.zeros(count)
    cursor = start.copy()
    for i in range(n):
        at = cursor[part_of[i]]
        member[at], held[at] = i, costs[i]
        cursor[part_of[i]] += 1
        load[part_of[i]] += costs[i]

    lightest = np.argsort(load)  # the parts by load, as they were some swaps ago

    def settle(part: int, at: int) -> None:
        """Move the entry at `at` to its place in its part."""
        item, cost = member[at], held[at]
        while at > start[part] and held[at - 1] < cost:
            member[at], held[at] = member[at - 1], held[at - 1]
            at -= 1
        while at + 1 < start[part + 1] and held[at + 1] > cost:
            member[at], held[at] = member[at + 1], held[at + 1]
            at += 1
        member[at], held[at] = item, cost

    def swap(one: int, other: int, i: int, j: int) -> None:
        """Swap the entry i of one part with the entry j of another."""
        given = held[i] - held[j]
        load[one] -= given
        load[other] += given
        member[i], member[j] = member[j], member[i]
        held[i], held[j] = held[j], held[i]
        settle(one, i)
        settle(other, j)

    def best_swap(heavy: int, light: int, most: float) -> tuple[float, int, int]:
        """(what the heavier of both reaches, the two entries) of the best swap below `most`.

        Both parts are sorted, so two pointers find the entries that differ by half the gap.
        """
        half = (load[heavy] - load[light]) / 2
        mean = load[light] + half
        best, x, y = most, -1, -1
        j = start[light]
        for i in range(start[heavy], start[heavy + 1]):
            while j < start[light + 1] and held[j] > held[i] - half:
                j += 1
            for k in (j - 1, j):
                if start[light] <= k < start[light + 1]:
                    reached = mean + abs(held[i] - held[k] - half)
                    if reached < best:
                        best, x, y = reached, i, k
        return best, x, y

    looks, state, age = _LOOKS * (count + _LOOKS), 1, 0
    while looks > 0:
        heavy = int(np.argmax(load))
        most = load[heavy] * _LOWER
        if load[heavy] <= target:
            break
        age += 1
        if age > _FRESH:
            lightest = lightest[np.argsort(load[lightest], kind="mergesort")]
            age = 0
        # The best swap with some of the lightest parts, or else with any other.
        best, light, x, y = most, -1, -1, -1
        for k in range(count):
            if k >= _PARTNERS and light >= 0:
                break
            other = lightest[k]
            if other == heavy or (load[heavy] + load[other]) / 2 >= best:
                continue
            looks -= 1
            reached, i, j = best_swap(heavy, other, best)
            if i >= 0:
                best, light, x, y = reached, other, i, j
        while light < 0 and shakes > 0:
            shakes -= 1
            state = state * _RANDOM % _PRIME
            one = state % count
            state = state * _RANDOM % _PRIME
            other = state % count
            if one in (other, heavy) or other == heavy or number[one + 1] * number[other + 1] == 0:
                continue
            state = state * _RANDOM % _PRIME
            i = start[one] + state % number[one + 1]
            state = state * _RANDOM % _PRIME
            j = start[other] + state % number[other + 1]
            given = held[i] - held[j]
            if given == 0 or load[one] - given >= most or load[other] + given >= most:
                continue
            swap(one, other, i, j)
            for part in (one, other):
                reached, i, j = best_swap(heavy, part, best)
                shakes -= 1
                if i >= 0:
                    best, light, x, y = reached, part, i, j
        if light < 0:
            break
        swap(heavy, light, x, y)
    parts = np.empty(n, np.int64)
    for part in range(count):
        for at in range(start[part], start[part + 1]):
            parts[member[at]] = part
    return parts


@kernel
def deal_waves(costs: FloatArray, heaviest: IntArray) -> IntArray:
    """costs[w, i] of pack i in wave w -> the rank of each, such that the ranks' sums are even.

    `heaviest[w]` are the packs of wave w, heaviest first. In each wave, the heaviest pack goes to
    the rank with the least load so far. Then packs of one wave are swapped between the heaviest
    rank and another while that lowers the heaviest.
    """
    waves, ranks = costs.shape
    pack = np.empty((waves, ranks), np.int64)  # the pack that each rank runs in each wave
    load = np.zeros(ranks)
    for w in range(waves):
        lightest = np.argsort(load, kind="mergesort")
        for i in range(ranks):
            pack[w, lightest[i]] = heaviest[w, i]
            load[lightest[i]] += costs[w, heaviest[w, i]]
    for _ in range(_SWAPS):
        heavy = int(np.argmax(load))
        best, best_w, best_r = load[heavy] * (1 - 1e-9), -1, -1
        for r in range(ranks):
            if (load[heavy] + load[r]) / 2 >= best:
                continue
            for w in range(waves):
                gain = costs[w, pack[w, heavy]] - costs[w, pack[w, r]]
                reached = max(load[heavy] - gain, load[r] + gain)
                if reached < best:
                    best, best_w, best_r = reached, w, r
        if best_w < 0:
            break
        gain = costs[best_w, pack[best_w, heavy]] - costs[best_w, pack[best_w, best_r]]
        load[heavy] -= gain
        load[best_r] += gain
        kept = pack[best_w, heavy]
        pack[best_w, heavy] = pack[best_w, best_r]
        pack[best_w, best_r] = kept
    rank = np.empty((waves, ranks), np.int64)
    for w in range(waves):
        for r in range(ranks):
            rank[w, pack[w, r]] = r
    return rank


def deal_packs(costs: FloatArray, ranks: int, balance: str, sync_every: str) -> IntArray:
    """The address `wave * ranks + rank` of each pack; every rank runs equally many.

    Where ranks synchronise at every micro-batch, packs of similar cost share a wave. Where they
    synchronise once per step, only the ranks' sums count. Every rank runs its packs heaviest first.

    >>> deal_packs(np.array([9.0, 5, 8, 4]), 2, "refined", "micro_batch").tolist()
    [0, 3, 1, 2]
    """
    waves = len(costs) // ranks
    address = np.empty(len(costs), np.int64)
    heaviest = np.argsort(-costs, kind="stable")
    if balance == "refined" and sync_every == "micro_batch":
        by_wave = np.tile(np.arange(ranks), (waves, 1))  # sorted already
        rank = deal_waves(costs[heaviest].reshape(waves, ranks), by_wave)
        address[heaviest] = (np.arange(waves)[:, None] * ranks + rank).ravel()
        return address
    part = partition(costs, ranks, balance, equal_sizes=True)
    by_rank = heaviest[np.argsort(part[heaviest], kind="stable")].reshape(ranks, waves)
    address[by_rank] = np.arange(waves)[None, :] * ranks + np.arange(ranks)[:, None]
    return address


def deal_rows(costs: FloatArray, waves: int, ranks: int, rows: int) -> IntArray:
    """The new address of each pack, such that the sums over each rank's rows are even.

    `costs` are by address, `ranks * rows` of each wave. Packs stay in their wave.
    """
    by_wave = costs.reshape(waves, ranks * rows)
    moved = np.empty((waves, ranks * rows), np.int64)
    total = np.empty((waves, ranks))
    for wave in range(waves):
        part = partition(by_wave[wave], ranks, equal_sizes=True)
        by_part = np.argsort(part, kind="stable").reshape(ranks, rows)
        moved[wave, by_part.ravel()] = np.arange(ranks * rows)
        total[wave] = by_wave[wave][by_part].sum(axis=1)
    rank = deal_waves(total, np.argsort(-total, axis=1, kind="stable"))
    pack = np.take_along_axis(rank, moved // rows, axis=1) * rows + moved % rows
    return (np.arange(waves)[:, None] * ranks * rows + pack).ravel()
