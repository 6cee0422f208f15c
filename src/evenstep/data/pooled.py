"""PooledStream: samples of unknown length -> steps, from a pool on every rank."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from evenstep.core.ragged import MOST_ITEMS, divided_up
from evenstep.core.recipe import Recipe, World, check_recipe
from evenstep.core.step import Cursor, Step
from evenstep.core.text import truth_value, whole_number
from evenstep.data.dataset import MapStyle, as_source
from evenstep.data.files import refuse_empty
from evenstep.data.order import EpochOrder, ReaderState, ReaderStates, share_anew
from evenstep.data.pool import ColumnOf, Measure, Pool, refuse_sharing
from evenstep.data.reader import (
    EpochSource,
    ItemLengths,
    PoolBatcher,
    PoolReader,
    changed_fields,
    common_steps,
)
from evenstep.data.source import MeasuredSource, Source, has_random_access
from evenstep.data.source import length_of as count_tokens
from evenstep.data.stream import (
    Estimate,
    OnError,
    Stream,
    check_lengths,
    estimated_tokens,
    known_to,
    knows_lengths,
    settings_digest,
)
from evenstep.errors import ConfigError, CursorError

_ENOUGH_SEEN = 8  # micro-batches before their number of samples is used in estimates


class PooledStream(Stream):
    """Finite or endless steps over samples whose lengths are unknown until they are read.

    Every worker of every rank is a reader. It reads its share of the epoch's order into a pool
    and takes micro-batches from it, `recipe.steps.micro_batches` per step. There is no
    communication between ranks; the work is even because micro-batches are full.

    The position is, for every reader, how much it has read and which segments are in its pool, so
    resuming reads only the pool again. On the same number of ranks and workers the steps are the
    same as without interruption. On another number the rest of the epoch is shared anew, each
    sample exactly once; this needs the cursors of all readers (`merge_cursors`).

    Readers of a finite stream end at different times, so ranks must agree on the end; see
    `until_all_end`. With `count_ahead` they need not: each rank counts the steps of all readers
    before its first step. Ranks with fewer then make smaller micro-batches at the end, or empty
    ones if their pool holds too few samples. Lengths that the source does not know are read for
    that, once per reader: give them (`MeasuredMapped`) if samples are expensive.

    With `on_error="skip"` unreadable samples are left out and counted, also when the pool is read
    again on resume.

    `source` may also be a list of samples, or a torch or Hugging Face dataset (see `as_source`).
    `shuffle` gives every epoch its own order. It is the default if items can be read by index, and
    an error for a sequential source, whose order is its own.

    `columns` maps the names in `recipe.limits.columns` to functions of a sample; `loss_tokens`
    needs none. Lengths that the source knows are checked at once. `fingerprint` names the data in
    cursors instead of the source's own.

    >>> from evenstep import Packed
    >>> from evenstep.data import InMemory
    >>> source = InMemory([{"input_ids": [0] * n} for n in (5, 3, 4, 2)])
    >>> stream = PooledStream(source, Recipe(layout=Packed(max_tokens=7)), shuffle=False)
    >>> [micro.segments.sample.tolist() for step in stream for micro in step.micro_batches]
    [[0, 3], [1, 2]]
    """

    def __init__(
        self,
        source: Source | MapStyle | Iterable[Any],
        recipe: Recipe,
        *,
        pool: Pool | None = None,
        world: World | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        max_num_steps: int | None = None,
        infinite_loop: bool = False,
        on_error: OnError = "raise",
        length_of: Measure = count_tokens,
        columns: Mapping[str, ColumnOf] | None = None,
        fingerprint: str | None = None,
        count_ahead: bool = False,
    ) -> None:
        check_recipe(recipe)
        refuse_sharing(recipe)
        source = as_source(source)
        super().__init__(
            source,
            recipe,
            world=world,
            seed=seed,
            shuffle=_shuffles(source, shuffle),
            max_num_steps=max_num_steps,
            infinite_loop=infinite_loop,
            on_error=on_error,
            fingerprint=fingerprint,
        )
        self.pool, self.length_of = Pool() if pool is None else pool, length_of
        self.count_ahead = truth_value("count_ahead", count_ahead)
        self._batcher = PoolBatcher(recipe, self.pool, columns)
        if self.count_ahead and (self.infinite_loop or recipe.limits.columns):
            raise ConfigError(
                f"count_ahead counts steps by lengths until the end, so it cannot be combined with "
                f"{'infinite_loop' if self.infinite_loop else 'limits.columns'}. Leave one of them "
                f"out."
            )
        self._measured = length_of is count_tokens and knows_lengths(source)
        if self._measured and on_error == "raise":
            check_lengths(cast("MeasuredSource", source), recipe)
        # The start: after `_done` steps, at a loaded position or at the beginning of an epoch; then
        # steps to skip.
        self._loaded: ReaderStates | None = None
        self._epoch = self._done = self._skip = 0
        self._changed = False  # settings, since the loaded state was taken
        self._counts: dict[int, list[int]] = {}  # steps left of each reader, by workers
        self._items_seen = self._micro_batches_seen = 0  # dropped and skipped items count, too

    @property
    def ends_together(self) -> bool:
        """True on one rank or with `count_ahead`; else ranks do not know when others run out."""
        return self.world.size == 1 or self.count_ahead

    @property
    def can_share(self) -> bool:
        """Whether `shared` is cheap: reading what is left does not read what is done again."""
        return has_random_access(self.source)

    # Steps -------------------------------------------------------------------------------------

    def walk(self, worker: int = 0, workers: int = 1, turn: int | None = None) -> Iterator[Step]:
        """The steps of one of this rank's workers, which take turns. Its first step is number
        `turn` from the start: `worker`, unless the loaded cursor is the worker's own."""
        self._iterated, begin = True, self
        if self._skip:
            begin = copy(self)
            begin.load_state_dict(self.start(workers).to_dict())
        reader, reader_turn, number = begin._open(worker, workers, turn)
        # Some workers may end early, so with several workers only their loader counts the steps.
        counted = workers == 1 or self.infinite_loop
        while self.max_num_steps is None or number < self.max_num_steps or not counted:
            epoch, content = reader.epoch, reader.step(number)
            lost = reader.newly_lost()
            if content is None:
                if lost:
                    counts = ", ".join(f"{n} {reason}" for reason, n in sorted(lost.items()))
                    warnings.warn(
                        f"reader {reader.number} lost samples after its last step: {counts}. They "
                        f"are not in `lost` of any step.",
                        stacklevel=2,
                    )
                return
            state = reader.state(number + workers)
            step = Step(
                number=number,
                epoch=epoch,
                micro_batches=tuple(content[0]),
                samples=content[1],
                cursor=self._cursor(number + 1, workers, (reader_turn + 1) % workers, [state]),
                lost=lost,
                fingerprint=self.fingerprint,
                budget=self.recipe.layout.budget,
                ranks=self.world.size,
                context_ranks=self.recipe.topology.cp,
            )
            self.observe(step)
            yield step
            number += workers

    def _open(
        self, worker: int, workers: int, turn: int | None = None
    ) -> tuple[PoolReader, int, int]:
        """(reader of a worker, its turn, number of its next step), before the steps to skip."""
        refuse_empty(self.source)
        state, reader_turn = self._resume(worker, workers, alone=turn is not None)
        number = self._done + (worker if turn is None else turn)
        reader = self._reader(state, self._items(), self.length_of)
        return reader, reader_turn, number if state.step is None else state.step

    def _reader(self, state: ReaderState, items: EpochSource, length_of: Measure) -> PoolReader:
        endless, skip = self.infinite_loop, self.on_error == "skip"
        return PoolReader(state, items, self._batcher, length_of, endless=endless, skip=skip)

    def _items(self) -> EpochSource:
        return EpochSource(self.source, self.seed, self.shuffle, self._measured)

    # Position --------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """Steps before the start, over all epochs."""
        return self._done + self._skip

    @property
    def _position(self) -> ReaderStates:
        """The position before the steps to be skipped."""
        return self._loaded or ReaderStates.beginning(self._epoch, self._count)

    @property
    def _count(self) -> int | None:
        """Items of an epoch; None if their number is unknown."""
        return len(self.source) if has_random_access(self.source) else None

    def start(self, workers: int = 1) -> Cursor:
        """The cursor of this rank before its first step, for this number of workers. Reads the
        steps to skip; its number of steps is lower if there are fewer."""
        if not self._skip:
            resumed = [self._resume(worker, workers) for worker in range(workers)]
            return self._cursor(self.done, workers, resumed[0][1], [state for state, _ in resumed])
        opened = [self._open(worker, workers) for worker in range(workers)]
        readers, turns, numbers = map(list, zip(*opened, strict=True))
        turn, waiting, skipped = turns[0], deque(range(workers)), 0
        while waiting and skipped < self._skip:
            # Workers take turns; one that has ended is left out, as by a loader.
            worker = waiting.popleft()
            if readers[worker].step(numbers[worker]) is not None:
                numbers[worker] += workers
                turn, skipped = (turns[worker] + 1) % workers, skipped + 1
                waiting.append(worker)
        states = [reader.state(number) for reader, number in zip(readers, numbers, strict=True)]
        return self._cursor(self._done + skipped, workers, turn, states)

    def _resume(self, worker: int, workers: int, alone: bool = False) -> tuple[ReaderState, int]:
        """(the state that a worker begins with, its turn). A loader begins with worker 0, which
        therefore gets the state of the reader whose turn is next, unless the loaded cursor is that
        of this worker `alone`."""
        rank, ranks, before = self.world.rank, self.world.size, self._position
        first, states = rank * workers, before.states
        if (before.ranks, before.workers) == (ranks, workers):
            turn = (before.turns.get(str(rank), 0) + worker) % workers
            if alone:
                turn = min(states, default=first) - first
            state = states.get(first + turn)
            if state is not None and not self.count_ahead:
                return replace(state, left=None), turn
            if state is not None and state.left is not None and not self._changed:
                return state, turn
        if before.missing:
            raise CursorError(
                f"the cursor holds {len(states)} of {before.readers} readers ({before.ranks} ranks "
                f"x {before.workers} workers; reader {before.missing[0]} is missing), but resuming "
                f"on {ranks} ranks x {workers} workers needs all of them. Merge the cursors of all "
                f"ranks and workers with merge_cursors."
            )
        mine, readers = first + worker, ranks * workers
        wanted = range(readers) if self.count_ahead else [mine]
        shared = share_anew(list(states.values()), readers, self._count, wanted)
        if not self.count_ahead:
            return shared[0], worker
        return replace(shared[mine], left=self._steps_left(shared, workers)[mine]), worker

    def _steps_left(self, states: list[ReaderState], workers: int) -> list[int]:
        """The steps of each reader, such that all ranks end together."""
        if workers not in self._counts:
            items, counts = ItemLengths(self._items(), self.length_of), [0] * len(states)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of skipped samples: warned of when they are run
                for state in states:
                    reader, number = self._reader(state, items, int), self._done + state.reader
                    number -= state.reader // workers * workers
                    while reader.step(number + counts[state.reader] * workers) is not None:
                        counts[state.reader] += 1
            self._counts[workers] = common_steps(np.array(counts, np.int64), workers)
        return self._counts[workers]

    def _cursor(self, step: int, workers: int, turn: int, states: Iterable[ReaderState]) -> Cursor:
        position = {  # see `ReaderStates.from_dict`
            "ranks": self.world.size,
            "workers": workers,
            "turns": {str(self.world.rank): turn},
            "readers": {str(state.reader): state.to_dict() for state in states},
        }
        return Cursor(identity=self._identity, step=step, position=position)

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Start after the step that this state was taken at.

        `allow` names what may have changed since (see `CHANGES`): `budget`, `overflow`, `pool`,
        `steps`. Segments in the pool that no longer fit are cut by the new policy; each token
        still runs once. Data and order cannot change.
        """
        cursor = Cursor.from_dict(state)
        check_changes(cursor, self._identity, allow)
        self._loaded = ReaderStates.from_dict(cursor.position)
        self._done, self._skip = cursor.step, 0
        self._restart()
        self._changed, self._counts = bool(self.differences(state)), {}

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """What differs between this stream and that of a state, in words; [] if nothing does."""
        cursor = Cursor.from_dict(state)
        return list(cursor.differences(known_to(cursor, self._identity)).values())

    def _start_epochs(self) -> Collection[int]:
        """The epochs of the start. Readers of an endless stream can be in different ones."""
        states = self._position.states.values()
        waiting = {key[0] for state in states for key in state.waiting}
        return waiting | {remaining.epoch for state in states for remaining in state.epochs}

    def _start_epoch(self, epoch: int, done: int) -> None:
        self._loaded, self._epoch, self._done, self._skip = None, epoch, done, 0
        self._counts = {}

    def skip_batches(self, steps: int) -> None:
        """Start `steps` steps later. This reads their samples; to resume, load a cursor instead."""
        steps = whole_number("steps to skip", steps, least=0)
        if steps:
            self._skip += steps
            self._restart()

    def shared(self, cursors: Sequence[Cursor], workers: int = 1) -> Cursor:
        """The cursor of this rank if what is left on all ranks is shared anew, from the cursors of
        all ranks after the same step. Each sample still runs exactly once."""
        merged, first = merge_cursors(cursors), self.world.rank * workers
        states = ReaderStates.from_dict(merged.position).states.values()
        mine = range(first, first + workers)
        shared = share_anew(list(states), self.world.size * workers, self._count, mine)
        return self._cursor(merged.step, workers, 0, shared)

    @staticmethod
    def join(cursors: Sequence[Cursor]) -> Cursor:
        """Merge the cursors of several workers; see `merge_cursors`."""
        return _merge(cursors)

    @cached_property
    def _identity(self) -> dict[str, str]:
        """What a cursor belongs to."""
        order = EpochOrder(count=self._count or 0, seed=self.seed, epoch=0, shuffle=self.shuffle)
        return {
            "stream": "pooled",
            "order": order.description,
            **self._identity_of_data("items", self._measured),
            **described(self.recipe, self.pool, self._batcher.strategy),
        }

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what must be the same on all ranks: data, order, recipe, number of ranks."""
        end = [self.max_num_steps, self.infinite_loop, self.count_ahead]
        return settings_digest({**self._identity, "ranks": self.world.size, "end": end})

    # Length ------------------------------------------------------------------------------------

    @property
    def steps_per_epoch(self) -> Estimate:
        """An estimate of the steps of an epoch, from the samples per micro-batch so far; before
        that from the lengths, if they are known, else an upper bound."""
        if not has_random_access(self.source):
            raise TypeError("a sequential source has no length. Set max_num_steps.")
        items, budget = len(self.source), self.recipe.layout.budget
        micro_batches = items
        if self._micro_batches_seen >= _ENOUGH_SEEN and self._items_seen:
            per_item = self._micro_batches_seen / self._items_seen
            micro_batches = min(items, math.ceil(items * per_item))
        elif self._measured and budget is not None:
            tokens = estimated_tokens(cast("MeasuredSource", self.source))
            micro_batches = min(items, math.ceil(tokens / budget))
        per_step = self.world.size * self._batcher.micro_batches
        return Estimate(divided_up(micro_batches, per_step), False)

    def observe(self, step: Step) -> None:
        """Count a step, which another process may have made, for `steps_per_epoch`."""
        for micro in step.micro_batches:
            if not micro.is_empty:
                segments = micro.segments
                first = (segments.start == 0) & (segments.sample < MOST_ITEMS)
                self._items_seen += int(np.count_nonzero(first))
                self._micro_batches_seen += 1
        self._items_seen += sum(step.lost.get(reason, 0) for reason in ("dropped", "skipped"))


