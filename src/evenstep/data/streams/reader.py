"""PoolReader: one reader's pool. Reads its share, forms micro-batches, knows where it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from evenstep.core.identity import MOST_ITEMS, item_and_part, sample_name
from evenstep.core.micro_batch import MicroBatch
from evenstep.core.rounding import divided_up
from evenstep.data.sources.source import Sample, unreadable
from evenstep.data.streams.epoch_source import EpochSource
from evenstep.data.streams.pool import Entry, Measure, PoolBatcher, entries_of, micro_batch
from evenstep.data.streams.remaining import ReaderState, RemainingEpoch, merged
from evenstep.errors import InputError, SampleError
from evenstep.planning.overflow import refusal

_PATIENCE = 16  # epochs for each shard, after which a lucky share is not to be hoped for


class PoolReader:
    """Reads its share of the agenda into a pool and takes micro-batches from it.

    Everything it does follows from `state`: another shard made from the same state goes on in
    the very same way.
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
        self._chapters = list(state.chapters)
        self._shard, self._shards, self._read = state.shard, state.shards, state.read
        self._fruitful = True  # of what came before this state nothing is known
        self._barren = 0
        self._ended = False
        self._lost, self._told = dict(state.lost), dict(state.lost)
        self._waiting = self._restored(state)
        self._tokens = sum(entry.length for entry in self._waiting)

    @property
    def number(self) -> int:
        """Which of all shards this is."""
        return self._shard

    def newly_lost(self) -> dict[str, int]:
        """What went missing since this was asked last, or since the state, by reason."""
        before, self._told = self._told, dict(self._lost)
        new = {reason: count - before.get(reason, 0) for reason, count in self._told.items()}
        return {reason: count for reason, count in new.items() if count}

    def state_dict(self) -> dict[str, Any]:
        """Where the shard is now: `ReaderState` as plain data."""
        return {
            "chapters": [chapter.to_list() for chapter in self._chapters],
            "read": self._read,
            "waiting": [entry.piece for entry in self._waiting],
            "lost": dict(self._lost),
        }

    @property
    def epoch(self) -> int:
        """The epoch of the oldest sample that waits, or of the next to be read."""
        return self._waiting[0].epoch if self._waiting else self._chapters[0].epoch

    def step(self, number: int) -> tuple[list[MicroBatch], dict[int, Sample]] | None:
        """The micro-batches of a step and their samples; None when nothing is left."""
        micro_batches: list[MicroBatch] = []
        samples: dict[int, Sample] = {}
        owners: dict[int, tuple[int, int]] = {}
        while len(micro_batches) < self._batcher.micro_batches:
            self._fill()
            if not self._waiting:
                break
            micro, taken = self._batcher.take(self._waiting, number)
            if self._items.count is None:
                micro, taken = _told_apart(micro, taken, owners)
            micro_batches.append(micro)
            for entry in taken:
                samples[entry.number] = entry.sample
                self._tokens -= entry.length
        if not micro_batches:
            return None
        missing = self._batcher.micro_batches - len(micro_batches)
        if missing:
            micro_batches += [micro_batch([], self._batcher.recipe)] * missing
        return micro_batches, samples

    def _fill(self) -> None:
        waiting, samples, enough = self._waiting, self._batcher.pool.samples, self._batcher.enough
        while len(waiting) < samples or self._tokens < enough:
            found = self._next()
            if found is None:
                return
            for entry in found:
                waiting.append(entry)
                self._tokens += entry.length

    def _next(self) -> list[Entry] | None:
        """The entries of the next element of the agenda; None at its end."""
        while not self._ended:
            chapter = self._chapters[0]
            index = self._shard + self._shards * self._read
            element = chapter[index]
            entries: list[Entry] | None
            if element is None:
                entries = None
            elif isinstance(element, int):
                entries = self._at(chapter, index, element)
                behind = chapter.span_end(index) if entries is None else None
                if behind is not None:  # the data ends here, but the next span may lie before it
                    self._read = divided_up(behind - self._shard, self._shards)
                    continue
            else:
                number, start = element
                entries = [e for e in self._again(chapter.epoch, number) if e.start == start]
            if entries is not None:
                self._read += 1
                self._fruitful = self._fruitful or len(entries) > 0
                return entries
            self._turn_over(chapter)
        return None

    def _turn_over(self, chapter: RemainingEpoch) -> None:
        """Go on to the next chapter, or to a new epoch where there is no end."""
        if len(self._chapters) == 1 and not self._endless:
            self._ended = True
            return
        if len(self._chapters) == 1:
            self._barren = 0 if self._fruitful else self._barren + 1
            self._check_hope(chapter.epoch)
            self._chapters.append(RemainingEpoch.whole(chapter.epoch + 1, self._items.count))
            self._fruitful = False
        del self._chapters[0]
        self._read = 0

    def _check_hope(self, epoch: int) -> None:
        """Raise where no sample will ever come. Another epoch may give another share."""
        if not self._barren:
            return
        if self._read == 0:
            raise InputError(
                f"shard {self._shard} of {self._shards} found no sample in epoch {epoch}, and it "
                f"never will: there are fewer items than ranks x workers. Use fewer workers, or "
                f"more data."
            )
        if self._barren >= (1 if self._shards == 1 else _PATIENCE * self._shards):
            lost = ", ".join(f"{count} {reason}" for reason, count in sorted(self._lost.items()))
            raise InputError(
                f"shard {self._shard} of {self._shards} found no sample that could run in "
                f"{self._barren} whole epochs, up to {epoch} (so far: {lost or 'none lost'}), so "
                f"the stream would never go on. Give it samples, or another overflow than 'drop'."
            )

    def _at(self, chapter: RemainingEpoch, index: int, position: int) -> list[Entry] | None:
        """The entries of the item at a position; None behind the end of the data."""
        stride = chapter.stride(index, self._shards)
        try:
            samples = self._items.read(chapter.epoch, position, stride)
        except SampleError:
            if not self._skip or self._items.failed:
                raise
            self._lose("skipped")
            return []
        if samples is None:
            return None
        if len(samples) == 1:
            return self._readable(chapter.epoch, *samples[0])
        return [
            entry
            for number, sample in samples
            for entry in self._readable(chapter.epoch, number, sample)
        ]

    def _readable(self, epoch: int, number: int, sample: Sample) -> list[Entry]:
        """The pieces of a sample; none of one that may be skipped, however many share its item."""
        try:
            return self._entries(epoch, number, sample)
        except SampleError:
            if not self._skip:
                raise
            self._lose("skipped")
            return []

    def _again(self, epoch: int, number: int) -> list[Entry]:
        """The pieces of a sample that was read before, on this shard or another; none if it can
        no longer be read and may be skipped."""
        before = dict(self._lost)
        try:
            entries = self._entries(epoch, number, self._items.again(epoch, number))
        except SampleError:
            if not self._skip or self._items.failed:
                raise
            self._lose("skipped")
            return []
        self._lost = before  # counted when it was first read
        return entries

    def _restored(self, state: ReaderState) -> list[Entry]:
        """The pool as it was. Read in order of items, which is cheap for any source."""
        samples = {(epoch, number) for epoch, number, _ in state.waiting}
        found = {
            (epoch, number, entry.start): entry
            for epoch, number in sorted(samples, key=lambda s: (s[0], item_and_part(s[1])))
            for entry in self._again(epoch, number)
        }
        return [found[piece] for piece in state.waiting if piece in found]

    def _entries(self, epoch: int, number: int, sample: Sample) -> list[Entry]:
        """The pieces of a sample, by what is done with over-long ones."""
        try:
            length = int(self._length_of(sample))
        except Exception as error:
            raise unreadable(number, error) from error
        if length < 1:
            raise SampleError(
                f"sample {sample_name(number)} has length {length}, so there is nothing to run. "
                f"Remove it, or leave such samples out with on_error='skip'."
            )
        longest, counts = self._batcher.longest, self._batcher.pool.loss_tokens is not None
        if (longest is None or length <= longest) and not counts:
            piece = [epoch, number, 0]
            return [Entry(epoch, number, 0, length, length, length, length - 1, sample, piece)]
        segments = self._batcher.segments(length)
        if segments is None:
            raise SampleError(refusal(sample_name(number), length, self._batcher.recipe))
        try:
            entries = entries_of(epoch, number, sample, length, segments)
        except Exception as error:
            raise unreadable(number, error) from error
        if not entries or entries[0].end < length:
            self._lose("truncated" if entries else "dropped")
        return entries

    def _lose(self, reason: str) -> None:
        self._lost[reason] = self._lost.get(reason, 0) + 1


