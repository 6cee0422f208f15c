"""Measures of a plan: the time of its steps, its floors, its stats, its bottleneck.

time        `step_times` and what it is made of: planning, stats, reports and pictures ask these
            functions alone
floors      `Floors`: what no plan of the same steps can beat (`core.bounds`)
stats       `of_plan`, `of_steps`: plain numbers, from a `StepTable`. Fill: slots, padding, bins.
            Balance: imbalance relative to the mean of this plan. Distance from the optimum: packs
            and time relative to the floor. `packs_optimal` and `balance_optimal` are proofs; if
            they are false, the plan may still be optimal
bottleneck  what keeps a plan from its ideal time, in one sentence
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.bounds import Floor, StepFloor, bins_bound, pack_bounds, row_bound
from evenstep.core.layout import Padded
from evenstep.core.ragged import (
    ELSEWHERE,
    BoolArray,
    FloatArray,
    IntArray,
    Segments,
    divided_up,
    offsets_of,
    rounded_up,
    sum_by,
)
from evenstep.core.text import MOST

if TYPE_CHECKING:
    from evenstep.core.cost import Cost
    from evenstep.core.plan import Plan
    from evenstep.core.recipe import SecondWork, SyncEvery


Value: TypeAlias = Any  # a number, a bool or a string
Progress: TypeAlias = Callable[[int, int], None]

_TOGETHER = 1 << 15  # segments of steps that are measured together
_BATCH = 8  # samples of a padded batch that stats compare slots with

# The time of a step. A micro-batch has one or two works: its cost, and the second work of its
# samples. Ranks wait for each other in each of them, so the time of a step is the sum of the times
# of its works. Micro-batches of waves in which ranks share sequences also exchange keys and values;
# ranks meet in these waves, whatever `sync_every` says.


class TimeParts(NamedTuple):
    """What a rank spends its time on, in the unit of the cost; a mean over ranks.

    work     real tokens, second work, exchanges, and the fixed cost of micro-batches
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


def waves_that_share(plan: Plan) -> BoolArray:
    """Whether each micro-batch is in a wave in which ranks share sequences."""
    starts = plan.cell_offsets
    step, counts = plan.cell_of_micro_batch // plan.num_ranks, np.diff(starts)
    wave = np.arange(plan.num_micro_batches) - np.repeat(starts[:-1], counts)
    number = step * int(counts.max(initial=1)) + wave
    return np.isin(number, number[plan.exchanged[1] > 0])


def exchange_costs(plan: Plan, cost: Cost | None = None) -> FloatArray:
    """What each micro-batch sends or receives, the larger of both, and what its exchanges cost.

    By the recipe's cost, or another.
    """
    if not plan.segments.is_shared.any():
        return np.zeros(plan.num_micro_batches)
    cost, moved = cost or plan.recipe.cost, np.maximum(*plan.exchanged)
    return np.asarray(cost.moved * moved + cost.exchange * waves_that_share(plan), np.float64)


def _times(plan: Plan, work: FloatArray, sync_every: SyncEvery | None = None) -> FloatArray:
    """The time of one work of each step: in waves that share sequences, ranks always wait."""
    if (sync_every or plan.recipe.sync_every) != "step" or not plan.segments.is_shared.any():
        return slowest_of_steps(plan, work, sync_every)
    met = waves_that_share(plan)
    alone = slowest_of_steps(plan, np.where(met, 0.0, work), "step")
    return alone + slowest_of_steps(plan, np.where(met, work, 0.0), "micro_batch")


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
    """The works of each micro-batch: its cost with exchanges, and its second work, if any."""
    second, first = second_costs(plan, second_work), plan.costs + exchange_costs(plan)
    if second is None:
        return [first]
    return [first, sum_by(plan.micro_batch_of_segment, second, plan.num_micro_batches)]


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
    times = [_times(plan, work, sync_every) for work in works]
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
    tokens = float(cost.of_lengths(plan.segments.length, plan.segments.behind).sum())
    fixed = cost.per_micro_batch * plan.num_micro_batches + float(exchange_costs(plan).sum())
    work = min(first, (tokens + fixed) / ranks)
    total = float(step_times(plan, second_work=second_work).sum())
    waiting = max(0.0, total - first - sum(second))
    return TimeParts(work + sum(second), first - work, waiting)


