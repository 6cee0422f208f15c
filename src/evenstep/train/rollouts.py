"""Padded rollouts in, results back in the same order and shape."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from evenstep.core.plan import Plan
from evenstep.core.prefixes import find_prefixes
from evenstep.core.ragged import IntArray, frozen, offsets_of, ranges_of
from evenstep.core.recipe import Recipe, World, check_recipe
from evenstep.core.step import Step
from evenstep.core.text import counted, line, one_of, whole_number
from evenstep.data.dataset import Lengths
from evenstep.data.planned import PlannedStream
from evenstep.data.source import LOSS_MASKS, check_masks_read, check_masks_spelt
from evenstep.errors import ConfigError, InputError, SampleError
from evenstep.planning.inputs import checked_groups
from evenstep.tensors.batch import IGNORE_INDEX, Extra, RaggedTensor
from evenstep.tensors.collate import Collator

Stored: TypeAlias = tuple[NDArray[np.uint8], torch.dtype, tuple[int, ...]]
Side: TypeAlias = Literal["left", "right"]


def array_of(tensor: Tensor) -> Stored:
    """The bytes of a tensor on the host, its dtype and its shape: numpy has no bfloat16."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return raw, tensor.dtype, tuple(tensor.shape)


def tensor_of(stored: Stored) -> Tensor:
    """The tensor over the same memory.

    >>> tensor_of(array_of(torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16))).tolist()
    [[1.5], [2.5]]
    """
    raw, dtype, shape = stored
    return over(raw).view(dtype).view(shape) if raw.size else torch.empty(shape, dtype=dtype)


def over(array: NDArray[Any]) -> Tensor:
    """A tensor over the memory of an array, which may be read-only: torch cannot mark it so."""
    _warn_now()
    return torch.from_numpy(array)


