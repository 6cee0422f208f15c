"""The steps of an epoch: where each begins and ends, and its plan.

    StreamPosition --next_step--> StepBounds --plan_step--> PlannedStep

`EpochSteps` makes them of a recipe and a seeded order, `PlanSteps` takes them from a saved plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.plan import (
    MicroBatch,
    Plan,
    on_fewer_ranks,
    recipe_on_fewer_ranks,
    samples_by_step,
    step_plan,
)
from evenstep.core.ragged import (
    IntArray,
    Ragged,
    Segments,
    by_first_appearance,
    divided_up,
    offsets_of,
    rounded_up,
)
from evenstep.core.recipe import Recipe, Steps
from evenstep.data.order import EpochOrder
from evenstep.data.source import ALL_DIGESTED, MeasuredSource, Progress, column_digest
from evenstep.data.stream import (
    Estimate,
    digest_of,
    estimated_tokens,
)
from evenstep.errors import ConfigError, CursorError, InputError, PlanError
from evenstep.planning.planner import make_plan, plan_step, step_size

Inside: TypeAlias = tuple[tuple[int, int], ...]
"""(ranks, micro-batches done by each rank) for every number of ranks that worked on a step."""
ByRank: TypeAlias = list[list[MicroBatch]]


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Before unit `position` of `epoch`, after `step` steps. Independent of ranks and workers.

    `inside` is for callers that take single micro-batches and may stop within a step. It says what
    was done of the next step.

    >>> StreamPosition(epoch=1, position=24, step=9).to_dict()
    {'epoch': 1, 'position': 24}
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    inside: Inside = ()

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


class StepBounds(NamedTuple):
    """Where a step begins and ends, and whether it is the last of its epoch."""

    before: StreamPosition
    after: StreamPosition
    last: bool

    @classmethod
    def of(cls, at: StreamPosition, units: int, last: bool) -> StepBounds:
        """The step of the next `units` units."""
        return cls(at, StreamPosition(at.epoch, at.position + units, at.step + 1), last)


class PlannedStep(NamedTuple):
    """The plan of a step, whose sample i has the id `sample_ids[i]` in the source.

    `rest` holds what each rank still has to do of a step that was begun before; None for a whole
    step.
    """

    plan: Plan
    sample_ids: IntArray
    rest: ByRank | None = None

    def micro_batches(self, rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of a rank, with samples named by id."""
        if self.rest is not None:
            return tuple(self.rest[rank])
        return tuple(micro.renumbered(self.sample_ids) for micro in self.plan[0, rank])


# Steps of a recipe -------------------------------------------------------------------------------


