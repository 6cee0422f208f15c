"""Sources: the protocols, how streams read one, and what a sample holds."""

from __future__ import annotations

import hashlib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray, sample_name, sample_number
from evenstep.errors import FileError, InputError, SampleError

# Protocols ----------------------------------------------------------------------------------------

# A source is indexed by item, or read in order from a start. An item is one sample, or a list of
# several. A sample is usually a mapping with `input_ids`; streams need only its length.

Sample: TypeAlias = Any
"""Usually a mapping with `input_ids`; anything that has a length is accepted."""
Source: TypeAlias = "SampleSource | SequentialSource"
Progress: TypeAlias = Callable[[int, int], None]
"""Called with how much is done, and how much there is in all."""


class Draw(NamedTuple):
    """What determines a random sample: its id, the epoch, and the seed of the stream.

    >>> draw = Draw(sample_id=7, epoch=2, seed=0)
    >>> np.random.default_rng(draw).integers(100)
    np.int64(28)
    """

    sample_id: int
    """The number of the item."""
    epoch: int
    seed: int


@runtime_checkable
class SampleSource(Protocol):
    """Items by index, in any order. An index gives the same item at any time, in any process or
    thread. An item that is a `list` is several samples; anything else is one."""

    @property
    def fingerprint(self) -> str:
        """Changes when the items or their order change. Cheap, so it may cover only some items."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> Sample: ...


@runtime_checkable
class MeasuredSource(SampleSource, Protocol):
    """A source whose items are single samples, with lengths known without reading them."""

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items, as int64."""


@runtime_checkable
class SequentialSource(Protocol):
    """Items in order, possibly without a known end. `open` gives raw items, which is cheap;
    `decode` turns one into samples, so that items of other readers are never decoded."""

    @property
    def fingerprint(self) -> str:
        """Changes when the items or their order change."""

    def open(self, start: int, epoch: int) -> Iterator[Any]:
        """The raw items from index `start` on."""

    def decode(self, item: Any) -> Sample:
        """The sample, or list of samples, of one raw item."""


@runtime_checkable
class SeededSource(Protocol):
    """What a source has whose samples depend on epoch and seed, in addition to the above."""

    @property
    def seeded(self) -> bool:
        """Whether they do. If not, `drawn` is not called."""

    def drawn(self, item: Any, draw: Draw) -> Sample:
        """What `source[item]`, or `decode(item)` of a raw item, is in this epoch."""


def is_seeded(source: object) -> bool:
    """Whether samples depend on epoch and seed."""
    return bool(getattr(source, "seeded", False))


def has_random_access(source: Source) -> TypeGuard[SampleSource]:
    """Whether items can be read by index."""
    return hasattr(source, "__getitem__")


def check_items(items: IntArray, count: int) -> None:
    """Raise an IndexError unless all `items` are in [0, count). Negative indices are refused."""
    if len(items) and (np.min(items) < 0 or np.max(items) >= count):
        raise IndexError(f"items {np.min(items)} to {np.max(items)} of {count}")


def read_samples(
    source: Source, item: int, raw: Any = None, draw: Draw | None = None
) -> list[tuple[int, Sample]]:
    """(sample id, sample) of every sample of an item. Errors name the item.

    `raw` is the raw item of a sequential source. `draw` is given if the source is seeded. A
    `FileError` is raised as it is, because it does not concern one sample only.
    """
    try:
        if draw is not None:
            indexed = has_random_access(source)
            content = cast("SeededSource", source).drawn(item if indexed else raw, draw)
        elif has_random_access(source):
            content = source[item]
        else:
            content = cast("SequentialSource", source).decode(raw)
    except (SampleError, FileError):
        raise
    except Exception as error:
        # This includes StopIteration, which would otherwise end the stream silently.
        raise unreadable(item, error) from error
    if not isinstance(content, list):
        return [(item, content)]
    return [(sample_number(item, part), sample) for part, sample in enumerate(content)]


def unreadable(sample_id: int, error: BaseException) -> SampleError:
    """The error for a sample that raised `error`."""
    return SampleError(
        f"sample {sample_name(sample_id)} cannot be read ({type(error).__name__}: {error}). "
        f"Repair it, or skip such samples with on_error='skip'."
    )


def cause_of(error: SampleError) -> str:
    """What was wrong with a sample, without the advice to skip such samples."""
    return re.split(r" (?:Repair|Remove) it, or skip", str(error))[0]


LOSS_MASKS = (
    "loss_mask",
    "assistant_masks",  # tokenizers of Hugging Face
    "response_mask",  # verl, ROLL
    "final_response_mask",  # ROLL
    "completion_mask",  # TRL
    "tool_mask",  # TRL
    "token_mask",  # NeMo-RL
    "sample_mask",  # NeMo-RL; one number for the whole sample
    "action_mask",  # OpenRLHF
)
"""Keys of a sample with 1 per token that counts in the loss and 0 for others, under the names of
several systems. A token counts if no mask that the sample has is 0. An entry belongs to the token
that is predicted, not to the one before it."""

