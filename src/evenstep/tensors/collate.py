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

from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import IntArray, Segments, offsets_of
from evenstep.core.text import truth_field, whole_number
from evenstep.data.source import LOSS_MASKS, check_masks_spelt
from evenstep.errors import InputError
from evenstep.planning.kernels import kernel
from evenstep.tensors.batch import IGNORE_INDEX, Batch, Continuation, Extra, RaggedTensor
from evenstep.tensors.trees import share, tiles_of, whole_samples


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
Samples: TypeAlias = Mapping[int, Sample] | Sequence[Sample]

_TARGETS = ("labels", *LOSS_MASKS, "loss_masking_spans")
SAMPLE_KEYS = ("input_ids", *_TARGETS, "attention_mask")
"""The keys of a sample that are read without being declared as extras."""


class Columns:
    """The samples of one micro-batch, one per segment, read by column. Samples are not modified.

    Values of whole samples become tensors (`tensors`). Those of tokens are checked against the
    plan, cut into segments, and copied once with the padding between them (`slots`).
    """

    def __init__(self, micro: MicroBatch, samples: list[Sample]) -> None:
        self.micro = micro
        self.samples = samples
        self.placement = micro.placement
        self.padding: list[int] = (self.placement.slots - self.placement.real).tolist()  # per tile
        self.expected: list[int] = micro.sample_lengths.tolist()
        self.whole = micro.segments.length.tolist() == self.expected

    def of_sample(self, at: int) -> Columns:
        """The columns of the whole sample of segment `at`."""
        one, length = slice(at, at + 1), self.micro.sample_lengths[at : at + 1]
        segment = Segments(self.micro.segments.sample[one], np.zeros_like(length), length)
        micro = MicroBatch(segment, np.array([0, 1]), int(length[0]), length)
        return Columns(micro, self.samples[one])

    def required(self, key: str) -> list[Any]:
        """The values of a key that every sample must have."""
        try:
            return [sample[key] for sample in self.samples]
        except KeyError:
            at = next(n for n, sample in enumerate(self.samples) if key not in sample)
            has = ", ".join(sorted(self.samples[at]))
            raise InputError(
                f"sample {self._name(at)} has no {key!r}; its keys are {has}. Add {key!r} to every "
                f"sample."
            ) from None

    def tensors(self, key: str, values: list[Any]) -> list[Tensor]:
        """Arrays and lists converted to tensors; tensors unchanged."""
        if not set(map(type, values)) - {Tensor}:
            return values
        tensors = []
        for at, value in enumerate(values):
            try:
                tensors.append(value if isinstance(value, Tensor) else _tensor(value))
            except (TypeError, ValueError, OverflowError):
                self._refuse_value(key, at, value)
        return tensors

    def slots(
        self,
        key: str,
        values: list[Any],
        dtype: torch.dtype,
        pad: float,
        shape: tuple[int, ...] = (),
    ) -> Tensor:
        """One value of `shape` per token of each sample -> one per slot; `pad` in padding."""
        values = self.tensors(key, values)
        size = math.prod(shape)
        expected = self.expected if size == 1 else [size * length for length in self.expected]
        if [value.numel() for value in values] != expected:
            self._refuse_lengths(key, values)
        if {value.dtype for value in values} - {dtype}:
            if dtype == torch.int64:
                self._check_integers(key, values)
            values = [value.to(dtype) for value in values]
        if not self.whole:
            begin, length = self.micro.segments.start.tolist(), self.micro.segments.length.tolist()
            values = [v[a : a + n] for v, a, n in zip(values, begin, length, strict=True)]
        if any(self.padding):
            source = torch.full((max(self.padding), *shape), pad, dtype=dtype)
            padding = {count: source[:count] for count in set(self.padding)}
            segments, values = values, []
            for at, count in zip(self.placement.segment.tolist(), self.padding, strict=True):
                if at >= 0:
                    values.append(segments[at])
                if count:
                    values.append(padding[count])
        try:
            spread = torch.cat(values)
        except RuntimeError:
            self._refuse_lengths(key, values)
        if spread.ndim != 1 + len(shape):
            self._refuse_lengths(key, values)
        return spread

    def targets(self, keys: set[str]) -> Tensor:
        """The target of each slot: its label, or -100 where the loss is masked."""
        labels = [s["labels"] if "labels" in s else s["input_ids"] for s in self.samples]
        targets = self.slots("labels", labels, torch.int64, IGNORE_INDEX)
        for name in LOSS_MASKS:
            if name in keys:
                targets = torch.where(self._hidden(name), IGNORE_INDEX, targets)
        if "loss_masking_spans" in keys:
            for at, sample in enumerate(self.samples):
                self._mask_spans(targets, at, sample.get("loss_masking_spans", ()))
        return targets

    def _hidden(self, name: str) -> Tensor:
        """The slots that a loss mask hides; samples without the mask hide none."""
        masks = self.tensors(name, [sample.get(name, 1) for sample in self.samples])
        # One number is that of all tokens.
        masks = [
            mask.expand(length) if mask.ndim == 0 else mask
            for mask, length in zip(masks, self.expected, strict=True)
        ]
        mask = self.slots(name, masks, torch.float32, 0)
        hidden = mask == 0
        if not bool((hidden | (mask == 1)).all()):
            self._refuse_mask(
                name, masks, (0, 1), "; expected 0 or 1. To weight tokens, declare a token-aligned "
                "extra 'token_weight' and use the normalization "
                "Custom('weighted', lambda batch: batch.ahead('token_weight'))."
            )  # fmt: skip
        return hidden

    def _mask_spans(self, targets: Tensor, at: int, spans: Any) -> None:
        """Mask (begin, end) pairs of tokens of the sample of segment `at`."""
        if spans is None:
            self._refuse_value("loss_masking_spans", at, spans)
        segments, total = self.micro.segments, self.expected[at]
        first = int(self.placement.offsets[:-1][self.placement.segment >= 0][at])
        start, length = int(segments.start[at]), int(segments.length[at])
        for begin, end in spans:
            if not 0 <= begin <= end <= total:
                raise InputError(
                    f"sample {self._name(at)} has the loss_masking_span ({begin}, {end}), but only "
                    f"{total} tokens. Spans must lie inside the sample."
                )
            inside = [min(max(int(edge) - start, 0), length) for edge in (begin, end)]
            targets[first + inside[0] : first + inside[1]] = IGNORE_INDEX

    def check_attention_masks(self) -> None:
        """Raise if an `attention_mask` hides tokens; tokenizers return masks of ones."""
        key, one = "attention_mask", torch.ones(1)
        pairs = zip(self.samples, self.expected, strict=True)
        masks = self.tensors(key, [s[key] if key in s else one.expand(n) for s, n in pairs])
        if [m.numel() if m.ndim == 1 else -1 for m in masks] != self.expected:
            self._refuse_lengths(key, masks)
        if masks and not bool((torch.cat(masks) == 1).all()):
            self._refuse_mask(
                key, masks, (1,), ", but only 1 is supported: every token of a sample is attended "
                "to. Remove padding from samples; to ignore real tokens in the loss, set their "
                "'loss_mask' to 0."
            )  # fmt: skip

    def extra(self, name: str, extra: Extra) -> Tensor | RaggedTensor:
        """A declared extra in the layout that it declares."""
        values = self.tensors(name, self.required(name))
        if not all(_holds(extra.dtype, kind) for kind in {value.dtype for value in values}):
            self._check_held(name, values, extra.dtype)
        if extra.aligned != "token" or extra.shape:
            first = 0 if extra.aligned == "sequence" else 1  # dimension of one entry
            for at, value in enumerate(values):
                if tuple(value.shape[first:]) != extra.shape:
                    raise InputError(
                        f"sample {self._name(at)} has entries of shape "
                        f"{tuple(value.shape[first:])} in {name!r}, but the extra declares "
                        f"{extra.shape}. Set Extra(shape=...) to the shape of one entry."
                    )
        if extra.aligned == "token":
            spread = self.slots(name, values, extra.dtype, extra.pad, extra.shape)
            return spread.view(self.micro.rows, self.micro.width, *extra.shape)
        nothing = torch.empty((0, *extra.shape), dtype=extra.dtype)
        if extra.aligned == "sequence":
            if len({value.dtype for value in values}) > 1:  # stack would promote, and may round
                values = [value.to(extra.dtype) for value in values]
            return torch.stack(values).to(extra.dtype) if values else nothing
        counts = np.array([len(value) for value in values], np.int64)
        joined = torch.cat((nothing, *(value.to(extra.dtype) for value in values)))
        return RaggedTensor(joined, torch.from_numpy(offsets_of(counts)))

    # Errors ------------------------------------------------------------------------------------

    def _name(self, at: int) -> int:
        return int(self.micro.segments.sample[at])

    def _check_integers(self, key: str, values: list[Tensor]) -> None:
        for at, value in enumerate(values):
            kind = value.dtype
            if kind.is_floating_point or kind.is_complex or kind == torch.bool:
                raise InputError(
                    f"sample {self._name(at)} has {key!r} of type {kind}; expected integers. Pass "
                    f"an integer tensor."
                )

    def _check_held(self, key: str, values: list[Tensor], dtype: torch.dtype) -> None:
        """Raise unless a dtype holds all values; fractions may be rounded."""
        flat = [value.reshape(-1) for value in values]
        if len({value.dtype for value in flat}) > 1:
            flat = [value.double() for value in flat]
        joined = torch.cat(flat)
        changed = joined.double() != joined.to(dtype).double()
        if bool(changed.any()) and not (joined.is_floating_point() and dtype.is_floating_point):
            first = int(changed.nonzero()[0, 0])
            at = int(np.searchsorted(np.cumsum([len(value) for value in flat]), first, "right"))
            raise InputError(
                f"sample {self._name(at)} has {joined[first].item():.15g} in {key!r}, which "
                f"{dtype} cannot hold. Declare another Extra(dtype=...)."
            )

    def _refuse_mask(
        self, key: str, masks: list[Tensor], allowed: tuple[int, ...], why: str
    ) -> NoReturn:
        """Name the first sample whose mask has a value that is not allowed."""
        for at, mask in enumerate(masks):
            for value in mask.tolist():
                if value not in allowed:
                    raise InputError(f"sample {self._name(at)} has {value:g} in its {key!r}{why}")
        raise AssertionError("every value is allowed")

    def _refuse_lengths(self, key: str, values: list[Tensor]) -> NoReturn:
        at = next(
            (n for n, v in enumerate(values) if v.ndim == 0 or v.shape[0] != self.expected[n]), 0
        )
        size = values[at].shape[0] if values[at].ndim == 1 else f"shape {list(values[at].shape)}"
        raise InputError(
            f"sample {self._name(at)} was planned with {self.expected[at]} tokens, but its {key!r} "
            f"has {size}. Plan with the lengths of these samples, and give token-aligned columns "
            f"one entry per token."
        )

    def _refuse_value(self, key: str, at: int, value: object) -> NoReturn:
        optional = key in (*_TARGETS, "attention_mask")
        raise InputError(
            f"sample {self._name(at)} has {reprlib.repr(value)} as its {key!r}; expected numbers. "
            f"{'Omit the key if there are none' if optional else 'Pass a tensor, array or list'}."
        ) from None


