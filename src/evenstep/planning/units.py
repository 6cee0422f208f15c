"""Units: what the planner moves as a whole, and the problem that the units of one step pose.

samples -> segments   divided, truncated or dropped where they are too long
segments -> Units     a segment each, or the segments of a group
Problem               the units of one step, what a pack of them holds, and what a step costs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from evenstep.core.bounds import StepFloor, bins_bound
from evenstep.core.measures import slowest
from evenstep.core.ragged import (
    FloatArray,
    IntArray,
    Segments,
    by_first_appearance,
    divided_up,
    rounded_up,
    sum_by,
)
from evenstep.core.recipe import Overflow, Recipe
from evenstep.errors import PlanError
from evenstep.planning.exchange import Shape, exchange, fill_empty, search_all
from evenstep.planning.vector_packing import LimitedPacker

Phases: TypeAlias = tuple[tuple[int, float, int], ...]
"""Of each phase of exchanges: the norm as a power of two, looseness, tries."""

_ALL = 20_000  # assignments of a unit that are searched: up to 2 ms


def refused(lengths: IntArray, limit: int | None, overflow: Overflow) -> IntArray:
    """The samples longer than `limit`, if `overflow` does not say how to handle them."""
    if limit is None or overflow == "alone" or (overflow != "error" and limit > 0):
        return np.empty(0, np.int64)
    return np.flatnonzero(lengths > limit)


def refusal(name: object, length: int, recipe: Recipe, more: int = 0) -> str:
    """The error message for a sample that is too long, and `more` others."""
    limit, by_cost = recipe.longest_segment, recipe.limits.cost is not None
    wider = recipe.layout.pad_to is None and not recipe.topology.equal_widths
    ways = [*(["split", "truncate", "drop"] if limit else []), *(["alone"] if wider else [])]
    too_long = f"sample {name} has {length} tokens but a micro-batch holds {limit}"
    if recipe.sharing is not None:
        ways = ["truncate", "drop"]
        too_long = f"sample {name} has {length} tokens but ranks that share it hold {limit}"
    remedy = f", or set overflow to {' or '.join(ways)}" if ways else ""
    others = f" ({more} more samples are too long)" if more else ""
    bound = "max_tokens" if recipe.layout.pad_to is None else "pad_to"
    bounds = [
        *([f"layout.{bound}"] if recipe.capacity else []),
        *(["limits.cost"] if by_cost else []),
    ]
    return (
        f"{too_long}{' within limits.cost' if by_cost else ''}{others}. Raise "
        f"{' or '.join(bounds)}{remedy}."
    )


def segments_of(
    lengths: IntArray, limit: int | None, overflow: Overflow
) -> tuple[Segments, IntArray]:
    """(segments in sample order, the samples that are dropped). `refused` must be empty.

    Splitting gives segments of the longest length that fits, the last one shorter.

    >>> segments, _ = segments_of(np.array([20, 3]), 8, "split")
    >>> segments.start.tolist(), segments.length.tolist()
    ([0, 8, 16, 0], [8, 8, 4, 3])
    """
    everything, none = np.arange(len(lengths)), np.empty(0, np.int64)
    over = none if limit is None else np.flatnonzero(lengths > limit)
    if len(over) == 0 or overflow == "alone":
        return Segments(everything, np.zeros_like(lengths), lengths), none
    assert limit, "samples that fit nowhere are refused"
    if overflow == "drop":
        kept = np.delete(everything, over)
        return Segments(kept, np.zeros_like(kept), lengths[kept]), over
    if overflow == "truncate":
        return Segments(everything, np.zeros_like(lengths), np.minimum(lengths, limit)), none
    count = divided_up(lengths, limit)
    sample = np.repeat(everything, count)
    first = np.repeat(np.cumsum(count) - count, count)
    start = (np.arange(len(sample)) - first) * limit
    return Segments(sample, start, np.minimum(limit, lengths[sample] - start)), none


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Columns with one entry per unit, numbered by first appearance.

    of_segment  the unit of each segment
    size        what a unit takes of a pack: slots of a packed row, or rows
    cost        the work that moves with it; where rows are cut, the price of one of its rows
    second      its second work
    count       its segments
    widest      its longest aligned segment
    extra       `extra[:, d]` is what it takes of the d-th further limit, `caps[d]`, which is called
                `limits[d]`
    """

    of_segment: IntArray
    size: IntArray
    cost: FloatArray
    second: FloatArray
    count: IntArray
    widest: IntArray
    extra: FloatArray
    caps: FloatArray
    limits: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.size)

    def take(self, index: IntArray | slice) -> Units:
        """The units at `index`; their `of_segment` is empty."""
        return Units(
            np.empty(0, np.int64),
            self.size[index],
            self.cost[index],
            self.second[index],
            self.count[index],
            self.widest[index],
            self.extra[index],
            self.caps,
            self.limits,
        )

    def of_segments(self, segments: IntArray) -> Units:
        """The units of these segments, in the order of all units. Units must be complete.

        Where every segment is a unit, segment i is unit i.
        """
        if len(self.of_segment) == len(self.size):
            index, owner = segments, np.arange(len(segments))
        else:
            index, owner = np.unique(self.of_segment[segments], return_inverse=True)
        return replace(self.take(index), of_segment=owner)

    def reordered(self, order: IntArray) -> Units:
        """The same units in another order."""
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(order))
        return replace(self.take(order), of_segment=number[self.of_segment])