def _told_apart(
    micro: MicroBatch, taken: list[Entry], owners: dict[int, tuple[int, int]]
) -> tuple[MicroBatch, list[Entry]]:
    """A micro-batch in which no two samples of its step have one number.

    A source that is read in order counts positions, and another epoch may have another sample at
    the same one. The later of two in one step is called as if it were a further part of its item.
    `owners` says which (epoch, number) is called how, so far in the step.
    """
    numbers = []
    for entry in taken:
        number, whose = entry.number, (entry.epoch, entry.number)
        while owners.setdefault(number, whose) != whose:
            number += MOST_ITEMS
        numbers.append(number)
    if numbers == [entry.number for entry in taken]:
        return micro, taken
    segments = replace(micro.segments, sample=np.array(numbers, np.int64))
    renamed = [entry._replace(number=n) for entry, n in zip(taken, numbers, strict=True)]
    return replace(micro, segments=segments), renamed


def fresh(shard: int, shards: int, epoch: int, count: int | None) -> ReaderState:
    """The state of a shard that has read nothing yet."""
    return ReaderState(shard=shard, shards=shards, chapters=(RemainingEpoch.whole(epoch, count),))


def redealt(states: list[ReaderState], shard: int, shards: int, count: int | None) -> ReaderState:
    """The state of a new shard, when what `states` had left is shared anew by `shards`.

    What waited in their pools waits in the new ones, so that a state never holds more than its own
    shard's share of it.
    """
    chapters = merged(states, count)
    waiting = [(c.epoch, number, start) for c in chapters for number, start in c.pieces]
    lost = {
        reason: sum(state.lost.get(reason, 0) for state in states)
        for reason in sorted({reason for state in states for reason in state.lost})
    }
    return ReaderState(
        shard=shard,
        shards=shards,
        chapters=tuple(RemainingEpoch(chapter.epoch, (), chapter.spans) for chapter in chapters),
        waiting=tuple(waiting[shard::shards]),
        lost=lost if shard == 0 else {},
    )
