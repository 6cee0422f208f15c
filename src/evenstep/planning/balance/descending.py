"""Sort many costs, heaviest first."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernels import kernel

WordArray: TypeAlias = NDArray[np.uint64]

_MANY = 2**14  # items from which on sorting by digits is faster than by comparison
_BITS = 11  # of a digit


def heaviest_first(costs: FloatArray) -> IntArray:
    """The items by cost, heaviest first; of equal costs, the first item first.

    >>> heaviest_first(np.array([2.0, 7.0, 2.0])).tolist()
    [1, 0, 2]
    """
    if len(costs) < _MANY:
        return np.argsort(-costs, kind="stable")
    # The bits of floats of 0 or more are in the same order as the floats; 0.0 + -0.0 is 0.0.
    return by_digits_kernel(~(costs + 0.0).view(np.uint64))


@kernel
def by_digits_kernel(keys: WordArray) -> IntArray:
    """The indices of the keys in ascending order; equal keys keep their order."""
    n, digits = keys.shape[0], (64 + _BITS - 1) // _BITS
    counts = np.zeros((digits, 2**_BITS), np.int64)
    mask = np.uint64(2**_BITS - 1)
    for i in range(n):
        for d in range(digits):
            counts[d, np.int64((keys[i] >> np.uint64(d * _BITS)) & mask)] += 1
    order = np.arange(n)
    following = np.empty(n, np.int64)
    for d in range(digits):
        if counts[d].max() == n:  # one digit for all
            continue
        shift = np.uint64(d * _BITS)
        first = np.cumsum(counts[d]) - counts[d]
        for item in order:
            place = np.int64((keys[item] >> shift) & mask)
            following[first[place]] = item
            first[place] += 1
        order, following = following, order
    return order