def units_of(
    segments: Segments,
    recipe: Recipe,
    columns: Mapping[str, IntArray],
    groups: IntArray | None,
) -> Units:
    """The units of these segments, with what each takes of every limit.

    A segment of a split or truncated sample counts its sample's columns in full, because how they
    divide is unknown and limits are hard. `groups` and `columns` are per sample.
    """
    layout, n = recipe.layout, len(segments)
    aligned = rounded_up(segments.length, recipe.topology.alignment)
    cost = layout.moving_costs(recipe, aligned)
    second = np.zeros(n)
    if recipe.second_work is not None:
        column = columns[recipe.second_work.column][segments.sample]
        second = recipe.second_work.of_column(column)
    per_segment = {name: column[segments.sample] for name, column in columns.items()}
    shares = layout.shares(recipe, aligned, per_segment)
    measured = layout.measured(recipe)
    limits = tuple(name for name in shares if name not in measured)
    caps = np.array([shares[name][0] for name in limits], np.float64)
    extra = np.zeros((n, len(limits)))
    for at, name in enumerate(limits):
        extra[:, at] = shares[name][1]
    if groups is None or recipe.groups != "micro_batch":
        one = np.ones(n, np.int64)
        return Units(np.arange(n), aligned, cost, second, one, aligned, extra, caps, limits)
    unit, first = by_first_appearance(groups[segments.sample])
    count = len(first)
    size, widest = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(size, unit, aligned)
    np.maximum.at(widest, unit, aligned)
    total = np.zeros((count, extra.shape[1]))
    np.add.at(total, unit, extra)
    costs, works = sum_by(unit, cost, count), sum_by(unit, second, count)
    held = np.bincount(unit, minlength=count)
    return Units(unit, size, costs, works, held, widest, total, caps, limits)


def check_units(
    units: Units, recipe: Recipe, segments: Segments, groups: IntArray | None, names: IntArray
) -> None:
    """Raise if a unit exceeds a limit by itself.

    With overflow = "alone" a single sample may; a group of several never may.
    """
    several = units.count > 1
    capacity, most = recipe.layout.pack_bounds(recipe, units.widest)
    large = several & (units.count > most)
    if capacity is not None:
        large |= several & (units.size > capacity)
    if large.any():
        raise _refused_group(int(np.argmax(large)), units, segments, groups, names, "the layout")
    for d, cap in enumerate(units.caps):
        owner = "layout" if units.limits[d] == "samples" else "limits"
        name = f"{owner}.{units.limits[d]}"
        beyond = units.extra[:, d] > cap * (1 + 1e-12)
        if (beyond & several).any():
            at = int(np.argmax(beyond & several))
            raise _refused_group(at, units, segments, groups, names, name)
        if beyond.any() and recipe.overflow != "alone":
            at = int(np.argmax(beyond))
            sample = segments.sample[np.flatnonzero(units.of_segment == at)[0]]
            wider = recipe.layout.pad_to is None and not recipe.topology.equal_widths
            alone = ", or set overflow='alone'" if wider else ""
            holder = "a micro-batch" if recipe.layout.packs_per_micro_batch == 1 else "a row"
            raise PlanError(
                f"sample {names[sample]} takes {units.extra[at, d]:g} of {name}, more than the "
                f"{cap:g} that {holder} holds. Raise {name} or remove the sample{alone}."
            )


def _refused_group(
    at: int,
    units: Units,
    segments: Segments,
    groups: IntArray | None,
    names: IntArray,
    limit: str,
) -> PlanError:
    members = segments.sample[units.of_segment == at]
    name = groups[members[0]] if groups is not None else "?"
    first = ", ".join(map(str, names[members[:4]])) + (", ..." if len(members) > 4 else "")
    remedy = "the layout's bounds" if limit == "the layout" else limit
    return PlanError(
        f"group {name} has {units.count[at]} segments and {units.size[at]} slots, more than "
        f"{limit} allows in one micro-batch (samples {first}). Raise {remedy}, or set "
        f"groups='step'."
    )


