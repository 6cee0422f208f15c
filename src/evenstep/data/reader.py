"""PoolReader: reads its share of a source into a pool and forms micro-batches from it.

EpochSource  any source by epoch and position; ItemLengths: with lengths in place of samples
PoolBatcher  what leaves a pool together
PoolReader   fills the pool and takes micro-batches from it, a step at a time
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, cast

import numpy as np

from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import MOST_ITEMS, IntArray, item_and_part, rounded_up, sample_name
from evenstep.core.recipe import Recipe
from evenstep.core.text import MOST
from evenstep.data.order import EpochOrder, ReaderState, RemainingEpoch, Waiting
from evenstep.data.pool import (
    ColumnOf,
    Entry,
    Measure,
    OverflowPolicy,
    Pool,
    SampleColumns,
    Segment,
    micro_batch,
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
from evenstep.planning.pool import Room, seed_sample_first, select
from evenstep.planning.units import refusal

# Items --------------------------------------------------------------------------------------------


class EpochSource:
    """The items of an epoch by position; reads them, and samples that were read before.

    A source with random access is read in the epoch's order. A sequential source is read in its
    own order, and opened again to go back.

    count     the number of items; None if it is unknown
    measured  whether the lengths of all items are known
    seeded    whether samples differ between epochs
    failed    whether the source's iterator raised. It is finished then: nothing can be skipped
    """

    def __init__(self, source: Source, seed: int, shuffle: bool, measured: bool = False) -> None:
        self.source, self.seed, self.shuffle = source, seed, shuffle
        self.count = len(source) if has_random_access(source) else None
        self.measured, self.seeded, self.failed = measured, is_seeded(source), False
        self._open: Iterator[Any] | None = None
        self._at = (-1, -1)  # epoch, position of the next raw item
        self._again_for = (-1, -1)  # epoch, item that was read again last
        self._again: list[tuple[int, Sample]] = []

    def items(self, epoch: int, positions: IntArray) -> list[int]:
        """The items at these positions."""
        if self.count is not None:
            order = EpochOrder(count=self.count, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
            positions = order.samples(positions)
        items: list[int] = positions.tolist()
        return items

    def read(self, epoch: int, item: int) -> list[tuple[int, Sample]] | None:
        """(sample id, sample) of every sample of an item; None past an end that was unknown."""
        draw, raw = Draw(item, epoch, self.seed) if self.seeded else None, None
        if self.count is None:
            try:
                raw = self._raw(epoch, item)
            except StopIteration:
                self._open = None
                return None
        return read_samples(self.source, item, raw, draw)

    def again(self, epoch: int, sample_id: int) -> Sample:
        """A sample that was read before. Consecutive samples of one item are read once."""
        item, part = item_and_part(sample_id)
        if self._again_for != (epoch, item):
            self._again = self.read(epoch, item) or []
            self._again_for = (epoch, item)
        if part >= len(self._again):
            raise CursorError(
                f"item {item} now has {len(self._again)} samples, but the cursor names sample "
                f"{part} of it, so the data has changed. Restore the data, or start without the "
                f"cursor."
            )
        return self._again[part][1]

    def _raw(self, epoch: int, position: int) -> Any:
        """The raw item at a position of a sequential source; StopIteration past its end."""
        if self._open is None or self._at[0] != epoch or self._at[1] > position:
            self._open = cast("SequentialSource", self.source).open(position, epoch)
            self._at = (epoch, position)
        try:
            for before in range(self._at[1], position + 1):
                raw = next(self._open)
                self._at = (epoch, before + 1)
        except StopIteration:
            raise
        except BaseException:
            self.failed = True
            raise
        return raw


class ItemLengths(EpochSource):
    """The same with lengths in place of samples. Reads each item once, whichever reader asks.

    Lengths that the source knows are not read. Sequential sources are read anew in every epoch.
    """

    def __init__(self, items: EpochSource, length_of: Measure) -> None:
        super().__init__(items.source, items.seed, items.shuffle, items.measured)
        self._length_of = length_of
        self._known: dict[tuple[int, int], list[tuple[int, int]] | SampleError | None] = {}

    def read(self, epoch: int, item: int) -> list[tuple[int, Sample]] | None:
        """(sample id, length) of every sample of an item; None past the end."""
        if self.measured:
            lengths = cast("MeasuredSource", self.source).lengths_of(np.array([item]))
            return [(item, int(lengths[0]))]
        first, key = item, epoch if self.seeded else 0
        if self.count is None:  # also read the items before, which other readers ask for
            key = epoch
            if (epoch, 0) not in self._known:
                self._known.clear()
            first = len(self._known)
        for each in range(first, item + 1):
            if (key, each) not in self._known:
                self._known[key, each] = self._measure(epoch, each)
        samples = self._known[key, item]
        if isinstance(samples, SampleError):
            raise samples
        return samples

    def _measure(self, epoch: int, item: int) -> list[tuple[int, int]] | SampleError | None:
        try:
            samples = super().read(epoch, item)
        except SampleError as error:
            return error
        return None if samples is None else [(name, self._length(s)) for name, s in samples]

    def _length(self, sample: Sample) -> int:
        """The length, or 0 for a sample that a reader will refuse or skip for its own reason."""
        try:
            return int(self._length_of(sample))
        except Exception:
            return 0


# Micro-batches of a pool --------------------------------------------------------------------------


_PLANNED = ("balance", "equal_sizes", "equal_tokens", "second_work", "min_saving", "groups")


def changed_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults.

    >>> changed_fields(Pool(samples=64, alone=9))
    {'alone': 9}
    """
    changed = {}
    for each in fields(value):
        default = each.default
        if default is MISSING and each.default_factory is not MISSING:
            default = each.default_factory()
        if getattr(value, each.name) != default:
            changed[each.name] = getattr(value, each.name)
    return changed


