"""RolloutBatch: rollouts as padded tensors, read row by row without their padding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from evenstep.core.ragged import IntArray, frozen
from evenstep.core.recipe import Recipe, World, check_recipe
from evenstep.core.text import counted, line, one_of, whole_number
from evenstep.data.dataset import Lengths
from evenstep.data.planned import PlannedStream
from evenstep.data.source import LOSS_MASKS, check_masks_read, check_masks_spelt
from evenstep.errors import ConfigError, InputError
from evenstep.planning.inputs import checked_groups
from evenstep.tensors.batch import Extra, RaggedTensor
from evenstep.tensors.collate import Collator
from evenstep.train.rollouts.arrays import array_of, tensor_of
from evenstep.train.rollouts.rollout_plan import RolloutPlan
from evenstep.train.rollouts.row_results import (
    check_complete,
    pad_sequences,
    pad_tokens,
    places_of,
)
from evenstep.train.rollouts.spans import Side, Spans

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
            found = "neither" if lengths is None else "both"
            raise ConfigError(
                f"expected an 'attention_mask' among the tensors or lengths=, got {found}. Pass "
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
        self._row_digests: IntArray | None = None
        self._digested: int | None = None  # version of the tokens that they are of
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
            if name == "input_ids":
                self._row_digests = None
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
        some = "" if len(self) == self.num_rows else f" of {self.num_rows:,}"
        parts = (
            f"{len(self):,}{some} row{'' if len(self) == 1 and not some else 's'}",
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
            else _cut(tensor[item], start - self.width + tensor.shape[1], length)
            for name, tensor in self.tensors.items()
        }

    def with_tensors(
        self, tensors: Mapping[str, Tensor], *, aligned: Mapping[str, Aligned] | None = None
    ) -> RolloutBatch:
        """The same rows with further tensors, such as old log-probs; the same name replaces."""
        found = self._copy(tensors=dict(self.tensors), aligned=dict(self.aligned))
        found._add(tensors, aligned or {})
        return found

    def select(self, rows: ArrayLike) -> RolloutBatch:
        """These rows of the whole batch, copied, for example `plan.rows_of(rank)`.

        They keep their numbers, so that the steps of a plan find them.
        """
        at = np.sort(places_of(rows, self.rows))
        index = torch.from_numpy(at)
        digests = self._current_digests()
        tensors = {name: t.index_select(0, index) for name, t in self.tensors.items()}
        return self._copy(
            tensors=tensors,
            spans=self.spans.take(at),
            rows=frozen(self.rows[at]),
            groups=None if self.groups is None else frozen(self.groups[at]),
            _row_digests=None if digests is None else frozen(digests[at]),
            _digested=_version(tensors["input_ids"]),
        )

    def _copy(self, **changed: Any) -> RolloutBatch:
        found = object.__new__(RolloutBatch)
        vars(found).update(vars(self) | changed)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Tensors as arrays: pickle protocol 5 does not copy them, so readers can share memory."""
        arrays = {name: array_of(tensor) for name, tensor in self.tensors.items()}
        return vars(self) | {"tensors": arrays, "_row_digests": self._current_digests()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.tensors = {name: tensor_of(held) for name, held in state["tensors"].items()}
        self._digested = _version(self.tensors["input_ids"])

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
        self, recipe: Recipe, *, epochs: int = 1, seed: int = 0, shuffle: bool = True
    ) -> RolloutPlan:
        """Which rows run in which epoch, step, rank and micro-batch. Pure: equal on all ranks.

        A step (a mini-batch of PPO) takes the next rows of the epoch's order, which depends on the
        seed and the epoch. With `Steps(samples=...)`, its rows do not depend on layout, budget or
        ranks. Without steps, an epoch is one step. Columns that the recipe names are tensors of
        this batch.

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
        stream = PlannedStream(
            Lengths(self.spans.run_lengths),
            recipe,
            world=World(0, recipe.topology.dp),
            seed=seed,
            shuffle=shuffle,
            groups=self.groups,
            columns={name: self._column(name) for name in recipe.columns},
        )
        count = whole_number("epochs", epochs)
        return RolloutPlan(
            epochs=tuple(stream.plan_epoch(epoch) for epoch in range(count)),
            lengths=self.lengths,
            width=self.width,
            row_digests=self.row_digests,
        )

    def _column(self, name: str) -> ArrayLike:
        tensor = self.tensors.get(name)
        if tensor is None or tensor.ndim != 1:
            raise InputError(
                f"the recipe names the column {name!r}, but there is no tensor {name!r} with one "
                f"number per row. Add it to the batch."
            )
        return np.asarray(tensor.numpy())

    @property
    def row_digests(self) -> IntArray:
        """64 bits of each row's tokens. Computed once and taken along by copies of the rows, and
        computed again if torch has changed the tokens in place."""
        digests = self._current_digests()
        if digests is None:
            ids = np.ascontiguousarray(self.tensors["input_ids"].numpy(), np.int64)
            starts, ends = self.spans.starts, self.spans.starts + self.spans.lengths
            joined = b"".join(
                hashlib.blake2b(row[start:end], digest_size=8).digest()
                for row, start, end in zip(ids, starts.tolist(), ends.tolist(), strict=True)
            )
            digests = self._row_digests = np.frombuffer(joined, np.int64)
            self._digested = _version(self.tensors["input_ids"])
        return digests

    def _current_digests(self) -> IntArray | None:
        """Those of the tokens as they are now, if they were computed."""
        current = self._digested == _version(self.tensors["input_ids"])
        return self._row_digests if current else None

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
        return pad_tokens(values, self._complete(rows), self.rows, self.spans, pad)

    def restore_sequences(
        self, values: Tensor | Sequence[float], rows: ArrayLike | None = None, *, pad: float = 0.0
    ) -> Tensor:
        """Values per row, (rows, ...), of `rows` -> in the order given; empty rows get `pad`.

        >>> ids = torch.ones((3, 2), dtype=torch.int64)
        >>> batch = RolloutBatch({"input_ids": ids}, lengths=[2, 0, 1], padding_side="right")
        >>> batch.restore_sequences(torch.tensor([7, 8, 9]), rows=[2, 1, 0]).tolist()
        [9, 0, 7]
        """
        return pad_sequences(torch.as_tensor(values), self._complete(rows), self.spans, pad)

    def _complete(self, rows: ArrayLike | None) -> IntArray:
        """Where each of `rows` is in this batch; all but empty ones must be there."""
        if rows is None:
            return np.arange(len(self))
        at = places_of(rows, self.rows)
        check_complete(at, self.rows, self.spans)
        return at


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


def _version(tensor: Tensor) -> int | None:
    """How often torch has changed the tensor in place; None if it was made in inference mode, where
    this is not counted."""
    return None if tensor.is_inference() else int(tensor._version)


def _cut(row: Tensor, start: int, length: int) -> Tensor:
    """Entries `start` up to `start + length`; those before the first are 0, an empty row is one 0.

    [5, 6, 7] from -1, 3 entries -> [0, 5, 6]
    """
    if length == 0:
        return row.new_zeros((1, *row.shape[1:]))
    if start >= 0:
        return row[start : start + length]
    before = row.new_zeros((min(-start, length), *row.shape[1:]))
    return torch.cat((before, row[: max(start + length, 0)]))
