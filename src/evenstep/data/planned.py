"""PlannedStream: known lengths -> steps, planned alike on every rank without communication.

    StreamPosition --step_units--> where a step ends --plan_step--> its plan -> Step

Steps are made of a recipe and a seeded order; those of a `SavedPlanStream` are in its plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenstep.core.measures import time_of_works, works_of
from evenstep.core.plan import (
    MicroBatch,
    Plan,
    on_fewer_ranks,
    refuse_shared,
    samples_by_step,
    step_plan,
)
from evenstep.core.prefixes import Prefixes
from evenstep.core.ragged import (
    ELSEWHERE,
    FloatArray,
    IntArray,
    Ragged,
    Segments,
    by_first_appearance,
    divided_up,
    frozen,
    offsets_of,
    rounded_up,
)
from evenstep.core.recipe import Recipe, Steps, World, check_recipe, recipe_on_fewer_ranks
from evenstep.core.step import Cursor, Step
from evenstep.core.text import truth_value, whole_number
from evenstep.data.dataset import MapStyle, as_measured
from evenstep.data.files import refuse_empty
from evenstep.data.order import EpochOrder
from evenstep.data.source import (
    ALL_DIGESTED,
    MeasuredSource,
    Progress,
    column_digest,
    digest_of,
)
from evenstep.data.stream import (
    Estimate,
    OnError,
    SampleLookup,
    Stream,
    check_lengths,
    estimated_tokens,
    known_to,
    settings_digest,
    world_for,
)
from evenstep.errors import ConfigError, CursorError, InputError, PlanError
from evenstep.planning.inputs import check_names, numbered, per_sample
from evenstep.planning.planner import make_plan, plan_step, step_size

_MOST_CHECKED = 2**25  # samples whose lengths are all checked before the first step

# Positions ----------------------------------------------------------------------------------------

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
    def of(cls, cursor: Cursor) -> StreamPosition:
        """The position that a cursor of a planned stream holds."""
        data = cursor.position
        try:
            inside = tuple((int(ranks), int(done)) for ranks, done in data.get("inside", ()))
            return cls(int(data["epoch"]), int(data["position"]), cursor.step, inside)
        except (KeyError, TypeError, ValueError) as error:
            raise CursorError(
                f"the position {dict(data)!r} in the cursor is malformed ({error!r}). Use an "
                f"earlier checkpoint."
            ) from None

    def within(self, ranks: int, done: int) -> StreamPosition:
        """The same step, after each of `ranks` ranks has done `done` micro-batches of it."""
        before = self.inside[:-1] if self.inside and self.inside[-1][0] == ranks else self.inside
        return StreamPosition(self.epoch, self.position, self.step, (*before, (ranks, done)))


Bounds: TypeAlias = tuple[StreamPosition, StreamPosition]
"""Where a step begins and ends."""

# The stream ---------------------------------------------------------------------------------------


class EpochSize(NamedTuple):
    """Steps of an epoch and their micro-batches per rank. Both are the same on every rank."""

    steps: int
    micro_batches: int


def on_ranks(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe for another number of data-parallel ranks."""
    return replace(recipe, topology=replace(recipe.topology, dp=ranks))


def _whole_samples(micro: MicroBatch) -> tuple[IntArray, ...]:
    """(sample, start, length, sample length, sample end) of each segment of its own; one behind
    shared prefixes is the whole sample, and so is the first part of one that ranks share."""
    segments, parent, ends = micro.segments, micro.segments.parent, micro.sample_ends
    start, end = segments.start, segments.start + segments.length
    own = np.ones(len(segments), bool)
    if parent is not None:
        start = np.where(parent < 0, start, 0)
        own = np.isin(np.arange(len(segments)), parent, invert=True) & (parent != ELSEWHERE)
    if micro.exchange is not None:
        end = np.where(micro.exchange.number < 0, end, ends)
    columns = segments.sample, start, end - start, micro.sample_lengths, ends
    return tuple(column[own] for column in columns)


