"""Which samples begin with the same tokens: an order of the samples, and what neighbours share."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenstep.core.ragged import IntArray, Segments, frozen
from evenstep.core.text import short_repr
from evenstep.errors import InputError

Ids: TypeAlias = NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class Prefixes:
    """Sample `order[i]` shares its first `shared[i]` tokens with sample `order[i - 1]`.

    `order` has every sample once, and `shared[0]` is 0. What any two samples share is the least
    value between them, so trees of any depth are two arrays.

    >>> prefixes = Prefixes(order=[0, 2, 1], shared=[0, 4, 2])
    >>> prefixes.take([0, 1]).shared.tolist()
    [0, 2]
    """

    order: IntArray
    shared: IntArray

    def __post_init__(self) -> None:
        for name in ("order", "shared"):
            numbers = whole_numbers(f"{name} of prefixes", getattr(self, name))
            object.__setattr__(self, name, frozen(numbers))

    def __len__(self) -> int:
        return len(self.order)

    @classmethod
    def of_groups(cls, groups: Sequence[Hashable] | NDArray[Any], lengths: ArrayLike) -> Prefixes:
        """Samples of one group share a prompt, whose length is given for each sample.

        >>> Prefixes.of_groups(["a", "b", "a"], [3, 2, 3]).shared.tolist()
        [0, 3, 0]
        """
        group = _numbered("groups", groups)
        prompt = whole_numbers("the prompt lengths", lengths)
        if len(group) != len(prompt):
            raise InputError(
                f"there are {len(group)} groups and {len(prompt)} prompt lengths. Give one of each "
                f"per sample."
            )
        order = np.argsort(group, kind="stable")
        same = group[order][1:] == group[order][:-1]
        differs = np.flatnonzero(same & (prompt[order][1:] != prompt[order][:-1]))
        if len(differs):
            one, other = order[differs[0] : differs[0] + 2].tolist()
            raise InputError(
                f"samples {one} and {other} are of one group, but their prompts have "
                f"{prompt[one]} and {prompt[other]} tokens. Give one length per group, or use "
                f"find_prefixes."
            )
        return cls(order, np.concatenate(([0], np.where(same, prompt[order][1:], 0)))[: len(order)])

    def between(self, samples: ArrayLike, others: ArrayLike) -> IntArray:
        """How many leading tokens each of `samples` shares with the one of `others`.

        A sample shares with itself the most that it shares with any other.

        >>> Prefixes(order=[0, 2, 1], shared=[0, 4, 2]).between([0, 1], [1, 1]).tolist()
        [2, 2]
        """
        one, other = self.position[np.asarray(samples)], self.position[np.asarray(others)]
        first, last = np.minimum(one, other) + 1, np.maximum(one, other) + 1
        padded = np.append(self.shared, 0)
        common = np.where(one == other, np.maximum(padded[one], padded[one + 1]), 0)
        # The least value from `first` up to `last`: of two spans of 1, 2, 4, ... values.
        span, least = 1, padded
        while (chosen := np.flatnonzero(last - first >= span)).size:
            common[chosen] = np.minimum(least[first[chosen]], least[last[chosen] - span])
            least, span = np.minimum(least[:-span], least[span:]), 2 * span
        return common

    @property
    def position(self) -> IntArray:
        """Where each sample stands in `order`."""
        position = np.empty(len(self), np.int64)
        position[self.order] = np.arange(len(self))
        return position

    def forks(self, segments: Segments, kind: IntArray) -> tuple[IntArray, IntArray]:
        """(an order of the segments, the leading tokens that each can share with the one before).

        Segments of one kind stand together, in the order of their prefixes. They can share one
        token less than is equal: the last equal one has several tokens after it.
        """
        sample, ends = segments.sample, segments.start + segments.length
        order = np.lexsort((segments.start, self.position[sample], kind))
        one, other = order[:-1], order[1:]
        equal = np.minimum(self.between(sample[one], sample[other]), ends[one])
        can = (kind[one] == kind[other]) & (segments.start[other] == 0)
        forks = np.zeros(len(order), np.int64)
        forks[1:] = np.where(can, np.maximum(np.minimum(equal, ends[other]) - 1, 0), 0)
        return order, forks

    def take(self, samples: ArrayLike) -> Prefixes:
        """The prefixes of some samples, numbered by their position in `samples`.

        A sample that is taken twice shares with itself what it shares with others.
        """
        chosen = whole_numbers("the samples to take", samples)
        order = np.argsort(self.position[chosen], kind="stable")
        shared = np.zeros(len(order), np.int64)
        shared[1:] = self.between(chosen[order][:-1], chosen[order][1:])
        return Prefixes(order, shared)

    def clipped(self, lengths: ArrayLike) -> Prefixes:
        """The prefixes of the same samples, cut to these lengths.

        >>> Prefixes(order=[0, 2, 1], shared=[0, 4, 2]).clipped([3, 5, 9]).shared.tolist()
        [0, 3, 2]
        """
        length = np.asarray(lengths, np.int64)[self.order]
        most = np.minimum(length, np.concatenate((length[:1], length[:-1])))
        return Prefixes(self.order, np.minimum(self.shared, most))

    def check(self, lengths: ArrayLike, input_ids: Sequence[Any] | Ids | None = None) -> None:
        """Raise if these are no prefixes of samples of these lengths and, if given, tokens."""
        length = whole_numbers("the lengths of the samples", lengths)
        if len(self.order) != len(length) or len(self.shared) != len(length):
            raise InputError(
                f"prefixes have {len(self.order)} samples and {len(self.shared)} shared lengths "
                f"for {len(length)} samples. Use find_prefixes of the same samples."
            )
        if not np.array_equal(np.sort(self.order), np.arange(len(length))):
            raise InputError(
                f"the order of the prefixes must have each of the samples 0 to {len(length) - 1} "
                f"once, got {short_repr(self.order.tolist())}. Use find_prefixes."
            )
        most = length[self.order]
        most[1:] = np.minimum(most[1:], most[:-1])
        most[:1] = 0
        for at in np.flatnonzero((self.shared < 0) | (self.shared > most))[:1].tolist():
            raise InputError(
                f"sample {self.order[at]} cannot share {self.shared[at]} tokens with the one "
                f"before it: from 0 to {most[at]} are possible. Correct shared[{at}], or the "
                f"length of its prompt."
            )
        if input_ids is not None:
            self._compare(length, _samples(input_ids))

    def _compare(self, lengths: IntArray, input_ids: list[Ids]) -> None:
        """Raise if tokens that two neighbours are said to share differ."""
        if [len(tokens) for tokens in input_ids] != lengths.tolist():
            raise InputError(
                f"the token ids have lengths {short_repr([len(tokens) for tokens in input_ids])}, "
                f"not {short_repr(lengths.tolist())}. Pass the tokens of the same samples."
            )
        for at in range(1, len(self)):
            one, other = self.order[at - 1 : at + 1].tolist()
            common = _common(input_ids[one], input_ids[other])
            if common < self.shared[at]:
                raise InputError(
                    f"samples {one} and {other} are said to share {self.shared[at]} tokens, but "
                    f"they differ at token {common}. Use find_prefixes, or correct the lengths."
                )


def find_prefixes(
    input_ids: Sequence[Any] | Ids,
    groups: Sequence[Hashable] | NDArray[Any] | None = None,
    same: Mapping[str, Sequence[Any] | NDArray[Any]] | None = None,
) -> Prefixes:
    """Which samples begin with the same tokens.

    input_ids  the token ids of each sample without padding: arrays, lists or tensors
    groups     a group of each sample; only samples of one group share
    same       other inputs of the model by name (images, audio), one value per sample; only samples
               in which all of them are equal share

    >>> prefixes = find_prefixes([[1, 2, 3], [7, 8], [1, 2, 4, 5]])
    >>> prefixes.order.tolist(), prefixes.shared.tolist()
    ([0, 2, 1], [0, 2, 0])
    """
    ids = _samples(input_ids)
    if len({tokens.dtype for tokens in ids}) > 1:
        ids = [np.asarray(tokens, np.int64) for tokens in ids]
    if not isinstance(same or {}, Mapping):
        raise InputError(
            f"same must map names to one value per sample, got {short_repr(same)}. Pass "
            f"same={{'images': [...]}}."
        )
    kinds = _kinds(len(ids), groups, same or {})
    # Samples that share tokens are neighbours in the order of their bytes, whatever that order is.
    as_bytes = [tokens.tobytes() for tokens in ids]
    order = np.array(sorted(range(len(ids)), key=as_bytes.__getitem__), np.int64)
    order = order[np.argsort(kinds[order], kind="stable")]
    shared = np.zeros(len(order), np.int64)
    for at in (np.flatnonzero(kinds[order][1:] == kinds[order][:-1]) + 1).tolist():
        shared[at] = _common(ids[order[at - 1]], ids[order[at]])
    return Prefixes(order, shared)


def _samples(input_ids: Sequence[Any] | Ids) -> list[Ids]:
    """The token ids of each sample as an array of integers."""
    if not hasattr(input_ids, "__iter__") or getattr(input_ids, "ndim", 1) == 0:
        raise InputError(
            f"input_ids must hold the token ids of each sample, got {short_repr(input_ids)}. Pass "
            f"one list or array per sample."
        )
    return [_ids(sample, tokens) for sample, tokens in enumerate(input_ids)]


def _ids(sample: int, tokens: Any) -> Ids:
    """The token ids of a sample as an array of integers."""
    array = _integers(tokens)
    if array is None:
        raise InputError(
            f"the token ids of sample {sample} must be a list or an array of integers below 2**63, "
            f"got {short_repr(tokens)}. Pass one list or array per sample."
        )
    return array


def whole_numbers(name: str, values: ArrayLike) -> IntArray:
    """A list of whole numbers as an array; an `InputError` for anything else."""
    array = _integers(values)
    if array is None:
        raise InputError(f"{name} must be a list of whole numbers, got {short_repr(values)}.")
    return array.astype(np.int64, copy=False)


def _integers(values: Any) -> Ids | None:
    """A list of integers that int64 holds, as an array; None for anything else."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):
        return None
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    # Numbers from 2**63 on would equal negative ones.
    large = array.dtype == np.uint64 and (array >= 2**63).any()
    return array if array.ndim == 1 and array.dtype.kind in "iu" and not large else None


