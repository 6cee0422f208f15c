"""Stream: what planned and pooled streams share, and what can be done with the steps of any."""

from __future__ import annotations

import copy
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from evenstep.core.plan import MicroBatch, Plan
from evenstep.core.ragged import offsets_of, rounded_up, sample_name
from evenstep.core.recipe import Recipe, World
from evenstep.core.step import Cursor, Step
from evenstep.core.text import one_of, seed_number, truth_value, whole_number
from evenstep.data.dataset import wrapped_fingerprint
from evenstep.data.pool import micro_batch
from evenstep.data.source import (
    ALL_DIGESTED,
    Draw,
    MeasuredSource,
    Sample,
    SampleSource,
    Source,
    cause_of,
    column_digest,
    digest_of,
    has_random_access,
    is_seeded,
    read_samples,
    spread,
)
from evenstep.errors import ConfigError, InputError, PlanError, SampleError
from evenstep.planning.units import refusal, refused

OnError: TypeAlias = Literal["raise", "skip"]

_MANY = 1000  # samples that cannot all be unreadable by chance
_CHUNK = 1 << 20  # lengths that are checked at once
_SAMPLED_LENGTHS = 4096  # for an estimate


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number of steps. Not `exact` if it depends on lengths that have not been read.

    >>> str(Estimate(120, exact=False))
    'about 120'
    """

    steps: int
    exact: bool

    def __str__(self) -> str:
        return str(self.steps) if self.exact else f"about {self.steps}"


class Stream(ABC):
    """Steps of one rank, from a start that the caller sets. Iterating does not move the start.

    A stream is an order of samples, a cursor in it, and a way to form steps: a plan of all ranks
    (`PlannedStream`) or a pool on each (`PooledStream`).
    """

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        *,
        world: World | None,
        seed: int,
        shuffle: bool,
        max_num_steps: int | None,
        infinite_loop: bool,
        on_error: OnError,
        fingerprint: str | None,
    ) -> None:
        one_of("on_error", on_error, OnError)
        if max_num_steps is not None:
            max_num_steps = whole_number("max_num_steps", max_num_steps, least=0)
        self.source, self.recipe, self.world = source, recipe, world_for(recipe, world)
        self.seed, self.shuffle = seed_number(seed), shuffle
        self.max_num_steps, self.on_error = max_num_steps, on_error
        self.infinite_loop = truth_value("infinite_loop", infinite_loop)
        self._data_name = fingerprint

    # Steps -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        self._now = None
        for step in self.walk():
            self._now = step.cursor
            yield step

    @abstractmethod
    def walk(self, worker: int = 0, workers: int = 1, turn: int | None = None) -> Iterator[Step]:
        """The steps of one of several workers of this rank, which take turns."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> Estimate:
        """Number of steps in an epoch; may be an estimate."""

    @property
    def ends_together(self) -> bool:
        """Whether all ranks of a finite stream end after the same step. All ranks of a planned
        stream have the same plan and take part in every step."""
        return True

    def __len__(self) -> int:
        """Steps of one pass: those of an epoch, which may be an estimate (see `steps_per_epoch`),
        but no more than are left of `max_num_steps`; all that are left if the stream is endless or
        the source has no length."""
        left = None if self.max_num_steps is None else max(self.max_num_steps - self.done, 0)
        sized = left is None or has_random_access(self.source)
        if sized and not self.infinite_loop:
            steps = self.steps_per_epoch.steps
            return steps if left is None else min(steps, left)
        if left is None:
            raise TypeError(
                "an endless stream has no length. Set max_num_steps, or infinite_loop=False."
            )
        return left

    # Position ----------------------------------------------------------------------------------

    _now: Cursor | None = None  # after the last step that was yielded; None: at the start
    _iterated = False  # since the start was set
    moves = 0
    """How often the start was set."""
    shared_moves: Any = None
    """An array in shared memory that holds `moves` for workers, which have copies of this stream;
    None if nothing has asked for it."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy has moves of its own."""
        return {**vars(self), "shared_moves": None}

    def _restart(self) -> None:
        """Called whenever the start is set."""
        self._now, self._iterated = None, False
        self.moves += 1
        if self.shared_moves is not None:
            self.shared_moves[0] = self.moves

    def passed(self, cursor: Cursor) -> None:
        """Record the position after a step that a loader or a sampler of this stream yielded."""
        self._now, self._iterated = cursor, True

    def now(self, workers: int = 1) -> Cursor:
        """The cursor after the last step that was yielded, or before the first one, for this
        number of workers."""
        return self.start(workers) if self._now is None else self._now

    @property
    @abstractmethod
    def done(self) -> int:
        """Steps before the start, over all epochs."""

    @abstractmethod
    def start(self, workers: int = 1) -> Cursor:
        """The cursor of this rank before its first step."""

    @staticmethod
    @abstractmethod
    def join(cursors: Sequence[Cursor]) -> Cursor:
        """Merge cursors of several workers, old and new, into one."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last step that was yielded, as plain data."""
        return self.now().to_dict()

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Start after the step that the state was taken at. `allow` names what has changed."""

    @abstractmethod
    def skip_batches(self, steps: int) -> None:
        """Start `steps` steps later."""

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
        if done is None and not self._iterated and epoch in self._start_epochs():
            return
        so_far = self.done if self._now is None else self._now.step
        self._start_epoch(epoch, so_far if done is None else done)
        self._restart()

    @abstractmethod
    def _start_epochs(self) -> Collection[int]:
        """The epochs of the start."""

    @abstractmethod
    def _start_epoch(self, epoch: int, done: int) -> None:
        """Start at the beginning of an epoch, after `done` steps."""

    # Identity ----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A digest of what must be the same on all ranks: data, order, recipe, ranks."""

    def _identity_of_data(self, items: str, measured: bool) -> dict[str, str]:
        """What a cursor says about the samples; `items` is what the source calls them."""
        source, name = self.source, self._data_name
        count = f"{len(source)} {items}, " if has_random_access(source) else ""
        identity = {"data": f"{count}{source.fingerprint if name is None else name}"}
        if measured:
            # Of all lengths of up to 262,144 samples; of 4096, evenly spread, of more. A sample
            # that was edited usually has another length.
            known = cast("MeasuredSource", source)
            identity["lengths"] = column_digest(known.lengths_of, len(known), ALL_DIGESTED)
        inside = wrapped_fingerprint(source) if name is None else None
        if inside is not None:  # a wrapper's own covers some samples, that of files the rest
            identity["wrapped data"] = inside
        if is_seeded(source):
            identity["seed of samples"] = str(self.seed)
        return identity


