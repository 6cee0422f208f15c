"""MainCollator: features -> one packed row with VeOmni's keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from evenstep.compat.veomni.lengths import get_parallel_state
from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import rounded_up
from evenstep.errors import InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch, Extra
from evenstep.tensors.collate import Collator
from evenstep.tensors.parallel import shard_rows, shard_sequence

_MODALITIES = ("image", "video", "audio")


class DataCollateInfo(NamedTuple):
    """How a key is packed, and sharded for sequence parallelism.

    pack_dim      dimension of concatenation; -1 for one entry per token
    sp_slice      whether each sequence-parallel rank gets its part only
    sp_pad_value  value of padding; None: not padded
    sp_pad_scale  parts are a multiple of this

    >>> DataCollateInfo(0, True, 0, 4).sp_pad_scale
    4
    """

    pack_dim: int = 0
    sp_slice: bool = False
    sp_pad_value: float | None = None
    sp_pad_scale: int | None = 1


DEFAULT_DATA_COLLATE_INFO: dict[str, DataCollateInfo] = {
    "input_ids": DataCollateInfo(-1, True, 0, 1),
    "labels": DataCollateInfo(-1, True, IGNORE_INDEX, 1),
    "attention_mask": DataCollateInfo(-1, False, 1, 1),
    "position_ids": DataCollateInfo(-1, False, 0, 1),
    "image_mask": DataCollateInfo(-1, False, 0, 1),
    "video_mask": DataCollateInfo(-1, False, 0, 1),
    "mm_token_type_ids": DataCollateInfo(-1, False, 0, 1),
    "pixel_values": DataCollateInfo(0, True, 0, 4),
    "pixel_values_videos": DataCollateInfo(0, True, 0, 4),
    "image_grid_hw": DataCollateInfo(0, False, None, None),
    "image_grid_thw": DataCollateInfo(0, False, None, None),
    "video_grid_thw": DataCollateInfo(0, False, None, None),
}


@dataclass
class MainCollator:
    """Features -> one row of all their tokens, with boundaries for FlashAttention.

    `input_ids`, `labels`, `position_ids`, `attention_mask` and other keys with one entry per token
    are (1, tokens); `cu_seq_lens_{q,k}` and `max_length_{q,k}` describe the sequences of the whole
    row. With `pad_to_length` the row is padded; the padding is one sequence of
    `tail_padding_length` tokens, whose positions count up from 0. Labels are not shifted, and the
    first one of every sequence but the first is -100.

    With sequence parallelism the row is padded to a multiple of its ranks. `input_ids`,
    `position_ids` and `labels` are this rank's part; labels are shifted first.

    A feature whose `position_ids` (one per token) start again at 0 is several sequences.
    `metadata_collate_func(batch, pads)` may add to the result; `pads` are the added image and video
    patches. Features are not changed.

    >>> ids = [torch.tensor([11, 12, 13]), torch.tensor([21, 22])]
    >>> batch = MainCollator(pad_to_length=8)([{"input_ids": each} for each in ids])
    >>> batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist()
    ([[0, 1, 2, 0, 1, 0, 1, 2]], [0, 3, 5, 8])
    """

    data_collate_info: Mapping[str, Any] = field(default_factory=dict)
    pad_to_length: int = 0
    seq_classification: bool = False
    metadata_collate_func: Callable[[dict[str, Any], dict[str, int]], None] | None = None

    def __post_init__(self) -> None:
        given = {name: _info(value) for name, value in self.data_collate_info.items()}
        self.collate_infos = {**DEFAULT_DATA_COLLATE_INFO, **given}
        state = get_parallel_state()
        self.sp_enabled, self.sp_size, self.sp_rank = (
            bool(state.sp_enabled), state.sp_size if state.sp_enabled else 1, state.sp_rank,
        )  # fmt: skip

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        keys = list(dict.fromkeys(key for feature in features for key in feature))
        by_token = [key for key in keys if self._is_by_token(key)]
        batch = self._packed(features, by_token)
        found = self._of_tokens(batch, by_token)
        pads = {"pixel_values": 0, "pixel_values_videos": 0}
        for key in keys:
            if key not in by_token:
                values = [feature[key] for feature in features if key in feature]
                found[key], padded = self._of_samples(key, values)
                pads |= {key: padded} if key in pads else {}
        found |= _boundaries(batch)
        if self.metadata_collate_func is not None:
            self.metadata_collate_func(found, pads)
        return found

    def _is_by_token(self, key: str) -> bool:
        if key == "labels" and self.seq_classification:
            return False
        return key in self.collate_infos and self.collate_infos[key].pack_dim == -1

    def _packed(self, features: Sequence[Mapping[str, Any]], by_token: list[str]) -> Batch:
        """All sequences as one row, padded."""
        sequences = [each for one in features for each in _sequences(one, by_token)]
        if not sequences or "input_ids" not in by_token:
            raise InputError("expected one or more features with 'input_ids'.")
        lengths = [len(sequence["input_ids"]) for sequence in sequences]
        width = rounded_up(max(sum(lengths), self.pad_to_length or 0, 1), self.sp_size)
        if self.pad_to_length and sum(lengths) > self.pad_to_length:
            raise InputError(
                f"the features have {sum(lengths)} tokens, more than "
                f"pad_to_length={self.pad_to_length}. Raise it, or lower the token budget."
            )
        extras = {}
        for key in by_token:
            if key not in ("input_ids", "labels"):
                first, pad = sequences[0][key], self.collate_infos[key].sp_pad_value or 0
                shape = tuple(first.shape[1:])
                extras[key] = Extra(aligned="token", dtype=first.dtype, pad=pad, shape=shape)
        return Collator(extras=extras)(MicroBatch.one_row(lengths, width), sequences)

    def _of_tokens(self, batch: Batch, by_token: list[str]) -> dict[str, Any]:
        """The keys with one entry per token."""
        ones = torch.ones_like(batch.tokens)
        whole: dict[str, Any] = {"position_ids": batch.position_ids, "attention_mask": ones}
        values: Mapping[str, Any] = batch.extras
        for key, value in values.items():
            if key == "position_ids":  # those of the padding count up
                given = batch.token_mask.view(*value.shape[:2], *[1] * (value.ndim - 2))
                own = batch.position_ids.view_as(given).expand_as(value)
                value = torch.where(given, value, own)
            whole[key] = value.movedim(1, -1)
        shard: Any = batch
        if self.sp_enabled:
            shard = shard_sequence(replace(batch, extras={}), self.sp_rank, self.sp_size)
            whole["position_ids"] = self._part(whole["position_ids"])
            for key in batch.extras:
                if self.collate_infos[key].sp_slice:
                    whole[key] = self._part(whole[key])
        whole["input_ids"] = shard.tokens
        if "labels" in by_token:
            whole["labels"] = shard.labels if self.sp_enabled else _unshifted(batch)
        return whole

    def _part(self, value: Tensor) -> Tensor:
        return shard_rows(value.movedim(-1, 0), self.sp_rank, self.sp_size).movedim(0, -1)

    def _of_samples(self, key: str, values: list[Any]) -> tuple[Any, int]:
        """(the values of a key that has no entry per token, entries that were added to them)"""
        info = self.collate_infos.get(key)
        if info is None:
            return _joined(key, values), 0
        joined = torch.cat([torch.as_tensor(value) for value in values], dim=info.pack_dim)
        added = 0
        if self.sp_enabled and info.sp_pad_value is not None and info.sp_slice:
            scale = info.sp_pad_scale or 1
            added = rounded_up(len(joined), self.sp_size * scale) - len(joined)
            joined = shard_rows(
                joined, self.sp_rank, self.sp_size, multiple=scale, pad=info.sp_pad_value
            )
        return joined.unsqueeze(0) if info.pack_dim == -1 else joined, added


def _info(given: Any) -> DataCollateInfo:
    if isinstance(given, Mapping):
        return DataCollateInfo(**given)
    return DataCollateInfo(*given)


def _sequences(feature: Mapping[str, Any], by_token: list[str]) -> list[dict[str, Tensor]]:
    """The sequences of a feature: one, or several where its positions start again at 0. Tensors
    have the tokens first."""
    held = {key: torch.as_tensor(feature[key]) for key in by_token if key in feature}
    held = {key: value.movedim(-1, 0) for key, value in held.items()}
    positions = held.get("position_ids")
    if positions is None or positions.ndim != 1:
        return [held]
    starts = [at for at in torch.nonzero(positions == 0).flatten().tolist() if at > 0]
    edges = [0, *starts, len(positions)]
    return [
        {key: value[begin:end] for key, value in held.items()} for begin, end in pairwise(edges)
    ]


def _unshifted(batch: Batch) -> Tensor:
    """Labels for models that shift them; the first of each sequence but the first is ignored."""
    labels = batch.labels_at(0).clone()
    labels[0, batch.cu_seqlens[1:-1].long()] = IGNORE_INDEX
    return labels


def _boundaries(batch: Batch) -> dict[str, Any]:
    tail = int(batch.cu_seqlens.diff()[batch.sample_ids < 0].sum())
    found: dict[str, Any] = {f"cu_seq_lens_{which}": batch.cu_seqlens for which in "qk"}
    found |= {f"max_length_{which}": batch.max_seqlen for which in "qk"}
    found["linear_attn_cu_seq_lens_q"] = batch.cu_seqlens
    if tail:
        found["tail_padding_length"] = torch.tensor(tail, dtype=torch.int32)
    return found


def _joined(key: str, values: list[Any]) -> Any:
    """Entries of images, videos and audio concatenated, others stacked; a list if they differ."""
    try:
        if key.split("_")[0] in _MODALITIES:
            return torch.cat(values, dim=0)
        return default_collate(values)
    except (RuntimeError, TypeError):
        return values
