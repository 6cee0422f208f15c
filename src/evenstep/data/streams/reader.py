"""PoolReader: reads its share of a source into a pool and forms micro-batches from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import MOST_ITEMS, item_and_part, sample_name
from evenstep.data.sources.source import Sample, cause_of, unreadable
from evenstep.data.streams.batcher import PoolBatcher, micro_batch
from evenstep.data.streams.cut import Cut, Piece, pieces_of
from evenstep.data.streams.epoch_source import EpochSource
from evenstep.data.streams.pool import Entry, Measure, entry_of
from evenstep.data.streams.reader_state import ReaderState, Waiting, piece_of
from evenstep.data.streams.remaining import RemainingEpoch
from evenstep.errors import InputError, SampleError
from evenstep.planning.overflow import refusal

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