_LATER = ("lengths", "wrapped data", "all groups")  # than version 0.1.0


def known_to(cursor: Cursor, identity: Mapping[str, str]) -> dict[str, str]:
    """An identity without what releases before the one that wrote the cursor did not compare."""
    return {
        name: value
        for name, value in identity.items()
        if name not in _LATER or name in cursor.identity
    }


def world_for(recipe: Recipe, world: World | None) -> World:
    """The world of a stream (default: a single rank). Its size must be `recipe.topology.dp`."""
    world, topology = World() if world is None else world, recipe.topology
    if world.size != topology.dp:
        remedy = f"Set topology.dp to {world.size}."
        if world.size == 1:
            alone = topology.cp * topology.tp * topology.pp == 1
            detected = f"World.detect({'' if alone else 'recipe.topology'})"
            remedy = f"Under torchrun pass world={detected}, or set topology.dp to 1."
        raise ConfigError(
            f"the recipe plans for {topology.dp} data-parallel ranks but the world has "
            f"{world.size}. {remedy}"
        )
    return world


def settings_digest(data: Mapping[str, Any]) -> str:
    """A digest of plain data, for `Cursor.identity`."""
    return digest_of(json.dumps(data, sort_keys=True), size=8).hex()


# Lengths that a source knows ---------------------------------------------------------------------


def knows_lengths(source: Source) -> TypeGuard[MeasuredSource]:
    """Whether the source knows the lengths of all its items, each of which is one sample."""
    if not (has_random_access(source) and hasattr(source, "lengths_of")):
        return False
    try:
        source.lengths_of(np.arange(min(1, len(source))))
    except InputError:  # an item of several samples, or one without a length
        return False
    return True


