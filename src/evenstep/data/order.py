"""Orders: position in an epoch -> sample, which positions each reader takes, and what remains.

EpochOrder      the global order of an epoch, in constant memory
Unread          what readers that share a list have left of it
RemainingEpoch  what remains of an epoch after any number of changes of readers
ReaderState     the position of one reader of a pool, and what is in the pool
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import zip_longest
from math import gcd
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray, divided_up, item_and_part
from evenstep.data.pool import OverflowPolicy
from evenstep.data.source import digest_of
from evenstep.errors import CursorError, InputError
from evenstep.planning.kernels import kernel

# The order of an epoch ----------------------------------------------------------------------------

# The permutation is computed, not stored. A few Feistel rounds are a bijection on [0, 4**k) for
# the smallest 4**k >= n. A result outside [0, n) goes through the rounds again until it is inside,
# which makes it a bijection on [0, n). The keys are a hash of seed and epoch.
#
# Feistel rounds on few bits reach some orders more often than others. Up to 64 items are
# therefore shuffled as a list (Fisher-Yates), which makes all orders equally likely.

_ROUNDS = 6
_LISTED = 64  # items that are shuffled as a list
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """A seeded order of `count` samples; without `shuffle`, the order in which they are stored.

    >>> order = EpochOrder(count=5, seed=0, epoch=0)
    >>> sorted(order.samples(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    count: int
    seed: int
    epoch: int
    shuffle: bool = True

    def samples(self, positions: IntArray) -> IntArray:
        """The sample id at each of these positions."""
        if len(positions) and not (positions.min() >= 0 and positions.max() < self.count):
            raise InputError(
                f"positions must be in [0, {self.count}), got {positions.min()} to "
                f"{positions.max()}."
            )
        if not self.shuffle or self.count < 2:
            return positions.astype(np.int64)
        digest = digest_of(f"evenstep order {self.seed} {self.epoch}", size=8 * _ROUNDS)
        keys = np.frombuffer(digest, "<u8").astype(np.uint64)  # the same for any byte order
        with np.errstate(over="ignore"):  # products wrap around, also without the compiler
            if self.count <= _LISTED:
                order = np.arange(self.count)
                shuffle(order, keys[0])
                return order[positions]
            half = divided_up((self.count - 1).bit_length(), 2)  # 4**half >= count
            samples = np.empty(len(positions), np.int64)
            permute(positions.astype(np.uint64), np.uint64(self.count), half, keys, samples)
            return samples

    @property
    def description(self) -> str:
        """What a cursor says about the order. It differs if the order was computed differently.

        >>> EpochOrder(count=100, seed=3, epoch=0).description
        'shuffled by seed 3'
        """
        if not self.shuffle:
            return "as stored"
        # Version 0.1.0 shuffled a few items in another way.
        return f"shuffled by seed {self.seed}{' as a list' if 1 < self.count <= _LISTED else ''}"


@kernel
def mixed(value: np.uint64) -> np.uint64:
    """The finaliser of splitmix64: every input bit affects every output bit."""
    value = (value ^ (value >> _30)) * _FIRST
    value = (value ^ (value >> _27)) * _SECOND
    return value ^ (value >> _31)


@kernel
def shuffle(order: IntArray, key: np.uint64) -> None:
    """Exchange each item with one of those up to itself, by the random numbers of `key`."""
    state = key
    for last in range(order.shape[0] - 1, 0, -1):
        state = state + _GOLDEN
        other = np.int64(mixed(state) % np.uint64(last + 1))
        order[last], order[other] = order[other], order[last]


@kernel
def permute(
    positions: NDArray[np.uint64],
    count: np.uint64,
    half: int,
    keys: NDArray[np.uint64],
    samples: IntArray,
) -> None:
    """Apply a keyed bijection on numbers of 2 * half bits to each position, repeatedly until the
    result is below `count`."""
    bits = np.uint64(half)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    for i in range(positions.shape[0]):
        value = positions[i]
        inside = False
        while not inside:
            # One pass: exchange the halves and mix one into the other, once per key.
            left, right = value >> bits, value & mask
            for k in range(keys.shape[0]):
                left, right = right, left ^ (mixed(right ^ keys[k]) & mask)
            value = (left << bits) | right
            inside = value < count
        samples[i] = np.int64(value)


# Shares of readers --------------------------------------------------------------------------------

# In each turn the readers take a block of consecutive elements, one each. Their places in the block
# rotate, so data whose kind depends on the position, such as alternating short and long samples, is
# not divided by kind.
#
#     3 readers           turn 0   turn 1   turn 2  |  turn 3 ...
#     element             0 1 2    3 4 5    6 7 8   |  9 ...
#     taken by reader     1 2 0    2 0 1    0 1 2   |  from another start
#
# The places of a reader advance by a fixed step, coprime to the number of readers, so it visits
# every place once in as many turns as there are readers. It then begins at another place, by a
# hash.

_HALF = np.uint64(32)
_RATIO = 0.618033988749895  # steps of about this part of a block spread places evenly


def shares_of(reader: int, readers: int, key: int, turns: IntArray) -> IntArray:
    """The indices of the elements that one of `readers` takes in these turns. `key` selects one of
    many ways to share a list.

    >>> sorted(int(shares_of(reader, 3, 7, np.array([4]))[0]) for reader in range(3))
    [12, 13, 14]
    """
    return turns * readers + (reader + _places(readers, key, turns)) % readers


def _places(readers: int, key: int, turns: IntArray) -> IntArray:
    """The place of reader 0 in each of these turns."""
    start, step = _start_and_step(readers, key)
    block, turn = np.divmod(turns, readers)
    mixed = (block.astype(np.uint64) + start) * _GOLDEN
    mixed = (mixed ^ (mixed >> _HALF)) * _FIRST
    begin = ((mixed ^ (mixed >> _HALF)) % np.uint64(readers)).astype(np.int64)
    places: IntArray = (begin + step * turn) % readers
    return places


@lru_cache(maxsize=1024)
def _start_and_step(readers: int, key: int) -> tuple[np.uint64, int]:
    start = int.from_bytes(digest_of(f"evenstep deal {readers} {key}", size=8), "little")
    near = round(readers * _RATIO)
    steps = sorted(range(1, readers + 1), key=lambda step: abs(step - near))
    return np.uint64(start), next(step for step in steps if gcd(step, readers) == 1)


Read: TypeAlias = tuple[int | None, ...]
"""The number of elements that each reader has read; None if it has read all."""


@dataclass(frozen=True)
class Unread:
    """What remains of a list of `before` elements (None: unknown) that readers share by `key`, as a
    list in the same order. Reader r has taken `read[r]` of its elements (None: all).

        2 readers; reader 0 has read 3 elements, reader 1 has 1

        element             0 1   2 3   4 5   6 7   8 9 ...
        reader              0 1   1 0   0 1   0 1   1 0 ...
        unread                    2       5   6 7   8 9 ...

    >>> alone = Unread((3,), key=0, before=8)
    >>> alone.elements(np.arange(alone.size)).tolist()
    [3, 4, 5, 6, 7]
    """

    read: Read
    key: int
    before: int | None

    @cached_property
    def _turns(self) -> list[int] | None:
        """The number of elements that each reader takes in all; None if it is unknown."""
        if self.before is None:
            return None
        readers = len(self.read)
        whole, rest = divmod(self.before, readers)
        places = np.arange(readers) + _places(readers, self.key, np.array([whole]))
        turns: list[int] = (whole + (places % readers < rest)).tolist()
        return turns

    @cached_property
    def _reading(self) -> list[tuple[int, int]]:
        """(elements read, reader) of every reader that has not ended, fewest first."""
        return sorted(
            (read, reader)
            for reader, read in enumerate(self.read)
            if read is not None and (self._turns is None or read < self._turns[reader])
        )

    @cached_property
    def size(self) -> int | None:
        """The number of unread elements; None if it is unknown."""
        if not self._reading:
            return 0
        turns = self._turns
        return None if turns is None else sum(turns[r] - read for read, r in self._reading)

    @cached_property
    def _begins(self) -> IntArray:
        """For k = 1, 2, ...: the index of the first element in a turn that k readers have left."""
        turns = np.array([read for read, _ in self._reading], np.int64)
        sizes = np.diff(turns) * np.arange(1, len(turns))
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))

    @property
    def tail(self) -> tuple[int, int] | None:
        """(index, element) from which on everything is unread; None if a reader has ended."""
        if len(self._reading) < len(self.read):
            return None
        return int(self._begins[-1]), self._reading[-1][0] * len(self.read)

    def elements(self, indices: IntArray) -> IntArray:
        """The elements at these indices, in terms of the list that was shared. Indices grow."""
        if self.tail is not None and len(indices) and indices[0] >= self.tail[0]:
            return indices + (self.tail[1] - self.tail[0])
        elements, all_readers = np.empty(len(indices), np.int64), len(self.read)
        groups = np.searchsorted(self._begins, indices, side="right")
        for left in np.unique(groups).tolist():
            # Turns that `left` readers have left: each has as many elements, in order of places.
            here = groups == left
            readers = np.sort([reader for _, reader in self._reading[:left]])
            turns, which = np.divmod(indices[here] - self._begins[left - 1], left)
            turns += self._reading[left - 1][0]
            places = _places(all_readers, self.key, turns)
            first = np.searchsorted(readers, all_readers - places)  # the first that wraps around
            reader = readers[(first + which) % left]
            elements[here] = turns * all_readers + (reader + places) % all_readers
        return elements


