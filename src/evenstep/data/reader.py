"""PoolReader: reads its share of a source into a pool and forms micro-batches from it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import (
    MOST_ITEMS,
    FloatArray,
    IntArray,
    item_and_part,
    rounded_up,
    sample_name,
)
from evenstep.core.recipe import Recipe
from evenstep.core.text import MOST, truth_value
from evenstep.data.order import EpochOrder, ReaderState, RemainingEpoch, Waiting, piece_of
from evenstep.data.pool import (
    ColumnOf,
    Cut,
    Entry,
    Measure,
    Piece,
    Pool,
    SampleColumns,
    entry_of,
    micro_batch,
    pieces_of,
)
from evenstep.data.source import (
    Draw,
    MeasuredSource,
    Sample,
    SequentialSource,
    Source,
    cause_of,
    has_random_access,
    is_seeded,
    read_samples,
    unreadable,
)
from evenstep.errors import ConfigError, CursorError, InputError, SampleError
from evenstep.planning.kernels import kernel
from evenstep.planning.overflow import refusal
from evenstep.planning.pool import Room, select

# streams.epoch_source ----------------------------------------------------------------------


class EpochSource:
    """The items of an epoch by position; reads them, and samples that were read before.

    A source with random access is read in the epoch's order. A sequential source is read in its
    own order, and opened again to go back.
    """

    def __init__(self, source: Source, seed: int, shuffle: bool, measured: bool = False) -> None:
        self.source, self.seed, self.shuffle = source, seed, shuffle
        self.count = len(source) if has_random_access(source) else None
        self.measured = measured
        """Whether the lengths of all items are known."""
        self.failed = False
        """Whether the source's iterator raised. It is finished then, so nothing can be skipped."""
        self.seeded = is_seeded(source)
        """Whether samples differ between epochs."""
        self._open: Iterator[Any] | None = None
        self._at = (-1, -1)  # epoch, position of the next raw item
        self._again_for = (-1, -1)  # epoch, item that was read again last
        self._again: list[tuple[int, Sample]] = []

    def length_of_item(self, item: int) -> int:
        """The length of an item, if the source knows it."""
        assert self.measured
        return int(cast("MeasuredSource", self.source).lengths_of(np.array([item]))[0])

    def items(self, epoch: int, positions: IntArray) -> list[int]:
        """The items at these positions."""
        if self.count is not None:
            order = EpochOrder(count=self.count, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
            positions = order.samples(positions)
        items: list[int] = positions.tolist()
        return items

    def read(self, epoch: int, item: int) -> list[tuple[int, Sample]] | None:
        """(sample id, sample) of every sample of an item; None past an end that was unknown."""
        draw = Draw(item, epoch, self.seed) if self.seeded else None
        if self.count is not None:
            return read_samples(self.source, item, None, draw)
        found, raw = self._raw(epoch, item)
        return read_samples(self.source, item, raw, draw) if found else None

    def again(self, epoch: int, sample_id: int) -> Sample:
        """A sample that was read before. Consecutive samples of one item are read once."""
        item, part = item_and_part(sample_id)
        if self._again_for != (epoch, item):
            self._again = self.read(epoch, item) or []
            self._again_for = (epoch, item)
        samples = self._again
        if part >= len(samples):
            raise CursorError(
                f"item {item} now has {len(samples)} samples, but the cursor names sample {part} "
                f"of it, so the data has changed. Restore the data, or start without the cursor."
            )
        return samples[part][1]

    def _raw(self, epoch: int, position: int) -> tuple[bool, Any]:
        """(whether there is an item, the raw item) at a position of a sequential source."""
        assert isinstance(self.source, SequentialSource)
        if self._open is None or self._at[0] != epoch or self._at[1] > position:
            self._open = self.source.open(position, epoch)
            self._at = (epoch, position)
        while True:
            try:
                raw = next(self._open)
            except StopIteration:
                self._open = None
                return False, None
            except BaseException:
                self.failed = True
                raise
            here = self._at[1]
            self._at = (epoch, here + 1)
            if here == position:
                return True, raw


def shuffles(source: Source, given: bool | None) -> bool:
    """Whether the epoch's order is shuffled: by default, if items can be read in any order."""
    by_index = has_random_access(source)
    found = by_index if given is None else truth_value("shuffle", given)
    if found and not by_index:
        raise ConfigError(
            f"shuffle=True has no effect on {type(source).__name__}, which is read in its own "
            f"order. Shuffle inside it (Hugging Face: dataset.shuffle(seed, buffer_size)), or use "
            f"a source with items by index, and omit shuffle."
        )
    return found


# streams.further_limits --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FurtherLimits:
    """What each sample of a pool takes of every limit.

    taken, caps  samples x limits, and what one pack may hold of each limit
    most         per sample, the most samples in a pack with it
    adds_up      whether the slots of a pack are the sum of its samples' lengths (packed rows)
    """

    taken: FloatArray
    caps: FloatArray
    most: IntArray
    adds_up: bool

    def within(self, lengths: IntArray, room: Room, order: list[int]) -> list[int]:
        """In this order, each sample that still fits. The first always does."""
        first = order[0]
        chosen, used = [first], self.taken[first].copy()
        slots = widest = int(lengths[first])
        most = min(int(self.most[first]), len(order) if room.most is None else room.most)
        for at in order[1:]:
            if len(chosen) >= most:
                break
            fewer = min(most, int(self.most[at]))
            width = max(widest, int(lengths[at]))
            total = slots + int(lengths[at])
            if not self.adds_up:
                total = rounded_up(width, room.unit) * (len(chosen) + 1)
            fits = total <= room.capacity and len(chosen) < fewer
            if fits and (used + self.taken[at] <= self.caps).all():
                chosen.append(at)
                used += self.taken[at]
                slots, widest, most = slots + int(lengths[at]), width, fewer
        return chosen


def further_limits(
    recipe: Recipe, lengths: IntArray, columns: IntArray, shares: IntArray
) -> FurtherLimits:
    """The limits on columns and cost for samples of these aligned lengths.

    `columns` are samples x columns; a pack may hold `shares` of them.
    """
    layout = recipe.layout
    taken, caps = columns.astype(np.float64), shares.astype(np.float64)
    in_rows = "cost" in layout.measured(recipe)
    if recipe.limits.cost is not None and not in_rows:
        costs = layout.segment_costs(recipe, lengths)
        taken = np.column_stack((taken, costs))
        caps = np.append(caps, layout.cost_share(recipe) * (1 + 1e-12))
    return FurtherLimits(taken, caps, layout.pack_bounds(recipe, lengths)[1], not in_rows)


# streams.leader ----------------------------------------------------------------------------

# Leader: the sample of a pool that a padded micro-batch is formed around.
#
# Micro-batches of short rows hold many samples, those of long rows few. If the oldest sample
# always led, long samples would gather in the pool until most of the oldest were long, and would
# run at the end of an epoch. So the leader is drawn by tokens: a sample of 700 tokens is ten
# times as likely as one of 70. In every other draw it is the oldest, so that no sample waits for
# long.

_OLDEST = 2  # one draw of so many
_PRIME, _FACTOR = 2147483647, 48271  # products fit 64 bits


@kernel
def leader_first(lengths: IntArray, ending: bool) -> IntArray:
    """The indices of a pool, the leader first, then the others in order.

    The leader is drawn from the older half by a hash of the lengths. If the epoch is `ending`, so
    that nothing more will be read, it is the longest: fewer micro-batches hold the rest.

    >>> leader_first(np.array([3, 7]), ending=True).tolist()
    [1, 0]
    """
    n = lengths.shape[0]
    value, tokens = np.int64(1), np.int64(0)
    for i in range(n):
        value = (value * _FACTOR + lengths[i]) % _PRIME
        tokens += lengths[i] if i < (n + 1) // 2 else 0
    at = 0
    if ending:
        at = int(np.argmax(lengths))
    elif value % _OLDEST:
        drawn = (value * _FACTOR % _PRIME) * tokens // _PRIME
        before = lengths[0]
        while before <= drawn:
            at += 1
            before += lengths[at]
    order = np.arange(n)
    for i in range(at, 0, -1):
        order[i] = i - 1
    order[0] = at
    return order


# streams.batcher ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolBatcher:
    """Forms the micro-batches of a recipe from pool entries. Uses only their lengths."""

    recipe: Recipe
    pool: Pool
    columns: Mapping[str, ColumnOf] = field(default_factory=dict)

    def __post_init__(self) -> None:
        recipe, layout = self.recipe, self.recipe.layout
        if self.strategy not in layout.pool_strategies:
            raise ConfigError(
                f"unknown pool.strategy {self.strategy!r} for {layout.kind} rows; expected one of: "
                f"{', '.join(layout.pool_strategies)}."
            )
        self._refuse_options()
        assert self.sample_columns is not None  # refuses columns without a function
        if recipe.steps.samples is not None or recipe.steps.tokens is not None:
            raise ConfigError(
                "steps.samples and steps.tokens cannot be used with a pool, because a rank does "
                "not know what other ranks read. Set steps.micro_batches, or use a PlannedStream."
            )
        if self.micro_batches % recipe.topology.multiple:
            raise ConfigError(
                f"steps.micro_batches must be a multiple of {recipe.topology.multiple} for this "
                f"pipeline, got {self.micro_batches}."
            )
        if self.pool.warmup_tokens is not None and layout.budget is None:
            raise ConfigError(
                "pool.warmup_steps grows a budget of slots, and this layout has none. Set "
                "layout.max_tokens, or leave the warm-up out."
            )
        if recipe.topology.equal_widths and not layout.static:
            raise ConfigError(
                "this pipeline needs micro-batches of equal shape, which a pool does not guarantee "
                "with this layout. Set layout.pad_to (and layout.samples for padded rows), or "
                "topology.variable_seq_lengths."
            )

    def _refuse_options(self) -> None:
        """Refuse options that only planning supports."""
        recipe = self.recipe
        given = dict(recipe.layout.options)
        default = {
            "balance": "refined",
            "equal_sizes": False,
            "equal_tokens": False,
            "second_work": None,
            "min_saving": None,
            "groups": "micro_batch",
        }
        given |= {
            name: getattr(recipe, name)
            for name, value in default.items()
            if getattr(recipe, name) != value
        }
        for name, value in given.items():
            raise ConfigError(
                f"{name}={value!r} has no effect with a pool. Remove it, or use a PlannedStream."
            )

    @cached_property
    def sample_columns(self) -> SampleColumns:
        """What samples take of the limited columns."""
        return SampleColumns(self.recipe, self.columns)

    @cached_property
    def strategy(self) -> str:
        """The strategy of the pool, or the layout's default."""
        return self.pool.strategy or self.recipe.layout.pool_strategies[0]

    @cached_property
    def samples(self) -> int:
        """Least number of samples in the pool before a micro-batch is taken."""
        return max(self.pool.samples, self.recipe.layout.samples or 0)

    @cached_property
    def enough(self) -> int:
        """Least number of tokens in the pool before a micro-batch is taken."""
        if self.pool.tokens is not None:
            return self.pool.tokens
        own = self.strategy == self.recipe.layout.pool_strategies[0]
        return 2 * (self.recipe.layout.budget or 0) if own else 0

    @cached_property
    def longest(self) -> int | None:
        """The longest segment that fits into a micro-batch; None if any does."""
        return self.recipe.longest_segment

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.recipe.steps.micro_batches or 1

    @cached_property
    def cut(self) -> Cut:
        """How over-long samples become segments."""
        return Cut(self.longest, self.recipe.overflow)

    def segments(self, length: int) -> list[tuple[int, int]] | None:
        """(start, length) of each segment of a sample; [] if it is dropped, None if refused."""
        return self.cut.segments(length)

    def take(
        self, waiting: list[Entry], step: int, ending: bool = False
    ) -> tuple[MicroBatch, list[Entry]]:
        """Remove the next micro-batch from `waiting`; return it and its entries in row order.
        `ending`: nothing will be added to `waiting`."""
        layout = self.recipe.layout
        packs: list[list[Entry]] = []
        left = list(self.recipe.limits.columns.values())
        while len(packs) < layout.packs_per_micro_batch and waiting:
            first = waiting[0].columns
            if packs and any(most < max(1, one) for most, one in zip(left, first, strict=True)):
                break  # nothing left for another row
            packs.append(self._pack(waiting, step, left, ending))
            for entry in packs[-1] if left else ():
                left = [most - one for most, one in zip(left, entry.columns, strict=True)]
        taken = packs[0] if len(packs) == 1 else [entry for pack in packs for entry in pack]
        rows = layout.rows_of(packs)
        return micro_batch(rows, self.recipe, self._width_unit, self._alignment), taken

    def take_few(
        self, waiting: list[Entry], step: int, most: int
    ) -> tuple[MicroBatch, list[Entry]]:
        """As `take`, when nothing will be added to `waiting`, but at most `most` entries."""
        micro, taken = self.take(list(waiting), step, ending=True)
        if len(taken) > most:
            micro, taken = self.take(taken[:most], step, ending=True)
        gone = {id(entry) for entry in taken}
        waiting[:] = [entry for entry in waiting if id(entry) not in gone]
        return micro, taken

    def _pack(self, waiting: list[Entry], step: int, left: list[int], ending: bool) -> list[Entry]:
        lengths = np.array([entry.length for entry in waiting], np.int64)
        if self._alignment > 1:
            lengths = rounded_up(lengths, self._alignment)
        room = self._full_room if self.pool.warmup_tokens is None else self._room(step)
        if self.pool.alone is not None:  # as if it filled the room
            alone = np.array([entry.length >= self.pool.alone for entry in waiting])
            lengths = np.where(alone, np.maximum(lengths, room.capacity), lengths)
        if not left and self.recipe.limits.cost is None:
            chosen = self._selected(lengths, room, None, ending)
        else:
            columns = np.array([entry.columns for entry in waiting], np.int64)
            columns = columns.reshape(len(waiting), len(left))
            chosen = self._limited(lengths, room, columns, left, ending)
        pack = [waiting[at] for at in chosen]
        for at in sorted(chosen, reverse=True):
            del waiting[at]
        return pack

    def _limited(
        self, lengths: IntArray, room: Room, columns: IntArray, left: list[int], ending: bool
    ) -> list[int]:
        """The next pack within the limits on columns and cost. One column is a part of the
        selection. Of several, the samples that would be selected without them come first."""
        shares = np.minimum(self.sample_columns.shares, np.maximum(left, 1))
        if len(left) == 1 and self.recipe.limits.cost is None:
            counted = replace(room, counted=int(shares[0]))
            return self._selected(lengths, counted, columns[:, 0], ending)
        first = self._selected(lengths, room, None, ending)
        others = np.delete(np.arange(len(lengths)), first).tolist()
        limits = further_limits(self.recipe, lengths, columns, shares)
        return limits.within(lengths, room, first + others)

    def _selected(
        self, lengths: IntArray, room: Room, counted: IntArray | None, ending: bool
    ) -> list[int]:
        """Indices in the pool of the next pack. The first is the oldest, or its leader."""
        chosen: list[int]
        if self.strategy != "fullest":
            chosen = select(self.strategy, lengths, room, counted).tolist()
            return chosen
        order = leader_first(lengths, ending)
        counts = None if counted is None else counted[order]
        chosen = order[select(self.strategy, lengths[order], room, counts)].tolist()
        return chosen

    @cached_property
    def _alignment(self) -> int:
        return self.recipe.topology.alignment

    @cached_property
    def _width_unit(self) -> int:
        return self.recipe.width_unit

    @cached_property
    def _full_room(self) -> Room:
        return self._room(self.pool.warmup_steps)

    def _room(self, step: int) -> Room:
        """Limits of one pack in a step."""
        layout, unit = self.recipe.layout, self._width_unit
        packs = layout.packs_per_micro_batch
        slots, rounding = layout.room(self.recipe)
        budget = self.pool.budget((MOST if slots is None else slots) * packs, step) // packs
        return Room(
            capacity=max(unit, budget // unit * unit),
            unit=rounding,
            most=None if layout.samples is None else layout.samples // packs,
        )


# streams.reader ----------------------------------------------------------------------------

_AHEAD = 256  # items that are looked up at once
_FEW = 16  # items that may all be unreadable, if other readers have more
_EMPTY_EPOCHS = 16  # per reader: give up after so many epochs without a sample that can run


class PoolReader:
    """Reads its share of the remaining epochs into a pool and takes micro-batches from it.

    Deterministic: two readers with the same state produce the same micro-batches.
    """

    def __init__(
        self,
        state: ReaderState,
        items: EpochSource,
        batcher: PoolBatcher,
        length_of: Measure,
        *,
        endless: bool,
        skip: bool,
    ) -> None:
        self._items, self._batcher, self._length_of = items, batcher, length_of
        self._endless, self._skip = endless, skip
        self._epochs = list(state.epochs)
        self._number, self._readers, self._read = state.reader, state.readers, state.read
        self._coming: list[int] = []  # the next items of the current epoch, the last one first
        self._found_any = True  # in the current epoch; unknown before this state, so assumed
        self._empty_epochs = 0
        self._ended = False
        # Whether any item could be used; assumed if others were read before this state.
        self._usable = state.read > 0 or len(state.waiting) > 0 or state.epochs[0].changes != ()
        self._tried = 0
        self._first_error: str | None = None
        self._lost, self._reported = dict(state.lost), dict(state.lost)
        self._waiting = self._restored(state)
        self._tokens = sum(entry.length for entry in self._waiting)
        self._left = state.left

    @property
    def number(self) -> int:
        """Which of the ranks x workers this is."""
        return self._number

    def newly_lost(self) -> dict[str, int]:
        """Number of samples lost since the last call, or since the state, by reason."""
        before, self._reported = self._reported, dict(self._lost)
        new = {reason: count - before.get(reason, 0) for reason, count in self._reported.items()}
        return {reason: count for reason, count in new.items() if count}

    def state_dict(self) -> dict[str, Any]:
        """The current `ReaderState` as plain data."""
        state: dict[str, Any] = {
            "epochs": [remaining.to_list() for remaining in self._epochs],
            "read": self._read,
            "waiting": [entry.key for entry in self._waiting],
            "cuts": [self._batcher.cut.to_list()],
            "lost": dict(self._lost),
        }
        return state if self._left is None else {**state, "left": self._left}

    @property
    def epoch(self) -> int:
        """The epoch of the oldest sample in the pool, or of the next one to be read."""
        return self._waiting[0].epoch if self._waiting else self._epochs[0].epoch

    def step(self, number: int) -> tuple[list[MicroBatch], dict[int, Sample]] | None:
        """The micro-batches of a step and their samples by id; None when nothing is left.

        If steps were counted ahead, there are exactly as many, the last ones empty if need be."""
        micro_batches: list[MicroBatch] = []
        samples: dict[int, Sample] = {}
        owners: dict[int, tuple[int, int]] = {}
        while len(micro_batches) < self._batcher.micro_batches:
            self._fill()
            if not self._waiting:
                break
            micro, taken = self._take(number, len(micro_batches))
            if self._items.count is None or self._items.seeded:
                micro, taken = _distinct(micro, taken, owners)
            micro_batches.append(micro)
            for entry in taken:
                samples[entry.sample_id] = entry.sample
                self._tokens -= entry.length
        if not micro_batches and (self._left or 0) <= 0:
            return None
        if self._left is not None:
            self._left -= 1
        missing = self._batcher.micro_batches - len(micro_batches)
        if missing:
            micro_batches += [micro_batch([], self._batcher.recipe)] * missing
        return micro_batches, samples

    def _take(self, number: int, before: int) -> tuple[MicroBatch, list[Entry]]:
        """Remove the next micro-batch of a step from the pool; `before` precede it in the step."""
        if self._left is None or not self._ended:
            return self._batcher.take(self._waiting, number, self._ended)
        # Later steps need a sample each. A full step has `micro_batches` micro-batches.
        later = (self._left - 1) * self._batcher.micro_batches - before
        most = max(1, len(self._waiting) - max(0, later))
        return self._batcher.take_few(self._waiting, number, most)

    def _fill(self) -> None:
        waiting, samples, enough = self._waiting, self._batcher.samples, self._batcher.enough
        while len(waiting) < samples or self._tokens < enough:
            found = self._next()
            if found is None:
                return
            for entry in found:
                waiting.append(entry)
                self._tokens += entry.length

    def _next(self) -> list[Entry] | None:
        """The entries of the next item of the remaining epochs; None at the end."""
        while not self._ended:
            item, skipped = self._next_item(), self._lost.get("skipped", 0)
            entries = None if item is None else self._at(self._epochs[0].epoch, item)
            if entries is not None:
                self._coming.pop()
                self._read += 1
                self._tried += 1
                self._found_any = self._found_any or len(entries) > 0
                if entries or self._lost.get("skipped", 0) == skipped:
                    self._usable = True
                return entries
            self._next_epoch(self._epochs[0])
        return None

    def _next_item(self) -> int | None:
        """The next item of the current epoch; None at its end, if that is known."""
        if not self._coming:
            remaining = self._epochs[0]
            places = remaining.positions(self._number, self._readers, self._read, _AHEAD)
            self._coming = self._items.items(remaining.epoch, places)[::-1]
        return self._coming[-1] if self._coming else None

    def _next_epoch(self, remaining: RemainingEpoch) -> None:
        """Continue with the next remaining epoch, or with a new one if the stream is endless."""
        self._check_skipped()
        if len(self._epochs) == 1 and not self._endless:
            self._ended = True
            return
        if len(self._epochs) == 1:
            self._empty_epochs = 0 if self._found_any else self._empty_epochs + 1
            self._check_found(remaining.epoch)
            self._epochs.append(RemainingEpoch(remaining.epoch + 1, self._items.count))
            self._found_any = False
        del self._epochs[0]
        self._read, self._coming = 0, []

    def _check_found(self, epoch: int) -> None:
        """Raise if no sample can be expected. A shuffled epoch may give this reader others."""
        if not self._empty_epochs:
            return
        if self._read == 0:
            raise InputError(
                f"reader {self._number} of {self._readers} has no samples in epoch {epoch}: there "
                f"are fewer items than ranks x workers. Use fewer workers, or more data."
            )
        if self._empty_epochs >= (1 if self._readers == 1 else _EMPTY_EPOCHS * self._readers):
            lost = ", ".join(f"{count} {reason}" for reason, count in sorted(self._lost.items()))
            raise InputError(
                f"reader {self._number} of {self._readers} found no sample to run in "
                f"{self._empty_epochs} epochs, up to epoch {epoch} (lost so far: "
                f"{lost or 'none'}). Add samples, or use another overflow than 'drop'."
            )

    def _at(self, epoch: int, item: int) -> list[Entry] | None:
        """The entries of an item; None past the end of the data."""
        try:
            samples = self._items.read(epoch, item)
        except SampleError as error:
            if not self._skip or self._items.failed:
                raise
            self._skipped(error)
            return []
        if samples is None:
            return None
        if len(samples) == 1:
            return self._readable(epoch, *samples[0])
        return [
            entry
            for sample_id, sample in samples
            for entry in self._readable(epoch, sample_id, sample)
        ]

    def _readable(self, epoch: int, sample_id: int, sample: Sample) -> list[Entry]:
        """The entries of one sample; none if it is unreadable and may be skipped."""
        try:
            return self._entries(epoch, sample_id, sample)
        except SampleError as error:
            if not self._skip:
                raise
            self._skipped(error)
            return []

    def _restored(self, state: ReaderState) -> list[Entry]:
        """The pool of a state. Reads in order of items, which is cheap for every source."""
        keys: dict[tuple[int, int], list[Waiting]] = {}
        for key in state.waiting:
            keys.setdefault((key[0], key[1]), []).append(key)
        found: dict[Waiting, list[Entry]] = {}
        for epoch, sample_id in sorted(keys, key=lambda s: (s[0], item_and_part(s[1]))):
            try:
                found |= self._again(keys[epoch, sample_id], state.cuts or (self._batcher.cut,))
            except SampleError as error:
                if not self._skip or self._items.failed:
                    raise
                self._skipped(error)
        return [entry for key in state.waiting for entry in found.get(key, ())]

    def _again(self, keys: list[Waiting], cuts: Sequence[Cut]) -> dict[Waiting, list[Entry]]:
        """The entries of segments of a sample that this or another reader has read before. They
        are cut again if they no longer fit."""
        epoch, sample_id = keys[0][:2]
        sample = self._items.again(epoch, sample_id)
        length = self._length(sample_id, sample)
        usual = pieces_of(self._batcher.cut, length)
        found: dict[Waiting, list[Entry]] = {}
        for key in keys:
            pieces = self._batcher.cut.again(piece_of(key, length, cuts))
            if pieces is None:
                raise SampleError(refusal(sample_name(sample_id), length, self._batcher.recipe))
            if not pieces or pieces[-1].end < piece_of(key, length, cuts).end:
                self._lose("truncated" if pieces else "dropped")
            found[key] = []
            for piece in pieces:
                entry = self._entry(epoch, sample_id, sample, length, piece)
                if usual.get(piece.start) != piece:
                    entry = entry._replace(key=[epoch, sample_id, *piece])
                found[key].append(entry)
        return found

    def _length(self, sample_id: int, sample: Sample) -> int:
        try:
            length = int(self._length_of(sample))
        except Exception as error:
            raise unreadable(sample_id, error) from error
        if length < 1:
            raise SampleError(
                f"sample {sample_name(sample_id)} has length {length}; expected at least 1. Remove "
                f"it, or skip such samples with on_error='skip'."
            )
        return length

    def _entries(self, epoch: int, sample_id: int, sample: Sample) -> list[Entry]:
        """The entries of a sample, after `recipe.overflow` is applied."""
        length = self._length(sample_id, sample)
        longest, columns = self._batcher.longest, self._batcher.sample_columns
        if (longest is None or length <= longest) and not columns.names:
            key = [epoch, sample_id, 0]
            return [Entry(epoch, sample_id, 0, length, length, length, (), sample, key)]
        segments = self._batcher.segments(length)
        if segments is None:
            raise SampleError(refusal(sample_name(sample_id), length, self._batcher.recipe))
        end = sum(size for _, size in segments)
        entries = [
            self._entry(epoch, sample_id, sample, length, Piece(start, size, end))
            for start, size in segments
        ]
        if not entries or entries[0].end < length:
            self._lose("truncated" if entries else "dropped")
        return entries

    def _entry(
        self, epoch: int, sample_id: int, sample: Sample, length: int, piece: Piece
    ) -> Entry:
        try:
            columns = self._batcher.sample_columns
            return entry_of(epoch, sample_id, sample, length, piece, columns)
        except SampleError:
            raise
        except Exception as error:
            raise unreadable(sample_id, error) from error

    def _skipped(self, error: SampleError) -> None:
        """Count a sample that is skipped; warn of the first, which may be due to a bug."""
        if self._first_error is None:
            self._first_error = cause_of(error)
            warnings.warn(
                f"skipping unreadable samples. The first: {self._first_error}", stacklevel=2
            )
        self._lose("skipped")

    def _check_skipped(self) -> None:
        """Raise if every item so far was skipped, unless these are few of many readers' items."""
        few = self._readers > 1 and self._tried < _FEW
        if self._first_error is not None and not self._usable and not few:
            raise InputError(
                f"reader {self._number} of {self._readers} skipped all of the {self._tried} items "
                f"that it read. The first error: {self._first_error}"
            )

    def _lose(self, reason: str) -> None:
        self._lost[reason] = self._lost.get(reason, 0) + 1


def _distinct(
    micro: MicroBatch, taken: list[Entry], owners: dict[int, tuple[int, int]]
) -> tuple[MicroBatch, list[Entry]]:
    """Renumber samples so that no two different samples of a step have the same id.

    The id of a sample is its position or item, and two epochs may have different samples of one:
    of a sequential source, or if the transform is told the epoch. The later one gets the id of a
    further sample of its item. `owners` maps the ids used in the step so far to (epoch, original
    id).
    """
    sample_ids = []
    for entry in taken:
        sample_id, owner = entry.sample_id, (entry.epoch, entry.sample_id)
        while owners.setdefault(sample_id, owner) != owner:
            sample_id += MOST_ITEMS
        sample_ids.append(sample_id)
    if sample_ids == [entry.sample_id for entry in taken]:
        return micro, taken
    segments = replace(micro.segments, sample=np.array(sample_ids, np.int64))
    renamed = [entry._replace(sample_id=i) for entry, i in zip(taken, sample_ids, strict=True)]
    return replace(micro, segments=segments), renamed


def warn_lost(lost: Mapping[str, int], reader: PoolReader) -> None:
    """Warn of samples that were lost after the last step."""
    counts = ", ".join(f"{n} {reason}" for reason, n in sorted(lost.items()))
    if counts:
        warnings.warn(
            f"reader {reader.number} lost samples after its last step: {counts}. They are not in "
            f"`lost` of any step.",
            stacklevel=3,
        )
