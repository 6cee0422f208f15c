"""The one decorator of our compiled functions.

A kernel is a function over numpy arrays and numbers that numba compiles once and caches on disk.
It is also correct as plain Python: set `NUMBA_DISABLE_JIT=1` to step through it or to see coverage.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from numba import config, njit

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function`, cache it on disk, and let other threads run while it works."""
    return cast(Callable[P, R], njit(cache=True, nogil=True)(function))


def _trailing_zeros(word: int) -> int:
    """The number of the lowest set bit: 0b1000 -> 3."""
    return (int(word) & -int(word)).bit_length() - 1


trailing_zeros: Callable[[int], int] = _trailing_zeros
if not config.DISABLE_JIT:
    from numba.cpython.unsafe import numbers

    # One machine instruction.
    trailing_zeros = cast(Callable[[int], int], numbers.trailing_zeros)