# What remains of an epoch -------------------------------------------------------------------------

# Arithmetic, not a list. Readers share an epoch. When their number changes, what they have left
# (`Unread`) is shared by the new readers, in the order of the epoch. This can happen again before
# it is read:
#
#     positions 0 1 2 ...  ──shared by 4──▶  what 4 have left  ──shared by 3──▶  what 3 have left
#
# A fresh epoch and what remains after any number of changes have the same form: for each change,
# how much every reader had read. Positions only grow, so a source that can only be read in order
# is read forwards, and the first position past an unknown end is the end of the epoch.

_NOTHING: tuple[Read, ...] = ((None,),)  # is left


@dataclass(frozen=True)
class RemainingEpoch:
    """The positions of an epoch of `count` items (None: unknown) that remain after `changes`.

    >>> whole = RemainingEpoch(0, 9)
    >>> rest = whole.rest([2, 2])
    >>> rest.positions(0, 1).tolist()
    [4, 5, 6, 7, 8]
    """

    epoch: int
    count: int | None
    changes: tuple[Read, ...] = ()

    @cached_property
    def _lists(self) -> list[Unread]:
        lists, size = list[Unread](), self.count
        for read in self.changes:
            lists.append(Unread(read, self.epoch, size))
            size = lists[-1].size
        return lists

    @property
    def size(self) -> int | None:
        """The number of positions; None if it is unknown."""
        return self._lists[-1].size if self._lists else self.count

    def positions(self, reader: int, readers: int, first: int = 0, most: int = 1 << 20) -> IntArray:
        """The positions that a reader takes from turn `first` on, at most so many."""
        if self.size is not None:
            most = max(0, min(most, divided_up(self.size, readers) - first))
        elements = shares_of(reader, readers, self.epoch, np.arange(first, first + most))
        if self.size is not None:
            elements = elements[: np.searchsorted(elements, self.size)]
        for unread in reversed(self._lists):
            elements = unread.elements(elements)
        return elements

    def rest(self, read: Sequence[int | None]) -> RemainingEpoch:
        """What remains after reader r has read `read[r]` of its elements."""
        unread = Unread(tuple(read), self.epoch, self.size)
        if unread.size == 0:
            return replace(self, changes=_NOTHING)
        kept, first = list[Read](), 0
        for each in (unread, *reversed(self._lists)):
            begin, element = each.tail or (first + 1, 0)
            # In the tail nothing was read, so all that matters is where it begins.
            kept.append(each.read if first < begin else (element - begin,))
            first = int(each.elements(np.array([first]))[0])
        return replace(self, changes=_joined(kept[::-1]))

    def to_list(self) -> list[Any]:
        """Plain data."""
        return [self.epoch, self.count, [list(read) for read in self.changes]]

    @classmethod
    def from_list(cls, data: Any) -> RemainingEpoch:
        """The inverse of `to_list`."""
        epoch, count, changes, *by_length = data
        if by_length:
            raise CursorError(
                "the cursor was written by an earlier version, whose readers shared samples by "
                "length. Finish the epoch with that version, or start without the cursor, for "
                "example at the next epoch."
            )
        counts = tuple(tuple(None if n is None else int(n) for n in read) for read in changes)
        return cls(int(epoch), None if count is None else int(count), counts)


