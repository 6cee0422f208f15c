"""BatchedDataDict: a padded batch by key, and its shards over data-parallel ranks."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from evenstep.compat.nemo_rl.packed_tensor import PackedTensor
from evenstep.compat.nemo_rl.rows import (
    BatchError,
    common_count,
    join_batches,
    repeat_rows,
    row_count,
    take_rows,
)
from evenstep.compat.nemo_rl.sharding import (
    DynamicBatchingArgs,
    RankRows,
    SequencePackingArgs,
    check_even,
    dynamic_rows,
    packed_rows,
    share_rows,
)
from evenstep.core.ragged import IntArray
from evenstep.core.text import whole_number
from evenstep.errors import InputError

_Batch = TypeVar("_Batch", bound="BatchedDataDict")
_COUPLED = (
    ("pixel_values", "imgs_sizes"),
    ("pixel_values", "image_grid_thw"),
    ("pixel_values_videos", "video_grid_thw"),
)


class BatchedDataDict(UserDict[str, Any]):
    """Tensors, lists and `PackedTensor`s with one row per sample.

    >>> batch = BatchedDataDict({"ids": torch.arange(8)})
    >>> [shard["ids"].tolist() for shard in batch.shard_by_batch_size(shards=2, batch_size=4)]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """

    ADDITIONAL_OPTIONAL_KEY_TENSORS: ClassVar[list[str]] = ["token_type_ids", "mm_token_type_ids"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None
        self.packing_metrics: dict[str, float] | None = None

    @property
    def size(self) -> int:
        """The number of rows."""
        return row_count(next(iter(self.data.values()))) if self.data else 0

    def get_dict(self) -> dict[str, Any]:
        """The values by key."""
        return self.data

    def to(self, device: Any) -> Self:
        """Move tensors and media to `device` in place; returns itself."""
        for key, value in self.data.items():
            if isinstance(value, Tensor | PackedTensor):
                self.data[key] = value.to(device)
        return self

    # Sharding ------------------------------------------------------------------------------------

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]:
        """Divide each chunk of `batch_size` rows over `shards`; a chunk is an optimizer step.

        With either dict of arguments, the shards have micro-batches, and the second result is the
        row of this batch at each position of the concatenated shards, as `reorder_data` takes it.
        With `allow_uneven_shards`, any number of rows is divided; some shards then have fewer rows
        or empty micro-batches, but all have the same number of them.
        """
        whole_number("shards", shards)
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise BatchError(
                "dynamic_batching_args and sequence_packing_args cannot be passed together. Leave "
                "one of them out."
            )
        total = common_count(self.data)
        chunk = total if batch_size is None else whole_number("batch_size", batch_size)
        if not allow_uneven_shards:
            check_even(total, chunk, shards)
        if dynamic_batching_args is not None:
            return self._shards(dynamic_rows(self.data, shards, chunk, dynamic_batching_args))
        if sequence_packing_args is not None:
            return self._shards(*packed_rows(self.data, shards, chunk, sequence_packing_args))
        parts = []
        for rows in share_rows(total, shards, chunk):
            parts.append(self._take(_joined(rows), SlicedDataDict()))
            if allow_uneven_shards and batch_size is not None:
                parts[-1].elem_counts_per_gb = [len(part) for part in rows]
        return parts

    def _shards(
        self, dealt: list[RankRows], metrics: dict[str, float] | None = None
    ) -> tuple[list[SlicedDataDict], list[int]]:
        """The shard of each rank, and the rows of all of them."""
        parts = []
        for mine in dealt:
            part = self._take(_joined(mine.rows), SlicedDataDict())
            part.micro_batch_indices = [mine.spans(chunk) for chunk in range(len(mine.rows))]
            part.micro_batch_lengths = [widths.tolist() for widths in mine.widths]
            part.elem_counts_per_gb = [len(rows) for rows in mine.rows]
            part.packing_metrics = metrics
            parts.append(part)
        return parts, [row for mine in dealt for row in _joined(mine.rows)]

    def _take(self, rows: Sequence[int] | Tensor, into: _Batch) -> _Batch:
        for key, value in self.data.items():
            into[key] = take_rows(key, value, rows)
        return into

    def reorder_data(self, reorded_indices: Sequence[int]) -> None:
        """Move the row at each position to the given place, in place.

        >>> batch = BatchedDataDict({"row": torch.tensor([30, 0, 20, 10])})
        >>> batch.reorder_data([3, 0, 2, 1])
        >>> batch["row"].tolist()
        [0, 10, 20, 30]
        """
        places = np.asarray(reorded_indices, np.int64)
        total = common_count(self.data)
        if not np.array_equal(np.sort(places), np.arange(total)):
            raise BatchError(
                f"{len(places)} indices are no permutation of {total} rows. Pass the second "
                f"result of shard_by_batch_size."
            )
        self._take(np.argsort(places).tolist(), self)

    # Parts of a batch ----------------------------------------------------------------------------

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict:
        """Chunk `batch_idx`; rows per chunk are known after `shard_by_batch_size` with arguments.

        `batch_size` says how many they are otherwise.
        """
        counts = self.elem_counts_per_gb
        if counts is not None:
            start = sum(counts[:batch_idx])
            batch = self.slice(start, start + counts[batch_idx])
            batch.elem_counts_per_gb = [counts[batch_idx]]
        elif batch_size is not None:
            batch = self.slice(batch_size * batch_idx, batch_size * (batch_idx + 1))
        else:
            raise BatchError("get_batch needs batch_size, because this batch has no chunks.")
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        return batch

    def slice(self, start: int, end: int) -> SlicedDataDict:
        """Rows `start` to `end`; tensors are views."""
        part = SlicedDataDict()
        for key, value in self.data.items():
            if not 0 <= start <= end <= row_count(value):
                raise BatchError(
                    f"rows {start} to {end} were asked for, but {key} has {row_count(value)}."
                )
            packed = isinstance(value, PackedTensor)
            part[key] = value.slice(range(start, end)) if packed else value[start:end]
        return part

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
        """Part `rank` of `chunks` equal, contiguous parts."""
        total = common_count(self.data)
        if total % whole_number("chunks", chunks):
            raise BatchError(f"batch size ({total}) is not a multiple of chunks ({chunks}).")
        whole_number("rank", rank, least=0, most=chunks - 1)
        size = total // chunks
        return self._take(range(rank * size, (rank + 1) * size), SlicedDataDict())

    def select_indices(self, indices: Sequence[int] | Tensor) -> Self:
        """A copy of these rows."""
        return self._take(indices, type(self)())

    def repeat_interleave(self, num_repeats: int, *, share_immutable_media: bool = False) -> Self:
        """Each row `num_repeats` times; with `share_immutable_media`, copies share their media."""
        batch = type(self)()
        for key, value in self.data.items():
            batch[key] = repeat_rows(key, value, num_repeats, share_immutable_media)
        return batch

    # Micro-batches -------------------------------------------------------------------------------

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict]:
        """Micro-batches of `microbatch_size` rows."""
        if self.size % whole_number("microbatch_size", microbatch_size):
            raise BatchError(
                f"Data dict size ({self.size}) is not a multiple of the provided microbatch size "
                f"({microbatch_size})."
            )
        for start in range(0, self.size, microbatch_size):
            yield self.slice(start, start + microbatch_size)

    def make_microbatch_iterator_with_dynamic_shapes(
        self, sequence_dim: int = 1
    ) -> Iterator[SlicedDataDict]:
        """The micro-batches of the only chunk, each cut to its width."""
        for width, batch in zip(self._widths(), self._micro_batches(), strict=True):
            batch.truncate_tensors(sequence_dim, width)
            yield batch

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """The number of micro-batches."""
        return len(self._widths())

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict]:
        """The rows of each pack of the only chunk, at the full width."""
        yield from self._micro_batches()

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """(the number of packs, the tokens of the largest)."""
        return len(self._widths()), max(self._widths(), default=0)

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut all tensors with dimension `dim` to a length, in place."""
        for key, value in self.data.items():
            if isinstance(value, Tensor) and value.ndim > dim:
                if value.shape[dim] < truncated_len:
                    raise BatchError(
                        f"{key} has {value.shape[dim]} entries along dimension {dim}, fewer than "
                        f"the {truncated_len} of the micro-batch. Dimension {dim} must be the "
                        f"sequence dimension of every tensor."
                    )
                self.data[key] = value.narrow(dim, 0, truncated_len)

    def _micro_batches(self) -> Iterator[SlicedDataDict]:
        self._widths()
        assert self.micro_batch_indices is not None
        for start, end in self.micro_batch_indices[0]:
            yield self.slice(start, end)

    def _widths(self) -> list[int]:
        """The widths of the micro-batches of the only chunk."""
        if self.micro_batch_lengths is None or len(self.micro_batch_lengths) != 1:
            chunks = 0 if self.micro_batch_lengths is None else len(self.micro_batch_lengths)
            raise BatchError(
                f"a micro-batch iterator needs one chunk, got {chunks}. Call shard_by_batch_size "
                f"with dynamic_batching_args or sequence_packing_args, then get_batch(i)."
            )
        return self.micro_batch_lengths[0]

    # Media and joining ---------------------------------------------------------------------------

    def get_multimodal_dict(
        self, as_tensors: bool = False, device: Any = None, pixel_dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """The media by key, as `PackedTensor`s or tensors; pixels in `pixel_dtype`."""
        if as_tensors:
            self._check_coupled()
        found: dict[str, Any] = {}
        for key, value in self.data.items():
            if isinstance(value, PackedTensor):
                if pixel_dtype is not None and key in ("pixel_values", "pixel_values_videos"):
                    value = value.to_dtype(pixel_dtype)
                found[key] = value.as_tensor(device) if as_tensors else value
            elif key in self.ADDITIONAL_OPTIONAL_KEY_TENSORS:
                found[key] = value
        return found

    def _check_coupled(self) -> None:
        """Raise if pixels and their sizes do not belong to the same rows."""
        for names in _COUPLED:
            values = [self.data.get(name) for name in names]
            media = [value for value in values if isinstance(value, PackedTensor)]
            counts = [value.logical_segment_counts_by_row() for value in media]
            shared = any(value.deduplication_enabled for value in media)
            if len(media) == 2 and shared and counts[0] != counts[1]:
                raise InputError(
                    f"{names[0]} and {names[1]} have different ordered per-row segment counts, "
                    f"{counts[0]} and {counts[1]}. Give each row as many of one as of the other."
                )

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, float] | None = None,
        *,
        allow_missing_packed_tensors: bool = False,
    ) -> Self:
        """The rows of all batches. Narrower tensors are padded with 0 or the value for their key.

        A batch without rows may lack keys. With `allow_missing_packed_tensors`, any batch may lack
        media.

        >>> parts = [{"ids": torch.ones(1, 2)}, {"ids": torch.ones(1, 3)}]
        >>> BatchedDataDict.from_batches(parts, {"ids": 7})["ids"].tolist()
        [[1.0, 1.0, 7.0], [1.0, 1.0, 1.0]]
        """
        return cls(join_batches(batches, pad_value_dict or {}, allow_missing_packed_tensors))


class SlicedDataDict(BatchedDataDict):
    """A shard or slice of a batch.

    >>> BatchedDataDict({"row": [5, 6, 7]}).slice(1, 3)
    {'row': [6, 7]}
    """


def _joined(rows: list[IntArray]) -> list[int]:
    """The rows of all chunks."""
    return [row for part in rows for row in part.tolist()]