def _shuffles(source: Source, shuffle: bool | None) -> bool:
    """Whether the epoch's order is shuffled: by default, if items can be read in any order."""
    by_index = has_random_access(source)
    shuffled = by_index if shuffle is None else truth_value("shuffle", shuffle)
    if shuffled and not by_index:
        raise ConfigError(
            f"shuffle=True has no effect on {type(source).__name__}, which is read in its own "
            f"order. Shuffle inside it (Hugging Face: dataset.shuffle(seed, buffer_size)), or use "
            f"a source with items by index, and omit shuffle."
        )
    return shuffled


# Changed settings ---------------------------------------------------------------------------------


CHANGES = {
    "budget": ("layout.", "limits.", "cost.", "topology."),
    "overflow": ("overflow",),
    "pool": ("pool.",),
    "steps": ("steps.",),
}
"""The settings that each name allows to change, by how the names of the settings begin."""


def described(recipe: Recipe, pool: Pool, strategy: str) -> dict[str, str]:
    """The settings that determine the micro-batches of a pool, without defaults.

    >>> from evenstep import Packed
    >>> described(Recipe(layout=Packed(max_tokens=9)), Pool(), "greedy")
    {'layout.kind': 'packed', 'overflow': 'error', 'layout.max_tokens': '9', 'pool.strategy': 'greedy'}
    """  # noqa: E501
    parts = {name: getattr(recipe, name) for name in ("layout", "limits", "steps", "topology")}
    if recipe.limits.cost is not None:
        parts["cost"] = recipe.cost
    settings: dict[str, str] = {"layout.kind": recipe.layout.kind, "overflow": recipe.overflow}
    for name, part in {**parts, "pool": pool}.items():
        for field, value in changed_fields(part).items():
            text = dict(value) if isinstance(value, Mapping) else value
            settings[f"{name}.{field}"] = str(text)
    settings.pop("topology.dp", None)
    return {**settings, "pool.strategy": strategy}


