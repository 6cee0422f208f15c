"""PooledStream: samples of unknown length -> full micro-batches, from a pool on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

from evenstep.core.cursor import Cursor
from evenstep.core.recipe import Recipe
from evenstep.core.rounding import divided_up
from evenstep.core.step import Step
from evenstep.core.validate import one_of, seed_number, truth_value, whole_number
from evenstep.core.world import World
from evenstep.data.sources.source import Source, check_source, has_random_access, length_of
from evenstep.data.streams.epoch_source import EpochSource
from evenstep.data.streams.estimate import Estimate
from evenstep.data.streams.lookup import OnError
from evenstep.data.streams.pool import Measure, Pool, PoolBatcher
from evenstep.data.streams.reader import PoolReader, fresh, redealt
from evenstep.data.streams.remaining import ReaderState
from evenstep.data.streams.stream import digest_of, steps_of_pass, world_for
from evenstep.errors import CursorError


class PooledStream:
    """Endless or finite steps over samples whose lengths are known only once they are read.

    Every rank, and every worker of it, is a shard that reads its share of the epoch's order into
    a pool and takes micro-batches from it, `recipe.steps.micro_batches` to a step. Ranks do not
    speak with each other; all of them take the same number of steps, and their micro-batches are
    full, so they are even.

    The place is, for every shard, how much it has read and what waits in its pool: it resumes by
    reading the pool alone. On the same number of ranks and workers it goes on in the very same
    way; on any other, what is left of the epoch is dealt anew, each sample exactly once, from the
    cursors of all shards (`merge_cursors`).

    In a finite stream shards end at different times, so ranks must agree on the end: see
    `until_all_end`. With `on_error="skip"` samples that cannot be read are left out and counted,
    be it at first or on resume, when the pool is read again.

    >>> from evenstep import Packed
    >>> from evenstep.data.sources.memory import InMemory
    >>> source = InMemory([{"input_ids": [0] * n} for n in (5, 3, 4, 2)])
    >>> stream = PooledStream(source, Recipe(layout=Packed(max_tokens=7)), shuffle=False)
    >>> [micro.segments.sample.tolist() for step in stream for micro in step.micro_batches]
    [[0, 3], [1, 2]]
    """

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        *,
        pool: Pool | None = None,
        world: World | None = None,
        seed: int = 0,
        shuffle: bool = True,
        max_num_steps: int | None = None,
        infinite_loop: bool = False,
        on_error: OnError = "raise",
        length_of: Measure = length_of,
    ) -> None:
        check_source(source)
        one_of("on_error", on_error, OnError)
        if max_num_steps is not None:
            max_num_steps = whole_number("max_num_steps", max_num_steps, least=0)
        self.source, self.recipe, self.world = source, recipe, world_for(recipe, world)
        self.pool = Pool() if pool is None else pool
        self.seed, self.shuffle = seed_number(seed), truth_value("shuffle", shuffle)
        self.max_num_steps = max_num_steps
        self.infinite_loop = truth_value("infinite_loop", infinite_loop)
        self.on_error, self.length_of = on_error, length_of
        self._batcher = PoolBatcher(recipe, self.pool)
        self._epoch = 0
        self._skip = 0
        self._begin: Cursor | None = None
        self._now: Cursor | None = None
        self._done = 0
        self._walked = False  # whether the place was iterated since it was chosen

    @property
    def done(self) -> int:
        """Steps before the chosen place, over all epochs."""
        return self._first + self._skip

    @property
    def ends_together(self) -> bool:
        """Nobody knows the lengths that other ranks read, so one rank has to end the first."""
        return self.world.size == 1

    # Iterating ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        self._now = None if self._skip else self._begin
        for step in self.walk():
            self._now = step.cursor
            yield step

    def walk(self, worker: int = 0, workers: int = 1, turn: int | None = None) -> Iterator[Step]:
        """The steps of one of this rank's workers, who take turns. Its first is number `turn` from
        the chosen place on: `worker`, unless the cursor is the worker's own."""
        self._walked = True
        shard, shard_turn, number = self._opened(worker, workers, turn)
        # Of several workers some may end early, so only who gathers their steps can count them.
        counted = workers == 1 or self.infinite_loop
        while self.max_num_steps is None or number < self.max_num_steps or not counted:
            epoch = shard.epoch
            found = shard.step(number)
            missing = shard.newly_lost()
            if found is None:
                _say_lost(missing, shard)
                return
            here = {str(shard.number): {**shard.state_dict(), "step": number + workers}}
            yield Step(
                number=number,
                epoch=epoch,
                micro_batches=tuple(found[0]),
                samples=found[1],
                cursor=self._cursor(number + 1, workers, (shard_turn + 1) % workers, here),
                lost=missing,
                budget=self.recipe.layout.budget,
                ranks=self.world.size,
            )
            number += workers

    def _opened(self, worker: int, workers: int, turn: int | None) -> tuple[PoolReader, int, int]:
        """(the shard of a worker, whose turn that is, the number of its next step), behind the
        steps to be skipped. Worker 0 takes the place of whoever comes next after them."""
        begins = (worker + self._skip) % workers if turn is None else turn
        state, shard_turn = self._resume(
            begins if turn is None else worker, workers, own=turn is not None
        )
        shard = PoolReader(
            state,
            EpochSource(self.source, self.seed, self.shuffle),
            self._batcher,
            self.length_of,
            endless=self.infinite_loop,
            skip=self.on_error == "skip",
        )
        number = self._first + begins
        ahead = 0 if state.step is None else state.step - number
        while number < self._first + self._skip and shard.step(number + ahead) is not None:
            number += workers
        if self._skip:
            shard.newly_lost()  # told when those steps were run
        return shard, shard_turn, number + ahead

    @property
    def _first(self) -> int:
        return self._done if self._begin is None else self._begin.step

    # Position --------------------------------------------------------------------------------

    def start(self, workers: int = 1) -> Cursor:
        """The cursor of this rank before its first step, for so many workers. Steps to be skipped
        are read for it."""
        if not self._skip:
            resumed = [self._resume(worker, workers) for worker in range(workers)]
            states = {str(state.shard): state.to_dict() for state, _ in resumed}
            return self._cursor(self._first, workers, resumed[0][1], states)
        opened = [self._opened(worker, workers, None) for worker in range(workers)]
        states = {
            str(shard.number): {**shard.state_dict(), "step": number} for shard, _, number in opened
        }
        return self._cursor(self.done, workers, opened[0][1], states)

    def _resume(self, worker: int, workers: int, own: bool = False) -> tuple[ReaderState, int]:
        """(the state that worker number `worker` begins with, whose turn that is). A loader
        begins with worker 0, who therefore takes the place of the one whose turn it is, unless
        the worker is given its `own` state alone."""
        rank, ranks = self.world.rank, self.world.size
        count = EpochSource(self.source, self.seed, self.shuffle).count
        mine, shards = rank * workers + worker, ranks * workers
        if self._begin is None:
            return fresh(mine, shards, self._epoch, count), worker
        place = self._begin.place
        held = _states(place)
        if (place["ranks"], place["workers"]) == (ranks, workers):
            first = rank * workers
            turn = (int(place["turns"].get(str(rank), 0)) + worker) % workers
            if own:
                turn = min(held, default=first) - first
            if first + turn in held:
                return held[first + turn], turn
        then = place["ranks"] * place["workers"]
        missing = sorted(set(range(then)) - held.keys())
        if missing:
            raise CursorError(
                f"the cursor holds {len(held)} of the {then} shards of {place['ranks']} ranks x "
                f"{place['workers']} workers, and this is {ranks} x {workers}; the samples of "
                f"shard {missing[0]} would be lost. Merge the cursors of all ranks and workers "
                f"with merge_cursors."
            )
        return redealt(list(held.values()), mine, shards, count), worker

    def _cursor(self, step: int, workers: int, turn: int, shards: Mapping[str, Any]) -> Cursor:
        place = {
            "ranks": self.world.size,
            "workers": workers,
            "turns": {str(self.world.rank): turn},
            "shards": shards,
        }
        return Cursor(belongs=self._belongs, step=step, place=place)

    def state_dict(self) -> dict[str, Any]:
        """The cursor behind the last step that iterating gave out, as plain data."""
        return (self.start() if self._now is None else self._now).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin behind the step that this state was taken after."""
        cursor = Cursor.from_dict(state)
        cursor.check(self._belongs)
        _states(cursor.place)
        self._begin = self._now = cursor
        self._skip, self._walked = 0, False

    def set_epoch(self, epoch: int, done: int | None = None) -> None:
        """Begin at the first sample of `epoch`, after `done` steps: those given out so far.

        A place that was loaded or skipped to within this very epoch is kept, unless it was
        iterated since or `done` is given, as in a `PlannedStream`.
        """
        epoch = whole_number("epoch", epoch, least=0)
        if done is None and not self._walked and epoch in self._epochs():
            return
        so_far = self.done if self._now is None else self._now.step
        self._done = so_far if done is None else done
        self._begin = self._now = None
        self._epoch, self._skip, self._walked = epoch, 0, False

    def _epochs(self) -> set[int]:
        """The epochs that the place lies in: several where shards run on without an end."""
        if self._begin is None:
            return {self._epoch}
        return {e for state in _states(self._begin.place).values() for e in state.epochs}

    def skip_batches(self, steps: int) -> None:
        """Begin so many steps later. Their samples are read, because only they tell where that
        is; to resume, load a cursor instead."""
        steps = whole_number("steps to skip", steps, least=0)
        if steps:
            self._skip, self._now, self._walked = self._skip + steps, None, False

    @staticmethod
    def join(cursors: Sequence[Cursor]) -> Cursor:
        """The cursors of several workers as one."""
        return merge_cursors(cursors)

    @cached_property
    def _belongs(self) -> dict[str, str]:
        recipe = self.recipe.to_dict()
        shape = {name: recipe[name] for name in ("layout", "overflow", "steps", "limits")}
        topology = {**recipe["topology"], "dp": None}
        pool = asdict(self.pool) | {"strategy": self._batcher.strategy}
        count = f"{len(self.source)} items, " if has_random_access(self.source) else ""
        return {
            "stream": "pooled",
            "data": f"{count}{self.source.fingerprint}",
            "order": f"shuffled by seed {self.seed}" if self.shuffle else "as stored",
            "layout": digest_of({**shape, "topology": topology}),
            "pool": digest_of(pool),
        }

    # Length ------------------------------------------------------------------------------------

    @property
    def steps_per_epoch(self) -> Estimate:
        """At most how many steps an epoch has: lengths are unknown, so by samples alone."""
        if not has_random_access(self.source):
            raise TypeError("a source without a known end has no length. Set max_num_steps.")
        each = self.world.size * self._batcher.micro_batches
        return Estimate(divided_up(len(self.source), each), False)

    def __len__(self) -> int:
        """The steps of one pass: those left to `max_num_steps`, or as many as an epoch can have
        at most, which is an estimate from above."""
        unknown = self.max_num_steps is not None and not has_random_access(self.source)
        return steps_of_pass(self, self.infinite_loop or unknown)


def _say_lost(missing: Mapping[str, int], shard: PoolReader) -> None:
    """A warning of what went missing behind the last step, which no step can tell of."""
    counts = ", ".join(f"{n} {reason}" for reason, n in sorted(missing.items()))
    if counts:
        warnings.warn(
            f"shard {shard.number} came to its end, and behind its last step samples went missing: "
            f"{counts}. No step's `lost` counts them.",
            stacklevel=3,
        )


def merge_cursors(cursors: Sequence[Cursor | Mapping[str, Any]]) -> Cursor:
    """The cursors of several shards of a `PooledStream`, taken after the same step on every rank,
    as one. With those of all ranks and workers it resumes on any number of either.

    Of several cursors of one shard the last counts. A rank that came to its end may stand behind
    an earlier step than the others.
    """
    found = [c if isinstance(c, Cursor) else Cursor.from_dict(c) for c in cursors]
    if not found:
        raise CursorError("no cursor was given to merge, so there is no place. Pass those of all.")
    first = found[0]
    kind = first.belongs.get("stream", "foreign")
    if kind != "pooled":
        raise CursorError(
            f"a cursor of a {kind} stream has no shards, so there is nothing to merge. That of a "
            f"PlannedStream is whole by itself: load any rank's."
        )
    shape = (first.place.get("ranks"), first.place.get("workers"))
    turns: dict[str, int] = {}
    shards: dict[str, Any] = {}
    for cursor in sorted(found, key=lambda cursor: cursor.step):
        cursor.check(first.belongs)
        _states(cursor.place)
        if (cursor.place["ranks"], cursor.place["workers"]) != shape:
            raise CursorError(
                f"cursors of {shape[0]} ranks x {shape[1]} workers and of "
                f"{cursor.place['ranks']} x {cursor.place['workers']} have no common place. Merge "
                f"those of one run."
            )
        turns |= cursor.place["turns"]
        shards |= cursor.place["shards"]
    _check_steps(found, shards)
    place = {"ranks": shape[0], "workers": shape[1], "turns": turns, "shards": shards}
    return Cursor(belongs=first.belongs, step=max(c.step for c in found), place=place)


def _check_steps(cursors: Sequence[Cursor], shards: Mapping[str, Any]) -> None:
    """Refuse ranks behind different steps. One with a shard that may have ended is not asked: it
    has no more steps, or those of its other workers are counted ahead."""
    place, steps = cursors[0].place, dict[int, int]()
    for cursor in cursors:
        for number in cursor.place["shards"]:
            rank = int(number) // place["workers"]
            steps[rank] = max(cursor.step, steps.get(rank, 0))
    if len(set(steps.values())) <= 1:
        return
    for number, state in _states({**place, "shards": shards}).items():
        if not state.goes_on:
            steps.pop(number // place["workers"], None)
    if len(set(steps.values())) > 1:
        (behind, fewest), *_, (ahead, most) = sorted(steps.items(), key=lambda pair: pair[1])
        raise CursorError(
            f"the cursor of rank {behind} was taken after {fewest} steps and that of rank {ahead} "
            f"after {most}, so samples of the steps between would run twice or never. Merge "
            f"cursors that all ranks took after the same step."
        )


def _states(place: Mapping[str, Any]) -> dict[int, ReaderState]:
    """The shards of a cursor's place, by number."""
    try:
        shards = int(place["ranks"]) * int(place["workers"])
        given = {int(name): data for name, data in place["shards"].items()}
        if not (shards > 0 and isinstance(place["turns"], Mapping)):
            raise ValueError(f"{shards} shards")
        if not all(0 <= number < shards for number in given):
            raise ValueError(f"shards {sorted(given)} of {shards}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CursorError(
            f"the cursor's place cannot be read ({error!r}), so it marks none. Use an earlier "
            f"checkpoint."
        ) from None
    return {number: ReaderState.from_dict(data, number, shards) for number, data in given.items()}