class Floors:
    """The floors of the steps of a plan.

    segments of 5 and 3 on one rank, budget 8, cost 1 per token and 10 per micro-batch:
    Floor(packs=1, per_rank=1, time=18.0, binds='mean')
    """

    def __init__(self, plan: Plan) -> None:
        recipe, segments, counted = plan.recipe, plan.whole_segments, plan.own
        if segments.parent is not None:
            # What ranks share counts once, in one piece, where its first part is.
            first = segments.parent != ELSEWHERE
            length = np.where(segments.is_shared, plan.ends(segments.sample), segments.length)
            whole = segments.sample, segments.start, length
            segments = Segments(*(column[first] for column in whole))
            counted = counted.copy()
            counted[counted] = first
        self.segments, self.counted, self.steps = segments, counted, plan.num_steps
        self.recipe, sample = recipe, segments.sample
        starts = plan.segment_offsets[plan.cell_offsets[:: plan.num_ranks]]
        self.starts: IntArray = offsets_of(counted.astype(np.int64))[starts]
        self.aligned = rounded_up(segments.length, recipe.topology.alignment)
        self.whole_costs = recipe.cost.of_lengths(self.aligned)
        self.behind: IntArray | None = None
        if plan.prefixes is not None:
            # What a sample can share with others of its step is no work of its own.
            step = np.repeat(np.arange(self.steps), np.diff(self.starts))
            order, forks = plan.prefixes.forks(segments, step)
            self.behind = np.empty_like(forks)
            self.behind[order] = forks
            self.aligned = segments.length - self.behind
        self.costs = recipe.cost.of_lengths(self.aligned, self.behind)
        self.second = second_costs(plan)
        self.groups: IntArray | None = None
        if plan.groups is not None and recipe.groups == "micro_batch":
            self.groups = plan.groups[sample]
        # What adds up over the segments of a pack: its limits, and what each segment takes of them.
        columns = {name: column[sample] for name, column in plan.columns.items()}
        shares = recipe.layout.shares(recipe, self.aligned, columns, self.behind)
        self.limits = list(shares)
        self.caps = np.array([most for most, _ in shares.values()], np.float64)
        self.taken = [taken for _, taken in shares.values()]

    def of_steps(self, progress: Progress | None = None) -> list[Floor]:
        """The floors of all steps. `progress(done, total)` is called now and then."""
        longest = int(np.diff(self.starts).max(initial=1))
        together, floors = max(1, _TOGETHER // max(longest, 1)), list[Floor]()
        for first in range(0, self.steps, together):
            floors += self._between(first, min(first + together, self.steps))
            if progress is not None:
                progress(len(floors), self.steps)
        return floors

    def _between(self, first: int, last: int) -> list[Floor]:
        """The floors of the steps from `first` up to `last`."""
        recipe, starts = self.recipe, self.starts[first : last + 1]
        segments = slice(int(starts[0]), int(starts[-1]))
        unit_of = self._unit_of(segments)
        second = None if self.second is None else sum_by(unit_of, self.second[segments], 0)
        behind = None if self.behind is None else self.behind[segments]
        offsets = starts - starts[0]
        units = StepFloor(recipe, self.aligned[segments], unit_of, second, offsets, behind)
        # The fewest packs give the fewest micro-batches per rank, and these the least time.
        packs = self._packs(units, starts.tolist())
        ranks, multiple = recipe.topology.dp, recipe.topology.multiple
        per_rank = rounded_up(np.maximum(1, divided_up(packs, ranks)), multiple)
        if recipe.steps.micro_batches is not None:
            # All steps but the last have exactly that many.
            exact = np.arange(first, last) < self.steps - 1
            per_rank = np.maximum(per_rank, np.where(exact, recipe.steps.micro_batches, 0))
        time, binds = units.times(per_rank)
        columns = packs.tolist(), per_rank.tolist(), time.tolist(), binds
        return [Floor(*values) for values in zip(*columns, strict=True)]

    def _unit_of(self, segments: slice) -> IntArray:
        """The unit of each segment: itself, or its group."""
        if self.groups is None:
            return np.arange(segments.stop - segments.start)
        return np.unique(self.groups[segments], return_inverse=True)[1]

    def _packs(self, units: StepFloor, starts: list[int]) -> IntArray:
        """A lower bound on the micro-batches of each step that are not empty."""
        recipe, layout = self.recipe, self.recipe.layout
        rows = layout.packs_per_micro_batch
        if recipe.sharing is not None:  # segments divide
            return divided_up(units.size.sum(axis=1), recipe.capacity or 1)
        if self.limits == ["slots"]:
            packs = units.packs if rows == 1 else None
            return divided_up(pack_bounds(units.size, int(self.caps[0]), packs), rows)
        packs = np.zeros(len(starts) - 1, np.int64)
        for step, segments in enumerate(map(slice, starts, starts[1:])):
            unit_of = self._unit_of(segments)
            columns = [sum_by(unit_of, column[segments], 0) for column in self.taken]
            taken = np.column_stack(columns or [np.zeros((len(unit_of), 0))])
            packs[step] = divided_up(bins_bound(taken, self.caps), rows)
            if isinstance(layout, Padded):
                widths = layout.step_widths(recipe, self.aligned[segments])
                packs[step] = max(packs[step], row_bound(layout.rows_that_fit(recipe, widths)))
        return packs


class StepTable:
    """The numbers of each step of a plan that its stats use, one array per number.

    tokens, slots   of each micro-batch
    tokens_by_rank  the most tokens of a rank; `tokens_by_wave` the sum over waves of the most
                    tokens of a micro-batch
    rank_sum        the time if ranks wait once per step; `lock_step` if they wait in every wave
    time            the one of these that `sync_every` names
    ideal           the work divided by the ranks; `mean_cost` leaves second work out
    filled          micro-batches per rank that the slots fill; `real` those that are not empty
    unpadded        the ideal time: no padding, even ranks, `filled` micro-batches
    most_expensive  the cost of the most expensive segment
    batched_slots   slots of the same segments in padded batches of 8, in the order of the samples
    floor_*         the floors: see `core.bounds.Floor`
    """

    def __init__(self, plan: Plan, progress: Progress | None = None) -> None:
        recipe, steps, ranks = plan.recipe, plan.num_steps, plan.num_ranks
        self.plan, self.floors = plan, Floors(plan)
        floors, starts = self.floors, self.floors.starts
        self._micro, self._segments = plan.cell_offsets[::ranks], starts
        counts = np.diff(plan.cell_offsets).reshape(steps, ranks)
        self.per_rank: IntArray = counts[:, 0] if steps else counts.sum(axis=1)
        # Sums over micro-batches.
        step = np.repeat(np.arange(steps), np.diff(self._micro))
        works = works_of(plan)
        self.tokens, self.slots = plan.tokens, plan.slots
        self.tokens_of_step = sum_by(step, self.tokens, steps).astype(np.int64)
        self.tokens_by_rank = slowest_of_steps(plan, self.tokens, "step")
        self.tokens_by_wave = slowest_of_steps(plan, self.tokens, "micro_batch")
        by_rank = [slowest_of_steps(plan, work, "step") for work in works]
        by_wave = [slowest_of_steps(plan, work, "micro_batch") for work in works]
        self.rank_sum: FloatArray = np.sum(by_rank, axis=0)
        self.lock_step: FloatArray = np.sum(by_wave, axis=0)
        self.time: FloatArray = np.sum([_times(plan, work) for work in works], axis=0)
        self.ideal = sum_by(step, np.sum(works, axis=0), steps) / ranks
        self.mean_cost = sum_by(step, works[0], steps) / ranks
        self.real = np.bincount(step[self.tokens > 0], minlength=steps)
        # Sums over segments.
        step = np.repeat(np.arange(steps), np.diff(starts))
        whole, samples = floors.segments, len(plan.lengths)
        self.whole_segments = whole
        self.kept = sum_by(whole.sample, whole.length, samples).astype(np.int64)
        self.num_segments = np.bincount(whole.sample, minlength=samples)
        self.is_shared = np.zeros(samples, bool)
        self.is_shared[plan.segments.sample[plan.segments.is_shared]] = True
        in_micro_batch = np.diff(plan.segment_offsets)
        # Segments that exceed the budget or a limit by themselves run alone.
        over = floors.aligned > (MOST if recipe.capacity is None else recipe.capacity)
        for column, cap in zip(floors.taken, floors.caps, strict=True):
            over |= column > cap
        alone = np.repeat(in_micro_batch, in_micro_batch)[floors.counted] == 1
        self.alone = over & alone & ~self.is_shared[whole.sample]
        self.batched_slots = _batched_slots(whole, starts, recipe.width_unit)
        self.filled = np.ones(steps, np.int64)
        if recipe.layout.budget is not None:
            slots = np.diff(offsets_of(floors.aligned)[starts])
            full = divided_up(divided_up(slots, recipe.layout.budget), ranks)
            self.filled = np.maximum(1, full)
        costs = floors.costs if floors.second is None else floors.costs + floors.second
        self.unpadded = sum_by(step, costs, steps) / ranks
        self.unpadded += recipe.cost.per_micro_batch * self.filled
        self.most_expensive = np.zeros(steps)
        np.maximum.at(self.most_expensive, step, floors.whole_costs)
        columns = list(zip(*floors.of_steps(progress), strict=True)) or [()] * 4
        self.floor_packs, self.floor_per_rank = (np.array(each, np.int64) for each in columns[:2])
        self.floor_time, self.floor_binds = np.array(columns[2], np.float64), columns[3]

    def micro_batches_of(self, steps: slice) -> slice:
        """The micro-batches of these steps."""
        return slice(int(self._micro[steps.start]), int(self._micro[steps.stop]))

    def segments_of(self, steps: slice) -> slice:
        """The segments of these steps, without shared prefixes."""
        return slice(int(self._segments[steps.start]), int(self._segments[steps.stop]))

    def samples_of(self, steps: slice) -> IntArray:
        """The samples of these steps, ascending."""
        if steps == slice(0, self.plan.num_steps):
            return np.flatnonzero(self.num_segments)
        return np.unique(self.whole_segments.sample[self.segments_of(steps)])


def _batched_slots(segments: Segments, starts: IntArray, unit: int) -> IntArray:
    """The slots of each step in padded batches of segments, in the order of the samples.

    starts [0, 3]: one step; its lengths [5, 2, 4] in batches of 2 -> 2 · 5 + 1 · 4 slots
    """
    steps = len(starts) - 1
    step = np.repeat(np.arange(steps), np.diff(starts))
    order = np.lexsort((segments.start, segments.sample, step))
    first = np.flatnonzero((np.arange(len(order)) - starts[step]) % _BATCH == 0)  # of each batch
    if not len(first):
        return np.zeros(steps, np.int64)
    longest = np.maximum.reduceat(segments.length[order], first)
    rows = np.diff(first, append=len(order))
    slots = rows * rounded_up(longest, unit)
    return sum_by(step[first], slots, steps).astype(np.int64)


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


def of_steps(plan: Plan) -> list[dict[str, Value]]:
    """The measures of each step. A dropped sample belongs to no step."""
    table = StepTable(plan)
    return [
        {"step": step, **_measure(table, slice(step, step + 1), None)}
        for step in range(plan.num_steps)
    ]


def _measure(table: StepTable, steps: slice, width: int | None) -> dict[str, Value]:
    recipe, ranks = table.plan.recipe, table.plan.num_ranks
    micro, picked = table.micro_batches_of(steps), table.segments_of(steps)
    samples = table.samples_of(steps)
    missing = table.plan.lengths[samples] - table.kept[samples]
    tokens = int(table.tokens[micro].sum())
    slots = int(table.slots[micro].sum())
    before = len(samples) * width if width else int(table.batched_slots[steps].sum())
    count, real = micro.stop - micro.start, int(table.real[steps].sum())
    ideal = float(table.ideal[steps].sum())
    time, floor = table.time[steps], table.floor_time[steps]
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
        "imbalance_tokens_step": _ratio(ranks * table.tokens_by_rank[steps].sum(), tokens, 1.0),
        "imbalance_tokens_micro_batch": _ratio(
            ranks * table.tokens_by_wave[steps].sum(), tokens, 1.0
        ),
        "imbalance_cost_step": _ratio(table.rank_sum[steps].sum(), ideal, 1.0),
        "imbalance_cost_micro_batch": _ratio(table.lock_step[steps].sum(), ideal, 1.0),
        "num_packs": real,
        "num_packs_bound": int(table.floor_packs[steps].sum()),
        "packs_optimal": bool((table.per_rank[steps] == table.floor_per_rank[steps]).all()),
        "balance": recipe.balance,
        "sync_every": recipe.sync_every,
        "time_over_floor": _ratio(time.sum(), floor.sum(), 1.0),
        "balance_optimal": bool((time <= floor * (1 + 1e-9)).all()),
        "bottleneck": bottleneck(table, steps),
        "num_truncated": int((missing > 0).sum()),
        "tokens_truncated": int(missing.sum()),
        "num_split": int((table.num_segments[samples] > 1).sum()),
        "num_alone": int(table.alone[picked].sum()),
        **_between_ranks(table, micro, samples),
        **_sharing(table, picked, tokens),
    }


