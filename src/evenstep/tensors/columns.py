"""Columns: the values of some samples, checked against the plan and laid out slot by slot."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from evenstep.core.micro_batch import MicroBatch
from evenstep.core.ragged import offsets_of
from evenstep.errors import InputError
from evenstep.tensors.batch import IGNORE_INDEX
from evenstep.tensors.continuation import Continuation
from evenstep.tensors.extras import Extra, RaggedTensor

Sample: TypeAlias = Mapping[str, Any]


class Columns:
    """The samples of one micro-batch, one per segment, read column by column.

    Where slots go is worked out once. Nothing of the samples is changed, and each column is
    copied once, straight to its place.
    """

    def __init__(self, micro: MicroBatch, chosen: list[Sample]) -> None:
        self.micro = micro
        self.chosen = chosen
        self.place = micro.placement
        self.lengths = micro.segments.length
        self.padding: list[int] = (self.place.slots - self.place.real).tolist()  # of each tile
        self.longest_padding = max(self.padding, default=0)
        self.expected: list[int] = micro.sample_lengths.tolist()
        self.whole = self.lengths.tolist() == self.expected

    def slots(self, key: str, dtype: torch.dtype, pad: float) -> Tensor:
        """The token-aligned column `key`, one entry per slot, padding filled in."""
        return self._spread(key, self._segment_values(key, self._column(key), dtype), dtype, pad)

    def targets(self, keys: set[str]) -> Tensor:
        """What each slot should have been predicted as: labels less what is masked."""
        given = [s["labels"] if "labels" in s else s["input_ids"] for s in self.chosen]
        tiles = self._segment_values("labels", given, torch.int64)
        targets = self._spread("labels", tiles, torch.int64, IGNORE_INDEX)
        if "loss_mask" in keys:
            given = [
                s["loss_mask"] if "loss_mask" in s else torch.ones(len(s["input_ids"]))
                for s in self.chosen
            ]
            tiles = self._segment_values("loss_mask", given, torch.float32)
            mask = self._spread("loss_mask", tiles, torch.float32, 0)
            hidden = mask == 0
            if not bool((hidden | (mask == 1)).all()):
                self._refuse_mask(tiles)
            targets.masked_fill_(hidden, IGNORE_INDEX)
        if "loss_masking_spans" in keys:
            for number, sample in enumerate(self.chosen):
                self._mask_spans(targets, number, sample.get("loss_masking_spans", ()))
        return targets

    def check_attention_masks(self) -> None:
        """Refuse an `attention_mask` that hides tokens. One of ones, as tokenizers give, says
        nothing: padding is made here."""
        key, one = "attention_mask", torch.ones(1)
        given = [
            sample[key] if key in sample else one.expand(length)
            for sample, length in zip(self.chosen, self.expected, strict=True)
        ]
        masks = self._tensors(key, given)
        if [m.numel() if m.ndim == 1 else -1 for m in masks] != self.expected:
            self._refuse_lengths(key, masks)
        if masks and not bool((torch.cat(masks) == 1).all()):
            odd = [mask[mask != 1] for mask in masks]
            at = next(n for n, values in enumerate(odd) if len(values))
            raise InputError(
                f"sample {self._name(at)} has {odd[at][0].item():g} in its 'attention_mask', but "
                f"every token of a sample runs, so padding would be taken for text. Cut the "
                f"padding off, as batches are padded here; tokens that are real but not to be "
                f"trained are 0 in a 'loss_mask'."
            )

    def sample_targets(self, number: int) -> Tensor:
        """What the tokens of a whole sample should have been predicted as, this segment or not."""
        sample = self.chosen[number]
        given = sample["labels"] if "labels" in sample else sample["input_ids"]
        targets = _tensors([given])[0].to(torch.int64, copy=True)
        if "loss_mask" in sample:
            mask = _tensors([sample["loss_mask"]])[0].to(torch.float32)
            targets.masked_fill_(mask == 0, IGNORE_INDEX)
        for begin, end in sample.get("loss_masking_spans", ()):
            targets[int(begin) : int(end)] = IGNORE_INDEX
        return targets

    def beyond(
        self, targets: Mapping[int, Tensor], lookahead: int, extras: Mapping[str, Extra]
    ) -> Continuation:
        """What follows the tiles that were cut, whose later `targets` are given."""
        count = len(self.place.real)
        counts = torch.zeros(count, dtype=torch.int64)
        declared = {name: extra for name, extra in extras.items() if extra.aligned == "token"}
        values = {
            "tokens": torch.zeros((count, lookahead), dtype=torch.int64),
            "targets": torch.full((count, lookahead), IGNORE_INDEX),
            **{
                name: torch.full((count, lookahead, *extra.shape), extra.pad, dtype=extra.dtype)
                for name, extra in declared.items()
            },
        }
        for tile, following in targets.items():
            known = len(following)
            counts[tile] = known
            values["targets"][tile, :known] = following
            at = int(self.place.segment[tile])
            first = int(self.micro.segments.start[at] + self.lengths[at])
            for name in ("tokens", *declared):
                key = "input_ids" if name == "tokens" else name
                column = self._tensors(key, [self.chosen[at][key]], at)[0]
                part = column[first : first + known]
                values[name][tile, :known] = part.to(values[name].dtype)
        return Continuation(counts, values)

    def extra(self, name: str, extra: Extra) -> Tensor | RaggedTensor:
        """A declared extra, laid out as it was declared."""
        values = self._tensors(name, self._column(name))
        if extra.aligned != "token" or extra.shape:
            self._check_entries(name, extra, values)
        if extra.aligned == "token":
            tiles = self._segment_values(name, values, extra.dtype, extra.shape)
            spread = self._spread(name, tiles, extra.dtype, extra.pad, extra.shape)
            return spread.view(self.micro.rows, self.micro.width, *extra.shape)
        nothing = torch.empty((0, *extra.shape), dtype=extra.dtype)
        cast = [value.to(extra.dtype) for value in values]
        if extra.aligned == "sequence":
            return torch.stack(cast) if cast else nothing
        counts = np.array([len(value) for value in cast], np.int64)
        joined = torch.cat(cast) if cast else nothing
        return RaggedTensor(joined, torch.from_numpy(offsets_of(counts)))

    def _check_entries(self, name: str, extra: Extra, values: list[Tensor]) -> None:
        first = 0 if extra.aligned == "sequence" else 1  # dimension of one entry
        for at, value in enumerate(values):
            if tuple(value.shape[first:]) != extra.shape:
                raise InputError(
                    f"sample {self._name(at)} has entries of the shape "
                    f"{tuple(value.shape[first:])} in {name!r}, declared as {extra.shape}, so they "
                    f"do not go together. Declare the shape that samples have."
                )

    # Reading -----------------------------------------------------------------------------------

    def _column(self, key: str) -> list[Any]:
        try:
            return [sample[key] for sample in self.chosen]
        except KeyError:
            at = next(n for n, sample in enumerate(self.chosen) if key not in sample)
            has = ", ".join(sorted(self.chosen[at]))
            raise InputError(
                f"sample {self._name(at)} has no {key!r} but {has}, so "
                f"its batch cannot be made. Give every sample one."
            ) from None

    def _segment_values(
        self, key: str, column: list[Any], dtype: torch.dtype, shape: tuple[int, ...] = ()
    ) -> list[Tensor]:
        """The segments' parts of a token-aligned column, checked against the plan."""
        column = self._tensors(key, column)
        found = [value.numel() for value in column]
        size = math.prod(shape)
        expected = self.expected if size == 1 else [size * length for length in self.expected]
        if found != expected:
            self._refuse_lengths(key, column)
        if {value.dtype for value in column} - {dtype}:
            column = [self._cast(key, at, value, dtype) for at, value in enumerate(column)]
        if self.whole:
            return column
        begin, length = self.micro.segments.start.tolist(), self.lengths.tolist()
        return [v[a : a + n] for v, a, n in zip(column, begin, length, strict=True)]

    def _tensors(self, key: str, column: list[Any], first: int = 0) -> list[Tensor]:
        """Values of the segments from `first` on as tensors."""
        try:
            return _tensors(column)
        except (TypeError, ValueError, OverflowError):
            at = next(n for n, value in enumerate(column) if not _is_array(value))
            self._refuse_value(key, first + at, column[at])

    def _cast(self, key: str, at: int, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Numbers of another width are widened; token ids must be whole numbers."""
        inexact = value.dtype.is_floating_point or value.dtype.is_complex
        if dtype == torch.int64 and (inexact or value.dtype == torch.bool):
            raise InputError(
                f"sample {self._name(at)} has {key!r} of type {value.dtype}, but whole numbers are "
                f"expected; a cast would hide a mistake. Pass an integer tensor."
            )
        return value.to(dtype)

    # Laying out --------------------------------------------------------------------------------

    def _spread(
        self,
        key: str,
        tiles: list[Tensor],
        dtype: torch.dtype,
        pad: float,
        shape: tuple[int, ...] = (),
    ) -> Tensor:
        """Parts of segments -> one entry per slot: each part, and the padding behind it."""
        parts = tiles
        if self.longest_padding:
            source = torch.full((self.longest_padding, *shape), pad, dtype=dtype)
            padding = {count: source[:count] for count in set(self.padding) if count}
            parts, following = [], iter(tiles)
            for count, real in zip(self.padding, self.place.real.tolist(), strict=True):
                if real:
                    parts.append(next(following))
                if count:
                    parts.append(padding[count])
        try:
            spread = torch.cat(parts)
        except RuntimeError:
            self._refuse_lengths(key, tiles)
        if spread.ndim != 1 + len(shape):
            self._refuse_lengths(key, tiles)
        return spread

    def _mask_spans(self, targets: Tensor, number: int, spans: Any) -> None:
        total = int(self.micro.sample_lengths[number])
        first = int(self.place.offsets[:-1][self.place.segment >= 0][number])
        start, length = int(self.micro.segments.start[number]), int(self.lengths[number])
        if spans is None:
            self._refuse_value("loss_masking_spans", number, spans)
        for begin, end in spans:
            if not 0 <= begin <= end <= total:
                raise InputError(
                    f"sample {self._name(number)} masks tokens {begin} to {end} but has {total}; "
                    f"the loss would miss its mark. Keep spans inside the sample."
                )
            inside = [min(max(int(edge) - start, 0), length) for edge in (begin, end)]
            targets[first + inside[0] : first + inside[1]] = IGNORE_INDEX

    def _name(self, at: int) -> int:
        return int(self.micro.segments.sample[at])

    def _refuse_lengths(self, key: str, column: list[Tensor]) -> NoReturn:
        at = next(
            (n for n, v in enumerate(column) if v.ndim == 0 or v.shape[0] != self.expected[n]), 0
        )
        found = (
            column[at].shape[0] if column[at].ndim == 1 else f"the shape {list(column[at].shape)}"
        )
        raise InputError(
            f"sample {self._name(at)} was planned with {self.expected[at]} tokens but its {key!r} "
            f"has {found}; the batch would mix samples up. Plan with the lengths of these samples, "
            f"and give token-aligned columns one entry per token."
        )

    def _refuse_value(self, key: str, at: int, value: object) -> NoReturn:
        optional = key in ("labels", "loss_mask", "loss_masking_spans", "attention_mask")
        raise InputError(
            f"sample {self._name(at)} has {reprlib.repr(value)} as its {key!r}, which are no "
            f"numbers, so its batch cannot be made. "
            f"{'Leave the key out where there are none' if optional else 'Give numbers'}."
        ) from None

    def _refuse_mask(self, masks: list[Tensor]) -> NoReturn:
        odd = [mask[(mask != 0) & (mask != 1)] for mask in masks]
        at = next(n for n, values in enumerate(odd) if len(values))
        raise InputError(
            f"sample {self._name(at)} has {odd[at][0].item():g} in its 'loss_mask', but a token is "
            f"trained or it is not, and denominators count those that are, so it would weigh 1. "
            f"Give 0 or 1. To weigh tokens, declare a token-aligned extra 'token_weight' and "
            f"normalize by Custom('weighted', lambda batch: batch.ahead('token_weight'))."
        )


def _tensors(column: list[Any]) -> list[Tensor]:
    """Arrays and lists as tensors; tensors as they are."""
    if not set(map(type, column)) - {Tensor}:
        return column
    # Through numpy, because torch would round Python's numbers to single precision.
    return [v if isinstance(v, Tensor) else _tensor(np.asarray(v)) for v in column]


def _is_array(value: Any) -> bool:
    """Whether a tensor can be made of it."""
    try:
        return bool(_tensors([value]))
    except (TypeError, ValueError, OverflowError):
        return False


def _tensor(array: Any) -> Tensor:
    """The array itself; torch has no read-only memory (a mapped file), so that is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
