"""Per sample: lists and arrays of one entry for each sample, as arrays that can be looked up."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenstep.errors import InputError


def per_sample(name: str, values: ArrayLike, samples: int) -> NDArray[Any]:
    """One entry per sample. Arrays stay as they are, memory-mapped ones too.

    >>> per_sample("images", [0, 2], 2)
    array([0, 2])
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{name} cannot be read as one array ({error}), so samples could not be looked up in "
            f"it. Give one entry per sample, in a flat list or array."
        ) from None
    if array.ndim != 1:
        raise InputError(
            f"{name} have the shape {array.shape}, so samples could not be looked up in them. Give "
            f"one entry per sample, in a flat list or array."
        )
    if len(array) != samples:
        raise InputError(
            f"{len(array)} entries of {name} for {samples} samples cannot be matched. "
            f"Give one per sample."
        )
    return array


def whole_per_sample(name: str, values: ArrayLike, samples: int) -> NDArray[np.integer]:
    """One whole number per sample. Integers are not looked through; whole floats become them.

    >>> whole_per_sample("groups", [7.0, 5.0], 2)
    array([7, 5])
    """
    array = per_sample(name, values, samples)
    if array.dtype.kind in "iu":
        return array
    whole = np.zeros(len(array), bool)
    if array.dtype.kind == "f":
        whole = (np.abs(array) < 2.0**63) & (array == np.floor(array))  # neither holds for nan
    elif array.dtype.kind == "O":  # a list that holds something else beside its numbers
        whole = np.array([type(v) is int and -(2**63) <= v < 2**63 for v in array], bool)
    if whole.all():
        return array.astype(np.int64)
    at = int(np.argmin(whole))
    named = name == "groups" and array.dtype.kind != "O"  # numpy cannot sort what is mixed
    raise InputError(
        f"sample {at} has {reprlib.repr(array[at : at + 1].tolist()[0])} in {name}, which is not a "
        f"whole number of 64 bits, so no step could be planned by it. Give every sample "
        f"one{': np.unique(groups, return_inverse=True)[1] numbers them' if named else ''}."
    )