class PoolBatcher:
    """Forms the micro-batches of a recipe from pool entries. Uses only their lengths.

    strategy         that of the pool, or the layout's default
    samples, enough  least number of samples and of tokens in the pool before a micro-batch is taken
    longest          the longest segment that fits into a micro-batch; None if any does
    policy           how over-long samples become segments
    micro_batches    per step
    sample_columns   what samples take of the limited columns
    """

    def __init__(
        self, recipe: Recipe, pool: Pool, columns: Mapping[str, ColumnOf] | None = None
    ) -> None:
        layout = recipe.layout
        self.recipe, self.pool = recipe, pool
        default_strategy = layout.pool_strategies[0]
        self.strategy: str = pool.strategy or default_strategy
        self.micro_batches = recipe.steps.micro_batches or 1
        self._check()
        self.sample_columns = SampleColumns(recipe, {} if columns is None else columns)
        self.samples = max(pool.samples, layout.samples or 0)
        budget = 2 * (layout.budget or 0) if self.strategy == default_strategy else 0
        self.enough = budget if pool.tokens is None else pool.tokens
        self.longest = recipe.longest_segment
        self.policy = OverflowPolicy(self.longest, recipe.overflow)
        self._alignment = recipe.topology.alignment
        self._full_room = self._room(pool.warmup_steps)

    def _check(self) -> None:
        """Raise if the recipe or the strategy cannot be used with a pool."""
        recipe, layout = self.recipe, self.recipe.layout
        if self.strategy not in layout.pool_strategies:
            raise ConfigError(
                f"unknown pool.strategy {self.strategy!r} for {layout.kind} rows; expected one of: "
                f"{', '.join(layout.pool_strategies)}."
            )
        changed = changed_fields(recipe)
        for name, value in {**layout.options, **changed}.items():
            if name in layout.options or name in _PLANNED:
                raise ConfigError(
                    f"{name}={value!r} has no effect with a pool. Remove it, or use a "
                    f"PlannedStream."
                )
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

    def entries(
        self, epoch: int, sample_id: int, sample: Sample, length: int, segment: Segment
    ) -> list[Entry]:
        """The entries of a segment of a sample of this length, divided if it does not fit; [] if
        it is dropped."""
        parts, columns = self.policy.divide(segment), self.sample_columns
        if parts is None:
            raise SampleError(refusal(sample_name(sample_id), length, self.recipe))
        entries = []
        for part in parts:
            start, size, end = part
            taken, key = columns.of(sample_id, sample, part), [epoch, sample_id, start]
            entries.append(Entry(epoch, sample_id, start, size, length, end, taken, sample, key))
        return entries

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
        return micro_batch(layout.rows_of(packs), self.recipe), taken

    def _pack(self, waiting: list[Entry], step: int, left: list[int], ending: bool) -> list[Entry]:
        """Remove the next pack; `left` is what is left of each column. One column is a part of the
        selection. Of several, and with a cost, what would be selected without them comes first."""
        lengths = np.array([entry.length for entry in waiting], np.int64)
        if self._alignment > 1:
            lengths = rounded_up(lengths, self._alignment)
        room = self._full_room if self.pool.warmup_tokens is None else self._room(step)
        if self.pool.alone is not None:  # as if it filled the room
            alone = np.array([entry.length >= self.pool.alone for entry in waiting])
            lengths = np.where(alone, np.maximum(lengths, room.capacity), lengths)
        limits = len(left) + (self.recipe.limits.cost is not None)
        if not limits:
            chosen = self._select(lengths, room, None, ending)
        else:
            columns = np.array([entry.columns for entry in waiting], np.int64)
            columns = columns.reshape(len(waiting), len(left))
            shares = np.minimum(self.sample_columns.shares, np.maximum(left, 1))
            if limits == 1 and left:
                room = replace(room, counted=int(shares[0]))
                chosen = self._select(lengths, room, columns[:, 0], ending)
            else:
                chosen = self._select(lengths, room, None, ending)
                chosen = self._within_limits(lengths, room, columns, shares, chosen)
        pack = [waiting[at] for at in chosen]
        for at in sorted(chosen, reverse=True):
            del waiting[at]
        return pack

    def _within_limits(
        self, lengths: IntArray, room: Room, columns: IntArray, shares: IntArray, first: list[int]
    ) -> list[int]:
        """Of the samples to try `first`, then of the others, each that still fits. The very first
        always does.

        `columns` are samples x columns; a pack may hold `shares` of them.
        """
        recipe, layout = self.recipe, self.recipe.layout
        used_of, caps = columns.astype(np.float64), shares.astype(np.float64)
        in_rows = "cost" in layout.measured(recipe)  # padded: cost bounds the number of rows
        if recipe.limits.cost is not None and not in_rows:
            used_of = np.column_stack((used_of, layout.segment_costs(recipe, lengths)))
            caps = np.append(caps, layout.cost_share(recipe) * (1 + 1e-12))
        most_with = layout.pack_bounds(recipe, lengths)[1]  # samples in a pack with this one
        seed, *order = first + np.delete(np.arange(len(lengths)), first).tolist()
        chosen, used = [seed], used_of[seed].copy()
        slots = widest = int(lengths[seed])
        most = min(int(most_with[seed]), len(lengths) if room.most is None else room.most)
        for at in order:
            if len(chosen) >= most:
                break
            fewer = min(most, int(most_with[at]))
            width, total = max(widest, int(lengths[at])), slots + int(lengths[at])
            if in_rows:
                total = rounded_up(width, room.unit) * (len(chosen) + 1)
            fits = total <= room.capacity and len(chosen) < fewer
            if fits and (used + used_of[at] <= caps).all():
                chosen.append(at)
                used += used_of[at]
                slots, widest, most = slots + int(lengths[at]), width, fewer
        return chosen

    def _select(
        self, lengths: IntArray, room: Room, counted: IntArray | None, ending: bool
    ) -> list[int]:
        """Indices in the pool of the next pack. The first is the oldest, or the seed."""
        chosen: list[int]
        if self.strategy != "fullest":
            chosen = select(self.strategy, lengths, room, counted).tolist()
            return chosen
        order = seed_sample_first(lengths, ending)
        counts = None if counted is None else counted[order]
        chosen = order[select(self.strategy, lengths[order], room, counts)].tolist()
        return chosen

    def _room(self, step: int) -> Room:
        """Limits of one pack in a step."""
        layout, unit = self.recipe.layout, self.recipe.width_unit
        packs = layout.packs_per_micro_batch
        slots, rounding = layout.room(self.recipe)
        budget = self.pool.budget((MOST if slots is None else slots) * packs, step) // packs
        return Room(
            capacity=max(unit, budget // unit * unit),
            unit=rounding,
            most=None if layout.samples is None else layout.samples // packs,
        )


# The reader ---------------------------------------------------------------------------------------


_AHEAD = 256  # items that are looked up at once
_FEW = 16  # items that may all be unreadable, if other readers have more
_EMPTY_EPOCHS = 16  # per reader: give up after so many epochs without a sample that can run


class PoolReader:
    """Reads its share of the remaining epochs into a pool and takes micro-batches from it.

    Deterministic: two readers with the same state produce the same micro-batches. `number` says
    which of the ranks x workers this is.
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
        self._endless, self._may_skip = endless, skip
        self._epochs = list(state.epochs)
        self.number, self._readers, self._read = state.reader, state.readers, state.read
        self._coming: list[int] = []  # the next items of the current epoch, the last one first
        self._any_sample = True  # in the current epoch; unknown before this state, so assumed
        self._empty_epochs = 0
        self._ended = False
        # Whether any item could be used; assumed if others were read before this state.
        self._usable = state.read > 0 or len(state.waiting) > 0 or state.epochs[0].changes != ()
        self._tried = 0
        self._first_error: str | None = None
        self._lost, self._new = dict(state.lost), dict[str, int]()  # in all, and not yet reported
        self._left = state.left
        self._waiting = self._restored(state)
        self._tokens = sum(entry.length for entry in self._waiting)

    def state(self, step: int) -> ReaderState:
        """The current state; `step` is the number of this reader's next step."""
        return ReaderState(
            reader=self.number,
            readers=self._readers,
            epochs=tuple(self._epochs),
            read=self._read,
            waiting=tuple([entry.key for entry in self._waiting]),
            policies=(self._batcher.policy,),
            lost=dict(self._lost),
            step=step,
            left=self._left,
        )

    def newly_lost(self) -> dict[str, int]:
        """Number of samples lost since the last call, or since the state, by reason."""
        new, self._new = self._new, {}
        return new

    @property
    def epoch(self) -> int:
        """The epoch of the oldest sample in the pool, or of the next one to be read."""
        return self._waiting[0].epoch if self._waiting else self._epochs[0].epoch

    # Micro-batches -----------------------------------------------------------------------------

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
        batcher, waiting = self._batcher, self._waiting
        if self._left is None or not self._ended:
            return batcher.take(waiting, number, self._ended)
        # Later steps need a sample each. A full step has `micro_batches` micro-batches.
        later = (self._left - 1) * batcher.micro_batches - before
        most = max(1, len(waiting) - max(0, later))
        micro, taken = batcher.take(list(waiting), number, ending=True)
        if len(taken) > most:
            micro, taken = batcher.take(taken[:most], number, ending=True)
        gone = {id(entry) for entry in taken}
        waiting[:] = [entry for entry in waiting if id(entry) not in gone]
        return micro, taken

    # Reading -----------------------------------------------------------------------------------

    def _fill(self) -> None:
        waiting, samples, enough = self._waiting, self._batcher.samples, self._batcher.enough
        while len(waiting) < samples or self._tokens < enough:
            entries = self._next()
            if entries is None:
                return
            for entry in entries:
                waiting.append(entry)
                self._tokens += entry.length

    def _next(self) -> list[Entry] | None:
        """The entries of the next item of the remaining epochs; None at the end."""
        while not self._ended:
            remaining, skipped = self._epochs[0], self._lost.get("skipped", 0)
            if not self._coming:
                places = remaining.positions(self.number, self._readers, self._read, _AHEAD)
                self._coming = self._items.items(remaining.epoch, places)[::-1]
            entries = self._at(remaining.epoch, self._coming[-1]) if self._coming else None
            if entries is None:
                self._next_epoch(remaining.epoch)
                continue
            self._coming.pop()
            self._read += 1
            self._tried += 1
            self._any_sample = self._any_sample or len(entries) > 0
            if not self._usable:
                self._usable = len(entries) > 0 or self._lost.get("skipped", 0) == skipped
            return entries
        return None

    def _next_epoch(self, epoch: int) -> None:
        """Continue with the next remaining epoch, or with a new one if the stream is endless."""
        few = self._readers > 1 and self._tried < _FEW
        if self._first_error is not None and not self._usable and not few:
            raise InputError(
                f"reader {self.number} of {self._readers} skipped all of the {self._tried} items "
                f"that it read. The first error: {self._first_error}"
            )
        if len(self._epochs) == 1 and not self._endless:
            self._ended = True
            return
        if len(self._epochs) == 1:
            self._empty_epochs = 0 if self._any_sample else self._empty_epochs + 1
            self._check_any_sample(epoch)
            self._epochs.append(RemainingEpoch(epoch + 1, self._items.count))
            self._any_sample = False
        del self._epochs[0]
        self._read, self._coming = 0, []

    def _check_any_sample(self, epoch: int) -> None:
        """Raise if no sample can be expected. A shuffled epoch may give this reader others."""
        if not self._empty_epochs:
            return
        if self._read == 0:
            raise InputError(
                f"reader {self.number} of {self._readers} has no samples in epoch {epoch}: there "
                f"are fewer items than ranks x workers. Use fewer workers, or more data."
            )
        if self._empty_epochs >= (1 if self._readers == 1 else _EMPTY_EPOCHS * self._readers):
            lost = ", ".join(f"{count} {reason}" for reason, count in sorted(self._lost.items()))
            raise InputError(
                f"reader {self.number} of {self._readers} found no sample to run in "
                f"{self._empty_epochs} epochs, up to epoch {epoch} (lost so far: "
                f"{lost or 'none'}). Add samples, or use another overflow than 'drop'."
            )

    def _at(self, epoch: int, item: int) -> list[Entry] | None:
        """The entries of an item; None past the end of the data."""
        try:
            samples = self._items.read(epoch, item)
        except SampleError as error:
            self._skip(error)
            return []
        if samples is None:
            return None
        entries = []
        for sample_id, sample in samples:
            try:
                entries += self._entries(epoch, sample_id, sample)
            except SampleError as error:
                self._skip(error)
        return entries

    def _entries(self, epoch: int, sample_id: int, sample: Sample) -> list[Entry]:
        """The entries of a sample, after `recipe.overflow` is applied."""
        length, longest = self._length(sample_id, sample), self._batcher.longest
        if (longest is None or length <= longest) and not self._batcher.sample_columns.names:
            key = [epoch, sample_id, 0]  # the usual case; that below takes longer
            return [Entry(epoch, sample_id, 0, length, length, length, (), sample, key)]
        return self._divided(epoch, sample_id, sample, length, Segment(0, length, length))

    def _divided(
        self, epoch: int, sample_id: int, sample: Sample, length: int, segment: Segment
    ) -> list[Entry]:
        """The entries of a segment of a sample of this length, divided if it does not fit."""
        try:
            entries = self._batcher.entries(epoch, sample_id, sample, length, segment)
        except SampleError:
            raise
        except Exception as error:
            raise unreadable(sample_id, error) from error
        if not entries or entries[-1].end < segment.end:
            self._lose("truncated" if entries else "dropped")
        return entries

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

    # Resuming ----------------------------------------------------------------------------------

    def _restored(self, state: ReaderState) -> list[Entry]:
        """The pool of a state. Reads in order of items, which is cheap for every source."""
        keys: dict[tuple[int, int], list[Waiting]] = {}
        for key in state.waiting:
            keys.setdefault((key[0], key[1]), []).append(key)
        policies = state.policies or (self._batcher.policy,)
        entries: dict[tuple[int, ...], list[Entry]] = {}
        for sample in sorted(keys, key=lambda sample: (sample[0], item_and_part(sample[1]))):
            try:
                entries |= self._again(*sample, keys[sample], policies)
            except SampleError as error:
                self._skip(error)
        return [entry for key in state.waiting for entry in entries.get(tuple(key), ())]

    def _again(
        self, epoch: int, sample_id: int, keys: list[Waiting], policies: Sequence[OverflowPolicy]
    ) -> dict[tuple[int, ...], list[Entry]]:
        """The entries of segments of a sample that this or another reader has read before."""
        sample = self._items.again(epoch, sample_id)
        length = self._length(sample_id, sample)
        usual = set(self._batcher.policy.segments(length) or ())
        entries: dict[tuple[int, ...], list[Entry]] = {}
        for key in keys:
            before = _segment_of(key, length, policies)
            entries[tuple(key)] = [
                entry if part in usual else entry._replace(key=[epoch, sample_id, *part])
                for entry in self._divided(epoch, sample_id, sample, length, before)
                for part in [Segment(entry.start, entry.length, entry.end)]
            ]
        return entries

    # Lost samples ------------------------------------------------------------------------------

    def _skip(self, error: SampleError) -> None:
        """Count a sample that is skipped, or raise if none may be. Warn of the first, which may be
        due to a bug."""
        if not self._may_skip or self._items.failed:
            raise error
        if self._first_error is None:
            self._first_error = cause_of(error)
            warnings.warn(
                f"skipping unreadable samples. The first: {self._first_error}", stacklevel=2
            )
        self._lose("skipped")

    def _lose(self, reason: str) -> None:
        for counts in (self._lost, self._new):
            counts[reason] = counts.get(reason, 0) + 1


def _segment_of(key: Waiting, length: int, policies: Sequence[OverflowPolicy]) -> Segment:
    """The tokens of a waiting segment, given the length of its sample."""
    if len(key) == 5:
        segments = [Segment(*key[2:])]
    else:
        segments = policies[key[3] if len(key) == 4 else 0].segments(length) or []
    for segment in segments:
        if segment.start == key[2] and segment.end <= length:
            return segment
    raise CursorError(
        f"the cursor names tokens of sample {sample_name(key[1])} from token {key[2]} on, but it "
        f"has {length} tokens now, so the data has changed. Restore the data, or start without the "
        f"cursor."
    )


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


def common_steps(counts: IntArray, workers: int) -> list[int]:
    """The steps of each reader such that all ranks make as many as the longest one.

    Further steps of a rank go to its reader with the fewest.

    >>> common_steps(np.array([5, 3, 4, 4, 2, 3]), workers=2)
    [5, 3, 4, 4, 4, 4]
    """
    steps = counts.reshape(-1, workers).copy()
    most = int(steps.sum(axis=1).max(initial=0))
    for rank in steps:
        while rank.sum() < most:
            rank[np.argmin(rank)] += 1
    return [int(count) for count in steps.reshape(-1)]
