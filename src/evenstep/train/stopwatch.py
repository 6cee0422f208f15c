"""Stopwatches: how long, and how long busy."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Seconds spent inside a `with`, over all of its uses."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


class Busy:
    """Seconds for which this rank worked inside a `with`; waiting for others does not count.

    On a CPU, this thread's own time. On a GPU, the time between two marks in its queue, read when
    somebody asks, so that nothing waits for it.
    """

    def __init__(self, device: torch.device | str | None) -> None:
        self._marks: list[tuple[Any, Any]] = []
        self._seconds = self._began = 0.0
        self._cuda = device is not None and torch.device(device).type == "cuda"

    def __enter__(self) -> Busy:
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._marks.append((begin, end))
        else:
            self._began = time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._marks[-1][1].record()
        else:
            self._seconds += time.thread_time() - self._began

    @property
    def seconds(self) -> float:
        """So far."""
        if self._marks:
            self._marks[-1][1].synchronize()
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._marks) / 1e3
            self._marks.clear()
        return self._seconds
