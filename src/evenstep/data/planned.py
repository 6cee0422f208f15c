"""PlannedStream: known lengths -> steps, planned alike on every rank without communication."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenstep.core.measures import time_of_works, works_of
from evenstep.core.plan import (
    MicroBatch,
    Plan,
    on_fewer_ranks,
    recipe_on_fewer_ranks,
    samples_by_step,
    step_plan,
)
from evenstep.core.ragged import (
    FloatArray,
    IntArray,
    Ragged,
    Segments,
    divided_up,
    frozen,
    rounded_up,
)
from evenstep.core.recipe import Recipe, Steps, World, check_recipe
from evenstep.core.step import Cursor, Step
from evenstep.core.text import seed_number, truth_value, whole_number
from evenstep.data.dataset import MapStyle, as_measured, column_digest
from evenstep.data.files import refuse_empty
from evenstep.data.order import EpochOrder, EpochUnits
from evenstep.data.source import MeasuredSource, is_seeded
from evenstep.data.stream import (
    Estimate,
    OnError,
    SampleLookup,
    check_lengths,
    digest_of,
    lengths_digest,
    per_sample,
    steps_of_pass,
    values_digest,
    whole_per_sample,
    world_for,
)
from evenstep.errors import ConfigError, CursorError, InputError, PlanError
from evenstep.planning.inputs import check_names
from evenstep.planning.planner import make_plan, plan_step, step_size

# streams.position --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Before unit `position` of `epoch`, after `step` steps. Independent of ranks and workers.

    `inside` is for callers that take single micro-batches and may stop within a step. It holds
    (ranks, micro-batches done by each rank) for every number of ranks that has worked on the
    next step.

    >>> StreamPosition(epoch=1, position=24, step=9).to_dict()
    {'epoch': 1, 'position': 24}
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    inside: tuple[tuple[int, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without `step`, which the cursor holds."""
        data: dict[str, Any] = {"epoch": self.epoch, "position": self.position}
        return {**data, "inside": [list(pair) for pair in self.inside]} if self.inside else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], step: int) -> StreamPosition:
        """The inverse of `to_dict`."""
        try:
            inside = tuple((int(ranks), int(done)) for ranks, done in data.get("inside", ()))
            return cls(int(data["epoch"]), int(data["position"]), step, inside)
        except (KeyError, TypeError, ValueError) as error:
            raise CursorError(
                f"the position {dict(data)!r} in the cursor is malformed ({error!r}). Use an "
                f"earlier checkpoint."
            ) from None

    def within(self, ranks: int, done: int) -> StreamPosition:
        """The same step, after each of `ranks` ranks has done `done` micro-batches of it."""
        before = self.inside[:-1] if self.inside and self.inside[-1][0] == ranks else self.inside
        return StreamPosition(self.epoch, self.position, self.step, (*before, (ranks, done)))


# streams.step_work -------------------------------------------------------------------------

Progress: TypeAlias = Callable[[int, int], None]


