"""PooledStream: samples of unknown length -> steps, from a pool on every rank."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from evenstep.core.ragged import MOST_ITEMS, IntArray, divided_up, item_and_part
from evenstep.core.recipe import Recipe, World, check_recipe
from evenstep.core.step import Cursor, Step
from evenstep.core.text import (
    one_of,
    seed_number,
    truth_value,
    whole_number,
)
from evenstep.data.dataset import MapStyle, as_source
from evenstep.data.files import refuse_empty
from evenstep.data.order import EpochOrder, ReaderState, redealt
from evenstep.data.pool import ColumnOf, Measure, Pool
from evenstep.data.reader import EpochSource, PoolBatcher, PoolReader, shuffles, warn_lost
from evenstep.data.source import MeasuredSource, Sample, Source, has_random_access, is_seeded
from evenstep.data.source import length_of as count_tokens
from evenstep.data.stream import (
    Estimate,
    OnError,
    check_lengths,
    digest_of,
    estimated_tokens,
    knows_lengths,
    lengths_digest,
    steps_of_pass,
    world_for,
)
from evenstep.errors import ConfigError, CursorError, SampleError

# streams.changes ---------------------------------------------------------------------------

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
    {'layout.kind': 'packed', 'layout.max_tokens': '9', 'overflow': 'error', 'pool.strategy': 'greedy'}
    """  # noqa: E501
    found: dict[str, Any] = {"layout.kind": recipe.layout.kind}
    for name in ("layout", "limits", "steps", "topology"):
        found |= {f"{name}.{key}": value for key, value in _given(getattr(recipe, name)).items()}
    if recipe.limits.cost is not None:
        found |= {f"cost.{key}": value for key, value in _given(recipe.cost).items()}
    found.pop("topology.dp", None)
    found |= {"overflow": recipe.overflow}
    found |= {f"pool.{key}": value for key, value in _given(pool).items()}
    return {name: str(value) for name, value in {**found, "pool.strategy": strategy}.items()}