def _between_ranks(table: StepTable, micro: slice, samples: IntArray) -> dict[str, Value]:
    """The samples that ranks share, the waves in which they do, and the tokens received."""
    plan = table.plan
    if plan.recipe.sharing is None:
        return {}
    return {
        "num_shared": int(table.is_shared[samples].sum()),
        "num_waves_that_share": int(waves_that_share(plan)[micro].sum()) // plan.num_ranks,
        "tokens_received": int(plan.exchanged[1][micro].sum()),
    }


def _sharing(table: StepTable, picked: slice, tokens: int) -> dict[str, Value]:
    """The tokens that shared prefixes save; those that could be saved are either saved or repeated
    in several micro-batches."""
    if table.floors.behind is None:
        return {}
    possible = int(table.floors.behind[picked].sum())
    saved = int(table.whole_segments.length[picked].sum()) - tokens
    return {
        "shared_tokens_possible": possible,
        "shared_tokens_saved": saved,
        "shared_tokens_repeated": possible - saved,
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
        "packing_efficiency": _ratio(least, len(tokens), 1.0),
    }


def _ratio(part: float, whole: float, empty: float = 0.0) -> float:
    return float(part / whole) if whole else empty


_MUCH = 1.01  # times the ideal from which a cause is named
_MORE_SAMPLES = "or take more samples per step (fewer updates)"


