"""Lower bounds on the time of packed steps, by what each of them names.

mean     the work of all units, divided by the ranks
share    units that must share a rank
shape    slots that every micro-batch has, filled or not
sample   the most expensive unit, which one rank runs in addition to its other micro-batches
waves    long units that cannot share a micro-batch, so that ranks wait for them in every wave
widths   micro-batches that are as wide as others

Where several are equal, the first is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from evenstep.core.loads import Loads
from evenstep.core.lock_step import lock_steps
from evenstep.core.makespan import makespans
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.rounding import divided_up, rounded_up

if TYPE_CHECKING:
    from evenstep.core.layout.packed import Packed
    from evenstep.core.recipe import Recipe

_WIDTHS = 64  # numbers of micro-batches per rank whose common width is bounded one by one


def packed_times(
    layout: Packed, recipe: Recipe, loads: Loads, per_rank: IntArray
) -> dict[str, FloatArray]:
    """The bounds of each step. Each rank runs at least `per_rank` micro-batches."""
    cost, ranks = recipe.cost, recipe.topology.dp
    calls = per_rank * cost.per_micro_batch
    least = _least_slots(layout, recipe, loads)
    empty = cost.per_token * least
    widths = np.maximum(layout.widths(loads.size, recipe.width_unit), least[:, None])
    alone = np.where(loads.size > 0, cost.per_token * widths + loads.attended, empty[:, None])
    slots = _fewest_slots(layout, recipe, loads, per_rank, least)
    found = {
        "mean": loads.work(recipe).sum(axis=1) / ranks,
        "share": loads.once("share", lambda: makespans(loads.work(recipe), ranks)),
        "shape": (cost.per_token * slots + loads.attended.sum(axis=1)) / ranks,
        "sample": alone.max(axis=1, initial=0) + (per_rank - 1) * empty,
    }
    waves = _waves_of(layout, recipe, loads)
    if waves is not None:
        found["waves"] = loads.once("waves", lambda: waves(loads.work(recipe)))
    if layout.pad_to is not None:
        fixed = per_rank * empty + _attention(layout, recipe, loads)
        found["shape"] = np.maximum(found["shape"], fixed)
    found = {name: time + calls for name, time in found.items()}
    if layout.pad_to is None and recipe.topology.equal_widths:
        tokens = _one_width(layout, recipe, loads, per_rank)
        found["widths"] = tokens + _attention(layout, recipe, loads)
    if recipe.equal_tokens:
        tokens = cost.per_token * _widest(layout, recipe, loads)
        found["widths"] = tokens + _attention(layout, recipe, loads) + calls
    return found


def second_times(layout: Packed, recipe: Recipe, loads: Loads) -> FloatArray:
    """A lower bound on the time of each step's second work; 0 without one."""
    second, waves = loads.second, _waves_of(layout, recipe, loads)
    if second is None:
        return np.zeros(len(loads.size))
    return loads.once("second", lambda: _slowest(second, recipe.topology.dp, waves))


Waves = Callable[[FloatArray], FloatArray]


def _slowest(work: FloatArray, ranks: int, waves: Waves | None) -> FloatArray:
    """The least time of this work by itself."""
    least = makespans(work, ranks)
    return least if waves is None else np.maximum(least, waves(work))


def _attention(layout: Packed, recipe: Recipe, loads: Loads) -> FloatArray:
    """The least time of what does not depend on padding."""
    waves, ranks = _waves_of(layout, recipe, loads), recipe.topology.dp
    return loads.once("attention", lambda: _slowest(loads.attended, ranks, waves))


def _widest(layout: Packed, recipe: Recipe, loads: Loads) -> FloatArray:
    """The least sum over waves of the widest micro-batch."""
    waves, ranks = _waves_of(layout, recipe, loads, always=True), recipe.topology.dp
    return loads.once("widest", lambda: _slowest(loads.size.astype(np.float64), ranks, waves))


def _waves_of(
    layout: Packed, recipe: Recipe, loads: Loads, *, always: bool = False
) -> Waves | None:
    """The lock-step bound of some work of these units; None if ranks do not wait in every wave.

    A micro-batch of several rows counts as one pack of all their slots.
    """
    if recipe.sync_every != "micro_batch" and not always:
        return None
    ranks, capacity = recipe.topology.dp, layout.capacity(recipe)
    limits: list[tuple[IntArray, int, IntArray | None]] = []
    if capacity is not None:
        capacity *= layout.rows
        limits.append((loads.size, capacity, loads.packs_of_first(capacity)))
    if layout.samples is not None:
        limits.append((loads.count, layout.samples, None))

    def bound(work: FloatArray) -> FloatArray:
        found = [lock_steps(size, work, most, ranks, packs) for size, most, packs in limits]
        return np.asarray(np.max(found, axis=0), np.float64)

    return bound if limits else None


def _least_slots(layout: Packed, recipe: Recipe, loads: Loads) -> IntArray:
    """The least slots of a micro-batch: those of an empty one, or of the step's one shape."""
    steps = len(loads.size)
    if layout.pad_to is not None:
        return np.full(steps, layout.least_slots)
    if not recipe.topology.equal_widths:
        return np.full(steps, recipe.width_unit)
    largest = np.asarray(loads.size.max(axis=1, initial=0), np.int64)
    return np.asarray(layout.widths(largest, recipe.width_unit), np.int64)


def _fewest_slots(
    layout: Packed, recipe: Recipe, loads: Loads, per_rank: IntArray, least: IntArray
) -> IntArray:
    """The fewest slots of at least `per_rank` micro-batches per rank that hold these units."""
    micro_batches = recipe.topology.dp * per_rank
    if layout.pad_to is not None:
        return micro_batches * least
    unit, capacity, size = recipe.width_unit, layout.capacity(recipe), loads.size
    long = np.zeros(size.shape, bool) if capacity is None else size > capacity
    alone = np.where(long, layout.widths(size, unit), 0).sum(axis=1)
    tokens = rounded_up(np.where(long, 0, size).sum(axis=1), unit)
    spare = np.maximum(0, micro_batches - (size > 0).sum(axis=1))  # these are empty
    shared = np.maximum(tokens + spare * least, (micro_batches - long.sum(axis=1)) * least)
    return np.asarray(alone + shared, np.int64)


def _one_width(layout: Packed, recipe: Recipe, loads: Loads, per_rank: IntArray) -> FloatArray:
    """What the slots and the number of micro-batches cost where all have one width.

    For k micro-batches per rank, the width is at least the largest unit, the mean of all
    k * ranks micro-batches, and what units use that must share one. The least over k is taken.
    """
    cost, ranks, unit = recipe.cost, recipe.topology.dp, recipe.width_unit
    multiple, found = recipe.topology.multiple, np.zeros(len(per_rank))
    for step, (size, fewest) in enumerate(zip(loads.size, per_rank.tolist(), strict=True)):
        total, largest = int(size.sum()), layout.widths(int(size.max(initial=0)), unit)
        # From `last` on, the width is that of the largest unit, and more cost more.
        last = max(fewest, rounded_up(divided_up(total, ranks * largest), multiple))
        counts = np.arange(fewest, last + 1, multiple)
        widths = np.maximum(largest, rounded_up(-(-total // (counts * ranks)), unit))
        if len(counts) <= _WIDTHS:
            row = size.astype(np.float64)[None]
            used = [int(np.ceil(makespans(row, int(k) * ranks)[0] - 1e-6)) for k in counts]
            widths = np.maximum(widths, rounded_up(np.array(used), unit))
        found[step] = (counts * (cost.per_token * widths + cost.per_micro_batch)).min()
    return found
