"""Columns of token lists: their lengths, without making the tokens Python objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.data.sources.parquet import reading
from evenstep.data.sources.text import other_field
from evenstep.errors import InputError

_ROWS = 10_000  # of a dataset at a time


def is_token_list(kind: Any) -> bool:
    """Whether an Arrow type is a list of integers."""
    from pyarrow import types

    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(listed and types.is_integer(kind.value_type))


def list_lengths(column: Any, name: str, where: str, first: int = 0) -> IntArray:
    """The lengths of the lists of an Arrow column; `first` is the number of its first row."""
    from pyarrow import compute

    if not is_token_list(column.type):
        raise _not_lists(column.type, name, where)
    counts = compute.list_value_length(column)
    if counts.null_count:
        at = first + int(compute.index(compute.is_null(counts), True).as_py())
        raise InputError(
            f"{where}: row {at} has None as {name!r}, expected a list of token ids. Remove the "
            f"row, or correct it."
        )
    return np.asarray(counts.to_numpy(), np.int64)


def parquet_list_lengths(
    paths: Sequence[Path], name: str, progress: Callable[[int, int], None]
) -> IntArray | None:
    """The lengths of the token lists of a column of Parquet files, one row group after the other.

    None if the column of the first file holds anything else.
    """
    if not is_token_list(_type(paths[0], name)):
        return None
    lengths = [np.zeros(0, np.int64)]
    done, total = 0, sum(_rows(path) for path in paths)
    for path in paths:
        before = done
        kind = _type(path, name)
        if not is_token_list(kind):
            raise _not_lists(kind, name, str(path))
        with reading(path) as parquet, parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                column = file.read_row_group(group, columns=[name]).column(name)
                lengths.append(list_lengths(column, name, str(path), done - before))
                done += len(column)
                progress(done, total)
    return np.concatenate(lengths)


def dataset_list_lengths(
    datasets: Mapping[str, Any], name: str, progress: Callable[[int, int], None]
) -> IntArray | None:
    """The same for a column of Hugging Face datasets, which errors name by their keys."""
    kinds = {where: _feature(dataset, name, where) for where, dataset in datasets.items()}
    if not is_token_list(next(iter(kinds.values()))):
        return None
    lengths, done = [np.zeros(0, np.int64)], 0
    total = sum(map(len, datasets.values()))
    for where, dataset in datasets.items():
        column = dataset.select_columns([name]).with_format("arrow")
        for begin in range(0, len(dataset), _ROWS):
            rows = column[begin : begin + _ROWS][name]
            lengths.append(list_lengths(rows, name, where, begin))
            done += len(rows)
            progress(done, total)
    return np.concatenate(lengths)


def _feature(dataset: Any, name: str, where: str) -> Any:
    return _of_schema(dataset.features.arrow_schema, name, where)


def _not_lists(kind: Any, name: str, where: str) -> InputError:
    return InputError(
        f"{where}: the column {name!r} holds {kind}, expected lists of integers. Choose another "
        f"column."
    )


def _type(path: Path, name: str) -> Any:
    with reading(path) as parquet:
        return _of_schema(parquet.read_schema(path), name, str(path))


def _of_schema(schema: Any, name: str, where: str) -> Any:
    if name not in schema.names:
        raise InputError(
            f"{where} has no column {name!r}; it has {', '.join(schema.names[:20])}. "
            f"{other_field(schema.names)}."
        )
    return schema.field(name).type


def _rows(path: Path) -> int:
    with reading(path) as parquet:
        return int(parquet.read_metadata(path).num_rows)