def bottleneck(table: StepTable, steps: slice) -> str:
    """The sequence or the constraint that keeps these steps over their ideal time; else empty.

    The ideal is the work without padding divided by the ranks, with as few micro-batches as the
    tokens fill. A sequence that costs more than the mean load of a rank is named first.
    """
    # The mean of one rank is its load, which no sample exceeds.
    costs, mean = table.most_expensive[steps], table.mean_cost[steps]
    ratio = np.divide(costs, mean, out=np.zeros(len(mean)), where=mean > 0)
    shares = table.plan.recipe.sharing is not None
    if table.plan.num_ranks > 1 and (ratio > _MUCH).any() and not shares:
        first = int((ratio > _MUCH).argmax())
        remedy = f"Set sharing=Sharing(), so that ranks share it, {_MORE_SAMPLES}."
        return (
            f"{_most_expensive(table, steps.start + first)} costs {ratio[first]:.2f} times the "
            f"mean load of a rank, so ranks cannot be even. {remedy}"
        )
    # Then what no plan of the worst step could avoid.
    ideal = table.unpadded[steps]
    over = np.divide(table.floor_time[steps], ideal, out=np.ones(len(ideal)), where=ideal > 0)
    worst = int(over.argmax()) if len(over) else 0
    if len(over) and over[worst] > _MUCH:
        cause = _of_floor(table, steps.start + worst)
        return f"{cause} No plan of this step takes less than {over[worst]:.2f} times the ideal."
    if table.time[steps].sum() <= _MUCH * ideal.sum():
        return ""
    # Last, the choice behind a plan that takes longer than its floor.
    recipe, micro = table.plan.recipe, table.micro_batches_of(steps)
    slots, tokens = int(table.slots[micro].sum()), int(table.tokens[micro].sum())
    if recipe.layout.segments_per_row is not None and slots > _MUCH * tokens:
        return (
            f"{100 * (slots - tokens) / slots:.0f} % of the slots are padding, because rows of "
            f"different lengths share a micro-batch. Use a packed layout."
        )
    repeated = _sharing(table, table.segments_of(steps), tokens).get("shared_tokens_repeated", 0)
    if 100 * repeated > tokens:
        return (
            f"{100 * repeated / tokens:.0f} % of the tokens are shared prefixes that several "
            f"micro-batches compute, so that they are even and within their limits. Take more "
            f"samples per step (fewer updates)."
        )
    if recipe.balance != "refined":
        return f"balance={recipe.balance!r} leaves ranks uneven. Use balance='refined'."
    return ""


