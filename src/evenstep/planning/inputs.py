"""Check what a caller gives for each sample: lengths, group ids and limited columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe
from evenstep.core.text import MOST
from evenstep.errors import InputError


def checked_lengths(lengths: ArrayLike, names: IntArray | None) -> IntArray:
    """The lengths as int64, each from 1 on. `names` is what errors call the samples."""
    first = lengths[0] if isinstance(lengths, list | tuple) and len(lengths) else 0
    # A 0-d array or tensor has `__len__` but is a number.
    if isinstance(first, Sized) and getattr(first, "ndim", 1) > 0:
        raise InputError(
            f"lengths must be the number of tokens of each sample, got a {type(first).__name__} "
            f"for the first one. Pass [len(tokens) for tokens in ...]."
        )
    array = flat_array("lengths", lengths)
    if names is not None and array.ndim == 1 and len(names) != len(array):
        raise InputError(
            f"names has {len(names)} entries for {len(array)} samples. Give one per sample."
        )
    return _integers("length", array, 1, MOST, names=names)


def checked_groups(groups: ArrayLike, count: int) -> IntArray:
    """The group id of each of `count` samples, as int64. Texts, such as the uids of verl, are
    numbered in sorted order.

    >>> checked_groups(["b", "a", "b"], 3).tolist()
    [1, 0, 1]
    """
    return _integers("group", numbered(groups), -(2**63), 2**63 - 1, count)


def numbered(groups: ArrayLike) -> ArrayLike:
    """Group ids that are texts as numbers; others as they are."""
    if isinstance(groups, np.ma.MaskedArray):
        return groups
    values: Any = groups if isinstance(groups, Sequence) else flat_array("group", groups)
    if isinstance(values, np.ndarray) and (values.ndim != 1 or values.dtype.kind not in "USO"):
        return groups
    if len(values) and all(isinstance(group, str) for group in values):
        numbers: IntArray = np.unique(np.asarray(values, np.str_), return_inverse=True)[1]
        return numbers
    return groups


def check_names(columns: object, recipe: Recipe) -> None:
    """Raise if columns are no mapping, or if the recipe does not use one of them."""
    if columns is None:
        return
    if not isinstance(columns, Mapping):
        raise InputError(
            f"columns must map names to one number per sample, got {type(columns).__name__}. Pass "
            f"columns={{'patches': [...]}}."
        )
    idle = sorted(set(columns) - set(recipe.columns))
    if idle:
        raise InputError(
            f"columns has {idle[0]!r}, which the recipe does not use (it uses "
            f"{', '.join(sorted(recipe.columns)) or 'none'}). Set limits.columns or second_work, "
            f"or leave the column out."
        )


def checked_column(name: str, columns: Mapping[str, ArrayLike] | None, count: int) -> IntArray:
    """The column `name` of `count` samples, as int64, each from 0 on."""
    if columns is None or name not in columns:
        have = ", ".join(sorted(columns or {})) or "none"
        raise InputError(
            f"the recipe names the column {name!r}, but it was not given (columns given: {have}). "
            f"Pass columns={{{name!r}: ...}}."
        )
    return _integers(name, columns[name], 0, MOST, count)


def per_sample(what: str, values: ArrayLike, count: int, whole: bool = True) -> NDArray[Any]:
    """One entry for each of `count` samples; unless `whole` is False, integers. Arrays of the right
    type are not copied, nor read if mapped; floats without fraction are converted.

    >>> per_sample("loss_tokens", [4.0, 2.0], 2).tolist()
    [4, 2]
    """
    array = flat_array(what, values)
    if array.shape == (count,) and (array.dtype.kind in "iu" or not whole):
        return array
    return _integers(what, array, -(2**63), 2**63 - 1, count)


def _integers(
    what: str,
    values: ArrayLike,
    least: int,
    most: int,
    count: int | None = None,
    names: IntArray | None = None,
) -> IntArray:
    """A flat int64 copy of `count` values; an error names the first sample that is wrong."""
    array = flat_array(what, values)
    if array.size == 0 and array.ndim == 1:
        array = np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iufO":
        texts = " or texts" if what in ("group", "groups") else ""
        raise InputError(
            f"{what} must be a flat sequence of integers{texts}, one per sample; got shape "
            f"{array.shape} and dtype {array.dtype}."
        )
    if array.dtype.kind == "O":  # a list of mixed types
        bad = [i for i, v in enumerate(array) if type(v) is not int or not least <= v <= most]
    else:
        whole = np.ones(len(array), bool)
        if array.dtype.kind == "f":
            whole = np.isfinite(array) & (array == np.floor(array))
            _check_exact(what, array, whole, names)
        bad = np.flatnonzero(~whole | (array < least) | (array > most)).tolist()
    if bad:
        at = bad[0]
        raise InputError(
            f"sample {at if names is None else names[at]} has {what} {array[at]}; expected an "
            f"integer in [{least}, {most}]. Correct it or leave the sample out."
        )
    if count is not None and len(array) != count:
        raise InputError(
            f"{what} has {len(array)} entries for {count} samples. Give one per sample."
        )
    return array.astype(np.int64)


def flat_array(what: str, values: Any) -> NDArray[Any]:
    """`values` as an array; raises if numpy cannot represent them, or if some are masked."""
    if isinstance(values, np.ma.MaskedArray):
        raise InputError(
            f"{what} is a masked array, and masked entries have no value. Pass "
            f"{what}.compressed() or {what}.filled(...)."
        )
    try:
        return np.asarray(values)
    except (ValueError, OverflowError, TypeError, RuntimeError) as error:
        # Ragged lists; tensors in bfloat16, with gradients, or on a device.
        kind = getattr(values, "dtype", type(values).__name__)
        raise InputError(
            f"{what} must be a flat sequence of integers, one per sample; got {kind}, which cannot "
            f"be converted ({str(error).splitlines()[0].rstrip('.')})."
        ) from None


def _check_exact(
    what: str, array: NDArray[Any], whole: NDArray[np.bool_], names: IntArray | None = None
) -> None:
    """Raise if floats are so large that neighbouring integers are equal, as in float32 from 2**24
    on: they may have been rounded."""
    most = 2 / np.finfo(array.dtype).eps
    large = np.flatnonzero(whole & (np.abs(array) >= most))
    if len(large):
        at = int(large[0])
        raise InputError(
            f"sample {at if names is None else names[at]} has {what} {array[at]:.17g} in "
            f"{array.dtype}, which cannot represent integers from {most:.0f} on exactly. Pass "
            f"integers."
        )
