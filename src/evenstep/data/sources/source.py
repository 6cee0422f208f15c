"""The protocols of a source, and how streams read one.

A source is indexed by item, or read in order from a start. An item is one sample, or a list of
several. A sample is usually a mapping with `input_ids`; streams need only its length.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard, cast, runtime_checkable

import numpy as np

from evenstep.core.identity import sample_name, sample_number
from evenstep.core.ragged import IntArray
from evenstep.errors import FileError, InputError, SampleError

Sample: TypeAlias = Any
"""Usually a mapping with `input_ids`; anything that has a length is accepted."""
Source: TypeAlias = "SampleSource | SequentialSource"


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
            given = item if has_random_access(source) else raw
            found = cast("SeededSource", source).drawn(given, draw)
        elif has_random_access(source):
            found = source[item]
        else:
            found = cast("SequentialSource", source).decode(raw)
    except (SampleError, FileError):
        raise
    except Exception as error:
        # This includes StopIteration, which would otherwise end the stream silently.
        raise unreadable(item, error) from error
    if not isinstance(found, list):
        return [(item, found)]
    return [(sample_number(item, part), sample) for part, sample in enumerate(found)]


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


def length_of(sample: Sample) -> int:
    """The number of tokens of a sample: the length of its `input_ids`, or of the sample itself.

    >>> length_of({"input_ids": [5, 6, 7]}), length_of([1, 2])
    (3, 2)
    """
    tokens: Sized = sample["input_ids"] if isinstance(sample, (dict, Mapping)) else sample
    return len(tokens)