class EpochSteps:
    """The steps that a recipe makes of a seeded order of all samples.

    The order permutes units: samples or, with `groups`, groups of samples, numbered in order of
    their first members. A step takes the next units. No more lengths are looked at than needed to
    find where it ends.
    """

    def __init__(
        self,
        source: MeasuredSource,
        recipe: Recipe,
        *,
        seed: int,
        shuffle: bool,
        groups: NDArray[np.integer] | None,
        columns: Mapping[str, NDArray[Any]],
    ) -> None:
        self.source, self.recipe, self.seed, self.shuffle = source, recipe, seed, shuffle
        self.groups, self.columns = groups, columns
        self._members: Ragged | None = None  # the samples of each group
        self._count = len(source)
        if groups is not None:
            group, first = by_first_appearance(groups)
            self._members, self._count = Ragged.group(group, len(first)), len(first)
        self._window = 64  # units to look at first; does not affect steps

    def __len__(self) -> int:
        """Units of an epoch."""
        return self._count

    def next_step(self, at: StreamPosition) -> StepBounds | None:
        """The step that begins at a position; None at the end of the epoch."""
        rest, samples = len(self) - at.position, self.recipe.steps.samples
        if samples is not None and self.groups is None and self.recipe.overflow != "drop":
            return StepBounds.of(at, min(samples, rest), samples >= rest) if rest else None
        window = min(rest, samples or self._window)
        while True:
            sample_ids, ends = self._sample_ids(at, window)
            size = step_size(
                self.source.lengths_of(sample_ids),
                self._recipe_at(at),
                complete=window == rest,
                **self._about(sample_ids),
            )
            if size == 0:
                return None
            if size is not None:
                units = int(np.searchsorted(ends, size)) + 1
                self._window = units + units // 4 + 64
                if self.recipe.overflow == "drop" and self._all_dropped(at, units):
                    units = rest  # the last step reports all that were dropped
                return StepBounds.of(at, units, units == rest)
            window = min(rest, 2 * window)

    def _recipe_at(self, at: StreamPosition) -> Recipe:
        """The recipe for the number of ranks that began the step at this position."""
        return on_ranks(self.recipe, at.inside[0][0]) if at.inside else self.recipe

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
        """(sample ids of the next units, number of samples up to the end of each unit).

        Groups 0: samples 0, 2 and 1: samples 1, 3; units [1, 0] -> [1, 3, 0, 2], [2, 4]
        """
        numbers = self._order(at.epoch).samples(at.position + np.arange(units))
        if self._members is None:
            return numbers, np.arange(1, units + 1)
        begin = self._members.offsets[numbers]
        sizes = self._members.offsets[numbers + 1] - begin
        offsets = offsets_of(sizes)
        inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        return self._members.values[np.repeat(begin, sizes) + inside], offsets[1:]

    def _order(self, epoch: int) -> EpochOrder:
        return EpochOrder(count=len(self), seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def _about(self, sample_ids: IntArray) -> dict[str, Any]:
        """What plans take of each sample besides its length."""
        groups = self.groups
        return {
            "groups": None if groups is None else groups[sample_ids].astype(np.int64),
            "columns": {name: column[sample_ids] for name, column in self.columns.items()},
            "names": sample_ids,
        }

    def plan_step(self, bounds: StepBounds) -> PlannedStep:
        """The step, planned for the ranks that began it; what is left of it, for these ranks."""
        at = bounds.before
        sample_ids, _ = self._sample_ids(at, bounds.after.position - at.position)
        lengths, about = self.source.lengths_of(sample_ids), self._about(sample_ids)
        plan = plan_step(lengths, self._recipe_at(at), last=bounds.last, **about)
        if not at.inside:
            return PlannedStep(plan, sample_ids)

        def deal(rest: ByRank, ranks: int) -> ByRank:
            return plan_again(rest, ranks, plan.recipe, about)

        whole, ranks = _all_micro_batches(plan, sample_ids), self.recipe.topology.dp
        return PlannedStep(plan, sample_ids, rest_of_step(whole, at.inside, ranks, deal))

    def plan_epoch(self, epoch: int, progress: Progress | None = None) -> Plan:
        """One plan of a whole epoch, whose samples are numbered in the epoch's order."""
        sample_ids, _ = self._sample_ids(StreamPosition(epoch), len(self))
        lengths = self.source.lengths_of(sample_ids)
        plan = make_plan(lengths, self.recipe, progress=progress, **self._about(sample_ids))
        stored = np.array_equal(sample_ids, np.arange(len(sample_ids)))
        return plan if stored else replace(plan, sample_ids=sample_ids)

    def known_count(self, bounds: StepBounds) -> int | None:
        """Micro-batches per rank of a step, if that is known without planning it: not of the last
        step of an epoch, nor of one begun before."""
        if bounds.last or bounds.before.inside:
            return None
        return self.recipe.steps.micro_batches

    def same_epoch(self, epoch: int) -> int:
        """The first epoch with the same steps. Without shuffling, all epochs are the same."""
        return epoch if self.shuffle else 0

    def digests_of_columns(self) -> dict[str, str]:
        """What else determines plans: the columns that the recipe names."""
        columns = {name: self.columns[name] for name in self.recipe.columns if name in self.columns}
        return {name: column_digest(column, ALL_DIGESTED) for name, column in columns.items()}

    def identity(self, *, inside: bool) -> dict[str, str]:
        """Order and groups. Ranks, layout and balance may change, because they do not affect which
        samples a step holds; within a step only the ranks may."""
        identity = self._order_and_groups
        return {**identity, "recipe": self._recipe_digest} if inside else identity

    @cached_property
    def _order_and_groups(self) -> dict[str, str]:
        identity = {"order": self._order(0).description}
        if self.groups is not None:
            identity["groups"] = column_digest(self.groups)
        return identity

    @cached_property
    def _recipe_digest(self) -> str:
        """A digest of the recipe without the number of ranks."""
        recipe = self.recipe.to_dict()
        recipe["topology"] = {**recipe["topology"], "dp": None}
        return digest_of(recipe)

    @property
    def steps_per_epoch(self) -> Estimate:
        """Number of steps in an epoch; exact if steps are counted in samples."""
        steps, samples = self.recipe.steps, len(self.source)
        if steps.samples is not None:
            exact = self.groups is None and self.recipe.overflow != "drop"
            return Estimate(divided_up(samples, steps.samples), exact)
        tokens = estimated_tokens(self.source)
        if steps.tokens is not None:
            return Estimate(divided_up(int(tokens), steps.tokens), False)
        if steps.micro_batches is None:
            return Estimate(int(samples > 0), True)
        per_step = steps.micro_batches * self.recipe.topology.dp
        per_micro_batch = self._samples_per_micro_batch(tokens / max(samples, 1))
        return Estimate(math.ceil(samples / (per_micro_batch * per_step)), False)

    def _samples_per_micro_batch(self, length: float) -> float:
        """About how many samples of this length a micro-batch holds."""
        layout, unit = self.recipe.layout, self.recipe.topology.alignment
        aligned = rounded_up(math.ceil(length), unit)
        slots, most = layout.pack_bounds(self.recipe, np.array([aligned]))
        each = min(float(most[0]), math.inf if slots is None else slots / max(aligned, 1))
        return max(1.0, each * layout.packs_per_micro_batch)


def on_ranks(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe for another number of data-parallel ranks."""
    return replace(recipe, topology=replace(recipe.topology, dp=ranks))


# The rest of a step that was interrupted ---------------------------------------------------------


def _all_micro_batches(plan: Plan, sample_ids: IntArray) -> ByRank:
    """The micro-batches of each rank of a plan of one step, with samples named by id."""
    return [[micro.renumbered(sample_ids) for micro in micros] for micros in plan[0]]


def rest_of_step(
    by_rank: ByRank, inside: Inside, ranks: int, deal: Callable[[ByRank, int], ByRank]
) -> ByRank:
    """What `ranks` ranks still have to do of a step after the work in `inside`, applied in order.

    `deal(rest, ranks)` distributes what is left over another number of ranks.

    inside [(4, 2)], resumed on 4 ranks: their third micro-batch onwards. Resumed on 2 ranks: what
    is left of the four, dealt to two.
    """
    following = [*(count for count, _ in inside[1:]), ranks]
    for (_, done), count in zip(inside, following, strict=True):
        by_rank = [micros[done:] for micros in by_rank]
        if count != len(by_rank):
            by_rank = deal(by_rank, count)
    return by_rank


def plan_again(rest: ByRank, ranks: int, recipe: Recipe, about: Mapping[str, Any]) -> ByRank:
    """The same segments, planned for this number of ranks. They were determined by the first plan.

    `about` has the ids of the samples of the step (`names`) and their groups and columns.
    """
    micros = [micro for each in rest for micro in each]
    if all(micro.is_empty for micro in micros):
        return [rest[0]] * ranks
    segments = Segments(
        *(
            np.concatenate([getattr(micro.segments, column) for micro in micros])
            for column in ("sample", "start", "length")
        )
    )
    lengths = np.concatenate([micro.sample_lengths for micro in micros])
    ends = np.concatenate([micro.sample_ends for micro in micros])
    # Where each segment's sample stands in the step: ids [7, 3, 5], segments of 5, 7, 5 -> 2, 0, 2
    by_id = np.argsort(about["names"], kind="stable")
    index = by_id[np.searchsorted(about["names"], segments.sample, sorter=by_id)]
    order = np.lexsort((segments.start, index))
    segments, lengths, ends, index = segments.take(order), lengths[order], ends[order], index[order]
    groups = about["groups"]
    # Ranks need not get equally many segments of a rest: that is not possible in general.
    recipe = on_ranks(replace(recipe, steps=Steps(), equal_sizes=False), ranks)
    try:
        plan = plan_step(
            segments.length,
            recipe,
            groups=None if groups is None else groups[index],
            columns={name: about["columns"][name][index] for name in recipe.columns},
            names=segments.sample,
            last=True,
        )
    except PlanError as error:
        raise PlanError(
            f"the rest of a step that {len(rest)} ranks have begun cannot be planned for {ranks} "
            f"({error}) Resume on {len(rest)} ranks, or from a cursor between two steps."
        ) from None

    def with_segments(micro: MicroBatch) -> MicroBatch:
        """A micro-batch of indices into `segments` -> a micro-batch of those segments."""
        at = micro.segments.sample
        return replace(
            micro, segments=segments.take(at), sample_lengths=lengths[at], truncated_to=ends[at]
        )

    return [[with_segments(micro) for micro in micros] for micros in plan[0]]


# Steps of a saved plan ---------------------------------------------------------------------------


class PlanSteps:
    """The steps of a plan, the same in every epoch. A unit is a step.

    On fewer ranks than planned, a rank runs the micro-batches of several: each wave of 4 ranks is
    2 waves of 2 ranks. Nothing is planned again, also after a stop within a step.
    """

    def __init__(self, source: MeasuredSource, plan: Plan, ranks: int) -> None:
        if plan.num_ranks % ranks:
            divisors = [str(n) for n in range(1, plan.num_ranks + 1) if plan.num_ranks % n == 0]
            raise ConfigError(
                f"the plan is for {plan.num_ranks} ranks, and {ranks} does not divide them. Use "
                f"{' or '.join(divisors)} ranks, or plan again for {ranks}."
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
        self.recipe = recipe_on_fewer_ranks(plan.recipe, ranks)

    @cached_property
    def _samples(self) -> Ragged:
        return samples_by_step(self.plan)

    def __len__(self) -> int:
        return self.plan.num_steps

    def next_step(self, at: StreamPosition) -> StepBounds | None:
        """One step; None at the end of the plan."""
        if at.position >= len(self):
            return None
        return StepBounds.of(at, 1, at.position + 1 == len(self))

    def plan_step(self, bounds: StepBounds) -> PlannedStep:
        """The step as planned, or what is left of it, on these ranks."""
        at = bounds.before
        samples = self._samples[at.position]
        ids = samples if self.plan.sample_ids is None else self.plan.sample_ids[samples]
        self._check_lengths(ids, self.plan.lengths[samples])
        plan = step_plan(self.plan, at.position, samples)
        if not at.inside:
            return PlannedStep(on_fewer_ranks(plan, self.ranks), ids)
        whole = _all_micro_batches(on_fewer_ranks(plan, at.inside[0][0]), ids)
        empty = whole[0][-1].without(whole[0][-1].segments.sample.tolist())

        def deal(rest: ByRank, ranks: int) -> ByRank:
            """Wave by wave: 1, 2 and 3 left on one rank -> [[1, 3], [2, empty]] on two."""
            waves = zip(*rest, strict=True)
            left = [micro for wave in waves for micro in wave if not micro.is_empty]
            count = rounded_up(max(divided_up(len(left), ranks), 1), self.recipe.topology.multiple)
            left += [empty] * (ranks * count - len(left))
            return [left[rank::ranks] for rank in range(ranks)]

        return PlannedStep(plan, ids, rest_of_step(whole, at.inside, self.ranks, deal))

    def _check_lengths(self, ids: IntArray, planned: IntArray) -> None:
        lengths = self.source.lengths_of(ids)
        wrong = np.flatnonzero(lengths != planned)
        if len(wrong):
            first = wrong[0]
            raise InputError(
                f"sample {ids[first]} has {lengths[first]} tokens, but the plan expects "
                f"{planned[first]}. Pass the source that the plan was made of, or plan again."
            )

    def plan_epoch(self, epoch: int, progress: Progress | None = None) -> Plan:
        """The plan itself."""
        return self.plan

    def known_count(self, bounds: StepBounds) -> int | None:
        """Micro-batches per rank as the plan says, except for a step begun before."""
        if bounds.before.inside:
            return None
        cell = bounds.before.position * self.plan.num_ranks
        planned = self.plan.cell_offsets[cell + 1] - self.plan.cell_offsets[cell]
        return int(planned) * self.plan.num_ranks // self.ranks

    def same_epoch(self, epoch: int) -> int:
        """All epochs are the same."""
        return 0

    def digests_of_columns(self) -> dict[str, str] | None:
        """None: the plan has all."""
        return None

    def identity(self, *, inside: bool) -> dict[str, str]:
        """The plan, which determines everything."""
        return self._plan_digest

    @cached_property
    def _plan_digest(self) -> dict[str, str]:
        return {"plan": self.plan.fingerprint[:16]}

    @property
    def steps_per_epoch(self) -> Estimate:
        """The steps of the plan."""
        return Estimate(len(self), exact=True)


def lengths_by_id(plan: Plan) -> IntArray:
    """The planned length of every sample of the source."""
    ids, count = plan.sample_ids, len(plan.lengths)
    if ids is None or count == 0 or not 0 <= ids.min() <= ids.max() < count:
        return plan.lengths
    lengths = np.zeros(count, np.int64)
    lengths[ids] = plan.lengths
    return lengths
