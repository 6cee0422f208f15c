"""Collator: the samples of one micro-batch -> Batch."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenstep.core.plan import MicroBatch, Placement
from evenstep.core.ragged import IntArray, offsets_of
from evenstep.core.text import truth_field, whole_number
from evenstep.data.source import LOSS_MASKS, check_masks_spelt
from evenstep.errors import InputError
from evenstep.planning.kernels import kernel
from evenstep.tensors.batch import IGNORE_INDEX, Batch, Continuation, Extra, RaggedTensor


@kernel
def number_slots(
    offsets: IntArray,
    real: IntArray,
    targets: IntArray,
    ignore: int,
    positions: IntArray,
    tiles: IntArray,
    labels: IntArray,
    weights: NDArray[np.float32],
    loss_tokens: IntArray,
) -> None:
    """Fill the last five arrays, one tile at a time.

    The label of a slot is the target of the next slot of its segment; the last slot of a segment
    and padding have none. offsets [0, 3, 5], real [3, 1], targets [7, 8, 9, 4, 0] give positions
    [0, 1, 2, 0, 1], tiles [0, 0, 0, 1, 1], labels [8, 9, -, -, -] and loss tokens [2, 0].
    """
    for tile in range(real.shape[0]):
        begin, end = offsets[tile], offsets[tile + 1]
        size, inner = end - begin, max(real[tile] - 1, 0)
        # One short loop per array, so that each is vectorised.
        here = positions[begin:end]
        for slot in range(size):
            here[slot] = slot
        tiles[begin:end] = tile
        label, target = labels[begin:end], targets[begin + 1 : begin + 1 + inner]
        count = 0
        for slot in range(inner):
            label[slot] = target[slot]
            count += target[slot] != ignore
        label[inner:] = ignore
        loss_tokens[tile] = count
        weight = weights[begin:end]
        for slot in range(size):
            weight[slot] = 0.0 if label[slot] == ignore else 1.0


Sample: TypeAlias = Mapping[str, Any]


class Columns:
    """The samples of one micro-batch, one per segment, read by column.

    Slot positions are computed once and each column is copied once. Samples are not modified.
    """

    def __init__(self, micro: MicroBatch, chosen: list[Sample]) -> None:
        self.micro = micro
        self.chosen = chosen
        self.placement = micro.placement
        self.lengths = micro.segments.length
        self.padding: list[int] = (self.placement.slots - self.placement.real).tolist()  # per tile
        self.longest_padding = max(self.padding, default=0)
        self.expected: list[int] = micro.sample_lengths.tolist()
        self.whole = self.lengths.tolist() == self.expected

    def slots(self, key: str, dtype: torch.dtype, pad: float) -> Tensor:
        """The token-aligned column `key`, one entry per slot, filled with `pad`."""
        return self._spread(key, self._segment_values(key, self._column(key), dtype), dtype, pad)

    def targets(self, keys: set[str]) -> Tensor:
        """The target of each slot: its label, or -100 where the loss is masked."""
        labels = [s["labels"] if "labels" in s else s["input_ids"] for s in self.chosen]
        values = self._segment_values("labels", labels, torch.int64)
        targets = self._spread("labels", values, torch.int64, IGNORE_INDEX)
        for name in LOSS_MASKS:
            if name in keys:
                targets.masked_fill_(self._hidden(name), IGNORE_INDEX)
        if "loss_masking_spans" in keys:
            for number, sample in enumerate(self.chosen):
                self._mask_spans(targets, number, sample.get("loss_masking_spans", ()))
        return targets

    def _hidden(self, name: str) -> Tensor:
        """The slots that a loss mask hides; samples without the mask hide none."""
        masks = self._tensors(name, [s.get(name, 1) for s in self.chosen])
        # One number is that of all tokens.
        masks = [
            mask.expand(length) if mask.ndim == 0 else mask
            for mask, length in zip(masks, self.expected, strict=True)
        ]
        values = self._segment_values(name, masks, torch.float32)
        mask = self._spread(name, values, torch.float32, 0)
        hidden = mask == 0
        if not bool((hidden | (mask == 1)).all()):
            at, odd = _first_odd(values, (0, 1))
            raise InputError(
                f"sample {self._name(at)} has {odd:g} in its {name!r}; expected 0 or 1. To weight "
                f"tokens, declare a token-aligned extra 'token_weight' and use the normalization "
                f"Custom('weighted', lambda batch: batch.ahead('token_weight'))."
            )
        return hidden

    def check_attention_masks(self) -> None:
        """Raise if an `attention_mask` hides tokens; tokenizers return masks of ones."""
        key, one = "attention_mask", torch.ones(1)
        masks = self._tensors(
            key,
            [
                sample[key] if key in sample else one.expand(length)
                for sample, length in zip(self.chosen, self.expected, strict=True)
            ],
        )
        if [m.numel() if m.ndim == 1 else -1 for m in masks] != self.expected:
            self._refuse_lengths(key, masks)
        if masks and not bool((torch.cat(masks) == 1).all()):
            at, odd = _first_odd(masks, (1,))
            raise InputError(
                f"sample {self._name(at)} has {odd:g} in its 'attention_mask', but only 1 is "
                f"supported: every token of a sample is attended to. Remove padding from samples; "
                f"to ignore real tokens in the loss, set their 'loss_mask' to 0."
            )

    def sample_targets(self, number: int) -> Tensor:
        """The targets of the whole sample of segment `number`."""
        sample = self.chosen[number]
        labels = sample["labels"] if "labels" in sample else sample["input_ids"]
        targets = _tensors([labels])[0].to(torch.int64, copy=True)
        for name in LOSS_MASKS:
            if name in sample:
                mask = _tensors([sample[name]])[0].to(torch.float32)
                targets.masked_fill_(mask == 0, IGNORE_INDEX)
        for begin, end in sample.get("loss_masking_spans", ()):
            targets[int(begin) : int(end)] = IGNORE_INDEX
        return targets

    def continuation(
        self, targets: Mapping[int, Tensor], lookahead: int, extras: Mapping[str, Extra]
    ) -> Continuation:
        """What follows the tiles whose sample continues elsewhere; `targets` holds its targets."""
        count = len(self.placement.real)
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
            at = int(self.placement.segment[tile])
            first = int(self.micro.segments.start[at] + self.lengths[at])
            for name in ("tokens", *declared):
                key = "input_ids" if name == "tokens" else name
                column = self._tensors(key, [self.chosen[at][key]], at)[0]
                values[name][tile, :known] = column[first : first + known].to(values[name].dtype)
        return Continuation(counts, values)

    def extra(self, name: str, extra: Extra) -> Tensor | RaggedTensor:
        """A declared extra in the layout that it declares."""
        values = self._tensors(name, self._column(name))
        if extra.aligned != "token" or extra.shape:
            self._check_entries(name, extra, values)
        if extra.aligned == "token":
            chosen = self._segment_values(name, values, extra.dtype, extra.shape)
            spread = self._spread(name, chosen, extra.dtype, extra.pad, extra.shape)
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
                    f"sample {self._name(at)} has entries of shape {tuple(value.shape[first:])} in "
                    f"{name!r}, but the extra declares {extra.shape}. Set Extra(shape=...) to the "
                    f"shape of one entry."
                )

    # Reading -----------------------------------------------------------------------------------

    def _column(self, key: str) -> list[Any]:
        try:
            return [sample[key] for sample in self.chosen]
        except KeyError:
            at = next(n for n, sample in enumerate(self.chosen) if key not in sample)
            has = ", ".join(sorted(self.chosen[at]))
            raise InputError(
                f"sample {self._name(at)} has no {key!r}; its keys are {has}. Add {key!r} to every "
                f"sample."
            ) from None

    def _segment_values(
        self, key: str, column: list[Any], dtype: torch.dtype, shape: tuple[int, ...] = ()
    ) -> list[Tensor]:
        """Each segment's values of a token-aligned column, checked against the plan."""
        column = self._tensors(key, column)
        size = math.prod(shape)
        expected = self.expected if size == 1 else [size * length for length in self.expected]
        if [value.numel() for value in column] != expected:
            self._refuse_lengths(key, column)
        if {value.dtype for value in column} - {dtype}:
            column = [self._cast(key, at, value, dtype) for at, value in enumerate(column)]
        if self.whole:
            return column
        begin, length = self.micro.segments.start.tolist(), self.lengths.tolist()
        return [v[a : a + n] for v, a, n in zip(column, begin, length, strict=True)]

    def _tensors(self, key: str, column: list[Any], first: int = 0) -> list[Tensor]:
        """Values as tensors; `first` is the segment of the first one, for errors."""
        try:
            return _tensors(column)
        except (TypeError, ValueError, OverflowError):
            at = next(n for n, value in enumerate(column) if not _is_array(value))
            self._refuse_value(key, first + at, column[at])

    def _cast(self, key: str, at: int, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast to `dtype`; for int64, raise unless the values are integers."""
        inexact = value.dtype.is_floating_point or value.dtype.is_complex
        if dtype == torch.int64 and (inexact or value.dtype == torch.bool):
            raise InputError(
                f"sample {self._name(at)} has {key!r} of type {value.dtype}; expected integers. "
                f"Pass an integer tensor."
            )
        return value.to(dtype)

    # Laying out --------------------------------------------------------------------------------

    def _spread(
        self,
        key: str,
        segments: list[Tensor],
        dtype: torch.dtype,
        pad: float,
        shape: tuple[int, ...] = (),
    ) -> Tensor:
        """Values per segment -> one entry per slot: each segment followed by its padding."""
        runs = segments
        if self.longest_padding:
            source = torch.full((self.longest_padding, *shape), pad, dtype=dtype)
            padding = {count: source[:count] for count in set(self.padding) if count}
            runs, following = [], iter(segments)
            for count, real in zip(self.padding, self.placement.real.tolist(), strict=True):
                if real:
                    runs.append(next(following))
                if count:
                    runs.append(padding[count])
        try:
            spread = torch.cat(runs)
        except RuntimeError:
            self._refuse_lengths(key, segments)
        if spread.ndim != 1 + len(shape):
            self._refuse_lengths(key, segments)
        return spread

    def _mask_spans(self, targets: Tensor, number: int, spans: Any) -> None:
        total = int(self.micro.sample_lengths[number])
        first = int(self.placement.offsets[:-1][self.placement.segment >= 0][number])
        start, length = int(self.micro.segments.start[number]), int(self.lengths[number])
        if spans is None:
            self._refuse_value("loss_masking_spans", number, spans)
        for begin, end in spans:
            if not 0 <= begin <= end <= total:
                raise InputError(
                    f"sample {self._name(number)} has the loss_masking_span ({begin}, {end}), but "
                    f"only {total} tokens. Spans must lie inside the sample."
                )
            inside = [min(max(int(edge) - start, 0), length) for edge in (begin, end)]
            targets[first + inside[0] : first + inside[1]] = IGNORE_INDEX

    def _name(self, at: int) -> int:
        return int(self.micro.segments.sample[at])

    def _refuse_lengths(self, key: str, column: list[Tensor]) -> NoReturn:
        at = next(
            (n for n, v in enumerate(column) if v.ndim == 0 or v.shape[0] != self.expected[n]), 0
        )
        size = column[at].shape[0] if column[at].ndim == 1 else f"shape {list(column[at].shape)}"
        raise InputError(
            f"sample {self._name(at)} was planned with {self.expected[at]} tokens, but its {key!r} "
            f"has {size}. Plan with the lengths of these samples, and give token-aligned columns "
            f"one entry per token."
        )

    def _refuse_value(self, key: str, at: int, value: object) -> NoReturn:
        optional = key in ("labels", *LOSS_MASKS, "loss_masking_spans", "attention_mask")
        raise InputError(
            f"sample {self._name(at)} has {reprlib.repr(value)} as its {key!r}; expected numbers. "
            f"{'Omit the key if there are none' if optional else 'Pass a tensor, array or list'}."
        ) from None


def _first_odd(masks: list[Tensor], allowed: tuple[int, ...]) -> tuple[int, float]:
    """The first mask with a value that is not allowed, and that value."""
    for at, mask in enumerate(masks):
        odd = [value for value in mask.tolist() if value not in allowed]
        if odd:
            return at, odd[0]
    raise AssertionError("every value is allowed")


def _tensors(column: list[Any]) -> list[Tensor]:
    """Arrays and lists converted to tensors; tensors unchanged."""
    if not set(map(type, column)) - {Tensor}:
        return column
    # Via numpy, because torch would convert Python floats to single precision.
    return [v if isinstance(v, Tensor) else _tensor(np.asarray(v)) for v in column]


def _is_array(value: Any) -> bool:
    """Whether the value converts to a tensor."""
    try:
        return bool(_tensors([value]))
    except (TypeError, ValueError, OverflowError):
        return False


def _tensor(array: Any) -> Tensor:
    """A tensor that shares memory with the array; read-only arrays (mapped files) are copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


Samples: TypeAlias = Mapping[int, Sample] | Sequence[Sample]

_TARGETS = ("labels", *LOSS_MASKS, "loss_masking_spans")
SAMPLE_KEYS = ("input_ids", *_TARGETS, "attention_mask")
"""The keys of a sample that are read without being declared as extras."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collator:
    """Turns the samples of a micro-batch into a `Batch`. Samples are never modified.

    A sample is a mapping with `input_ids`, every declared extra, and optionally:

    labels              the target of each token, not shifted; -100 to ignore a token. Default: the
                        tokens themselves
    loss_mask           per token, 1 to count it in the loss and 0 to ignore it. For weights use
                        the normalization `Custom`
    assistant_masks     the same, as `apply_chat_template(..., return_assistant_tokens_mask=True)`
                        of Hugging Face tokenizers names it. So are response_mask (verl, ROLL),
                        final_response_mask (ROLL), completion_mask and tool_mask (TRL), token_mask
                        and sample_mask (NeMo-RL), and action_mask (OpenRLHF). Tokens that one of
                        them hides are ignored; one number is that of all tokens of the sample
    loss_masking_spans  (begin, end) pairs of tokens to ignore in the loss
    attention_mask      must be 1 for every token; remove padding from samples

    Other keys are an error. `lookahead` is how many tokens after the end of a segment are kept
    where a sample was split; multi-token prediction needs more than 1.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> samples = [{"input_ids": torch.tensor([11, 12, 13])}, {"input_ids": torch.tensor([21, 22])}]
    >>> plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=8, pad_to=8)))
    >>> batch = Collator()(plan[0, 0][0], samples)
    >>> batch.labels.tolist(), batch.cu_seqlens.tolist()
    ([[12, 13, -100, 22, -100, -100, -100, -100]], [0, 3, 5, 8])
    """

    extras: Mapping[str, Extra] = field(default_factory=dict)
    pad_token: int = 0
    pin_memory: bool = False
    lookahead: int = 1

    def __post_init__(self) -> None:
        whole_number("lookahead", self.lookahead)
        truth_field(self, "pin_memory")
        check_masks_spelt(self.extras)

    def __call__(self, micro: MicroBatch, samples: Samples) -> Batch:
        """The batch of `micro`; `samples[i]` is the whole sample i of the plan."""
        chosen = [samples[i] for i in micro.segments.sample.tolist()]
        keys = set().union(*chosen)
        if not keys <= {*SAMPLE_KEYS, *self.extras}:
            self._refuse_keys(micro, chosen)
        columns = Columns(micro, chosen)
        if "attention_mask" in keys and "attention_mask" not in self.extras:
            columns.check_attention_masks()
        placement = columns.placement
        tokens = columns.slots("input_ids", torch.int64, self.pad_token)
        targets = tokens
        if not keys.isdisjoint(_TARGETS):
            targets = columns.targets(keys)
        shape = (micro.rows, micro.width)
        numbers = np.empty((3, micro.slots), np.int64)
        weights = np.empty(micro.slots, np.float32)
        loss_tokens = np.empty(len(placement.real), np.int64)
        number_slots(
            placement.offsets, placement.real, targets.numpy(), IGNORE_INDEX,
            numbers[0], numbers[1], numbers[2], weights, loss_tokens,
        )  # fmt: skip
        continuation = self._continue_split(columns, numbers[2], weights, loss_tokens)
        positions, tiles, labels = torch.from_numpy(numbers).view(3, *shape).unbind()
        batch = Batch(
            tokens=tokens.view(shape),
            targets=targets.view(shape),
            labels=labels,
            position_ids=positions,
            segment_ids=tiles,
            loss_weights=torch.from_numpy(weights).view(shape),
            cu_seqlens=torch.from_numpy(placement.offsets.astype(np.int32)),
            seqlens=torch.from_numpy(np.array(placement.real)),
            sample_ids=torch.from_numpy(_by_tile(micro.segments.sample, placement, -1)),
            starts=torch.from_numpy(_by_tile(micro.segments.start, placement, 0)),
            loss_tokens=torch.from_numpy(loss_tokens),
            continuation=continuation,
            max_seqlen=int(placement.slots.max(initial=0)),
            extras={name: columns.extra(name, extra) for name, extra in self.extras.items()},
            aligned={name: extra.aligned for name, extra in self.extras.items()},
        )
        return batch.pin_memory() if self.pin_memory and torch.cuda.is_available() else batch

    def _continue_split(
        self,
        columns: Columns,
        labels: IntArray,
        weights: NDArray[np.float32],
        loss_tokens: IntArray,
    ) -> Continuation | None:
        """Complete labels and counts of split samples; returns None if none continues elsewhere."""
        micro, placement = columns.micro, columns.placement
        if columns.whole:
            return None
        end = micro.segments.start + micro.segments.length
        partial = (micro.segments.start > 0) | (end < micro.sample_ends)
        if not partial.any():
            return None
        tiles = np.flatnonzero(placement.segment >= 0)
        after: dict[int, torch.Tensor] = {}  # per tile, the targets that follow it in its sample
        for at in np.flatnonzero(partial).tolist():
            tile, last = int(tiles[at]), int(micro.sample_ends[at])
            targets = columns.sample_targets(at)[:last]
            loss_tokens[tile] = int((targets[1:] != IGNORE_INDEX).sum())
            if end[at] < last:
                after[tile] = targets[end[at] : end[at] + self.lookahead]
                slot = placement.offsets[tile] + placement.real[tile] - 1
                labels[slot] = int(after[tile][0])
                weights[slot] = float(labels[slot] != IGNORE_INDEX)
        return columns.continuation(after, self.lookahead, self.extras) if after else None

    def _refuse_keys(self, micro: MicroBatch, chosen: list[Sample]) -> NoReturn:
        known = {*SAMPLE_KEYS, *self.extras}
        at = next(n for n, sample in enumerate(chosen) if not known >= sample.keys())
        raise InputError(
            f"sample {micro.segments.sample[at]} has the undeclared key "
            f"{min(chosen[at].keys() - known)!r}; expected "
            f"{', '.join(sorted(known - {*LOSS_MASKS[1:]}))}. Remove it from the sample, or "
            f"declare it: Runner(collate=Collator(extras=...))."
        )


def _by_tile(column: IntArray, placement: Placement, otherwise: int) -> IntArray:
    """A column per segment -> per tile, with `otherwise` for tails."""
    return np.concatenate((column, (otherwise,)))[placement.segment]  # -1 picks the last entry