SPANS = "loss_masking_spans"
"""The key of a sample with (begin, end) pairs of tokens that do not count in the loss."""
TARGETS = ("labels", SPANS, *LOSS_MASKS)
"""All keys that say which tokens count in the loss, or what is predicted there."""

_SPELLINGS = {name.replace("_", ""): name for name in LOSS_MASKS}
_OTHER_MASKS = ("attention_mask", "special_tokens_mask")  # endings; say nothing about the loss


def check_masks_read(names: Iterable[str], read: Collection[str], remedy: str) -> None:
    """Raise if one of `names` looks like a mask and is not in `read`, so that it has no effect."""
    for name in names:
        if _looks_like_mask(name) and name not in read:
            raise InputError(
                f"{name!r} looks like a mask, but nothing reads it. A loss mask is 1 for tokens "
                f"that count in the loss and is named {', '.join(LOSS_MASKS[:-1])} or "
                f"{LOSS_MASKS[-1]}. {remedy}"
            )


def check_masks_spelt(names: Iterable[str]) -> None:
    """Raise if one of the `names` of extras seems to be a misspelt loss mask.

    >>> check_masks_spelt(["prompt_mask"])
    """
    for name in names:
        plain = name.lower().replace("_", "")
        meant = get_close_matches(plain, _SPELLINGS, n=1, cutoff=0.9)
        if meant and _looks_like_mask(name):
            raise InputError(
                f"{name!r} is almost the loss mask {_SPELLINGS[meant[0]]!r}, but it would not mask "
                f"the loss. Correct its name, or give it another one if it is not a loss mask."
            )


def _looks_like_mask(name: str) -> bool:
    ending = name.lower()
    mask = ending.endswith(("mask", "masks")) and not ending.endswith(_OTHER_MASKS)
    return mask and name not in LOSS_MASKS


def hides_tokens(sample: Mapping[str, Any]) -> bool:
    """Whether the `attention_mask` of a sample is not 1 for all: some are padding."""
    mask = sample.get("attention_mask")
    if isinstance(mask, list):
        return mask.count(1) != len(mask)
    return mask is not None and not (_array(mask) == 1).all()


def length_of(sample: Sample) -> int:
    """The number of tokens of a sample: the length of its `input_ids`, or of the sample itself.

    >>> length_of({"input_ids": [5, 6, 7]}), length_of([1, 2])
    (3, 2)
    """
    tokens: Sized = sample["input_ids"] if isinstance(sample, (dict, Mapping)) else sample
    return len(tokens)


# Transforms ---------------------------------------------------------------------------------------

Transform: TypeAlias = Callable[..., Sample | list[Sample]]
"""From an item to one sample, or to a list of several. A seeded transform also has parameters named
`sample_id`, `epoch` or `seed`."""


@dataclass(frozen=True, slots=True)
class ItemTransform:
    """Calls a transform (None: items are samples) with what its signature asks for.

    >>> def crop(tokens, *, sample_id, epoch):
    ...     return tokens[(sample_id + epoch) % 2 :]
    >>> ItemTransform.of(crop)([5, 6, 7], Draw(sample_id=3, epoch=0, seed=0))
    [6, 7]
    """

    function: Transform | None
    takes: tuple[str, ...] = ()
    """The fields of a `Draw` that the function takes."""

    @classmethod
    def of(cls, function: Transform | None) -> ItemTransform:
        """With what the signature of `function` asks for. Its first parameter is the item, and
        arguments that a `functools.partial` has fixed stay as they are."""
        if function is None:
            return cls(None)
        fixed = set(function.keywords) if isinstance(function, partial) else set()
        named = parameters_of(function, skip=1)
        return cls(function, tuple(n for n in Draw._fields if n in named and n not in fixed))

    @property
    def seeded(self) -> bool:
        """Whether samples depend on more than their item."""
        return bool(self.takes)

    def __call__(self, item: Any, draw: Draw | None = None) -> Sample | list[Sample]:
        if self.function is None:
            return item
        if not self.takes:
            return self.function(item)
        if draw is None:
            raise InputError(
                f"the transform takes {', '.join(self.takes)}, which only a stream knows. Read the "
                f"source with a stream, or call drawn(item, Draw(...)) of the source."
            )
        return self.function(item, **{name: getattr(draw, name) for name in self.takes})


