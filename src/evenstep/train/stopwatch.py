"""Stopwatches: elapsed time and busy time."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Elapsed seconds inside `with` blocks, accumulated."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


class Busy:
    """Seconds that this rank was busy inside `with` blocks, without waiting for other ranks.

    On a CPU, the CPU time of this thread. On a GPU, the time between two events of the stream;
    only reading `seconds` synchronises with the device.
    """

    def __init__(self, device: torch.device | str | None) -> None:
        self._events: list[tuple[Any, Any]] = []
        self._each: list[float] = []
        self._began = 0.0
        self._cuda = device is not None and torch.device(device).type == "cuda"

    def __enter__(self) -> Busy:
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._events.append((begin, end))
        else:
            self._began = time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._each.append(time.thread_time() - self._began)

    @property
    def each(self) -> tuple[float, ...]:
        """Busy seconds of each block."""
        if self._events:
            self._events[-1][1].synchronize()
            self._each += [begin.elapsed_time(end) / 1e3 for begin, end in self._events]
            self._events.clear()
        return tuple(self._each)

    @property
    def seconds(self) -> float:
        """Busy seconds so far."""
        return sum(self.each)