def check_lengths(source: MeasuredSource, recipe: Recipe) -> None:
    """Raise if a sample is empty or too long for the recipe."""
    limit, first, count = recipe.longest_segment, None, 0
    for begin in range(0, len(source), _CHUNK):
        items = np.arange(begin, min(begin + _CHUNK, len(source)))
        lengths = source.lengths_of(items)
        if len(lengths) and lengths.min() < 1:
            at = int(np.argmax(lengths < 1))
            raise SampleError(
                f"sample {begin + at} has length {lengths[at]}; expected at least 1. Remove it, or "
                f"skip such samples with on_error='skip' of a PooledStream."
            )
        long = refused(lengths, limit, recipe.overflow)
        count += len(long)
        if len(long) and first is None:
            first = begin + int(long[0]), int(lengths[long[0]])
    if first is not None:
        raise SampleError(refusal(*first, recipe, more=count - 1))


def estimated_tokens(source: MeasuredSource) -> float:
    """The number of tokens of all samples, from the lengths of up to 4096 of them."""
    if not len(source):
        return 0.0
    items = np.array(spread(len(source), _SAMPLED_LENGTHS))
    return float(source.lengths_of(items).mean()) * len(source)


# Samples of a planned stream ---------------------------------------------------------------------


class SampleLookup:
    """Reads the samples of a planned stream. With `on_error="skip"` an unreadable one is None. That
    all samples are unreadable, or the first 1000, is an error.

    >>> from evenstep.data import InMemory
    >>> SampleLookup(InMemory(["zero", "one"]), "raise")[1]
    'one'
    """

    __iter__ = None  # indices are not tried one after another

    def __init__(self, source: SampleSource, on_error: OnError, seed: int = 0) -> None:
        self.source, self.on_error = source, on_error
        self.seed, self.epoch, self._seeded = seed, 0, is_seeded(source)
        self._tally = _Tally()

    def in_epoch(self, epoch: int) -> SampleLookup:
        """The samples as they are in this epoch."""
        if epoch == self.epoch or not self._seeded:
            return self
        other = copy.copy(self)
        other.epoch = epoch
        return other

    def __getitem__(self, sample_id: int) -> Sample | None:
        try:
            draw = Draw(sample_id, self.epoch, self.seed) if self._seeded else None
            samples = read_samples(self.source, sample_id, None, draw)
            if len(samples) != 1:
                raise SampleError(
                    f"item {sample_name(sample_id)} has {len(samples)} samples; a planned stream "
                    f"expects one per item. Use a PooledStream for items of several samples."
                )
        except SampleError as error:
            if self.on_error == "raise":
                raise
            self._skip(sample_id, error)
            return None
        self._tally.any_read = True
        return samples[0][1]

    def _skip(self, sample_id: int, error: SampleError) -> None:
        tally = self._tally
        if not tally.first:
            tally.first = cause_of(error)
            warnings.warn(f"skipping unreadable samples. The first: {tally.first}", stacklevel=3)
        if tally.any_read:
            return
        tally.skipped.add(sample_id)
        if len(tally.skipped) >= min(len(self.source), _MANY):
            raise InputError(
                f"all of the first {len(tally.skipped)} samples were skipped. The first error: "
                f"{tally.first}"
            ) from error


@dataclass(slots=True)
class _Tally:
    """What this process has read and skipped so far, over all epochs."""

    any_read: bool = False
    skipped: set[int] = field(default_factory=set)
    """Ids of the samples skipped before any was read. A sample is read for each part of it."""
    first: str = ""


# The end of a stream -----------------------------------------------------------------------------


def until_all_end(
    steps: Iterator[Step], anyone: Callable[[bool], bool], recipe: Recipe
) -> Iterator[Step]:
    """The steps of this rank, followed by empty steps until every rank has ended.

    `anyone(mine)` returns whether any rank has a step: a reduction over all ranks, called once
    per step. So no rank waits for one that has ended, and no sample is dropped.

    >>> from evenstep import Packed
    >>> others = iter([True, False])  # they have one more step, this rank has none
    >>> recipe = Recipe(layout=Packed(max_tokens=8))
    >>> steps = until_all_end(iter([]), lambda mine: mine or next(others), recipe)
    >>> [step.micro_batches[0].is_empty for step in steps]
    [True]
    """
    before: Step | None = None
    while True:
        step = next(steps, None)
        if not anyone(step is not None):
            return
        if step is None:
            step = empty_step(before, recipe)
        before = step
        yield step


