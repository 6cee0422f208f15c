"""TRL's packing of datasets, and its batches of rollouts within a token budget.

`pack_dataset` has the arguments, rows and columns of `trl.pack_dataset`; `TokenBudgetBatcher` and
`FixedCountBatcher` replace the classes of those names in `trl.experimental.async_grpo`.
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
from evenstep.core.prefixes import find_prefixes
from evenstep.core.ragged import IntArray, offsets_of, ranges_of
from evenstep.core.recipe import Limits, Recipe, Steps, Topology
from evenstep.core.text import one_of, whole_number
from evenstep.errors import InputError, PlanError
from evenstep.planning.packers import pack
from evenstep.planning.planner import plan_step, step_size
from evenstep.planning.units import segments_of

__all__ = ["FixedCountBatcher", "TokenBudgetBatcher", "pack_dataset"]

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

    Each item is a list of `num_processes` rows, none empty. It holds the next samples, as many as
    fit; a few later ones are read to find that out. Samples above the budget are dropped with a
    warning, and so are the last ones if there are too few for all rows.

    A row is a list of samples or, if TRL passes its `metrics`, a `TreeRow` of TRL, in which a
    prefix of several samples counts once. Rows are even by `cost`: by default Σ L(L+1) of lists,
    and the time of an 8B model of `TreeRow`s. For other sizes, pass
    `functools.partial(TokenBudgetBatcher, cost=Cost.of_config(model.config))` to TRL.

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
        cost: Cost | None = None,
    ) -> None:
        super().__init__()
        self.dataset, self.metrics, self.cost = dataset, metrics, cost
        self.num_processes, self.token_budget = num_processes, token_budget
        self._recipe = Recipe(
            layout=Packed(max_tokens=token_budget),
            topology=Topology(dp=num_processes),
            steps=Steps(micro_batches=1),
            cost=Cost(per_token=1, per_pair=1) if cost is None else cost,
        )

    def __iter__(self) -> Iterator[list[Any]]:
        waiting: list[dict[str, Any]] = []
        room = total = self.num_processes * self.token_budget  # what may still fit
        for sample in self.dataset:
            if len(sample["input_ids"]) > self.token_budget:
                self._drop(sample)
                continue
            waiting.append(sample)
            room -= len(sample["input_ids"])
            if room > 0:
                continue  # another sample may fit
            size = self._size(waiting, complete=False)
            if size is not None:
                yield self._rows(waiting[:size])
                waiting = waiting[size:]
            room = total - self._used(waiting)
        while len(waiting) >= self.num_processes:
            size = self._size(waiting, complete=True) or 0
            yield self._rows(waiting[:size])
            waiting = waiting[size:]
        if waiting:
            warnings.warn(
                f"dropped the last {len(waiting)} samples, too few for {self.num_processes} rows",
                stacklevel=2,
            )

    def _used(self, samples: list[dict[str, Any]]) -> int:
        """The slots that these samples take at least."""
        if self.metrics is None:
            return int(_lengths(samples).sum())
        # A fork repeats one token.
        shared = find_prefixes([sample["input_ids"] for sample in samples]).shared
        unique = int(_lengths(samples).sum()) - int(np.maximum(shared - 1, 0).sum())
        return max(unique, int(_trained(samples).sum()))

    def _size(self, samples: list[dict[str, Any]], complete: bool) -> int | None:
        """How many of these samples, from the first on, fit; None if more may fit."""
        # As many samples as rows always fit, one in each.
        if self.metrics is None:
            size = step_size(_lengths(samples), self._recipe, complete=complete)
            return None if size is None else max(size, self.num_processes)
        if not complete and self._used(samples) < self.num_processes * self.token_budget:
            return None
        fits, too_many = self.num_processes, len(samples) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._tree_rows(samples[:middle]) is None:
                too_many = middle
            else:
                fits = middle
        return fits

    def _rows(self, samples: list[dict[str, Any]]) -> list[Any]:
        if self.metrics is not None:
            return _tree_rows(self._tree_rows(samples))
        plan = plan_step(_lengths(samples), self._recipe)
        return [[samples[at] for at in np.sort(packs[0])] for packs in filled_packs(plan)]

    def _tree_rows(self, samples: list[dict[str, Any]]) -> list[list[dict[str, Any]]] | None:
        return _shared_rows(samples, self.num_processes, self.token_budget, self.cost)

    def _drop(self, sample: dict[str, Any]) -> None:
        warnings.warn(
            f"dropped a sample of {len(sample['input_ids'])} tokens, more than token_budget="
            f"{self.token_budget}; raise token_budget to keep such samples",
            stacklevel=3,
        )
        if self.metrics is not None:
            self.metrics["batch/dropped_oversize_total"].append(1.0)


class FixedCountBatcher(IterableDataset):  # type: ignore[misc]
    """Micro-batches of `microbatch_size` rollouts: one `TreeRow` of TRL per process, none empty.

    Rows are even by `cost`, by default the time of an 8B model. A group is divided between rows
    where repeating its prefix takes less time than waiting for the slowest row.

        trl.experimental.async_grpo.async_grpo_trainer.FixedCountBatcher = FixedCountBatcher
    """

    def __init__(
        self,
        dataset: Iterable[dict[str, Any]],
        num_processes: int,
        microbatch_size: int,
        cost: Cost | None = None,
    ) -> None:
        super().__init__()
        self.dataset, self.cost = dataset, cost
        self.num_processes, self.microbatch_size = num_processes, microbatch_size

    def __iter__(self) -> Iterator[list[Any]]:
        waiting: list[dict[str, Any]] = []
        for sample in self.dataset:
            waiting.append(sample)
            if len(waiting) == self.microbatch_size:
                budget = int(_lengths(waiting).sum())
                yield _tree_rows(_shared_rows(waiting, self.num_processes, budget, self.cost))
                waiting = []


def _shared_rows(
    samples: list[dict[str, Any]], ranks: int, budget: int, cost: Cost | None
) -> list[list[dict[str, Any]]] | None:
    """The samples of one row per rank, in which prefixes count once; None if they do not fit."""
    recipe = Recipe(
        layout=Packed(max_tokens=budget),
        topology=Topology(dp=ranks),
        steps=Steps(micro_batches=1),
        cost=Cost.named("llama-3-8b") if cost is None else cost,
        limits=Limits(columns={"trained": budget}),  # TRL limits the loss terms of a row as well
    )
    ids = [sample["input_ids"] for sample in samples]
    columns = {"trained": _trained(samples)}
    try:
        plan = plan_step(_lengths(samples), recipe, columns=columns, prefixes=find_prefixes(ids))
    except PlanError:
        return None
    # A node belongs to one of the samples that share it, so samples may appear several times.
    return [[samples[at] for at in np.unique(packs[0])] for packs in filled_packs(plan)]


def _tree_rows(rows: list[list[dict[str, Any]]] | None) -> list[Any]:
    from trl.experimental.async_grpo.packing import TreeRow

    assert rows is not None
    trees = [TreeRow() for _ in rows]
    for tree, row in zip(trees, rows, strict=True):
        for sample in row:
            tree.add(sample)
    return trees


def _trained(samples: list[dict[str, Any]]) -> IntArray:
    return np.array([int(sample["completion_mask"].sum()) for sample in samples], np.int64)


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
