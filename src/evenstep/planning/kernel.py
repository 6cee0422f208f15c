"""The one decorator of our compiled functions.

A kernel is a function over numpy arrays and numbers that numba compiles once and caches on disk.
It is also correct as plain Python: set `NUMBA_DISABLE_JIT=1` to step through it or to see coverage.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
from numba import config, njit
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function`, cache it on disk, and let other threads run while it works.

    A read-only install without a home has no place for a cache; then every process compiles anew.
    """
    try:
        compiled = njit(cache=True, nogil=True)(function)
        _date_cache(compiled)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        compiled = njit(nogil=True)(function)
    return cast(Callable[P, R], compiled)


def _date_cache(compiled: Any) -> None:
    """Let what is cached be valid only while no file with kernels changes.

    Compiled code has the kernels that it calls inside, from whichever file, but numba looks at a
    kernel's own file alone: after an upgrade it would run the old ones.
    """
    file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if file is not None:  # none as plain Python
        file._source_stamp = (file._source_stamp, _digest_of_kernels())


@cache
def _digest_of_kernels() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _trailing_zeros(word: int) -> int:
    """The number of the lowest set bit: 0b1000 -> 3."""
    return (int(word) & -int(word)).bit_length() - 1


def _prefetch(array: NDArray[Any], index: int) -> None:
    """Ask for the cache line of `array[index]`, which is about to be written; wait for nothing."""


trailing_zeros: Callable[[int], int] = _trailing_zeros
prefetch: Callable[[NDArray[Any], int], None] = _prefetch
if not config.DISABLE_JIT:
    from llvmlite import ir
    from numba import types
    from numba.cpython.unsafe import numbers
    from numba.extending import intrinsic

    # One machine instruction each.
    def _trailing_zeros_of(word: int) -> np.int64:
        return np.int64(numbers.trailing_zeros(word))  # signed, also of an unsigned word

    def _prefetch_line(_typing: Any, array: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            place = context.cast(builder, arguments[1], signature.args[1], types.intp)
            address = builder.gep(data, [place])
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
            call = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
            builder.call(call, [address, word(1), word(3), word(1)])  # write, keep, data
            return context.get_dummy_value()

        return types.void(array, index), emit

    trailing_zeros = cast(Callable[[int], int], kernel(_trailing_zeros_of))
    prefetch = cast(Callable[[NDArray[Any], int], None], intrinsic(_prefetch_line))
