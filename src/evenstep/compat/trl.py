"""TRL's packing of datasets, and its batches of rollouts within a token budget.

`pack_dataset` has the arguments, rows and columns of `trl.pack_dataset`; `TokenBudgetBatcher`
replaces the class of that name in `trl.experimental.async_grpo`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from torch.utils.data import IterableDataset

from evenstep.compat.filled import filled_packs
from evenstep.core.cost import Cost
from evenstep.core.layout import Packed
from evenstep.core.ragged import IntArray, offsets_of, ranges_of
from evenstep.core.recipe import Recipe, Steps, Topology
from evenstep.core.text import one_of, whole_number
from evenstep.errors import InputError
from evenstep.planning.packers import pack
from evenstep.planning.planner import plan_step, step_size
from evenstep.planning.units import segments_of

__all__ = ["TokenBudgetBatcher", "pack_dataset"]

_Strategy = Literal["bfd", "bfd_split", "wrapped"]


def pack_dataset(
    dataset: Any,
    seq_length: int,
    strategy: _Strategy = "bfd",
    map_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Rows of at most `seq_length` tokens, made of the rows of a Hugging Face dataset.

    bfd        best fit decreasing; longer rows are truncated
    bfd_split  best fit decreasing; longer rows are split
    wrapped    rows joined in order and divided at every `seq_length` tokens

    Rows of a batch of `map` are packed together. The first two add the column `seq_lengths` and
    leave out empty rows.

        packed = pack_dataset(dataset, seq_length=4096)
    """
    one_of("packing strategy", strategy, _Strategy)
    if getattr(dataset, "num_rows", None) == 0:
        return dataset  # `map` would not add the column
    layout = _format_of(dataset)
    packed = dataset.with_format("arrow").map(
        _pack_rows,
        batched=True,
        fn_kwargs={"size": whole_number("seq_length", seq_length), "strategy": strategy},
        **(map_kwargs or {}),
    )
    if strategy != "wrapped" and layout.get("columns") is not None:
        layout["columns"] = [*layout["columns"], "seq_lengths"]
    return packed.with_format(**layout)


class TokenBudgetBatcher(IterableDataset):  # type: ignore[misc]
    """Micro-batches of rollouts as they arrive: one row per process, each within the budget.

    Each item is a list of `num_processes` rows, none empty, with similar Σ L(L+1). It holds the
    next samples, as many as fit; a few later ones are read to find that out. Samples above the
    budget are dropped with a warning, and so are the last ones if there are too few for all rows.

    A row is a list of samples or, if TRL passes its `metrics`, a `TreeRow` of TRL.

    >>> samples = [{"input_ids": [0] * n} for n in (6, 2, 4, 3, 5, 8)]
    >>> for rows in TokenBudgetBatcher(samples, num_processes=2, token_budget=8):
    ...     [[len(sample["input_ids"]) for sample in row] for row in rows]
    [[6, 2], [4, 3]]
    [[8], [5]]
    """

    def __init__(
        self,
        dataset: Iterable[dict[str, Any]],
        num_processes: int,
        token_budget: int,
        metrics: Any = None,
    ) -> None:
        super().__init__()
        self.dataset, self.metrics = dataset, metrics
        self.num_processes, self.token_budget = num_processes, token_budget
        self._recipe = Recipe(
            layout=Packed(max_tokens=token_budget),
            topology=Topology(dp=num_processes),
            steps=Steps(micro_batches=1),
            cost=Cost(per_token=1, per_pair=1),
        )

    def __iter__(self) -> Iterator[list[Any]]:
        waiting: list[dict[str, Any]] = []
        tokens = 0
        for sample in self.dataset:
            if len(sample["input_ids"]) > self.token_budget:
                self._drop(sample)
                continue
            waiting.append(sample)
            tokens += len(sample["input_ids"])
            if tokens < self.num_processes * self.token_budget:
                continue  # another sample may fit
            size = step_size(_lengths(waiting), self._recipe, complete=False)
            if size is not None:
                # As many samples as rows always fit, one in each.
                size = max(size, self.num_processes)
                yield self._rows(waiting[:size])
                waiting = waiting[size:]
                tokens = int(_lengths(waiting).sum())
        while len(waiting) >= self.num_processes:
            size = max(step_size(_lengths(waiting), self._recipe) or 0, self.num_processes)
            yield self._rows(waiting[:size])
            waiting = waiting[size:]
        if waiting:
            warnings.warn(
                f"dropped the last {len(waiting)} samples, too few for {self.num_processes} rows",
                stacklevel=2,
            )

    def _rows(self, samples: list[dict[str, Any]]) -> list[Any]:
        plan = plan_step(_lengths(samples), self._recipe)
        rows = [[samples[at] for at in np.sort(packs[0])] for packs in filled_packs(plan)]
        if self.metrics is None:
            return rows
        from trl.experimental.async_grpo.packing import TreeRow

        made = [TreeRow() for _ in rows]
        for tree, row in zip(made, rows, strict=True):
            for sample in row:
                tree.add(sample)
        return made

    def _drop(self, sample: dict[str, Any]) -> None:
        warnings.warn(
            f"dropped a sample of {len(sample['input_ids'])} tokens, more than token_budget="
            f"{self.token_budget}; raise token_budget to keep such samples",
            stacklevel=3,
        )
        if self.metrics is not None:
            self.metrics["batch/dropped_oversize_total"].append(1.0)


