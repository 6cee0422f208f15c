"""Read lengths, groups and limit columns from files of several formats."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep.cli import columns as tables
from evenstep.cli.input import Input
from evenstep.core.plan import Plan
from evenstep.core.plan_file import MAGIC, reading
from evenstep.core.prefixes import Prefixes
from evenstep.core.ragged import IntArray
from evenstep.data.files import list_lengths
from evenstep.errors import FileError, InputError

_TABLES = {
    ".csv": tables.read_csv,
    ".tsv": tables.read_csv,
    ".jsonl": tables.read_jsonl,
    ".ndjson": tables.read_jsonl,
    ".parquet": tables.read_parquet,
}


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Per-sample columns: lengths, optional groups, limit columns and shared prefixes."""

    lengths: NDArray[Any]
    groups: IntArray | None = None
    columns: Mapping[str, IntArray] = field(default_factory=dict)
    ids: IntArray | None = None
    """Ids of the samples in a source, if a saved plan has another order."""
    prefixes: Prefixes | None = None

    def take(self, which: slice | IntArray) -> Samples:
        """Only these samples."""
        numbers = np.arange(len(self.lengths))[which]
        return Samples(
            self.lengths[which],
            None if self.groups is None else self.groups[which],
            {name: column[which] for name, column in self.columns.items()},
            None if self.ids is None else self.ids[which],
            None if self.prefixes is None else self.prefixes.take(numbers),
        )


def load_plan(source: Input) -> Plan:
    """The plan in this input; an error if it is not a plan."""
    with source.open() as file:
        return Plan.from_bytes(file.read(), source.path)


def saved_plan(source: Input) -> Plan | None:
    """The plan in this input, or None if it is not a plan."""
    with reading(source.path), source.open() as file:
        start = file.read(len(MAGIC))
        return Plan.from_bytes(start + file.read(), source.path) if start == MAGIC else None


def samples_of(plan: Plan) -> Samples:
    """The samples of a plan."""
    return Samples(plan.lengths, plan.groups, plan.columns, plan.sample_ids, plan.prefixes)


def read_samples(
    source: Input,
    column: str | None,
    groups: str | None,
    extra: Sequence[str],
    prompts: str | None = None,
) -> Samples:
    """Read an input by its suffix; unknown suffixes are text. `extra` names limit columns."""
    if prompts and not groups:
        raise InputError(
            f"--prompts {prompts} gives the lengths of prompts, but not which samples share one. "
            f"Name the column of the prompts' ids: --groups."
        )
    path = source.path
    suffix = source.suffix
    try:
        with reading(path, "Check the file and its permissions."):
            if suffix in _TABLES:
                samples = _from_table(source, column or "length", groups, extra, prompts)
            else:
                _refuse_columns(path, column, groups, extra)
                samples = Samples(_read_npy(source) if suffix == ".npy" else _read_text(source))
    except UnicodeDecodeError:
        raise InputError(
            f"{path} is neither text nor a saved plan. "
            f"Use .npy, .csv, .jsonl, .parquet or text with one length per line."
        ) from None
    if len(samples.lengths) == 0:
        raise InputError(f"{path} holds no lengths, expected at least one.")
    return samples


def _from_table(
    source: Input,
    column: str,
    groups: str | None,
    extra: Sequence[str],
    prompts: str | None,
) -> Samples:
    names = list(dict.fromkeys([column, *filter(None, (groups, prompts)), *extra]))
    path = source.path
    table = _TABLES[source.suffix](source, names)
    lengths, prefixes = _lengths(path, column, table[column]), None
    ids = tables.group_ids(path, groups, table[groups]) if groups else None
    if prompts and ids is not None:
        prefixes = Prefixes.of_groups(ids, tables.integers(path, prompts, table[prompts]))
        prefixes.check(lengths)
    limited = {name: tables.integers(path, name, table[name]) for name in extra}
    return Samples(lengths, ids, limited, prefixes=prefixes)


def _lengths(path: Path, column: str, values: Any) -> IntArray:
    """Lengths from a column of integers or of lists of token ids."""
    if not isinstance(values, list):  # of Arrow
        return list_lengths(values, column, str(path))
    first = next((at for at, value in enumerate(values) if isinstance(value, list)), None)
    if first is None:
        return tables.integers(path, column, values)
    for at, tokens in enumerate(values):
        if not isinstance(tokens, list):
            raise InputError(
                f"{path}: sample {at} has {tables.shown(tokens)} as {column}, but sample {first} "
                f"has a list. Give every sample a list of token ids, or every sample a length."
            )
        if set(map(type, tokens)) - {int}:
            odd = next(token for token in tokens if type(token) is not int)
            raise InputError(
                f"{path}: sample {at} has {tables.shown(odd)} in its {column}, expected integer "
                f"token ids. Correct it or choose another column."
            )
    return np.array([len(tokens) for tokens in values], np.int64)


def _refuse_columns(
    path: Path, column: str | None, groups: str | None, extra: Sequence[str]
) -> None:
    asked = {"--column": column, "--groups": groups, "limits.columns": ", ".join(extra)}
    for option, name in asked.items():
        if name:
            raise InputError(
                f"{option} names the column {name!r}, but {path} has no columns. "
                f"Use .csv, .jsonl or .parquet."
            )


def _read_npy(source: Input) -> NDArray[Any]:
    path = source.path
    try:
        with source.open() as file, warnings.catch_warnings(action="ignore"):
            array = np.lib.format.read_array(file, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a damaged header can raise almost anything
        raise FileError(
            f"{path} is not a readable .npy file ({tables.first_line(error)}). "
            f"Save integers with numpy.save."
        ) from None
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise InputError(
            f"{path} holds {array.dtype} of shape {array.shape}, expected one integer per sample."
        )
    # float16 cannot represent the bounds that lengths are compared with.
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _read_text(source: Input) -> IntArray:
    path = source.path
    with source.text() as file:
        text = file.read()
    if "\0" in text:
        raise InputError(
            f"{path} is binary, not text. "
            f"Use .npy, .csv, .jsonl, .parquet or text with one length per line."
        )
    try:
        return np.array([int(word) for word in text.split()], np.int64)
    except (ValueError, OverflowError):
        number, word = next(
            (number, word)
            for number, line in enumerate(text.splitlines(), 1)
            for word in line.split()
            if not tables.fits(word)
        )
    digits = word.removeprefix("-").removeprefix("+")
    fault = "has more than 64 bits" if digits.isdecimal() else "is not an integer"
    raise InputError(
        f"{path}, line {number}: {tables.shown(word)} {fault}. "
        f"Write lengths as integers, separated by spaces or newlines."
    )