def _of_floor(table: StepTable, step: int) -> str:
    """The constraint behind the floor of a step."""
    plan, binds = table.plan, table.floor_binds[step]
    recipe, layout = plan.recipe, plan.recipe.layout
    segments = table.segments_of(slice(step, step + 1))
    # Micro-batches beyond those that the slots fill, and time beyond the ideal.
    extra = int(table.floor_per_rank[step]) - int(table.filled[step])
    beyond = float(table.floor_time[step] - table.unpadded[step])
    if 2 * extra * recipe.cost.per_micro_batch >= beyond or binds == "mean":
        return _of_count(table, step, segments)
    longest = _most_expensive(table, step)
    if binds == "waves":
        return (
            f"Long sequences cannot share a micro-batch, so all ranks wait for them in their wave "
            f"(the longest: {longest}). Raise {_budget(plan)}"
            f"{', use context parallelism' if table.floors.behind is None else ''}, "
            f"{_MORE_SAMPLES}."
        )
    if binds == "cuts":
        return (
            f"Rows of different lengths share a padded micro-batch, because each further one costs "
            f"{recipe.cost.per_micro_batch:g}. Use a packed layout, {_MORE_SAMPLES}."
        )
    if binds == "second" and recipe.second_work is not None:
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
            f"{longest}). Set topology.variable_seq_lengths, {_MORE_SAMPLES}."
        )
    if binds == "widths" and recipe.equal_tokens:
        return (
            f"equal_tokens pads each wave to its widest micro-batch. Leave it out, {_MORE_SAMPLES}."
        )
    if extra > 0:
        return _of_count(table, step, segments)
    return (
        f"{segments.stop - segments.start} sequences on {plan.num_ranks} ranks cannot be even (the "
        f"most expensive: {longest}). Take more samples per step (fewer updates)."
    )


