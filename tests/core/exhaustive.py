"""The least time of any plan of a few units, by trying all of them."""

from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from evenstep import Packed, Padded, Recipe
from tests.internals import FloatArray, IntArray


@cache
def partitions(count: int) -> IntArray:
    """All ways to put items into packs: the pack of each item, one way per row.

    >>> partitions(2).tolist()
    [[0, 0], [0, 1]]
    """
    found = np.zeros((1, 0), np.int64)
    for _ in range(count):
        packs = found.max(axis=1, initial=-1) + 2  # one of those in use, or a new one
        last = np.concatenate([np.arange(n) for n in packs])
        found = np.column_stack((np.repeat(found, packs, axis=0), last))
    return found


def pack_sums(values: FloatArray) -> FloatArray:
    """For each way, the sum of `values` in each pack: ways x packs."""
    ways = partitions(len(values))
    return np.stack([(ways == pack) @ values for pack in range(len(values))], axis=1)


def possible(sizes: IntArray, capacity: int) -> NDArray[np.bool_]:
    """Which ways keep the capacity; an item over it is alone."""
    long = (sizes > capacity).astype(np.float64)
    over = (pack_sums(long) > 0) & (pack_sums(np.ones(len(sizes))) > 1)
    held = pack_sums(np.minimum(sizes, capacity) * 1.0)
    return np.asarray((held <= capacity).all(axis=1) & ~over.any(axis=1))


def least_lock_step(sizes: IntArray, costs: FloatArray, capacity: int, ranks: int) -> float:
    """The least sum over waves of the most expensive pack. The number of waves is free.

    In a wave of packs with similar cost ranks wait the least: the first wave takes the `ranks` most
    expensive packs, and so on.
    """
    packs = -np.sort(-pack_sums(costs)[possible(sizes, capacity)], axis=1)
    return float(packs[:, ::ranks].sum(axis=1).min())


def fewest_packs(sizes: IntArray, capacity: int) -> int:
    """The fewest packs that hold the items."""
    ways = partitions(len(sizes))[possible(sizes, capacity)]
    return int(ways.max(axis=1).min()) + 1


@cache
def _assignments(count: int, ranks: int) -> IntArray:
    """All ways to give items to ranks."""
    return np.array(list(product(range(ranks), repeat=count)), np.int64).reshape(-1, count)


def least_makespan(costs: FloatArray, ranks: int) -> float:
    """The least load of the slowest rank."""
    ways = _assignments(len(costs), ranks)
    return float(np.stack([(ways == r) @ costs for r in range(ranks)]).max(axis=0).min())


def _waves(packs: list[int], ranks: int) -> Iterator[list[list[int]]]:
    """All ways to put packs into waves of at most `ranks`."""
    if not packs:
        yield []
        return
    first, *rest = packs
    for found in _waves(rest, ranks):
        yield [[first], *found]
        for at, wave in enumerate(found):
            if len(wave) < ranks:
                yield [*found[:at], [first, *wave], *found[at + 1 :]]


def least_step(recipe: Recipe, groups: list[list[int]], second: list[float] | None = None) -> float:
    """The least lock-step time of a packed step; `groups` are the aligned lengths of each unit."""
    layout, cost, ranks = recipe.layout, recipe.cost, recipe.topology.dp
    assert isinstance(layout, Packed)
    assert layout.rows == 1
    unit, multiple = recipe.width_unit, recipe.topology.multiple
    size = np.array([sum(held) for held in groups])
    attended = np.array(
        [sum(cost.per_pair * n * n + cost.per_segment for n in held) for held in groups]
    )
    extra = np.zeros(len(groups)) if second is None else np.array(second)
    best = np.inf
    allowed = possible(size, recipe.capacity or 0)
    for way in partitions(len(groups))[allowed]:
        count = int(way.max()) + 1
        width = np.array([layout.widths(int(size[way == p].sum()), unit) for p in range(count)])
        own = np.array([attended[way == p].sum() for p in range(count)])
        other = np.array([extra[way == p].sum() for p in range(count)])
        for waves in _waves(list(range(count)), ranks):
            number = -(-len(waves) // multiple) * multiple
            waves = waves + [[]] * (number - len(waves))
            widest = width.max() if recipe.topology.equal_widths else 0
            time = number * cost.per_micro_batch
            for wave in waves:
                shared = max([widest, *(width[wave] if recipe.equal_tokens else [])])
                each = [cost.per_token * max(width[p], shared) + own[p] for p in wave]
                if len(wave) < ranks:
                    each.append(cost.per_token * max(layout.widths(0, unit), shared))
                time += max(each) + max((other[p] for p in wave), default=0.0)
            best = min(best, float(time))
    return best


def least_padded_step(recipe: Recipe, lengths: IntArray) -> float:
    """The least lock-step time of a padded step of whole rows. The number of waves is free."""
    layout, cost, ranks = recipe.layout, recipe.cost, recipe.topology.dp
    assert isinstance(layout, Padded)
    widths = layout.widths(lengths, recipe.width_unit)
    ways = partitions(len(lengths))
    packs = range(len(lengths))
    rows = np.stack([(ways == pack).sum(axis=1) for pack in packs], axis=1)
    widest = np.stack([((ways == pack) * widths).max(axis=1) for pack in packs], axis=1)
    fits = (rows * widest <= (layout.max_tokens or np.inf)) & (rows <= (layout.samples or np.inf))
    costs = np.where(rows > 0, rows * cost.of_lengths(widest), 0.0)[fits.all(axis=1)]
    waves = -np.sort(-costs, axis=1)[:, ::ranks]  # those that wait the least, see above
    return float((waves + cost.per_micro_batch * (waves > 0)).sum(axis=1).min())