def parameters_of(function: Callable[..., Any], skip: int = 0) -> set[str]:
    """Names of the parameters that can be passed by name, without the first `skip`.

    >>> sorted(parameters_of(lambda row, epoch, *, seed: row, skip=1))
    ['epoch', 'seed']
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return set()  # some builtins have no signature
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    first = [p for p in parameters if p.kind != inspect.Parameter.KEYWORD_ONLY][:skip]
    return {p.name for p in parameters if p.kind in named and p not in first}


class TransformedItems(ABC):
    """What sources by index share whose items go through a transform, which may be seeded."""

    transform: ItemTransform

    @abstractmethod
    def _read(self, item: int, draw: Draw | None = None) -> Sample | list[Sample]:
        """The samples of an item. Raises an IndexError if there is no such item."""

    @property
    def seeded(self) -> bool:
        """Whether the transform takes a sample's id, epoch or seed."""
        return self.transform.seeded

    def __getitem__(self, item: int, /) -> Sample | list[Sample]:
        return self._read(item)

    def drawn(self, item: int, draw: Draw) -> Sample | list[Sample]:
        """An item with a seeded transform."""
        return self._read(item, draw)

    def _samples_digest(self, count: int) -> bytes:
        """A digest of 16 of the first `count` items, as epoch 0 of seed 0 draws them."""
        return samples_digest(lambda item: self._read(item, Draw(item, 0, 0)), spread(count))


# Digests ------------------------------------------------------------------------------------------

_SPREAD_ITEMS = 16
ALL_DIGESTED, _SOME_DIGESTED = 2**18, 4096  # entries of a column: all, or so many of more


def spread(count: int, most: int = _SPREAD_ITEMS) -> list[int]:
    """Up to `most` of `count` items, evenly spread, with the first and the last.

    >>> spread(100, 4), spread(2)
    ([0, 33, 66, 99], [0, 1])
    """
    items: list[int] = np.linspace(0, count - 1, min(count, most)).astype(np.int64).tolist()
    return items


def column_digest(
    read: Callable[[IntArray], NDArray[Any]], count: int, complete: int = _SOME_DIGESTED
) -> str:
    """A digest of a column of `count` entries, at a cost that does not grow with it: of all of up
    to `complete` entries, of 4096 of more."""
    whole = count <= complete
    seen = read(np.arange(count) if whole else np.array(spread(count, _SOME_DIGESTED)))
    if seen.dtype.kind in "biuf":
        body = seen.astype("<f8" if seen.dtype.kind == "f" else "<i8").tobytes()
    else:
        body = repr(seen.tolist()).encode()
    return digest_of(b"%d " % count, body, size=8).hex()


def digest_of(*parts: str | bytes | memoryview, size: int = 16) -> bytes:
    """A digest of the parts, joined. In hexadecimal it is a fingerprint."""
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.digest()


def samples_digest(read: Callable[[int], Any], items: Iterable[int]) -> bytes:
    """A digest of the samples of these items; b"" if they are random.

    Every item is read twice, because a transform that draws random numbers of its own must not
    make the fingerprint random, too. An item that cannot be read is part of the digest.
    """
    first, second = ([_item_digest(read, item) for item in items] for _ in range(2))
    return b"".join(first) if first == second else b""


def _item_digest(read: Callable[[int], Any], item: int) -> bytes:
    try:
        content = read(item)
    except Exception:
        return digest_of("unreadable")
    samples = content if isinstance(content, list) else [content]
    return digest_of(f" {item} {len(samples)}", *map(_sample_bytes, samples))


def _sample_bytes(sample: Any) -> bytes:
    """The tokens of a sample, then its other values by name."""
    if not isinstance(sample, Mapping):
        return _bytes(sample)
    names = [name for name in sorted(map(str, sample)) if name != "input_ids" and name in sample]
    values = [f" {name} ".encode() + _bytes(sample[name]) for name in names]
    return _bytes(sample.get("input_ids")) + b"".join(values)


def _bytes(value: Any) -> bytes:
    """A value as bytes; numbers in the same way for any container and width.

    Values that are neither numbers nor text count by their type and length only.
    """
    if isinstance(value, str | bytes):
        body = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        return b" %d " % len(body) + body
    with suppress(TypeError, ValueError, RuntimeError):  # ragged lists, tensors on a device
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            body = array.astype("<f8" if array.dtype.kind == "f" else "<i8").tobytes()
            return f" {'x'.join(map(str, array.shape)) or '-'} ".encode() + body
    if isinstance(value, list | tuple):
        return b" [" + b"".join(map(_bytes, value)) + b"]"
    if isinstance(value, Mapping):
        return b" {" + _sample_bytes(value) + b"}"
    try:
        size: Any = len(value)
    except TypeError:
        size = "-"
    return f" {type(value).__qualname__} {size}".encode()


# Loss tokens --------------------------------------------------------------------------------------

_MANY = 1000  # samples that cannot all be without a loss token by chance
_MOST_ITEMS = 10_000  # that are read to find these samples


