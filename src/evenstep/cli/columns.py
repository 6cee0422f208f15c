"""Read columns of CSV, JSONL and Parquet files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evenstep.cli.input import Input
from evenstep.core.ragged import IntArray
from evenstep.core.text import short_repr
from evenstep.data.files import is_token_list
from evenstep.errors import FileError, InputError


def read_csv(source: Input, names: Sequence[str]) -> dict[str, list[Any]]:
    """Read columns of a CSV file with a header (.tsv: separated by tabs); values are text."""
    path = source.path
    delimiter = "\t" if source.suffix == ".tsv" else ","
    table: dict[str, list[Any]] = {name: [] for name in names}
    with source.text() as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            lines = ([name.strip() for name in line] for line in reader)
            header = next((line for line in lines if any(line)), [])
            if not header:
                return table
            _refuse_missing(path, names, header)
            _refuse_duplicates(path, names, header)
            indices = [header.index(name) for name in names]
            for row in reader:
                if not row:
                    continue
                if len(row) <= max(indices):
                    raise InputError(
                        f"{path}, line {reader.line_num}: {len(row)} values, but the header has "
                        f"{len(header)} columns. Complete the line."
                    )
                for name, index in zip(names, indices, strict=True):
                    table[name].append(row[index].strip())
        except csv.Error as error:
            raise InputError(
                f"{path}, line {reader.line_num}: not CSV ({error}). Correct the line."
            ) from None
    return table


def read_jsonl(source: Input, names: Sequence[str]) -> dict[str, list[Any]]:
    """Read columns of a file with one JSON object per line."""
    path = source.path
    table: dict[str, list[Any]] = {name: [] for name in names}
    with source.text() as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"{path}, line {number}: not JSON ({error}). Write one object per line."
                ) from None
            if not isinstance(item, dict):
                raise InputError(
                    f"{path}, line {number}: expected an object such as "
                    f'{{"length": 512}}, got {shown(item)}.'
                )
            if any(name not in item for name in names):
                _refuse_missing(path, names, list(item), f", line {number}")
            for name in names:
                table[name].append(item[name])
    return table


def read_parquet(source: Input, names: Sequence[str]) -> dict[str, Any]:
    """Read columns of a Parquet file; needs pyarrow. Lists of integers stay Arrow columns."""
    path = source.path
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise FileError(
            f"Reading {path} needs pyarrow, which is not installed. "
            f"Install it with: pip install 'evenstep[parquet]'."
        ) from None
    try:
        with source.open() as opened, parquet.ParquetFile(opened) as file:
            _refuse_missing(path, names, file.schema_arrow.names)
            _refuse_duplicates(path, names, file.schema_arrow.names)
            data = file.read(columns=list(names))
            found = {name: data.column(name) for name in names}
            return {
                name: column if is_token_list(column.type) else column.to_pylist()
                for name, column in found.items()
            }
    except InputError:
        raise
    except (ArrowException, ArithmeticError, LookupError, ValueError) as error:
        raise InputError(
            f"{path} is not readable Parquet ({first_line(error)}). Write it again."
        ) from None


def integers(path: Path, column: str, values: Iterable[Any]) -> IntArray:
    """A column as integers; an error names the first sample whose value is not an integer."""
    values = values if isinstance(values, list) else list(values)
    try:
        if all(type(value) is int for value in values):
            return np.array(values, np.int64)
        return np.array([_integer(value) for value in values], np.int64)
    except (ValueError, OverflowError):
        at = next(index for index, value in enumerate(values) if not fits(value))
    raise InputError(
        f"{path}: sample {at} has {shown(values[at])} as {column}, expected a 64-bit integer. "
        f"Correct it or choose another column."
    )


def group_ids(path: Path, column: str, values: list[Any]) -> IntArray:
    """A column as group ids: integers stay as they are, other labels are numbered."""
    for index, value in enumerate(values):
        if value is None or value == "" or not isinstance(value, int | str):
            raise InputError(
                f"{path}: sample {index} has {shown(value)} as {column}, expected a group id. "
                f"Give it a number or a name."
            )
    kinds = {type(value) for value in values}
    if len(kinds) == 1 and all(fits(value) and str(int(value)) == str(value) for value in values):
        return integers(path, column, values)
    return np.unique([repr(value) for value in values], return_inverse=True)[1].astype(np.int64)


def shown(value: object) -> str:
    """A value for a message, shortened if it is long."""
    return short_repr(value, 40)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the name of its type if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return int(value)


def fits(value: object) -> bool:
    """Whether a value is a 64-bit integer, or the text of one."""
    try:
        return -(2**63) <= _integer(value) < 2**63
    except ValueError:
        return False


def _refuse_duplicates(path: Path, names: Sequence[str], present: Sequence[str]) -> None:
    twice = [name for name in names if present.count(name) > 1]
    if twice:
        raise InputError(
            f"{path} has {present.count(twice[0])} columns named {twice[0]!r}. Rename one."
        )


def _refuse_missing(
    path: Path, names: Sequence[str], present: Sequence[str], where: str = ""
) -> None:
    missing = [name for name in names if name not in present]
    if missing:
        raise InputError(
            f"{path}{where} has no column {missing[0]!r}; it has "
            f"{', '.join(map(shown, present[:20])) or 'none'}. Choose one with --column or "
            f"--groups."
        )
