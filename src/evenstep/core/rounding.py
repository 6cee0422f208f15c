"""Round integers, or arrays of them, up to multiples."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Whole = TypeVar("Whole", int, NDArray[np.int64])


def rounded_up(number: Whole, multiple: Whole | int) -> Whole:
    """`number` rounded up to a multiple.

    >>> rounded_up(5, 4), rounded_up(np.array([4, 5]), 4).tolist()
    (8, [4, 8])
    """
    return -(-number // multiple) * multiple


def divided_up(number: Whole, by: int) -> Whole:
    """`number` divided by `by`, rounded up.

    >>> divided_up(5, 4), divided_up(np.array([4, 5]), 4).tolist()
    (2, [1, 2])
    """
    return -(-number // by)
