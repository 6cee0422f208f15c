"""Lengths and loss tokens of samples, counted when they are not given."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray
from evenstep.data.sources.source import (
    LOSS_MASKS,
    Draw,
    Sample,
    SampleSource,
    is_seeded,
    length_of,
    read_samples,
)
from evenstep.data.sources.token_lists import dataset_list_lengths
from evenstep.errors import InputError, SampleError

_MANY = 1000  # samples that cannot all be without a loss token by chance
_MOST_ITEMS = 10_000  # that are read to find these samples
_PATIENCE = 5.0  # seconds until a warning says how long it will take


def measured_lengths(
    dataset: Any,
    read: Callable[[int], Sample] | None,
    progress: Callable[[int, int], None] | None = None,
) -> IntArray:
    """The lengths of all items of a dataset; of what `read` gives, if it is not None.

    Without `read`, they come from `lengths_of` or the column `input_ids`, if the dataset has one,
    which reads no other columns. Otherwise every item is read once. `progress(done, total)` is
    called meanwhile; without it, a warning says how long it takes, if that is long.
    """
    if read is None and hasattr(dataset, "lengths_of"):
        found: IntArray = dataset.lengths_of(np.arange(len(dataset)))
        return found
    if read is None and _has_column(dataset):
        listed = dataset_list_lengths({"the dataset": dataset}, "input_ids", progress or _ignored)
        if listed is not None:
            return listed
    if read is None and is_seeded(dataset):
        return _of_items(dataset, lambda item: dataset.drawn(item, Draw(item, 0, 0)), progress)
    return _of_items(dataset, dataset.__getitem__ if read is None else read, progress)


def _ignored(done: int, total: int) -> None:
    """Progress that is not shown."""


def _has_column(dataset: Any) -> bool:
    """Whether it is a Hugging Face dataset with `input_ids`, read as they are stored."""
    columns = getattr(dataset, "column_names", None)
    if not (isinstance(columns, list) and "input_ids" in columns):
        return False
    kind = getattr(dataset, "format", {}).get("type")
    return hasattr(dataset, "select_columns") and kind != "custom"  # custom: `set_transform`


def _of_items(
    dataset: Any, read: Callable[[int], Sample], progress: Callable[[int, int], None] | None
) -> IntArray:
    total, start, warned = len(dataset), time.monotonic(), progress is not None
    lengths = np.zeros(total, np.int64)
    for item in range(total):
        lengths[item] = item_length(item, read(item))
        if progress is not None:
            progress(item + 1, total)
        elapsed = time.monotonic() - start
        if elapsed > _PATIENCE and not warned:
            warned = True
            minutes = elapsed * total / (item + 1) / 60
            warnings.warn(
                f"reading all {total:,} items once to know their lengths takes about "
                f"{minutes:.1f} minutes. Pass them with MeasuredMapped(dataset, lengths=...), or "
                f"use a PooledStream, which needs none.",
                stacklevel=2,
            )
    return lengths


def item_length(item: int, sample: Sample) -> int:
    """The length of an item that is one sample."""
    if isinstance(sample, list):
        raise InputError(
            f"item {item} is a list, that is several samples, so it has no single length. Pass one "
            f"mapping or array per item, or use a PooledStream."
        )
    try:
        return length_of(sample)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"item {item} has no length ({type(error).__name__}: {error}). Pass a mapping with "
            f"input_ids, or a sequence of tokens."
        ) from None


# Loss tokens -----------------------------------------------------------------------------------


def loss_tokens_of(sample: Any, start: int, end: int, stop: int) -> int:
    """Count the loss tokens of tokens `start` to `end` of a sample that ends at `stop`.

    Uses the sample's `labels` and loss masks, as the collator does. Token i is predicted at i - 1,
    so the first token of a sample is not a label, and the first token after a segment is.

    >>> sample = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
    >>> loss_tokens_of(sample, 0, 3, 3), loss_tokens_of(sample, 0, 1, 3)
    (2, 1)
    """
    labels = slice(start + 1, min(end + 1, stop))
    counted = np.ones(max(labels.stop - labels.start, 0), np.bool_)
    if isinstance(sample, Mapping):
        try:
            _hide(counted, sample, labels)
        except (LookupError, TypeError, ValueError) as error:
            raise InputError(
                f"the loss tokens of a sample cannot be counted ({type(error).__name__}: {error}). "
                f"Give its labels and loss masks one number per token, and omit those that are "
                f"None."
            ) from None
    return int(counted.sum())


def _hide(counted: NDArray[np.bool_], sample: Mapping[str, Any], labels: slice) -> None:
    """Set to False what the sample's masks and labels hide of the tokens `labels`."""
    for name in LOSS_MASKS:
        if name in sample:
            mask = _array(sample[name])
            counted &= (mask[labels] if mask.ndim else mask) != 0
    if "labels" in sample:
        counted &= _array(sample["labels"])[labels] != -100
    for span in sample.get("loss_masking_spans", ()):
        counted[slice(*(max(int(edge) - labels.start, 0) for edge in span))] = False


class SamplesWithoutLoss:
    """Counts the samples without a loss token until one has any. That the first thousand have none,
    or all if there are fewer, is an error: a mask is wrong.

    Samples of one token have nothing to predict. Those that the collator would refuse are left to
    it. Neither counts.

    >>> samples = SamplesWithoutLoss()
    >>> samples.add({"input_ids": [1, 2], "loss_mask": [0, 0]})
    >>> samples.add({"input_ids": [1, 2], "loss_mask": [0, 1]})
    >>> samples.found
    True
    """

    def __init__(self) -> None:
        self.found = False
        """Whether a sample has a loss token."""
        self._count = 0
        self._last: Any = None

    def add(self, sample: Any) -> None:
        """Count a sample; raises if it is the thousandth without a loss token."""
        if self.found:
            return
        try:
            length = length_of(sample)
            loss_tokens = loss_tokens_of(sample, 0, length, length)
        except (InputError, KeyError, TypeError):
            return
        if length < 2:
            return
        self._count, self._last, self.found = self._count + 1, sample, loss_tokens > 0
        if self._count >= _MANY:
            self.end()

    def end(self) -> None:
        """Raise if samples were added and none has a loss token."""
        if self._count and not self.found:
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
        if without_loss.found:
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
