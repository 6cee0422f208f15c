"""Measures of a plan: the time of its steps, floors, stats, and what keeps it from its ideal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.bounds import Floor, Loads, bins_bound, floor_times, pack_bounds
from evenstep.core.ragged import FloatArray, IntArray, divided_up, offsets_of, rounded_up, sum_by

if TYPE_CHECKING:
    from evenstep.core.plan import Plan
    from evenstep.core.recipe import SecondWork, SyncEvery


# -------------------------------------------------------------------------------------------------
# The modelled time of steps. Planning, stats, reports and pictures ask these functions alone.
#
# A micro-batch has one or two works: its cost, and the second work of its samples. Ranks wait for
# each other in each of them, so the time of a step is the sum of the times of its works.
# -------------------------------------------------------------------------------------------------


class TimeParts(NamedTuple):
    """What a rank spends its time on, in the unit of the cost; a mean over ranks.

    work     real tokens, second work, and the fixed cost of micro-batches
    padding  slots without a token
    waiting  for slower ranks
    """

    work: float
    padding: float
    waiting: float

    @property
    def total(self) -> float:
        """The modelled time."""
        return self.work + self.padding + self.waiting


def slowest(work: NDArray[np.generic], sync_every: SyncEvery) -> FloatArray:
    """The time of one work, of each step: work[..., rank, wave] -> time[...].

    The largest sum of a rank, or the sum over waves of the largest micro-batch.

    >>> work = np.array([[3.0, 1.0], [2.0, 3.0]])
    >>> float(slowest(work, "step")), float(slowest(work, "micro_batch"))
    (5.0, 6.0)
    """
    if sync_every == "step":
        return np.asarray(work.sum(axis=-1).max(axis=-1, initial=0), np.float64)
    return np.asarray(work.max(axis=-2, initial=0).sum(axis=-1), np.float64)


def time_of_works(works: Iterable[NDArray[np.generic]], sync_every: SyncEvery) -> float:
    """The time of one step with these works[rank, wave]: the sum of their times."""
    return float(sum(slowest(work, sync_every) for work in works))


def slowest_of_steps(
    plan: Plan, work: NDArray[np.generic], sync_every: SyncEvery | None = None
) -> FloatArray:
    """`slowest` for each step of a plan; `work` is that of each micro-batch."""
    ranks, starts = plan.num_ranks, plan.cell_offsets
    counts = np.diff(starts).reshape(-1, ranks)
    waves = counts.max(axis=1, initial=0)
    times = np.zeros(len(counts))
    for count in np.unique(waves).tolist():  # steps with equally many waves form one array
        steps = np.flatnonzero(waves == count)
        first, present = starts[:-1].reshape(-1, ranks)[steps], counts[steps][..., None]
        wave = np.arange(count)
        at = np.minimum(first[..., None] + wave, len(work) - 1)  # steps x ranks x waves
        load = np.where(wave < present, work[at], 0)
        times[steps] = slowest(load, sync_every or plan.recipe.sync_every)
    return times


def second_costs(plan: Plan, second_work: SecondWork | None = None) -> FloatArray | None:
    """The second work of each segment in the unit of the cost; None without one.

    `second_work` is measured instead of the recipe's, for a plan that was made without it.
    """
    second = second_work or plan.recipe.second_work
    if second is None:
        return None
    work = second.of_column(plan.columns[second.column][plan.segments.sample])
    starts = plan.segment_offsets[plan.cell_offsets[:: plan.num_ranks]]
    step = np.repeat(np.arange(plan.num_steps), np.diff(starts))
    first = plan.recipe.cost.of_lengths(plan.aligned_lengths)
    totals = (sum_by(step, column, plan.num_steps).tolist() for column in (first, work))
    scales = [second.scale(*pair) for pair in zip(*totals, strict=True)]
    return np.asarray(work * np.array(scales)[step], np.float64)


def works_of(plan: Plan, second_work: SecondWork | None = None) -> list[FloatArray]:
    """The works of each micro-batch: its cost, and its second work if there is one."""
    second = second_costs(plan, second_work)
    if second is None:
        return [plan.costs]
    return [plan.costs, sum_by(plan.micro_batch_of_segment, second, plan.num_micro_batches)]


def step_times(
    plan: Plan,
    sync_every: SyncEvery | None = None,
    *,
    second_work: SecondWork | None = None,
) -> FloatArray:
    """The time of each step, second work included, by the recipe's `sync_every` or another.

    >>> from evenstep import Packed, Recipe, Topology, make_plan
    >>> recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2))
    >>> step_times(make_plan([5, 3, 4], recipe)).tolist()
    [7.0]
    """
    works = works_of(plan, second_work)
    times = [slowest_of_steps(plan, work, sync_every) for work in works]
    return np.asarray(np.sum(times, axis=0), np.float64)


def step_means(plan: Plan, second_work: SecondWork | None = None) -> FloatArray:
    """The work of each step divided by its ranks: its time if ranks never waited."""
    step = plan.cell_of_micro_batch // plan.num_ranks
    both = np.sum(works_of(plan, second_work), axis=0)
    return sum_by(step, both, plan.num_steps) / plan.num_ranks


def step_imbalances(plan: Plan) -> FloatArray:
    """The time of each step over the mean work of a rank; 1 if it is even or empty.

    >>> from evenstep import Padded, Recipe, Topology, make_plan
    >>> recipe = Recipe(layout=Padded(samples=2), topology=Topology(dp=2), balance="none")
    >>> step_imbalances(make_plan([5, 3, 4], recipe)).round(2).tolist()
    [1.43]
    """
    mean = step_means(plan)
    return np.divide(step_times(plan), mean, out=np.ones(len(mean)), where=mean > 0)


def time_parts(plan: Plan, second_work: SecondWork | None = None) -> TimeParts:
    """Where the modelled time of all steps goes.

    >>> from evenstep import Padded, Recipe, Topology, make_plan
    >>> recipe = Recipe(layout=Padded(samples=2), topology=Topology(dp=2), balance="none")
    >>> time_parts(make_plan([5, 3, 4], recipe))
    TimeParts(work=6.0, padding=1.0, waiting=3.0)
    """
    cost, ranks = plan.recipe.cost, plan.num_ranks
    first, *second = [float(work.sum()) / ranks for work in works_of(plan, second_work)]
    tokens = float(cost.of_lengths(plan.segments.length).sum())
    work = min(first, (tokens + cost.per_micro_batch * plan.num_micro_batches) / ranks)
    total = float(step_times(plan, second_work=second_work).sum())
    waiting = max(0.0, total - first - sum(second))
    return TimeParts(work + sum(second), first - work, waiting)


# -------------------------------------------------------------------------------------------------
# Floors: the floors of the steps of a plan.
# -------------------------------------------------------------------------------------------------

BoolArray: TypeAlias = NDArray[np.bool_]

_TOGETHER = 1 << 15  # segments of steps that are measured together


class Floors:
    """The floors of the steps of a plan.

    segments of 5 and 3 on one rank, budget 8, cost 1 per token and 10 per micro-batch:
    Floor(packs=1, per_rank=1, time=18.0, binds='mean')
    """

    def __init__(self, plan: Plan) -> None:
        recipe, sample = plan.recipe, plan.segments.sample
        self.recipe, self.steps = recipe, plan.num_steps
        self.aligned = plan.aligned_lengths
        self.costs = recipe.cost.of_lengths(self.aligned)
        self.groups: IntArray | None = None
        if plan.groups is not None and recipe.groups == "micro_batch":
            self.groups = plan.groups[sample]
        self.second = second_costs(plan)
        shares = recipe.layout.shares(recipe)
        columns = {name: column[sample] for name, column in plan.columns.items()}
        values = recipe.layout.taken(recipe, self.aligned, columns)
        self.limits = [name for name in shares if name in values]
        self.caps = np.array([shares[name] for name in self.limits], np.float64)
        self.taken = [values[name] for name in self.limits]
        starts = plan.segment_offsets[plan.cell_offsets[:: plan.num_ranks]]
        self.starts: IntArray = starts

    @property
    def over(self) -> BoolArray:
        """Which segments exceed the budget or a limit by themselves, so that they run alone."""
        over = np.zeros(len(self.aligned), np.bool_)
        for column, cap in zip(self.taken, self.caps, strict=True):
            over |= column > cap
        if self.recipe.capacity is not None:
            over |= self.aligned > self.recipe.capacity
        return over

    def of_step(self, step: int, segments: slice) -> Floor:
        """The floor of a step with these segments."""
        if self._plain:
            starts = np.array([segments.start, segments.stop])
            return self._plain_floors(np.array([step]), starts)[0]
        units = self._units(segments)
        packs = self._packs(segments, units)
        return self._floors(np.array([step]), packs, self._loads(segments, units))[0]

    def of_steps(self, progress: Callable[[int, int], None] | None = None) -> list[Floor]:
        """The floors of all steps. `progress(done, total)` is called now and then."""
        found: list[Floor] = []
        for part in self._parts():
            found += part
            if progress is not None:
                progress(len(found), self.steps)
        return found

    def _parts(self) -> Iterator[list[Floor]]:
        """The floors of the steps, some at a time."""
        starts, first = self.starts.tolist(), 0
        while first < self.steps:
            last = first + 1
            longest = starts[last] - starts[first]
            while self._plain and last < self.steps:
                longest = max(longest, starts[last + 1] - starts[last])
                if (last + 1 - first) * longest > _TOGETHER:
                    break
                last += 1
            if self._plain:
                yield self._plain_floors(np.arange(first, last), self.starts[first : last + 1])
            else:
                yield [self.of_step(first, slice(starts[first], starts[last]))]
            first = last

    @property
    def _plain(self) -> bool:
        """Whether units are segments of packed rows and the only limit is on slots."""
        return (
            self.groups is None
            and self.second is None
            and self.limits == ["slots"]
            and self.recipe.layout.segments_per_row is None
        )

    def _plain_floors(self, steps: IntArray, starts: IntArray) -> list[Floor]:
        """The floors of several steps at once."""
        recipe, capacity = self.recipe, int(self.caps[0])
        loads = Loads.of_segments(recipe, self._rows(starts))
        bins = pack_bounds(loads.size, capacity, loads.packs_of_first(capacity))
        packs = divided_up(bins, recipe.layout.packs_per_micro_batch)
        return self._floors(steps, packs, loads)

    def _rows(self, starts: IntArray) -> IntArray:
        """Steps x aligned lengths, descending; missing ones are 0."""
        held = np.diff(starts)
        own = self.aligned[starts[0] : starts[-1]]
        if (held == held[0]).all():
            rows = own.reshape(len(held), -1)
        else:
            rows = np.zeros((len(held), int(held.max(initial=0))), np.int64)
            rows[np.arange(rows.shape[1]) < held[:, None]] = own
        return -np.sort(-rows, axis=1)

    def _floors(self, steps: IntArray, packs: IntArray, loads: Loads) -> list[Floor]:
        recipe = self.recipe
        ranks, multiple = recipe.topology.dp, recipe.topology.multiple
        per_rank = rounded_up(np.maximum(1, divided_up(packs, ranks)), multiple)
        if recipe.steps.micro_batches is not None:
            # All steps but the last have exactly that many.
            asked = np.where(steps < self.steps - 1, recipe.steps.micro_batches, 0)
            per_rank = np.maximum(per_rank, asked)
        time, binds = floor_times(recipe, loads, per_rank)
        columns = packs.tolist(), per_rank.tolist(), time.tolist(), binds
        return [Floor(*values) for values in zip(*columns, strict=True)]

    def _packs(self, segments: slice, units: IntArray | None) -> IntArray:
        """A lower bound on the micro-batches that are not empty."""
        taken = np.column_stack(
            [self._by_unit(column[segments], units) for column in self.taken]
            or [np.zeros((segments.stop - segments.start, 0))]
        )
        bins = bins_bound(taken, self.caps)
        layout = self.recipe.layout
        return np.array([layout.fewest_micro_batches(self.recipe, self.aligned[segments], bins)])

    def _units(self, segments: slice) -> IntArray | None:
        """The unit of each segment; None if each is one."""
        if self.groups is None:
            return None
        return np.unique(self.groups[segments], return_inverse=True)[1]

    def _loads(self, segments: slice, units: IntArray | None) -> Loads:
        second = None if self.second is None else self._by_unit(self.second[segments], units)
        return Loads.of_step(self.recipe, self.aligned[segments], units, second)

    @staticmethod
    def _by_unit(column: NDArray[Any], units: IntArray | None) -> NDArray[Any]:
        """A column of segments -> a column of units."""
        return column if units is None else sum_by(units, column, int(units.max(initial=-1)) + 1)


# -------------------------------------------------------------------------------------------------
# What keeps a plan from its ideal time, in one sentence.
# -------------------------------------------------------------------------------------------------

_MUCH = 1.01  # times the ideal from which a cause is named
_MORE_SAMPLES = "or take more samples per step (fewer updates)"


def bottleneck(table: StepTable, steps: slice) -> str:
    """The sequence or the constraint that keeps these steps over their ideal time; else empty.

    The ideal is the work without padding divided by the ranks, with as few micro-batches as the
    tokens fill. A sequence that costs more than the mean load of a rank is named first.
    """
    if table.plan.num_ranks > 1:
        named = _expensive_sample(table, steps)
        if named:
            return named
    ideal = table.unpadded[steps]
    over = np.divide(table.floor_time[steps], ideal, out=np.ones(len(ideal)), where=ideal > 0)
    worst = int(over.argmax()) if len(over) else 0
    if len(over) and over[worst] > _MUCH:
        cause = _of_floor(table, steps.start + worst)
        return f"{cause} No plan of this step takes less than {over[worst]:.2f} times the ideal."
    if table.time[steps].sum() > _MUCH * ideal.sum():
        return _of_plan(table, steps)
    return ""


def unpadded_times(plan: Plan, costs: FloatArray, starts: IntArray) -> FloatArray:
    """The ideal time of each step: no padding, even ranks, the fewest micro-batches for its slots.

    `costs` are those of the segments, with the second work.
    """
    recipe, held = plan.recipe, np.diff(starts)
    step = np.repeat(np.arange(len(held)), held)
    return sum_by(step, costs, len(held)) / plan.num_ranks + (
        recipe.cost.per_micro_batch * filled_micro_batches(plan, starts)
    )


def filled_micro_batches(plan: Plan, starts: IntArray) -> IntArray:
    """The micro-batches per rank that the slots of each step fill."""
    total = np.zeros(len(plan.segments) + 1, np.int64)
    np.cumsum(plan.aligned_lengths, out=total[1:])
    slots = np.diff(total[starts])
    budget = plan.recipe.layout.budget
    if budget is None:
        return np.ones(len(slots), np.int64)
    return np.maximum(1, divided_up(divided_up(slots, budget), plan.num_ranks))


def _expensive_sample(table: StepTable, steps: slice) -> str:
    """A sample that costs more than the mean load of a rank, and what would help; else empty."""
    costs, ideal = table.most_expensive[steps], table.mean_cost[steps]
    ratio = np.divide(costs, ideal, out=np.zeros(len(ideal)), where=ideal > 0)
    if not (ratio > _MUCH).any():
        return ""
    first = int((ratio > _MUCH).argmax())
    own = table.segments_of(slice(steps.start + first, steps.start + first + 1))
    at = own.start + int(table.floors.costs[own].argmax())
    return (
        f"{_sample(table.plan, at)} costs {ratio[first]:.2f} times the mean load of a rank, so "
        f"ranks cannot be even. Use context parallelism, split the sample, {_MORE_SAMPLES}."
    )


def _of_floor(table: StepTable, step: int) -> str:
    """The constraint behind the floor of a step."""
    plan, binds = table.plan, table.floor_binds[step]
    recipe, layout = plan.recipe, plan.recipe.layout
    own = table.segments_of(slice(step, step + 1))
    extra = int(table.floor_per_rank[step]) - int(table.filled[step])
    beyond = float(table.floor_time[step] - table.unpadded[step])
    if 2 * extra * recipe.cost.per_micro_batch >= beyond or binds == "mean":
        return _of_count(table, step, own)
    at = own.start + int(table.floors.costs[own].argmax())
    if binds == "waves":
        return (
            f"Long sequences cannot share a micro-batch, so all ranks wait for them in their wave "
            f"(the longest: {_sample(plan, at)}). Raise {_budget(plan)}, use context parallelism, "
            f"{_MORE_SAMPLES}."
        )
    if binds == "second":
        assert recipe.second_work is not None
        return (
            f"The work in {recipe.second_work.column} cannot be even between ranks: few samples "
            f"have most of it. Take more samples per step (fewer updates)."
        )
    if binds == "shape" and layout.pad_to is not None and extra <= 0:
        return (
            f"Every micro-batch has {layout.least_slots} slots (layout.pad_to={layout.pad_to}), "
            f"more than these samples fill. Lower layout.pad_to, {_MORE_SAMPLES}."
        )
    if binds == "widths" and recipe.topology.equal_widths and extra <= 0:
        return (
            f"This pipeline needs one width for all micro-batches of a step (the longest: "
            f"{_sample(plan, at)}). Set topology.variable_seq_lengths, {_MORE_SAMPLES}."
        )
    if binds == "widths" and recipe.equal_tokens:
        return (
            f"equal_tokens pads each wave to its widest micro-batch. Leave it out, {_MORE_SAMPLES}."
        )
    if extra > 0:
        return _of_count(table, step, own)
    return (
        f"{own.stop - own.start} sequences on {plan.num_ranks} ranks cannot be even (the most "
        f"expensive: {_sample(plan, at)}). Take more samples per step (fewer updates)."
    )


def _of_count(table: StepTable, step: int, own: slice) -> str:
    """What forces more micro-batches per rank than the slots fill."""
    plan, recipe, floors = table.plan, table.plan.recipe, table.floors
    count, filled = int(table.floor_per_rank[step]), int(table.filled[step])
    forced = f"{count} micro-batches per rank where its slots fill {filled}"
    packs = -(-int(table.floor_packs[step]) // plan.num_ranks)
    if recipe.steps.micro_batches == count and packs < count:
        return f"steps.micro_batches asks for {forced}. Lower it, {_MORE_SAMPLES}."
    if packs < count:
        return (
            f"This pipeline runs a multiple of {recipe.topology.multiple} micro-batches per rank: "
            f"a step has {forced}. Lower layout.max_tokens, {_MORE_SAMPLES}."
        )
    counts = {
        name: bins_bound(column[own].astype(np.float64)[:, None], floors.caps[d : d + 1])
        for d, (name, column) in enumerate(zip(floors.limits, floors.taken, strict=True))
    }
    name = max(counts, key=lambda key: counts[key]) if counts else "slots"
    if name == "slots" or counts[name] <= counts.get("slots", 0):
        return (
            f"Long sequences cannot share a micro-batch: a step needs {forced}. Raise "
            f"{_budget(plan)}, or use context parallelism."
        )
    owner = "layout" if name == "samples" else "limits"
    return f"{owner}.{name} needs {forced}. Raise it, or leave it out."


def _of_plan(table: StepTable, steps: slice) -> str:
    """The choice behind a plan that takes longer than its floor."""
    recipe = table.plan.recipe
    micro = table.micro_batches_of(steps)
    slots, tokens = int(table.slots[micro].sum()), int(table.tokens[micro].sum())
    if recipe.layout.segments_per_row is not None and slots > _MUCH * tokens:
        return (
            f"{100 * (slots - tokens) / slots:.0f} % of the slots are padding, because rows of "
            f"different lengths share a micro-batch. Use a packed layout."
        )
    if recipe.balance != "refined":
        return f"balance={recipe.balance!r} leaves ranks uneven. Use balance='refined'."
    return ""


def _sample(plan: Plan, segment: int) -> str:
    sample, length = plan.segments.sample[segment], plan.segments.length[segment]
    return f"sample {int(sample)} with {int(length)} tokens"


def _budget(plan: Plan) -> str:
    layout = plan.recipe.layout
    if layout.pad_to is not None:
        return "layout.pad_to"
    return "layout.samples" if layout.max_tokens is None else "layout.max_tokens"


# -------------------------------------------------------------------------------------------------
# StepTable: the numbers of each step of a plan that its measures use, one array per number.
# -------------------------------------------------------------------------------------------------


class StepTable:
    """Per step: its segments and micro-batches, tokens and cost by rank and by wave, its floor.

    `tokens_by_rank` is the most tokens of a rank, `tokens_by_wave` the sum over waves of the most
    tokens of a micro-batch; `rank_sum` and `lock_step` are the same for both works. `time` is the
    one that `sync_every` names. `mean_cost` leaves second work out. `batched_slots` are the slots
    of the same segments in padded batches of 8, in the order of the samples.
    """

    def __init__(self, plan: Plan, progress: Callable[[int, int], None] | None = None) -> None:
        self.plan = plan
        self.tokens, self.slots = plan.tokens, plan.slots
        offsets = plan.segment_offsets
        self._micro = plan.cell_offsets[:: plan.num_ranks]
        self._segments = offsets[self._micro]
        held = np.diff(offsets)
        counts = np.diff(plan.cell_offsets).reshape(plan.num_steps, plan.num_ranks)
        self.per_rank: IntArray = counts[:, 0] if plan.num_steps else counts.sum(axis=1)
        self._measure_work(held)
        self._measure_samples(held)
        self._measure_floors(progress)

    def _measure_work(self, held: IntArray) -> None:
        plan, steps = self.plan, self.plan.num_steps
        self.tokens_by_rank = slowest_of_steps(plan, self.tokens, "step")
        self.tokens_by_wave = slowest_of_steps(plan, self.tokens, "micro_batch")
        self.rank_sum, self.lock_step = step_times(plan, "step"), step_times(plan, "micro_batch")
        step = np.repeat(np.arange(steps), np.diff(self._micro))
        self.tokens_of_step = sum_by(step, self.tokens, steps).astype(np.int64)
        self.ideal = step_means(plan)
        self.mean_cost = sum_by(step, plan.costs, steps) / plan.num_ranks
        self.real = np.bincount(step[held > 0], minlength=steps)
        self.time = self.rank_sum if plan.recipe.sync_every == "step" else self.lock_step
        self.floors = Floors(plan)
        second = self.floors.second
        own = self.floors.costs if second is None else self.floors.costs + second
        self.filled = filled_micro_batches(plan, self._segments)
        self.unpadded = unpadded_times(plan, own, self._segments)
        self.most_expensive = _largest(self.floors.costs, self._segments)

    def _measure_samples(self, held: IntArray) -> None:
        plan, count = self.plan, len(self.plan.lengths)
        sample = plan.segments.sample
        self.kept = sum_by(sample, plan.segments.length, count).astype(np.int64)
        self.num_segments = np.bincount(sample, minlength=count)
        self.alone = self.floors.over & (np.repeat(held, held) == 1)
        self.batched_slots = _batched_slots(plan, self._segments)

    def _measure_floors(self, progress: Callable[[int, int], None] | None) -> None:
        floors = self.floors.of_steps(progress)
        self.floor_packs = np.array([floor.packs for floor in floors], np.int64)
        self.floor_per_rank = np.array([floor.per_rank for floor in floors], np.int64)
        self.floor_time = np.array([floor.time for floor in floors], np.float64)
        self.floor_binds = [floor.binds for floor in floors]

    def micro_batches_of(self, steps: slice) -> slice:
        """The micro-batches of these steps."""
        return slice(int(self._micro[steps.start]), int(self._micro[steps.stop]))

    def segments_of(self, steps: slice) -> slice:
        """The segments of these steps."""
        return slice(int(self._segments[steps.start]), int(self._segments[steps.stop]))

    def samples_of(self, steps: slice) -> IntArray:
        """The samples of these steps, ascending."""
        if steps == slice(0, self.plan.num_steps):
            return np.flatnonzero(self.num_segments)
        return np.unique(self.plan.segments.sample[self.segments_of(steps)])


def _largest(values: FloatArray, starts: IntArray) -> FloatArray:
    """The largest value of each step; 0 where it has none."""
    held = np.diff(starts)
    found = np.zeros(len(held))
    if len(values):
        found[held > 0] = np.maximum.reduceat(values, starts[:-1][held > 0])
    return found


def _batched_slots(plan: Plan, starts: IntArray, size: int = 8) -> IntArray:
    """The slots of each step in padded batches of `size` segments, in the order of the samples.

    starts [0, 3]: one step; its lengths [5, 2, 4] in batches of 2 -> 2 · 5 + 1 · 4 slots
    """
    segments, held = plan.segments, np.diff(starts)
    step = np.repeat(np.arange(len(held)), held)
    order = np.lexsort((segments.start, segments.sample, step))
    batches = divided_up(held, size)
    first = np.arange(int(batches.sum())) - np.repeat(offsets_of(batches)[:-1], batches)
    first = np.repeat(starts[:-1], batches) + size * first
    if not len(first):
        return np.zeros(len(held), np.int64)
    longest = np.maximum.reduceat(segments.length[order], first)
    rows = np.diff(first, append=len(order))
    slots = rows * rounded_up(longest, plan.recipe.width_unit)
    return sum_by(np.repeat(np.arange(len(held)), batches), slots, len(held)).astype(np.int64)


# -------------------------------------------------------------------------------------------------
# Measures of a plan as plain numbers.
#
# Fill: slots, padding and bin utilisation. Balance: imbalance per micro-batch and per step,
# relative
# to the mean of this plan. Distance from the optimum: packs and time relative to a lower bound for
# any plan of the same lengths and recipe (`core.bounds`), and what limits them (`bottleneck`).
# `packs_optimal` and `balance_optimal` are proofs. If they are false, the plan may still be
# optimal.
# -------------------------------------------------------------------------------------------------

Value: TypeAlias = Any  # a number, a bool or a string
Progress: TypeAlias = Callable[[int, int], None]


def of_plan(
    plan: Plan, width: int | None = None, progress: Progress | None = None
) -> dict[str, Value]:
    """The measures over all steps.

    `slots_before` counts every sample at `width`, the padded input's; by default it counts padded
    batches of 8 samples in order, which most training scripts form.
    """
    table = StepTable(plan, progress)
    dropped = plan.step_of < 0
    return {
        "num_steps": plan.num_steps,
        "num_ranks": plan.num_ranks,
        **_measure(table, slice(0, plan.num_steps), width),
        "num_dropped": int(dropped.sum()),
        "tokens_dropped": int(plan.lengths[dropped].sum()),
    }


def of_steps(plan: Plan, progress: Progress | None = None) -> list[dict[str, Value]]:
    """The measures of each step. A dropped sample belongs to no step."""
    table = StepTable(plan, progress)
    return [
        {"step": step, **_measure(table, slice(step, step + 1), None)}
        for step in range(plan.num_steps)
    ]


def _measure(table: StepTable, steps: slice, width: int | None) -> dict[str, Value]:
    plan, recipe = table.plan, table.plan.recipe
    micro, picked = table.micro_batches_of(steps), table.segments_of(steps)
    samples = table.samples_of(steps)
    tokens = int(table.tokens[micro].sum())
    slots = int(table.slots[micro].sum())
    before = len(samples) * width if width else int(table.batched_slots[steps].sum())
    count, real = micro.stop - micro.start, int(table.real[steps].sum())
    ideal = float(table.ideal[steps].sum())
    time, floor = table.time[steps], table.floor_time[steps]
    total, least = float(time.sum()), float(floor.sum())
    return {
        "num_samples": len(samples),
        "num_segments": picked.stop - picked.start,
        "num_micro_batches": count,
        "num_empty_micro_batches": count - real,
        "tokens": tokens,
        "slots": slots,
        "padding": slots - tokens,
        "padding_ratio": _ratio(slots - tokens, slots),
        "slots_before": before,
        "removed_padding": before - slots,
        "removed_padding_ratio": _ratio(before - slots, before),
        **_bins(table, micro, steps),
        "imbalance_tokens_step": _over(table.tokens_by_rank[steps], tokens, plan),
        "imbalance_tokens_micro_batch": _over(table.tokens_by_wave[steps], tokens, plan),
        "imbalance_cost_step": _or_one(float(table.rank_sum[steps].sum()), ideal),
        "imbalance_cost_micro_batch": _or_one(float(table.lock_step[steps].sum()), ideal),
        "num_packs": real,
        "num_packs_bound": int(table.floor_packs[steps].sum()),
        "packs_optimal": bool((table.per_rank[steps] == table.floor_per_rank[steps]).all()),
        "balance": recipe.balance,
        "sync_every": recipe.sync_every,
        "time_over_floor": _or_one(total, least),
        "balance_optimal": bool((time <= floor * (1 + 1e-9)).all()),
        "bottleneck": bottleneck(table, steps),
        **_overflow(table, samples, picked),
    }


def _bins(table: StepTable, micro: slice, steps: slice) -> dict[str, Value]:
    """NeMo-RL's packing metrics over the micro-batches that are not empty."""
    tokens = table.tokens[micro]
    tokens = tokens[tokens > 0]
    capacity = table.plan.recipe.layout.budget or int(table.slots[micro].max(initial=1))
    use = np.minimum(tokens / capacity, 1.0) if len(tokens) else np.ones(1)
    spread = float(use.std(ddof=1)) if len(use) > 1 else 0.0
    least = int(divided_up(table.tokens_of_step[steps], capacity).sum())
    return {
        "bin_utilization": float(use.mean()),
        "waste_ratio": float(1 - use.mean()),
        "bin_balance": 1 - spread / float(use.mean()),
        "packing_efficiency": _ratio(least, len(tokens)) if len(tokens) else 1.0,
    }


def _overflow(table: StepTable, samples: IntArray, segments: slice) -> dict[str, Value]:
    """How many samples exceeded the budget or a limit by themselves, by how they were handled."""
    missing = table.plan.lengths[samples] - table.kept[samples]
    return {
        "num_truncated": int((missing > 0).sum()),
        "tokens_truncated": int(missing.sum()),
        "num_split": int((table.num_segments[samples] > 1).sum()),
        "num_alone": int(table.alone[segments].sum()),
    }


def _over(largest: FloatArray, total: int, plan: Plan) -> float:
    return float(largest.sum()) * plan.num_ranks / total if total else 1.0


def _or_one(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