def empty_step(before: Step | None, recipe: Recipe) -> Step:
    """A step without work for this rank: as many empty micro-batches as the step before had."""
    count = (recipe.steps.micro_batches or 1) if before is None else len(before)
    cursor = Cursor(identity={}, step=-1, position={}) if before is None else before.cursor
    return Step(
        number=0 if before is None else before.number + 1,
        epoch=0 if before is None else before.epoch,
        micro_batches=(micro_batch([], recipe),) * count,
        samples={},
        cursor=replace(cursor, step=cursor.step + 1),
        budget=recipe.layout.budget,
        ranks=recipe.topology.dp,
        context_ranks=recipe.topology.cp,
        fingerprint="" if before is None else before.fingerprint,
    )


# Micro-batches of short or long segments alone ---------------------------------------------------


def separate_lengths(step: Step, limit: int) -> Step:
    """The same step; no micro-batch holds both segments of up to `limit` tokens and longer ones.

    For models whose RoPE depends on the longest segment of a micro-batch; see `rope_limit` of
    `evenstep.integrations.huggingface`. A micro-batch with both becomes two, on all ranks of its
    wave, so that counts stay equal. The samples of a step, its loss and its gradient stay as they
    are. A pooled step has no plan of all ranks: there, each micro-batch becomes two.

        for step in stream:
            runner.run(separate_lengths(step, rope_limit(model).tokens))
    """
    limit = whole_number("limit", limit)
    if step.batches is not None:
        raise ConfigError(
            "separate_lengths needs micro-batches that are not collated yet. Collate with the "
            "Runner."
        )
    plan, waves = step.plan, [True] * len(step)
    of_plan = () if plan is None else (plan.segments,)
    segments = *of_plan, *(micro.segments for micro in step.micro_batches)
    if any(each.parent is not None for each in segments):
        raise ConfigError(
            f"the samples of step {step.number} share prefixes, or are shared between ranks, so "
            f"short and long ones cannot be separated. Plan without prefixes and sharing."
        )
    if plan is not None:
        _check_groups(plan, limit)
        (ranks,) = list(plan)
        lengths = [[micro.segments.length for micro in wave] for wave in zip(*ranks, strict=True)]
        waves = [any(len(np.unique(each > limit)) == 2 for each in wave) for wave in lengths]
    parts: list[MicroBatch] = []
    for micro, mixed in zip(step.micro_batches, waves, strict=True):
        long = micro.segments.length > limit
        parts += [_part(micro, ~long), _part(micro, long)] if mixed else [micro]
    if plan is not None and parts:
        missing = -len(parts) % plan.recipe.topology.multiple
        parts += [_part(parts[0], np.zeros(len(parts[0].segments), bool))] * missing
    totals = {name: value for name, value in step.totals.items() if "imbalance" not in name}
    return replace(step, micro_batches=tuple(parts), totals=totals, _read={})


def _check_groups(plan: Plan, limit: int) -> None:
    if plan.groups is None or plan.recipe.groups != "micro_batch":
        return
    group = plan.groups[plan.segments.sample]
    long = plan.segments.length > limit
    torn = np.intersect1d(group[long], group[~long])
    if len(torn):
        raise PlanError(
            f"group {torn[0]} holds segments of up to {limit} tokens and longer ones, which cannot "
            f"share a micro-batch. Set groups='step', or truncate samples to {limit} tokens."
        )


def _part(micro: MicroBatch, keep: NDArray[np.bool_]) -> MicroBatch:
    """The segments to `keep` in the same rows; rows are as wide as needed, and none is empty unless
    all are."""
    rows = np.repeat(np.arange(micro.rows), np.diff(micro.row_offsets))[keep]
    sizes = np.bincount(rows, minlength=micro.rows)
    sizes = sizes[sizes > 0] if len(rows) else np.zeros(1, np.int64)
    offsets = offsets_of(sizes.astype(np.int64))
    aligned = rounded_up(micro.segments.length[keep], micro.alignment)
    used = np.diff(offsets_of(aligned)[offsets])
    return replace(
        micro,
        segments=micro.segments.take(np.flatnonzero(keep)),
        row_offsets=offsets,
        width=max(int(used.max()), micro.alignment),
        sample_lengths=micro.sample_lengths[keep],
        truncated_to=micro.sample_ends[keep],
    )
