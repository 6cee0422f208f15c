"""PlannedStream: known lengths -> steps, the same on every rank without a word between them."""

from __future__ import annotations

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
from evenstep.core.rounding import divided_up
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

_LOOKS = 4096  # lengths that an estimate is made from


class PlannedStream:
    """Endless or finite steps over samples whose lengths are known.

    Each epoch is one seeded order of all samples; a step takes the next ones of it, as
    `recipe.steps` says, so which samples a step holds depends on neither ranks nor layout.
    Every rank plans the step by itself and takes its own part. No more than the coming step's
    lengths is held, so a billion samples need no more memory than a thousand. Groups are held by
    member: two integers for each sample.

    The place in the stream is an epoch and a position, so it resumes at once, anywhere, on any
    number of ranks and workers. Iterating always begins at the place that `set_epoch`,
    `skip_batches` or `load_state_dict` chose; `state_dict` is the place behind the step that was
    given out last.

    groups       per sample, ids of what must stay in one step (or micro-batch, as the recipe says)
    columns      per sample, what `recipe.limits.columns` limits
    loss_tokens  per sample, how many labels are trained: the loss's denominator is then known
                 before anything is read
    on_error     `skip` leaves samples that cannot be read out of their micro-batch, and counts

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
        self._walked = False  # whether the place was iterated since it was chosen
        self._window = 64  # units that are looked at first; a step depends on those it takes alone

    @property
    def done(self) -> int:
        """Steps before the chosen place, over all epochs."""
        return self._start.step

    @property
    def ends_together(self) -> bool:
        """Every rank knows every other's plan, and all have a part in each step."""
        return True

    # Iterating ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        self._now = self._start
        for step in self.walk():
            self._now = StreamPosition.from_dict(step.cursor.place, step.cursor.step)
            yield step

    def walk(self, worker: int = 0, workers: int = 1, turn: int | None = None) -> Iterator[Step]:
        """The steps of one of several workers, who take them in turn. Its first is number `turn`
        from the chosen place on, `worker` if not given. Those of others are not even planned."""
        self._walked = True
        turn = worker if turn is None else turn
        for before, after, last in self._bounds(self._start):
            if (before.step - self._start.step) % workers == turn:
                yield self._step(before, after, last, self.world.rank)

    def walk_all(self) -> Iterator[list[Step]]:
        """Each step as all ranks see it, for whoever deals micro-batches to ranks by itself."""
        self._walked = True
        for before, after, last in self._bounds(self._start):
            ranks = range(self.world.size)
            yield [self._step(before, after, last, rank) for rank in ranks]

    def _bounds(
        self, place: StreamPosition
    ) -> Iterator[tuple[StreamPosition, StreamPosition, bool]]:
        """(the place before, the place behind, whether it is its epoch's last) of every step."""
        fruitful = place.position > 0
        while self.max_num_steps is None or place.step < self.max_num_steps:
            found = self._next(place)
            if found is not None:
                after = StreamPosition(place.epoch, place.position + found[0], place.step + 1)
                yield place, after, found[1]
                place, fruitful = after, True
            elif not self.infinite_loop:
                return
            elif fruitful:
                place, fruitful = StreamPosition(place.epoch + 1, 0, place.step), False
            else:
                raise InputError(
                    f"epoch {place.epoch} holds no sample that could run, and no other epoch will, "
                    f"so the stream would never go on. Give it samples, or another overflow than "
                    f"'drop'."
                )

    def _next(self, place: StreamPosition) -> tuple[int, bool] | None:
        """(units of the coming step, whether they are the epoch's last), or None at its end.

        Looks at no more units than it takes to tell.
        """
        rest = len(self._units) - place.position
        fixed = self.recipe.steps.samples
        if fixed is not None and self._units.groups is None and self.recipe.overflow != "drop":
            return (min(fixed, rest), fixed >= rest) if rest else None
        window = min(rest, fixed or self._window)
        while True:
            samples, ends = self._samples(place, window)
            lengths, complete = self.source.lengths_of(samples), window == rest
            size = step_size(lengths, self.recipe, complete=complete, **self._about(samples))
            if size == 0:
                return None
            if size is not None:
                units = int(np.searchsorted(ends, size)) + 1
                self._window = units + units // 4 + 64
                if self.recipe.overflow == "drop" and self._all_dropped(place, units):
                    units = rest  # nothing follows that could tell of them
                return units, units == rest
            window = min(rest, 2 * window)

    def _all_dropped(self, place: StreamPosition, units: int) -> bool:
        """Whether all that lies behind so many units, to the end of the epoch, is dropped."""
        at, window, longest = place.position + units, 64, self.recipe.longest_segment
        while at < len(self._units):
            count = min(window, len(self._units) - at)
            samples, _ = self._samples(replace(place, position=at), count)
            if longest is None or (self.source.lengths_of(samples) <= longest).any():
                return False
            at, window = at + count, 2 * window
        return True

    def _samples(self, place: StreamPosition, units: int) -> tuple[IntArray, IntArray]:
        """(the samples of the next units, how many there are up to the end of each unit)."""
        count = len(self._units)
        order = EpochOrder(count=count, seed=self.seed, epoch=place.epoch, shuffle=self.shuffle)
        return self._units.members(order.samples(place.position + np.arange(units)))

    def _about(self, samples: IntArray) -> dict[str, Any]:
        return {
            "groups": self._units.groups_of(samples),
            "columns": {name: column[samples] for name, column in self._columns.items()},
            "names": samples,
        }

    def _step(self, place: StreamPosition, after: StreamPosition, last: bool, rank: int) -> Step:
        samples, _ = self._samples(place, after.position - place.position)
        plan, micro_batches = self._planned(samples, place, last, rank)
        over = plan.recipe.longest_segment
        beyond = 0 if over is None else int((plan.lengths > over).sum())
        overflow = {"drop": "dropped", "truncate": "truncated"}.get(self.recipe.overflow)
        totals = {} if place.inside else self._totals(samples, plan)
        return Step(
            number=place.step,
            epoch=place.epoch,
            micro_batches=tuple(micro_batches),
            samples=self._lookup,
            cursor=self.cursor(after),
            totals=totals,
            lost={overflow: beyond} if overflow and beyond else {},
            budget=self.recipe.layout.budget,
            ranks=self.world.size,
            loss_tokens=self._labels(micro_batches) if "loss_tokens" in totals else {},
            plan=None if place.inside else plan,
            sample_ids=None if place.inside else frozen(samples),
        )

    def _labels(self, micro_batches: list[MicroBatch]) -> dict[int, int]:
        """How many labels each sample of the micro-batches trains."""
        assert self._loss_tokens is not None
        numbers = sorted({n for micro in micro_batches for n in micro.segments.sample.tolist()})
        return dict(zip(numbers, self._loss_tokens[numbers].tolist(), strict=True))

    def _planned(
        self, samples: IntArray, place: StreamPosition, last: bool, rank: int
    ) -> tuple[Plan, list[MicroBatch]]:
        """The plan of a step, and what a rank has yet to do of it."""
        lengths, about = self.source.lengths_of(samples), self._about(samples)
        ranks = self.world.size
        first = place.inside[0][0] if place.inside else ranks
        topology = replace(self.recipe.topology, dp=first)
        recipe = replace(self.recipe, topology=topology)
        plan = plan_step(lengths, recipe, last=last, **about)
        if not place.inside:
            return plan, [micro.renumbered(samples) for micro in plan[0, rank]]
        rest = StepRemainder.of(plan, samples, about)
        return plan, rest.micro_batches(place.inside, rank, ranks)

    def _totals(self, samples: IntArray, plan: Plan) -> dict[str, float]:
        """What the whole step holds; labels where they are known, and none can go missing."""
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
            return totals  # nobody knows yet which samples will run
        totals["samples"] = int(run.sum())
        if self._loss_tokens is not None and totals["tokens"] == plan.lengths[run].sum():
            labels = self._loss_tokens[samples[run]]
            totals["loss_tokens"] = int(labels.sum())
            totals["sequences"] = int((labels > 0).sum())
            if plan.groups is not None:
                totals["groups"] = len(np.unique(plan.groups[run][labels > 0]))
        return totals

    # Position --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The cursor behind the last step that iterating gave out, as plain data."""
        return self.cursor(self._now).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin behind the step that this state was taken after, on any number of ranks."""
        cursor = Cursor.from_dict(state)
        cursor.check(self._belongs(inside="inside" in cursor.place))
        place = StreamPosition.from_dict(cursor.place, cursor.step)
        if not 0 <= place.position <= len(self._units):
            raise CursorError(
                f"the cursor stands at {place.position} of {len(self._units)}, so it was taken "
                f"from other data or other groups, and resuming would lose samples. Restore them, "
                f"or use the cursor of this stream."
            )
        self._choose(place)

    def set_epoch(self, epoch: int, done: int | None = None) -> None:
        """Begin at the first step of `epoch`, after `done` steps: those given out so far.

        A place that was loaded or skipped to within this very epoch is kept, unless it was
        iterated since or `done` is given. So a run that resumes goes through its epochs like any:

            stream.load_state_dict(state)  # behind step 40 of epoch 3
            for epoch in range(3, 10):
                stream.set_epoch(epoch)  # 3: goes on behind step 40; 4: begins anew
                for step in stream: ...
        """
        epoch = whole_number("epoch", epoch, least=0)
        if done is None and not self._walked and epoch == self._start.epoch:
            return
        self._choose(StreamPosition(epoch, 0, self._now.step if done is None else done))

    def start(self, workers: int = 1) -> Cursor:
        """The cursor before the first step; the number of workers makes no difference to it."""
        return self.cursor(self._start)

    @staticmethod
    def join(cursors: Sequence[Cursor]) -> Cursor:
        """The last of several cursors: any of them knows the whole place."""
        return max(cursors, key=lambda cursor: cursor.step)

    def skip_batches(self, steps: int) -> None:
        """Begin so many steps later. Nothing is read or planned."""
        steps = whole_number("steps to skip", steps, least=0)
        for _, after, _ in islice(self._bounds(self._start), steps):
            self._choose(after)

    def _choose(self, place: StreamPosition) -> None:
        self._start, self._now, self._walked = place, place, False

    def cursor(self, place: StreamPosition) -> Cursor:
        """The cursor of a place."""
        return Cursor(
            belongs=self._belongs(inside=bool(place.inside)),
            step=place.step,
            place=place.to_dict(),
        )

    def _belongs(self, inside: bool) -> dict[str, str]:
        """What a cursor is a place in. Ranks, layout and balance may change: they have no say in
        which samples a step holds. Within a step they do."""
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
        """How many steps an epoch has. Exact where steps are counted in samples."""
        steps, n = self.recipe.steps, len(self.source)
        if steps.samples is not None:
            exact = self._units.groups is None and self.recipe.overflow != "drop"
            return Estimate(divided_up(n, steps.samples), exact)
        looks = np.unique(np.linspace(0, max(n - 1, 0), min(n, _LOOKS)).astype(np.int64))
        tokens = float(self.source.lengths_of(looks).mean()) * n if n else 0.0
        if steps.tokens is not None:
            return Estimate(divided_up(int(tokens), steps.tokens), False)
        if steps.micro_batches is None:
            return Estimate(int(n > 0), True)
        per_step = steps.micro_batches * self.world.size
        layout = self.recipe.layout
        if layout.budget is None:
            assert layout.samples is not None
            return Estimate(divided_up(n, layout.samples * per_step), False)
        return Estimate(divided_up(int(tokens), layout.budget * per_step), False)

    @property
    def micro_batches_per_step(self) -> int:
        """About how many micro-batches a rank has in a step, as the first one has."""
        if self.recipe.steps.micro_batches is not None:
            return self.recipe.steps.micro_batches
        found = self._next(StreamPosition(self._start.epoch))
        if found is None:
            return 0
        before, after = (
            StreamPosition(self._start.epoch),
            StreamPosition(self._start.epoch, found[0]),
        )
        return len(self._step(before, after, found[1], self.world.rank))

    def __len__(self) -> int:
        """The steps of one pass: those left to `max_num_steps`, or of an epoch, which may be an
        estimate (see `steps_per_epoch`)."""
        return steps_of_pass(self, self.infinite_loop)
