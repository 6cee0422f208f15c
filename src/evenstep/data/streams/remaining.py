"""Agenda: what a shard has yet to read, as arithmetic rather than lists.

PoolReader s of S takes every S-th element of what is left of an epoch, from element s on. What is left
is a few waiting pieces of samples and some spans of positions; every S-th element of a span is a
span again. So the rest of an epoch, after any number of changes of S, stays a short list.

    8 samples on 2 shards            spans (0, 1, 8)        shard 1 reads 1, 3, 5, 7
    shard 0 read 3, shard 1 read 1   spans (3, 2, 2), (6, 1, 2)   that is 3 5, then 6 7

Where nobody knows the end of the data, spans have none. They come last and take turns, so that
positions only grow: whoever finds the end in one of them has missed nothing in another.

    3 shards, of which shard 0 found the end    spans (7, 3, None), (8, 3, None)   7 8 10 11 13 ...
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

Piece: TypeAlias = tuple[int, int]
"""(sample number, start): a sample that was read, or what was split off it from `start` on."""
Span: TypeAlias = tuple[int, int, int | None]
"""(start, step, count): positions start, start + step, ...; without end where count is None."""


@dataclass(frozen=True, slots=True)
class RemainingEpoch:
    """What is left of one epoch: pieces first, then positions.

    >>> chapter = RemainingEpoch(0, ((9, 0),), ((3, 2, 2), (6, 1, 2)))
    >>> [chapter[index] for index in range(6)]
    [(9, 0), 3, 5, 6, 7, None]
    """

    epoch: int
    pieces: tuple[Piece, ...] = ()
    spans: tuple[Span, ...] = ()
    _ends: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Of every span that has one."""

    def __post_init__(self) -> None:
        ends, end = [], len(self.pieces)
        for _, _, count in self.spans:
            if count is not None:
                end += count
                ends.append(end)
        object.__setattr__(self, "_ends", tuple(ends))

    @classmethod
    def whole(cls, epoch: int, count: int | None) -> RemainingEpoch:
        """An epoch of which nothing was read."""
        return cls(epoch, (), ((0, 1, count),))

    def __getitem__(self, index: int) -> Piece | int | None:
        """Element `index`: a piece, a position, or None behind the last one."""
        if index < len(self.pieces):
            return self.pieces[index]
        at = bisect_right(self._ends, index)
        if at == len(self.spans):
            return None
        turn = index - self._begin(at)
        if at == len(self._ends):
            turn, which = divmod(turn, len(self.spans) - at)
            at += which
        start, step, _ = self.spans[at]
        return start + step * turn

    def stride(self, index: int, shards: int) -> int:
        """How far the position of element `index + shards` is likely to be from that of element
        `index`."""
        at = min(bisect_right(self._ends, index), len(self.spans) - 1)
        return self.spans[at][1] * shards

    def holds(self, index: int) -> bool:
        """Whether element `index` is there for sure: not where nobody knows the end of the data."""
        return len(self._ends) == len(self.spans) and self[index] is not None

    def span_end(self, index: int) -> int | None:
        """The first element behind the span of element `index`; None where that has no end."""
        at = bisect_right(self._ends, index)
        return self._ends[at] if at < len(self._ends) else None

    def _begin(self, at: int) -> int:
        return self._ends[at - 1] if at else len(self.pieces)

    def rest(self, read: Sequence[int | None], waiting: Sequence[Piece] = ()) -> RemainingEpoch:
        """What is left after shard s read `read[s]` of its elements (None: all of them).

        Elements that slower shards had not reached come first, then the clean tail.
        """
        shards, pieces, spans = len(read), list(waiting), list[Span]()
        unfinished = {shard: count for shard, count in enumerate(read) if count is not None}
        everyone, endless = len(unfinished) == shards, len(self._ends) < len(self.spans)
        level = max(unfinished.values(), default=0) if everyone or endless else None
        stop = None if level is None else shards * level
        for shard, count in unfinished.items():
            self._collect(shard + shards * count, shards, stop, pieces, spans)
        if stop is not None and everyone:
            self._collect(stop, 1, None, pieces, spans)
        elif stop is not None:
            for shard in unfinished:
                self._collect(shard + stop, shards, None, pieces, spans)
        return RemainingEpoch(self.epoch, tuple(pieces), tuple(_endless_last(spans)))

    def _collect(
        self, first: int, stride: int, stop: int | None, pieces: list[Piece], spans: list[Span]
    ) -> None:
        """Add elements first, first + stride, ... below `stop`."""
        end: float = inf if stop is None else stop
        pieces.extend(self.pieces[first : int(min(end, len(self.pieces))) : stride])
        closed = len(self._ends)
        for at, (start, step, _) in enumerate(self.spans[:closed]):
            begin, until = self._begin(at), min(end, self._ends[at])
            index = _next_of(first, stride, begin)
            if index < until:
                count = divided_up(int(until) - index, stride)
                spans.append((start + step * (index - begin), step * stride, count))
        turns = len(self.spans) - closed
        if turns:
            # Every `round_`-th element lies in the same span again.
            round_ = turns // gcd(turns, stride) * stride
            begin = _next_of(first, stride, self._begin(closed))
            for index in range(begin, int(min(end, begin + round_)), stride):
                position = self[index]
                assert isinstance(position, int)
                left = None if stop is None else divided_up(stop - index, round_)
                spans.append((position, self.spans[closed][1] * (round_ // turns), left))

    def to_list(self) -> list[Any]:
        """Plain data."""
        return [self.epoch, [list(piece) for piece in self.pieces], [list(s) for s in self.spans]]

    @classmethod
    def from_list(cls, data: Any) -> RemainingEpoch:
        """The inverse of `to_list`."""
        epoch, pieces, spans = data
        return cls(
            epoch,
            tuple((number, start) for number, start in pieces),
            tuple((start, step, count) for start, step, count in spans),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderState:
    """Where one shard is: how much of its first chapter it has read, and what waits in its pool.

    `waiting` lists (epoch, sample number, start), oldest first; `lost` counts what went missing.
    `step` is the number of its next step by its own count, which a budget that grows goes by: it
    runs ahead of its loader's where other workers have ended.
    """

    shard: int
    shards: int
    chapters: tuple[RemainingEpoch, ...]
    read: int = 0
    waiting: tuple[tuple[int, int, int], ...] = ()
    lost: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None

    @property
    def epochs(self) -> set[int]:
        """The epochs of what waits and of what is being read."""
        return {c.epoch for c in self.chapters} | {epoch for epoch, _, _ in self.waiting}

    @property
    def goes_on(self) -> bool:
        """Whether something is left for sure, in the pool or to be read."""
        now, *later = self.chapters
        ahead = now.holds(self.shard + self.shards * self.read)
        return bool(self.waiting) or ahead or any(c.holds(self.shard) for c in later)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; who it belongs to is told by the cursor."""
        data: dict[str, Any] = {
            "chapters": [chapter.to_list() for chapter in self.chapters],
            "read": self.read,
            "waiting": [list(piece) for piece in self.waiting],
            "lost": dict(self.lost),
        }
        return data if self.step is None else {**data, "step": self.step}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], shard: int, shards: int) -> ReaderState:
        """The inverse of `to_dict`."""
        try:
            return cls(
                shard=shard,
                shards=shards,
                chapters=tuple(RemainingEpoch.from_list(chapter) for chapter in data["chapters"]),
                read=int(data["read"]),
                waiting=tuple((int(e), int(n), int(start)) for e, n, start in data["waiting"]),
                lost={str(reason): int(count) for reason, count in data["lost"].items()},
                step=None if data.get("step") is None else int(data["step"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorError(
                f"the cursor's shard {shard} cannot be read ({error!r}), so its samples would be "
                f"lost. Use an earlier checkpoint."
            ) from None


def merged(states: Sequence[ReaderState], count: int | None) -> tuple[RemainingEpoch, ...]:
    """What all shards together have left, by epoch, for any other number of shards to share.

    `count` is how many items an epoch has, if that is known.
    """
    states = sorted(states, key=lambda state: state.shard)
    current = [state.chapters[0].epoch for state in states]
    known = {chapter.epoch: chapter for state in states for chapter in state.chapters}
    waiting: dict[int, list[Piece]] = {}
    for depth in range(max(len(state.waiting) for state in states)):  # the oldest of each first
        for state in states:
            for epoch, number, start in state.waiting[depth : depth + 1]:
                waiting.setdefault(epoch, []).append((number, start))
    chapters = []
    for epoch in sorted({*range(min(current), max(current) + 1), *known, *waiting}):
        chapter = known.get(epoch)
        if chapter is None:
            # Between a shard's chapters is nothing left; behind its last all is whole.
            begun = min(current) <= epoch
            passed = any(s.chapters[0].epoch < epoch < s.chapters[-1].epoch for s in states)
            chapter = (
                RemainingEpoch.whole(epoch, count)
                if begun and not passed
                else RemainingEpoch(epoch)
            )
        read = [
            None if now > epoch else state.read if now == epoch else 0
            for state, now in zip(states, current, strict=True)
        ]
        left = chapter.rest(read, waiting.get(epoch, ()))
        if count is None:  # where going back is dear, read in order
            pieces = sorted(left.pieces, key=lambda piece: (item_and_part(piece[0]), piece[1]))
            left = RemainingEpoch(epoch, tuple(pieces), tuple(_endless_last(sorted(left.spans))))
        chapters.append(left)
    return tuple(chapters)


def _next_of(first: int, stride: int, least: int) -> int:
    """The first of `first`, `first + stride`, ... that is `least` or more."""
    return first + max(0, rounded_up(least - first, stride))


def _endless_last(spans: list[Span]) -> list[Span]:
    """Spans with an end as they are, then those without, by their start."""
    closed = [span for span in spans if span[2] is not None]
    return closed + sorted((span for span in spans if span[2] is None), key=lambda span: span[0])
