"""`kernel`: the decorator of compiled functions, and what several of them share.

A kernel is a function over numpy arrays and numbers that numba compiles once and caches on disk.
It also works as plain Python: set `NUMBA_DISABLE_JIT=1` to debug it or to measure coverage.
"""

import hashlib
import logging
import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import event
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.serialize import dumps
from numba.cpython.unsafe import numbers
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from evenstep.core.ragged import FloatArray, IntArray

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = Path(__file__).parents[1]
_LOGGER = logging.getLogger(__name__)


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` without the GIL and cache it on disk.

    If no folder for the cache is writable, every process compiles again.
    """
    compiled = njit(nogil=True, no_cfunc_wrapper=True)(function)
    if not config.DISABLE_JIT:
        try:
            compiled._cache = _KernelCache(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            compiled._cache = _NoCache()
    return cast(Callable[P, R], compiled)


def compile_seconds() -> float:
    """The seconds that this process has spent compiling kernels or loading them from the cache."""
    return float(_CLOCK.duration) if _CLOCK.done else 0.0


_CLOCK = event.TimingListener()
event.register("numba:compile", _CLOCK)


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of one function, valid only while no file with kernels changes.

    Compiled code contains the kernels it calls, also those of other files. numba checks only the
    function's own file, so after an upgrade it would run old code.

    An unreadable cache is compiled again and overwritten. An unwritable cache is not used.
    """

    _cache_file: Any

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = (self._cache_file._source_stamp, _digest_of_kernels(_PACKAGE))
        self._cache_file = _CheckedFile(self.cache_path, self._impl.filename_base, stamp)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        _CLOCK.on_start(None)
        try:
            compiled = super().load_overload(signature, target_context)
        except Exception:  # unpickling damaged bytes can raise any error
            compiled = None
        finally:
            _CLOCK.on_end(None)
        if compiled is None:
            _log("compiling planning kernels (once per machine; about 10 s for the first plan)")
        return compiled

    def save_overload(self, signature: Any, data: Any) -> None:
        with suppress(OSError):  # for example a full disk or a read-only folder
            super().save_overload(signature, data)


class _NoCache(NullCache):  # type: ignore[misc]
    """No cache, because there is no writable folder."""

    def load_overload(self, signature: Any, target_context: Any) -> None:
        _log(
            "compiling planning kernels (again in every process, because no folder for their cache "
            "is writable; set NUMBA_CACHE_DIR to one)"
        )


@cache
def _log(message: str) -> None:
    """Log a message, once per process."""
    _LOGGER.warning(message)


class _CheckedFile(IndexDataCacheFile):  # type: ignore[misc]
    """The index and data files of one function. Each entry has a digest of its key and content.

    Damaged compiled code would crash the process. And numba writes the index before the data, so a
    read between the two would load code of other sources.
    """

    def load(self, key: Any) -> Any:
        entry = super().load(key)
        if entry is None:
            return None
        digest, content = entry
        return pickle.loads(content) if digest == self._digest(key, content) else None

    def save(self, key: Any, data: Any) -> None:
        content = dumps(data)
        entry = (self._digest(key, content), content)
        for _ in range(2):  # an empty folder may stand where the index or the data belongs
            try:
                super().save(key, entry)
                return
            except Exception as error:
                for path in (getattr(error, "filename", None), getattr(error, "filename2", None)):
                    if path is not None and Path(path).is_dir():
                        Path(path).rmdir()
            self.flush()  # start a new index
        super().save(key, entry)

    def _digest(self, key: Any, content: bytes) -> bytes:
        owner = repr((self._index_name, self._source_stamp, key)).encode()
        return hashlib.blake2b(owner + content, digest_size=16).digest()


@cache
def _digest_of_kernels(package: Path) -> str:
    """A digest of all files of a package that contain kernels, including subfolders."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        if b"kernel" in content:
            digest.update(content)
    return digest.hexdigest()


# Each of the next two is one machine instruction in a kernel.


def trailing_zeros(word: int) -> int:
    """The index of the lowest set bit: 0b1000 -> 3."""
    return (int(word) & -int(word)).bit_length() - 1


def prefetch(array: NDArray[Any], index: int) -> None:
    """Prefetch the cache line of `array[index]` for writing. Does not wait."""


@overload(trailing_zeros, strict=False)  # type: ignore[untyped-decorator]
def _trailing_zeros(word: Any) -> Any:
    return lambda word: np.int64(numbers.trailing_zeros(word))  # signed, also of an unsigned word


@overload(prefetch, strict=False)  # type: ignore[untyped-decorator]
def _prefetch(array: Any, index: Any) -> Any:
    return lambda array, index: _prefetch_line(array, index)


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch_line(_typing: Any, array: Any, index: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        offset = context.cast(builder, arguments[1], signature.args[1], types.intp)
        address = builder.gep(data, [offset])
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
        call = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        builder.call(call, [address, word(1), word(3), word(1)])  # write, keep, data
        return context.get_dummy_value()

    return types.void(array, index), emit


# A binary heap of numbers, ordered by a key, least first: keys [5, 1, 3] -> heap [1, 0, 2].


@kernel
def comes_before(a: int, b: int, key: FloatArray, by_number: bool) -> bool:
    """Whether a comes before b. At equal keys the lower number does, if `by_number`."""
    return key[a] < key[b] or (by_number and key[a] == key[b] and a < b)


@kernel
def sink(heap: IntArray, count: int, key: FloatArray, node: int, by_number: bool) -> None:
    """Move the entry at `node` down until neither child comes before it."""
    while True:
        child = 2 * node + 1
        if child >= count:
            return
        if child + 1 < count and comes_before(heap[child + 1], heap[child], key, by_number):
            child += 1
        if not comes_before(heap[child], heap[node], key, by_number):
            return
        heap[node], heap[child] = heap[child], heap[node]
        node = child


@kernel
def rise(heap: IntArray, count: int, key: FloatArray, by_number: bool) -> None:
    """Move the last of `count` entries up until it does not come before its parent.

    keys [5, 4, 3], heap [1, 0, 2]: 2 comes before 1, its parent, so the heap becomes [2, 0, 1]
    """
    node = count - 1
    while node > 0 and comes_before(heap[node], heap[(node - 1) // 2], key, by_number):
        parent = (node - 1) // 2
        heap[node], heap[parent] = heap[parent], heap[node]
        node = parent


@kernel
def nearest_free(link: IntArray, index: int) -> int:
    """The nearest free entry from `index` on, in the direction of the links.

    `link[i]` is i for a free entry and points towards a neighbour once the entry is taken. Paths
    are shortened on the way. The entry at the end of the array is never taken and means "none":
    links [1, 2, 2] have entries 0 and 1 taken, and lead from anywhere to 2.
    """
    while link[index] != index:
        link[index] = link[link[index]]
        index = link[index]
    return index
