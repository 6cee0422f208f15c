"""Arrays: rows of unequal length, segments, rounding, ids of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenstep.core.text import set_fields

BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]


def frozen(values: Iterable[int] | NDArray[np.integer]) -> IntArray:
    """A read-only int64 copy of `values`; an int64 array over `bytes` as it is."""
    owner: object = getattr(values, "base", None)
    if (  # what `np.frombuffer` made of `bytes`, not a slice of it: nothing can change it
        isinstance(values, np.ndarray)
        and type(owner) is bytes
        and values.dtype == np.int64
        and values.flags.c_contiguous
        and values.flags.aligned
    ):
        return np.asarray(values, np.int64)
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array


def offsets_of(lengths: NDArray[np.integer]) -> IntArray:
    """Where each row starts and the last one ends: lengths [3, 1, 2] -> offsets [0, 3, 4, 6]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges_of(firsts: IntArray, lengths: IntArray) -> IntArray:
    """Ranges joined end to end: firsts [7, 2] with lengths [2, 1] -> [7, 8, 2]."""
    before = offsets_of(lengths)
    return np.repeat(firsts - before[:-1], lengths) + np.arange(before[-1])


def seen_before(sample: IntArray, start: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs of a part of a sample and a later one, in the order of the later ones.

    samples [0, 1, 0, 0] from [4, 0, 0, 6] -> parts [2, 2, 0], those that see them [0, 3, 3]
    """
    order = np.lexsort((start, sample))
    first = np.searchsorted(sample[order], sample[order])  # part of the same sample
    before = np.arange(len(order)) - first
    return order[ranges_of(first, before)], np.repeat(order, before)


def sum_by(owner: IntArray, values: NDArray[Any], count: int) -> FloatArray:
    """Sum `values` by owner, in float64: owners [0, 1, 0] of values [1, 2, 3] -> [4, 2]."""
    return np.bincount(owner, weights=values, minlength=count).astype(np.float64, copy=False)


def by_first_appearance(ids: NDArray[np.integer]) -> tuple[IntArray, IntArray]:
    """(the number of each id, the first index of each number), numbered by first appearance.

    >>> [part.tolist() for part in by_first_appearance(np.array([7, 3, 7, 5]))]
    [[0, 1, 0, 2], [0, 1, 3]]
    """
    _, first, owner = np.unique(ids, return_index=True, return_inverse=True)
    renumber = np.empty(len(first), np.int64)
    renumber[np.argsort(first)] = np.arange(len(first))
    return renumber[owner], np.sort(first)


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of unequal length; row i is `values[offsets[i]:offsets[i + 1]]`. Read-only.

    >>> r = Ragged.of([[4, 1], [], [7]])
    >>> r[0].tolist(), len(r), r.offsets.tolist()
    ([4, 1], 3, [0, 2, 2, 3])
    """

    values: IntArray
    offsets: IntArray

    def __post_init__(self) -> None:
        for name in ("values", "offsets"):
            array = np.asarray(getattr(self, name), dtype=np.int64).view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        offsets = self.offsets
        assert len(offsets) >= 1, "offsets must not be empty"
        assert (offsets[0], offsets[-1]) == (0, len(self.values)), "offsets must span the values"

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """From a list of lists."""
        values = [value for row in rows for value in row]
        return cls(frozen(values), offsets_of(np.array([len(row) for row in rows], np.int64)))

    @classmethod
    def group(cls, owner: IntArray, count: int) -> Ragged:
        """The indices of `owner` by row, in order.

        >>> Ragged.group(np.array([1, 0, 1]), 3).tolist()
        [[1], [0, 2], []]
        """
        order = np.argsort(owner, kind="stable")
        return cls(order, offsets_of(np.bincount(owner, minlength=count)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> IntArray:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> IntArray:
        """The number of values in each row."""
        return np.diff(self.offsets)

    @property
    def owner(self) -> IntArray:
        """The row of each value: rows [[4, 1], [], [7]] -> [0, 0, 2]."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def sums(self, column: NDArray[np.integer]) -> IntArray:
        """Per row, the sum of `column[value]`."""
        return np.diff(offsets_of(column[self.values])[self.offsets])

    def tolist(self) -> list[list[int]]:
        """The rows as lists."""
        return [row.tolist() for row in self]


Whole = TypeVar("Whole", int, NDArray[np.int64])


def rounded_up(number: Whole, multiple: Whole | int) -> Whole:
    """`number` rounded up to a multiple.

    >>> rounded_up(5, 4), rounded_up(np.array([4, 5]), 4).tolist()
    (8, [4, 8])
    """
    return -(-number // multiple) * multiple


def divided_up(number: Whole, by: int) -> Whole:
    """`number` divided by `by`, rounded up.

    >>> divided_up(5, 4), divided_up(np.array([4, 5]), 4).tolist()
    (2, [1, 2])
    """
    return -(-number // by)


ELSEWHERE = -2
"""The parent of a segment whose sample is shared between ranks, and which is not its first part."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Columns of equal length: segment i is `length[i]` tokens of `sample[i]` from `start[i]`.

    >>> s = Segments(sample=[0, 1, 1], start=[0, 0, 8], length=[5, 8, 3])
    >>> len(s), s.length.tolist()
    (3, [5, 8, 3])
    """

    sample: IntArray
    start: IntArray
    length: IntArray
    parent: IntArray | None = None
    """The segment that each one sees in front of itself, counted from the first segment of its
    micro-batch; -1 for none. `ELSEWHERE` if it sees all tokens before it in its own sample, which
    other ranks hold in the same wave. None if no segment sees another one."""

    def __post_init__(self) -> None:
        for name in ("sample", "start", "length"):
            object.__setattr__(self, name, frozen(getattr(self, name)))
        if self.parent is not None:
            parent = frozen(self.parent)
            object.__setattr__(self, "parent", parent if (parent != -1).any() else None)
            assert len(parent) == len(self.sample), "columns must have equal length"
        assert len(self.sample) == len(self.start) == len(self.length), (
            "columns must have equal length"
        )

    def __len__(self) -> int:
        return len(self.sample)

    __setstate__ = set_fields

    @property
    def behind(self) -> IntArray | None:
        """The tokens that each segment sees in front of itself; None if no segment has a parent."""
        return None if self.parent is None else np.where(self.parent == -1, 0, self.start)

    @property
    def shares_slots(self) -> bool:
        """Whether a segment sees another one in its own micro-batch: samples share a prefix."""
        return self.parent is not None and bool((self.parent >= 0).any())

    @property
    def is_shared(self) -> BoolArray:
        """Whether each segment is a part of a sample that is shared between ranks.

        Of all segments of a wave: the first part of a sample does not say that others follow it.
        """
        if self.parent is None:
            return np.zeros(len(self), bool)
        return np.isin(self.sample, self.sample[self.parent == ELSEWHERE])

    def transfers(self, place: IntArray) -> tuple[IntArray, IntArray]:
        """(segments that are sent, places they are sent to), if segments are at `place`: ranks, or
        micro-batches.

        Each part of a shared sample goes to all other places that hold a later one, in their order,
        and to each in the order of samples. Parts 4, 1, 7 at 2, 0, 1 -> [4, 4, 1], [0, 1, 1].
        """
        parts = np.flatnonzero(self.is_shared)
        parts = parts[np.lexsort((self.start[parts], self.sample[parts]))]
        source, later = seen_before(self.sample[parts], self.start[parts])
        target = place[parts][later]
        away = target != place[parts][source]
        # Several parts at one place may see the same.
        pairs = np.unique((target * len(parts) + source)[away])
        target, source = np.divmod(pairs, max(len(parts), 1))
        return parts[source], target

    def take(self, index: IntArray | slice) -> Segments:
        """The segments at `index`, in that order; of whole micro-batches if they have parents."""
        parent = None if self.parent is None else self.parent[index]
        return Segments(self.sample[index], self.start[index], self.length[index], parent)


def own_segments(above: IntArray | None, count: int) -> BoolArray:
    """Which of `count` segments are no parent of another; `above` are the parents."""
    own = np.ones(count, bool)
    if above is not None:
        own[above[above >= 0]] = False
    return own


# Sample ids: the stored item that a sample comes from, and which sample of that item it is.
# Most items are one sample, whose id is the item's number. Further samples of an item (its parts)
# have ids above `MOST_ITEMS`, so that one integer identifies any sample in plans, batches and
# cursors.
MOST_ITEMS = 1 << 40
"""Items are numbered below this; parts of one item, below 2**22."""


def sample_number(item: int, part: int = 0) -> int:
    """The id of a part of an item.

    >>> sample_number(7), sample_number(7, 1) == 7 + MOST_ITEMS
    (7, True)
    """
    return item + part * MOST_ITEMS


def item_and_part(sample: int) -> tuple[int, int]:
    """The inverse of `sample_number`.

    >>> item_and_part(sample_number(7, 2))
    (7, 2)
    """
    return sample % MOST_ITEMS, sample // MOST_ITEMS


def sample_name(sample: int) -> str:
    """What an error message calls a sample.

    >>> sample_name(7), sample_name(sample_number(7, 2))
    ('7', '7 (part 2)')
    """
    item, part = item_and_part(sample)
    return f"{item} (part {part})" if part else str(item)