class Problem:
    """The units of one step, and the packs that they go to.

    A wave has `rows` packs on each of `ranks` ranks. An *address* numbers the packs of a step:
    `(wave * ranks + rank) * rows + row`. A pack with unit u as its widest holds `most[u]` of the
    units' sizes; where rows are not `cut`, every entry is `capacity`. `aligned` are the aligned
    lengths of the segments. `kinds_matter` if units with second work have waves of their own.
    """

    def __init__(
        self,
        recipe: Recipe,
        units: Units,
        aligned: IntArray,
        most: int | IntArray,
        *,
        cut: bool = False,
    ) -> None:
        self.recipe, self.units, self.aligned, self.cut = recipe, units, aligned, cut
        self.capacity = most if isinstance(most, int) else 0
        self.most = np.full(len(units), most) if isinstance(most, int) else most
        self.ranks, self.rows = recipe.topology.dp, recipe.layout.packs_per_micro_batch
        self.per_wave = self.ranks * self.rows
        second = recipe.second_work
        apart = second is not None and second.same_waves
        self.kinds_matter = apart and bool((units.second > 0).any())
        self._floors: dict[int, float] = {}
        self._step_floor: StepFloor | None = None
        self._least: float | None = None

    def holding(self, capacity: int) -> Problem:
        """The same problem with packs that hold `capacity`."""
        return Problem(self.recipe, self.units, self.aligned, capacity)

    def by_rank(self, waves: int) -> bool:
        """Whether only the ranks' sums count. A step of one wave is the same problem."""
        return self.recipe.sync_every == "step" or waves == 1

    def shape(self, waves: int, address: IntArray) -> Shape:
        """The packs for `exchange`; second work stays in the waves that have it at `address`."""
        special = -1
        if self.kinds_matter:
            special = int(address[self.units.second > 0].max(initial=-1)) // self.per_wave + 1
        empty = empty_cost(self.recipe) if self.cut else 0.0
        by_rank, equal = self.by_rank(waves), self.recipe.equal_sizes
        return Shape(self.ranks, self.rows, waves, by_rank, equal, special, self.cut, empty)

    def exchange(
        self,
        address: IntArray,
        waves: int,
        phases: Phases,
        goal: float,
        works: tuple[FloatArray, FloatArray] | None = None,
        times: int = 1,
        seed: int = 0,
        shape: Shape | None = None,
    ) -> IntArray:
        """The addresses after phases of exchanges, with `times` as many tries; never slower.

        `works` are what exchanges even out, by default the units' cost and second work. `shape` is
        that of the packs if it is not the problem's.
        """
        units, shape = self.units, shape or self.shape(waves, address)
        cost, second = works or (units.cost, units.second)
        for squarings, loose, tries in phases:
            address, _ = exchange(
                units.size,
                cost,
                second,
                units.count,
                units.extra,
                self.most,
                units.caps,
                shape,
                address,
                times * tries,
                squarings,
                loose,
                goal,
                seed,
            )
        return address

    def search_all(
        self, order: IntArray, address: IntArray, waves: int, least: float, goal: float
    ) -> tuple[IntArray, bool]:
        """(addresses with a time below `least`, or none; whether that is proved)."""
        units, shape = self.units, self.shape(waves, address)
        columns = units.size, units.cost, units.extra, self.most
        return search_all(*columns, units.caps, shape, order, least, goal, _ALL)

    def time(self, works: list[FloatArray]) -> float:
        """The modelled time of a step with these works, each waves x ranks."""
        return float(sum(slowest(work.T, self.recipe.sync_every) for work in works))

    def works(self, address: IntArray, waves: int) -> list[FloatArray]:
        """The works of the micro-batches with units at these addresses, each waves x ranks."""
        recipe, layout, micros = self.recipe, self.recipe.layout, waves * self.ranks
        pack = address[self.units.of_segment]
        micro = pack // self.rows
        if layout.segments_per_row is None:
            used = sum_by(pack, self.aligned, micros * self.rows).astype(np.int64)
            used = used.reshape(micros, self.rows).max(axis=1)
        else:
            used = np.zeros(micros, np.int64)
            np.maximum.at(used, micro, self.aligned)
        widths = layout.widths(used, recipe.width_unit).reshape(waves, self.ranks)
        rows = layout.row_counts(np.bincount(micro, minlength=micros))
        if recipe.topology.equal_widths:
            widths, rows = np.full_like(widths, widths.max()), np.full_like(rows, rows.max())
        elif recipe.equal_tokens:
            widths = np.broadcast_to(widths.max(axis=1, keepdims=True), widths.shape)
        cost = layout.micro_batch_costs(recipe.cost, rows, widths.ravel(), micro, self.aligned)
        if recipe.second_work is None:
            return [cost.reshape(waves, self.ranks)]
        return [cost.reshape(waves, self.ranks), *self.loads(address, waves, self.units.second)]

    def loads(self, address: IntArray, waves: int, *works: FloatArray) -> list[FloatArray]:
        """These works of the units at their addresses, each waves x ranks."""
        sums = [sum_by(address // self.rows, work, waves * self.ranks) for work in works]
        return [load.reshape(waves, self.ranks) for load in sums]

    def floor(self, waves: int) -> float:
        """A lower bound on the time of a step with this many waves or more."""
        if self._step_floor is None:
            second = None if self.recipe.second_work is None else self.units.second
            self._step_floor = StepFloor(self.recipe, self.aligned, self.units.of_segment, second)
        if waves not in self._floors:
            self._floors[waves] = float(self._step_floor.times(np.array([waves]))[0][0])
        return self._floors[waves]

    def quick_floor(self, waves: int) -> float:
        """The mean of the ranks or the most expensive unit, with what `waves` micro-batches cost.

        Never above the floor, which takes longer to compute than to form packs.
        """
        if self._least is None:
            units, recipe = self.units, self.recipe
            cost = units.cost * (units.size if self.cut else 1)
            if recipe.layout.static or recipe.topology.equal_widths:
                cost = recipe.cost.of_lengths(self.aligned)
            both = cost, units.second
            mean = sum(float(work.sum()) for work in both) / self.ranks
            self._least = max(mean, sum(float(work.max(initial=0)) for work in both))
        return self._least + waves * self.recipe.cost.per_micro_batch

    def is_within(self, time: float, waves: int, share: float) -> bool:
        """Whether a time is at most `share` times the floor."""
        return time <= self.quick_floor(waves) * share or time <= self.floor(waves) * share

    @cached_property
    def limited(self) -> LimitedPacker:
        """Packs all units under the further limits."""
        units = self.units
        return LimitedPacker(units.size, units.extra, self.capacity, units.caps)

    @cached_property
    def fewest_packs(self) -> int:
        """A lower bound on the packs that hold all units."""
        taken = np.column_stack((self.units.size.astype(np.float64), self.units.extra))
        return max(bins_bound(taken, np.append(float(self.capacity), self.units.caps)), 1)


def empty_cost(recipe: Recipe) -> float:
    """What an empty row costs."""
    width = recipe.layout.widths(np.zeros(1, np.int64), recipe.width_unit)
    return float(recipe.cost.of_lengths(width)[0])


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """The address of each unit, and the modelled time."""

    address: IntArray
    waves: int
    time: float


def faster(problem: Problem, best: Packing | None, address: IntArray, waves: int) -> Packing | None:
    """The faster of `best` and the units at these addresses, unless those are none."""
    if len(address) < len(problem.units):
        return best
    time = problem.time(problem.works(address, waves))
    return Packing(address, waves, time) if best is None or time < best.time else best


def without_empty(problem: Problem, best: Packing) -> Packing:
    """The packs with a unit in every empty one that its rank or wave can fill, if as fast."""
    number = np.bincount(best.address, minlength=best.waves * problem.per_wave)
    if number.min() > 0 or problem.rows > 1 or problem.kinds_matter:
        return best
    by_wave = [False] if not problem.recipe.equal_sizes else []
    for same_rank in [True, *by_wave] if best.waves > 1 else by_wave:
        shape = problem.shape(best.waves, best.address)
        address = fill_empty(best.address, problem.units.cost, shape, same_rank)
        time = problem.time(problem.works(address, best.waves))
        if time <= best.time * (1 + 1e-12):
            best = Packing(address, best.waves, time)
    return best


def more_counts(fewest: int, recipe: Recipe, number: int = 2) -> list[int]:
    """The numbers of waves above the fewest that are tried; at most `steps.micro_batches`."""
    multiple, most = recipe.topology.multiple, recipe.steps.micro_batches
    counts = [fewest + more * multiple for more in range(1, number + 1)]
    return [count for count in counts if most is None or count <= most]


def first_worth(times: list[float], saving: float) -> int:
    """The first whose time no other undercuts by more than the share `saving`.

    >>> first_worth([100, 99.5, 90], 0.01), first_worth([100, 99.5], 0.01)
    (2, 0)
    """
    least = min(times)
    return next(at for at, time in enumerate(times) if time * (1 - saving) <= least)