def loss_tokens_of(sample: Any, start: int, end: int, stop: int) -> int:
    """Count the loss tokens of tokens `start` to `end` of a sample that ends at `stop`.

    Uses the sample's `labels` and loss masks, as the collator does. Token i is predicted at i - 1,
    so the first token of a sample is not a label, and the first token after a segment is.

    >>> sample = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
    >>> loss_tokens_of(sample, 0, 3, 3), loss_tokens_of(sample, 0, 1, 3)
    (2, 1)
    """
    return int(loss_labels_of(sample, start, end, stop).sum())


def loss_labels_of(sample: Any, start: int, end: int, stop: int) -> NDArray[np.bool_]:
    """Which of the labels of tokens `start` to `end` are loss tokens: of the tokens after these.

    >>> loss_labels_of({"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}, 0, 3, 3).tolist()
    [True, False]
    """
    labels = slice(start + 1, min(end + 1, stop))
    counted = np.ones(max(labels.stop - labels.start, 0), np.bool_)
    if not isinstance(sample, Mapping):
        return counted
    try:
        for mask in (_array(sample[name]) for name in LOSS_MASKS if name in sample):
            counted &= (mask[labels] if mask.ndim else mask) != 0
        if "labels" in sample:
            counted &= _array(sample["labels"])[labels] != -100
        for span in sample.get(SPANS, ()):
            counted[slice(*(max(int(edge) - labels.start, 0) for edge in span))] = False
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"the loss tokens of a sample cannot be counted ({type(error).__name__}: {error}). "
            f"Give its labels and loss masks one number per token, and omit those that are None."
        ) from None
    return counted


class SamplesWithoutLoss:
    """Counts the samples without a loss token until one has any. That the first thousand have none,
    or all if there are fewer, is an error: a mask is wrong.

    Samples of one token have nothing to predict. Those that the collator would refuse are left to
    it. Neither counts.

    >>> samples = SamplesWithoutLoss()
    >>> samples.add({"input_ids": [1, 2], "loss_mask": [0, 0]})
    >>> samples.add({"input_ids": [1, 2], "loss_mask": [0, 1]})
    >>> samples.any_loss
    True
    """

    def __init__(self) -> None:
        self.any_loss = False
        """Whether a sample has a loss token."""
        self._count = 0
        self._last: Any = None

    def add(self, sample: Any) -> None:
        """Count a sample; raises if it is the thousandth without a loss token."""
        if self.any_loss:
            return
        try:
            length = length_of(sample)
            loss_tokens = loss_tokens_of(sample, 0, length, length)
        except (InputError, KeyError, TypeError):
            return
        if length < 2:
            return
        self._count, self._last, self.any_loss = self._count + 1, sample, loss_tokens > 0
        if self._count >= _MANY:
            self.end()

    def end(self) -> None:
        """Raise if samples were added and none has a loss token."""
        if self._count and not self.any_loss:
            raise InputError(
                f"none of the first {self._count} samples of two or more tokens has a loss token. "
                f"In the last one, {cause_of_no_loss(self._last)}"
            )


def check_some_loss(source: SampleSource) -> None:
    """Raise if none of the first thousand samples of a source has a loss token.

    Reads up to the first one that has, which is usually the first one.
    """
    seeded, without_loss = is_seeded(source), SamplesWithoutLoss()
    for item in range(min(len(source), _MOST_ITEMS)):
        with suppress(SampleError):  # the stream raises or skips it
            draw = Draw(item, 0, 0) if seeded else None
            for _, sample in read_samples(source, item, None, draw):
                without_loss.add(sample)
        if without_loss.any_loss:
            return
    if len(source) <= _MOST_ITEMS:
        without_loss.end()


def cause_of_no_loss(sample: Any) -> str:
    """Why a sample has no loss token, and what to do."""
    names = sample if isinstance(sample, Mapping) else ()
    hidden = [name for name in LOSS_MASKS if name in names and not _array(sample[name]).any()]
    if hidden == ["assistant_masks"]:
        return (
            "'assistant_masks' is 0 for every token, as tokenizers return it for a chat template "
            "without {% generation %} marks. Encode chats with evenstep.data.ChatEncoder, which "
            "needs no marks, or add them to the template."
        )
    if hidden:
        return f"{hidden[0]!r} is 0 for every token. Set it to 1 for the tokens to train."
    if "labels" in names and not (_array(sample["labels"])[1:] != -100).any():
        return "'labels' is -100 for every token but the first. Set the labels of tokens to train."
    return (
        "loss masks and labels hide every token, or the tokens to train were truncated. Check the "
        "masks, and raise the budget or drop such samples."
    )


def _array(values: Any) -> NDArray[Any]:
    """Numbers of a sample as an array, from any device, also those that numpy has no type for."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
    return np.asarray(values)
