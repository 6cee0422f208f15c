"""Check what a caller gives for each sample: lengths, group ids and limited columns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.ragged import IntArray
from evenstep.core.validate import MOST
from evenstep.errors import InputError


def checked_lengths(lengths: ArrayLike, names: IntArray | None) -> IntArray:
    """The lengths as int64, each from 1 on. `names` is what errors call the samples."""
    return _integers("length", lengths, 1, MOST, names)


def checked_groups(groups: ArrayLike, count: int) -> IntArray:
    """The group id of each of `count` samples, as int64."""
    return _column("group", groups, -(2**63), 2**63 - 1, count)


def checked_column(name: str, columns: Mapping[str, ArrayLike] | None, count: int) -> IntArray:
    """The column `name` of `count` samples, as int64, each from 0 on."""
    if columns is None or name not in columns:
        have = ", ".join(sorted(columns or {})) or "none"
        raise InputError(
            f"the recipe names the column {name!r}, but it was not given (columns given: {have}). "
            f"Pass columns={{{name!r}: ...}}."
        )
    return _column(name, columns[name], 0, MOST, count)


def _column(name: str, values: ArrayLike, least: int, most: int, count: int) -> IntArray:
    column = _integers(name, values, least, most, None)
    if len(column) != count:
        raise InputError(
            f"{name} has {len(column)} entries for {count} samples. Give one per sample."
        )
    return column


def _integers(
    what: str, values: ArrayLike, least: int, most: int, names: IntArray | None
) -> IntArray:
    """A flat int64 copy of `values`; an error names the first sample that is wrong."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.empty((0, 0))
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise InputError(
            f"{what} must be a flat sequence of integers, one per sample; got shape {array.shape} "
            f"and dtype {array.dtype}."
        )
    whole = np.ones(len(array), bool)
    if array.dtype.kind == "f":
        whole = np.isfinite(array) & (array == np.floor(array))
    bad = np.flatnonzero(~whole | (array < least) | (array > most))
    if len(bad):
        at = int(bad[0])
        raise InputError(
            f"sample {at if names is None else names[at]} has {what} {array[at]}; expected an "
            f"integer in [{least}, {most}]. Correct it or leave the sample out."
        )
    return array.astype(np.int64)