def check_changes(cursor: Cursor, identity: Mapping[str, str], allow: Collection[str]) -> None:
    """Raise if the cursor belongs to a stream that differs in more than `allow` permits."""
    allow = {allow} if isinstance(allow, str) else set(allow)
    for name in sorted(allow):
        if name not in CHANGES:
            raise ConfigError(f"unknown change {name!r}; expected some of: {', '.join(CHANGES)}.")
    if "layout" in cursor.identity:  # a digest
        raise CursorError(
            "the cursor was written by version 0.1.0, whose readers shared the data in another "
            "way. Resume with that version, or start without the cursor, for example at the next "
            "epoch."
        )
    identity = known_to(cursor, identity)
    if "lengths" not in identity:  # known to one of them only
        kept = {name: value for name, value in cursor.identity.items() if name != "lengths"}
        cursor = replace(cursor, identity=kept)
    differing, needed = list[str](), set[str]()
    for name, words in cursor.differences(identity).items():
        change = next((c for c, begins in CHANGES.items() if name.startswith(begins)), None)
        if change is None:
            cursor.check(identity)
        elif change not in allow:
            differing.append(words)
            needed.add(change)
    if differing:
        names = ", ".join(map(repr, sorted(needed)))
        raise CursorError(
            f"the stream has changed since the cursor was taken: {'; '.join(differing)}. Restore "
            f"the settings, or pass allow={{{names}}} to load_state_dict or the trainer, which "
            f"resumes with the new ones."
        )


