"""RemainingEpoch and ReaderState: what readers have not read yet, as arithmetic, not as lists.

Reader r of R takes elements r, r + R, r + 2R, ... of what remains of an epoch: a few waiting
segments, then spans of positions. Every R-th element of a span is a span again, so the remaining
epoch stays a short list after any number of changes of R.

    8 samples, 2 readers                          (0, 1, 8)                  reader 1: 1 3 5 7
    reader 0 has read 3 of them, reader 1 has 1   (3, 2, 2), (6, 1, 2)       left: 3 5, then 6 7

If the length of the data is unknown, its spans have no end. They come last and are interleaved,
so that positions only grow. When the end is found in one of them, nothing before it is missed in
another.

    3 readers, reader 0 is at the end             (7, 3, None), (8, 3, None)  left: 7 8 10 11 13 ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, inf
from typing import Any, TypeAlias

from evenstep.core.identity import item_and_part
from evenstep.core.rounding import divided_up, rounded_up
from evenstep.errors import CursorError

SegmentKey: TypeAlias = tuple[int, int]
"""(sample id, start) of a segment of a sample that was read."""
Span: TypeAlias = tuple[int, int, int | None]
"""(start, step, count): positions start, start + step, ...; no end if count is None."""


@dataclass(frozen=True, slots=True)
class RemainingEpoch:
    """What remains of one epoch: segments first, then positions.

    >>> remaining = RemainingEpoch(0, ((9, 0),), ((3, 2, 2), (6, 1, 2)))
    >>> [remaining[index] for index in range(6)]
    [(9, 0), 3, 5, 6, 7, None]
    """

    epoch: int
    segments: tuple[SegmentKey, ...] = ()
    spans: tuple[Span, ...] = ()
    _ends: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """For every span that has an end, the index after its last element."""

    def __post_init__(self) -> None:
        ends, end = [], len(self.segments)
        for _, _, count in self.spans:
            if count is not None:
                end += count
                ends.append(end)
        object.__setattr__(self, "_ends", tuple(ends))

    @classmethod
    def whole(cls, epoch: int, count: int | None) -> RemainingEpoch:
        """An epoch of which nothing has been read."""
        return cls(epoch, (), ((0, 1, count),))

    def __getitem__(self, index: int) -> SegmentKey | int | None:
        """Element `index`: a segment, a position, or None past the end."""
        if index < len(self.segments):
            return self.segments[index]
        at = bisect_right(self._ends, index)
        if at == len(self.spans):
            return None
        turn = index - self._begin(at)
        if at == len(self._ends):
            turn, which = divmod(turn, len(self.spans) - at)
            at += which
        start, step, _ = self.spans[at]
        return start + step * turn

    def stride(self, index: int, readers: int) -> int:
        """Likely distance between the positions of elements `index` and `index + readers`."""
        at = min(bisect_right(self._ends, index), len(self.spans) - 1)
        return self.spans[at][1] * readers

    def holds(self, index: int) -> bool:
        """Whether element `index` surely exists. False if the end of the data is unknown."""
        return len(self._ends) == len(self.spans) and self[index] is not None

    def span_end(self, index: int) -> int | None:
        """The first element after the span of element `index`; None if the span has no end."""
        at = bisect_right(self._ends, index)
        return self._ends[at] if at < len(self._ends) else None

    def _begin(self, at: int) -> int:
        return self._ends[at - 1] if at else len(self.segments)

    def rest(
        self, read: Sequence[int | None], waiting: Sequence[SegmentKey] = ()
    ) -> RemainingEpoch:
        """What remains after reader r has read `read[r]` of its elements (None: all of them).

        Elements that slower readers have not reached come first, then the untouched tail.
        """
        readers, segments, spans = len(read), list(waiting), list[Span]()
        unfinished = {reader: count for reader, count in enumerate(read) if count is not None}
        all_reading, unbounded = len(unfinished) == readers, len(self._ends) < len(self.spans)
        level = max(unfinished.values(), default=0) if all_reading or unbounded else None
        stop = None if level is None else readers * level
        for reader, count in unfinished.items():
            self._collect(reader + readers * count, readers, stop, segments, spans)
        if stop is not None and all_reading:
            self._collect(stop, 1, None, segments, spans)
        elif stop is not None:
            for reader in unfinished:
                self._collect(reader + stop, readers, None, segments, spans)
        return RemainingEpoch(self.epoch, tuple(segments), tuple(_unbounded_last(spans)))

    def _collect(
        self,
        first: int,
        stride: int,
        stop: int | None,
        segments: list[SegmentKey],
        spans: list[Span],
    ) -> None:
        """Add elements first, first + stride, ... below `stop`."""
        end: float = inf if stop is None else stop
        segments.extend(self.segments[first : int(min(end, len(self.segments))) : stride])
        closed = len(self._ends)
        for at, (start, step, _) in enumerate(self.spans[:closed]):
            begin, until = self._begin(at), min(end, self._ends[at])
            index = _next_of(first, stride, begin)
            if index < until:
                count = divided_up(int(until) - index, stride)
                spans.append((start + step * (index - begin), step * stride, count))
        turns = len(self.spans) - closed
        if turns:
            # Elements `round_` apart lie in the same span.
            round_ = turns // gcd(turns, stride) * stride
            begin = _next_of(first, stride, self._begin(closed))
            for index in range(begin, int(min(end, begin + round_)), stride):
                position = self[index]
                assert isinstance(position, int)
                left = None if stop is None else divided_up(stop - index, round_)
                spans.append((position, self.spans[closed][1] * (round_ // turns), left))

    def to_list(self) -> list[Any]:
        """Plain data."""
        return [self.epoch, [list(key) for key in self.segments], [list(s) for s in self.spans]]

    @classmethod
    def from_list(cls, data: Any) -> RemainingEpoch:
        """The inverse of `to_list`."""
        epoch, segments, spans = data
        return cls(
            epoch,
            tuple((sample_id, start) for sample_id, start in segments),
            tuple((start, step, count) for start, step, count in spans),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderState:
    """Position of one reader, and the contents of its pool.

    reader, readers  which of the ranks x workers this is, and how many there are
    epochs           what remains to be read; the first is being read
    read             number of elements of the first epoch that this reader has read
    waiting          (epoch, sample id, start) of the segments in the pool, oldest first
    lost             number of samples lost so far, by reason
    step             number of the next step as this reader counts. It determines a growing budget,
                     and runs ahead of the loader's count when other workers have ended
    """

    reader: int
    readers: int
    epochs: tuple[RemainingEpoch, ...]
    read: int = 0
    waiting: tuple[tuple[int, int, int], ...] = ()
    lost: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None

    @property
    def open_epochs(self) -> set[int]:
        """The numbers of all epochs with segments in the pool or elements to read."""
        return {remaining.epoch for remaining in self.epochs} | {
            epoch for epoch, _, _ in self.waiting
        }

    @property
    def goes_on(self) -> bool:
        """Whether this reader surely has more samples, in the pool or to be read."""
        current, *later = self.epochs
        ahead = current.holds(self.reader + self.readers * self.read)
        return bool(self.waiting) or ahead or any(epoch.holds(self.reader) for epoch in later)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without `reader` and `readers`, which the cursor holds."""
        data: dict[str, Any] = {
            "epochs": [remaining.to_list() for remaining in self.epochs],
            "read": self.read,
            "waiting": [list(key) for key in self.waiting],
            "lost": dict(self.lost),
        }
        return data if self.step is None else {**data, "step": self.step}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], reader: int, readers: int) -> ReaderState:
        """The inverse of `to_dict`."""
        try:
            return cls(
                reader=reader,
                readers=readers,
                epochs=tuple(RemainingEpoch.from_list(remaining) for remaining in data["epochs"]),
                read=int(data["read"]),
                waiting=tuple((int(e), int(n), int(start)) for e, n, start in data["waiting"]),
                lost={str(reason): int(count) for reason, count in data["lost"].items()},
                step=None if data.get("step") is None else int(data["step"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorError(
                f"the state of reader {reader} in the cursor is malformed ({error!r}). Use an "
                f"earlier checkpoint."
            ) from None


def merged(states: Sequence[ReaderState], count: int | None) -> tuple[RemainingEpoch, ...]:
    """What remains for all readers together, by epoch, to be shared by any number of readers.

    `count` is the number of items in an epoch, None if unknown.
    """
    states = sorted(states, key=lambda state: state.reader)
    current = [state.epochs[0].epoch for state in states]
    known = {remaining.epoch: remaining for state in states for remaining in state.epochs}
    waiting: dict[int, list[SegmentKey]] = {}
    for depth in range(max(len(state.waiting) for state in states)):  # the oldest of each reader
        for state in states:
            for epoch, sample_id, start in state.waiting[depth : depth + 1]:
                waiting.setdefault(epoch, []).append((sample_id, start))
    epochs = []
    for epoch in sorted({*range(min(current), max(current) + 1), *known, *waiting}):
        remaining = known.get(epoch)
        if remaining is None:
            # A reader has nothing left between its epochs; epochs after its last are untouched.
            begun = min(current) <= epoch
            passed = any(s.epochs[0].epoch < epoch < s.epochs[-1].epoch for s in states)
            remaining = (
                RemainingEpoch.whole(epoch, count)
                if begun and not passed
                else RemainingEpoch(epoch)
            )
        read = [
            None if now > epoch else state.read if now == epoch else 0
            for state, now in zip(states, current, strict=True)
        ]
        left = remaining.rest(read, waiting.get(epoch, ()))
        if count is None:  # going back is expensive, so read in order
            segments = sorted(left.segments, key=lambda key: (item_and_part(key[0]), key[1]))
            left = RemainingEpoch(
                epoch, tuple(segments), tuple(_unbounded_last(sorted(left.spans)))
            )
        epochs.append(left)
    return tuple(epochs)


def _next_of(first: int, stride: int, least: int) -> int:
    """The smallest of `first`, `first + stride`, ... that is at least `least`."""
    return first + max(0, rounded_up(least - first, stride))


def _unbounded_last(spans: list[Span]) -> list[Span]:
    """Spans with an end in the given order, then spans without, ordered by start."""
    closed = [span for span in spans if span[2] is not None]
    return closed + sorted((span for span in spans if span[2] is None), key=lambda span: span[0])
