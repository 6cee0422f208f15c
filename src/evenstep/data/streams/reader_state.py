"""ReaderState: the position of one reader of a pooled stream. All of them can be dealt anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from evenstep.core.ragged import item_and_part, sample_name
from evenstep.data.streams.cut import Cut, Piece, pieces_of
from evenstep.data.streams.deal import Deal
from evenstep.data.streams.remaining import RemainingEpoch
from evenstep.errors import CursorError

Waiting: TypeAlias = tuple[int, ...]
"""A segment in a pool.

    epoch, sample id, start                 as cut by the first of `ReaderState.cuts`
    epoch, sample id, start, number         as cut by another of them
    epoch, sample id, start, length, end    cut in no such way; where the sample ends (see `Piece`)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderState:
    """Position of one reader, and the contents of its pool.

    reader, readers  which of the ranks x workers this is, and how many there are
    epochs           what remains to be read; the first is being read
    read             number of elements of the first epoch that this reader has read
    waiting          the segments in the pool, oldest first
    cuts             how the waiting samples were cut; the first is usually the only one
    lost             number of samples lost so far, by reason
    step             number of the next step as this reader counts. It determines a growing budget,
                     and runs ahead of the loader's count when other workers have ended
    left             number of steps left to this reader, if the steps of all readers were counted
                     ahead
    """

    reader: int
    readers: int
    epochs: tuple[RemainingEpoch, ...]
    read: int = 0
    waiting: tuple[Waiting, ...] = ()
    cuts: tuple[Cut, ...] = ()
    lost: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    left: int | None = None

    @classmethod
    def fresh(cls, reader: int, readers: int, epoch: int, count: int | None) -> ReaderState:
        """The state at the beginning of an epoch of `count` items (None: unknown)."""
        return cls(reader=reader, readers=readers, epochs=(RemainingEpoch(epoch, count),))

    @property
    def open_epochs(self) -> set[int]:
        """The numbers of all epochs with segments in the pool or elements to read."""
        return {remaining.epoch for remaining in self.epochs} | {key[0] for key in self.waiting}

    @property
    def goes_on(self) -> bool:
        """Whether this reader surely has more samples, in the pool or to be read."""
        reads = [self.read, *[0] * (len(self.epochs) - 1)]
        return bool(self.waiting) or any(
            remaining.size is not None and read < remaining.size // self.readers
            for remaining, read in zip(self.epochs, reads, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without `reader` and `readers`, which the cursor holds."""
        data: dict[str, Any] = {
            "epochs": [remaining.to_list() for remaining in self.epochs],
            "read": self.read,
            "waiting": [list(key) for key in self.waiting],
            "cuts": [cut.to_list() for cut in self.cuts],
            "lost": dict(self.lost),
        }
        further = {"step": self.step, "left": self.left}
        return data | {name: value for name, value in further.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], reader: int, readers: int) -> ReaderState:
        """The inverse of `to_dict`."""
        try:
            return cls(
                reader=reader,
                readers=readers,
                epochs=tuple(RemainingEpoch.from_list(remaining) for remaining in data["epochs"]),
                read=int(data["read"]),
                waiting=tuple(_waiting(key) for key in data["waiting"]),
                cuts=tuple(Cut.from_list(cut) for cut in data["cuts"]),
                lost={str(reason): int(count) for reason, count in data["lost"].items()},
                step=None if data.get("step") is None else int(data["step"]),
                left=None if data.get("left") is None else int(data["left"]),
            )
        except CursorError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorError(
                f"the state of reader {reader} in the cursor is malformed ({error!r}). Use an "
                f"earlier checkpoint."
            ) from None


def redealt(
    states: Sequence[ReaderState], reader: int, readers: int, count: int | None
) -> ReaderState:
    """The state of one of `readers` new readers that share what remains of `states`.

    Segments in the old pools are distributed over the new pools, so that a state holds no more
    than its reader's share. `count` is the number of items in an epoch, None if unknown.
    """
    cuts = tuple(dict.fromkeys(cut for state in states for cut in state.cuts))
    waiting = all_waiting([_with_cuts(s, cuts) for s in states], in_order=count is None)
    share = Deal(readers, key=0).elements(reader, np.arange(-(-len(waiting) // readers)))
    lost = {
        reason: sum(state.lost.get(reason, 0) for state in states)
        for reason in sorted({reason for state in states for reason in state.lost})
    }
    return ReaderState(
        reader=reader,
        readers=readers,
        epochs=merged(states, count),
        waiting=tuple(waiting[at] for at in share.tolist() if at < len(waiting)),
        cuts=cuts,
        lost=lost if reader == 0 else {},
    )


def _waiting(key: Any) -> Waiting:
    found = tuple(int(number) for number in key)
    if not 3 <= len(found) <= 5:
        raise ValueError(f"a segment of {len(found)} numbers")
    return found


def piece_of(key: Waiting, length: int, cuts: Sequence[Cut]) -> Piece:
    """The tokens of a waiting segment, given the length of its sample."""
    if len(key) == 5:
        piece: Piece | None = Piece(*key[2:])
    else:
        piece = pieces_of(cuts[key[3] if len(key) == 4 else 0], length).get(key[2])
    if piece is None or piece.end > length:
        raise CursorError(
            f"the cursor names tokens of sample {sample_name(key[1])} from token {key[2]} on, but "
            f"it has {length} tokens now, so the data has changed. Restore the data, or start "
            f"without the cursor."
        )
    return piece


def _with_cuts(state: ReaderState, cuts: Sequence[Cut]) -> ReaderState:
    """The same state, with its cuts numbered as in `cuts`."""
    numbers = [cuts.index(cut) for cut in state.cuts]
    if numbers in ([], [0]):
        return state

    def renumbered(key: Waiting) -> Waiting:
        if len(key) == 5:
            return key
        number = numbers[key[3] if len(key) == 4 else 0]
        return (*key[:3], number) if number else key[:3]

    return replace(state, waiting=tuple(map(renumbered, state.waiting)), cuts=tuple(cuts))


def all_waiting(states: Sequence[ReaderState], in_order: bool) -> list[Waiting]:
    """The segments in all pools by epoch: the oldest of each reader first, or `in_order` of the
    source, if going back is expensive."""
    states = sorted(states, key=lambda state: state.reader)
    depth = max(len(state.waiting) for state in states)
    found = [key for at in range(depth) for s in states for key in s.waiting[at : at + 1]]
    if in_order:
        return sorted(found, key=lambda key: (key[0], item_and_part(key[1]), key[2]))
    return sorted(found, key=lambda key: key[0])


def merged(states: Sequence[ReaderState], count: int | None) -> tuple[RemainingEpoch, ...]:
    """What remains to be read by all readers together, by epoch; at least the last epoch."""
    states = sorted(states, key=lambda state: state.reader)
    current = [state.epochs[0].epoch for state in states]
    known = {remaining.epoch: remaining for state in states for remaining in state.epochs}
    epochs = []
    for epoch in sorted({*range(min(current), max(current) + 1), *known}):
        remaining = known.get(epoch)
        if remaining is None:
            # A reader has nothing left between its epochs; epochs after its last are untouched.
            passed = any(s.epochs[0].epoch < epoch < s.epochs[-1].epoch for s in states)
            whole = RemainingEpoch(epoch, count)
            remaining = RemainingEpoch.nothing(epoch, count) if passed else whole
        read = [
            None if now > epoch else state.read if now == epoch else 0
            for state, now in zip(states, current, strict=True)
        ]
        epochs.append(remaining.rest(read))
    return (*(left for left in epochs[:-1] if left.size != 0), epochs[-1])
