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
        for name in LOSS_MASKS:
            if name in sample:
                mask = _array(sample[name])
                counted &= (mask[labels] if mask.ndim else mask) != 0
        if "labels" in sample:
            counted &= _array(sample["labels"])[labels] != -100
        for span in sample.get("loss_masking_spans", ()):
            counted[slice(*(max(int(edge) - labels.start, 0) for edge in span))] = False
    return int(counted.sum())


class SamplesWithoutLoss:
    """Counts the samples without a loss token until one has any. The first thousand, or all if
    there are fewer, are an error: a mask is wrong.

    >>> samples = SamplesWithoutLoss(2)
    >>> samples.add({"input_ids": [1, 2], "loss_mask": [0, 0]})
    >>> samples.add({"input_ids": [1, 2], "loss_mask": [0, 1]})
    >>> samples.found
    True
    """

    def __init__(self, total: int) -> None:
        self.found = False
        """Whether a sample has a loss token."""
        self._most, self._count = min(total, _MANY), 0

    def add(self, sample: Any) -> None:
        """Count a sample; those of one token have nothing to predict and are left out."""
        if self.found:
            return
        length = length_of(sample)
        if length < 2:
            self._most = max(self._most - 1, 0)
            return
        self._count += 1
        self.found = loss_tokens_of(sample, 0, length, length) > 0
        if not self.found and self._count >= self._most:
            raise InputError(
                f"none of the first {self._count} samples has a loss token. In the last one, "
                f"{cause_of_no_loss(sample)}"
            )


def check_some_loss(source: SampleSource) -> None:
    """Raise if none of the first thousand samples of a source has a loss token.

    Reads up to the first one that has, which is usually the first one.
    """
    seeded, without_loss = is_seeded(source), SamplesWithoutLoss(len(source))
    for item in range(min(len(source), _MANY)):
        with suppress(SampleError):  # the stream raises or skips it
            draw = Draw(item, 0, 0) if seeded else None
            for _, sample in read_samples(source, item, None, draw):
                without_loss.add(sample)
        if without_loss.found:
            return


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
    """Numbers of a sample as an array, from any device."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)
