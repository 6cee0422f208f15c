"""Rows of a batch's values: tensors, lists and `PackedTensor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from evenstep.compat.nemo_rl.packed_tensor import PackedTensor
from evenstep.core.text import short_repr
from evenstep.errors import InputError

_MEDIA = ("vllm_images", "vllm_videos", "vllm_audios")


class BatchError(InputError, AssertionError):
    """Rows, batch sizes or arguments that do not fit; NeMo-RL raises `AssertionError`."""


class MissingKeyError(InputError, KeyError):
    """A key is missing from a batch."""

    __str__ = Exception.__str__


def row_count(value: Any) -> int:
    """The number of rows of a value."""
    if not isinstance(value, Sized):
        raise InputError(f"expected a tensor, a PackedTensor or a list, got {short_repr(value)}.")
    return int(value.shape[0]) if isinstance(value, Tensor) else len(value)


def common_count(data: Mapping[str, Any]) -> int:
    """The number of rows of all values, 0 without values; raise if they differ."""
    counts = {key: row_count(value) for key, value in data.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{key} has {count}" for key, count in counts.items())
        raise BatchError(f"Batch sizes are not the same across the rollout batch: {shown}.")
    return next(iter(counts.values()), 0)


def take_rows(key: str, value: Any, rows: Sequence[int] | Tensor) -> Any:
    """A copy of these rows, in this order."""
    if isinstance(value, Tensor):
        return value.index_select(0, torch.as_tensor(rows, dtype=torch.long, device=value.device))
    if isinstance(value, PackedTensor):
        return value.slice(rows)
    if isinstance(value, list | tuple | np.ndarray):
        return [value[int(row)] for row in rows]
    raise InputError(f"{key} is {short_repr(value)}; expected a tensor, a PackedTensor or a list.")


def join_rows(key: str, values: Sequence[Any], pad: float) -> Any:
    """The rows of all values; tensors of two or more dimensions are padded along the second."""
    first = values[0]
    if isinstance(first, list):
        return [item for value in values for item in value]
    if isinstance(first, PackedTensor):
        return PackedTensor.concat(values)
    if not isinstance(first, Tensor):
        raise InputError(
            f"{key} is {short_repr(first)}; expected a tensor, a PackedTensor or a list."
        )
    if first.ndim < 2:
        return torch.cat(list(values))
    width = max(value.shape[1] for value in values)
    inner = (0, 0) * (first.ndim - 2)
    return torch.cat(
        [functional.pad(each, (*inner, 0, width - each.shape[1]), value=pad) for each in values]
    )


def join_batches(
    batches: Sequence[Mapping[str, Any]], pads: Mapping[str, float], missing_media: bool
) -> dict[str, Any]:
    """The rows of all batches, by key. Without rows, or with `missing_media`, keys may lack."""
    sizes = [_size(batch, missing_media) for batch in batches]
    joined = {}
    for key in sorted({key for batch in batches for key in batch}):
        lacking = [at for at, batch in enumerate(batches) if key not in batch and sizes[at]]
        first = next(batch[key] for batch in batches if key in batch)
        if lacking and not (missing_media and isinstance(first, PackedTensor)):
            raise MissingKeyError(f"{key!r} is missing from non-empty batches {lacking}.")
        values = [
            batch[key] if key in batch else PackedTensor.empty_rows_like(first, size)
            for batch, size in zip(batches, sizes, strict=True)
            if key in batch or size
        ]
        joined[key] = join_rows(key, values, pads.get(key, 0))
    return joined


def _size(batch: Mapping[str, Any], every: bool) -> int:
    """The rows of the first value; with `every`, of all of them."""
    sizes = {row_count(value) for value in (batch.values() if every else [*batch.values()][:1])}
    if len(sizes) > 1:
        raise InputError(f"a batch has inconsistent logical row counts: {sorted(sizes)}.")
    return next(iter(sizes), 0)


def repeat_rows(key: str, value: Any, times: int, share_media: bool) -> Any:
    """Each row `times` times. Items of lists are copied, except shared media."""
    if isinstance(value, Tensor):
        return value.repeat_interleave(times, dim=0)
    if isinstance(value, PackedTensor):
        raise NotImplementedError("PackedTensor does not currently support repeat_interleave.")
    repeated = []
    for item in value:
        found = list(_leaves(item)) if share_media else []
        packed = [(id(leaf), leaf) for leaf in found if isinstance(leaf, PackedTensor)]
        shared = {at: leaf.slice(range(len(leaf))).enable_deduplication() for at, leaf in packed}
        whole = {id(leaf): leaf for leaf in found if isinstance(leaf, Tensor | np.ndarray)}
        for _ in range(times):
            memo: dict[int, Any] = {at: deepcopy(leaf) for at, leaf in shared.items()}
            repeated.append(deepcopy(item, memo | whole if key in _MEDIA else memo))
    return repeated


def _leaves(value: Any) -> Iterator[Any]:
    """What containers hold, at any depth."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