def _tensor(value: Any) -> Tensor:
    """A tensor that shares memory with an array. Arrays that torch does not take are copied:
    read-only ones (mapped files), reversed ones, and those of another byte order."""
    # Via numpy, because torch would convert Python floats to single precision.
    array = np.asarray(value)
    try:
        if array.flags.writeable:
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        pass
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


def _holds(dtype: torch.dtype, kind: torch.dtype) -> bool:
    """Whether a dtype holds the values of another one, but for fractions."""
    if dtype.is_floating_point or dtype.is_complex or kind == torch.bool:
        return kind.is_floating_point or kind in (dtype, torch.bool)
    return kind == dtype or (dtype == torch.int64 and not kind.is_floating_point)


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
        batch = self._collate(micro, samples)
        return batch.pin_memory() if self.pin_memory and torch.cuda.is_available() else batch

    def _collate(self, micro: MicroBatch, samples: Samples) -> Batch:
        if micro.segments.shares_slots:
            return share(micro, self._collate(whole_samples(micro), samples), self.pad_token)
        chosen = [samples[i] for i in micro.segments.sample.tolist()]
        keys = set().union(*chosen)
        if not keys <= {*SAMPLE_KEYS, *self.extras}:
            self._refuse_keys(micro, chosen)
        columns = Columns(micro, chosen)
        if "attention_mask" in keys and "attention_mask" not in self.extras:
            columns.check_attention_masks()
        tokens = columns.slots(
            "input_ids", columns.required("input_ids"), torch.int64, self.pad_token
        )
        targets = tokens if keys.isdisjoint(_TARGETS) else columns.targets(keys)
        extras = {name: columns.extra(name, extra) for name, extra in self.extras.items()}
        placement, shape = columns.placement, (micro.rows, micro.width)
        numbers = np.empty((3, micro.slots), np.int64)
        weights = np.empty(micro.slots, np.float32)
        loss_tokens = np.empty(len(placement.real), np.int64)
        number_slots(
            placement.offsets, placement.real, targets.numpy(), IGNORE_INDEX,
            numbers[0], numbers[1], numbers[2], weights, loss_tokens,
        )  # fmt: skip
        continuation = None
        if not columns.whole:
            continuation = self._continue_split(columns, keys, numbers[2], weights, loss_tokens)
        places, tiles, labels = torch.from_numpy(numbers).view(3, *shape).unbind()
        return Batch(
            **tiles_of(micro, placement, places, tiles),
            tokens=tokens.view(shape),
            targets=targets.view(shape),
            labels=labels,
            loss_weights=torch.from_numpy(weights).view(shape),
            loss_tokens=torch.from_numpy(loss_tokens),
            continuation=continuation,
            extras=extras,
            aligned={name: extra.aligned for name, extra in self.extras.items()},
        )

    def _continue_split(
        self,
        columns: Columns,
        keys: set[str],
        labels: IntArray,
        weights: NDArray[np.float32],
        loss_tokens: IntArray,
    ) -> Continuation | None:
        """Complete labels and counts of split samples; returns what follows them elsewhere."""
        micro, placement = columns.micro, columns.placement
        ends = micro.segments.start + micro.segments.length
        partial = np.flatnonzero((micro.segments.start > 0) | (ends < micro.sample_ends))
        if not len(partial):
            return None  # truncated
        tiles = np.flatnonzero(placement.segment >= 0)
        shape = (len(placement.real), self.lookahead)
        per_token = {name: each for name, each in self.extras.items() if each.aligned == "token"}
        counts = torch.zeros(len(placement.real), dtype=torch.int64)
        values = {
            "tokens": torch.zeros(shape, dtype=torch.int64),
            "targets": torch.full(shape, IGNORE_INDEX),
        }
        for name, extra in per_token.items():
            values[name] = torch.full((*shape, *extra.shape), extra.pad, dtype=extra.dtype)
        for at in partial.tolist():
            tile, end, last = int(tiles[at]), int(ends[at]), int(micro.sample_ends[at])
            targets = columns.of_sample(at).targets(keys)[:last]
            loss_tokens[tile] = int((targets[1:] != IGNORE_INDEX).sum())
            if end == last:
                continue
            slot = placement.offsets[tile] + placement.real[tile] - 1
            labels[slot] = int(targets[end])
            weights[slot] = float(labels[slot] != IGNORE_INDEX)
            after = slice(end, min(end + self.lookahead, last))
            known = counts[tile] = after.stop - end
            values["targets"][tile, :known] = targets[after]
            for name in ("tokens", *per_token):
                key = "input_ids" if name == "tokens" else name
                (column,) = columns.tensors(key, [columns.samples[at][key]])
                values[name][tile, :known] = column[after]
        return Continuation(counts, values) if bool(counts.any()) else None

    def _refuse_keys(self, micro: MicroBatch, samples: list[Sample]) -> NoReturn:
        known = {*SAMPLE_KEYS, *self.extras}
        at = next(n for n, sample in enumerate(samples) if not known >= sample.keys())
        raise InputError(
            f"sample {micro.segments.sample[at]} has the undeclared key "
            f"{min(samples[at].keys() - known)!r}; expected "
            f"{', '.join(sorted(known - {*LOSS_MASKS[1:]}))}. Remove it from the sample, or "
            f"declare it: Runner(collate=Collator(extras=...))."
        )
