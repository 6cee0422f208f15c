"""Fair timing: calls take turns in one process, best of several, garbage collector off."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc


@dataclass(frozen=True, slots=True)
class Timed:
    """The best and the median time of several runs, and the result of the first one."""

    seconds: float
    median: float
    runs: int
    result: Any

    @property
    def ms(self) -> float:
        """The time in milliseconds."""
        return self.seconds * 1e3


def interleave(
    calls: Mapping[str, Callable[[], Any]],
    *,
    repeats: int = 5,
    burst: int = 3,
    patience: float = 4.0,
    collector: bool = False,
) -> dict[str, Timed]:
    """Run calls in turn, `repeats` rounds after one warm-up; return the best time of each.

    A turn is `burst` consecutive runs, so that a short call is not timed with the caches that a
    long one left. Every round starts with a different call, so that the order varies. A call that
    has used `patience` seconds is skipped, but runs at least once after the warm-up. Python's
    garbage collector is off unless `collector` is given.
    """
    names = list(calls)
    results: dict[str, Any] = {}
    spent: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    for name, call in calls.items():
        seconds, results[name] = _run(call, collector)
        spent[name], times[name] = seconds, []
    for turn in range(repeats):
        for at in range(len(names)):
            name = names[(turn + at) % len(names)]
            for _ in range(burst):
                if spent[name] < patience or not times[name]:
                    seconds = _run(calls[name], collector)[0]
                    spent[name] += seconds
                    times[name].append(seconds)
    return {
        name: Timed(min(times[name]), median(times[name]), len(times[name]), results[name])
        for name in calls
    }


def best(call: Callable[[], Any], *, repeats: int = 3) -> Timed:
    """The best time of one call after a warm-up run."""
    return interleave({"": call}, repeats=repeats, burst=1)[""]


@contextmanager
def fresh_memory() -> Iterator[None]:
    """Allocate every array of a megabyte or more from the system, and return it when freed.

    Only on Linux with glibc. Afterwards the threshold is the maximum, 32 MiB.
    """
    try:
        set_limit = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        yield
        return
    set_limit(_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        set_limit(_MMAP_THRESHOLD, 32 << 20)


def _run(call: Callable[[], Any], collector: bool) -> tuple[float, Any]:
    enabled = gc.isenabled()
    if collector:
        gc.freeze()  # exclude objects that existed before the call
    else:
        gc.disable()
    try:
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
    finally:
        if collector:
            gc.unfreeze()
        if enabled:
            gc.enable()
    return seconds, result
