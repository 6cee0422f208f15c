"""Orders: position in an epoch -> sample, which positions each reader takes, and what remains.

EpochOrder      the global order of an epoch, in constant memory
ReaderShares    which elements of a list each of several readers takes
Unread          what they have left of it
RemainingEpoch  what remains of an epoch after any number of changes of readers
ReaderState     the position of one reader of a pool, and what is in the pool
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import (
    IntArray,
    divided_up,
    item_and_part,
    sample_name,
)
from evenstep.data.pool import OverflowPolicy, Segment
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
        with np.errstate(over="ignore"):  # products wrap around, also without the compiler
            if self.count <= _LISTED:
                order = np.arange(self.count)
                shuffle(order, self._keys()[0])
                return order[positions]
            half = divided_up((self.count - 1).bit_length(), 2)  # 4**half >= count
            samples = np.empty(len(positions), np.int64)
            permute(positions.astype(np.uint64), np.uint64(self.count), half, self._keys(), samples)
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

    def _keys(self) -> NDArray[np.uint64]:
        """Round keys of this seed and epoch."""
        text = f"evenstep order {self.seed} {self.epoch}".encode()
        digest = hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest()
        return np.frombuffer(digest, "<u8").astype(np.uint64)  # the same for any byte order


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


@dataclass(frozen=True)
class ReaderShares:
    """How `readers` readers share a list. `key` selects one of many such ways.

    >>> shares = ReaderShares(3, key=7)
    >>> sorted(int(shares.elements(reader, np.array([4]))[0]) for reader in range(3))
    [12, 13, 14]
    """

    readers: int
    key: int

    def elements(self, reader: int, turns: IntArray) -> IntArray:
        """The indices of the elements that a reader takes in these turns."""
        if self.readers == 1:
            return turns
        return turns * self.readers + (reader + self.shifts(turns)) % self.readers

    def shifts(self, turns: IntArray) -> IntArray:
        """The place of reader 0 in each of these turns."""
        block, turn = np.divmod(turns, self.readers)
        mixed = (block.astype(np.uint64) + _start_of(self.readers, self.key)) * _GOLDEN
        mixed = (mixed ^ (mixed >> _HALF)) * _FIRST
        begin = ((mixed ^ (mixed >> _HALF)) % np.uint64(self.readers)).astype(np.int64)
        shifts: IntArray = (begin + _step_of(self.readers) * turn) % self.readers
        return shifts

    def nth(self, readers: IntArray, turns: IntArray, which: IntArray) -> IntArray:
        """In each of these turns, element number `which` of those that these `readers` take,
        which ascend.
        """
        shifts = self.shifts(turns)
        first = np.searchsorted(readers, self.readers - shifts)  # the first that wraps around
        reader = readers[(first + which) % len(readers)]
        elements: IntArray = turns * self.readers + (reader + shifts) % self.readers
        return elements

    def num_turns(self, size: int) -> IntArray:
        """The number of elements that each reader takes of a list of this size."""
        whole, rest = divmod(size, self.readers)
        shift = self.shifts(np.array([whole]))
        return whole + ((np.arange(self.readers) + shift) % self.readers < rest).astype(np.int64)


@lru_cache(maxsize=1024)
def _start_of(readers: int, key: int) -> np.uint64:
    text = f"evenstep deal {readers} {key}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


@lru_cache(maxsize=1024)
def _step_of(readers: int) -> int:
    near = round(readers * _RATIO)
    steps = sorted(range(1, readers + 1), key=lambda step: abs(step - near))
    return next(step for step in steps if gcd(step, readers) == 1)


# What readers have left ---------------------------------------------------------------------------

# As a list in the same order:
#
# 2 readers; reader 0 has read 3 elements, reader 1 has 1
#
# element             0 1   2 3   4 5   6 7   8 9 ...
# reader              0 1   1 0   0 1   0 1   1 0 ...
# unread                    2       5   6 7   8 9 ...


@dataclass(frozen=True)
class Unread:
    """The elements that remain after reader r has taken `read[r]` of its elements (None: all).

    `size` is the size of the list that was dealt; None if it is unknown.

    >>> alone = Unread(ReaderShares(1, key=0), (3,), 8)
    >>> alone.elements(np.arange(alone.size)).tolist()
    [3, 4, 5, 6, 7]
    """

    shares: ReaderShares
    read: Sequence[int | None]
    size_before: int | None

    @cached_property
    def _reading(self) -> list[tuple[int, int]]:
        """(elements read, reader) of every reader that has not ended, fewest first."""
        return sorted(
            (read, reader)
            for reader, read in enumerate(self.read)
            if read is not None and (self._turns is None or read < self._turns[reader])
        )

    @cached_property
    def _turns(self) -> list[int] | None:
        """The number of elements that each reader takes in all; None if it is unknown."""
        return (
            None if self.size_before is None else self.shares.num_turns(self.size_before).tolist()
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
        if len(self._reading) < self.shares.readers:
            return None
        return int(self._begins[-1]), self._reading[-1][0] * self.shares.readers

    def elements(self, indices: IntArray) -> IntArray:
        """The elements at these indices, in terms of the list that was dealt. Indices grow."""
        if self.tail is not None and len(indices) and indices[0] >= self.tail[0]:
            return indices + (self.tail[1] - self.tail[0])
        elements = np.empty(len(indices), np.int64)
        groups = np.searchsorted(self._begins, indices, side="right")
        for left in np.unique(groups).tolist():
            here = groups == left
            elements[here] = self._within(left, indices[here] - self._begins[left - 1])
        return elements

    def _within(self, left: int, indices: IntArray) -> IntArray:
        """Elements of the turns that `left` readers have left, in the order of their places."""
        readers = np.sort([reader for _, reader in self._reading[:left]])
        turns, which = np.divmod(indices, left)
        return self.shares.nth(readers, turns + self._reading[left - 1][0], which)


# What remains of an epoch -------------------------------------------------------------------------

# Arithmetic, not a list. Readers share an epoch by `ReaderShares`. When their number changes, what
# they have left (`Unread`) is shared by the new readers, in the order of the epoch. This can happen
# again before it is read:
#
#     positions 0 1 2 ...  ──shared by 4──▶  what 4 have left  ──shared by 3──▶  what 3 have left
#
# A fresh epoch and what remains after any number of changes have the same form: for each change,
# how much every reader had read. Positions only grow, so a source that can only be read in order
# is read forwards, and the first position past an unknown end is the end of the epoch.

Read: TypeAlias = tuple[int | None, ...]
"""The number of elements that each reader has read; None if it has read all."""


@dataclass(frozen=True, slots=True)
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
    _lists: tuple[Unread, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lists", ())
        for read in self.changes:
            unread = Unread(ReaderShares(len(read), self.epoch), read, self.size)
            object.__setattr__(self, "_lists", (*self._lists, unread))

    @classmethod
    def nothing(cls, epoch: int, count: int | None) -> RemainingEpoch:
        """An epoch of which everything has been read."""
        return cls(epoch, count, ((None,),))

    @property
    def size(self) -> int | None:
        """The number of positions; None if it is unknown."""
        return self._lists[-1].size if self._lists else self.count

    def positions(self, reader: int, readers: int, first: int = 0, most: int = 1 << 20) -> IntArray:
        """The positions that a reader takes from turn `first` on, at most so many."""
        if self.size is not None:
            most = max(0, min(most, divided_up(self.size, readers) - first))
        elements = ReaderShares(readers, self.epoch).elements(
            reader, np.arange(first, first + most)
        )
        if self.size is not None:
            elements = elements[: np.searchsorted(elements, self.size)]
        for unread in reversed(self._lists):
            elements = unread.elements(elements)
        return elements

    def rest(self, read: Sequence[int | None]) -> RemainingEpoch:
        """What remains after reader r has read `read[r]` of its elements."""
        unread = Unread(ReaderShares(len(read), self.epoch), tuple(read), self.size)
        if unread.size == 0:
            return RemainingEpoch.nothing(self.epoch, self.count)
        kept, first = list[Read](), 0
        for each in (unread, *reversed(self._lists)):
            begin, element = each.tail or (first + 1, 0)
            # In the tail nothing was read, so all that matters is where it begins.
            kept.append(tuple(each.read) if first < begin else (element - begin,))
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

Waiting: TypeAlias = tuple[int, ...]
"""A segment in a pool.

    epoch, sample id, start                 as divided by the first of `ReaderState.policies`
    epoch, sample id, start, number         as divided by another of them
    epoch, sample id, start, length, end    divided in no such way (see `Segment`)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
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
            "cuts": [policy.to_list() for policy in self.policies],
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
                policies=tuple(OverflowPolicy.from_list(policy) for policy in data["cuts"]),
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
    policies = tuple(dict.fromkeys(policy for state in states for policy in state.policies))
    waiting = all_waiting([_with_policies(s, policies) for s in states], in_order=count is None)
    turns = np.arange(-(-len(waiting) // readers))
    share = ReaderShares(readers, key=0).elements(reader, turns).tolist()
    lost = {
        reason: sum(state.lost.get(reason, 0) for state in states)
        for reason in sorted({reason for state in states for reason in state.lost})
    }
    return ReaderState(
        reader=reader,
        readers=readers,
        epochs=merged(states, count),
        waiting=tuple(waiting[at] for at in share if at < len(waiting)),
        policies=policies,
        lost=lost if reader == 0 else {},
    )


def _waiting(key: Any) -> Waiting:
    numbers = tuple(int(number) for number in key)
    if not 3 <= len(numbers) <= 5:
        raise ValueError(f"a segment of {len(numbers)} numbers")
    return numbers


def waiting_segment(key: Waiting, length: int, policies: Sequence[OverflowPolicy]) -> Segment:
    """The tokens of a waiting segment, given the length of its sample."""
    if len(key) == 5:
        segment: Segment | None = Segment(*key[2:])
    else:
        segment = policies[key[3] if len(key) == 4 else 0].by_start(length).get(key[2])
    if segment is None or segment.end > length:
        raise CursorError(
            f"the cursor names tokens of sample {sample_name(key[1])} from token {key[2]} on, but "
            f"it has {length} tokens now, so the data has changed. Restore the data, or start "
            f"without the cursor."
        )
    return segment


def _with_policies(state: ReaderState, policies: Sequence[OverflowPolicy]) -> ReaderState:
    """The same state, with its policies numbered as in `policies`."""
    numbers = [policies.index(policy) for policy in state.policies]
    if numbers in ([], [0]):
        return state

    def renumbered(key: Waiting) -> Waiting:
        if len(key) == 5:
            return key
        number = numbers[key[3] if len(key) == 4 else 0]
        return (*key[:3], number) if number else key[:3]

    waiting = tuple(map(renumbered, state.waiting))
    return replace(state, waiting=waiting, policies=tuple(policies))


def all_waiting(states: Sequence[ReaderState], in_order: bool) -> list[Waiting]:
    """The segments in all pools by epoch: the oldest of each reader first, or `in_order` of the
    source, if going back is expensive."""
    states = sorted(states, key=lambda state: state.reader)
    depth = max(len(state.waiting) for state in states)
    keys = [key for at in range(depth) for s in states for key in s.waiting[at : at + 1]]
    if in_order:
        return sorted(keys, key=lambda key: (key[0], item_and_part(key[1]), key[2]))
    return sorted(keys, key=lambda key: key[0])


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
