"""Lengths of a dataset that does not give them: counted once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.data.sources.source import Draw, Sample, is_seeded, length_of
from evenstep.data.sources.token_lists import dataset_list_lengths
from evenstep.errors import InputError

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
