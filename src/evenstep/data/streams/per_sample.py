"""Checks of arguments with one entry per sample, such as groups and loss tokens."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenstep.errors import InputError


def per_sample(name: str, values: ArrayLike, samples: int) -> NDArray[Any]:
    """`values` as an array with one entry per sample. Arrays are not copied, nor read if mapped.

    >>> per_sample("images", [0, 2], 2)
    array([0, 2])
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{name} cannot be converted to an array ({error}). Pass one entry per sample, in a "
            f"flat list or array."
        ) from None
    if array.ndim != 1:
        raise InputError(
            f"{name} must have one dimension, got shape {array.shape}. Pass one entry per sample, "
            f"in a flat list or array."
        )
    if len(array) != samples:
        raise InputError(
            f"{name} must have one entry per sample, got {len(array)} entries for {samples} "
            f"samples."
        )
    return array


def whole_per_sample(name: str, values: ArrayLike, samples: int) -> NDArray[np.integer]:
    """`values` as an array of one integer per sample. Floats without fraction are converted.

    >>> whole_per_sample("groups", [7.0, 5.0], 2)
    array([7, 5])
    """
    array = per_sample(name, values, samples)
    if array.dtype.kind in "iu":
        return array
    whole = np.zeros(len(array), bool)
    if array.dtype.kind == "f":
        whole = (np.abs(array) < 2.0**63) & (array == np.floor(array))  # neither holds for nan
    elif array.dtype.kind == "O":  # a list of mixed types
        whole = np.array([type(v) is int and -(2**63) <= v < 2**63 for v in array], bool)
    if whole.all():
        return array.astype(np.int64)
    at = int(np.argmin(whole))
    remedy = ""
    if name == "groups" and array.dtype.kind != "O":  # numpy cannot sort mixed types
        remedy = " Number the groups with np.unique(groups, return_inverse=True)[1]."
    raise InputError(
        f"{name} must be 64-bit integers, got {reprlib.repr(array[at : at + 1].tolist()[0])} for "
        f"sample {at}.{remedy}"
    )
