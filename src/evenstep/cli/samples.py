"""Lengths, groups and columns from a file of any kind that people keep them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep.cli import columns as tables
from evenstep.core.archive import MAGIC
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray
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
    """What is known of each sample before planning."""

    lengths: NDArray[Any]
    groups: IntArray | None = None
    columns: Mapping[str, IntArray] = field(default_factory=dict)


def saved_plan(path: Path) -> Plan | None:
    """The plan in this file, or None where the file holds something else."""
    try:
        with path.open("rb") as file:
            ours = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({error.strerror or error}), so there is nothing to plan. "
            f"Check the path."
        ) from None
    return Plan.load(path) if ours else None


def samples_of(plan: Plan) -> Samples:
    """The samples that a plan was made from."""
    return Samples(plan.lengths, plan.groups, plan.columns)


def read_samples(
    path: Path, column: str | None, groups: str | None, extra: Sequence[str]
) -> Samples:
    """Read a file by its suffix; anything unknown is text. `extra` names limit columns."""
    suffix = path.suffix.lower()
    try:
        if suffix in _TABLES:
            samples = _from_table(path, column or "length", groups, extra)
        else:
            _refuse_columns(path, column, groups, extra)
            samples = Samples(_read_npy(path) if suffix == ".npy" else _read_text(path))
    except UnicodeDecodeError:
        raise InputError(
            f"{path} is neither text nor a saved plan, so it holds no lengths. "
            f"Use .npy, .csv, .jsonl, .parquet or text with one length per line."
        ) from None
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({error.strerror or error}), so there is nothing to plan. "
            f"Check the file and its permissions."
        ) from None
    if len(samples.lengths) == 0:
        raise InputError(f"{path} holds no lengths, so there is nothing to plan. Add some.")
    return samples


def _from_table(path: Path, column: str, groups: str | None, extra: Sequence[str]) -> Samples:
    names = list(dict.fromkeys([column, *([groups] if groups else []), *extra]))
    table = _TABLES[path.suffix.lower()](path, names)
    return Samples(
        tables.integers(path, column, table[column]),
        tables.group_ids(path, groups, table[groups]) if groups else None,
        {name: tables.integers(path, name, table[name]) for name in extra},
    )


def _refuse_columns(
    path: Path, column: str | None, groups: str | None, extra: Sequence[str]
) -> None:
    asked = {"--column": column, "--groups": groups, "limits.columns": ", ".join(extra)}
    for option, name in asked.items():
        if name:
            raise InputError(
                f"{option} asks for {name!r}, but {path} has no columns, so there is nothing to "
                f"take it from. Use .csv, .jsonl or .parquet."
            )


def _read_npy(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{path} is not a readable .npy file ({str(error).splitlines()[0]}), so it holds no "
            f"lengths. Save it with numpy.save, as integers."
        ) from None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iuf":
        shape = getattr(array, "shape", "?")
        kind = getattr(array, "dtype", type(array).__name__)
        raise InputError(
            f"{path} holds {kind} of shape {shape}, which are not lengths. "
            f"Save one integer per sample."
        )
    return array


def _read_text(path: Path) -> IntArray:
    text = path.read_text("utf-8-sig")
    if "\0" in text:
        raise InputError(
            f"{path} is binary, not text, so it holds no lengths. "
            f"Use .npy, .csv, .jsonl, .parquet or text with one length per line."
        )
    try:
        values = [int(word) for word in text.split()]
    except ValueError:
        number, word = next(
            (number, word)
            for number, line in enumerate(text.splitlines(), 1)
            for word in line.split()
            if not _is_integer(word)
        )
        raise InputError(
            f"{path}, line {number}: {tables.shown(word)} is not a whole number, so it is no "
            f"length. Write lengths as integers, separated by spaces or lines."
        ) from None
    return tables.integers(path, "text", values)


def _is_integer(word: str) -> bool:
    try:
        int(word)
    except ValueError:
        return False
    return True