class PlannedStream(Stream):
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
    prefixes     what samples share at their start (`find_prefixes`), which micro-batches compute
                 once
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

    source: MeasuredSource
    samples: SampleLookup
    """The samples by id, as steps read them."""

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
        prefixes: Prefixes | None = None,
        loss_tokens: ArrayLike | None = None,
        max_num_steps: int | None = None,
        infinite_loop: bool = False,
        on_error: OnError = "raise",
        fingerprint: str | None = None,
    ) -> None:
        check_recipe(recipe)
        check_names(columns, recipe)
        if on_error == "skip" and recipe.sharing is not None:
            raise ConfigError(
                "on_error='skip' leaves out samples that one rank cannot read, but with sharing "
                "other ranks rely on them. Use on_error='raise', or plan without sharing."
            )
        measured = as_measured(source)
        if prefixes is not None:
            prefixes.check(measured.lengths_of(np.arange(len(measured))))
        super().__init__(
            measured,
            recipe,
            world=world,
            seed=seed,
            shuffle=truth_value("shuffle", shuffle),
            max_num_steps=max_num_steps,
            infinite_loop=infinite_loop,
            on_error=on_error,
            fingerprint=fingerprint,
        )
        count = len(measured)
        self._loss_tokens: NDArray[np.integer] | None = None
        if loss_tokens is not None:
            self._loss_tokens = per_sample("loss_tokens", loss_tokens, count)
        self._columns: dict[str, NDArray[Any]] | None = {
            name: per_sample(name, values, count, whole=False)
            for name, values in (columns or {}).items()
        }
        self._prefixes = prefixes
        self._order = EpochOrder(count=count, seed=self.seed, epoch=0, shuffle=self.shuffle)
        self._groups: NDArray[np.integer] | None = None
        self._members: Ragged | None = None  # the samples of each group
        if groups is not None:
            self._groups = per_sample("groups", numbered(groups), count)
            group, first = by_first_appearance(self._groups)
            self._members = Ragged.group(group, len(first))
            self._order = replace(self._order, count=len(first))
        self._units = self._order.count  # of an epoch
        self._window = 64  # units to look at first; does not affect steps
        self.samples = SampleLookup(measured, on_error, self.seed)
        self._start = StreamPosition()
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
        return SavedPlanStream(
            as_measured(source, lengths_by_id(plan)),
            plan,
            world_for(plan.recipe, None) if world is None else world,
            loss_tokens=loss_tokens,
            max_num_steps=max_num_steps,
            infinite_loop=infinite_loop,
            on_error=on_error,
            fingerprint=fingerprint,
        )

    # Steps -------------------------------------------------------------------------------------

    def walk(self, worker: int = 0, workers: int = 1, turn: int | None = None) -> Iterator[Step]:
        """The steps of one of several workers, which take turns. Its first step is number `turn`
        from the start (default: `worker`). Steps of other workers are not planned."""
        self._check_source()
        turn = worker if turn is None else turn
        for at, after in self._bounds(self._start):
            if (at.step - self._start.step) % workers == turn:
                yield self._steps_of_ranks(at, after, [self.world.rank])[0]

    def walk_all(self) -> Iterator[list[Step]]:
        """Every step for all ranks, for callers that deal micro-batches to ranks themselves. A
        step is planned once."""
        self._check_source()
        for at, after in self._bounds(self._start):
            yield self._steps_of_ranks(at, after, range(self.world.size))

    def _check_source(self) -> None:
        """Check all lengths before the first step, unless that would take a second or more."""
        refuse_empty(self.source)
        if not self._checked and len(self.source) <= _MOST_CHECKED:
            check_lengths(self.source, self.recipe)
        self._iterated = self._checked = True

    def _bounds(self, at: StreamPosition, one_epoch: bool = False) -> Iterator[Bounds]:
        """Every step from a position on: of the rest of `one_epoch`, or of all that this stream
        has, up to `max_num_steps`."""
        most = None if one_epoch else self.max_num_steps
        any_step = at.position > 0  # in the current epoch
        while most is None or at.step < most:
            units = self._step_units(at)
            if units:
                after = StreamPosition(at.epoch, at.position + units, at.step + 1)
                yield at, after
                at, any_step = after, True
            elif one_epoch or not self.infinite_loop:
                return
            elif not any_step:
                raise InputError(
                    f"epoch {at.epoch} has no sample to run, so an endless stream cannot continue. "
                    f"Add samples, or use another overflow than 'drop'."
                )
            else:
                at, any_step = StreamPosition(at.epoch + 1, 0, at.step), False

    def _rest(self, inside: Inside, plan: Plan, sample_ids: IntArray) -> ByRank:
        """What each rank still has to do of a step that was begun before.

        inside [(4, 2)], resumed on 4 ranks: their third micro-batch onwards. Resumed on 2 ranks:
        what is left of the four, dealt to two.
        """
        rest = [[micro.renumbered(sample_ids) for micro in micros] for micros in plan[0]]
        following = [*(ranks for ranks, _ in inside[1:]), self.world.size]
        for (_, done), ranks in zip(inside, following, strict=True):
            rest = [micros[done:] for micros in rest]
            if ranks != len(rest):
                rest = self._deal(rest, ranks, plan, sample_ids)
        return rest

    def _steps_of_ranks(
        self, at: StreamPosition, after: StreamPosition, ranks: Iterable[int]
    ) -> list[Step]:
        """A step for each of these ranks. Totals are over all ranks."""
        plan, sample_ids = self._plan_step(at, after)
        rest = self._rest(at.inside, plan, sample_ids) if at.inside else None
        recipe, over, whole = plan.recipe, plan.recipe.longest_segment, rest is None
        over_long = 0 if over is None else int((plan.lengths > over).sum())
        reason = {"drop": "dropped", "truncate": "truncated"}.get(recipe.overflow)
        cursor = self.cursor(after)
        # Of each kind of work: [rank, micro-batch]
        works = [each.reshape(plan.num_ranks, -1) for each in works_of(plan)] if whole else []
        totals = self._totals(plan, sample_ids, works) if whole else {}
        text = f"{self.fingerprint} {at.step} {at.epoch} {at.position} {at.inside} {after.step}"
        samples, costs = self.samples.in_epoch(at.epoch), np.sum(works, axis=0)
        frozen_ids, steps = frozen(sample_ids) if whole else None, []
        for rank in ranks:
            micros = rest[rank] if rest else [m.renumbered(sample_ids) for m in plan[0, rank]]
            loss_tokens = {}
            if self._loss_tokens is not None and "loss_tokens" in totals:
                ids = sorted({i for micro in micros for i in micro.segments.sample.tolist()})
                loss_tokens = dict(zip(ids, self._loss_tokens[ids].tolist(), strict=True))
            step = Step(
                number=at.step,
                epoch=at.epoch,
                micro_batches=tuple(micros),
                samples=samples,
                cursor=cursor,
                totals=totals,
                lost={reason: over_long} if reason and over_long else {},
                budget=recipe.layout.budget,
                ranks=plan.num_ranks if rest is None else len(rest),
                context_ranks=recipe.topology.cp,
                loss_tokens=loss_tokens,
                plan=plan if whole else None,
                sample_ids=frozen_ids,
                costs=tuple(costs[rank].tolist()) if whole else (),
                fingerprint=digest_of(text, size=8).hex(),
            )
            steps.append(step)
        return steps

    def _totals(
        self, plan: Plan, sample_ids: IntArray, works: list[FloatArray]
    ) -> dict[str, float]:
        """Totals over all ranks; loss tokens only if they are known and no sample can be lost."""
        run = np.flatnonzero(plan.step_of >= 0)
        ends = plan.ends(run)
        ideal = sum(float(work.sum()) for work in works) / plan.num_ranks
        totals: dict[str, float] = {
            # Of the samples: prefixes that they share count for each.
            "tokens": int(ends.sum()),
            "empty": int((np.diff(plan.segment_offsets) == 0).sum()),
            "imbalance_step": time_of_works(works, "step") / ideal if ideal else 1.0,
            "imbalance_micro_batch": time_of_works(works, "micro_batch") / ideal if ideal else 1.0,
        }
        if self.on_error == "skip":
            return totals  # unreadable samples are not known yet
        totals["samples"] = len(run)
        if self._loss_tokens is not None and np.array_equal(ends, plan.lengths[run]):
            labels = self._loss_tokens[sample_ids[run]]
            totals["loss_tokens"] = int(labels.sum())
            totals["sequences"] = int((labels > 0).sum())
            if plan.groups is not None:
                totals["groups"] = len(np.unique(plan.groups[run][labels > 0]))
        return totals

    # What a step holds -------------------------------------------------------------------------

    # The order permutes units: samples or, with `groups`, groups of samples, numbered in order of
    # their first members. A step takes the next units. No more lengths are looked at than needed
    # to find where it ends.

    def _step_units(self, at: StreamPosition) -> int:
        """Units of the step that begins at a position; 0 at the end of the epoch."""
        rest, samples = self._units - at.position, self.recipe.steps.samples
        if samples is not None and self._groups is None and self.recipe.overflow != "drop":
            return min(samples, rest)
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
                return 0
            if size is not None:
                units = int(np.searchsorted(ends, size)) + 1
                self._window = units + units // 4 + 64
                if self.recipe.overflow == "drop" and self._all_dropped(at, units):
                    return rest  # the last step reports all that were dropped
                return units
            window = min(rest, 2 * window)

    def _recipe_at(self, at: StreamPosition) -> Recipe:
        """The recipe for the number of ranks that began the step at this position."""
        return on_ranks(self.recipe, at.inside[0][0]) if at.inside else self.recipe

    def _all_dropped(self, at: StreamPosition, units: int) -> bool:
        """Whether everything after the next `units` units of the epoch is dropped."""
        first, window, longest = at.position + units, 64, self.recipe.longest_segment
        while first < self._units:
            count = min(window, self._units - first)
            sample_ids, _ = self._sample_ids(replace(at, position=first), count)
            if longest is None or (self.source.lengths_of(sample_ids) <= longest).any():
                return False
            first, window = first + count, 2 * window
        return True

    def _sample_ids(self, at: StreamPosition, units: int) -> tuple[IntArray, IntArray]:
        """(sample ids of the next units, number of samples up to the end of each unit).

        Groups 0: samples 0, 2 and 1: samples 1, 3; units [1, 0] -> [1, 3, 0, 2], [2, 4]
        """
        order = replace(self._order, epoch=at.epoch)
        numbers = order.samples(at.position + np.arange(units))
        if self._members is None:
            return numbers, np.arange(1, units + 1)
        begin = self._members.offsets[numbers]
        sizes = self._members.offsets[numbers + 1] - begin
        offsets = offsets_of(sizes)
        inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        return self._members.values[np.repeat(begin, sizes) + inside], offsets[1:]

    def _about(self, sample_ids: IntArray) -> dict[str, Any]:
        """What plans take of samples besides their lengths."""
        groups = self._groups
        return {
            "groups": None if groups is None else groups[sample_ids].astype(np.int64),
            "columns": {name: column[sample_ids] for name, column in (self._columns or {}).items()},
            "prefixes": None if self._prefixes is None else self._prefixes.take(sample_ids),
            "names": sample_ids,
        }

    def _plan_step(self, at: StreamPosition, after: StreamPosition) -> tuple[Plan, IntArray]:
        """(the plan of a step for the ranks that began it, the ids of its samples)."""
        sample_ids, _ = self._sample_ids(at, after.position - at.position)
        lengths, about = self.source.lengths_of(sample_ids), self._about(sample_ids)
        last = after.position == self._units
        return plan_step(lengths, self._recipe_at(at), last=last, **about), sample_ids

    def _deal(self, rest: ByRank, ranks: int, plan: Plan, sample_ids: IntArray) -> ByRank:
        """What is left of a step, planned for this number of ranks. Its segments are those of the
        first plan; a sample behind a shared prefix is whole again, and may share another one."""
        micros = [micro for each in rest for micro in each]
        if all(micro.is_empty for micro in micros):
            return [rest[0]] * ranks
        sample, start, length, lengths, ends = (
            np.concatenate(column) for column in zip(*map(_whole_samples, micros), strict=True)
        )
        segments = Segments(sample, start, length)
        # In the order of the step: ids [7, 3, 5], segments of 5, 7, 5 -> samples 2, 0, 2
        by_id = np.argsort(sample_ids, kind="stable")
        index = by_id[np.searchsorted(sample_ids, segments.sample, sorter=by_id)]
        order = np.lexsort((segments.start, index))
        segments, lengths, ends = segments.take(order), lengths[order], ends[order]
        # Ranks need not get equally many segments of a rest: that is not possible in general.
        recipe = on_ranks(replace(plan.recipe, steps=Steps(), equal_sizes=False), ranks)
        if (segments.start > 0).any():  # parts of split samples are not shared between ranks
            recipe = replace(recipe, sharing=None)
        try:
            about = self._about(segments.sample)
            if about["prefixes"] is not None:  # what was truncated is not shared
                about["prefixes"] = about["prefixes"].clipped(segments.length)
            again = plan_step(segments.length, recipe, last=True, **about)
        except PlanError as error:
            raise PlanError(
                f"the rest of a step that {len(rest)} ranks have begun cannot be planned for "
                f"{ranks} ({error}) Resume on {len(rest)} ranks, or from a cursor between two "
                f"steps."
            ) from None

        def with_segments(micro: MicroBatch) -> MicroBatch:
            """A micro-batch of indices into `segments` -> a micro-batch of those segments."""
            at, start = micro.segments.sample, micro.segments.start
            micro = micro.renumbered(segments.sample)
            named = replace(micro.segments, start=segments.start[at] + start)
            return replace(micro, segments=named, sample_lengths=lengths[at], truncated_to=ends[at])

        return [[with_segments(micro) for micro in micros] for micros in again[0]]

    def _known_count(self, at: StreamPosition, after: StreamPosition) -> int | None:
        """Micro-batches per rank of a step, if that is known without planning it: not of the last
        step of an epoch, nor of one begun before."""
        if after.position == self._units or at.inside:
            return None
        return self.recipe.steps.micro_batches

    # Position ----------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """Steps before the start, over all epochs."""
        return self._start.step

    def start(self, workers: int = 1) -> Cursor:
        """The cursor before the first step; the same for any number of workers."""
        return self.cursor(self._start)

    @staticmethod
    def join(cursors: Sequence[Cursor]) -> Cursor:
        """The latest of several cursors; each holds the whole position."""
        return max(cursors, key=lambda cursor: cursor.step)

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Start after the step that this state was taken at, on any number of ranks.

        Between steps, layout, limits and overflow may always change; within a step they cannot.
        `allow` has no effect; pooled streams need it.
        """
        cursor = Cursor.from_dict(state)
        inside = "inside" in cursor.position
        cursor.check(known_to(cursor, self._identity_inside if inside else self._identity))
        at = StreamPosition.of(cursor)
        if not 0 <= at.position <= self._units:
            raise CursorError(
                f"the cursor is at position {at.position}, but an epoch has {self._units} "
                f"units, so it was taken from other data or groups. Restore them, or use a cursor "
                f"of this stream."
            )
        self._start = at
        self._restart()

    def skip_batches(self, steps: int) -> None:
        """Start `steps` steps later. Nothing is read or planned."""
        steps = whole_number("steps to skip", steps, least=0)
        for _, after in islice(self._bounds(self._start), steps):
            self._start = after
            self._restart()

    def _start_epochs(self) -> Collection[int]:
        return (self._start.epoch,)

    def _start_epoch(self, epoch: int, done: int) -> None:
        self._start = StreamPosition(epoch, 0, done)

    def cursor(self, at: StreamPosition) -> Cursor:
        """The cursor of a position."""
        identity = self._identity_inside if at.inside else self._identity
        return Cursor(identity=identity, step=at.step, position=at.to_dict())

    # Identity ----------------------------------------------------------------------------------

    @property
    def shares_prefixes(self) -> bool:
        """Whether micro-batches may compute what samples share once, or parts of samples."""
        return self._prefixes is not None or self.recipe.sharing is not None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all that determines the steps: data, order, recipe, ranks. Not the rank, so
        it is the same on all ranks unless they would train on different plans."""
        settings: dict[str, Any] = {**self._identity}
        if self._prefixes is not None:
            settings["prefixes"] = self._prefixes_digest
        settings |= {"recipe": self.recipe.to_dict(), "per sample": {}}
        settings["end"] = [self.max_num_steps, self.infinite_loop]
        if self._loss_tokens is not None:
            settings["per sample"] = {"loss_tokens": _digest(self._loss_tokens)}
        if self._columns is not None:
            settings["columns"] = self._column_digests
        return settings_digest(settings)

    @cached_property
    def _identity(self) -> dict[str, str]:
        """What a cursor belongs to. Ranks, layout and balance may change, because they do not
        affect which samples a step holds."""
        identity = {"stream": "planned", **self._identity_of_data("samples", measured=True)}
        identity["order"] = self._order.description
        if self._groups is not None:
            identity["groups"] = column_digest(self._groups.__getitem__, len(self._groups))
            every = _digest(self._groups)
            if every != identity["groups"]:  # which covers 4096 samples
                identity["all groups"] = every
        return identity

    @cached_property
    def _identity_inside(self) -> dict[str, str]:
        """What a cursor inside a step belongs to: there, only the ranks may change."""
        recipe = self.recipe.to_dict()
        recipe["topology"] = {**recipe["topology"], "dp": None}
        identity = {**self._identity, "recipe": settings_digest(recipe)}
        if self._prefixes is None:  # as in earlier releases
            return identity
        columns = {"columns": settings_digest(self._column_digests)} if self._columns else {}
        return {**identity, "prefixes": self._prefixes_digest, **columns}

    @cached_property
    def _prefixes_digest(self) -> str:
        """What samples share. It determines micro-batches, not steps."""
        assert self._prefixes is not None
        arrays = self._prefixes.order.tobytes(), self._prefixes.shared.tobytes()
        return digest_of(*arrays, size=8).hex()

    @property
    def _column_digests(self) -> dict[str, str]:
        """A digest of each column that the recipe uses."""
        columns = self._columns or {}
        names = [name for name in self.recipe.columns if name in columns]
        return {name: _digest(columns[name]) for name in names}

    # Length ------------------------------------------------------------------------------------

    def epoch_size(
        self, epoch: int = 0, *, drop_last: bool = False, progress: Progress | None = None
    ) -> EpochSize:
        """The exact number of steps and of micro-batches per rank of an epoch. Reads no samples.

        Plans every step, unless steps are counted in micro-batches, and remembers the result.
        With `drop_last`, steps in which a rank has an empty micro-batch are not counted.
        `progress(done, total)` is called after each step with units of the epoch.
        """
        epoch = whole_number("epoch", epoch, least=0)
        key = epoch if self.shuffle else 0, drop_last  # without shuffling, all epochs are the same
        if key not in self._sizes:
            bounds = self._bounds(StreamPosition(key[0]), one_epoch=True)
            self._sizes[key] = self._count_steps(bounds, drop_last, progress)
        return self._sizes[key]

    def size_left(self, *, drop_last: bool = False, progress: Progress | None = None) -> EpochSize:
        """The same for the rest of the epoch, from the start that was set."""
        if self._start.position == 0 and not self._start.inside:
            return self.epoch_size(self._start.epoch, drop_last=drop_last, progress=progress)
        bounds = self._bounds(self._start, one_epoch=True)
        return self._count_steps(bounds, drop_last, progress)

    def micro_batches_per_epoch(
        self, epochs: int = 1, *, drop_last: bool = False, progress: Progress | None = None
    ) -> list[int]:
        """Micro-batches per rank of the epochs 0, 1, ... as `epoch_size` counts them."""
        units = self._units
        total = units * whole_number("epochs", epochs, least=0)
        counts = []
        for epoch in range(epochs):

            def advance(done: int, _: int, before: int = epoch * units) -> None:
                if progress is not None:
                    progress(before + done, total)

            size = self.epoch_size(epoch, drop_last=drop_last, progress=advance)
            counts.append(size.micro_batches)
        return counts

    def _count_steps(
        self, steps: Iterable[Bounds], drop_last: bool = False, progress: Progress | None = None
    ) -> EpochSize:
        """Count steps. Plans a step only if its number of micro-batches is not known otherwise."""
        num_steps = micro_batches = 0
        for at, after in steps:
            count = None if drop_last else self._known_count(at, after)
            if count is None:
                plan, sample_ids = self._plan_step(at, after)
                count = int(plan.cell_offsets[1])
                if at.inside:
                    count = len(self._rest(at.inside, plan, sample_ids)[0])
                elif drop_last and (np.diff(plan.segment_offsets) == 0).any():
                    count = 0
            num_steps, micro_batches = num_steps + (count > 0), micro_batches + count
            if progress is not None:
                progress(after.position, self._units)
        return EpochSize(num_steps, micro_batches)

    def plan_epoch(self, epoch: int = 0, *, progress: Progress | None = None) -> Plan:
        """One plan of all steps of an epoch, to save, to show, or to run with `from_plan`.

        Samples are numbered in the epoch's order; `plan.sample_ids` are their ids in the source.
        `progress(done, total)` is called after each step.
        """
        at = StreamPosition(whole_number("epoch", epoch, least=0))
        sample_ids, _ = self._sample_ids(at, self._units)
        lengths, about = self.source.lengths_of(sample_ids), self._about(sample_ids)
        plan = make_plan(lengths, self.recipe, progress=progress, **about)
        stored = np.array_equal(sample_ids, np.arange(len(sample_ids)))
        return plan if stored else replace(plan, sample_ids=sample_ids)

    @property
    def steps_per_epoch(self) -> Estimate:
        """Number of steps in an epoch; exact if steps are counted in samples, and after
        `epoch_size` has counted the epoch of the start."""
        counted = self._sizes.get((self._start.epoch if self.shuffle else 0, False))
        return self._estimated_steps if counted is None else Estimate(counted.steps, True)

    @property
    def _estimated_steps(self) -> Estimate:
        """Number of steps in an epoch; exact if steps are counted in samples."""
        steps, samples = self.recipe.steps, len(self.source)
        if steps.samples is not None:
            exact = self._groups is None and self.recipe.overflow != "drop"
            return Estimate(divided_up(samples, steps.samples), exact)
        tokens = estimated_tokens(self.source)
        if steps.tokens is not None:
            return Estimate(divided_up(int(tokens), steps.tokens), False)
        if steps.micro_batches is None:
            return Estimate(int(samples > 0), True)
        # About how many samples of the average length a micro-batch holds.
        layout, unit = self.recipe.layout, self.recipe.topology.alignment
        aligned = rounded_up(math.ceil(tokens / max(samples, 1)), unit)
        slots, most = layout.pack_bounds(self.recipe, np.array([aligned]))
        each = min(float(most[0]), math.inf if slots is None else slots / max(aligned, 1))
        per_micro_batch = max(1.0, each * layout.packs_per_micro_batch)
        per_step = steps.micro_batches * self.recipe.topology.dp
        return Estimate(math.ceil(samples / (per_micro_batch * per_step)), False)

    @property
    def steps_in_every_epoch(self) -> int | None:
        """Number of steps, if every epoch has the same and it is known without planning."""
        estimate = self._estimated_steps
        return estimate.steps if estimate.exact else None

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches per rank and step: those of the first step of the epoch."""
        if self.recipe.steps.micro_batches is not None:
            return self.recipe.steps.micro_batches
        bounds = self._bounds(StreamPosition(self._start.epoch), one_epoch=True)
        return self._count_steps(islice(bounds, 1)).micro_batches


def _digest(column: NDArray[Any]) -> str:
    """A digest of all entries of a column, of 4096 of more than 262,144."""
    return column_digest(column.__getitem__, len(column), ALL_DIGESTED)


# Steps of a saved plan ---------------------------------------------------------------------------


class SavedPlanStream(PlannedStream):
    """The steps of a plan, the same in every epoch. A unit is a step.

    On fewer ranks than planned, a rank runs the micro-batches of several: each wave of 4 ranks is
    2 waves of 2 ranks. Nothing is planned again, also after a stop within a step.
    """

    def __init__(self, source: MeasuredSource, plan: Plan, world: World, **options: Any) -> None:
        ranks = world.size
        if plan.num_ranks % ranks:
            divisors = [str(n) for n in range(1, plan.num_ranks + 1) if plan.num_ranks % n == 0]
            raise ConfigError(
                f"the plan is for {plan.num_ranks} ranks, and {ranks} does not divide them. Use "
                f"{' or '.join(divisors)} ranks, or plan again for {ranks}."
            )
        refuse_shared(plan, ranks)
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
        self._plan = plan
        recipe = recipe_on_fewer_ranks(plan.recipe, ranks)
        super().__init__(source, recipe, world=world, shuffle=False, **options)
        self._columns = None  # the plan has been made of them
        self._units = plan.num_steps

    @cached_property
    def _samples_by_step(self) -> Ragged:
        return samples_by_step(self._plan)

    def _step_units(self, at: StreamPosition) -> int:
        """One step; 0 at the end of the plan."""
        return int(at.position < self._units)

    def _plan_step(self, at: StreamPosition, after: StreamPosition) -> tuple[Plan, IntArray]:
        """(the step as planned, on the ranks that began it, the ids of its samples)."""
        samples = self._samples_by_step[at.position]
        ids = samples if self._plan.sample_ids is None else self._plan.sample_ids[samples]
        lengths, planned = self.source.lengths_of(ids), self._plan.lengths[samples]
        if not np.array_equal(lengths, planned):
            first = np.flatnonzero(lengths != planned)[0]
            raise InputError(
                f"sample {ids[first]} has {lengths[first]} tokens, but the plan expects "
                f"{planned[first]}. Pass the source that the plan was made of, or plan again."
            )
        plan = step_plan(self._plan, at.position, samples)
        return on_fewer_ranks(plan, at.inside[0][0] if at.inside else self.world.size), ids

    def _deal(self, rest: ByRank, ranks: int, plan: Plan, sample_ids: IntArray) -> ByRank:
        """Wave by wave: 1, 2 and 3 left on one rank -> [[1, 3], [2, empty]] on two."""
        waves, last = zip(*rest, strict=True), plan[0, 0][-1]
        left = [micro for wave in waves for micro in wave if not micro.is_empty]
        count = rounded_up(max(divided_up(len(left), ranks), 1), self.recipe.topology.multiple)
        empty = last.without(last.segments.sample.tolist())
        left += [empty] * (ranks * count - len(left))
        return [left[rank::ranks] for rank in range(ranks)]

    def plan_epoch(self, epoch: int = 0, *, progress: Progress | None = None) -> Plan:
        """The plan itself."""
        return self._plan

    def _known_count(self, at: StreamPosition, after: StreamPosition) -> int | None:
        """Micro-batches per rank as the plan says, except for a step begun before."""
        if at.inside:
            return None
        cell = at.position * self._plan.num_ranks
        planned = self._plan.cell_offsets[cell + 1] - self._plan.cell_offsets[cell]
        return int(planned) * self._plan.num_ranks // self.world.size

    @property
    def shares_prefixes(self) -> bool:
        """Whether samples of the plan share tokens, or ranks share samples."""
        return self._plan.segments.parent is not None

    @cached_property
    def _identity(self) -> dict[str, str]:
        """What a cursor belongs to: the plan, which determines everything."""
        data = self._identity_of_data("samples", measured=True)
        return {"stream": "planned", **data, "plan": self._plan.fingerprint[:16]}

    @property
    def _estimated_steps(self) -> Estimate:
        """The steps of the plan."""
        return Estimate(self._units, exact=True)

    @cached_property
    def _identity_inside(self) -> dict[str, str]:
        return self._identity


def lengths_by_id(plan: Plan) -> IntArray:
    """The planned length of every sample of the source."""
    ids, count = plan.sample_ids, len(plan.lengths)
    if ids is None or count == 0 or not 0 <= ids.min() <= ids.max() < count:
        return plan.lengths
    lengths = np.zeros(count, np.int64)
    lengths[ids] = plan.lengths
    return lengths