# Cursors of readers -------------------------------------------------------------------------------


def merge_cursors(cursors: Sequence[Cursor | Mapping[str, Any]]) -> Cursor:
    """Merge cursors of several readers of a `PooledStream`, taken after the same step on all ranks.

    The merged cursor of all ranks and workers can be resumed on any number of either. Of several
    cursors of one reader, the last counts. A rank that has ended may be at an earlier step.

        merge_cursors([state_of_rank_0, state_of_rank_1]).to_dict()
    """
    several = [c if isinstance(c, Cursor) else Cursor.from_dict(c) for c in cursors]
    if not several:
        raise CursorError("no cursors to merge; expected those of all ranks and workers.")
    first = several[0]
    kind = first.identity.get("stream", "foreign")
    if kind != "pooled":
        raise CursorError(
            f"expected cursors of a PooledStream, got one of a {kind} stream. The cursor of a "
            f"PlannedStream needs no merging: load that of any rank."
        )
    for cursor in several:
        ReaderStates.from_dict(cursor.position)  # raises if it is malformed
    return _merge(several)


def _merge(cursors: Sequence[Cursor]) -> Cursor:
    """The same for well-formed cursors."""
    first, turns, readers = cursors[0], dict[str, int](), dict[str, Any]()
    shape = (first.position["ranks"], first.position["workers"])
    for cursor in sorted(cursors, key=lambda cursor: cursor.step):
        cursor.check(first.identity)
        if (cursor.position["ranks"], cursor.position["workers"]) != shape:
            raise CursorError(
                f"cursors come from different runs: {shape[0]} ranks x {shape[1]} workers and "
                f"{cursor.position['ranks']} x {cursor.position['workers']}. Merge those of one "
                f"run."
            )
        turns |= cursor.position["turns"]
        readers |= cursor.position["readers"]
    position = {"ranks": shape[0], "workers": shape[1], "turns": turns, "readers": readers}
    _check_steps(cursors, position)
    return Cursor(identity=first.identity, step=max(c.step for c in cursors), position=position)


def _check_steps(cursors: Sequence[Cursor], merged: Mapping[str, Any]) -> None:
    """Refuse cursors of ranks at different steps. Ignores ranks with a reader that may have ended:
    they have no more steps, or their other workers count ahead."""
    steps = dict[int, int]()
    for cursor in cursors:
        for number in cursor.position["readers"]:
            rank = int(number) // merged["workers"]
            steps[rank] = max(cursor.step, steps.get(rank, 0))
    if len(set(steps.values())) <= 1:
        return
    for number, state in ReaderStates.from_dict(merged).states.items():
        if not state.goes_on:
            steps.pop(number // merged["workers"], None)
    if len(set(steps.values())) > 1:
        (behind, fewest), *_, (ahead, most) = sorted(steps.items(), key=lambda pair: pair[1])
        raise CursorError(
            f"the cursor of rank {behind} was taken after {fewest} steps, that of rank {ahead} "
            f"after {most}. Merge cursors that all ranks took after the same step."
        )
