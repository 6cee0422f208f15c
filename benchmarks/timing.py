"""Timing that treats all alike: in turn, in one run, the best of several, without the collector."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_MMAP_THRESHOLD = -3  # glibc's number for it


@dataclass(frozen=True, slots=True)
class Timed:
    """The best time of some runs, and what the first one gave."""

    seconds: float
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
    """Run all calls in turn, `repeats` rounds after one to warm up; the best time of each.

    A turn is `burst` runs on end, so that short calls are not timed with the caches that a long
    one left behind. Every round starts with another call, so that none always follows the same
    one. A call that has used up `patience` seconds sits out, but runs at least once after the
    first. Python's garbage collector is off unless `collector` is given.
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
    return {name: Timed(min(times[name]), len(times[name]), results[name]) for name in calls}


def best(call: Callable[[], Any], *, repeats: int = 3) -> Timed:
    """The best time of one call after a first run to warm up."""
    return interleave({"": call}, repeats=repeats, burst=1)[""]


@contextmanager
def fresh_memory() -> Iterator[None]:
    """Every array of a megabyte or more comes from the system, and goes back when it is freed.

    On Linux with glibc; elsewhere nothing changes. Afterwards the limit is the largest one.
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
        gc.freeze()  # what was there before is none of the call's
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