def _lengths(samples: list[dict[str, Any]]) -> IntArray:
    return np.array([len(sample["input_ids"]) for sample in samples], np.int64)


def _pack_rows(table: pa.Table, size: int, strategy: _Strategy) -> pa.Table:
    """The rows of one batch of `map`, packed."""
    columns = [column.combine_chunks() for column in table.columns]
    starts, lengths = _checked(table.column_names, columns)
    values = [column.flatten() for column in columns]
    names = list(table.column_names)
    if strategy == "wrapped":
        total = int(lengths.sum())
        offsets = np.append(np.arange(0, total, size), total)
        return pa.Table.from_arrays(_lists(columns, offsets, values), names=names)
    held = np.flatnonzero(lengths)
    segments, _ = segments_of(lengths[held], size, "truncate" if strategy == "bfd" else "split")
    bins = pack(segments.length, size)
    first, count = (starts[held][segments.sample] + segments.start)[bins.values], segments.length
    chosen = pa.array(ranges_of(first, count[bins.values]))
    made = _lists(columns, offsets_of(bins.sums(count)), [each.take(chosen) for each in values])
    held_lengths = pa.array(count[bins.values].astype(np.int32))
    made.append(pa.ListArray.from_arrays(bins.offsets.astype(np.int32), held_lengths))
    return pa.Table.from_arrays(made, names=[*names, "seq_lengths"])


def _checked(names: list[str], columns: list[Any]) -> tuple[IntArray, IntArray]:
    """(where each row starts in the flat values, its length); the same in all columns."""
    for name, column in zip(names, columns, strict=True):
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise TypeError(
                f"Packing requires all columns to be lists of lists, but {name!r} has type "
                f"{column.type}. Remove the column."
            )
    found = [column.value_lengths().to_numpy().astype(np.int64) for column in columns]
    for name, lengths in zip(names, found, strict=True):
        if not np.array_equal(lengths, found[0]):
            raise InputError(
                f"All columns must have values of the same length, but {name!r} and {names[0]!r} "
                f"differ. Remove one of them."
            )
    return offsets_of(found[0])[:-1], found[0]


def _lists(columns: list[Any], offsets: IntArray, values: list[Any]) -> list[Any]:
    """Columns of the same types with other rows."""
    return [
        type(column).from_arrays(pa.array(offsets, column.offsets.type), flat)
        for column, flat in zip(columns, values, strict=True)
    ]


def _format_of(dataset: Any) -> dict[str, Any]:
    """What `with_format` takes to return to the dataset's format."""
    one = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    if hasattr(one, "format"):
        found = dict(one.format)
    else:  # an IterableDataset
        found = {"type": one._formatting and one._formatting.format_type}
    return {**found, **found.pop("format_kwargs", {})}