@cache
def _warn_now() -> None:
    """torch warns of read-only memory once, and never after this."""
    read_only = np.zeros(1)
    read_only.flags.writeable = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        torch.from_numpy(read_only)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Row i has its tokens in the columns `starts[i]` up to `starts[i] + lengths[i]` of `width`."""

    starts: IntArray
    lengths: IntArray
    width: int

    @classmethod
    def of_mask(cls, mask: Tensor, side: Side | None) -> Spans:
        """The spans of the ones of an attention mask, (rows, width); checks the padding side."""
        if mask.ndim != 2:
            raise InputError(
                f"attention_mask has shape {tuple(mask.shape)}; expected (rows, width). Pass a "
                f"mask of tokens, not of pairs of tokens."
            )
        mask, width = mask.detach().cpu(), mask.shape[1]
        ones = (mask == 1).numpy()
        lengths = np.count_nonzero(ones, axis=1)
        if lengths.sum() != int(torch.count_nonzero(mask)):
            odd = mask[(mask != 0) & (mask != 1)][0].item()
            raise InputError(
                f"attention_mask holds {odd:g}; expected 0 or 1. A row is one sequence: unpack "
                f"packed rows first."
            )
        # [[0, 1, 1], [1, 0, 0]] -> starts [1, 0], ends [3, 1], lengths [2, 1]
        starts = ones.argmax(axis=1)
        ends = width - ones[:, ::-1].argmax(axis=1)
        gaps = np.flatnonzero((ends - starts != lengths) & (lengths > 0))
        if len(gaps):
            raise InputError(
                f"the attention_mask of row {gaps[0]} has zeros between ones; expected padding "
                f"before or after the tokens only. To ignore tokens in the loss, set their "
                f"'loss_mask' to 0."
            )
        expected = {"left": width - lengths, "right": np.zeros_like(starts)}.get(side or "", starts)
        other = np.flatnonzero((starts != expected) & (lengths > 0))
        if len(other):
            row = int(other[0])
            raise InputError(
                f"padding_side is {side!r}, but row {row} has its tokens in columns {starts[row]} "
                f"to {ends[row] - 1} of {width}. Leave padding_side out to detect the side of each "
                f"row."
            )
        return cls(frozen(starts), frozen(lengths), width)

    @classmethod
    def of_lengths(cls, lengths: Any, rows: int, width: int, side: Side | None) -> Spans:
        """The spans of rows of these lengths, all padded on one side."""
        if side is None:
            raise ConfigError(
                "lengths do not say on which side rows are padded. Set padding_side='left' or "
                "'right', or pass an attention_mask."
            )
        on_host = lengths.detach().cpu().numpy() if isinstance(lengths, Tensor) else lengths
        counts = np.asarray(on_host)
        if counts.shape != (rows,) or counts.dtype.kind not in "iu":
            raise InputError(
                f"lengths must be {rows} integers, one per row; got shape {counts.shape} and dtype "
                f"{counts.dtype}."
            )
        outside = np.flatnonzero((counts < 0) | (counts > width))
        if len(outside):
            row = int(outside[0])
            raise InputError(
                f"row {row} has length {counts[row]}; expected 0 to {width}, the width of the rows."
            )
        starts = width - counts if side == "left" else np.zeros(rows, np.int64)
        return cls(frozen(starts), frozen(counts), width)

    @property
    def run_lengths(self) -> IntArray:
        """The tokens of each row when it runs: an empty row runs as one padding token."""
        return np.maximum(self.lengths, 1)


def places_of(rows: ArrayLike, numbers: IntArray) -> IntArray:
    """Where each of `rows` is in the ascending `numbers`. Raises if one is missing or twice.

    >>> places_of([7, 2], np.array([2, 5, 7])).tolist()
    [2, 0]
    """
    wanted = np.asarray(rows, np.int64)
    at = np.searchsorted(numbers, wanted)
    missing = np.flatnonzero(np.append(numbers, -1)[at] != wanted)
    if len(missing):
        raise InputError(
            f"row {wanted[missing[0]]} is not among the {len(numbers)} rows of this batch. Pass "
            f"numbers of rows that it holds."
        )
    twice = np.flatnonzero(np.bincount(at) > 1)
    if len(twice):
        raise InputError(
            f"row {numbers[twice[0]]} is given twice. Pass each row once; of a row that ranks "
            f"share, the result of one of them."
        )
    return at


_ARRAYS = ("lengths", "row_digests")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RolloutPlan:
    """The plan of every epoch, as pure data: small, and equal on all ranks.

    A controller plans once and sends each rank the plan and its rows:

        plan = batch.plan(recipe, epochs=2)
        send(rank, plan, batch.select(plan.rows_of(rank)))  # on the controller
        for step in plan.steps(mine, World(rank, size)): ...  # on the rank

    Where every rank has the whole batch, it makes the plan itself and passes the batch to `steps`.

    >>> import torch
    >>> from evenstep import Packed, Recipe, Topology
    >>> from evenstep.train import RolloutBatch
    >>> ids = torch.ones((4, 8), dtype=torch.int64)
    >>> batch = RolloutBatch({"input_ids": ids}, lengths=[8, 3, 5, 6], padding_side="left")
    >>> plan = batch.plan(Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2)))
    >>> plan
    RolloutPlan(1 epoch, 1 step, 2 ranks, 4 rows, removed padding 31.2%)
    >>> sorted(plan.rows_of(0).tolist() + plan.rows_of(1).tolist())
    [0, 1, 2, 3]
    """

    epochs: tuple[Plan, ...]
    """One plan per epoch. Its sample i is row `plan.sample_ids[i]`, or row i if that is None."""
    lengths: IntArray
    """The tokens of each row; 0 for an empty row, which is planned as one token."""
    width: int
    """The columns of a row, padding included."""
    row_digests: IntArray
    """Of the tokens of each row, to know the rows again."""

    @property
    def digest(self) -> str:
        """Of all rows; part of the fingerprint of each step, which ranks compare."""
        rows = np.concatenate((self.lengths, self.row_digests))
        return hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Arrays as bytes: a copy is read-only too, and shares no memory with a batch."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        return state | {name: np.asarray(state[name], np.int64).tobytes() for name in _ARRAYS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = {name: np.frombuffer(state[name], np.int64) for name in _ARRAYS}
        for name, value in (state | arrays).items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """Sizes and the padding that the plan removes, in one line."""
        metrics = self.metrics()
        parts = (
            counted(len(self.epochs), "epoch"),
            counted(int(metrics["num_steps"]), "step"),
            counted(self.num_ranks, "rank"),
            counted(len(self.lengths), "row"),
            f"removed padding {metrics['removed_padding_ratio']:.1%}",
        )
        return line("RolloutPlan", parts)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return self.epochs[0].num_ranks

    def mini_batches(self, epoch: int = 0) -> list[IntArray]:
        """The rows of each step of an epoch, ascending."""
        plan = self.epochs[epoch]
        rows = self._rows_of(plan, np.arange(len(self.lengths)))
        return [np.sort(rows[plan.step_of == step]) for step in range(plan.num_steps)]

    def rows_of(self, rank: int) -> IntArray:
        """The rows that a rank runs in any epoch, ascending; pass them to `RolloutBatch.select`."""
        if not 0 <= rank < self.num_ranks:
            raise InputError(f"rank {rank} is out of range: the plan has {self.num_ranks} ranks.")
        rows = []
        for plan in self.epochs:
            cells = plan.segment_offsets[plan.cell_offsets]  # the first segment of each cell
            first, end = (cells[at :: plan.num_ranks] for at in (rank, rank + 1))
            segments = ranges_of(first[: len(end)], end - first[: len(end)])
            rows.append(self._rows_of(plan, plan.segments.sample[segments]))
        return np.unique(np.concatenate(rows))

    @staticmethod
    def _rows_of(plan: Plan, samples: IntArray) -> IntArray:
        return samples if plan.sample_ids is None else plan.sample_ids[samples]

    def steps(self, batch: RolloutBatch, world: World | None = None) -> Iterator[Step]:
        """The steps of a rank, over all epochs, for `Runner.run` and `compute_log_probs`.

        `batch` holds at least the rows of this rank. Sample ids are row numbers. On fewer ranks
        than planned, which must divide them, a rank runs the micro-batches of several.
        """
        self.check(batch)
        source, done = _Rows(self, batch), 0
        for epoch, plan in enumerate(self.epochs):
            stream = PlannedStream.from_plan(source, plan, world=world)
            stream.set_epoch(epoch, done)
            yield from stream
            done += len(plan)

    def check(self, batch: RolloutBatch) -> None:
        """Raise if the batch is not the one that was planned, or rows selected from it."""
        whole = (len(self.lengths), self.width) == (batch.num_rows, batch.width)
        if not whole or not np.array_equal(self.lengths[batch.rows], batch.lengths):
            raise InputError(
                f"the plan is of {len(self.lengths)} rows of width {self.width}, but the batch "
                f"has {batch.num_rows} of width {batch.width}, or rows of other lengths. Pass the "
                f"batch that was planned, or rows selected from it."
            )
        other = np.flatnonzero(self.row_digests[batch.rows] != batch.row_digests)
        if len(other):
            raise InputError(
                f"row {batch.rows[other[0]]} has other tokens than the row that was planned "
                f"({len(other)} of {len(batch)} rows differ). Pass the batch that was planned, or "
                f"plan this one."
            )

    def metrics(self) -> dict[str, float]:
        """Padding and balance over all epochs, as plain numbers for a logger.

        `slots_before` counts rows at their full width, once per epoch. `imbalance_step` and
        `imbalance_micro_batch` are the planned cost of the slowest rank over the mean, if ranks
        synchronise once per step or at every micro-batch; epochs count equally.
        """
        stats = [plan.stats() for plan in self.epochs]
        times, empty = len(self.epochs), int((self.lengths == 0).sum())
        tokens = sum(each["tokens"] for each in stats) - empty * times
        before = len(self.lengths) * self.width * times
        slots = sum(each["slots"] for each in stats)
        return {
            "num_steps": sum(each["num_steps"] for each in stats),
            "num_micro_batches": sum(each["num_micro_batches"] for each in stats),
            "num_empty_rows": empty,
            "tokens": tokens,
            "slots_before": before,
            "slots": slots,
            "removed_padding": before - slots,
            "removed_padding_ratio": (before - slots) / before if before else 0.0,
            "padding_ratio": (slots - tokens) / slots if slots else 0.0,
            "imbalance_step": sum(e["imbalance_cost_step"] for e in stats) / times,
            "imbalance_micro_batch": sum(e["imbalance_cost_micro_batch"] for e in stats) / times,
        }


class _Rows:
    """The rows of a batch as a source; it knows all lengths and reads the rows that are here."""

    def __init__(self, plan: RolloutPlan, batch: RolloutBatch) -> None:
        self.fingerprint = plan.digest
        self._batch, self._lengths = batch, np.maximum(plan.lengths, 1)

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths_of(self, items: IntArray) -> IntArray:
        return self._lengths[items]

    def __getitem__(self, row: int, /) -> dict[str, Any]:
        at = int(np.searchsorted(self._batch.rows, row))
        if at == len(self._batch) or self._batch.rows[at] != row:
            raise SampleError(
                f"row {row} is not among the {len(self._batch)} rows of this batch. Select "
                f"plan.rows_of(rank) of the rank that runs it."
            )
        return self._batch[at]


Aligned: TypeAlias = Literal["token", "last", "sequence"]

_MASK = "attention_mask"
_OWN = ("input_ids", "labels", *LOSS_MASKS)  # keys that a Collator reads by itself
_OF_ROWS = "sample_mask"  # a loss mask with one number per row
_LOGITS = "teacher_logits"  # of `distillation`; an entry belongs to the slot before its token


class RolloutBatch:
    """Rollouts as a policy returns them: tensors (rows, width, ...) by name, and where tokens are.

    Rows are padded on the left, on the right or on both sides, as the `attention_mask` among the
    tensors says, row by row; or give `lengths` and `padding_side`. Nothing is copied before a batch
    is laid out, except from a device to the host. A row may be empty: it runs as one padding token
    without a label, and its results are the pad value.

    A loss mask is 1 for tokens that are trained. It may have the name that verl, ROLL, TRL, NeMo-RL
    or OpenRLHF give it (`response_mask`, `completion_mask`, `token_mask`, `action_mask`, ...; see
    `Collator`) and may cover the last columns only. Several masks hide what any of them hides. A
    tensor with another name that ends in `mask` is refused unless `aligned` names it, because
    nothing but a loss of your own would read it.

    `aligned` says what a tensor holds where its shape does not:

    token     an entry per column: (rows, width, ...), the default for this width
    last      an entry for each of the last columns: log-probs (rows, width - 1), or responses
    sequence  an entry per row: (rows), the default for one dimension, or (rows, ...)

    `groups` gives each row a group id, such as the number or the uid of its prompt; a group stays
    in one step or micro-batch, as `Recipe.groups` says.

    A batch is a sequence of samples: `batch[i]` is row i, for `compute_log_probs`.

    >>> ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 0]])
    >>> batch = RolloutBatch({"input_ids": ids, "attention_mask": (ids > 0).long()})
    >>> batch
    RolloutBatch(2 rows, width 4, 5 tokens, input_ids)
    >>> batch[0]["input_ids"].tolist(), batch[1]["input_ids"].tolist()
    ([5, 6], [7, 8, 9])
    >>> batch.restore_tokens([torch.tensor([1, 2]), torch.tensor([3, 4, 5])]).tolist()
    [[0, 0, 1, 2], [3, 4, 5, 0]]
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        lengths: ArrayLike | Tensor | None = None,
        padding_side: Side | None = None,
        groups: ArrayLike | None = None,
        aligned: Mapping[str, Aligned] | None = None,
    ) -> None:
        shape = _shape_of(tensors)
        if padding_side is not None:
            one_of("padding_side", padding_side, Side)
        if (lengths is None) == (_MASK not in tensors):
            passed = "neither" if lengths is None else "both"
            raise ConfigError(
                f"expected an 'attention_mask' among the tensors or lengths=, got {passed}. Pass "
                f"one of them."
            )
        if lengths is None:
            self.spans = Spans.of_mask(tensors[_MASK], padding_side)
        else:
            self.spans = Spans.of_lengths(lengths, *shape, padding_side)
        self.rows: IntArray = frozen(np.arange(shape[0]))
        """The number of each row in the whole batch, ascending."""
        self.num_rows = shape[0]
        """The rows of the whole batch."""
        ids = None if groups is None else checked_groups(groups, shape[0])
        self.groups = None if ids is None else frozen(ids)
        self.aligned: dict[str, Aligned] = {}
        self.tensors: dict[str, Tensor] = {}
        self._add({name: t for name, t in tensors.items() if name != _MASK}, aligned or {})

    def _add(self, tensors: Mapping[str, Tensor], aligned: Mapping[str, Aligned]) -> None:
        unknown = sorted(aligned.keys() - tensors.keys())
        if unknown:
            raise ConfigError(
                f"aligned names {unknown[0]!r}, which is not among the tensors "
                f"{', '.join(sorted(tensors))}. Remove it."
            )
        check_masks_spelt(aligned)
        check_masks_read(
            tensors,
            aligned,
            "Rename it if it is one, remove it, or name it in aligned= if your loss reads it.",
        )
        for name, tensor in tensors.items():
            if name == _MASK:
                raise ConfigError(
                    "attention_mask cannot change after a RolloutBatch is made. Make another one."
                )
            if name == _OF_ROWS and tensor.ndim == 2 and tensor.shape[1] == 1:
                tensor = tensor[:, 0]
            self.aligned[name] = self._alignment(name, tensor, aligned.get(name))
            self.tensors[name] = tensor.detach().cpu()

    def _alignment(self, name: str, tensor: Tensor, said: Aligned | None) -> Aligned:
        shape, width = tuple(tensor.shape), self.width
        if said is not None:
            one_of(f"aligned[{name!r}]", said, Aligned)
        elif name in LOSS_MASKS and name != _OF_ROWS and len(shape) == 2 and shape[1] < width:
            said = "last"
        if shape[:1] != (len(self),):
            raise InputError(
                f"{name!r} has shape {shape}, but there are {len(self)} rows. Pass one entry per "
                f"row."
            )
        whole = len(shape) > 1 and shape[1] == width
        if said is None and not whole and len(shape) > 1:
            raise InputError(
                f"{name!r} has shape {shape}, but rows are {width} wide, so it is not clear what "
                f"it holds. Set aligned={{{name!r}: 'last'}} if it covers the last {shape[1]} "
                f"columns, or 'sequence' for one entry per row."
            )
        if name == _LOGITS and said == "last" and not whole:
            raise InputError(
                f"{name!r} has shape {shape}, but rows are {width} wide, and entry i of logits "
                f"predicts token i + 1, so they do not belong to the last columns. Pass the logits "
                f"of all {width} columns; those of the last one may be zeros."
            )
        fits = {"token": whole, "last": len(shape) > 1 and shape[1] <= width, "sequence": True}
        if said is not None and not fits[said]:
            raise InputError(
                f"{name!r} has shape {shape}, which cannot be aligned as {said!r} to rows that are "
                f"{width} wide."
            )
        if name == _OF_ROWS and said in (None, "sequence") and len(shape) == 1:
            return "sequence"
        if name in _OWN and (said == "sequence" or len(shape) != 2):
            raise InputError(
                f"{name!r} has shape {shape}; expected one number per token, "
                f"({len(self)}, {width})."
            )
        return said or ("token" if whole else "sequence")

    # Rows ----------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """The columns of a row, padding included."""
        return self.spans.width

    @property
    def lengths(self) -> IntArray:
        """The tokens of each row; 0 for an empty row."""
        return self.spans.lengths

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        """Sizes and names in one line."""
        of_all = "" if len(self) == self.num_rows else f" of {self.num_rows:,}"
        parts = (
            f"{len(self):,}{of_all} row{'' if len(self) == 1 and not of_all else 's'}",
            f"width {self.width:,}",
            counted(int(self.lengths.sum()), "token"),
            *self.tensors,
        )
        return line("RolloutBatch", parts)

    def __getitem__(self, item: int, /) -> dict[str, Tensor]:
        """Row `item` without padding: views of its tensors, by name."""
        number: object = item
        if isinstance(number, str):
            raise InputError(
                f"a RolloutBatch is indexed by row: batch[0]. Its padded tensors are in "
                f"batch.tensors[{item!r}]."
            )
        if not 0 <= item < len(self):
            raise IndexError(f"row {item} of {len(self)}")
        start, length = int(self.spans.starts[item]), int(self.spans.lengths[item])
        return {
            name: tensor[item]
            if self.aligned[name] == "sequence"
            else _cut(
                tensor[item],
                start - self.width + tensor.shape[1],
                length,
                IGNORE_INDEX if name == "labels" else 0,
            )
            for name, tensor in self.tensors.items()
        }

    def with_tensors(
        self, tensors: Mapping[str, Tensor], *, aligned: Mapping[str, Aligned] | None = None
    ) -> RolloutBatch:
        """The same rows with further tensors, such as old log-probs; the same name replaces."""
        copy = self._copy(tensors=dict(self.tensors), aligned=dict(self.aligned))
        copy._add(tensors, aligned or {})
        return copy

    def select(self, rows: ArrayLike) -> RolloutBatch:
        """These rows of the whole batch, copied, for example `plan.rows_of(rank)`.

        They keep their numbers, so that the steps of a plan find them.
        """
        at = np.sort(places_of(rows, self.rows))
        index = torch.from_numpy(at)
        tensors = {name: t.index_select(0, index) for name, t in self.tensors.items()}
        spans = self.spans
        return self._copy(
            tensors=tensors,
            spans=Spans(frozen(spans.starts[at]), frozen(spans.lengths[at]), spans.width),
            rows=frozen(self.rows[at]),
            groups=None if self.groups is None else frozen(self.groups[at]),
        )

    def _copy(self, **changed: Any) -> RolloutBatch:
        copy = object.__new__(RolloutBatch)
        vars(copy).update(vars(self) | changed)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        """Tensors as arrays: pickle protocol 5 does not copy them, so readers can share memory."""
        arrays = {name: array_of(tensor) for name, tensor in self.tensors.items()}
        return vars(self) | {"tensors": arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.tensors = {name: tensor_of(stored) for name, stored in state["tensors"].items()}

    def collator(self, *, pad_token: int = 0) -> Collator:
        """A collator that knows the tensors of this batch, for `Runner(collate=...)`."""
        extras = {}
        for name, tensor in self.tensors.items():
            if name not in _OWN:
                single = self.aligned[name] == "sequence"
                extras[name] = Extra(
                    aligned="sequence" if single else "token",
                    dtype=tensor.dtype,
                    shape=tuple(tensor.shape[1 if single else 2 :]),
                )
        return Collator(extras=extras, pad_token=pad_token)

    # Planning ------------------------------------------------------------------------------------

    def plan(
        self,
        recipe: Recipe,
        *,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        share_prefixes: bool = False,
    ) -> RolloutPlan:
        """Which rows run in which epoch, step, rank and micro-batch. Pure: equal on all ranks.

        A step (a mini-batch of PPO) takes the next rows of the epoch's order, which depends on the
        seed and the epoch. With `Steps(samples=...)`, its rows do not depend on layout, budget or
        ranks. Without steps, an epoch is one step. Columns that the recipe names are tensors of
        this batch. With `share_prefixes`, rows that begin with the same tokens run these once per
        micro-batch, where that takes less time; results are the same.

        >>> from evenstep import Packed, Steps
        >>> ids = torch.ones((6, 8), dtype=torch.int64)
        >>> lengths = [8, 3, 0, 5, 2, 6]
        >>> batch = RolloutBatch({"input_ids": ids}, lengths=lengths, padding_side="left")
        >>> recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=3))
        >>> [rows.tolist() for rows in batch.plan(recipe, shuffle=False).mini_batches()]
        [[0, 1, 2], [3, 4, 5]]
        """
        check_recipe(recipe)
        if len(self) != self.num_rows:
            raise InputError(
                f"this batch holds {len(self)} of {self.num_rows} rows. Plan the whole batch, then "
                f"select the rows of a rank."
            )
        columns: dict[str, ArrayLike] = {}
        for name in recipe.columns:
            tensor = self.tensors.get(name)
            if tensor is None or tensor.ndim != 1:
                raise InputError(
                    f"the recipe names the column {name!r}, but there is no tensor {name!r} with "
                    f"one number per row. Add it to the batch."
                )
            columns[name] = tensor.numpy()
        prefixes = None
        if share_prefixes:
            prefixes = find_prefixes([self[row]["input_ids"].numpy() for row in range(len(self))])
        stream = PlannedStream(
            Lengths(self.spans.run_lengths),
            recipe,
            world=World(0, recipe.topology.dp),
            seed=seed,
            shuffle=shuffle,
            groups=self.groups,
            columns=columns,
            prefixes=prefixes,
        )
        count = whole_number("epochs", epochs)
        return RolloutPlan(
            epochs=tuple(stream.plan_epoch(epoch) for epoch in range(count)),
            lengths=self.lengths,
            width=self.width,
            row_digests=self.row_digests,
        )

    @property
    def row_digests(self) -> IntArray:
        """64 bits of each row's tokens as they are now: 1 ms per megabyte."""
        ids = np.ascontiguousarray(self.tensors["input_ids"].numpy(), np.int64)
        starts, ends = self.spans.starts, self.spans.starts + self.spans.lengths
        digests = b"".join(
            hashlib.blake2b(row[start:end], digest_size=8).digest()
            for row, start, end in zip(ids, starts.tolist(), ends.tolist(), strict=True)
        )
        return np.frombuffer(digests, np.int64)

    # Results -------------------------------------------------------------------------------------

    def restore_tokens(
        self,
        values: Sequence[Tensor] | RaggedTensor,
        rows: ArrayLike | None = None,
        *,
        pad: float = 0.0,
    ) -> Tensor:
        """Values per token of each row -> (rows, width, ...) in the order and padding given.

        `values` are those of `rows` (default: all rows of this batch), one tensor for each, as
        `compute_log_probs` and `restore_ragged` return them. Every row of this batch is needed
        once; padding gets `pad`. For (rows, width - 1) or responses, take the last columns.
        """
        at, spans = self._complete(rows), self.spans
        if isinstance(values, RaggedTensor):
            lengths, joined = torch.diff(values.offsets).cpu().numpy(), values.values
        elif len(values):
            lengths = np.array([len(value) for value in values], np.int64)
            joined = torch.cat(list(values))
        elif not len(self):
            return torch.zeros((0, spans.width))
        else:
            raise InputError("no results were given, so their dtype is unknown. Pass one per row.")
        if len(lengths) != len(at):
            raise InputError(f"got {len(lengths)} results for {len(at)} rows. Pass one per row.")
        length = spans.lengths[at]
        # An empty row runs as one token.
        wrong = np.flatnonzero((lengths != length) & ((length > 0) | (lengths != 1)))
        if len(wrong):
            row = wrong[0]
            raise InputError(
                f"row {self.rows[at[row]]} has {length[row]} tokens, but its result has "
                f"{lengths[row]} entries. Return one entry per token."
            )
        target = ranges_of(spans.starts[at] + at * spans.width, length)
        source = ranges_of(offsets_of(lengths)[:-1], length)
        flat = _scatter(joined, source, target, len(self) * spans.width, pad)
        return flat.view(len(self), spans.width, *flat.shape[1:])

    def restore_sequences(
        self, values: Tensor | Sequence[float], rows: ArrayLike | None = None, *, pad: float = 0.0
    ) -> Tensor:
        """Values per row, (rows, ...), of `rows` -> in the order given; empty rows get `pad`.

        >>> ids = torch.ones((3, 2), dtype=torch.int64)
        >>> batch = RolloutBatch({"input_ids": ids}, lengths=[2, 0, 1], padding_side="right")
        >>> batch.restore_sequences(torch.tensor([7, 8, 9]), rows=[2, 1, 0]).tolist()
        [9, 0, 7]
        """
        at, values = self._complete(rows), torch.as_tensor(values)
        if len(values) != len(at):
            raise InputError(f"got {len(values)} values for {len(at)} rows. Pass one per row.")
        real = np.flatnonzero(self.lengths[at] > 0)
        return _scatter(values, real, at[real], len(self), pad)

    def _complete(self, rows: ArrayLike | None) -> IntArray:
        """Where each of `rows` is in this batch; all but empty ones must be there."""
        if rows is None:
            return np.arange(len(self))
        at = places_of(rows, self.rows)
        missing = self.lengths > 0
        missing[at] = False
        if missing.any():
            raise InputError(
                f"row {self.rows[missing][0]} has no result. Join the results of all ranks and "
                f"steps, or restore those of selected rows (`batch.select(rows)`)."
            )
        return at


def _scatter(values: Tensor, source: IntArray, target: IntArray, count: int, pad: float) -> Tensor:
    """(count, ...): entry `target[i]` is `values[source[i]]`, all others are `pad`."""
    into, taken = (torch.from_numpy(index).to(values.device) for index in (target, source))
    restored = values.new_full((count, *values.shape[1:]), pad)
    return restored.index_copy(0, into, values.index_select(0, taken))


def _shape_of(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """(rows, width) of the tokens."""
    if "input_ids" not in tensors:
        raise InputError(
            f"expected a tensor 'input_ids'; the keys are {', '.join(sorted(tensors)) or 'none'}."
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name!r} is a {type(tensor).__name__}; expected a tensor.")
    shape = tuple(tensors["input_ids"].shape)
    if len(shape) != 2 or shape[1] == 0:
        raise InputError(f"input_ids has shape {shape}; expected (rows, width).")
    if _MASK in tensors and tuple(tensors[_MASK].shape[:1] + tensors[_MASK].shape[-1:]) != shape:
        raise InputError(
            f"attention_mask has shape {tuple(tensors[_MASK].shape)}, but input_ids has {shape}."
        )
    return shape[0], shape[1]


def _cut(row: Tensor, start: int, length: int, fill: int) -> Tensor:
    """Entries `start` up to `start + length`, `fill` before the first; an empty row is one 0.

    [5, 6, 7] from -1, 3 entries, fill 0 -> [0, 5, 6]
    """
    if length == 0:
        return row.new_zeros((1, *row.shape[1:]))
    if start >= 0:
        return row[start : start + length]
    before = row.new_full((min(-start, length), *row.shape[1:]), fill)
    return torch.cat((before, row[: max(start + length, 0)]))
