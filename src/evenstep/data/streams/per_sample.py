"""Checks of arguments with one entry per sample, such as groups and loss tokens."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenstep.errors import InputError
from evenstep.planning.inputs import check_exact, flat_array, numbered


def per_sample(name: str, values: ArrayLike, samples: int) -> NDArray[Any]:
    """`values` as an array with one entry per sample. Arrays are not copied, nor read if mapped.

    >>> per_sample("images", [0, 2], 2)
    array([0, 2])
    """
    array = flat_array(name, values)
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
    """`values` as an array of one integer per sample. Floats without fraction are converted, and
    texts as groups are numbered.

    >>> whole_per_sample("groups", [7.0, 5.0], 2), whole_per_sample("groups", ["b", "a"], 2)
    (array([7, 5]), array([1, 0]))
    """
    array = per_sample(name, numbered(values) if name == "groups" else values, samples)
    if array.dtype.kind in "iu":
        return array
    whole = np.zeros(len(array), bool)
    if array.dtype.kind == "f":
        whole = (np.abs(array) < 2.0**63) & (array == np.floor(array))  # neither holds for nan
        check_exact(name, array, whole)
    elif array.dtype.kind == "O":  # a list of mixed types
        whole = np.array([type(v) is int and -(2**63) <= v < 2**63 for v in array], bool)
    if whole.all():
        return array.astype(np.int64)
    at = int(np.argmin(whole))
    texts = " or texts" if name == "groups" else ""
    raise InputError(
        f"{name} must be 64-bit integers{texts}, got "
        f"{reprlib.repr(array[at : at + 1].tolist()[0])} for sample {at}."
    )