class StepBounds(NamedTuple):
    """Where a step begins and ends, and whether it is the last of its epoch."""

    before: StreamPosition
    after: StreamPosition
    last: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepWork:
    """The plan of a step, whose sample i has the id `sample_ids[i]` in the source.

    `rest` holds what each rank still has to do of a step that was begun before; None for a whole
    step.
    """

    plan: Plan
    sample_ids: IntArray
    rest: list[list[MicroBatch]] | None = None

    def micro_batches(self, rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of a rank, with samples named by id."""
        if self.rest is not None:
            return tuple(self.rest[rank])
        return tuple(micro.renumbered(self.sample_ids) for micro in self.plan[0, rank])

    @property
    def count(self) -> int:
        """Micro-batches per rank."""
        return int(self.plan.cell_offsets[1]) if self.rest is None else len(self.rest[0])


class StepSource(Protocol):
    """Where the steps of a planned stream come from: a recipe and an order, or a saved plan.

    An epoch has `len` units. A step takes the next of them.
    """

    @property
    def recipe(self) -> Recipe: ...

    def __len__(self) -> int: ...

    def next_step(self, at: StreamPosition) -> tuple[int, bool] | None:
        """(units of the next step, whether they are the last of the epoch); None at its end."""

    def work(self, bounds: StepBounds) -> StepWork:
        """The step, or what is left of it."""

    def plan_epoch(self, epoch: int, progress: Progress | None = None) -> Plan:
        """One plan of a whole epoch; `progress(done, total)` is called after each step."""

    def known_count(self, bounds: StepBounds) -> int | None:
        """Micro-batches per rank of a step, if that is known without planning it."""

    def same_epoch(self, epoch: int) -> int:
        """The first epoch that has the same steps as this one."""

    def details(self) -> dict[str, Any]:
        """What else determines the steps, besides `belongs` and the recipe; as plain data."""

    def belongs(self, *, inside: bool) -> dict[str, str]:
        """What a cursor between steps, or inside one, belongs to."""

    @property
    def steps_per_epoch(self) -> Estimate:
        """Number of steps in an epoch; may be an estimate."""


# streams.step_bounds -----------------------------------------------------------------------


def bounds_of_epoch(
    steps: StepSource, at: StreamPosition, most: int | None = None
) -> Iterator[StepBounds]:
    """Every step of the rest of an epoch, up to `most` steps in all."""
    while most is None or at.step < most:
        found = steps.next_step(at)
        if found is None:
            return
        after = StreamPosition(at.epoch, at.position + found[0], at.step + 1)
        yield StepBounds(at, after, found[1])
        at = after


def bounds_of_all(
    steps: StepSource, at: StreamPosition, most: int | None, *, endless: bool
) -> Iterator[StepBounds]:
    """Every step of the rest of an epoch and, if `endless`, of those that follow."""
    while True:
        found_any = at.position > 0  # in the current epoch
        for bounds in bounds_of_epoch(steps, at, most):
            yield bounds
            at, found_any = bounds.after, True
        if not endless or at.step == most:
            return
        if not found_any:
            raise InputError(
                f"epoch {at.epoch} has no sample to run, so an endless stream cannot continue. "
                f"Add samples, or use another overflow than 'drop'."
            )
        at = StreamPosition(at.epoch + 1, 0, at.step)


# streams.epoch_size ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochSize:
    """Steps of an epoch and their micro-batches per rank. Both are the same on every rank."""

    steps: int
    micro_batches: int


def measure(
    source: StepSource,
    steps: Iterable[StepBounds],
    *,
    drop_last: bool = False,
    progress: Callable[[int], None] | None = None,
) -> EpochSize:
    """Count steps. Plans a step only if its number of micro-batches is not known otherwise.

    drop_last  does not count whole steps in which a rank has an empty micro-batch
    progress   called after each step with the units of the epoch that are done
    """
    count = micro_batches = 0
    for bounds in steps:
        found = None if drop_last else source.known_count(bounds)
        if found is None:
            work = source.work(bounds)
            short = (np.diff(work.plan.segment_offsets) == 0).any()
            left_out = drop_last and short and work.rest is None
            found = 0 if left_out else work.count
        count, micro_batches = count + (found > 0), micro_batches + found
        if progress is not None:
            progress(bounds.after.position)
    return EpochSize(count, micro_batches)


# streams.step_remainder --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StepRemainder:
    """The micro-batches of a planned step, and what is needed to plan their segments again.

    The first plan determines the segments. Later plans take them as they are.
    """

    recipe: Recipe
    by_rank: list[list[MicroBatch]]
    about: Mapping[int, Mapping[str, Any]]
    """Sample id -> its index in the step, its group and its columns."""

    @classmethod
    def of(cls, plan: Plan, sample_ids: IntArray, about: Mapping[str, Any]) -> StepRemainder:
        """A whole step, as it was planned first."""
        by_rank = [
            [micro.renumbered(sample_ids) for micro in plan[0, rank]]
            for rank in range(plan.num_ranks)
        ]
        groups, columns = about["groups"], about["columns"]
        known = {
            int(sample_id): {
                "index": index,
                "group": None if groups is None else int(groups[index]),
                **{name: int(column[index]) for name, column in columns.items()},
            }
            for index, sample_id in enumerate(sample_ids)
        }
        # Ranks need not get equally many segments of a rest: that is not possible in general.
        return cls(replace(plan.recipe, steps=Steps(), equal_sizes=False), by_rank, known)

    def after(self, inside: Sequence[tuple[int, int]], ranks: int) -> StepRemainder:
        """What `ranks` ranks still have to do after the work in `inside`, applied in order.

        inside [(4, 2)], resumed on 4 ranks: their third micro-batch onwards. Resumed on 2 ranks:
        the same segments, planned for two ranks.
        """
        rest = self
        for at, (_, done) in enumerate(inside):
            following = inside[at + 1][0] if at + 1 < len(inside) else ranks
            rest = rest.without(done)
            if following != len(rest.by_rank):
                rest = rest.on(following)
        return rest

    def without(self, done: int) -> StepRemainder:
        """Without the first `done` micro-batches of every rank."""
        return replace(self, by_rank=[micros[done:] for micros in self.by_rank])

    def on(self, ranks: int) -> StepRemainder:
        """The same segments, planned for this number of ranks."""
        micros = [micro for each in self.by_rank for micro in each]
        if all(micro.is_empty for micro in micros):
            return replace(self, by_rank=[self.by_rank[0]] * ranks)
        segments = Segments(
            *(
                np.concatenate([getattr(micro.segments, column) for micro in micros])
                for column in ("sample", "start", "length")
            )
        )
        index = [self.about[sample_id]["index"] for sample_id in segments.sample.tolist()]
        order = np.lexsort((segments.start, index))
        whole = np.concatenate([micro.sample_lengths for micro in micros])[order]
        ends = np.concatenate([micro.sample_ends for micro in micros])[order]
        segments = segments.take(order)
        known = [self.about[sample_id] for sample_id in segments.sample.tolist()]
        groups = None
        if known and known[0]["group"] is not None:
            groups = np.array([each["group"] for each in known])
        columns = {
            name: np.array([each[name] for each in known], np.int64) for name in self.recipe.columns
        }
        recipe = replace(self.recipe, topology=replace(self.recipe.topology, dp=ranks))
        try:
            plan = plan_step(
                segments.length,
                recipe,
                groups=groups,
                columns=columns,
                names=segments.sample,
                last=True,
            )
        except PlanError as error:
            before = len(self.by_rank)
            raise PlanError(
                f"the rest of a step that {before} ranks have begun cannot be planned for {ranks} "
                f"({error}) Resume on {before} ranks, or from a cursor between two steps."
            ) from None
        by_rank = [
            [_of_segments(micro, segments, whole, ends) for micro in plan[0, rank]]
            for rank in range(ranks)
        ]
        return replace(self, recipe=recipe, by_rank=by_rank)


def _of_segments(
    micro: MicroBatch, segments: Segments, whole: IntArray, ends: IntArray
) -> MicroBatch:
    """A micro-batch of indices into `segments` -> a micro-batch of those segments."""
    index = micro.segments.sample
    return replace(
        micro, segments=segments.take(index), sample_lengths=whole[index], truncated_to=ends[index]
    )


# streams.epoch_steps -----------------------------------------------------------------------

_SAMPLED_LENGTHS = 4096  # for estimates


@dataclass(eq=False)
class EpochSteps:
    """The steps of every epoch. A step takes the next units of the epoch's order.

    It looks at no more lengths than it needs to find where a step ends.
    """

    source: MeasuredSource
    recipe: Recipe
    units: EpochUnits
    seed: int
    shuffle: bool
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    _window: int = 64  # units to look at first; does not affect steps

    def __len__(self) -> int:
        return len(self.units)

    # Where steps end -----------------------------------------------------------------------------

    def next_step(self, at: StreamPosition) -> tuple[int, bool] | None:
        """(units of the next step, whether they are the last of the epoch); None at its end."""
        rest = len(self.units) - at.position
        fixed = self.recipe.steps.samples
        if fixed is not None and self.units.groups is None and self.recipe.overflow != "drop":
            return (min(fixed, rest), fixed >= rest) if rest else None
        window = min(rest, fixed or self._window)
        while True:
            sample_ids, ends = self._sample_ids(at, window)
            lengths, complete = self.source.lengths_of(sample_ids), window == rest
            size = step_size(
                lengths, self._recipe_at(at), complete=complete, **self._about(sample_ids)
            )
            if size == 0:
                return None
            if size is not None:
                units = int(np.searchsorted(ends, size)) + 1
                self._window = units + units // 4 + 64
                if self.recipe.overflow == "drop" and self._all_dropped(at, units):
                    units = rest  # the last step reports all that were dropped
                return units, units == rest
            window = min(rest, 2 * window)

    def _recipe_at(self, at: StreamPosition) -> Recipe:
        """The recipe for the number of ranks that began the step at this position."""
        if not at.inside:
            return self.recipe
        return replace(self.recipe, topology=replace(self.recipe.topology, dp=at.inside[0][0]))

    def _all_dropped(self, at: StreamPosition, units: int) -> bool:
        """Whether everything after the next `units` units of the epoch is dropped."""
        first, window, longest = at.position + units, 64, self.recipe.longest_segment
        while first < len(self):
            count = min(window, len(self) - first)
            sample_ids, _ = self._sample_ids(replace(at, position=first), count)
            if longest is None or (self.source.lengths_of(sample_ids) <= longest).any():
                return False
            first, window = first + count, 2 * window
        return True

    def _sample_ids(self, at: StreamPosition, units: int) -> tuple[IntArray, IntArray]:
        """(sample ids of the next units, number of samples up to the end of each unit)."""
        positions = at.position + np.arange(units)
        return self.units.members(self._order(at.epoch).samples(positions))

    def _order(self, epoch: int) -> EpochOrder:
        return EpochOrder(count=len(self), seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def _about(self, sample_ids: IntArray) -> dict[str, Any]:
        return {
            "groups": self.units.groups_of(sample_ids),
            "columns": {name: column[sample_ids] for name, column in self.columns.items()},
            "names": sample_ids,
        }

    # Plans ---------------------------------------------------------------------------------------

    def work(self, bounds: StepBounds) -> StepWork:
        """The step, planned for the ranks that began it; what is left of it, for these ranks."""
        at = bounds.before
        sample_ids, _ = self._sample_ids(at, bounds.after.position - at.position)
        lengths, about = self.source.lengths_of(sample_ids), self._about(sample_ids)
        plan = plan_step(lengths, self._recipe_at(at), last=bounds.last, **about)
        if not at.inside:
            return StepWork(plan, sample_ids)
        remainder = StepRemainder.of(plan, sample_ids, about)
        rest = remainder.after(at.inside, self.recipe.topology.dp)
        return StepWork(plan, sample_ids, rest.by_rank)

    def plan_epoch(self, epoch: int, progress: Progress | None = None) -> Plan:
        """One plan of a whole epoch, whose samples are numbered in the epoch's order."""
        sample_ids, _ = self._sample_ids(StreamPosition(epoch), len(self))
        lengths = self.source.lengths_of(sample_ids)
        plan = make_plan(lengths, self.recipe, progress=progress, **self._about(sample_ids))
        stored = np.array_equal(sample_ids, np.arange(len(sample_ids)))
        return plan if stored else replace(plan, sample_ids=sample_ids)

    def known_count(self, bounds: StepBounds) -> int | None:
        """`steps.micro_batches`, except for the last step of an epoch and one begun before."""
        if bounds.last or bounds.before.inside:
            return None
        return self.recipe.steps.micro_batches

    # Identity ------------------------------------------------------------------------------------

    def same_epoch(self, epoch: int) -> int:
        """Without shuffling, all epochs are the same."""
        return epoch if self.shuffle else 0

    def details(self) -> dict[str, Any]:
        """The columns that the recipe names."""
        named = [name for name in self.recipe.columns if name in self.columns]
        return {"columns": {name: values_digest(self.columns[name]) for name in named}}

    def belongs(self, *, inside: bool) -> dict[str, str]:
        """Order and groups. Ranks, layout and balance may change, because they do not affect which
        samples a step holds; within a step only the ranks may."""
        return {**self._owner, "recipe": self._same_recipe} if inside else dict(self._owner)

    @cached_property
    def _owner(self) -> dict[str, str]:
        belongs = {"order": self._order(0).description}
        if self.units.groups is not None:
            belongs["groups"] = column_digest(self.units.groups)
        return belongs

    @cached_property
    def _same_recipe(self) -> str:
        """A digest of the recipe without the number of ranks."""
        recipe = self.recipe.to_dict()
        recipe["topology"] = {**recipe["topology"], "dp": None}
        return digest_of(recipe)

    # Length --------------------------------------------------------------------------------------

    @property
    def steps_per_epoch(self) -> Estimate:
        """Number of steps in an epoch; exact if steps are counted in samples."""
        steps, n = self.recipe.steps, len(self.source)
        if steps.samples is not None:
            exact = self.units.groups is None and self.recipe.overflow != "drop"
            return Estimate(divided_up(n, steps.samples), exact)
        spread = np.linspace(0, max(n - 1, 0), min(n, _SAMPLED_LENGTHS)).astype(np.int64)
        tokens = float(self.source.lengths_of(np.unique(spread)).mean()) * n if n else 0.0
        if steps.tokens is not None:
            return Estimate(divided_up(int(tokens), steps.tokens), False)
        if steps.micro_batches is None:
            return Estimate(int(n > 0), True)
        per_step = steps.micro_batches * self.recipe.topology.dp
        return Estimate(
            math.ceil(n / (self._per_micro_batch(tokens / max(n, 1)) * per_step)), False
        )

    def _per_micro_batch(self, length: float) -> float:
        """About how many samples of this length a micro-batch holds."""
        layout, unit = self.recipe.layout, self.recipe.topology.alignment
        aligned = rounded_up(math.ceil(length), unit)
        slots, most = layout.pack_bounds(self.recipe, np.array([aligned]))
        each = min(float(most[0]), math.inf if slots is None else slots / max(aligned, 1))
        return max(1.0, each * layout.packs_per_micro_batch)


# streams.plan_steps ------------------------------------------------------------------------


def lengths_by_id(plan: Plan) -> IntArray:
    """The planned length of every sample of the source."""
    ids, count = plan.sample_ids, len(plan.lengths)
    if ids is None or count == 0 or not 0 <= ids.min() <= ids.max() < count:
        return plan.lengths
    found = np.zeros(count, np.int64)
    found[ids] = plan.lengths
    return found


class PlanSteps:
    """The steps of a plan, the same in every epoch. A unit is a step.

    On fewer ranks than planned, a rank runs the micro-batches of several: each wave of 4 ranks is
    2 waves of 2 ranks. Nothing is planned again, also after a stop within a step.
    """

    def __init__(self, source: MeasuredSource, plan: Plan, ranks: int) -> None:
        if plan.num_ranks % ranks:
            fitting = [str(n) for n in range(1, plan.num_ranks + 1) if plan.num_ranks % n == 0]
            raise ConfigError(
                f"the plan is for {plan.num_ranks} ranks, and {ranks} does not divide them. Use "
                f"{' or '.join(fitting)} ranks, or plan again for {ranks}."
            )
        count, ids = len(plan.lengths), plan.sample_ids
        if count != len(source):
            raise InputError(
                f"the plan has {count} samples but the source has {len(source)}. Pass the source "
                f"that the plan was made of."
            )
        if ids is not None and not np.array_equal(np.sort(ids), np.arange(count)):
            raise InputError(
                f"the ids of the {count} samples of the plan are not 0 to {count - 1}, each once. "
                f"Plan a whole epoch."
            )
        self.source, self.plan, self.ranks = source, plan, ranks

    @cached_property
    def recipe(self) -> Recipe:
        """The plan's recipe, for this number of ranks."""
        return recipe_on_fewer_ranks(self.plan.recipe, self.ranks)

    @cached_property
    def _samples(self) -> Ragged:
        return samples_by_step(self.plan)

    def __len__(self) -> int:
        return self.plan.num_steps

    def next_step(self, at: StreamPosition) -> tuple[int, bool] | None:
        """One step; None at the end of the plan."""
        return (1, at.position + 1 == len(self)) if at.position < len(self) else None

    def work(self, bounds: StepBounds) -> StepWork:
        """The step as planned, or what is left of it, on these ranks."""
        at = bounds.before
        samples = self._samples[at.position]
        ids = samples if self.plan.sample_ids is None else self.plan.sample_ids[samples]
        self._check_lengths(ids, self.plan.lengths[samples])
        plan = step_plan(self.plan, at.position, samples)
        if at.inside:
            return StepWork(plan, ids, self._rest(plan, ids, at.inside))
        return StepWork(on_fewer_ranks(plan, self.ranks), ids)

    def _check_lengths(self, ids: IntArray, planned: IntArray) -> None:
        found = self.source.lengths_of(ids)
        wrong = np.flatnonzero(found != planned)
        if len(wrong):
            first = wrong[0]
            raise InputError(
                f"sample {ids[first]} has {found[first]} tokens, but the plan expects "
                f"{planned[first]}. Pass the source that the plan was made of, or plan again."
            )

    def _rest(
        self, plan: Plan, ids: IntArray, inside: tuple[tuple[int, int], ...]
    ) -> list[list[MicroBatch]]:
        """What each rank still has to do of a step, after the work in `inside`."""
        first = on_fewer_ranks(plan, inside[0][0])
        rest = [[micro.renumbered(ids) for micro in each] for each in first[0]]
        followed = [*(ranks for ranks, _ in inside[1:]), self.ranks]
        for (ranks, done), following in zip(inside, followed, strict=True):
            empty = rest[0][-1].without(rest[0][-1].segments.sample.tolist())
            rest = [micros[done:] for micros in rest]
            if following != ranks:
                rest = self._dealt(rest, following, empty)
        return rest

    def _dealt(
        self, rest: list[list[MicroBatch]], ranks: int, empty: MicroBatch
    ) -> list[list[MicroBatch]]:
        """The same micro-batches on other ranks, wave by wave. Empty ones fill the last wave.

        1, 2 and 3 are left on one rank -> [[1, 3], [2, empty]] on two
        """
        left = [micro for wave in zip(*rest, strict=True) for micro in wave if not micro.is_empty]
        count = rounded_up(max(divided_up(len(left), ranks), 1), self.recipe.topology.multiple)
        left += [empty] * (ranks * count - len(left))
        return [left[rank::ranks] for rank in range(ranks)]

    def plan_epoch(self, epoch: int, progress: Progress | None = None) -> Plan:
        """The plan itself."""
        return self.plan

    def known_count(self, bounds: StepBounds) -> int | None:
        """As the plan says, except for a step begun before."""
        if bounds.before.inside:
            return None
        cell = bounds.before.position * self.plan.num_ranks
        planned = self.plan.cell_offsets[cell + 1] - self.plan.cell_offsets[cell]
        return int(planned) * self.plan.num_ranks // self.ranks

    def same_epoch(self, epoch: int) -> int:
        """All epochs are the same."""
        return 0

    def details(self) -> dict[str, Any]:
        """Nothing: the plan has all."""
        return {}

    def belongs(self, *, inside: bool) -> dict[str, str]:
        """The plan, which determines everything."""
        return dict(self._identity)

    @cached_property
    def _identity(self) -> dict[str, str]:
        return {"plan": self.plan.fingerprint[:16]}

    @property
    def steps_per_epoch(self) -> Estimate:
        """The steps of the plan."""
        return Estimate(len(self), exact=True)


# streams.step_maker ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StepMaker:
    """Makes the steps of a stream. `loss_tokens` are those of each sample, if they are known.

    `fingerprint` is that of the stream.
    """

    lookup: SampleLookup
    loss_tokens: NDArray[np.integer] | None
    fingerprint: str

    def steps(
        self, work: StepWork, at: StreamPosition, after: Cursor, ranks: Iterable[int]
    ) -> Iterator[Step]:
        """The step at a position for each of these ranks; `after` is the cursor after it."""
        plan, recipe, whole = work.plan, work.plan.recipe, work.rest is None
        over = recipe.longest_segment
        beyond = 0 if over is None else int((plan.lengths > over).sum())
        overflow = {"drop": "dropped", "truncate": "truncated"}.get(recipe.overflow)
        # [rank, micro-batch]
        works = [each.reshape(plan.num_ranks, -1) for each in works_of(plan)] if whole else []
        totals = self._totals(work.sample_ids, plan, works) if whole else {}
        fingerprint = self._fingerprint(at, after)
        sample_ids = frozen(work.sample_ids) if whole else None
        samples = self.lookup.in_epoch(at.epoch)
        for rank in ranks:
            micro_batches = work.micro_batches(rank)
            yield Step(
                number=at.step,
                epoch=at.epoch,
                micro_batches=micro_batches,
                samples=samples,
                cursor=after,
                totals=totals,
                lost={overflow: beyond} if overflow and beyond else {},
                budget=recipe.layout.budget,
                ranks=plan.num_ranks if work.rest is None else len(work.rest),
                loss_tokens=self._labels(micro_batches) if "loss_tokens" in totals else {},
                plan=plan if whole else None,
                sample_ids=sample_ids,
                costs=tuple(np.sum(works, axis=0)[rank].tolist()) if whole else (),
                fingerprint=fingerprint,
            )

    def _fingerprint(self, at: StreamPosition, after: Cursor) -> str:
        text = f"{self.fingerprint} {at.step} {at.epoch} {at.position} {at.inside} {after.step}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _labels(self, micro_batches: Iterable[MicroBatch]) -> dict[int, int]:
        """The number of loss tokens of each sample of the micro-batches."""
        assert self.loss_tokens is not None
        ids = sorted({i for micro in micro_batches for i in micro.segments.sample.tolist()})
        return dict(zip(ids, self.loss_tokens[ids].tolist(), strict=True))

    def _totals(
        self, sample_ids: IntArray, plan: Plan, works: list[FloatArray]
    ) -> dict[str, float]:
        """Totals over all ranks; loss tokens only if they are known and no sample can be lost."""
        run = plan.step_of >= 0
        ideal = sum(float(work.sum()) for work in works) / plan.num_ranks
        totals: dict[str, float] = {
            "tokens": int(plan.segments.length.sum()),
            "empty": int((np.diff(plan.segment_offsets) == 0).sum()),
            "imbalance_step": time_of_works(works, "step") / ideal if ideal else 1.0,
            "imbalance_micro_batch": time_of_works(works, "micro_batch") / ideal if ideal else 1.0,
        }
        if self.lookup.on_error == "skip":
            return totals  # unreadable samples are not known yet
        totals["samples"] = int(run.sum())
        if self.loss_tokens is not None and totals["tokens"] == plan.lengths[run].sum():
            labels = self.loss_tokens[sample_ids[run]]
            totals["loss_tokens"] = int(labels.sum())
            totals["sequences"] = int((labels > 0).sum())
            if plan.groups is not None:
                totals["groups"] = len(np.unique(plan.groups[run][labels > 0]))
        return totals


# streams.planned ---------------------------------------------------------------------------

_MOST_CHECKED = 2**25  # samples whose lengths are all checked before the first step


class PlannedStream:
    """Finite or endless steps over samples whose lengths are known.

    Each epoch is one seeded order of all samples. A step takes the next samples of it, as many as
    `recipe.steps` says, so the samples of a step depend neither on ranks nor on the layout. Every
    rank plans the step itself and takes its own micro-batches. Memory does not grow with the
    number of samples, except with `groups`: two integers per sample.

    The position is an epoch and an index into its order. A stream resumes from it immediately, on
    any number of ranks and workers. Iteration starts at the position set by `set_epoch`,
    `skip_batches` or `load_state_dict`; `state_dict` is the position after the last step that was
    yielded.

    groups       per sample, its group id; a group stays in one step or micro-batch, as
                 `recipe.groups` says
    columns      per sample, the values that `recipe.limits` and `recipe.second_work` name
    loss_tokens  per sample, its number of loss tokens; the denominator of the loss is then known
                 before anything is read
    on_error     `skip` leaves unreadable samples out of their micro-batch and counts them
    fingerprint  names the data in cursors, instead of the source's own

    `source` may also be a list of samples, or a torch or Hugging Face dataset (see `as_source`).

    >>> import numpy as np
    >>> from evenstep import Packed, Steps
    >>> from evenstep.data import Lengths
    >>> recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=2))
    >>> stream = PlannedStream(Lengths(np.array([5, 3, 4, 2])), recipe, shuffle=False)
    >>> [micro.segments.sample.tolist() for step in stream for micro in step.micro_batches]
    [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        source: MeasuredSource | MapStyle,
        recipe: Recipe,
        *,
        world: World | None = None,
        seed: int = 0,
        shuffle: bool = True,
        groups: ArrayLike | None = None,
        columns: Mapping[str, ArrayLike] | None = None,
        loss_tokens: ArrayLike | None = None,
        max_num_steps: int | None = None,
        infinite_loop: bool = False,
        on_error: OnError = "raise",
        fingerprint: str | None = None,
    ) -> None:
        check_recipe(recipe)
        check_names(columns, recipe)
        source = as_measured(source)
        if max_num_steps is not None:
            max_num_steps = whole_number("max_num_steps", max_num_steps, least=0)
        self.source, self.recipe, self.world = source, recipe, world_for(recipe, world)
        self.seed, self.shuffle = seed_number(seed), truth_value("shuffle", shuffle)
        self.max_num_steps = max_num_steps
        self.infinite_loop = truth_value("infinite_loop", infinite_loop)
        count = len(source)
        held = {name: per_sample(name, column, count) for name, column in (columns or {}).items()}
        self._loss_tokens, ids = (
            None if given is None else whole_per_sample(name, given, count)
            for name, given in (("loss_tokens", loss_tokens), ("groups", groups))
        )
        units = EpochUnits.of(count, ids)
        self._steps: StepSource = EpochSteps(source, recipe, units, self.seed, self.shuffle, held)
        self._lookup = SampleLookup(source, on_error, self.seed)
        self._named = fingerprint
        self._start = self._now = StreamPosition()
        self._iterated = False  # since the start was set
        self._checked = False
        self._sizes: dict[tuple[int, bool], EpochSize] = {}

    @classmethod
    def from_plan(
        cls,
        source: MeasuredSource | MapStyle,
        plan: Plan,
        *,
        world: World | None = None,
        loss_tokens: ArrayLike | None = None,
        max_num_steps: int | None = None,
        infinite_loop: bool = False,
        on_error: OnError = "raise",
        fingerprint: str | None = None,
    ) -> PlannedStream:
        """The steps of a saved plan, in its own order, which is the same in every epoch.

        The plan is one of all samples of the source: `make_plan`, `plan_epoch` of a stream, or
        `evenstep plan`. It may be run on fewer ranks than it was made for, if their number divides
        the plan's; a rank then runs the micro-batches of several. A step raises if the length of a
        sample is not the planned one.

        >>> import numpy as np
        >>> from evenstep import Packed, Steps, make_plan
        >>> from evenstep.data import Lengths
        >>> lengths = np.array([5, 3, 4, 2])
        >>> plan = make_plan(lengths, Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=2)))
        >>> stream = PlannedStream.from_plan(Lengths(lengths), plan)
        >>> [micro.segments.sample.tolist() for step in stream for micro in step.micro_batches]
        [[0, 1], [2, 3]]
        """
        source = as_measured(source, lengths_by_id(plan))
        found = world_for(plan.recipe, None) if world is None else world
        steps = PlanSteps(source, plan, found.size)
        stream = cls(
            source,
            steps.recipe,
            world=found,
            shuffle=False,
            loss_tokens=loss_tokens,
            max_num_steps=max_num_steps,
            infinite_loop=infinite_loop,
            on_error=on_error,
            fingerprint=fingerprint,
        )
        stream._steps = steps
        return stream

    @property
    def done(self) -> int:
        """Steps before the start, over all epochs."""
        return self._start.step

    @property
    def samples(self) -> SampleLookup:
        """The samples by id, as steps read them."""
        return self._lookup

    @property
    def ends_together(self) -> bool:
        """True: all ranks have the same plan and take part in every step."""
        return True

    # Iterating ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        self._now = self._start
        for step in self.walk():
            self._now = StreamPosition.from_dict(step.cursor.place, step.cursor.step)
            yield step

    def walk(self, worker: int = 0, workers: int = 1, turn: int | None = None) -> Iterator[Step]:
        """The steps of one of several workers, which take turns. Its first step is number `turn`
        from the start (default: `worker`). Steps of other workers are not planned."""
        self._begin()
        turn = worker if turn is None else turn
        for bounds in self._bounds(self._start):
            if (bounds.before.step - self._start.step) % workers == turn:
                yield from self._made(bounds, (self.world.rank,))

    def walk_all(self) -> Iterator[list[Step]]:
        """Every step for all ranks, for callers that deal micro-batches to ranks themselves. A
        step is planned once."""
        self._begin()
        for bounds in self._bounds(self._start):
            yield list(self._made(bounds, range(self.world.size)))

    def _begin(self) -> None:
        """Check all lengths before the first step, unless that would take a second or more."""
        refuse_empty(self.source)
        if not self._checked and len(self.source) <= _MOST_CHECKED:
            check_lengths(self.source, self.recipe)
        self._iterated = self._checked = True

    def _made(self, bounds: StepBounds, ranks: Sequence[int]) -> Iterator[Step]:
        work, after = self._steps.work(bounds), self.cursor(bounds.after)
        return self._maker.steps(work, bounds.before, after, ranks)

    @cached_property
    def _maker(self) -> StepMaker:
        return StepMaker(self._lookup, self._loss_tokens, self.fingerprint)

    def _bounds(self, at: StreamPosition) -> Iterator[StepBounds]:
        return bounds_of_all(self._steps, at, self.max_num_steps, endless=self.infinite_loop)

    # Position --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last step that was yielded, as plain data."""
        return self.cursor(self._now).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Start after the step that this state was taken at, on any number of ranks.

        Between steps, layout, limits and overflow may always change; within a step they cannot.
        `allow` has no effect; pooled streams need it.
        """
        cursor = Cursor.from_dict(state)
        belongs = self._belongs(inside="inside" in cursor.place)
        if "lengths" not in cursor.belongs:  # written by version 0.1.0
            del belongs["lengths"]
        cursor.check(belongs)
        at = StreamPosition.from_dict(cursor.place, cursor.step)
        if not 0 <= at.position <= len(self._steps):
            raise CursorError(
                f"the cursor is at position {at.position}, but an epoch has {len(self._steps)} "
                f"units, so it was taken from other data or groups. Restore them, or use a cursor "
                f"of this stream."
            )
        self._start_at(at)

    def set_epoch(self, epoch: int, done: int | None = None) -> None:
        """Start at the first step of `epoch`, after `done` steps (default: those yielded so far).

        Keeps a start within this epoch that was loaded or skipped to, unless the stream was
        iterated since or `done` is given. So the same loop also resumes:

            stream.load_state_dict(state)  # after step 40 of epoch 3
            for epoch in range(3, 10):
                stream.set_epoch(epoch)  # 3: continues after step 40; 4: from the beginning
                for step in stream: ...
        """
        epoch = whole_number("epoch", epoch, least=0)
        if done is None and not self._iterated and epoch == self._start.epoch:
            return
        self._start_at(StreamPosition(epoch, 0, self._now.step if done is None else done))

    def start(self, workers: int = 1) -> Cursor:
        """The cursor before the first step; the same for any number of workers."""
        return self.cursor(self._start)

    @staticmethod
    def join(cursors: Sequence[Cursor]) -> Cursor:
        """The latest of several cursors; each holds the whole position."""
        return max(cursors, key=lambda cursor: cursor.step)

    def skip_batches(self, steps: int) -> None:
        """Start `steps` steps later. Nothing is read or planned."""
        steps = whole_number("steps to skip", steps, least=0)
        for bounds in islice(self._bounds(self._start), steps):
            self._start_at(bounds.after)

    def _start_at(self, at: StreamPosition) -> None:
        self._start, self._now, self._iterated = at, at, False

    def cursor(self, at: StreamPosition) -> Cursor:
        """The cursor of a position."""
        return Cursor(
            belongs=self._belongs(inside=bool(at.inside)),
            step=at.step,
            place=at.to_dict(),
        )

    # Identity ----------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all that determines the steps: data, order, recipe, ranks. Not the rank, so
        it is the same on all ranks unless they would train on different plans."""
        held = {} if self._loss_tokens is None else {"loss_tokens": self._loss_tokens}
        return digest_of(
            {
                **self._belongs(inside=False),
                **self._steps.details(),
                "recipe": self.recipe.to_dict(),
                "per sample": {name: values_digest(array) for name, array in held.items()},
                "end": [self.max_num_steps, self.infinite_loop],
            }
        )

    def _belongs(self, inside: bool) -> dict[str, str]:
        """What a cursor belongs to."""
        return {**self._data, **self._steps.belongs(inside=inside)}

    @cached_property
    def _data(self) -> dict[str, str]:
        source, named = self.source, self._named
        found = {
            "stream": "planned",
            "data": f"{len(source)} samples, {source.fingerprint if named is None else named}",
            "lengths": lengths_digest(source),
        }
        return {**found, "seed of samples": str(self.seed)} if is_seeded(source) else found

    # Length ------------------------------------------------------------------------------------

    def epoch_size(
        self, epoch: int = 0, *, drop_last: bool = False, progress: Progress | None = None
    ) -> EpochSize:
        """The exact number of steps and of micro-batches per rank of an epoch. Reads no samples.

        Plans every step, unless steps are counted in micro-batches, and remembers the result.
        With `drop_last`, steps in which a rank has an empty micro-batch are not counted.
        `progress(done, total)` is called after each step with units of the epoch.
        """
        key = self._steps.same_epoch(whole_number("epoch", epoch, least=0)), drop_last
        if key not in self._sizes:
            self._sizes[key] = self._measured(StreamPosition(key[0]), drop_last, progress)
        return self._sizes[key]

    def size_left(self, *, drop_last: bool = False, progress: Progress | None = None) -> EpochSize:
        """The same for the rest of the epoch, from the start that was set."""
        if self._start.position == 0 and not self._start.inside:
            return self.epoch_size(self._start.epoch, drop_last=drop_last, progress=progress)
        return self._measured(self._start, drop_last, progress)

    def micro_batches_per_epoch(
        self, epochs: int = 1, *, drop_last: bool = False, progress: Progress | None = None
    ) -> list[int]:
        """Micro-batches per rank of the epochs 0, 1, ... as `epoch_size` counts them."""
        total = len(self._steps) * whole_number("epochs", epochs, least=0)
        found = []
        for epoch in range(epochs):

            def advance(done: int, _: int, before: int = epoch * len(self._steps)) -> None:
                if progress is not None:
                    progress(before + done, total)

            size = self.epoch_size(epoch, drop_last=drop_last, progress=advance)
            found.append(size.micro_batches)
        return found

    def _measured(
        self, at: StreamPosition, drop_last: bool, progress: Progress | None
    ) -> EpochSize:
        total = len(self._steps)
        advance = None if progress is None else (lambda done: progress(done, total))
        bounds = bounds_of_epoch(self._steps, at)
        return measure(self._steps, bounds, drop_last=drop_last, progress=advance)

    def plan_epoch(self, epoch: int = 0, *, progress: Progress | None = None) -> Plan:
        """One plan of all steps of an epoch, to save, to show, or to run with `from_plan`.

        Samples are numbered in the epoch's order; `plan.sample_ids` are their ids in the source.
        `progress(done, total)` is called after each step.
        """
        return self._steps.plan_epoch(whole_number("epoch", epoch, least=0), progress)

    @property
    def steps_per_epoch(self) -> Estimate:
        """Number of steps in an epoch; exact if steps are counted in samples, and after
        `epoch_size` has counted the epoch of the start."""
        counted = self._sizes.get((self._steps.same_epoch(self._start.epoch), False))
        return self._steps.steps_per_epoch if counted is None else Estimate(counted.steps, True)

    @property
    def steps_in_every_epoch(self) -> int | None:
        """Number of steps, if every epoch has the same and it is known without planning."""
        estimate = self._steps.steps_per_epoch
        return estimate.steps if estimate.exact else None

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches per rank and step: those of the first step of the epoch."""
        if self.recipe.steps.micro_batches is not None:
            return self.recipe.steps.micro_batches
        first = islice(bounds_of_epoch(self._steps, StreamPosition(self._start.epoch)), 1)
        return measure(self._steps, first).micro_batches

    def __len__(self) -> int:
        """Steps of one pass: those left of `max_num_steps`, or those of an epoch, which may be an
        estimate (see `steps_per_epoch`)."""
        return steps_of_pass(self, self.infinite_loop)
