"""PlannedStream: known lengths -> steps, planned alike on every rank without communication."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.cursor import Cursor
from evenstep.core.micro_batch import MicroBatch
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, frozen
from evenstep.core.recipe import Recipe
from evenstep.core.rounding import divided_up, rounded_up
from evenstep.core.step import Step
from evenstep.core.validate import seed_number, truth_value, whole_number
from evenstep.core.world import World
from evenstep.data.sources.lengths import column_digest
from evenstep.data.sources.source import MeasuredSource, check_measured
from evenstep.data.streams.epoch_units import EpochUnits
from evenstep.data.streams.estimate import Estimate
from evenstep.data.streams.lookup import OnError, SampleLookup
from evenstep.data.streams.order import EpochOrder
from evenstep.data.streams.per_sample import per_sample, whole_per_sample
from evenstep.data.streams.position import StreamPosition
from evenstep.data.streams.step_remainder import StepRemainder
from evenstep.data.streams.stream import digest_of, steps_of_pass, world_for
from evenstep.errors import CursorError, InputError
from evenstep.planning.planner import plan_step, step_size

_SAMPLED_LENGTHS = 4096  # for estimates


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

    >>> from evenstep import Packed, Steps
    >>> from evenstep.data.sources.lengths import Lengths
    >>> recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=2))
    >>> stream = PlannedStream(Lengths(np.array([5, 3, 4, 2])), recipe, shuffle=False)
    >>> [micro.segments.sample.tolist() for step in stream for micro in step.micro_batches]
    [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        source: MeasuredSource,
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
    ) -> None:
        check_measured(source)
        if max_num_steps is not None:
            max_num_steps = whole_number("max_num_steps", max_num_steps, least=0)
        self.source, self.recipe, self.world = source, recipe, world_for(recipe, world)
        self.seed, self.shuffle = seed_number(seed), truth_value("shuffle", shuffle)
        self.max_num_steps = max_num_steps
        self.infinite_loop = truth_value("infinite_loop", infinite_loop)
        count = len(source)
        self._columns = {
            name: per_sample(name, column, count) for name, column in (columns or {}).items()
        }
        self._loss_tokens, ids = (
            None if given is None else whole_per_sample(name, given, count)
            for name, given in (("loss_tokens", loss_tokens), ("groups", groups))
        )
        self._units = EpochUnits.of(count, ids)
        self._lookup = SampleLookup(source, on_error)
        self._start = self._now = StreamPosition()
        self._iterated = False  # since the start was set
        self._window = 64  # units to look at first; does not affect steps

    @property
    def done(self) -> int:
        """Steps before the start, over all epochs."""
        return self._start.step

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
        self._iterated = True
        turn = worker if turn is None else turn
        for before, after, last in self._bounds(self._start):
            if (before.step - self._start.step) % workers == turn:
                yield self._step(before, after, last, self.world.rank)

    def walk_all(self) -> Iterator[list[Step]]:
        """Every step for all ranks, for callers that deal micro-batches to ranks themselves."""
        self._iterated = True
        for before, after, last in self._bounds(self._start):
            ranks = range(self.world.size)
            yield [self._step(before, after, last, rank) for rank in ranks]

    def _bounds(self, at: StreamPosition) -> Iterator[tuple[StreamPosition, StreamPosition, bool]]:
        """(position before, position after, whether it is the last of its epoch) of every step."""
        found_any = at.position > 0  # in the current epoch
        while self.max_num_steps is None or at.step < self.max_num_steps:
            found = self._next(at)
            if found is not None:
                after = StreamPosition(at.epoch, at.position + found[0], at.step + 1)
                yield at, after, found[1]
                at, found_any = after, True
            elif not self.infinite_loop:
                return
            elif found_any:
                at, found_any = StreamPosition(at.epoch + 1, 0, at.step), False
            else:
                raise InputError(
                    f"epoch {at.epoch} has no sample to run, so an endless stream cannot continue. "
                    f"Add samples, or use another overflow than 'drop'."
                )

    def _next(self, at: StreamPosition) -> tuple[int, bool] | None:
        """(units of the next step, whether they are the last of the epoch); None at its end.

        Looks at no more units than needed.
        """
        rest = len(self._units) - at.position
        fixed = self.recipe.steps.samples
        if fixed is not None and self._units.groups is None and self.recipe.overflow != "drop":
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
        while first < len(self._units):
            count = min(window, len(self._units) - first)
            sample_ids, _ = self._sample_ids(replace(at, position=first), count)
            if longest is None or (self.source.lengths_of(sample_ids) <= longest).any():
                return False
            first, window = first + count, 2 * window
        return True

    def _sample_ids(self, at: StreamPosition, units: int) -> tuple[IntArray, IntArray]:
        """(sample ids of the next units, number of samples up to the end of each unit)."""
        count = len(self._units)
        order = EpochOrder(count=count, seed=self.seed, epoch=at.epoch, shuffle=self.shuffle)
        return self._units.members(order.samples(at.position + np.arange(units)))

    def _about(self, sample_ids: IntArray) -> dict[str, Any]:
        return {
            "groups": self._units.groups_of(sample_ids),
            "columns": {name: column[sample_ids] for name, column in self._columns.items()},
            "names": sample_ids,
        }

    def _step(self, at: StreamPosition, after: StreamPosition, last: bool, rank: int) -> Step:
        sample_ids, _ = self._sample_ids(at, after.position - at.position)
        plan, micro_batches = self._planned(sample_ids, at, last, rank)
        over = plan.recipe.longest_segment
        beyond = 0 if over is None else int((plan.lengths > over).sum())
        overflow = {"drop": "dropped", "truncate": "truncated"}.get(self.recipe.overflow)
        totals = {} if at.inside else self._totals(sample_ids, plan)
        return Step(
            number=at.step,
            epoch=at.epoch,
            micro_batches=tuple(micro_batches),
            samples=self._lookup,
            cursor=self.cursor(after),
            totals=totals,
            lost={overflow: beyond} if overflow and beyond else {},
            budget=self.recipe.layout.budget,
            ranks=self.world.size,
            loss_tokens=self._labels(micro_batches) if "loss_tokens" in totals else {},
            plan=None if at.inside else plan,
            sample_ids=None if at.inside else frozen(sample_ids),
        )

    def _labels(self, micro_batches: list[MicroBatch]) -> dict[int, int]:
        """The number of loss tokens of each sample of the micro-batches."""
        assert self._loss_tokens is not None
        ids = sorted({i for micro in micro_batches for i in micro.segments.sample.tolist()})
        return dict(zip(ids, self._loss_tokens[ids].tolist(), strict=True))

    def _planned(
        self, sample_ids: IntArray, at: StreamPosition, last: bool, rank: int
    ) -> tuple[Plan, list[MicroBatch]]:
        """The plan of a step, and the micro-batches that a rank has not done yet."""
        lengths, about = self.source.lengths_of(sample_ids), self._about(sample_ids)
        ranks = self.world.size
        plan = plan_step(lengths, self._recipe_at(at), last=last, **about)
        if not at.inside:
            return plan, [micro.renumbered(sample_ids) for micro in plan[0, rank]]
        rest = StepRemainder.of(plan, sample_ids, about)
        return plan, rest.micro_batches(at.inside, rank, ranks)

    def _totals(self, sample_ids: IntArray, plan: Plan) -> dict[str, float]:
        """Totals over all ranks; loss tokens only if they are known and no sample can be lost."""
        run = plan.step_of >= 0
        costs = plan.costs.reshape(plan.num_ranks, -1)  # (ranks, micro-batches)
        ideal = costs.sum() / plan.num_ranks
        totals: dict[str, float] = {
            "tokens": int(plan.segments.length.sum()),
            "empty": int((np.diff(plan.segment_offsets) == 0).sum()),
            "imbalance_step": float(costs.sum(axis=1).max() / ideal) if ideal else 1.0,
            "imbalance_micro_batch": float(costs.max(axis=0).sum() / ideal) if ideal else 1.0,
        }
        if self._lookup.on_error == "skip":
            return totals  # unreadable samples are not known yet
        totals["samples"] = int(run.sum())
        if self._loss_tokens is not None and totals["tokens"] == plan.lengths[run].sum():
            labels = self._loss_tokens[sample_ids[run]]
            totals["loss_tokens"] = int(labels.sum())
            totals["sequences"] = int((labels > 0).sum())
            if plan.groups is not None:
                totals["groups"] = len(np.unique(plan.groups[run][labels > 0]))
        return totals

    # Position --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last step that was yielded, as plain data."""
        return self.cursor(self._now).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start after the step that this state was taken at, on any number of ranks."""
        cursor = Cursor.from_dict(state)
        cursor.check(self._belongs(inside="inside" in cursor.place))
        at = StreamPosition.from_dict(cursor.place, cursor.step)
        if not 0 <= at.position <= len(self._units):
            raise CursorError(
                f"the cursor is at position {at.position}, but an epoch has {len(self._units)} "
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
        for _, after, _ in islice(self._bounds(self._start), steps):
            self._start_at(after)

    def _start_at(self, at: StreamPosition) -> None:
        self._start, self._now, self._iterated = at, at, False

    def cursor(self, at: StreamPosition) -> Cursor:
        """The cursor of a position."""
        return Cursor(
            belongs=self._belongs(inside=bool(at.inside)),
            step=at.step,
            place=at.to_dict(),
        )

    def _belongs(self, inside: bool) -> dict[str, str]:
        """What a cursor belongs to. Ranks, layout and balance may change, because they do not
        affect which samples a step holds; within a step only the ranks may."""
        belongs = dict(self._owner)
        if inside:
            recipe = self.recipe.to_dict()
            recipe["topology"] = {**recipe["topology"], "dp": None}
            belongs["recipe"] = digest_of(recipe)
        return belongs

    @cached_property
    def _owner(self) -> dict[str, str]:
        belongs = {
            "stream": "planned",
            "data": f"{len(self.source)} samples, {self.source.fingerprint}",
            "order": f"shuffled by seed {self.seed}" if self.shuffle else "as stored",
        }
        if self._units.groups is not None:
            belongs["groups"] = column_digest(self._units.groups)
        return belongs

    # Length ------------------------------------------------------------------------------------

    @property
    def steps_per_epoch(self) -> Estimate:
        """Number of steps in an epoch; exact if steps are counted in samples."""
        steps, n = self.recipe.steps, len(self.source)
        if steps.samples is not None:
            exact = self._units.groups is None and self.recipe.overflow != "drop"
            return Estimate(divided_up(n, steps.samples), exact)
        spread = np.linspace(0, max(n - 1, 0), min(n, _SAMPLED_LENGTHS)).astype(np.int64)
        tokens = float(self.source.lengths_of(np.unique(spread)).mean()) * n if n else 0.0
        if steps.tokens is not None:
            return Estimate(divided_up(int(tokens), steps.tokens), False)
        if steps.micro_batches is None:
            return Estimate(int(n > 0), True)
        per_step = steps.micro_batches * self.world.size
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

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches per rank and step: those of the first step of the epoch."""
        if self.recipe.steps.micro_batches is not None:
            return self.recipe.steps.micro_batches
        found = self._next(StreamPosition(self._start.epoch))
        if found is None:
            return 0
        before = StreamPosition(self._start.epoch)
        after = StreamPosition(self._start.epoch, found[0])
        return len(self._step(before, after, found[1], self.world.rank))

    def __len__(self) -> int:
        """Steps of one pass: those left of `max_num_steps`, or those of an epoch, which may be an
        estimate (see `steps_per_epoch`)."""
        return steps_of_pass(self, self.infinite_loop)