def _common(one: Ids, other: Ids) -> int:
    """How many leading tokens are equal; reads about twice as many at most."""
    at, size, end = 0, 512, min(len(one), len(other))
    while at < end:
        differs = one[at : min(at + size, end)] != other[at : min(at + size, end)]
        first = int(differs.argmax())
        if differs[first]:
            return at + first
        at, size = at + size, 2 * size
    return end


def _kinds(
    count: int, groups: Sequence[Hashable] | NDArray[Any] | None, same: Mapping[str, Any]
) -> IntArray:
    """A number of each sample; only samples of one number may share."""
    kinds = np.zeros(count, np.int64)
    every = [] if groups is None else [("groups", groups)]
    for name, values in [*every, *((f"same[{name!r}]", values) for name, values in same.items())]:
        if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
            raise InputError(
                f"{name} must be a list or an array, got {short_repr(values)}. Give one entry per "
                f"sample."
            )
        if len(values) != count:
            raise InputError(
                f"{name} has {len(values)} entries for {count} samples. Give one per sample."
            )
        plain = values if name == "groups" else [_identity(name, value) for value in values]
        numbers = _numbered(name, plain).tolist()
        kinds = _numbered(name, list(zip(kinds.tolist(), numbers, strict=True)))
    return kinds


def _numbered(name: str, keys: Sequence[Hashable] | NDArray[Any]) -> IntArray:
    """Number keys by first appearance: ["b", "a", "b"] -> [0, 1, 0]."""
    numbers: dict[Hashable, int] = {}
    plain = keys.tolist() if hasattr(keys, "tolist") else keys
    try:
        number = np.array([numbers.setdefault(key, len(numbers)) for key in plain], np.int64)
        # Two samples without a group, or with NaN, are not of one group.
        missing = name == "groups" and any(key is None or key != key for key in numbers)
    except TypeError:  # not hashable, or pandas.NA
        missing = True
    if missing:
        raise InputError(f"{name} must have one number or text per sample, got {short_repr(keys)}.")
    return number


def _identity(name: str, value: Any) -> Hashable:
    """What is equal for equal values, and for no others."""
    if value is None or isinstance(value, bytes | str | int | float):
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # ragged, or a tensor that numpy cannot hold
        array = np.empty(0, object)
    if array.dtype.kind == "O":
        raise InputError(
            f"{name} has a {type(value).__name__}, which cannot be compared. Give arrays, bytes, "
            f"numbers or texts."
        )
    return array.dtype.str, array.shape, hashlib.blake2b(array.tobytes()).digest()