def _given(part: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    given = {}
    for each in fields(part):
        default = each.default
        if default is MISSING and each.default_factory is not MISSING:
            default = each.default_factory()
        value = getattr(part, each.name)
        if value != default:
            given[each.name] = dict(value) if isinstance(value, Mapping) else value
    return given


def check_changes(cursor: Cursor, belongs: Mapping[str, str], allow: Collection[str]) -> None:
    """Raise if the cursor belongs to a stream that differs in more than `allow` permits."""
    allow = {allow} if isinstance(allow, str) else set(allow)
    for name in sorted(allow):
        if name not in CHANGES:
            raise ConfigError(f"unknown change {name!r}; expected some of: {', '.join(CHANGES)}.")
    if "layout" in cursor.belongs:  # a digest
        raise CursorError(
            "the cursor was written by version 0.1.0, whose readers shared the data in another "
            "way. Resume with that version, or start without the cursor, for example at the next "
            "epoch."
        )
    if not ("lengths" in cursor.belongs and "lengths" in belongs):  # known to one of them only
        belongs = {name: value for name, value in belongs.items() if name != "lengths"}
        kept = {name: value for name, value in cursor.belongs.items() if name != "lengths"}
        cursor = replace(cursor, belongs=kept)
    differing, needed = cursor.differences(belongs), list[str]()
    for name in list(differing):
        change = next((c for c, begins in CHANGES.items() if name.startswith(begins)), None)
        if change is not None and change in allow:
            del differing[name]
        elif change is not None and change not in needed:
            needed.append(change)
    fixed = any(not name.startswith(sum(CHANGES.values(), ())) for name in differing)
    if differing and (fixed or cursor.belongs.get("stream") != belongs["stream"]):
        cursor.check(belongs)
    if differing:
        names = ", ".join(map(repr, sorted(needed)))
        raise CursorError(
            f"the stream has changed since the cursor was taken: {'; '.join(differing.values())}. "
            f"Restore the settings, or pass allow={{{names}}} to load_state_dict or the trainer, "
            f"which resumes with the new ones."
        )


# streams.samples_seen ----------------------------------------------------------------------

_ENOUGH_SEEN = 8  # micro-batches before the count is used


@dataclass(slots=True)
class SamplesSeen:
    """Items and micro-batches so far. Items that were dropped or skipped count, too."""

    items: int = 0
    micro_batches: int = 0

    def add(self, step: Step) -> None:
        """Count a step."""
        for micro in step.micro_batches:
            if not micro.is_empty:
                found = micro.segments
                self.items += int(((found.start == 0) & (found.sample < MOST_ITEMS)).sum())
                self.micro_batches += 1
        self.items += sum(step.lost.get(reason, 0) for reason in ("dropped", "skipped"))

    def micro_batches_of(self, items: int) -> float | None:
        """The number of micro-batches that so many items make; None if too few were seen.

        >>> SamplesSeen(items=100, micro_batches=25).micro_batches_of(1000)
        250.0
        """
        if self.micro_batches < _ENOUGH_SEEN or not self.items:
            return None
        return items * self.micro_batches / self.items


# streams.pooled_cursor ---------------------------------------------------------------------


def merge_cursors(cursors: Sequence[Cursor | Mapping[str, Any]]) -> Cursor:
    """Merge cursors of several readers of a `PooledStream`, taken after the same step on all ranks.

    The merged cursor of all ranks and workers can be resumed on any number of either. Of several
    cursors of one reader, the last counts. A rank that has ended may be at an earlier step.

        merge_cursors([state_of_rank_0, state_of_rank_1]).to_dict()
    """
    found = [c if isinstance(c, Cursor) else Cursor.from_dict(c) for c in cursors]
    if not found:
        raise CursorError("no cursors to merge; expected those of all ranks and workers.")
    first = found[0]
    kind = first.belongs.get("stream", "foreign")
    if kind != "pooled":
        raise CursorError(
            f"expected cursors of a PooledStream, got one of a {kind} stream. The cursor of a "
            f"PlannedStream needs no merging: load that of any rank."
        )
    shape = (first.place.get("ranks"), first.place.get("workers"))
    turns: dict[str, int] = {}
    readers: dict[str, Any] = {}
    for cursor in sorted(found, key=lambda cursor: cursor.step):
        cursor.check(first.belongs)
        states_of(cursor.place)
        if (cursor.place["ranks"], cursor.place["workers"]) != shape:
            raise CursorError(
                f"cursors come from different runs: {shape[0]} ranks x {shape[1]} workers and "
                f"{cursor.place['ranks']} x {cursor.place['workers']}. Merge those of one run."
            )
        turns |= cursor.place["turns"]
        readers |= cursor.place["readers"]
    _check_steps(found, readers)
    position = {"ranks": shape[0], "workers": shape[1], "turns": turns, "readers": readers}
    return Cursor(belongs=first.belongs, step=max(c.step for c in found), place=position)


def _check_steps(cursors: Sequence[Cursor], readers: Mapping[str, Any]) -> None:
    """Refuse cursors of ranks at different steps. Ignores ranks with a reader that may have ended:
    they have no more steps, or their other workers count ahead."""
    position, steps = cursors[0].place, dict[int, int]()
    for cursor in cursors:
        for number in cursor.place["readers"]:
            rank = int(number) // position["workers"]
            steps[rank] = max(cursor.step, steps.get(rank, 0))
    if len(set(steps.values())) <= 1:
        return
    for number, state in states_of({**position, "readers": readers}).items():
        if not state.goes_on:
            steps.pop(number // position["workers"], None)
    if len(set(steps.values())) > 1:
        (behind, fewest), *_, (ahead, most) = sorted(steps.items(), key=lambda pair: pair[1])
        raise CursorError(
            f"the cursor of rank {behind} was taken after {fewest} steps, that of rank {ahead} "
            f"after {most}. Merge cursors that all ranks took after the same step."
        )


def states_of(position: Mapping[str, Any]) -> dict[int, ReaderState]:
    """The readers' states in a cursor, by reader."""
    try:
        readers = int(position["ranks"]) * int(position["workers"])
        given = {int(name): data for name, data in position["readers"].items()}
        if not (readers > 0 and isinstance(position["turns"], Mapping)):
            raise ValueError(f"{readers} readers")
        if not all(0 <= number < readers for number in given):
            raise ValueError(f"readers {sorted(given)} of {readers}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CursorError(
            f"the position in the cursor is malformed ({error!r}). Use an earlier checkpoint."
        ) from None
    return {number: ReaderState.from_dict(data, number, readers) for number, data in given.items()}


def all_states_of(position: Mapping[str, Any], ranks: int, workers: int) -> list[ReaderState]:
    """The states of all readers, to resume on another number of ranks and workers."""
    held = states_of(position)
    then = position["ranks"] * position["workers"]
    missing = sorted(set(range(then)) - held.keys())
    if missing:
        raise CursorError(
            f"the cursor holds {len(held)} of {then} readers ({position['ranks']} ranks x "
            f"{position['workers']} workers; reader {missing[0]} is missing), but resuming on "
            f"{ranks} ranks x {workers} workers needs all of them. Merge the cursors of all "
            f"ranks and workers with merge_cursors."
        )
    return list(held.values())


# streams.common_end ------------------------------------------------------------------------

# The common end of ranks: how many steps each reader of a finite pooled stream makes.
#
# Counted by every rank on its own, from the lengths of all samples: it forms the micro-batches of
# all readers, without their samples. There is no communication.


class ItemLengths:
    """The items of an `EpochSource`, with lengths in place of samples. Reads each item once.

    Lengths that the source knows are not read. Sequential sources are read anew in every epoch.
    """

    def __init__(self, items: EpochSource, length_of: Measure) -> None:
        self._items, self._length_of = items, length_of
        self._known: dict[tuple[int, int], list[tuple[int, int]] | SampleError | None] = {}
        self._next = (-1, 0)  # of a sequential source: epoch, first item that was not read
        self.count, self.seeded = items.count, items.seeded
        self.failed = False

    def items(self, epoch: int, positions: IntArray) -> list[int]:
        """The items at these positions."""
        return self._items.items(epoch, positions)

    def read(self, epoch: int, item: int) -> list[tuple[int, Sample]] | None:
        """(sample id, length) of every sample of an item; None past the end."""
        if self._items.measured:
            return [(item, self._items.length_of_item(item))]
        if self.count is None:
            if self._next[0] != epoch:
                self._known, self._next = {}, (epoch, 0)
            for before in range(self._next[1], item + 1):
                self._known[epoch, before] = self._measured(epoch, before)
                self._next = (epoch, before + 1)
        varies = self.count is None or self._items.seeded
        key = (epoch if varies else 0, item)
        if key not in self._known:
            self._known[key] = self._measured(epoch, item)
        found = self._known[key]
        if isinstance(found, SampleError):
            raise found
        return found

    def again(self, epoch: int, sample_id: int) -> Sample:
        """The length of a sample that was read before."""
        item, part = item_and_part(sample_id)
        found = self.read(epoch, item)
        return 0 if found is None or part >= len(found) else found[part][1]

    def _measured(self, epoch: int, item: int) -> list[tuple[int, int]] | SampleError | None:
        try:
            found = self._items.read(epoch, item)
        except SampleError as error:
            self.failed = self._items.failed
            return error
        return None if found is None else [(name, self._length(one)) for name, one in found]

    def _length(self, sample: Sample) -> int:
        """The length, or 0 for a sample that a reader will refuse or skip for its own reason."""
        try:
            return int(self._length_of(sample))
        except Exception:
            return 0


def own_steps(
    states: Sequence[ReaderState],
    firsts: Sequence[int],
    workers: int,
    items: ItemLengths,
    batcher: PoolBatcher,
    skip: bool,
) -> IntArray:
    """How many steps each reader makes by itself. The first of them has the number `firsts[i]`."""
    counts = []
    for state, first in zip(states, firsts, strict=True):
        counted: Any = items
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of skipped samples: warned of when they are run
            reader = PoolReader(state, counted, batcher, int, endless=False, skip=skip)
            count = 0
            while reader.step(first + count * workers) is not None:
                count += 1
        counts.append(count)
    return np.array(counts, np.int64)


def common_steps(own: IntArray, workers: int) -> list[int]:
    """The steps of each reader such that all ranks make as many as the longest one.

    Further steps of a rank go to its reader with the fewest.

    >>> common_steps(np.array([5, 3, 4, 4, 2, 3]), workers=2)
    [5, 3, 4, 4, 4, 4]
    """
    steps = own.reshape(-1, workers).copy()
    most = int(steps.sum(axis=1).max(initial=0))
    for rank in steps:
        while rank.sum() < most:
            rank[np.argmin(rank)] += 1
    return [int(count) for count in steps.reshape(-1)]


def check_count_ahead(recipe: Recipe, infinite_loop: bool) -> None:
    """Raise if steps cannot be counted by lengths alone, until the end."""
    for what, given in (
        ("infinite_loop", infinite_loop),
        ("limits.columns", bool(recipe.limits.columns)),
    ):
        if given:
            raise ConfigError(
                f"count_ahead counts steps by lengths until the end, so it cannot be combined "
                f"with {what}. Leave one of them out."
            )


# streams.pooled ----------------------------------------------------------------------------


class PooledStream:
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
        source = as_source(source)
        one_of("on_error", on_error, OnError)
        if max_num_steps is not None:
            max_num_steps = whole_number("max_num_steps", max_num_steps, least=0)
        self.source, self.recipe, self.world = source, recipe, world_for(recipe, world)
        self.pool = Pool() if pool is None else pool
        self.seed, self.shuffle = seed_number(seed), shuffles(source, shuffle)
        self.max_num_steps = max_num_steps
        self.infinite_loop = truth_value("infinite_loop", infinite_loop)
        self.on_error, self.length_of, self._named = on_error, length_of, fingerprint
        self.count_ahead = truth_value("count_ahead", count_ahead)
        self._batcher = PoolBatcher(recipe, self.pool, {} if columns is None else columns)
        if self.count_ahead:
            check_count_ahead(recipe, self.infinite_loop)
        self._measured = False
        if length_of is count_tokens and knows_lengths(source):
            self._measured = True
            if on_error == "raise":
                check_lengths(source, recipe)
        self._epoch = 0
        self._skip = 0
        self._begin: Cursor | None = None
        self._now: Cursor | None = None
        self._done = 0
        self._iterated = False  # since the start was set
        self._seen = SamplesSeen()
        self._counts: dict[tuple[int, int], list[int]] = {}  # by epoch and workers
        self._changed = False  # settings, since the loaded state was taken

    @property
    def done(self) -> int:
        """Steps before the start, over all epochs."""
        return self._first + self._skip

    @property
    def ends_together(self) -> bool:
        """True on one rank or with `count_ahead`; else ranks do not know when others run out."""
        return self.world.size == 1 or self.count_ahead

    @property
    def can_share(self) -> bool:
        """Whether `shared` is cheap: reading what is left does not read what is done again."""
        return has_random_access(self.source)

    # Iterating ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        self._now = None
        for step in self.walk():
            self._now = step.cursor
            yield step

    def walk(self, worker: int = 0, workers: int = 1, turn: int | None = None) -> Iterator[Step]:
        """The steps of one of this rank's workers, which take turns. Its first step is number
        `turn` from the start: `worker`, unless the loaded cursor is the worker's own."""
        self._iterated = True
        reader, reader_turn, number = self._opened(worker, workers, turn)
        # Some workers may end early, so with several workers only their loader counts the steps.
        counted = workers == 1 or self.infinite_loop
        while self.max_num_steps is None or number < self.max_num_steps or not counted:
            epoch = reader.epoch
            found = reader.step(number)
            lost = reader.newly_lost()
            if found is None:
                warn_lost(lost, reader)
                return
            state = {str(reader.number): {**reader.state_dict(), "step": number + workers}}
            step = Step(
                number=number,
                epoch=epoch,
                micro_batches=tuple(found[0]),
                samples=found[1],
                cursor=self._cursor(number + 1, workers, (reader_turn + 1) % workers, state),
                lost=lost,
                fingerprint=self.fingerprint,
                budget=self.recipe.layout.budget,
                ranks=self.world.size,
            )
            self._seen.add(step)
            yield step
            number += workers

    def _opened(self, worker: int, workers: int, turn: int | None) -> tuple[PoolReader, int, int]:
        """(reader of a worker, its turn, number of its next step), after the steps to be skipped.
        Worker 0 gets the reader whose turn is next after them."""
        refuse_empty(self.source)
        begins = (worker + self._skip) % workers if turn is None else turn
        state, reader_turn = self._resume(
            begins if turn is None else worker, workers, own=turn is not None
        )
        reader = PoolReader(
            state,
            self._items(),
            self._batcher,
            self.length_of,
            endless=self.infinite_loop,
            skip=self.on_error == "skip",
        )
        number = self._first + begins
        ahead = 0 if state.step is None else state.step - number
        while number < self._first + self._skip and reader.step(number + ahead) is not None:
            number += workers
        if self._skip:
            reader.newly_lost()  # reported when those steps ran
        return reader, reader_turn, number + ahead

    @property
    def _first(self) -> int:
        return self._done if self._begin is None else self._begin.step

    # Position --------------------------------------------------------------------------------

    def start(self, workers: int = 1) -> Cursor:
        """The cursor of this rank before its first step, for this number of workers. Reads the
        steps to be skipped."""
        if not self._skip:
            resumed = [self._resume(worker, workers) for worker in range(workers)]
            states = {str(state.reader): state.to_dict() for state, _ in resumed}
            return self._cursor(self._first, workers, resumed[0][1], states)
        opened = [self._opened(worker, workers, None) for worker in range(workers)]
        states = {
            str(reader.number): {**reader.state_dict(), "step": number}
            for reader, _, number in opened
        }
        return self._cursor(self.done, workers, opened[0][1], states)

    def _resume(self, worker: int, workers: int, own: bool = False) -> tuple[ReaderState, int]:
        """(the state that a worker begins with, its turn). A loader begins with worker 0, which
        therefore gets the state of the reader whose turn is next, unless the loaded cursor is the
        worker's `own`."""
        rank, ranks = self.world.rank, self.world.size
        items = self._items()
        mine, readers = rank * workers + worker, ranks * workers
        if self._begin is None:
            every = [
                ReaderState.fresh(each, readers, self._epoch, items.count)
                for each in (range(readers) if self.count_ahead else [mine])
            ]
            return self._counted(every, mine, workers), worker
        position = self._begin.place
        held = states_of(position)
        if (position["ranks"], position["workers"]) == (ranks, workers):
            first = rank * workers
            turn = (int(position["turns"].get(str(rank), 0)) + worker) % workers
            if own:
                turn = min(held, default=first) - first
            if first + turn in held and self._is_counted(held[first + turn]):
                state = held[first + turn]
                return state if self.count_ahead else replace(state, left=None), turn
        states = all_states_of(position, ranks, workers)
        every = [
            redealt(states, each, readers, items.count)
            for each in (range(readers) if self.count_ahead else [mine])
        ]
        return self._counted(every, mine, workers), worker

    def _is_counted(self, state: ReaderState) -> bool:
        """Whether the steps left in a loaded state still hold, or none are needed."""
        return not self.count_ahead or (state.left is not None and not self._changed)

    def _counted(self, every: list[ReaderState], mine: int, workers: int) -> ReaderState:
        """The state of reader `mine`, with the number of steps left to it if they are counted."""
        if not self.count_ahead:
            return every[0]
        key = (self._epoch if self._begin is None else -1, workers)
        if key not in self._counts:
            items = ItemLengths(self._items(), self.length_of)
            firsts = [self._first + state.reader % workers for state in every]
            skip = self.on_error == "skip"
            own = own_steps(every, firsts, workers, items, self._batcher, skip)
            self._counts[key] = common_steps(own, workers)
        return replace(every[mine], left=self._counts[key][mine])

    def _items(self) -> EpochSource:
        return EpochSource(self.source, self.seed, self.shuffle, self._measured)

    def _cursor(self, step: int, workers: int, turn: int, readers: Mapping[str, Any]) -> Cursor:
        position = {
            "ranks": self.world.size,
            "workers": workers,
            "turns": {str(self.world.rank): turn},
            "readers": readers,
        }
        return Cursor(belongs=self._belongs, step=step, place=position)

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last step that was yielded, as plain data."""
        return (self.start() if self._now is None else self._now).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Start after the step that this state was taken at.

        `allow` names what may have changed since (see `CHANGES`): `budget`, `overflow`, `pool`,
        `steps`. Segments in the pool that no longer fit are cut by the new policy; each token
        still runs once. Data and order cannot change.
        """
        cursor = Cursor.from_dict(state)
        check_changes(cursor, self._belongs, allow)
        states_of(cursor.place)
        # Before its first step, a rank has the state of its own reader, among the ranks of today:
        # a rank without a step left would otherwise keep a cursor of other ranks, or of all.
        self._begin, self._now = replace(cursor, belongs=self._belongs), None
        self._skip, self._iterated = 0, False
        self._changed = bool(cursor.differences(self._belongs))
        self._counts.clear()

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """What differs between this stream and that of a state, in words; [] if nothing does."""
        return list(Cursor.from_dict(state).differences(self._belongs).values())

    def set_epoch(self, epoch: int, done: int | None = None) -> None:
        """Start at the first sample of `epoch`, after `done` steps (default: those yielded so far).

        Keeps a start within this epoch that was loaded or skipped to, unless the stream was
        iterated since or `done` is given, as `PlannedStream` does.
        """
        epoch = whole_number("epoch", epoch, least=0)
        if done is None and not self._iterated and epoch in self._epochs():
            return
        so_far = self.done if self._now is None else self._now.step
        self._done = so_far if done is None else done
        self._begin = self._now = None
        self._epoch, self._skip, self._iterated = epoch, 0, False

    def _epochs(self) -> set[int]:
        """The epochs of the start. Readers of an endless stream can be in different ones."""
        if self._begin is None:
            return {self._epoch}
        return {e for state in states_of(self._begin.place).values() for e in state.open_epochs}

    def skip_batches(self, steps: int) -> None:
        """Start `steps` steps later. This reads their samples; to resume, load a cursor instead."""
        steps = whole_number("steps to skip", steps, least=0)
        if steps:
            self._skip, self._now, self._iterated = self._skip + steps, None, False

    def shared(self, cursors: Sequence[Cursor], workers: int = 1) -> Cursor:
        """The cursor of this rank if what is left on all ranks is shared anew, given the cursors of
        all ranks after the same step. Each sample still runs exactly once."""
        merged = merge_cursors(cursors)
        states, items = list(states_of(merged.place).values()), self._items()
        ranks, first = self.world.size, self.world.rank * workers
        mine = [
            redealt(states, first + worker, ranks * workers, items.count)
            for worker in range(workers)
        ]
        readers = {str(state.reader): state.to_dict() for state in mine}
        return self._cursor(merged.step, workers, 0, readers)

    @staticmethod
    def join(cursors: Sequence[Cursor]) -> Cursor:
        """Merge the cursors of several workers; see `merge_cursors`."""
        return merge_cursors(cursors)

    @cached_property
    def _belongs(self) -> dict[str, str]:
        source, given = self.source, self._named
        count = f"{len(source)} items, " if has_random_access(source) else ""
        size = len(source) if has_random_access(source) else 0
        order = EpochOrder(count=size, seed=self.seed, epoch=0, shuffle=self.shuffle)
        found = {
            "stream": "pooled",
            "data": f"{count}{source.fingerprint if given is None else given}",
            "order": order.description,
            **described(self.recipe, self.pool, self._batcher.strategy),
        }
        if self._measured:
            found["lengths"] = lengths_digest(cast("MeasuredSource", source))
        return {**found, "seed of samples": str(self.seed)} if is_seeded(source) else found

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what must be the same on all ranks: data, order, recipe, number of ranks."""
        end = [self.max_num_steps, self.infinite_loop, self.count_ahead]
        return digest_of({**self._belongs, "ranks": self.world.size, "end": end})

    # Length ------------------------------------------------------------------------------------

    @property
    def steps_per_epoch(self) -> Estimate:
        """An estimate of the steps of an epoch, from the samples per micro-batch so far; before
        that from the lengths, if they are known, else an upper bound."""
        if not has_random_access(self.source):
            raise TypeError("a sequential source has no length. Set max_num_steps.")
        items, budget = len(self.source), self.recipe.layout.budget
        found = self._seen.micro_batches_of(items)
        if found is None and self._measured and budget is not None:
            found = estimated_tokens(cast("MeasuredSource", self.source)) / budget
        micro_batches = items if found is None else min(items, math.ceil(found))
        return Estimate(
            divided_up(micro_batches, self.world.size * self._batcher.micro_batches), False
        )

    def observe(self, step: Step) -> None:
        """Count a step that another process has made, for `steps_per_epoch`."""
        self._seen.add(step)

    def __len__(self) -> int:
        """Steps of one pass: those left of `max_num_steps`, or an estimate for an epoch."""
        unknown = self.max_num_steps is not None and not has_random_access(self.source)
        return steps_of_pass(self, self.infinite_loop or unknown)
