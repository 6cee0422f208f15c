"""Agenda: what a shard has yet to read, as arithmetic rather than lists.

Shard s of S takes every S-th element of what is left of an epoch, from element s on. What is left
is a few waiting pieces of samples and some spans of positions; every S-th element of a span is a
span again. So the rest of an epoch, after any number of changes of S, stays a short list.

    8 samples on 2 shards            spans (0, 1, 8)        shard 1 reads 1, 3, 5, 7
    shard 0 read 3, shard 1 read 1   spans (3, 2, 2), (6, 1, 2)   that is 3 5, then 6 7
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeAlias

from evenstep.errors import CursorError

Piece: TypeAlias = tuple[int, int]
"""(sample number, start): a sample that was read, or what was split off it from `start` on."""
Span: TypeAlias = tuple[int, int, int | None]
"""(start, step, count): positions start, start + step, ...; without end where count is None."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """What is left of one epoch: pieces first, then positions.

    >>> chapter = Chapter(0, ((9, 0),), ((3, 2, 2), (6, 1, 2)))
    >>> [chapter[index] for index in range(6)]
    [(9, 0), 3, 5, 6, 7, None]
    """

    epoch: int
    pieces: tuple[Piece, ...] = ()
    spans: tuple[Span, ...] = ()
    _ends: tuple[float, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        ends, end = [], float(len(self.pieces))
        for _, _, count in self.spans:
            end += inf if count is None else count
            ends.append(end)
        object.__setattr__(self, "_ends", tuple(ends))

    @classmethod
    def whole(cls, epoch: int, count: int | None) -> Chapter:
        """An epoch of which nothing was read."""
        return cls(epoch, (), ((0, 1, count),))

    def __getitem__(self, index: int) -> Piece | int | None:
        """Element `index`: a piece, a position, or None behind the last one."""
        if index < len(self.pieces):
            return self.pieces[index]
        at = bisect_right(self._ends, index)
        if at == len(self.spans):
            return None
        start, step, _ = self.spans[at]
        return start + step * (index - self._begin(at))

    def stride(self, index: int, shards: int) -> int:
        """How far the position of element `index + shards` is from that of element `index`."""
        at = min(bisect_right(self._ends, index), len(self.spans) - 1)
        return self.spans[at][1] * shards

    def _begin(self, at: int) -> int:
        return int(self._ends[at - 1]) if at else len(self.pieces)

    def rest(self, read: Sequence[int | None], waiting: Sequence[Piece] = ()) -> Chapter:
        """What is left after shard s read `read[s]` of its elements (None: all of them).

        Elements that slower shards had not reached come first, then the clean tail.
        """
        shards, pieces, spans = len(read), list(waiting), list[Span]()
        unfinished = [count for count in read if count is not None]
        level = max(unfinished) if len(unfinished) == shards else None
        for shard, count in enumerate(read):
            if count is not None:
                stop = None if level is None else shards * level
                self._collect(shard + shards * count, shards, stop, pieces, spans)
        if level is not None:
            self._collect(shards * level, 1, None, pieces, spans)
        return Chapter(self.epoch, tuple(pieces), tuple(spans))

    def _collect(
        self, first: int, stride: int, stop: int | None, pieces: list[Piece], spans: list[Span]
    ) -> None:
        """Add elements first, first + stride, ... below `stop`."""
        end: float = inf if stop is None else stop
        pieces.extend(self.pieces[first : int(min(end, len(self.pieces))) : stride])
        for at, (start, step, _) in enumerate(self.spans):
            begin, until = self._begin(at), min(end, self._ends[at])
            skipped = max(0, -(-(begin - first) // stride))
            index = first + skipped * stride
            if index < until:
                count = None if until == inf else -(-(int(until) - index) // stride)
                spans.append((start + step * (index - begin), step * stride, count))

    def to_list(self) -> list[Any]:
        """Plain data."""
        return [self.epoch, [list(piece) for piece in self.pieces], [list(s) for s in self.spans]]

    @classmethod
    def from_list(cls, data: Any) -> Chapter:
        """The inverse of `to_list`."""
        epoch, pieces, spans = data
        return cls(
            epoch,
            tuple((number, start) for number, start in pieces),
            tuple((start, step, count) for start, step, count in spans),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardState:
    """Where one shard is: how much of its first chapter it has read, and what waits in its pool.

    `waiting` lists (epoch, sample number, start), oldest first; `lost` counts what went missing.
    """

    shard: int
    shards: int
    chapters: tuple[Chapter, ...]
    read: int = 0
    waiting: tuple[tuple[int, int, int], ...] = ()
    lost: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; who it belongs to is told by the cursor."""
        return {
            "chapters": [chapter.to_list() for chapter in self.chapters],
            "read": self.read,
            "waiting": [list(piece) for piece in self.waiting],
            "lost": dict(self.lost),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], shard: int, shards: int) -> ShardState:
        """The inverse of `to_dict`."""
        try:
            return cls(
                shard=shard,
                shards=shards,
                chapters=tuple(Chapter.from_list(chapter) for chapter in data["chapters"]),
                read=int(data["read"]),
                waiting=tuple((int(e), int(n), int(start)) for e, n, start in data["waiting"]),
                lost={str(reason): int(count) for reason, count in data["lost"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorError(
                f"the cursor's shard {shard} cannot be read ({error!r}), so its samples would be "
                f"lost. Use an earlier checkpoint."
            ) from None


def merged(states: Sequence[ShardState], count: int | None) -> tuple[Chapter, ...]:
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
            started = epoch >= min(current)
            chapter = Chapter.whole(epoch, count) if started else Chapter(epoch)
        read = [
            None if now > epoch else state.read if now == epoch else 0
            for state, now in zip(states, current, strict=True)
        ]
        left = chapter.rest(read, waiting.get(epoch, ()))
        if count is None:  # where going back is dear, read in order
            left = Chapter(epoch, tuple(sorted(left.pieces)), tuple(sorted(left.spans)))
        chapters.append(left)
    return tuple(chapters)