def _joined(changes: list[Read]) -> tuple[Read, ...]:
    """The same changes, with those of single readers after each other as one."""
    joined: list[Read] = []
    for read in changes:
        before = joined[-1] if joined else (0,) if len(read) == 1 else ()
        if len(read) == len(before) == 1 and read[0] is not None and before[0] is not None:
            joined[-1:] = [(before[0] + read[0],)]
        else:
            joined.append(read)
    return tuple(read for read in joined if read != (0,))


# The position of a reader -------------------------------------------------------------------------

Waiting: TypeAlias = list[int]
"""A segment in a pool. Cursors share these lists; do not change them.

    epoch, sample id, start                 as divided by the first of `ReaderState.policies`
    epoch, sample id, start, number         as divided by another of them
    epoch, sample id, start, length, end    divided in no such way (see `Segment`)
"""


@dataclass(kw_only=True, slots=True)  # one is made for every step; frozen is slower
class ReaderState:
    """Position of one reader, and the contents of its pool.

    reader, readers  which of the ranks x workers this is, and how many there are
    epochs           what remains to be read; the first is being read
    read             number of elements of the first epoch that this reader has read
    waiting          the segments in the pool, oldest first
    policies         how the waiting samples were divided; the first is usually the only one
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
    policies: tuple[OverflowPolicy, ...] = ()
    lost: dict[str, int] = field(default_factory=dict)
    step: int | None = None
    left: int | None = None

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
            "waiting": list(self.waiting),
            "cuts": [list(policy) for policy in self.policies],
            "lost": self.lost,
        }
        if self.step is not None:
            data["step"] = self.step
        if self.left is not None:
            data["left"] = self.left
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], reader: int, readers: int) -> ReaderState:
        """The inverse of `to_dict`."""
        waiting = tuple([int(number) for number in key] for key in data["waiting"])
        if not all(3 <= len(key) <= 5 for key in waiting):
            raise ValueError("a segment has 3 to 5 numbers")
        return cls(
            reader=reader,
            readers=readers,
            epochs=tuple(RemainingEpoch.from_list(remaining) for remaining in data["epochs"]),
            read=int(data["read"]),
            waiting=waiting,
            policies=tuple(OverflowPolicy(*policy) for policy in data["cuts"]),
            lost={str(reason): int(count) for reason, count in data["lost"].items()},
            step=data.get("step"),
            left=data.get("left"),
        )


@dataclass(frozen=True, slots=True)
class ReaderStates:
    """The position of a pooled stream: the states of some or all of ranks x workers readers.

    turns   by rank, which of its workers has the next step
    states  by reader
    """

    ranks: int
    workers: int
    turns: Mapping[str, int]
    states: Mapping[int, ReaderState]

    @classmethod
    def beginning(cls, epoch: int, count: int | None) -> ReaderStates:
        """The beginning of an epoch: what one reader has left that has read nothing."""
        epochs = (RemainingEpoch(epoch, count),)
        return cls(1, 1, {}, {0: ReaderState(reader=0, readers=1, epochs=epochs)})

    @property
    def readers(self) -> int:
        """The number of readers that share the data."""
        return self.ranks * self.workers

    @property
    def missing(self) -> list[int]:
        """The readers without a state here."""
        return sorted(set(range(self.readers)) - self.states.keys())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ReaderStates:
        """The position in a cursor."""
        try:
            ranks, workers = int(data["ranks"]), int(data["workers"])
            readers, turns = ranks * workers, {k: int(turn) for k, turn in data["turns"].items()}
            states = {
                int(name): ReaderState.from_dict(state, int(name), readers)
                for name, state in data["readers"].items()
            }
            if readers < 1 or not all(0 <= number < readers for number in states):
                raise ValueError(f"readers {sorted(states)} of {readers}")
        except CursorError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorError(
                f"the position in the cursor is malformed ({error!r}). Use an earlier checkpoint."
            ) from None
        return cls(ranks, workers, turns, states)


def share_anew(
    states: Sequence[ReaderState], readers: int, count: int | None, wanted: Iterable[int]
) -> list[ReaderState]:
    """The states of the `wanted` ones of `readers` new readers that share what `states` have left.

    Segments in the old pools are distributed over the new pools, so that a state holds no more
    than its reader's share: the oldest of each old reader first, or in the order of the source if
    going back is expensive, because the number of items in an epoch (`count`) is unknown.
    """
    policies = tuple(dict.fromkeys(policy for state in states for policy in state.policies))
    states = sorted(states, key=lambda state: state.reader)
    pools = [
        [_renumbered(key, state.policies, policies) for key in state.waiting] for state in states
    ]
    waiting = [key for keys in zip_longest(*pools) for key in keys if key is not None]
    if count is None:
        waiting.sort(key=lambda key: (key[0], item_and_part(key[1]), key[2]))
    else:
        waiting.sort(key=lambda key: key[0])
    lost = sum((Counter(state.lost) for state in states), Counter[str]())
    epochs, turns = _merged(states, count), np.arange(divided_up(len(waiting), readers))
    return [
        ReaderState(
            reader=reader,
            readers=readers,
            epochs=epochs,
            waiting=tuple(waiting[at] for at in share.tolist() if at < len(waiting)),
            policies=policies,
            lost=dict(sorted(lost.items())) if reader == 0 else {},
        )
        for reader in wanted
        for share in [shares_of(reader, readers, 0, turns)]
    ]


def _renumbered(
    key: Waiting, before: Sequence[OverflowPolicy], after: Sequence[OverflowPolicy]
) -> Waiting:
    """The same segment, with its policy numbered as in `after`."""
    if len(key) == 5 or not before:
        return key
    number = after.index(before[key[3] if len(key) == 4 else 0])
    return [*key[:3], number] if number else key[:3]


def _merged(states: Sequence[ReaderState], count: int | None) -> tuple[RemainingEpoch, ...]:
    """What remains to be read by all readers together, by epoch; at least the last epoch."""
    current = [state.epochs[0].epoch for state in states]
    known = {remaining.epoch: remaining for state in states for remaining in state.epochs}
    epochs = []
    for epoch in sorted({*range(min(current), max(current) + 1), *known}):
        remaining = known.get(epoch)
        if remaining is None:
            # A reader has nothing left between its epochs; epochs after its last are untouched.
            passed = any(s.epochs[0].epoch < epoch < s.epochs[-1].epoch for s in states)
            remaining = RemainingEpoch(epoch, count, _NOTHING if passed else ())
        read = [
            None if now > epoch else state.read if now == epoch else 0
            for state, now in zip(states, current, strict=True)
        ]
        epochs.append(remaining.rest(read))
    return (*(left for left in epochs[:-1] if left.size != 0), epochs[-1])
