"""PlannedStream: known lengths -> steps, planned alike on every rank without communication."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

from numpy.typing import ArrayLike

from evenstep.core.plan import Plan
from evenstep.core.recipe import Recipe, World, check_recipe
from evenstep.core.step import Cursor, Step
from evenstep.core.text import seed_number, truth_value, whole_number
from evenstep.data.sources.as_source import as_measured
from evenstep.data.sources.files import refuse_empty
from evenstep.data.sources.mapped import MapStyle
from evenstep.data.sources.source import MeasuredSource, is_seeded
from evenstep.data.streams.digests import lengths_digest, values_digest
from evenstep.data.streams.epoch_size import EpochSize, measure
from evenstep.data.streams.epoch_steps import EpochSteps
from evenstep.data.streams.epoch_units import EpochUnits
from evenstep.data.streams.estimate import Estimate
from evenstep.data.streams.known_lengths import check_lengths
from evenstep.data.streams.lookup import OnError, SampleLookup
from evenstep.data.streams.per_sample import per_sample, whole_per_sample
from evenstep.data.streams.plan_steps import PlanSteps, lengths_by_id
from evenstep.data.streams.position import StreamPosition
from evenstep.data.streams.step_bounds import bounds_of_all, bounds_of_epoch
from evenstep.data.streams.step_maker import StepMaker
from evenstep.data.streams.step_work import Progress, StepBounds, StepSource
from evenstep.data.streams.stream import digest_of, steps_of_pass, world_for
from evenstep.errors import CursorError
from evenstep.planning.inputs import check_names

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
    >>> from evenstep.data.sources.lengths import Lengths
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
        >>> from evenstep.data.sources.lengths import Lengths
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