def _of_count(table: StepTable, step: int, segments: slice) -> str:
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
    # The limit that by itself needs the most packs.
    counts = {
        name: bins_bound(column[segments].astype(np.float64)[:, None], floors.caps[d : d + 1])
        for d, (name, column) in enumerate(zip(floors.limits, floors.taken, strict=True))
    }
    name = max(counts, key=lambda key: counts[key]) if counts else "slots"
    if name == "slots" or counts[name] <= counts.get("slots", 0):
        return (
            f"Long sequences cannot share a micro-batch: a step needs {forced}. Raise "
            f"{_budget(plan)}{', or use context parallelism' if floors.behind is None else ''}."
        )
    owner = "layout" if name == "samples" else "limits"
    return f"{owner}.{name} needs {forced}. Raise it, or leave it out."


def _most_expensive(table: StepTable, step: int) -> str:
    """The most expensive sample of a step."""
    segments = table.segments_of(slice(step, step + 1))
    at = segments.start + int(table.floors.whole_costs[segments].argmax())
    sample, length = table.whole_segments.sample[at], table.whole_segments.length[at]
    return f"sample {int(sample)} with {int(length)} tokens"


def _budget(plan: Plan) -> str:
    layout = plan.recipe.layout
    if layout.pad_to is not None:
        return "layout.pad_to"
    return "layout.samples" if layout.max_tokens is None else "layout.max_tokens"
