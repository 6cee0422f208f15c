"""PlannedStream: known lengths -> steps, planned alike on every rank without communication."""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenstep.core.measures import time_of_works, works_of
from evenstep.core.plan import (
    MicroBatch,
    Plan,
)
from evenstep.core.ragged import (
    FloatArray,
    frozen,
)
from evenstep.core.recipe import Recipe, World, check_recipe
from evenstep.core.step import Cursor, Step
from evenstep.core.text import truth_value, whole_number
from evenstep.data.dataset import MapStyle, as_measured
from evenstep.data.files import refuse_empty
from evenstep.data.source import ALL_DIGESTED, MeasuredSource, Progress, column_digest
from evenstep.data.steps import (
    EpochSteps,
    PlannedStep,
    PlanSteps,
    StepBounds,
    StreamPosition,
    lengths_by_id,
)
from evenstep.data.stream import (
    Estimate,
    OnError,
    SampleLookup,
    Stream,
    check_lengths,
    digest_of,
    world_for,
)
from evenstep.errors import CursorError, InputError
from evenstep.planning.inputs import check_exact, check_names, flat_array, numbered

_MOST_CHECKED = 2**25  # samples whose lengths are all checked before the first step


class EpochSize(NamedTuple):
    """Steps of an epoch and their micro-batches per rank. Both are the same on every rank."""

    steps: int
    micro_batches: int


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
        measured = as_measured(source)
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
        self._loss_tokens, group_ids = (
            None if values is None else whole_per_sample(name, values, count)
            for name, values in (("loss_tokens", loss_tokens), ("groups", groups))
        )
        self._steps: EpochSteps | PlanSteps = EpochSteps(
            measured,
            recipe,
            seed=self.seed,
            shuffle=self.shuffle,
            groups=group_ids,
            columns={name: per_sample(name, v, count) for name, v in (columns or {}).items()},
        )
        self._lookup = SampleLookup(measured, on_error, self.seed)
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
        measured = as_measured(source, lengths_by_id(plan))
        world = world_for(plan.recipe, None) if world is None else world
        steps = PlanSteps(measured, plan, world.size)
        stream = cls(
            measured,
            steps.recipe,
            world=world,
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
    def samples(self) -> SampleLookup:
        """The samples by id, as steps read them."""
        return self._lookup

    @property
    def ends_together(self) -> bool:
        """True: all ranks have the same plan and take part in every step."""
        return True

    # Steps -------------------------------------------------------------------------------------

    def walk(self, worker: int = 0, workers: int = 1, turn: int | None = None) -> Iterator[Step]:
        """The steps of one of several workers, which take turns. Its first step is number `turn`
        from the start (default: `worker`). Steps of other workers are not planned."""
        self._check_source()
        turn = worker if turn is None else turn
        for bounds in self._bounds(self._start):
            if (bounds.before.step - self._start.step) % workers == turn:
                yield from self._steps_of_ranks(bounds, (self.world.rank,))

    def walk_all(self) -> Iterator[list[Step]]:
        """Every step for all ranks, for callers that deal micro-batches to ranks themselves. A
        step is planned once."""
        self._check_source()
        for bounds in self._bounds(self._start):
            yield list(self._steps_of_ranks(bounds, range(self.world.size)))

    def _check_source(self) -> None:
        """Check all lengths before the first step, unless that would take a second or more."""
        refuse_empty(self.source)
        if not self._checked and len(self.source) <= _MOST_CHECKED:
            check_lengths(self.source, self.recipe)
        self._iterated = self._checked = True

    def _bounds(self, at: StreamPosition) -> Iterator[StepBounds]:
        """Every step from a position on, up to `max_num_steps`; of one epoch unless endless."""
        while True:
            any_step = at.position > 0  # in the current epoch
            for bounds in self._bounds_in_epoch(at, self.max_num_steps):
                yield bounds
                at, any_step = bounds.after, True
            if not self.infinite_loop or at.step == self.max_num_steps:
                return
            if not any_step:
                raise InputError(
                    f"epoch {at.epoch} has no sample to run, so an endless stream cannot continue. "
                    f"Add samples, or use another overflow than 'drop'."
                )
            at = StreamPosition(at.epoch + 1, 0, at.step)

    def _bounds_in_epoch(self, at: StreamPosition, most: int | None = None) -> Iterator[StepBounds]:
        """Every step of the rest of an epoch, up to `most` steps in all."""
        while most is None or at.step < most:
            bounds = self._steps.next_step(at)
            if bounds is None:
                return
            yield bounds
            at = bounds.after

    def _steps_of_ranks(self, bounds: StepBounds, ranks: Iterable[int]) -> Iterator[Step]:
        """A step for each of these ranks. Totals are over all ranks."""
        at, after, planned = bounds.before, self.cursor(bounds.after), self._steps.plan_step(bounds)
        plan, recipe, whole = planned.plan, planned.plan.recipe, planned.rest is None
        over = recipe.longest_segment
        over_long = 0 if over is None else int((plan.lengths > over).sum())
        reason = {"drop": "dropped", "truncate": "truncated"}.get(recipe.overflow)
        works: list[FloatArray] = []  # of each kind of work: [rank, micro-batch]
        costs: FloatArray | None = None
        if whole:
            works = [each.reshape(plan.num_ranks, -1) for each in works_of(plan)]
            costs = np.sum(works, axis=0)
        totals = self._totals(planned, works) if whole else {}
        text = f"{self.fingerprint} {at.step} {at.epoch} {at.position} {at.inside} {after.step}"
        fingerprint = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        sample_ids = frozen(planned.sample_ids) if whole else None
        samples = self._lookup.in_epoch(at.epoch)
        for rank in ranks:
            micro_batches = planned.micro_batches(rank)
            yield Step(
                number=at.step,
                epoch=at.epoch,
                micro_batches=micro_batches,
                samples=samples,
                cursor=after,
                totals=totals,
                lost={reason: over_long} if reason and over_long else {},
                budget=recipe.layout.budget,
                ranks=plan.num_ranks if planned.rest is None else len(planned.rest),
                loss_tokens=self._loss_tokens_of(micro_batches) if "loss_tokens" in totals else {},
                plan=plan if whole else None,
                sample_ids=sample_ids,
                costs=() if costs is None else tuple(costs[rank].tolist()),
                fingerprint=fingerprint,
            )

    def _loss_tokens_of(self, micro_batches: Iterable[MicroBatch]) -> dict[int, int]:
        """The number of loss tokens of each sample of the micro-batches."""
        assert self._loss_tokens is not None
        ids = sorted({i for micro in micro_batches for i in micro.segments.sample.tolist()})
        return dict(zip(ids, self._loss_tokens[ids].tolist(), strict=True))

    def _totals(self, planned: PlannedStep, works: list[FloatArray]) -> dict[str, float]:
        """Totals over all ranks; loss tokens only if they are known and no sample can be lost."""
        plan = planned.plan
        run = plan.step_of >= 0
        ideal = sum(float(work.sum()) for work in works) / plan.num_ranks
        totals: dict[str, float] = {
            "tokens": int(plan.segments.length.sum()),
            "empty": int((np.diff(plan.segment_offsets) == 0).sum()),
            "imbalance_step": time_of_works(works, "step") / ideal if ideal else 1.0,
            "imbalance_micro_batch": time_of_works(works, "micro_batch") / ideal if ideal else 1.0,
        }
        if self.on_error == "skip":
            return totals  # unreadable samples are not known yet
        totals["samples"] = int(run.sum())
        if self._loss_tokens is not None and totals["tokens"] == plan.lengths[run].sum():
            labels = self._loss_tokens[planned.sample_ids[run]]
            totals["loss_tokens"] = int(labels.sum())
            totals["sequences"] = int((labels > 0).sum())
            if plan.groups is not None:
                totals["groups"] = len(np.unique(plan.groups[run][labels > 0]))
        return totals

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
        identity = self._identity(inside="inside" in cursor.position)
        if "lengths" not in cursor.identity:  # written by version 0.1.0
            del identity["lengths"]
        cursor.check(identity)
        at = StreamPosition.from_dict(cursor.position, cursor.step)
        if not 0 <= at.position <= len(self._steps):
            raise CursorError(
                f"the cursor is at position {at.position}, but an epoch has {len(self._steps)} "
                f"units, so it was taken from other data or groups. Restore them, or use a cursor "
                f"of this stream."
            )
        self._start, self._now, self._iterated = at, None, False

    def skip_batches(self, steps: int) -> None:
        """Start `steps` steps later. Nothing is read or planned."""
        steps = whole_number("steps to skip", steps, least=0)
        for bounds in islice(self._bounds(self._start), steps):
            self._start, self._now, self._iterated = bounds.after, None, False

    def _start_epochs(self) -> Collection[int]:
        return (self._start.epoch,)

    def _start_epoch(self, epoch: int, done: int) -> None:
        self._start = StreamPosition(epoch, 0, done)

    def cursor(self, at: StreamPosition) -> Cursor:
        """The cursor of a position."""
        identity = self._identity(inside=bool(at.inside))
        return Cursor(identity=identity, step=at.step, position=at.to_dict())

    # Identity ----------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all that determines the steps: data, order, recipe, ranks. Not the rank, so
        it is the same on all ranks unless they would train on different plans."""
        columns, loss_tokens = self._steps.digests_of_columns(), self._loss_tokens
        per_sample = {}
        if loss_tokens is not None:
            per_sample["loss_tokens"] = column_digest(loss_tokens, ALL_DIGESTED)
        return digest_of(
            {
                **self._identity(inside=False),
                **({} if columns is None else {"columns": columns}),
                "recipe": self.recipe.to_dict(),
                "per sample": per_sample,
                "end": [self.max_num_steps, self.infinite_loop],
            }
        )

    def _identity(self, inside: bool) -> dict[str, str]:
        """What a cursor belongs to."""
        return {**self._data_identity, **self._steps.identity(inside=inside)}

    @cached_property
    def _data_identity(self) -> dict[str, str]:
        return {"stream": "planned", **self._identity_of_data("samples", measured=True)}

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
            bounds = self._bounds_in_epoch(StreamPosition(key[0]))
            self._sizes[key] = self._count_steps(bounds, drop_last, progress)
        return self._sizes[key]

    def size_left(self, *, drop_last: bool = False, progress: Progress | None = None) -> EpochSize:
        """The same for the rest of the epoch, from the start that was set."""
        if self._start.position == 0 and not self._start.inside:
            return self.epoch_size(self._start.epoch, drop_last=drop_last, progress=progress)
        return self._count_steps(self._bounds_in_epoch(self._start), drop_last, progress)

    def micro_batches_per_epoch(
        self, epochs: int = 1, *, drop_last: bool = False, progress: Progress | None = None
    ) -> list[int]:
        """Micro-batches per rank of the epochs 0, 1, ... as `epoch_size` counts them."""
        units = len(self._steps)
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
        self, steps: Iterable[StepBounds], drop_last: bool = False, progress: Progress | None = None
    ) -> EpochSize:
        """Count steps. Plans a step only if its number of micro-batches is not known otherwise."""
        num_steps = micro_batches = 0
        for bounds in steps:
            count = None if drop_last else self._steps.known_count(bounds)
            if count is None:
                planned = self._steps.plan_step(bounds)
                count = len(planned.rest[0]) if planned.rest else int(planned.plan.cell_offsets[1])
                empty = (np.diff(planned.plan.segment_offsets) == 0).any()
                if drop_last and empty and planned.rest is None:
                    count = 0
            num_steps, micro_batches = num_steps + (count > 0), micro_batches + count
            if progress is not None:
                progress(bounds.after.position, len(self._steps))
        return EpochSize(num_steps, micro_batches)

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
        first = islice(self._bounds_in_epoch(StreamPosition(self._start.epoch)), 1)
        return self._count_steps(first).micro_batches


# Arguments with one entry per sample -------------------------------------------------------------


def per_sample(name: str, values: ArrayLike, samples: int) -> NDArray[Any]:
    """`values` as an array with one entry per sample. Arrays are not copied, nor read if mapped.

    >>> per_sample("images", [0, 2], 2)
    array([0, 2])
    """
    array = flat_array(name, values)
    if array.ndim != 1:
        raise InputError(
            f"{name} must have one dimension, got shape {array.shape}. Pass one entry per sample, "
            f"in a flat list or array."
        )
    if len(array) != samples:
        raise InputError(
            f"{name} must have one entry per sample, got {len(array)} entries for {samples} "
            f"samples."
        )
    return array


def whole_per_sample(name: str, values: ArrayLike, samples: int) -> NDArray[np.integer]:
    """`values` as an array of one integer per sample. Floats without fraction are converted, and
    texts as groups are numbered.

    >>> whole_per_sample("groups", [7.0, 5.0], 2), whole_per_sample("groups", ["b", "a"], 2)
    (array([7, 5]), array([1, 0]))
    """
    array = per_sample(name, numbered(values) if name == "groups" else values, samples)
    if array.dtype.kind in "iu":
        return array
    whole = np.zeros(len(array), bool)
    if array.dtype.kind == "f":
        whole = (np.abs(array) < 2.0**63) & (array == np.floor(array))  # neither holds for nan
        check_exact(name, array, whole)
    elif array.dtype.kind == "O":  # a list of mixed types
        whole = np.array([type(v) is int and -(2**63) <= v < 2**63 for v in array], bool)
    if whole.all():
        return array.astype(np.int64)
    at = int(np.argmin(whole))
    texts = " or texts" if name == "groups" else ""
    raise InputError(
        f"{name} must be 64-bit integers{texts}, got "
        f"{reprlib.repr(array[at : at + 1].tolist()[0])} for sample {at}."
    )
